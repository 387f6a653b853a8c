/**
 * What the SDK adds to the HTTP client that it uses, in CPU: one acquire and one release, over `fetch` doing the same two
 * requests by hand and reading their answers. Side by side in one process, A B C A B C; medians of
 * many short rounds.
 *
 *     node benchmarks/cost_per_call.mjs [--rounds 60] [--pairs 200] [--at-once 1]
 *
 * The server is a process of its own that gives constant answers. Prints one line of JSON; exits 1 when acquire and release
 * cost more than 1.25 times the bare requests.
 */

import { fork } from 'node:child_process';
import { once } from 'node:events';
import { createServer } from 'node:http';
import { numbers, VolcanoAuth } from './rig.mjs';

const HEADERS = { 'content-type': 'application/json', 'x-volcano-expires-in': '30.000' };
const GRANT = '{"expires_at":"2026-11-29T12:00:00.000Z","fencing_token":1795953600000000}';
const BAR = 1.25;

if (process.send) serve();
else await measure();

function serve() {
  const server = createServer((request, response) => {
    request.resume();
    if (request.method === 'DELETE') response.writeHead(204).end();
    else response.writeHead(201, HEADERS).end(GRANT);
  });
  server.listen(0, '127.0.0.1', () => process.send(server.address().port));
  process.on('disconnect', () => process.exit());
}

async function measure() {
  const { rounds, pairs, 'at-once': atOnce } = numbers({ rounds: 60, pairs: 200, 'at-once': 1 });
  const server = fork(new URL(import.meta.url).pathname, { execArgv: [] });
  const [port] = await once(server, 'message');
  const apiUrl = `http://127.0.0.1:${port}`;
  const { locks } = new VolcanoAuth({ apiUrl, accessToken: 'sk-bench' });

  const send = async (method, key, body) => {
    const response = await fetch(`${apiUrl}/locks/${key}/lease`, {
      method,
      headers: {
        Authorization: 'Bearer sk-bench',
        'Content-Type': 'application/json',
        'X-Volcano-Lock-Token': '0b0f3f7e-8c1c-4e9c-9c53-0d4c2f6b3a11',
        'X-Volcano-Request-Id': '7c1de0a6-54f3-4f5e-9c3e-0d8b0f6f9d01',
      },
      ...(body && { body }),
    });
    return response.text();
  };
  const ways = {
    bare: async (key) => {
      JSON.parse(await send('POST', key, '{"ttl_seconds":30}'));
      await send('DELETE', key);
    },
    acquire_release: async (key) => {
      const { lease, error } = await locks.acquire(key, { ttl: 30 });
      if (error || (await locks.release(key, lease)).error) throw new Error('the measure failed');
    },
    with_lock: async (key) => {
      const { error } = await locks.withLock(key, { ttl: 30 }, () => key);
      if (error) throw error;
    },
  };
  const cost = Object.fromEntries(Object.keys(ways).map((name) => [name, []]));
  for (let round = -5; round < rounds; round++) {
    for (const [name, way] of Object.entries(ways)) {
      const cpu = process.cpuUsage();
      await Promise.all(
        Array.from({ length: atOnce }, async (_, worker) => {
          for (let n = 0; n < pairs / atOnce; n++) await way(`k${worker}-${n}`);
        }),
      );
      const { user, system } = process.cpuUsage(cpu);
      if (round >= 0) cost[name].push((user + system) / pairs); // the first rounds warm up
    }
  }
  server.disconnect();

  const ratio = (name) => cost[name].map((value, round) => value / cost.bare[round]);
  const result = {
    at_once: atOnce,
    microseconds: Object.fromEntries(Object.entries(cost).map(([name, values]) => [name, spread(values, 0)])),
    over_bare: { acquire_release: spread(ratio('acquire_release'), 2), with_lock: spread(ratio('with_lock'), 2) },
    bar: BAR,
  };
  console.log(JSON.stringify(result));
  process.exitCode = result.over_bare.acquire_release.median > BAR ? 1 : 0;
}

function spread(values, digits) {
  const sorted = [...values].sort((a, b) => a - b);
  const round = (value) => Number(value.toFixed(digits));
  return { median: round(sorted[sorted.length >> 1]), least: round(sorted[0]), most: round(sorted.at(-1)) };
}

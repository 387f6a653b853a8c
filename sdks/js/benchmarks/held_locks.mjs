/**
 * Many locks held at once by one client of one process, against a real, durable server: is one lost?
 *
 *     node benchmarks/held_locks.mjs [--locks 5000] [--ttl 30] [--seconds 75]
 *
 * Prints one line of JSON and exits 1 when a lock was lost, was not renewed, or was not released.
 */

import { monitorEventLoopDelay } from 'node:perf_hooks';
import { setTimeout as sleep } from 'node:timers/promises';
import { numbers, open, VolcanoAuth, withServer } from './rig.mjs';

const { locks: count, ttl, seconds } = numbers({ locks: 5_000, ttl: 30, seconds: 75 });

const result = await withServer(async (options) => {
  let requests = 0; // renewals of one lease or of many
  const counted = (url, init) => {
    if (init.method === 'PATCH') requests += 1;
    return fetch(url, init);
  };
  const { locks } = new VolcanoAuth({ ...options, fetch: counted });
  let entered = 0;
  let lost = 0;
  let unrenewed = 0;
  let end;
  const over = new Promise((resolve) => {
    end = resolve;
  });
  const hold = async ({ signal, lease }) => {
    entered += 1;
    const { expiresAt } = lease;
    signal.addEventListener('abort', () => {
      lost += 1;
    });
    await over;
    if (lease.expiresAt === expiresAt) unrenewed += 1;
  };
  const started = performance.now();
  const results = Array.from({ length: count }, (_, n) => locks.withLock(`k${n}`, { ttl }, hold));
  while (entered < count) await sleep(50);
  const acquired = performance.now();

  const delay = monitorEventLoopDelay({ resolution: 10 });
  delay.enable();
  const cpu = process.cpuUsage();
  let sockets = 0;
  for (let second = 0; second < seconds; second++) {
    await sleep(1_000);
    sockets = Math.max(sockets, open().sockets);
  }
  delay.disable();
  const { user, system } = process.cpuUsage(cpu);

  const ending = performance.now();
  end();
  const outcomes = await Promise.all(results);
  const failed = outcomes.filter(({ acquired, error, releaseError }) => !acquired || error || releaseError).length;
  const milliseconds = (nanoseconds) => Number((nanoseconds / 1e6).toFixed(1));
  return {
    locks: count,
    ttl,
    seconds,
    lost,
    unrenewed,
    failed,
    renewal_requests: requests,
    most_sockets: sockets,
    loop_delay_ms: {
      p50: milliseconds(delay.percentile(50)),
      p99: milliseconds(delay.percentile(99)),
      max: milliseconds(delay.max),
    },
    cpu_share: Number(((user + system) / 1e6 / seconds).toFixed(2)),
    acquire_seconds: Number(((acquired - started) / 1e3).toFixed(1)),
    release_seconds: Number(((performance.now() - ending) / 1e3).toFixed(1)),
    heap_mb: Math.round(process.memoryUsage().heapUsed / 2 ** 20),
  };
});

console.log(JSON.stringify(result));
process.exitCode = result.lost + result.unrenewed + result.failed > 0 ? 1 : 0;

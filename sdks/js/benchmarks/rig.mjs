/** What both measurements stand on: a real, durable server, and what this process has open. */

import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { mkdtemp, rm } from 'node:fs/promises';
import { createRequire } from 'node:module';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { parseArgs } from 'node:util';
import { serverProgram } from '../tests/support.mjs';

export const { VolcanoAuth } = createRequire(import.meta.url)('../build/index.js');

/** The command line's whole numbers: {locks: 5000} and `--locks 200` make {locks: 200}. */
export function numbers(defaults) {
  const options = Object.fromEntries(Object.keys(defaults).map((name) => [name, { type: 'string' }]));
  const { values } = parseArgs({ options });
  return Object.fromEntries(Object.entries(defaults).map(([name, value]) => [name, Number(values[name] ?? value)]));
}

/** Calls `work` with the options of a client of `volcano-server dev` on a file of its own. */
export async function withServer(work) {
  const folder = await mkdtemp(join(tmpdir(), 'volcano-bench-'));
  const store = `sqlite:///${join(folder, 'locks.db')}`;
  const server = spawn(serverProgram(), ['dev', '--json', '--port', '0', '--quota', '0', '--store', store], {
    stdio: ['ignore', 'pipe', 'inherit'],
  });
  try {
    const [line] = await once(createInterface({ input: server.stdout }), 'line');
    const { url, service_key } = JSON.parse(line);
    return await work({ apiUrl: url, accessToken: service_key });
  } finally {
    server.kill();
    await once(server, 'exit');
    await rm(folder, { recursive: true });
  }
}

/** How many sockets and timers this process has. */
export function open() {
  const names = process.getActiveResourcesInfo();
  const count = (pattern) => names.filter((name) => pattern.test(name)).length;
  return { sockets: count(/TCPSocket/), timers: count(/Timeout|Immediate/) };
}

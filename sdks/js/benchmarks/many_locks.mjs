/**
 * Many `withLock` calls in a row on one client and under one signal: do sockets, listeners, timers or the heap grow?
 *
 *     node --expose-gc benchmarks/many_locks.mjs [--locks 10000]
 *
 * Prints one line of JSON and exits 1 if they do.
 */

import { getEventListeners } from 'node:events';
import { numbers, open, VolcanoAuth, withServer } from './rig.mjs';

const { locks: count } = numbers({ locks: 10_000 });

const measured = await withServer(async (options) => {
  const { locks } = new VolcanoAuth(options);
  const { signal } = new AbortController();
  const samples = [];
  const started = performance.now();
  for (let n = 1; n <= count; n++) {
    const { error } = await locks.withLock(`k${n % 100}`, { ttl: 30, signal }, () => n);
    if (error) throw error;
    if (n % (count / 10) === 0) {
      globalThis.gc();
      globalThis.gc();
      const heap = Math.round(process.memoryUsage().heapUsed / 1024);
      samples.push({ ...open(), listeners: getEventListeners(signal, 'abort').length, heap });
    }
  }
  const milliseconds = (performance.now() - started) / count;
  return { samples, milliseconds };
});

const { samples, milliseconds } = measured;
const most = (name) => Math.max(...samples.map((sample) => sample[name]));
const [first, last] = [samples[0], samples.at(-1)];
// The HTTP stack keeps a socket and a timer or two of its own; what counts is that they do not add up.
const isFlat =
  most('sockets') <= 1 && most('timers') <= 3 && most('listeners') === 0 && last.heap - first.heap < 0.1 * first.heap;
const result = {
  locks: count,
  ms_per_lock: Number(milliseconds.toFixed(2)),
  most_sockets: most('sockets'),
  most_timers: most('timers'),
  most_listeners: most('listeners'),
  heap_kb: samples.map(({ heap }) => heap),
  flat: isFlat,
};
console.log(JSON.stringify(result));
process.exitCode = isFlat ? 0 : 1;

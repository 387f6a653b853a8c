import assert from 'node:assert/strict';
import { getEventListeners } from 'node:events';
import { afterEach, test } from 'node:test';
import { clocks, ManualClock, settle, until } from './support.mjs';

/** A SystemClock over two clocks and timers that the test moves: {wall, steady} in seconds. */
function arranged() {
  const time = { wall: 1_700_000_000, steady: 50 };
  const timers = new Map(); // id -> {at, every, wake, delay}
  const delays = [];
  let ids = 0;
  const add = (wake, delay) => {
    delays.push(delay);
    timers.set(++ids, { at: time.steady * 1000 + (delay > 2 ** 31 - 1 ? 1 : delay), wake });
    return ids;
  };
  globalThis.performance.now = () => time.steady * 1000;
  globalThis.Date.now = () => time.wall * 1000;
  globalThis.setTimeout = (wake, delay) => add(wake, delay);
  globalThis.clearTimeout = (id) => timers.delete(id);
  /** Lets both clocks run, and the timers that become due. */
  const run = (seconds) => {
    const end = time.steady + seconds;
    for (;;) {
      const [id, next] = [...timers].sort(([, a], [, b]) => a.at - b.at)[0] ?? [];
      if (!next || next.at > end * 1000) break;
      const passed = Math.max(next.at / 1000 - time.steady, 0);
      time.wall += passed;
      time.steady += passed;
      timers.delete(id);
      next.wake();
    }
    time.wall += end - time.steady;
    time.steady = end;
  };
  return { clock: new clocks.SystemClock(), time, timers, delays, run };
}

const real = { now: performance.now, wall: Date.now, setTimeout, clearTimeout };
afterEach(() => {
  globalThis.performance.now = real.now;
  globalThis.Date.now = real.wall;
  Object.assign(globalThis, { setTimeout: real.setTimeout, clearTimeout: real.clearTimeout });
});

test('a suspend counts, though the monotonic clock stood still', () => {
  const { clock, time } = arranged();
  const before = clock.now();

  time.wall += 60;

  assert.ok(Math.abs(clock.now() - before - 60) < 0.001);
});

test('a wall clock set back by an hour changes nothing, and a suspend after it still counts', () => {
  const { clock, time } = arranged();
  const before = clock.now();

  time.wall -= 3_600;
  assert.ok(Math.abs(clock.now() - before) < 0.001);
  time.wall += 60;

  assert.ok(Math.abs(clock.now() - before - 60) < 0.001);
});

test('a wall clock that is slewed back does not slow the clock down', () => {
  const { clock, time } = arranged();
  const before = clock.now();

  for (let second = 0; second < 100; second++) {
    time.steady += 1;
    time.wall += 0.95;
    clock.now();
  }

  assert.ok(Math.abs(clock.now() - before - 100) < 0.001);
});

test('the noise of reading two clocks does not add up', () => {
  const { clock, time } = arranged();
  const before = clock.now();

  for (let look = 0; look < 10_000; look++) {
    time.wall += look % 2 ? 0.001 : -0.001;
    clock.now();
  }

  assert.ok(clock.now() - before < 0.01);
});

test('90 days are slept in slices that no runtime fires at once', () => {
  const { clock, time, timers, delays, run } = arranged();
  let woken = 0;
  clock.at(clock.now() + 90 * 86_400, () => {
    woken += 1;
  });

  for (const day of [1, 30, 89.9]) {
    const step = 50 + day * 86_400 - time.steady;
    time.steady += step;
    time.wall += step;
    run(10);
    assert.equal(woken, 0);
  }
  time.steady += 0.1 * 86_400;
  time.wall += 0.1 * 86_400;
  run(1);

  assert.equal(woken, 1);
  assert.ok(Math.max(...delays) <= 2 ** 31 - 1);
  assert.equal(timers.size, 0);
});

test('what became due during a suspend wakes within a second of the resume', () => {
  const { clock, time, run } = arranged();
  let woken = false;
  clock.at(clock.now() + 20, () => {
    woken = true;
  });

  time.wall += 3_600;
  run(1);

  assert.equal(woken, true);
});

test('a suspend that a look noticed first wakes the timers too', () => {
  const { clock, time, run } = arranged();
  let woken = false;
  clock.at(clock.now() + 20, () => {
    woken = true;
  });

  time.wall += 3_600;
  clock.now();
  run(1);

  assert.equal(woken, true);
});

test('a timer that is early by a fraction does not wake early', () => {
  const { clock, time, timers, run } = arranged();
  let wokenAt = 0;
  const due = clock.now() + 0.5;
  clock.at(due, () => {
    wokenAt = clock.now();
  });

  time.steady += 0.4995;
  time.wall += 0.4995;
  const [[id, early]] = timers;
  timers.delete(id);
  early.wake();
  assert.equal(wokenAt, 0);
  run(0.01);

  assert.ok(wokenAt >= due);
});

test('nothing is left when the last one is cancelled', () => {
  const { clock, timers } = arranged();

  const cancels = [5, 1e9, 0].map((seconds) => clock.at(clock.now() + seconds, () => {}));
  for (const cancel of cancels) cancel();

  assert.equal(timers.size, 0);
});

test('a herd of timers is one timer of the runtime, and each wakes in its turn', () => {
  const { clock, timers, delays, run } = arranged();
  const start = clock.now();
  const woken = [];
  const cancels = Array.from({ length: 1_000 }, (_, n) => {
    const place = (n * 387) % 1_000;
    return clock.at(start + 1 + place / 100, () => woken.push(place));
  });
  for (let n = 0; n < 1_000; n += 2) cancels[n]();

  assert.equal(timers.size, 1);
  assert.ok(delays.length < 5, String(delays.length));
  run(11.5);

  const kept = Array.from({ length: 1_000 }, (_, n) => (n * 387) % 1_000).filter((_, n) => n % 2);
  assert.deepEqual(
    woken,
    kept.sort((one, other) => one - other),
  );
  assert.equal(timers.size, 0);
});

test('one that is due before all the others is not kept waiting', () => {
  const { clock, timers, run } = arranged();
  const woken = [];
  for (const seconds of [10, 0.5, 0.1, 0.3]) clock.at(clock.now() + seconds, () => woken.push(seconds));

  run(0.15);
  assert.deepEqual(woken, [0.1]);
  run(0.4);

  assert.deepEqual(woken, [0.1, 0.3, 0.5]);
  assert.equal(timers.size, 1);
});

test('a timer that throws does not keep the others from waking', () => {
  const { clock, run } = arranged();
  let woken = false;
  clock.at(clock.now() + 0.1, () => {
    throw new Error('mine');
  });
  clock.at(clock.now() + 0.2, () => {
    woken = true;
  });

  assert.throws(() => run(0.15), /mine/);
  run(1);

  assert.equal(woken, true);
});

test('it also works with the timers that are really there', async () => {
  const clock = new clocks.SystemClock();
  const start = clock.now();
  let wokenAt;

  clock.at(start + 0.03, () => {
    wokenAt = clock.now();
  });
  await until(() => wokenAt);

  assert.ok(wokenAt >= start + 0.03);
});

// --- pauses ------------------------------------------------------------------------------------------

test('a pause ends when it is due, when it is cancelled or when it is woken, and leaves nothing', async () => {
  for (const [end, when] of [
    [({ clock }) => clock.advance(5), 5],
    [({ controller }) => controller.abort(), 5],
    [({ wake }) => wake(), 5],
    [({ wake }) => wake(), Number.POSITIVE_INFINITY],
  ]) {
    const all = { clock: new ManualClock(), controller: new AbortController() };
    let isOver = false;
    const pause = clocks.pause(all.clock, all.clock.now() + when, all.controller.signal, (wake) => {
      all.wake = wake;
    });
    void pause.then(() => {
      isOver = true;
    });
    await settle();
    assert.equal(isOver, false);
    assert.equal(all.clock.pending.size, when === 5 ? 1 : 0);

    await end(all);

    await pause;
    assert.equal(all.clock.pending.size, 0);
    assert.equal(getEventListeners(all.controller.signal, 'abort').length, 0);
  }
});

test('a pause that is cancelled before it begins is none', async () => {
  const clock = new ManualClock();

  await clocks.pause(clock, clock.now() + 5, AbortSignal.abort());

  assert.equal(clock.pending.size, 0);
});

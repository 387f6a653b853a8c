import assert from 'node:assert/strict';
import { getEventListeners } from 'node:events';
import { after, test } from 'node:test';
import { arranged, errors, ManualClock, sdk, settle, streams, TOKEN, transports, until, waits } from './support.mjs';

const { Incoming } = transports;
const { Pace, Waiting } = waits;

const unhandled = [];
const onUnhandled = (reason) => unhandled.push(reason);
process.on('unhandledRejection', onUnhandled);
after(() => {
  process.off('unhandledRejection', onUnhandled);
  assert.deepEqual(unhandled, []);
});

const never = Number.POSITIVE_INFINITY;
const refusal = new sdk.ConflictError('held', { status: 409 });
const waiting = (endsAt = 100, pace = new Pace()) => new Waiting(endsAt, refusal, pace);

test('a single waiter tries at once, a crowd within 2 ms for each other one, at most a second', () => {
  for (const [watchers, random, seconds] of [
    [0, 0.9, 0],
    [1, 0.9, 0],
    [2, 0.5, 0.001],
    [101, 0.5, 0.1],
    [501, 0.5, 0.5],
    [10_000, 0.5, 0.5],
  ]) {
    assert.ok(Math.abs(waits.spread(watchers, random) - seconds) < 1e-9, `${watchers} ${random}`);
  }
});

test('a key is read every one to five seconds, and when its lease will be over where that is sooner', () => {
  for (const [random, left, seconds] of [
    [0, undefined, 1],
    [0.5, undefined, 3],
    [0.5, 30, 3],
    [0.5, 2, 2],
    [0.5, 0.01, 0.1],
    [0.5, -0.9, 0.1],
    [0.5, -3_600, 0.1],
    [0.5, Number.NaN, 3],
  ]) {
    assert.equal(waits.readDelay(random, left), seconds, `${random} ${left}`);
  }
});

test('what failed is tried again after 0.1 s, doubling to 5 s, ±50 %', () => {
  for (const [failures, random, seconds] of [
    [1, 0.5, 0.1],
    [2, 0.5, 0.2],
    [6, 0.5, 3.2],
    [7, 0.5, 5],
    [5_000, 0.5, 5],
    [1, 0, 0.05],
    [7, 0.999999, 7.499995],
  ]) {
    assert.ok(Math.abs(streams.backoff(failures, random) - seconds) < 1e-9, `${failures} ${random}`);
  }
});

test('without hope it sleeps to its end, and that is contention', () => {
  const one = waiting();

  assert.equal(one.wakesAt, 100);
  assert.equal(one.outcome(99.9), null);
  assert.equal(one.outcome(100), refusal);
  assert.equal(waiting(never).wakesAt, never);
});

test('the first hope counts, until a try has begun', () => {
  const one = waiting();

  one.hope(5);
  one.hope(7);
  assert.equal(one.wakesAt, 5);
  one.trying();
  assert.equal(one.wakesAt, 100);
  one.hope(6);

  assert.equal(one.wakesAt, 6);
});

test('the latest refusal is the outcome', () => {
  const one = waiting();
  const latest = new sdk.ConflictError('still held', { status: 409 });

  one.trying();
  one.refused(latest);

  assert.equal(one.outcome(100), latest);
  assert.equal(one.tryAt, never);
});

test('a failed try is made again, each time later; a refusal begins anew', () => {
  const one = waiting();
  const error = new sdk.TransportError('gone');
  const delays = [];
  for (const [n, answer] of [error, error, error, refusal, error].entries()) {
    one.trying();
    if (answer === refusal) one.refused(answer);
    else {
      one.failed(answer, 10 + n, 0.5);
      one.hope(10 + n);
    }
    delays.push(one.tryAt - 10 - n);
  }

  assert.deepEqual(
    delays.map((delay) => Math.round(delay * 1000) / 1000),
    [0.1, 0.2, 0.4, never, 0.1],
  );
});

test('not before Retry-After, whatever gives hope', () => {
  const one = waiting();

  one.trying();
  one.failed(new sdk.RateLimitedError('slowly', { status: 429, retryAfter: 7 }), 10, 0.5);
  one.hope(11);
  assert.equal(one.tryAt, 17);
  one.trying();
  one.hope(18);
  assert.equal(one.tryAt, 18);
  one.failed(new sdk.TransportError('gone'), 12, 0.5);
  assert.equal(one.tryAt, 18);
  one.read(new sdk.RateLimitedError('slowly', { status: 429, retryAfter: 60 }), 12);

  assert.equal(one.tryAt, 72);
});

test('what one was told to wait holds for all that wait for the key', () => {
  const pace = new Pace();
  const [one, other] = [waiting(100, pace), waiting(100, pace)];
  other.hope(11);

  one.failed(new sdk.RateLimitedError('slowly', { status: 429, retryAfter: 7 }), 10, 0.5);
  one.failed(new sdk.TransportError('gone'), 10, 0.5);

  assert.equal(other.tryAt, 17);
});

test('what will not pass is what it has come to, whatever a try under way is answered', () => {
  const wait = waiting();
  const forbidden = new sdk.PermissionDeniedError('no', { status: 403 });
  wait.trying();
  wait.read(forbidden, 10);
  wait.refused(refusal);

  assert.equal(wait.outcome(10), forbidden);
});

test('if it ends while the last outcome was an error, that is what it has come to', () => {
  const one = waiting();
  const error = new sdk.ServerError('oh', { status: 500 });

  one.trying();
  one.failed(error, 10, 0.5);
  assert.equal(one.outcome(100), error);
  one.read(null, 20);
  assert.equal(one.outcome(100), refusal, 'a read has said since that it is held');
  one.read(error, 30);

  assert.equal(one.outcome(100), error);
});

test('a key that somebody took gives no hope, but a try that failed is owed all the same', () => {
  const [hopeful, owing] = [waiting(), waiting()];
  hopeful.hope(5);
  owing.trying();
  owing.failed(new sdk.TransportError('gone'), 4, 0.5);
  owing.hope(4);

  hopeful.despair();
  owing.despair();

  assert.equal(hopeful.tryAt, never);
  assert.ok(owing.tryAt < 5);
});

test('what will not change ends it at once, in a try and in a read', () => {
  for (const [status, isPassing] of [
    [302, false],
    [400, false],
    [401, false],
    [403, false],
    [404, false],
    [405, false],
    [413, false],
    [429, true],
    [500, true],
    [503, true],
    [null, false], // none of the server's: the client was closed
  ]) {
    const error = new (errors.fromStatus(status))('a sentence', { status });
    const [tried, read] = [waiting(), waiting()];
    tried.failed(error, 10, 0.5);
    read.read(error, 10);

    assert.equal(tried.outcome(10), isPassing ? null : error, String(status));
    assert.equal(read.outcome(10), isPassing ? null : error, String(status));
  }
  assert.equal(streams.isPassing(new sdk.TransportError('gone')), true);
});

test('one that may not try again is over', () => {
  const one = waiting(never);

  one.end(10);

  assert.equal(one.outcome(10), refusal);
});

// --- with a server -----------------------------------------------------------------------------------

/** Calls that wait for `k`, which is held: their first tries were refused. */
async function waited(t, { calls = 1, call = 'acquire', keys = Array(calls).fill('k'), client, ...options } = {}) {
  const all = await arranged(t, client);
  const { server, locks } = all;
  const asked = { ttl: 30, wait: 60, ...options };
  const results = keys.map((key) =>
    call === 'acquire' ? locks.acquire(key, asked) : locks.withLock(key, asked, ({ lease }) => lease),
  );
  let first;
  for (const _ of keys) {
    const one = await server.nextCall();
    first ??= one;
    one.refuse(409, 'lock_held');
  }
  return { ...all, results, result: results[0], first };
}

const HELD = { held: true, expires_at: '2026-12-01T01:00:00.000Z', fencing_token: 7 };

/** Lets an answer, or the loss of one, be taken in: what is to be done next is put off by a timer. */
async function takenIn({ pending }, answer) {
  const before = new Set(pending);
  answer();
  await until(() => [...pending].some((timer) => !before.has(timer)));
}

/** Lets the next timer come. */
async function toNextTimer(clock) {
  const next = Math.min(...[...clock.pending].map(({ when }) => when));
  await clock.advance(next - clock.now() + 1e-6);
}

/** The same, with its stream open and refused once more. */
async function listening(t, options) {
  const all = await waited(t, options);
  const stream = await all.server.next();
  stream.stream();
  const second = await all.server.next();
  second.refuse(409, 'lock_held');
  await settle();
  return { ...all, stream, second };
}

/** That nothing is left of a wait: no stream, no timer. */
async function over({ clock, stream }) {
  await until(() => stream.isClosed, 'the stream is closed');
  await settle();
  assert.equal(clock.pending.size, 0);
}

test('without `wait` a held key is told at once, and nothing else is sent', async (t) => {
  for (const wait of [undefined, 0]) {
    const { server, result, clock } = await waited(t, { wait });

    assert.deepEqual(await result, { acquired: false, lease: null, error: null });
    await settle();
    assert.equal(server.count, 1);
    assert.equal(clock.pending.size, 0);
  }
});

test('a wait that is none is refused before anything is sent', async (t) => {
  const { server, locks } = await arranged(t);

  for (const [wait, name] of [
    [-1, 'RangeError'],
    [Number.NaN, 'RangeError'],
    [Number.NEGATIVE_INFINITY, 'RangeError'],
    ['5', 'TypeError'],
    [5n, 'TypeError'],
    [null, 'TypeError'],
  ]) {
    const told = { name, message: /^wait must be a number of seconds from 0, or Infinity; got / };
    await assert.rejects(locks.acquire('k', { ttl: 30, wait }), told);
    await assert.rejects(locks.withLock('k', { ttl: 30, wait }, assert.fail), told);
  }
  assert.equal(server.count, 0);
});

test('once the stream is open it tries again: a release before that is not missed', async (t) => {
  const { server, result, first } = await waited(t);
  const stream = await server.next();
  assert.equal(stream.what, 'GET /lock-events?key=k');
  assert.equal(server.count, 2);
  stream.stream();
  const second = await server.next();
  second.grant(8);

  const { acquired, lease } = await result;
  assert.deepEqual([acquired, lease.fencingToken], [true, 8]);
  assert.equal(second.headers['x-volcano-lock-token'], first.headers['x-volcano-lock-token']);
  assert.notEqual(second.headers['x-volcano-request-id'], first.headers['x-volcano-request-id']);
  await until(() => stream.isClosed);
});

test('whatever frees the key is a reason to try, and nothing else is', async (t) => {
  for (const type of ['released', 'force_released', 'lapsed', 'reset']) {
    const all = await listening(t);
    const { server, stream, result } = all;
    stream.tell('acquired');
    stream.tell('released', { key: 'other' });
    stream.tell('queued');
    stream.send(':\n\n');
    await settle();
    assert.equal(server.count, 3);

    stream.tell(type, { fencing_token: 9 });
    (await server.next()).grant(10);

    assert.equal((await result).acquired, true, type);
    await over(all);
  }
});

test('what is released while a try is under way calls for another', async (t) => {
  const { server, stream, result } = await listening(t);
  stream.tell('released', { fencing_token: 8 });
  const third = await server.next();

  stream.tell('released', { fencing_token: 9 });
  await settle();
  third.refuse();
  (await server.next()).grant(10);

  assert.equal((await result).acquired, true);
});

test('a crowd does not try at once, and not at all when the key was taken meanwhile', async (t) => {
  const { server, stream, clock, result } = await listening(t);
  stream.tell('released', { fencing_token: 8, watchers: 501 });
  await clock.advance(0.49);
  assert.equal(server.count, 3);
  stream.tell('acquired', { fencing_token: 9, watchers: 501 });
  await clock.advance(1);
  assert.equal(server.count, 3);

  stream.tell('released', { fencing_token: 9, watchers: 501 });
  await clock.advance(0.6);
  (await server.next()).grant(10);

  assert.equal((await result).acquired, true);
});

test('after a reset and after a reconnect a crowd does not try at once either', async (t) => {
  const { server, stream, clock, result } = await listening(t);
  stream.tell('acquired', { fencing_token: 9, watchers: 501 }, '42');
  stream.tell('reset');
  await clock.advance(0.49);
  assert.equal(server.count, 3);
  await clock.advance(0.02);
  (await server.next()).refuse();
  await settle();

  stream.lose();
  await until(() => clock.pending.size === 3); // the end of the wait, the pause, the next read
  await clock.advance(0.11);
  (await server.next()).stream();
  await until(() => clock.pending.size === 3); // the end of the wait, the silence, the try
  await clock.advance(0.49);
  assert.equal(server.count, 5);
  await clock.advance(0.02);
  (await server.next()).grant(10);

  assert.equal((await result).acquired, true);
});

test('word of an acquisition that came late does not take the hope of a later release', async (t) => {
  const { server, stream, clock, result } = await listening(t);
  stream.tell('released', { fencing_token: 8, watchers: 501 });
  stream.tell('acquired', { fencing_token: 8, watchers: 501 });
  await clock.advance(0.6);
  (await server.next()).grant(9);

  assert.equal((await result).acquired, true);
});

test('when the time is over the answer is contention', async (t) => {
  for (const call of ['acquire', 'withLock']) {
    const all = await listening(t, { call, wait: 10.5 });
    await all.clock.advance(10.4);
    all.stream.send(':\n\n');
    await all.clock.advance(0.2);

    const { acquired, error } = await all.result;
    assert.deepEqual([acquired, error], [false, null]);
    assert.equal(all.server.count, 3);
    await over(all);
  }
});

test("the lease's time starts with the try that got it", async (t) => {
  const { server, stream, clock, locks, result } = await listening(t, { wait: 1_000 });
  for (let n = 0; n < 10; n++) {
    await clock.advance(30);
    stream.send(':\n\n');
    await settle();
  }
  stream.tell('released');
  (await server.next()).grant(8);

  const { lease, error } = await result;
  assert.equal(error, null);
  const renewed = locks.renew('k', lease, { ttl: 30 });
  (await server.next()).grant(8);
  assert.equal((await renewed).error, null);
});

test('withLock renews from the try that got it', async (t) => {
  const { server, clock, locks } = await arranged(t);
  let open;
  const result = locks.withLock(
    'k',
    { ttl: 30, wait: 60 },
    () =>
      new Promise((resolve) => {
        open = resolve;
      }),
  );
  (await server.next()).refuse();
  const stream = await server.next();
  await clock.advance(0.5);
  stream.stream();
  (await server.next()).grant(8);
  await until(() => open);
  await clock.advance(9.9);
  assert.equal(server.count, 3);
  await clock.advance(0.2);
  const renewal = await server.next();
  renewal.grant(8);
  open('done');
  (await server.next()).released();

  assert.equal(renewal.what, 'PATCH /locks/k/lease');
  assert.deepEqual(await result, { acquired: true, data: 'done', error: null });
});

// --- one stream --------------------------------------------------------------------------------------

test('many that wait for a key share a stream, and one try speaks for all', async (t) => {
  const { server, stream, clock, results } = await listening(t, { calls: 20, wait: 600 });
  await clock.advance(5);
  assert.equal(server.count, 22);

  for (let n = 0; n < 20; n++) {
    stream.tell('released', { fencing_token: 8 + n });
    (await server.next()).grant(9 + n);
    stream.tell('acquired', { fencing_token: 9 + n });
    await clock.advance(5);
  }

  const fencingTokens = (await Promise.all(results)).map(({ lease }) => lease.fencingToken);
  assert.deepEqual(fencingTokens, [9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28]);
  assert.equal(server.count, 42);
  await until(() => stream.isClosed);
});

test('of those that wait for a key one tries at a time, however late its answer', async (t) => {
  const { server, stream, clock, results } = await listening(t, { calls: 2 });
  stream.tell('released');
  const late = await server.next();
  stream.tell('released');
  await clock.advance(3);
  assert.equal(server.count, 5);
  late.refuse();
  (await server.next()).grant(8);

  assert.equal((await results[0]).lease.fencingToken, 8);
  await settle();
  assert.equal(server.count, 6);
  assert.equal(stream.isClosed, false);
});

/** One that listens, and four that came later, whose own second tries are under way. */
async function joined(t) {
  const all = await listening(t);
  const { server, locks, results } = all;
  const come = () => Promise.all(Array.from({ length: 4 }, () => server.next()));
  for (let n = 0; n < 4; n++) results.push(locks.acquire('k', { ttl: 30, wait: 30 }));
  for (const asked of await come()) asked.refuse(409, 'lock_held');
  return { ...all, seconds: await come() };
}

test('of many tries that failed one is made again, by the first, not before the latest Retry-After', async (t) => {
  const { server, clock, stream, results, seconds } = await joined(t);
  for (const [n, asked] of seconds.entries()) {
    await takenIn(clock, () => asked.refuse(429, 'lock_rate_limited', { 'retry-after': String(7 - n) }));
  }
  await clock.advance(6.9);
  assert.equal(server.count, 11);
  await clock.advance(0.2);
  const again = await server.next();
  await clock.advance(1);
  assert.equal(server.count, 12);
  await takenIn(clock, () => again.refuse(429, 'lock_rate_limited'));
  await clock.advance(5);
  (await server.next()).grant(8);
  assert.equal((await results[0]).lease.fencingToken, 8);

  await clock.advance(10);
  assert.equal(server.count, 13, 'what it has found holds for all');
  stream.tell('released', { fencing_token: 8 });
  (await server.next()).grant(9);
  assert.equal((await results[1]).lease.fencingToken, 9);
});

test('what failed is made again no more once another try has found the key held', async (t) => {
  const { server, clock, results, seconds } = await joined(t);
  const refusals = [429, 429, 429, 409];
  for (const [n, asked] of seconds.entries()) await takenIn(clock, () => asked.refuse(refusals[n], 'x'));
  await clock.advance(30);

  assert.equal(server.count, 11);
  for (const { acquired, error } of await Promise.all(results.slice(1)))
    assert.deepEqual([acquired, error], [false, null]);
});

test('what failed is told to who tried, and to nobody else', async (t) => {
  const { clock, results, seconds } = await joined(t);
  const refusals = [409, 409, 409, 429];
  for (const [n, asked] of seconds.entries()) {
    await takenIn(clock, () => asked.refuse(refusals[n], 'x', { 'retry-after': '50' }));
  }
  await clock.advance(30);

  const errors = (await Promise.all(results.slice(1))).map(({ error }) => error?.constructor);
  assert.equal(errors.filter((kind) => kind === sdk.RateLimitedError).length, 1);
  assert.equal(errors.filter((kind) => kind === undefined).length, 3);
});

test('one that leaves passes on what it leaves untried', async (t) => {
  const controller = new AbortController();
  const { server, locks, stream, clock, result } = await listening(t, { signal: controller.signal });
  const others = [1, 2].map(() => locks.acquire('k', { ttl: 30, wait: 60 }));
  for (let n = 0; n < 4; n++) (await server.next()).refuse();
  await settle();

  stream.tell('released', { watchers: 501 });
  await settle();
  controller.abort();
  await result;
  await clock.advance(0.6);
  (await server.next()).grant(8);

  assert.equal((await others[0]).lease.fencingToken, 8);
});

test('one that leaves while its try is under way has another make it', async (t) => {
  const controller = new AbortController();
  const { server, locks, stream, clock, result } = await listening(t, { signal: controller.signal });
  const other = locks.acquire('k', { ttl: 30, wait: 60 });
  for (let n = 0; n < 2; n++) (await server.next()).refuse();
  await settle();

  stream.tell('released');
  await server.next();
  controller.abort();
  await clock.advance(2); // so long its answer is waited for
  (await server.next()).released();
  await result;
  (await server.next()).grant(9);

  assert.equal((await other).lease.fencingToken, 9);
});

test('a key that the stream does not cover: a wider one is opened before the old one is closed', async (t) => {
  const { server, locks, stream, result } = await listening(t);
  stream.tell('acquired', {}, '42');
  const other = locks.acquire('other', { ttl: 30, wait: 60 });
  (await server.next()).refuse();
  const wider = await server.next();
  assert.equal(wider.what, 'GET /lock-events?key=k&key=other');
  assert.equal(wider.headers['last-event-id'], undefined);
  assert.equal(stream.isClosed, false);
  wider.stream();
  (await server.next()).refuse();
  await until(() => stream.isClosed);
  assert.equal(wider.isClosed, false);

  for (const key of ['k', 'other']) {
    wider.tell('released', { key });
    const again = await server.next();
    assert.equal(again.what, `POST /locks/${key}/lease`);
    again.grant(8);
  }

  assert.deepEqual([(await result).acquired, (await other).acquired], [true, true]);
  await until(() => wider.isClosed);
  assert.equal(server.count, 8);
});

test('a key that the stream covers anyway gets none of its own, and is tried at once', async (t) => {
  const all = await waited(t, { keys: ['a', 'b'], wait: 5 });
  const { server, locks, clock } = all;
  const streams = [];
  const nextTry = async () => {
    for (;;) {
      const asked = await server.next();
      if (asked.what.startsWith('POST')) return asked;
      if (asked.what.startsWith('GET /lock-events')) {
        streams.push(asked);
        asked.stream();
      } else {
        asked.answer(200, { held: true }); // a look, if there was a second stream
      }
    }
  };
  for (let n = 0; n < 2; n++) (await nextTry()).refuse();
  const stays = locks.acquire('a', { ttl: 30, wait: 60 });
  for (let n = 0; n < 2; n++) (await nextTry()).refuse();
  await clock.advance(5.1);
  await Promise.all(all.results);
  const opened = streams.length;

  const again = locks.acquire('b', { ttl: 30, wait: 60 });
  (await nextTry()).refuse();
  (await nextTry()).grant(8);

  assert.equal((await again).acquired, true);
  assert.equal(streams.length, opened);
  streams.at(-1).tell('released', { key: 'a' });
  (await nextTry()).grant(9);
  assert.equal((await stays).acquired, true);
});

test('what was under way on the old stream is not lost with it', async () => {
  const clock = new ManualClock();
  const opened = [];
  const open = (_, cancel) =>
    new Promise((resolve) => {
      let ends;
      const body = new ReadableStream({
        start(controller) {
          ends = controller;
        },
      });
      const send = (text) => ends.enqueue(new TextEncoder().encode(text));
      opened.push({ send, arrive: () => resolve(new Incoming(body, clock, new AbortController(), cancel)) });
    });
  const room = new waits.Waits({
    clock,
    open,
    timeout: 10,
    random: () => 0.5,
    subscribe: () => ({}),
    read: assert.fail,
  });
  const wait = (key) => {
    const tried = [];
    const attempt = async () => {
      tried.push(key);
      throw refusal;
    };
    void room.wait({ key, endsAt: never, refusal, cancel: undefined, attempt, isWorthAnother: () => true });
    return tried;
  };
  const tried = wait('a');
  await settle();
  opened[0].arrive();
  await settle();
  wait('b');
  await settle();
  assert.deepEqual(tried, ['a']);

  opened[1].arrive();
  setImmediate(() => opened[0].send('event: released\ndata: {"key":"a","fencing_token":7,"at":"x","watchers":1}\n\n'));
  await settle();

  assert.deepEqual(tried, ['a', 'a']);
});

test('what it had still on its way is made good by one look at the key', async (t) => {
  const { server, clock, locks, stream, result } = await listening(t);
  const held = { held: true, expires_at: '2026-12-01T01:00:00.000Z', fencing_token: 7 };
  const widen = async (key) => {
    void locks.acquire(key, { ttl: 30, wait: 60 });
    (await server.next()).refuse();
    (await server.next()).stream();
    (await server.next()).refuse();
    await settle();
  };
  await widen('b');
  await until(() => stream.isClosed);
  await clock.advance(2);
  await widen('c'); // does not put the look off
  await clock.advance(1);
  const look = await server.next();
  assert.equal(look.what, 'GET /locks/k');
  look.answer(200, held);
  await clock.advance(2);
  const other = await server.next();
  assert.equal(other.what, 'GET /locks/b');
  other.answer(200, held);
  await settle();
  await clock.advance(20);
  assert.equal(server.count, 11);

  await widen('d');
  await clock.advance(3);
  const looks = [await server.next(), await server.next(), await server.next()];
  for (const { what } of looks) assert.match(what, /^GET/);
  looks.find(({ what }) => what === 'GET /locks/k').answer(200, { held: false });
  const again = await server.next();
  assert.equal(again.what, 'POST /locks/k/lease');
  again.grant(8);

  assert.equal((await result).acquired, true);
});

test('keys that come up while a stream is being opened are covered by the next, together', async (t) => {
  const { server, results } = await waited(t, { keys: ['a', 'b', 'c'] });
  const streams = [];
  const tried = [];
  while (tried.length < 3) {
    const asked = await server.next();
    if (asked.what.startsWith('GET')) {
      streams.push(asked.what);
      asked.stream();
    } else {
      tried.push(asked.what);
      asked.grant(8);
    }
  }
  await Promise.all(results);

  assert.ok(streams.length <= 2, streams.join(' '));
  assert.deepEqual(tried.sort(), ['POST /locks/a/lease', 'POST /locks/b/lease', 'POST /locks/c/lease']);
});

test('more than 64 keys are asked for by what they begin with', async (t) => {
  const { clock, server, locks } = await arranged(t);
  const keys = Array.from({ length: 70 }, (_, n) => `job-${10 + n}`);
  const controller = new AbortController();
  const results = keys.map((key) => locks.acquire(key, { ttl: 30, wait: 60, signal: controller.signal }));
  let last;
  for (let tries = 0; tries < 140; ) {
    const asked = await server.next();
    if (asked.what.startsWith('GET')) {
      last = asked;
      asked.stream();
    } else {
      tries += 1;
      asked.refuse();
    }
  }
  assert.match(last.what, /^GET \/lock-events\?prefix=job-1&prefix=job-2&.*&prefix=job-7$/);

  controller.abort();
  await Promise.all(results);
  await over({ clock, stream: last });
});

// --- a stream that is lost, refused or not there -----------------------------------------------------

test('a stream that is lost is opened again behind its last event, and the key tried', async (t) => {
  for (const lose of [(stream) => stream.response.end(), (stream) => stream.lose()]) {
    const { server, stream, clock, result } = await listening(t);
    stream.tell('acquired', {}, '5d2c81f0-42');
    await settle();
    lose(stream);
    await until(() => clock.pending.size === 3); // the end of the wait, the pause, the next read
    assert.ok(Math.min(...[...clock.pending].map(({ when }) => when)) < clock.now() + 0.11);
    await clock.advance(0.1);
    const next = await server.next();
    assert.equal(next.headers['last-event-id'], '5d2c81f0-42');
    next.stream();
    (await server.next()).grant(8);

    assert.equal((await result).acquired, true);
  }
});

test('one that is lost each time it was open is opened again as soon as the first time', async (t) => {
  const { server, clock, stream, result } = await listening(t);
  let current = stream;
  for (let n = 0; n < 5; n++) {
    current.send(`id: ${n}\n\n`);
    await settle();
    current.lose();
    await until(() => clock.pending.size === 3);
    await clock.advance(0.11);
    current = await server.next();
    assert.equal(current.headers['last-event-id'], String(n));
    current.stream();
    (await server.next()).refuse();
    await settle();
  }
  current.tell('released');
  (await server.next()).grant(8);

  assert.equal((await result).acquired, true);
});

test('a stream that falls silent is lost after 40 s, one with a comment is not', async (t) => {
  const { server, stream, clock, result } = await listening(t, { wait: 600 });
  for (let n = 0; n < 5; n++) {
    await clock.advance(39);
    stream.send(':\n');
    await settle();
  }
  assert.equal(stream.isClosed, false);
  await clock.advance(40.2);
  const next = await server.next();
  next.stream();
  (await server.next()).grant(8);

  assert.equal((await result).acquired, true);
  await until(() => stream.isClosed);
});

test('one that cannot be opened is tried again, each time later', async (t) => {
  const { server, clock, result } = await waited(t, { wait: 600 });
  const openings = [];
  while (openings.length < 6) {
    const asked = await server.next();
    if (asked.what.startsWith('GET /lock-events')) {
      openings.push(clock.now());
      await takenIn(clock, () => (openings.length % 2 ? asked.refuse(503, 'lock_service_unavailable') : asked.lose()));
    } else await takenIn(clock, () => asked.answer(200, HELD));
    await toNextTimer(clock);
  }
  const pauses = openings.slice(1).map((at, n) => at - openings[n]);

  for (const [n, seconds] of [0.1, 0.2, 0.4, 0.8, 1.6].entries())
    assert.ok(Math.abs(pauses[n] - seconds) < 0.001, pauses);
  await clock.advance(600);
  await result;
});

test('a 429 to it is waited out', async (t) => {
  const { server, clock, result } = await waited(t);
  const opening = await server.next();
  assert.equal(opening.headers.accept, 'text/event-stream');
  await takenIn(clock, () => opening.refuse(429, 'lock_rate_limited', { 'retry-after': '7' }));
  for (const seconds of [3, 6]) {
    await toNextTimer(clock);
    assert.ok(Math.abs(clock.now() - 1_000 - seconds) < 0.001);
    const asked = await server.next();
    assert.equal(asked.what, 'GET /locks/k');
    await takenIn(clock, () => asked.answer(200, HELD));
  }
  await toNextTimer(clock);
  assert.ok(Math.abs(clock.now() - 1_007) < 0.001);
  (await server.next()).stream();
  (await server.next()).grant(8);

  assert.equal((await result).acquired, true);
});

test('a server without events is asked once, and its keys are read', async (t) => {
  for (const status of [404, 405]) {
    const { server, clock, locks, result } = await waited(t);
    (await server.next()).refuse(status, 'not_found');
    await settle();
    await clock.advance(2.9);
    assert.equal(server.count, 2);
    await clock.advance(0.2);
    const read = await server.next();
    assert.equal(read.what, 'GET /locks/k');
    read.answer(200, { held: true, expires_at: '2026-12-01T00:00:04.000Z', fencing_token: 7 });
    await settle();
    await clock.advance(1.8); // it is over at 4 s + 1
    assert.equal(server.count, 3);
    await clock.advance(0.2);
    (await server.next()).answer(200, { held: false });
    (await server.next()).grant(8);
    assert.equal((await result).acquired, true);

    const later = locks.acquire('k', { ttl: 30, wait: 2 });
    (await server.next()).refuse();
    await settle();
    await clock.advance(2.1);
    assert.deepEqual(await later, { acquired: false, lease: null, error: null });
    assert.equal(server.count, 6);
    assert.equal(clock.pending.size, 0);
  }
});

test('a lease that is over by a fast clock, and held all the same, is read early once', async (t) => {
  for (const ahead of [0.05, 0.5, 60]) {
    const { server, clock, result } = await waited(t, { wait: 20 });
    (await server.next()).refuse(404, 'not_found');
    await until(() => clock.pending.size === 2); // the end of the wait, the next read
    const over = clock.wall() + 3 - 1 - ahead; // at the first read, its grace included
    const pauses = [];
    for (const end of [over, over, over, over + 1, over + 1]) {
      const since = clock.now();
      await toNextTimer(clock);
      const read = await server.next();
      assert.equal(read.what, 'GET /locks/k');
      pauses.push(Math.round((clock.now() - since) * 10) / 10);
      await takenIn(clock, () => read.answer(200, { ...HELD, expires_at: new Date(end * 1000).toISOString() }));
    }
    assert.deepEqual(pauses, [3, 0.1, 3, 3, 0.1], String(ahead));
    await toNextTimer(clock);
    (await server.next()).answer(200, { held: false });
    (await server.next()).grant(8);
    assert.equal((await result).acquired, true);
  }
});

test('a 429 to a try is waited out by the reading too', async (t) => {
  const { server, clock, result } = await waited(t);
  (await server.next()).refuse(404, 'not_found');
  await settle();
  await clock.advance(3.1);
  (await server.next()).answer(200, { held: false });
  (await server.next()).refuse(429, 'lock_rate_limited', { 'retry-after': '7' });
  await settle();
  await clock.advance(6.9);
  assert.equal(server.count, 4);
  await clock.advance(0.2);
  (await server.next()).grant(8);

  assert.equal((await result).acquired, true);
});

test('a 429 to a read is waited out by the tries too, and by whoever comes', async (t) => {
  const { server, clock, locks, results } = await waited(t, { wait: 90 });
  const stream = await server.next();
  await clock.advance(3.1);
  const read = await server.next();
  await takenIn(clock, () => read.refuse(429, 'lock_rate_limited', { 'retry-after': '60' }));
  stream.stream();
  results.push(locks.acquire('k', { ttl: 30, wait: 90 }));
  (await server.next()).refuse(409, 'lock_held');
  await settle();
  stream.tell('released');
  for (let n = 0; n < 2; n++) {
    await clock.advance(29.8);
    stream.send(':\n\n');
  }
  assert.equal(server.count, 4);

  await clock.advance(0.5);
  for (let n = 0; n < 2; n++) (await server.next()).grant(8 + n);
  for (const { acquired } of await Promise.all(results)) assert.equal(acquired, true);
});

test('many that wait without a stream read the key for all', async (t) => {
  const { server, clock, results } = await waited(t, { calls: 10, wait: 20 });
  (await server.next()).refuse(404, 'not_found');
  await settle();
  for (let n = 0; n < 6; n++) {
    await clock.advance(3);
    (await server.next()).answer(200, { held: true, expires_at: '2026-12-01T01:00:00.000Z', fencing_token: 7 });
    await settle();
  }
  assert.equal(server.count, 17);
  await clock.advance(3);

  for (const { acquired, error } of await Promise.all(results)) assert.deepEqual([acquired, error], [false, null]);
});

test('a stream that is not opened in time is no hindrance: the key is read meanwhile', async (t) => {
  const { server, clock, result } = await waited(t);
  const hung = await server.next();
  await clock.advance(3.1);
  const read = await server.next();
  read.answer(200, { held: false });
  (await server.next()).grant(8);

  assert.equal((await result).acquired, true);
  await until(() => hung.isClosed);
  await settle();
  assert.equal(clock.pending.size, 0);
});

test('an error that will not change ends the wait, from a try and from a read', async (t) => {
  for (const [status, kind] of [
    [401, sdk.AuthenticationError],
    [403, sdk.PermissionDeniedError],
    [404, sdk.NotFoundError],
    [400, sdk.ValidationError],
    [302, sdk.VolcanoError],
    [405, sdk.VolcanoError],
  ]) {
    const tried = await listening(t);
    tried.stream.tell('released');
    (await tried.server.next()).refuse(status, 'x');
    assert.equal((await tried.result).error.constructor, kind);
    await over(tried);

    const read = await waited(t);
    (await read.server.next()).refuse(405, 'method_not_allowed');
    await settle();
    await read.clock.advance(3.1);
    (await read.server.next()).refuse(status, 'x');
    assert.equal((await read.result).error.constructor, kind);
  }
});

test('an error that was the last outcome when the time is over is told', async (t) => {
  const all = await listening(t, { wait: 5 });
  all.stream.tell('released');
  (await all.server.next()).refuse(429, 'lock_rate_limited', { 'retry-after': '30' });
  await settle();
  await all.clock.advance(5);

  const { acquired, error } = await all.result;
  assert.deepEqual([acquired, error.constructor], [false, sdk.RateLimitedError]);
  assert.equal(all.server.count, 4);
  await over(all);
});

test('a read that failed is told to all that wait, unless something was heard of the key since', async (t) => {
  for (const heard of [null, 'answer', 'event']) {
    const { server, clock, results } = await waited(t, { calls: 2, wait: 5 });
    const stream = await server.next();
    await clock.advance(3.1);
    const read = await server.next();
    await takenIn(clock, () => read.refuse(500, 'oh'));
    if (heard) {
      stream.stream();
      const asked = await server.next();
      const status = heard === 'answer' ? 409 : 429;
      await takenIn(clock, () => asked.refuse(status, 'x', { 'retry-after': '60' }));
      if (heard === 'event') stream.tell('acquired', { fencing_token: 9 });
      await settle();
    }
    await clock.advance(5);

    for (const { acquired, error } of await Promise.all(results)) {
      assert.deepEqual([acquired, error?.constructor], [false, heard ? undefined : sdk.ServerError], heard);
    }
  }
});

// --- tokens ------------------------------------------------------------------------------------------

test('a later try that was given back goes on with a new token, the caller has the last one', async (t) => {
  const { server, stream, first, clock, result } = await listening(t);
  stream.tell('released');
  for (let n = 0; n < 2; n++) (await server.next()).lose();
  const release = await server.next();
  release.released();
  await settle();
  await clock.advance(0.1);
  const again = await server.next();
  again.grant(9);

  const token = (asked) => asked.headers['x-volcano-lock-token'];
  assert.equal(token(release), token(first));
  assert.notEqual(token(again), token(first));
  assert.equal((await result).lease.token, token(again));
});

test("a later try with the caller's own token that was given back is the end", async (t) => {
  const { server, stream, result } = await listening(t, { call: 'withLock', token: TOKEN });
  stream.tell('released');
  for (let n = 0; n < 2; n++) (await server.next()).lose();
  (await server.next()).released();

  assert.equal((await result).error.constructor, sdk.TransportError);
});

test("a direct acquire keeps the caller's token through all its tries", async (t) => {
  const { server, stream, clock, result } = await listening(t, { token: TOKEN });
  stream.tell('released');
  for (let n = 0; n < 2; n++) (await server.next()).lose();
  await settle();
  await clock.advance(0.1);
  const again = await server.next();
  again.grant(9);

  assert.equal(again.headers['x-volcano-lock-token'], TOKEN);
  assert.equal((await result).lease.token, TOKEN);
});

test('a token that was given back is not used again, whoever made it', async (t) => {
  const { server, locks } = await arranged(t);
  const failed = locks.acquire('k', { ttl: 30 });
  for (let n = 0; n < 2; n++) (await server.next()).lose();
  (await server.next()).released();
  const { token } = (await failed).lease;

  await assert.rejects(locks.acquire('k', { ttl: 30, token }), /make a new one/);
});

// --- the end of a wait -------------------------------------------------------------------------------

test('a wait that is cancelled leaves nothing behind', async (t) => {
  for (const call of ['acquire', 'withLock']) {
    const controller = new AbortController();
    const all = await listening(t, { call, signal: controller.signal });
    const reason = new Error('enough');
    assert.equal(getEventListeners(controller.signal, 'abort').length, 1);

    controller.abort(reason);

    const { acquired, error } = await all.result;
    assert.deepEqual([acquired, error], [false, reason]);
    await over(all);
    assert.equal(all.server.count, 3);
    assert.equal(getEventListeners(controller.signal, 'abort').length, 0);
  }
});

test('and so does one that is cancelled while its stream opens, while it is read, or in a try', async (t) => {
  for (const arrange of [
    async ({ server }) => server.next(),
    async ({ server, clock }) => {
      (await server.next()).refuse(404, 'not_found');
      await settle();
      await clock.advance(3.1);
      return server.next();
    },
    async ({ server }) => {
      (await server.next()).stream();
      const asked = await server.next();
      setImmediate(() => asked.refuse());
      return asked;
    },
  ]) {
    const controller = new AbortController();
    const all = await waited(t, { signal: controller.signal });
    const asked = await arrange(all);

    controller.abort(new Error('enough'));

    assert.equal((await all.result).error.message, 'enough');
    if (asked.what.startsWith('GET')) await until(() => asked.isClosed);
    await settle();
    assert.equal(all.clock.pending.size, 0);
  }
});

test('a thousand waits under one signal hang one listener on it', async (t) => {
  const { signal } = new AbortController();
  const all = await listening(t, { calls: 3, signal, wait: 5 });

  assert.equal(getEventListeners(signal, 'abort').length, 1);
  await all.clock.advance(5.1);
  await Promise.all(all.results);
  assert.equal(getEventListeners(signal, 'abort').length, 0);
});

test('closing the client ends its waits with the error of a closed client', async (t) => {
  const all = await listening(t, { calls: 2, wait: never });

  assert.deepEqual(await all.client.close(), { error: null });

  for (const { acquired, error } of await Promise.all(all.results)) {
    assert.equal(acquired, false);
    assert.match(error.message, /this client is closed/);
  }
  await over(all);
  assert.equal(all.server.count, 4);
});

test('a stream that was closed since all had left is no failure: the next is opened at once', async (t) => {
  const controller = new AbortController();
  const { server, locks, stream, result } = await listening(t, { signal: controller.signal });
  controller.abort();
  await result;
  await until(() => stream.isClosed);

  const next = locks.acquire('k', { ttl: 30, wait: 5 });
  (await server.next()).refuse();
  (await server.next()).stream();
  (await server.next()).grant(9);

  assert.equal((await next).acquired, true);
});

test('who waits after all others have left gets a stream that begins with now', async (t) => {
  const all = await listening(t, { wait: 5 });
  all.stream.tell('acquired', {}, '42');
  await settle();
  await all.clock.advance(5.1);
  await all.result;

  const { signal } = new AbortController();
  all.locks.acquire('k', { ttl: 30, wait: 5, signal });
  (await all.server.next()).refuse();
  const stream = await all.server.next();

  assert.equal(stream.headers['last-event-id'], undefined);
  stream.stream();
  (await all.server.next()).grant(9);
});

import assert from 'node:assert/strict';
import { getEventListeners } from 'node:events';
import { after, test } from 'node:test';
import { inspect } from 'node:util';
import { arranged, SERVICE_KEY, sdk, settle, TOKEN, until } from './support.mjs';

const { ConflictError, LockLostError, ServerError, TransportError } = sdk;

const unhandled = [];
const onUnhandled = (reason) => unhandled.push(reason);
process.on('unhandledRejection', onUnhandled);
after(() => {
  process.off('unhandledRejection', onUnhandled);
  assert.deepEqual(unhandled, []);
});

/** A promise with its ends outside. */
function gate() {
  let open;
  let fail;
  const promise = new Promise((resolve, reject) => {
    open = resolve;
    fail = reject;
  });
  return { promise, open, fail };
}

/** A running withLock: its acquire was granted and its callback waits for `body`. */
async function held(t, { ttl = 30, callback, client = {}, ...options } = {}) {
  const all = await arranged(t, client);
  const body = gate();
  const entered = gate();
  const result = all.locks.withLock('k', { ttl, ...options }, (guard) => {
    entered.open(guard);
    return (callback ?? (() => body.promise))(guard);
  });
  const acquire = await all.server.next();
  acquire.grant();
  const guard = await entered.promise;
  return { ...all, acquire, body, guard, result };
}

test('the lock is held while the callback runs, and released with the same token', async (t) => {
  const { server, guard, body, result, acquire, clock } = await held(t);
  assert.equal(acquire.what, 'POST /locks/k/lease');
  assert.equal(acquire.body, '{"ttl_seconds":30}');
  assert.deepEqual([guard.signal.aborted, guard.lease.key, guard.lease.fencingToken], [false, 'k', 7]);

  body.open('done');
  const release = await server.next();
  release.released();

  assert.deepEqual(await result, { acquired: true, data: 'done', error: null });
  assert.equal(release.what, 'DELETE /locks/k/lease');
  assert.equal(release.headers['x-volcano-lock-token'], acquire.headers['x-volcano-lock-token']);
  assert.notEqual(release.headers['x-volcano-request-id'], acquire.headers['x-volcano-request-id']);
  assert.equal(clock.pending.size, 0);
});

test('held by somebody else is neither an error nor a result', async (t) => {
  const { server, locks } = await arranged(t);
  for (const code of ['lock_held', 'lock_ownership_lost']) {
    const locked = locks.withLock('k', { ttl: 30 }, assert.fail);
    (await server.next()).refuse(409, code);
    const acquired = locks.acquire('k', { ttl: 30 });
    (await server.next()).refuse(409, code);

    assert.deepEqual(await locked, { acquired: false, data: null, error: null });
    assert.deepEqual(await acquired, { acquired: false, lease: null, error: null });
  }
  assert.equal(server.count, 4);
});

test('each way out of the callback releases, and its value or error arrives as it is', async (t) => {
  const error = new Error('mine');
  const foreign = { not: 'an Error' };
  const ways = [
    [() => 5, { data: 5, error: null }],
    [() => undefined, { data: undefined, error: null }],
    [async () => 'later', { data: 'later', error: null }],
    // biome-ignore lint/suspicious/noThenProperty: a thenable that is no promise is the subject
    [() => ({ then: (resolve) => resolve('from a thenable') }), { data: 'from a thenable', error: null }],
    [
      () => {
        throw error;
      },
      { data: null, error },
    ],
    [() => Promise.reject(error), { data: null, error }],
    [() => Promise.reject(foreign), { data: null, error: foreign }],
  ];
  for (const [callback, ending] of ways) {
    const { server, result } = await held(t, { callback });
    (await server.next()).released();

    assert.deepEqual(await result, { acquired: true, ...ending });
  }
});

test('`throw undefined` does not look like success', async (t) => {
  for (const thrown of [undefined, null, 0, '']) {
    const { server, result } = await held(t, { callback: () => Promise.reject(thrown) });
    (await server.next()).released();

    assert.match((await result).error.message, /was thrown/);
  }
});

test('wrong arguments reject, name the field, and nothing is sent', async (t) => {
  const { server, locks } = await arranged(t);
  const lease = { key: 'k', token: TOKEN };
  for (const [call, kind, sentence] of [
    [() => locks.acquire('a/b', { ttl: 30 }), RangeError, /^key must be/],
    [() => locks.acquire('k', { ttl: '30' }), TypeError, /^ttl must be/],
    [() => locks.acquire('k'), TypeError, /^ttl must be/],
    [() => locks.acquire('k', 30), TypeError, /^options must be/],
    [() => locks.acquire('k', { ttl: 30, token: 'x' }), RangeError, /^token must be/],
    [() => locks.acquire('k', { ttl: 30, requestId: 7 }), TypeError, /^requestId must be/],
    [() => locks.acquire('k', { ttl: 30, signal: {} }), TypeError, /^signal must be/],
    [() => locks.withLock('k', { ttl: 30 }), TypeError, /^callback must be/],
    [() => locks.withLock('k', { ttl: 4 }, assert.fail), RangeError, /^ttl must be/],
    [() => locks.withLock('k', assert.fail), TypeError, /^options must be/],
    [() => locks.renew('k', null, { ttl: 30 }), TypeError, /^lease must be/],
    [() => locks.renew('other', lease, { ttl: 30 }), RangeError, /^lease must be a lease of the key "other"/],
    [() => locks.renew('k', lease), TypeError, /^ttl must be/],
    [() => locks.release('other', lease), RangeError, /^lease must be/],
    [() => locks.release('k', { key: 'k' }), TypeError, /^lease must be/],
    [() => locks.get(''), RangeError, /^key must be/],
    [() => locks.get('k', { requestId: 'x' }), RangeError, /^requestId must be/],
    [() => locks.forceRelease('..'), RangeError, /^key must be/],
  ]) {
    await assert.rejects(call, (error) => error.constructor === kind && sentence.test(error.message), String(call));
  }
  assert.equal(server.count, 0);
});

test('without a service key each call says so, and nothing is sent', async (t) => {
  const { server, locks } = await arranged(t, { accessToken: undefined, anonKey: 'ak-public' });
  const lease = { key: 'k', token: TOKEN };

  for (const result of [
    await locks.acquire('k', { ttl: 30 }),
    await locks.withLock('k', { ttl: 30 }, assert.fail),
    await locks.renew('k', lease, { ttl: 30 }),
    await locks.release('k', lease),
    await locks.get('k'),
    await locks.forceRelease('k'),
  ]) {
    assert.equal(result.error.constructor, sdk.AuthenticationError);
    assert.match(result.error.message, /VOLCANO_SERVICE_KEY/);
  }
  assert.equal(server.count, 0);
});

test('at the stop time the signal aborts with a LockLostError, also while a renewal hangs', async (t) => {
  const { server, clock, guard, body, result } = await held(t);
  const { promise: aborted, open } = gate();
  guard.signal.addEventListener('abort', () => open(guard.signal.reason));

  await clock.advance(28.9);
  assert.equal(guard.signal.aborted, false);
  await clock.advance(0.2);
  const loss = await aborted;
  body.open('too late');
  const release = await nextRelease(server);
  release.released();

  assert.equal(loss.constructor, LockLostError);
  assert.equal(loss.cause.constructor, TransportError);
  assert.deepEqual(await result, { acquired: true, data: 'too late', error: loss });
});

/** The next request that is not a renewal that hung. */
async function nextRelease(server) {
  for (;;) {
    const asked = await server.next();
    if (asked.what.startsWith('DELETE')) return asked;
  }
}

test("a callback that fails after the loss has its error as the loss's cause, one that rethrows the reason not", async (t) => {
  const mine = new Error('mine');
  for (const [thrown, cause] of [
    [() => mine, mine],
    [(guard) => guard.signal.reason, undefined],
  ]) {
    const { server, clock, guard, body, result } = await held(t);
    clock.block(30);
    body.fail(thrown(guard));
    (await server.next()).refuse();

    const { error } = await result;
    assert.equal(error.constructor, LockLostError);
    assert.equal(error.cause, cause);
  }
});

test('after the event loop was blocked past the stop time the first look sees the loss', async (t) => {
  const looks = [
    ({ signal }) => signal.aborted,
    ({ signal }) => signal.reason instanceof LockLostError,
    ({ signal }) => {
      try {
        return signal.throwIfAborted();
      } catch (error) {
        return error instanceof LockLostError;
      }
    },
  ];
  for (const look of looks) {
    const { server, clock, guard, body, result } = await held(t);
    clock.block(36);

    assert.equal(look(guard), true);

    body.open();
    (await server.next()).lose();
    assert.equal((await result).error.constructor, LockLostError);
    assert.equal(server.count, 2); // one try of the release
  }
});

test('a callback that blocked the loop past the stop time and never looked has lost all the same', async (t) => {
  const { server, clock, body, result } = await held(t);

  clock.block(36);
  body.open('done');
  (await server.next()).released();

  const { data, error } = await result;
  assert.deepEqual([data, error.constructor], ['done', LockLostError]);
});

test('a renewal goes out at a third of the TTL, under a request id of its own, and the lease shows it', async (t) => {
  const { server, clock, guard, body, result, acquire } = await held(t);
  const { lease } = guard;

  await clock.advance(10);
  const renewal = await server.next();
  renewal.answer(200, { expires_at: '2026-11-29T13:00:00.000Z', fencing_token: 7 });
  await until(() => lease.expiresAt === '2026-11-29T13:00:00.000Z');

  assert.equal(renewal.what, 'PATCH /locks/k/lease');
  assert.equal(renewal.headers['x-volcano-lock-token'], acquire.headers['x-volcano-lock-token']);
  assert.notEqual(renewal.headers['x-volcano-request-id'], acquire.headers['x-volcano-request-id']);
  body.open();
  (await server.next()).released();
  await result;
});

test('the callback ends while a renewal hangs: its socket is closed, the release goes out, nothing follows', async (t) => {
  const { server, clock, body, result } = await held(t);
  await clock.advance(10);
  const renewal = await server.next();

  body.open('done');
  (await server.next()).released();

  assert.deepEqual(await result, { acquired: true, data: 'done', error: null });
  await until(() => renewal.isClosed);
  await clock.advance(1_000);
  assert.equal(server.count, 3);
  assert.equal(clock.pending.size, 0);
});

test('two locks of one token: the exit of the first loses the second, since it frees the key', async (t) => {
  const { server, locks } = await arranged(t);
  const [first, second] = [gate(), gate()];
  const guards = [];
  const results = [first, second].map(({ promise }) =>
    locks.withLock('k', { ttl: 30, token: TOKEN }, (guard) => {
      guards.push(guard);
      return promise;
    }),
  );
  for (let n = 0; n < 2; n++) (await server.next()).grant();
  await until(() => guards.length === 2);

  first.open();
  (await server.next()).released();
  assert.equal((await results[0]).error, null);
  assert.match(guards[1].signal.reason.message, /another withLock of its lock token has ended/);
  second.open();
  (await server.next()).released();

  assert.equal((await results[1]).error.constructor, LockLostError);
});

test('a failed release never masks a result or an error of the callback', async (t) => {
  const mine = new Error('mine');
  for (const [callback, ending] of [
    [() => 'done', { data: 'done', error: null }],
    [() => Promise.reject(mine), { data: null, error: mine }],
  ]) {
    const { server, result } = await held(t, { callback });
    (await server.next()).answer(500, 'oh');
    (await server.next()).answer(500, 'oh');

    const { releaseError, ...rest } = await result;
    assert.deepEqual(rest, { acquired: true, ...ending });
    assert.equal(releaseError.constructor, ServerError);
  }
});

test('a 409 to the release is a loss, with the refusal in it and the error of the callback beside it', async (t) => {
  const mine = new Error('mine');
  for (const [callback, data, cause] of [
    [() => 'done', 'done', ConflictError],
    [() => Promise.reject(mine), null, Error],
  ]) {
    const { server, result } = await held(t, { callback });
    (await server.next()).refuse();

    const { error, ...rest } = await result;
    assert.deepEqual(rest, { acquired: true, data });
    assert.deepEqual([error.constructor, error.status, error.because.constructor], [LockLostError, 409, ConflictError]);
    assert.equal(error.cause.constructor, cause);
  }
});

// --- the caller's signal -----------------------------------------------------------------------------

test('a signal that is aborted already: nothing is sent', async (t) => {
  const { server, locks } = await arranged(t);
  const reason = new Error('changed my mind');
  const signal = AbortSignal.abort(reason);

  const locked = await locks.withLock('k', { ttl: 30, signal }, assert.fail);
  const acquired = await locks.acquire('k', { ttl: 30, signal });

  assert.deepEqual(locked, { acquired: false, data: null, error: reason });
  assert.equal(acquired.error, reason);
  assert.equal((await locks.get('k', { signal })).error, reason);
  assert.equal(server.count, 0);
});

test('a reason that is nothing is an error all the same', async (t) => {
  const { locks } = await arranged(t);

  const { error } = await locks.get('k', { signal: AbortSignal.abort(null) });

  assert.match(error.message, /null was thrown/);
});

test('an acquire that is cancelled in mid-flight is given back, if it was or may have been granted', async (t) => {
  for (const [answer, givesBack] of [
    [(asked) => asked.grant(), true],
    [(asked) => asked.lose(), true],
    [(asked) => asked.answer(500, ''), true],
    [(asked) => asked.refuse(), false],
    [(asked) => asked.refuse(429, 'lock_rate_limited'), false],
  ]) {
    for (const call of [
      (locks, options) => locks.withLock('k', options, assert.fail),
      (locks, options) => locks.acquire('k', options),
    ]) {
      const { server, locks } = await arranged(t);
      const controller = new AbortController();
      const result = call(locks, { ttl: 30, signal: controller.signal });
      const acquire = await server.next();

      controller.abort(new Error('enough'));
      answer(acquire);
      if (givesBack) {
        const release = await server.next();
        assert.equal(release.headers['x-volcano-lock-token'], acquire.headers['x-volcano-lock-token']);
        release.released();
      }

      assert.equal((await result).error.message, 'enough');
      assert.equal((await result).acquired, false);
      assert.equal(server.count, givesBack ? 2 : 1);
      assert.equal(getEventListeners(controller.signal, 'abort').length, 0);
    }
  }
});

test('a cancelled acquire waits two seconds for its answer, then gives back what it may have got', async (t) => {
  const { server, locks, clock } = await arranged(t);
  const controller = new AbortController();
  const result = locks.withLock('k', { ttl: 30, signal: controller.signal }, assert.fail);
  const acquire = await server.next();

  controller.abort();
  await clock.advance(1.9);
  assert.equal(acquire.isClosed, false);
  await clock.advance(0.2);
  const release = await server.next();
  release.released();

  assert.equal(release.what, 'DELETE /locks/k/lease');
  assert.equal((await result).error.name, 'AbortError');
});

test("a cancelled acquire with the caller's own token ends at once and is left to the caller", async (t) => {
  const { server, locks } = await arranged(t);
  const controller = new AbortController();
  const result = locks.acquire('k', { ttl: 30, token: TOKEN, signal: controller.signal });
  const acquire = await server.next();

  controller.abort(new Error('enough'));

  const { error, lease } = await result;
  assert.equal(error.message, 'enough');
  assert.deepEqual(lease, { key: 'k', token: TOKEN, expiresAt: null, fencingToken: null });
  await until(() => acquire.isClosed);
  assert.equal(server.count, 1);
});

test('the caller aborts and the callback takes a second to stop: it is renewed meanwhile, and released after', async (t) => {
  const controller = new AbortController();
  const { server, clock, guard, body, result } = await held(t, { signal: controller.signal });
  const enough = new Error('enough');

  controller.abort(enough);
  assert.equal(guard.signal.reason, enough);
  await clock.advance(10);
  (await server.next()).grant();
  await settle();
  assert.equal(server.count, 2);
  body.fail(enough);
  (await server.next()).released();

  assert.deepEqual(await result, { acquired: true, data: null, error: enough });
  assert.equal(getEventListeners(controller.signal, 'abort').length, 0);
});

test('a callback that finishes in spite of the abort keeps its result', async (t) => {
  const controller = new AbortController();
  const { server, body, result } = await held(t, { signal: controller.signal });

  controller.abort();
  body.open('done');
  (await server.next()).released();

  assert.deepEqual(await result, { acquired: true, data: 'done', error: null });
});

test('an abort during the release does not stop it', async (t) => {
  const controller = new AbortController();
  const { server, body, result } = await held(t, { signal: controller.signal });

  body.open('done');
  const release = await server.next();
  controller.abort();
  await settle();
  release.released();

  assert.deepEqual(await result, { acquired: true, data: 'done', error: null });
});

test('direct calls end at once when they are cancelled, and leave no listener', async (t) => {
  const { server, locks } = await arranged(t);
  const lease = { key: 'k', token: TOKEN };
  for (const call of [
    (options) => locks.get('k', options),
    (options) => locks.forceRelease('k', options),
    (options) => locks.release('k', lease, options),
    (options) => locks.renew('k', lease, { ttl: 30, ...options }),
  ]) {
    const controller = new AbortController();
    const result = call({ signal: controller.signal });
    const asked = await server.next();

    controller.abort(new Error('enough'));

    assert.equal((await result).error.message, 'enough');
    assert.equal(getEventListeners(controller.signal, 'abort').length, 0);
    await until(() => asked.isClosed);
  }
});

test('thirty locks under one signal hang one listener on it, and Node warns of nothing', async (t) => {
  const warnings = [];
  const onWarning = (warning) => warnings.push(warning);
  process.on('warning', onWarning);
  t.after(() => process.off('warning', onWarning));
  const { server, locks } = await arranged(t);
  const { signal } = new AbortController();
  const body = gate();

  const results = Array.from({ length: 30 }, (_, n) =>
    locks.withLock(`k${n}`, { ttl: 30, signal }, () => body.promise),
  );
  for (const _ of results) (await server.next()).grant();
  assert.equal(getEventListeners(signal, 'abort').length, 1);
  body.open();
  for (const _ of results) (await server.next()).released();
  await Promise.all(results);

  assert.equal(getEventListeners(signal, 'abort').length, 0);
  await settle();
  assert.deepEqual(warnings, []);
});

// --- direct calls ------------------------------------------------------------------------------------

test('an acquire without an answer says so, with the token to recover by', async (t) => {
  const { server, locks } = await arranged(t);

  const result = locks.acquire('k', { ttl: 30, token: TOKEN.toUpperCase() });
  (await server.next()).lose();
  (await server.next()).lose();

  const { acquired, lease, error } = await result;
  assert.equal(acquired, false);
  assert.deepEqual(lease, { key: 'k', token: TOKEN, expiresAt: null, fencingToken: null });
  assert.equal(error.constructor, TransportError);
  assert.equal(server.count, 2);
});

test('a renewal updates the very lease that it was given', async (t) => {
  const { server, locks } = await arranged(t);
  const lease = { key: 'k', token: TOKEN, expiresAt: 'then', fencingToken: 7 };

  const result = locks.renew('k', lease, { ttl: 60 });
  (await server.next()).grant();

  assert.equal((await result).lease, lease);
  assert.equal(lease.expiresAt, '2026-11-29T12:00:00.000Z');
});

test('a frozen lease is left alone and a new one returned', async (t) => {
  const { server, locks } = await arranged(t);
  const lease = Object.freeze({ key: 'k', token: TOKEN, expiresAt: 'then', fencingToken: 7 });

  const result = locks.renew('k', lease, { ttl: 60 });
  (await server.next()).grant();

  assert.deepEqual((await result).lease, { ...lease, expiresAt: '2026-11-29T12:00:00.000Z' });
});

test("a renewal that returns another lease's fencing token is no renewal", async (t) => {
  const { server, locks } = await arranged(t);
  const lease = { key: 'k', token: TOKEN, expiresAt: 'then', fencingToken: 7 };

  const result = locks.renew('k', lease, { ttl: 60 });
  (await server.next()).grant(8);

  assert.equal((await result).error.constructor, ServerError);
  assert.deepEqual([lease.expiresAt, lease.fencingToken], ['then', 7]);
});

test('an acquire that is answered after its stop time is not held; only a token of our own is given back', async (t) => {
  for (const token of [undefined, TOKEN]) {
    const { server, locks, clock } = await arranged(t, { timeout: 60_000 });

    const result = locks.acquire('k', { ttl: 30, token });
    const acquire = await server.next();
    clock.block(29);
    acquire.grant();
    if (!token) (await server.next()).released();

    assert.match((await result).error.message, /answered too late/);
    assert.equal(server.count, token ? 1 : 2);
  }
});

test('a lease that the callback releases itself is not released again, nor lost', async (t) => {
  const { server, clock, guard, body, result, locks } = await held(t);

  const released = locks.release('k', guard.lease);
  (await server.next()).released();
  assert.deepEqual(await released, { error: null });
  await clock.advance(100);
  assert.equal(guard.signal.aborted, false);
  body.open('done');

  assert.deepEqual(await result, { acquired: true, data: 'done', error: null });
  assert.equal(server.count, 2);
});

test('a release of the callback that got no answer is followed by the one on the way out, whose 409 is no loss', async (t) => {
  const { server, guard, body, result, locks } = await held(t);

  const released = locks.release('k', guard.lease);
  (await server.next()).lose();
  assert.equal((await released).error.constructor, TransportError);
  body.open('done');
  (await server.next()).refuse();

  assert.deepEqual(await result, { acquired: true, data: 'done', error: null });
});

test('a token that was released cannot acquire again', async (t) => {
  const { server, locks } = await arranged(t);
  const released = locks.release('k', { key: 'k', token: TOKEN.toUpperCase() });
  (await server.next()).released();
  await released;

  for (const call of [
    () => locks.acquire('k', { ttl: 30, token: TOKEN }),
    () => locks.withLock('other', { ttl: 30, token: TOKEN }, assert.fail),
  ]) {
    await assert.rejects(call, (error) => error instanceof RangeError && /make a new one/.test(error.message));
  }
  assert.equal(server.count, 1);
});

test('nor can the own token of a withLock, once it was over', async (t) => {
  const { server, body, result, locks } = await held(t, { token: TOKEN });
  body.open();
  (await server.next()).released();
  await result;

  await assert.rejects(() => locks.acquire('k', { ttl: 30, token: TOKEN }), /make a new one/);
});

test('a shorter TTL of a direct renewal brings the stop time of the running lock forward, from its send', async (t) => {
  const { server, clock, guard, body, result, locks } = await held(t);

  const renewal = locks.renew('k', guard.lease, { ttl: 5 });
  const asked = await server.next();
  await clock.advance(3.9);
  assert.equal(guard.signal.aborted, false);
  await clock.advance(0.2);
  assert.equal(guard.signal.aborted, true);

  asked.grant();
  assert.equal((await renewal).error, null);
  assert.equal(guard.signal.aborted, true);
  body.open();
  (await nextRelease(server)).released();
  await result;
});

test('a direct renewal that is refused loses the running lock at once', async (t) => {
  const { server, guard, body, result, locks } = await held(t);

  const renewal = locks.renew('k', guard.lease, { ttl: 30 });
  (await server.next()).refuse();
  assert.equal((await renewal).error.constructor, ConflictError);

  assert.equal(guard.signal.reason.because, (await renewal).error);
  body.open();
  (await server.next()).refuse();
  assert.equal((await result).error, guard.signal.reason);
});

// --- closing -----------------------------------------------------------------------------------------

test('closing loses every running lock first, releases each, and tells of the one that failed', async (t) => {
  const { server, client, locks } = await arranged(t);
  const reasons = [];
  const stopped = (guard) =>
    new Promise((resolve) => {
      guard.signal.addEventListener('abort', () => {
        reasons.push(guard.signal.reason);
        resolve('stopped');
      });
    });
  const results = ['a', 'b', 'c'].map((key) => locks.withLock(key, { ttl: 30 }, stopped));
  for (const _ of results) (await server.next()).grant();
  await settle();

  const closing = client.close();
  assert.deepEqual(
    reasons.map((reason) => reason.constructor),
    [LockLostError, LockLostError, LockLostError],
  );
  for (const _ of results) {
    const release = await server.next();
    if (release.what.includes('/b/')) release.answer(500, '');
    else release.released();
  }

  assert.equal((await closing).error.constructor, ServerError);
  for (const result of results) assert.match((await result).error.message, /the client was closed/);
  assert.match((await locks.withLock('d', { ttl: 30 }, assert.fail)).error.message, /this client is closed/);
  assert.equal(server.count, 6);
});

test('a lock that is granted while the client closes is given back, and its callback never starts', async (t) => {
  const { server, client, locks } = await arranged(t);
  const result = locks.withLock('k', { ttl: 30 }, assert.fail);
  const acquire = await server.next();

  assert.deepEqual(await client.close(), { error: null });
  acquire.grant();
  (await server.next()).released();

  const { acquired, error } = await result;
  assert.deepEqual([acquired, error.constructor], [true, LockLostError]);
});

// --- secrets -----------------------------------------------------------------------------------------

test('neither a token nor the service key is printed, in no result, guard, error or client', async (t) => {
  const { server, client, locks } = await arranged(t);
  const printed = [inspect(client, { depth: 9, showHidden: true })];
  const acquired = locks.acquire('k', { ttl: 30, token: TOKEN });
  (await server.next()).grant();
  printed.push(inspect(await acquired, { depth: 9 }));
  const failed = locks.acquire('k', { ttl: 30, token: TOKEN });
  (await server.next()).lose();
  (await server.next()).lose();
  printed.push(inspect(await failed, { depth: 9 }), JSON.stringify((await failed).error), (await failed).error.stack);
  const renewed = locks.renew('k', Object.freeze({ ...(await acquired).lease }), { ttl: 30 });
  (await server.next()).grant();
  printed.push(inspect((await renewed).lease));

  for (const text of printed) {
    assert.ok(!text.includes(TOKEN) && !text.includes(SERVICE_KEY), text);
  }
  assert.ok(JSON.stringify((await acquired).lease).includes(TOKEN), 'but it can be handed on');
});

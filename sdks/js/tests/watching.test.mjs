import assert from 'node:assert/strict';
import { getEventListeners } from 'node:events';
import { after, test } from 'node:test';
import { arranged, sdk, settle, until } from './support.mjs';

const unhandled = [];
const onUnhandled = (reason) => unhandled.push(reason);
process.on('unhandledRejection', onUnhandled);
after(() => {
  process.off('unhandledRejection', onUnhandled);
  assert.deepEqual(unhandled, []);
});

/** A watch whose stream is open and whose first event is waited for. */
async function watched(t, options = { key: 'k' }) {
  const all = await arranged(t);
  const events = all.locks.watch(options);
  const next = events.next();
  const stream = await all.server.next();
  stream.stream();
  return { ...all, events, next, stream };
}

test('the events come as they are told, a reset too', async (t) => {
  const { events, next, stream } = await watched(t, { key: ['k', 'l'], prefix: 'ticket:' });
  assert.equal(stream.what, 'GET /lock-events?key=k&key=l&prefix=ticket%3A');
  stream.tell('acquired', { fencing_token: 8 });
  stream.tell('queued');
  stream.tell('reset');
  stream.tell('lapsed', { key: 'ticket:1', fencing_token: 9, watchers: 0 });

  const at = '2026-12-01T00:00:00.000Z';
  assert.deepEqual(await next, {
    done: false,
    value: { type: 'acquired', key: 'k', fencingToken: 8, at, watchers: 1 },
  });
  assert.equal((await events.next()).value.type, 'reset');
  assert.deepEqual((await events.next()).value, { type: 'lapsed', key: 'ticket:1', fencingToken: 9, at, watchers: 0 });
  await events.return();
});

test('nothing is opened before it is iterated, and a watch that never was can be let go', async (t) => {
  const { server, locks, clock } = await arranged(t);

  const events = locks.watch({ key: 'k' });
  assert.deepEqual(await events.return(), { done: true, value: undefined });
  await settle();

  assert.equal(server.count, 0);
  assert.equal(clock.pending.size, 0);
});

test('what cannot be watched throws at once', async (t) => {
  const { server, locks } = await arranged(t);
  for (const [options, kind, sentence] of [
    [undefined, RangeError, /^key and prefix must be 1 to 64 together/],
    ['k', TypeError, /^options must be/],
    [{ key: 'a/b' }, RangeError, /^key must be/],
    [{ key: 'k', signal: {} }, TypeError, /^signal must be/],
  ]) {
    assert.throws(
      () => locks.watch(options),
      (error) => error.constructor === kind && sentence.test(error.message),
    );
  }
  assert.equal(server.count, 0);
});

test('leaving the loop closes the socket', async (t) => {
  const { server, locks, clock } = await arranged(t);
  const seen = [];
  const loop = (async () => {
    for await (const { type } of locks.watch({ key: 'k' })) {
      seen.push(type);
      if (seen.length === 2) break;
    }
  })();
  const stream = await server.next();
  stream.stream();
  for (let n = 0; n < 3; n++) stream.tell('released');

  await loop;

  assert.deepEqual(seen, ['released', 'released']);
  await until(() => stream.isClosed);
  assert.equal(clock.pending.size, 0);
});

test('the signal, `return` and closing the client end an iteration that waits for an event', async (t) => {
  for (const end of [
    ({ controller }) => controller.abort(),
    ({ events }) => events.return(),
    ({ client }) => client.close(),
  ]) {
    const controller = new AbortController();
    const all = await watched(t, { key: 'k', signal: controller.signal });
    await settle();
    assert.equal(getEventListeners(controller.signal, 'abort').length, 1);

    end({ ...all, controller });

    assert.deepEqual(await all.next, { done: true, value: undefined });
    assert.deepEqual(await all.events.next(), { done: true, value: undefined });
    await until(() => all.stream.isClosed);
    assert.equal(all.clock.pending.size, 0);
    assert.equal(getEventListeners(controller.signal, 'abort').length, 0);
    assert.equal(all.server.count, 1);
  }
});

test('and so they do while it is being opened, or waits to be opened again', async (t) => {
  for (const lose of [false, true]) {
    const { server, locks, clock } = await arranged(t);
    const controller = new AbortController();
    const next = locks.watch({ key: 'k', signal: controller.signal }).next();
    const stream = await server.next();
    if (lose) stream.lose();
    if (lose) await until(() => clock.pending.size === 1 && stream.isClosed);

    controller.abort();

    assert.deepEqual(await next, { done: true, value: undefined });
    await until(() => stream.isClosed);
    assert.equal(clock.pending.size, 0);
    assert.equal(server.count, 1);
  }
});

test('a signal that is aborted already: nothing is sent', async (t) => {
  const { server, locks } = await arranged(t);

  for await (const _ of locks.watch({ key: 'k', signal: AbortSignal.abort() })) assert.fail();

  assert.equal(server.count, 0);
});

test('a stream that ends is opened again behind the last event', async (t) => {
  const { events, next, stream, server, clock } = await watched(t);
  stream.tell('released', {}, '5d2c81f0-42');
  await next;
  const later = events.next();
  stream.response.end();
  await until(() => stream.isClosed || clock.pending.size === 1);
  await settle();
  await clock.advance(0.2);
  const again = await server.next();
  assert.equal(again.headers['last-event-id'], '5d2c81f0-42');
  again.stream();
  again.tell('acquired', { fencing_token: 8 }, '5d2c81f0-43');

  assert.equal((await later).value.fencingToken, 8);
  await events.return();
});

test('one that ended before it told anything begins anew with a reset', async (t) => {
  const { events, next, stream, server, clock } = await watched(t);
  stream.response.end();
  await until(() => stream.isClosed || clock.pending.size === 1);
  await settle();
  await clock.advance(0.2);
  const again = await server.next();
  assert.equal(again.headers['last-event-id'], undefined);
  again.stream();
  again.tell('acquired', { fencing_token: 8 });

  assert.equal((await next).value.type, 'reset');
  assert.equal((await events.next()).value.fencingToken, 8);
  await events.return();
});

test('what passes is tried again', async (t) => {
  const { server, locks, clock } = await arranged(t);
  const events = locks.watch({ key: 'k' });
  const next = events.next();
  for (const answer of [
    (asked) => asked.lose(),
    (asked) => asked.refuse(503, 'lock_service_unavailable'),
    (asked) => asked.refuse(429, 'lock_rate_limited', { 'retry-after': '3' }),
    (asked) => asked.answer(200, 'a page of a proxy'),
  ]) {
    answer(await server.next());
    await until(() => clock.pending.size === 1);
    await settle();
    await clock.advance(5);
  }
  const stream = await server.next();
  stream.stream();
  stream.tell('released');

  assert.equal((await next).value.type, 'released');
  await events.return();
});

test('what will not pass is thrown out of the loop, and ends it', async (t) => {
  for (const [status, kind] of [
    [400, sdk.ValidationError],
    [401, sdk.AuthenticationError],
    [403, sdk.PermissionDeniedError],
    [404, sdk.NotFoundError],
    [405, sdk.NotFoundError],
    [302, sdk.VolcanoError],
    [410, sdk.VolcanoError],
    [413, sdk.ValidationError],
  ]) {
    const { server, locks } = await arranged(t);
    const events = locks.watch({ key: 'k' });
    const next = events.next();
    (await server.next()).refuse(status, 'x');

    await assert.rejects(next, (error) => error.constructor === kind && error.status === status);
    assert.deepEqual(await events.next(), { done: true, value: undefined });
  }
});

test('without a service key, and with a client that is closed, the loop throws and nothing is sent', async (t) => {
  const { server, client, locks } = await arranged(t, { accessToken: undefined });
  await assert.rejects(locks.watch({ key: 'k' }).next(), sdk.AuthenticationError);

  await client.close();

  await assert.rejects(locks.watch({ key: 'k' }).next(), /this client is closed/);
  assert.equal(server.count, 0);
});

test('who reads slowly takes nothing in meanwhile', async (t) => {
  const { events, next, stream, clock } = await watched(t);
  stream.tell('released');
  await next;
  await settle();

  assert.equal(clock.pending.size, 0, 'nobody reads, so silence is no loss');
  await clock.advance(100);
  stream.tell('lapsed');
  assert.equal((await events.next()).value.type, 'lapsed');
  await events.return();
});

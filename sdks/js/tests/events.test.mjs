import assert from 'node:assert/strict';
import { test } from 'node:test';
import { events, SERVICE_KEY, TOKEN, table } from './support.mjs';

const identity = { serviceKey: SERVICE_KEY, requestId: TOKEN };

test('a stream is read as the table has it', () => {
  for (const { title, chunks, events: expected, last_id } of table('event_stream')) {
    const parser = new events.EventParser();

    const read = chunks.flatMap((chunk) => [...parser.read(Buffer.from(chunk, 'latin1'))]);

    assert.deepEqual(read, expected, title);
    assert.equal(parser.lastId, last_id, title);
  }
});

test('a stream that goes on for another keeps its id until there is a new one', () => {
  const parser = new events.EventParser('7');

  assert.deepEqual([...parser.read(Buffer.from('data: a\n\n'))], [{ type: 'message', data: 'a', id: '7' }]);
  assert.equal(parser.lastId, '7');
});

test('many keys are named, or share prefixes, as the table has it', () => {
  for (const { title, keys, filters } of table('event_filters')) {
    assert.deepEqual(events.filtersOf(keys), filters, title);
  }
});

test('which keys a stream tells of, as the table has it', () => {
  for (const { title, filters, key, covered } of table('event_filters', 'covers')) {
    assert.equal(events.covers(filters, key), covered, title);
  }
});

test('the filters of a watch are one or several keys and prefixes', () => {
  for (const [given, filters] of [
    [{ key: 'a' }, { keys: ['a'], prefixes: [] }],
    [{ prefix: ['a:', 'b:'] }, { keys: [], prefixes: ['a:', 'b:'] }],
    [
      { key: ['a', 'b'], prefix: 'c' },
      { keys: ['a', 'b'], prefixes: ['c'] },
    ],
    [{ key: Array(64).fill('a') }, { keys: Array(64).fill('a'), prefixes: [] }],
  ]) {
    assert.deepEqual(events.checkedFilters(given), filters);
  }
});

test('a watch of nothing, of too much or of what is no key is refused', () => {
  for (const [given, kind, sentence] of [
    [{}, RangeError, /^key and prefix must be 1 to 64 together; got none/],
    [{ key: [], prefix: [] }, RangeError, /got none/],
    [{ key: Array(60).fill('a'), prefix: Array(5).fill('b') }, RangeError, /got 65/],
    [{ key: 'a/b' }, RangeError, /^key must be/],
    [{ key: ['a', ''] }, RangeError, /^key must be/],
    [{ key: null }, TypeError, /^key must be/],
    [{ key: ['a'], prefix: 7 }, TypeError, /^prefix must be/],
    [{ prefix: ':' }, RangeError, /^prefix must be/],
  ]) {
    assert.throws(
      () => events.checkedFilters(given),
      (error) => error.constructor === kind && sentence.test(error.message),
      JSON.stringify(given),
    );
  }
});

test('a stream is asked for by its filters, with the service key and a request id', () => {
  const { method, path, headers, body } = events.subscribe({ keys: ['a:b', 'c'], prefixes: ['d:'] }, '', identity);

  assert.equal(`${method} ${path}`, 'GET /lock-events?key=a%3Ab&key=c&prefix=d%3A');
  assert.equal(headers.Authorization, `Bearer ${SERVICE_KEY}`);
  assert.equal(headers['X-Volcano-Request-Id'], TOKEN);
  assert.equal(headers.Accept, 'text/event-stream');
  assert.ok(!('Last-Event-ID' in headers));
  assert.equal(body, undefined);
});

test('and goes on behind the last event, whatever its id is made of', () => {
  for (const id of ['5d2c81f0-42', 'é☂']) {
    const { headers } = events.subscribe({ keys: ['a'], prefixes: [] }, id, identity);

    assert.equal(Buffer.from(new Headers(headers).get('last-event-id'), 'latin1').toString(), id);
  }
});

const data = { key: 'nightly', fencing_token: 7, at: '2026-12-01T00:00:00.123Z', watchers: 3 };
const message = (type, fields) => ({ type, data: JSON.stringify({ ...data, ...fields }), id: '1' });

test('an event of a lock is a frozen value', () => {
  for (const type of ['acquired', 'released', 'force_released', 'lapsed']) {
    const event = events.lockEvent(message(type));

    assert.deepEqual(event, { type, key: 'nightly', fencingToken: 7, at: data.at, watchers: 3 });
    assert.ok(Object.isFrozen(event));
  }
});

test('a reset has a type alone', () => {
  const event = events.lockEvent({ type: 'reset', data: '{}', id: '1' });

  assert.deepEqual(event, { type: 'reset', key: null, fencingToken: null, at: null, watchers: null });
  assert.ok(Object.isFrozen(event));
});

test('what cannot be understood of an event is a reset: something happened', () => {
  for (const unclear of [
    { type: 'released', data: 'x', id: '' },
    { type: 'released', data: '[]', id: '' },
    message('released', { key: undefined }),
    message('released', { fencing_token: 2 ** 53 }),
    message('released', { fencing_token: '7' }),
    message('released', { at: null }),
    message('released', { watchers: -1 }),
  ]) {
    assert.equal(events.lockEvent(unclear).type, 'reset', JSON.stringify(unclear));
  }
});

test('a kind of event that came up later is left out', () => {
  assert.equal(events.lockEvent(message('queued')), null);
  assert.equal(events.lockEvent(message('message')), null);
});

import assert from 'node:assert/strict';
import { test } from 'node:test';
import { operations, SERVICE_KEY, sdk, TOKEN, table } from './support.mjs';

const REQUEST_ID = '7f3c1d52-5a1e-4c7e-8a36-1f1d0a2b3c4d';
const identity = { serviceKey: SERVICE_KEY, requestId: REQUEST_ID, token: TOKEN };
const acquire = operations.acquire('nightly', { ...identity, ttl: 30 });
const get = operations.get('nightly', identity);

function answer(status, body, headers = {}) {
  return {
    sentAt: 5,
    status,
    headers: new Headers(headers),
    body: typeof body === 'string' ? body : JSON.stringify(body),
  };
}

function refusal(work) {
  try {
    work();
  } catch (error) {
    return error;
  }
  throw new Error('nothing was thrown');
}

/** Feeds a flow with outcomes; the tries it asked for, and how it ended. */
function played(flow, outcomes) {
  const tries = [];
  try {
    let step = flow.next();
    for (const outcome of outcomes) {
      tries.push(step.value);
      step = flow.next(outcome);
    }
    return { tries, isOver: step.done, value: step.value };
  } catch (error) {
    return { tries, error };
  }
}

test('every key of the table is taken or refused as it says, and sent as its segment', () => {
  for (const { key, valid, segment } of table('keys').filter((row) => 'key' in row)) {
    if (valid) {
      assert.equal(operations.get(operations.checkedKey(key), identity).path, `/locks/${segment}`);
    } else {
      assert.match(refusal(() => operations.checkedKey(key)).message, /^key must be 1 to 128 characters/, `${key}`);
    }
  }
});

test('every TTL of the table is taken or refused as it says', () => {
  for (const { ttl, valid } of table('ttls').filter((row) => 'ttl' in row)) {
    if (valid) assert.equal(operations.checkedTtl(ttl), ttl);
    else assert.match(refusal(() => operations.checkedTtl(ttl)).message, /^ttl must be a whole number of seconds/);
  }
});

test('which wait is one, the table knows', () => {
  for (const { wait, number, valid } of table('waits')) {
    const given = number === undefined ? wait : Number(number);
    if (valid) assert.equal(operations.checkedWait(given), given);
    else assert.match(refusal(() => operations.checkedWait(given)).message, /^wait must be a number of seconds/);
  }
  assert.equal(operations.checkedWait(undefined), 0);
});

test('a value of the wrong type is a TypeError, one out of range a RangeError', () => {
  for (const [wrong, kind] of [
    [() => operations.checkedTtl('30'), TypeError],
    [() => operations.checkedTtl(undefined), TypeError],
    [() => operations.checkedTtl(30n), TypeError],
    [() => operations.checkedTtl(Number.NaN), RangeError],
    [() => operations.checkedTtl(Number.POSITIVE_INFINITY), RangeError],
    [() => operations.checkedTtl(5.5), RangeError],
    [() => operations.checkedKey(7), TypeError],
    [() => operations.checkedKey(null), TypeError],
    [() => operations.checkedKey(Symbol('k')), TypeError],
    [() => operations.checkedKey('a/b'), RangeError],
    [() => operations.checkedToken(7), TypeError],
    [() => operations.checkedToken('x'), RangeError],
    [() => operations.checkedRequestId({}), TypeError],
    [() => operations.checkedRequestId('x'), RangeError],
    [() => operations.checkedOptions(30), TypeError],
    [() => operations.checkedOptions(null), TypeError],
    [() => operations.checkedSignal({}), TypeError],
    [() => operations.checkedSignal(null), TypeError],
    [() => operations.checkedLease('a', null), TypeError],
    [() => operations.checkedLease('a', 'lease'), TypeError],
    [() => operations.checkedLease('a', {}), TypeError],
    [() => operations.checkedLease('a', { key: 'b', token: TOKEN }), RangeError],
    [() => operations.checkedLease('a', { key: 'a', token: 'x' }), RangeError],
  ]) {
    assert.equal(refusal(wrong).constructor, kind, String(wrong));
  }
});

test('a UUID is taken in any case and sent in the canonical one', () => {
  assert.equal(operations.checkedToken(TOKEN.toUpperCase()), TOKEN);
  assert.equal(operations.checkedRequestId(REQUEST_ID.toUpperCase()), REQUEST_ID);
});

test('a wrong token is never shown, a long wrong value is cut', () => {
  const secret = 'my-secret-token';

  assert.ok(!refusal(() => operations.checkedToken(secret)).message.includes(secret));
  assert.ok(refusal(() => operations.checkedKey('k'.repeat(10_000))).message.length < 250);
});

test('each request says what the protocol says', () => {
  const lease = { 'X-Volcano-Lock-Token': TOKEN };
  const common = {
    Authorization: `Bearer ${SERVICE_KEY}`,
    'Content-Type': 'application/json',
    'X-Volcano-Request-Id': REQUEST_ID,
  };
  const told = ({ method, path, headers, body }) => ({ method, path, headers, body });

  assert.deepEqual(told(acquire), {
    method: 'POST',
    path: '/locks/nightly/lease',
    headers: { ...common, ...lease },
    body: '{"ttl_seconds":30}',
  });
  assert.deepEqual(told(operations.renew('a:b', { ...identity, ttl: 5 })), {
    method: 'PATCH',
    path: '/locks/a%3Ab/lease',
    headers: { ...common, ...lease },
    body: '{"ttl_seconds":5}',
  });
  assert.deepEqual(told(operations.release('a', identity)), {
    method: 'DELETE',
    path: '/locks/a/lease',
    headers: { ...common, ...lease },
    body: undefined,
  });
  assert.deepEqual(told(get), { method: 'GET', path: '/locks/nightly', headers: common, body: undefined });
  assert.deepEqual(told(operations.forceRelease('a', identity)), {
    method: 'DELETE',
    path: '/locks/a',
    headers: common,
    body: undefined,
  });
});

test('every status of the table becomes the error that it names, with what the answer said', () => {
  for (const { status, code, error } of table('error_names')) {
    const problem = operations.problem(acquire, answer(status, { error: 'a sentence', code }));

    assert.equal(problem.constructor, sdk[error]);
    assert.equal(problem.name, error);
    assert.deepEqual(
      [problem.message, problem.status, problem.code, problem.retryAfter, problem.requestId],
      ['a sentence', status, code, null, REQUEST_ID],
    );
  }
});

test('a refusal without an explanation is one all the same', () => {
  for (const body of ['', '<html>', 'null', '[]', '{"error":1,"code":2}', `${'['.repeat(100_000)}`]) {
    const problem = operations.problem(acquire, answer(502, body));

    assert.equal(problem.constructor, sdk.ServerError);
    assert.equal(problem.code, null);
    assert.equal(problem.message, 'acquire was answered 502 without an explanation');
  }
  assert.equal(operations.problem(acquire, answer(302, '')).constructor, sdk.VolcanoError);
  assert.equal(operations.problem(acquire, answer(413, '')).constructor, sdk.ValidationError);
});

test('Retry-After is read as the table says', () => {
  for (const { header, seconds } of table('retry_after')) {
    assert.equal(operations.retryAfter(header), seconds, header);
  }
  assert.equal(operations.retryAfter(null), null);
});

test("a date in Retry-After counts from the answer's own Date", () => {
  const [date, later] = ['Wed, 21 Oct 2026 07:28:00 GMT', 'Wed, 21 Oct 2026 07:28:30 GMT'];

  assert.equal(operations.retryAfter(later, date), 30);
  assert.equal(operations.retryAfter(date, later), null);
  assert.equal(operations.retryAfter(later, null), null);
  assert.equal(operations.retryAfter('Oct 2026', date), null);
});

test('a grant is read with its fencing token exact to 2^53 - 1', () => {
  const body = `{"expires_at":"2026-11-29T12:00:00.123Z","fencing_token":${Number.MAX_SAFE_INTEGER}}`;

  const grant = operations.granted(acquire, answer(201, body, { 'X-Volcano-Expires-In': '29.998' }));

  assert.deepEqual(grant, {
    sentAt: 5,
    expiresAt: '2026-11-29T12:00:00.123Z',
    fencingToken: 9007199254740991,
    expiresIn: 29.998,
  });
});

test('a good status with an answer that cannot be understood is a ServerError', () => {
  const expires_at = '2026-11-29T12:00:00Z';
  for (const body of [
    '',
    'junk',
    '[]',
    'null',
    { expires_at },
    { fencing_token: 7 },
    { expires_at, fencing_token: '7' },
    { expires_at, fencing_token: 7.5 },
    { expires_at, fencing_token: -1 },
    `{"expires_at":"${expires_at}","fencing_token":9007199254740993}`,
    { expires_at: 'soon', fencing_token: 7 },
    { expires_at: '2026-11-29T12:00:00', fencing_token: 7 },
    { expires_at: '2026-13-29T12:00:00Z', fencing_token: 7 },
    { expires_at: 5, fencing_token: 7 },
  ]) {
    const error = refusal(() => operations.granted(acquire, answer(201, body)));

    assert.equal(error.constructor, sdk.ServerError, JSON.stringify(body));
    assert.equal(error.status, 201);
  }
  assert.equal(refusal(() => operations.state(get, answer(200, { held: 1 }))).constructor, sdk.ServerError);
  assert.equal(refusal(() => operations.state(get, answer(200, { held: true }))).constructor, sdk.ServerError);
});

test('an X-Volcano-Expires-In that is no number counts as absent', () => {
  const body = { expires_at: '2026-11-29T12:00:00Z', fencing_token: 7 };

  for (const value of ['-1', '1e3', 'x', '1.', '.5', 'NaN', '12345678901']) {
    assert.equal(operations.granted(acquire, answer(201, body, { 'X-Volcano-Expires-In': value })).expiresIn, null);
  }
});

test('a read tells of a free and of a held key', () => {
  const free = { held: false, expiresAt: null, fencingToken: null };
  const held = { held: true, expires_at: '2026-11-29T12:00:00Z', fencing_token: 7 };

  assert.deepEqual(operations.state(get, answer(200, { held: false })), free);
  assert.deepEqual(operations.state(get, answer(200, held)), {
    held: true,
    expiresAt: '2026-11-29T12:00:00Z',
    fencingToken: 7,
  });
});

const good = { expires_at: '2026-11-29T12:00:00Z', fencing_token: 7 };
const lost = { sentAt: 3, failure: new sdk.TransportError('lost'), reached: true };
const refused = { sentAt: 3, failure: new sdk.TransportError('refused'), reached: false };
const flow = (options = {}) =>
  operations.acquireFlow(acquire, { ttl: 30, timeout: 10, givenUp: () => false, ...options });

test('an acquire without an answer, or with a 503, is sent once more, identical', () => {
  for (const first of [lost, refused, answer(503, '')]) {
    const { tries, value } = played(flow(), [first, answer(201, good)]);

    assert.equal(tries.length, 2);
    assert.equal(tries[0].request, tries[1].request);
    assert.equal(value.firstSentAt, first.sentAt);
    assert.equal(value.grant.sentAt, 5);
  }
});

test('a try of an acquire takes at most the TTL less a second', () => {
  assert.equal(flow({ ttl: 5 }).next().value.timeout, 4);
  assert.equal(flow({ ttl: 60 }).next().value.timeout, 10);
});

test('whether the server may have granted a lease is known after each kind of end', () => {
  for (const [outcomes, unknown] of [
    [[refused, refused], false],
    [[lost, refused], true],
    [[lost, answer(409, {})], false],
    [[lost, answer(429, {})], true],
    [[lost, answer(401, {})], true],
    [[answer(503, ''), answer(503, '')], true],
    [[answer(500, '')], true],
    [[answer(201, 'junk')], true],
    [[answer(409, {})], false],
    [[answer(400, {})], false],
  ]) {
    const { error } = played(flow(), outcomes);

    assert.equal(error.unknown, unknown, JSON.stringify(outcomes));
  }
});

test('an acquire that was given up in the meantime is not tried again', () => {
  const { error } = played(flow({ givenUp: () => true }), [lost]);

  assert.equal(error.unknown, true);
});

test('a release is tried twice after no answer or a 5xx, and a 409 to the second try counts as released', () => {
  const release = operations.release('nightly', identity);
  const flow = (tries = 2) => operations.releaseFlow(release, { tries });

  assert.equal(played(flow(), [answer(204, '')]).isOver, true);
  assert.equal(played(flow(), [lost, answer(409, {})]).isOver, true);
  assert.equal(played(flow(), [answer(500, ''), answer(204, '')]).tries[1].timeout, 2);
  assert.equal(played(flow(), [answer(409, {})]).error.constructor, sdk.ConflictError);
  assert.equal(played(flow(), [answer(429, {})]).error.constructor, sdk.RateLimitedError);
  assert.equal(played(flow(), [lost, lost]).error.constructor, sdk.TransportError);
  assert.equal(played(flow(1), [lost]).error.constructor, sdk.TransportError);
});

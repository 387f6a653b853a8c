import assert from 'node:assert/strict';
import { test } from 'node:test';
import { ManualClock, operations, renewals, SERVICE_KEY, sdk, settle, TOKEN, table } from './support.mjs';

const { Holding, Kept, MOST_IN_FLIGHT, Renewals, Schedule, Trust } = renewals;
const DAY = 86_400;
const request = operations.renew('k', { serviceKey: SERVICE_KEY, requestId: TOKEN, token: TOKEN, ttl: 30 });

function near(actual, expected, what) {
  assert.ok(Math.abs(actual - expected) < 1e-6, `${what}: ${actual} is not ${expected}`);
}

function grant(sentAt, { expiresIn = null, fencingToken = 7 } = {}) {
  return { sentAt, expiresAt: '2026-11-29T12:00:00Z', fencingToken, expiresIn };
}

function trust(ttl, { sentAt = 0, firstSentAt = sentAt, expiresIn } = {}) {
  return Trust.begun({ firstSentAt, grant: grant(sentAt, { expiresIn }) }, ttl);
}

function holding(ttl = 30) {
  return new Holding(ttl, 'k', TOKEN, { firstSentAt: 0, grant: grant(0) }, 0);
}

function answered(sentAt, status = 200, { fencingToken = 7, headers = {} } = {}) {
  const body = JSON.stringify({ expires_at: '2026-11-29T13:00:00Z', fencing_token: fencingToken });
  return { sentAt, status, headers: new Headers(headers), body };
}

function failed(sentAt) {
  return { sentAt, failure: new sdk.TransportError('no answer'), reached: true };
}

test('the four tables of times hold', () => {
  for (const { ttl, remaining, jitter, seconds } of table('renewal_delay')) {
    near(renewals.renewalDelay(ttl, remaining, jitter), seconds, 'renewal_delay');
  }
  for (const { ttl, failures, remaining, jitter, seconds } of table('retry_delay')) {
    near(renewals.retryDelay(ttl, failures, remaining, jitter), seconds, 'retry_delay');
  }
  for (const { remaining, client_timeout, seconds } of table('try_timeout')) {
    near(renewals.tryTimeout(remaining, client_timeout), seconds, 'try_timeout');
  }
  for (const { ttl, seconds } of table('stop_time')) near(new Trust(0, ttl, ttl).stopAt, seconds, 'stop_time');
});

test('a success is worth its send time and the shortest TTL that was ever sent', () => {
  const shortened = trust(30).sent(10, 5);

  assert.equal(shortened.deadline, 15);
  assert.equal(shortened.answered(grant(12)).deadline, 17);
});

test('what the server says is left counts where it is less', () => {
  assert.equal(trust(30, { expiresIn: 12.5 }).deadline, 12.5);
  assert.equal(trust(30, { expiresIn: 31 }).deadline, 30);
});

test('a late answer never moves the deadline back', () => {
  assert.equal(trust(30, { sentAt: 20 }).answered(grant(5)).deadline, 50);
});

test('nothing is trusted past the hard deadline less a thousandth, counted from the first try', () => {
  const held = trust(90 * DAY, { sentAt: 9, firstSentAt: 4 }).answered(grant(70 * DAY));

  near(held.deadline, 4 + 89.91 * DAY, 'deadline');
});

test('after a failure the next try comes soon, doubling, and not before Retry-After', () => {
  const about = { sentAt: 10, now: 10.5, jitter: 0 };

  near(new Schedule(10).afterFailure(trust(30), { ...about, retryAfter: null }).dueAt, 10.5, 'not in the past');
  near(new Schedule(10, 3).afterFailure(trust(30), { ...about, retryAfter: null }).dueAt, 10.8, 'doubled');
  near(new Schedule(10).afterFailure(trust(30), { ...about, retryAfter: 7 }).dueAt, 17.5, 'Retry-After');
});

test('a Retry-After beyond the stop time leaves one last try, midway', () => {
  const last = new Schedule(10).afterFailure(trust(30), { sentAt: 10, now: 11, jitter: 0, retryAfter: 1e9 });

  assert.deepEqual([last.dueAt, last.isLast], [20, true]);
  assert.equal(
    last.afterFailure(trust(30), { sentAt: 20, now: 20, jitter: 0, retryAfter: null }).dueAt,
    Number.POSITIVE_INFINITY,
  );
});

test('a shorter TTL that crosses brings the stop time and the next renewal forward', () => {
  const held = holding(30);

  held.crossed(6, 5, 0);

  assert.equal(held.trust.stopAt, 10);
  near(held.schedule.dueAt, 6 + 5 / 3, 'due');
});

test('a TTL that is not shorter leaves the schedule alone', () => {
  const held = holding(30);

  held.crossed(6, 60, 0);

  assert.deepEqual([held.trust.deadline, held.schedule.dueAt], [30, 10]);
});

test('the first look at or after the stop time is the loss, with what failed last as its cause', () => {
  const held = holding(30);
  held.renewed(operations.renewed(request, failed(10)), { now: 11, jitter: 0 });

  assert.equal(held.look(28.999), null);
  const loss = held.look(29);

  assert.equal(loss.constructor, sdk.LockLostError);
  assert.equal(loss.cause.constructor, sdk.TransportError);
  assert.deepEqual([loss.status, loss.code], [null, null]);
  assert.ok(loss.message.includes('"k"') && loss.message.includes('7') && !loss.message.includes(TOKEN));
});

test('a failure that a success followed is no cause of a later loss', () => {
  const held = holding(30);
  held.renewed(operations.renewed(request, failed(10)), { now: 11, jitter: 0 });
  held.renewed(operations.renewed(request, answered(12)), { now: 12, jitter: 0 });

  assert.equal(held.look(60).because, null);
});

test('a lost holding never becomes held again', () => {
  const held = holding(30);
  const loss = held.look(40);

  held.renewed(operations.renewed(request, answered(28)), { now: 41, jitter: 0 });
  held.answered(grant(41), 0);

  assert.equal(held.look(0), loss);
});

test('a renewal that is refused for good loses the lock at once, others are tried again', () => {
  for (const { status, renewal } of table('error_names')) {
    const held = holding(30);

    held.renewed(operations.renewed(request, answered(10, status)), { now: 10, jitter: 0 });

    assert.equal(held.loss !== null, renewal === 'final', String(status));
    if (held.loss) assert.equal(held.loss.because.status, status);
    else assert.equal(held.schedule.failures, 1);
  }
});

test("a renewal that returns another lease's fencing token loses the lock", () => {
  const held = holding(30);

  held.renewed(operations.renewed(request, answered(10, 200, { fencingToken: 8 })), { now: 10, jitter: 0 });

  assert.match(held.loss.message, /it now has the fencing token 8/);
});

test('a renewal updates the lease in place', () => {
  const held = holding(30);
  const { lease } = held;

  held.renewed(operations.renewed(request, answered(10)), { now: 10, jitter: 0 });

  assert.equal(lease.expiresAt, '2026-11-29T13:00:00Z');
  assert.equal(held.trust.deadline, 40);
});

test('after its end there is no loss, whatever comes', () => {
  const held = holding(30);
  held.ended = true;

  held.renewed(operations.renewed(request, answered(10, 409)), { now: 10, jitter: 0 });

  assert.equal(held.look(1e9), null);
});

// --- the loop: many leases ---------------------------------------------------------------------------

/** A loop whose requests wait for their test: `sent` has those that nobody answered. */
function looped({ timeout = 10 } = {}) {
  const clock = new ManualClock();
  const start = clock.now();
  const sent = [];
  const losses = [];
  let ids = 0;
  const loop = new Renewals({
    clock,
    timeout,
    jitter: () => 0,
    renew: (part) => ({ operation: 'renew', requestId: ++ids, parts: [part] }),
    renewMany: (parts) => ({ operation: 'renewMany', requestId: ++ids, parts }),
    send: ({ request, timeout }, cancel) =>
      new Promise((resolve) => {
        const sentAt = clock.now();
        sent.push({
          ...request,
          keys: request.parts.map(({ key }) => key),
          timeout,
          cancel,
          fail: () => resolve({ sentAt, failure: new sdk.TransportError('no answer'), reached: true }),
          answer: (status, body, headers = {}) =>
            resolve({ sentAt, status, headers: new Headers(headers), body: JSON.stringify(body) }),
          grant() {
            const leases = this.keys.map(granted);
            this.answer(200, request.operation === 'renew' ? leases[0] : { leases });
          },
        });
      }),
  });
  /** Holds leases that were sent for at these seconds after the start: {a: 0, b: 0.3}. */
  const hold = (sentAts, ttl = 30) =>
    Object.entries(sentAts).map(([key, seconds]) => {
      const sentAt = start + seconds;
      const acquired = { firstSentAt: sentAt, grant: grant(sentAt) };
      const kept = new Kept(new Holding(ttl, key, TOKEN, acquired, 0), () => losses.push(key));
      loop.keep(kept);
      return kept;
    });
  return { loop, clock, start, sent, losses, hold };
}

function granted(key) {
  return { key, expires_at: '2026-11-29T13:00:00Z', expires_in: 30, fencing_token: 7 };
}

test('renewals that fall due within half a second travel together, one that is due alone goes alone', async () => {
  const { clock, sent, hold } = looped();
  hold({ later: 0.51, second: 0.49, first: 0 });

  await clock.advance(10.4);
  assert.deepEqual(
    sent.map(({ operation, keys }) => [operation, keys]),
    [['renewMany', ['first', 'second']]],
  );
  assert.deepEqual(sent[0].parts[0], { key: 'first', token: TOKEN, ttl: 30 });
  await clock.advance(0.2);

  assert.deepEqual([sent[1].operation, sent[1].keys], ['renew', ['later']]);
});

test('a short lease is brought forward by a thirtieth of its TTL at most', async () => {
  const { clock, sent, hold } = looped();
  hold({ a: 0, soon: 0.16, later: 0.17 }, 5);

  await clock.advance(5 / 3 + 0.001);

  assert.deepEqual(sent[0].keys, ['a', 'soon']);
});

test('each lease goes on by its own: its renewal comes a third of its TTL after the send', async () => {
  const { clock, start, sent, hold } = looped();
  const [long, short] = [...hold({ long: 0 }, 60), ...hold({ short: 20 - 10 / 3 }, 10)];

  await clock.advance(20);
  sent[0].grant();
  await clock.advance(0);

  assert.deepEqual(sent[0].keys.toSorted(), ['long', 'short']);
  near(long.holding.schedule.dueAt, start + 20 + (60 - 1 - 20) / 2, 'long');
  near(short.holding.schedule.dueAt, start + 20 + 10 / 3, 'short');
  near(long.holding.trust.deadline, start + 60, 'the server left 30 s, which moves nothing back');
  assert.equal(short.holding.lease.expiresAt, '2026-11-29T13:00:00Z');
});

test('the try takes no longer than that of the lease with the least left', async () => {
  const { clock, sent, hold } = looped();
  hold({ long: 0 }, 60);
  hold({ short: 20 - 10 / 3 }, 10);

  await clock.advance(20);

  near(sent[0].timeout, (9 - 10 / 3) / 3, 'timeout');
});

test('at most 500 share a request, those with the least left first', async () => {
  const { clock, sent, hold } = looped();
  hold(Object.fromEntries(Array.from({ length: 1_200 }, (_, n) => [`k${(n * 37) % 1_200}`, ((n * 37) % 1_200) / 1e4])));

  clock.block(12); // all of them become due while the event loop is blocked
  await clock.advance(0);

  assert.deepEqual(
    sent.map(({ keys }) => keys.length),
    [500, 500, 200],
  );
  const rest = sent.slice(1).flatMap(({ keys }) => keys);
  assert.deepEqual(rest.slice(1), Array.from({ length: 1_200 }, (_, n) => `k${n}`).slice(-699));
});

test('a lease that is refused is lost alone, one over the quota is tried again when the server says', async () => {
  const { clock, start, sent, losses, hold } = looped();
  const [fine, gone, limited, odd, mute] = hold({ fine: 0, gone: 0, limited: 0, odd: 0, mute: 0 });

  await clock.advance(10);
  const refused = (key, code, more) => ({ key, error: 'a sentence', code, ...more });
  const leases = {
    fine: granted('fine'),
    gone: refused('gone', 'lock_ownership_lost'),
    limited: refused('limited', 'lock_rate_limited', { retry_after: 5 }),
    odd: refused('odd', 'never_heard_of'),
    mute: { key: 'mute' },
  };
  sent[0].answer(200, { leases: sent[0].keys.map((key) => leases[key]) });
  await clock.advance(0);

  assert.deepEqual(losses, ['gone']);
  assert.equal(gone.holding.loss.because.constructor, sdk.ConflictError);
  assert.deepEqual([gone.holding.loss.status, gone.holding.loss.code], [409, 'lock_ownership_lost']);
  near(fine.holding.schedule.dueAt, start + 20, 'fine');
  near(limited.holding.schedule.dueAt, start + 15, 'limited');
  for (const kept of [odd, mute]) near(kept.holding.schedule.dueAt, start + 10.1, kept.holding.lease.key);
});

test('what fails in transit, or cannot be understood, is transient for all, and tried again', async () => {
  const answers = [
    ({ fail }) => fail(),
    ({ answer }) => answer(503, {}),
    ({ answer }) => answer(429, { error: 'a sentence', code: 'lock_rate_limited' }),
    ({ answer }) => answer(409, { error: 'a sentence', code: 'lock_ownership_lost' }),
    ({ answer }) => answer(204, { leases: [granted('a'), granted('b')] }),
    ({ answer }) => answer(200, [granted('a'), granted('b')]),
    ({ answer }) => answer(200, { leases: [granted('a')] }),
    ({ answer }) => answer(200, { leases: [granted('a'), granted('b'), granted('b')] }),
    ({ answer }) => answer(200, { leases: [granted('a'), granted('a')] }),
    ({ answer }) => answer(200, { leases: [granted('a'), null] }),
  ];
  for (const how of answers) {
    const { clock, sent, losses, hold } = looped();
    const both = hold({ a: 0, b: 0.01 });

    await clock.advance(10);
    how(sent[0]);
    await clock.advance(0);
    for (const { holding } of both) assert.equal(holding.schedule.failures, 1, String(how));
    await clock.advance(0.2);

    assert.deepEqual(losses, []);
    assert.deepEqual(sent[1].keys, ['a', 'b'], String(how));
    assert.notEqual(sent[1].requestId, sent[0].requestId);
  }
});

test('a retry goes along when it is due, and is not brought forward', async () => {
  const { clock, start, sent, hold } = looped();
  const [first] = hold({ first: 0, second: 9.7, third: 10.3 });

  await clock.advance(10);
  sent[0].answer(503, {}, { 'Retry-After': '10' });
  await clock.advance(0);
  near(first.holding.schedule.dueAt, start + 20, 'due');
  await clock.advance(9.7);
  assert.deepEqual(sent[1].keys, ['second']);
  await clock.advance(0.3);

  assert.deepEqual(sent[2].keys, ['first', 'third']);
});

test('an unknown key or a missing permission loses all', async () => {
  for (const status of [401, 403]) {
    const { clock, sent, losses, hold } = looped();
    hold({ a: 0, b: 0 });

    await clock.advance(10);
    sent[0].answer(status, { error: 'a sentence', code: 'permission_denied' });
    await clock.advance(0);

    assert.deepEqual(losses.toSorted(), ['a', 'b']);
  }
});

test('after a 400 or a 413 these leases are renewed one by one, this time', async () => {
  for (const status of [400, 413]) {
    const { clock, sent, hold } = looped();
    const count = MOST_IN_FLIGHT + 10;
    hold(Object.fromEntries(Array.from({ length: count }, (_, n) => [`k${n}`, 0])));

    await clock.advance(10);
    sent[0].answer(status, { error: 'a sentence', code: 'invalid_request' });
    await clock.advance(0);
    assert.equal(sent.length, 1 + MOST_IN_FLIGHT);
    for (let done = 1; done <= count; done++) {
      sent[done].grant();
      await settle();
    }
    assert.ok(sent.slice(1).every(({ operation }) => operation === 'renew'));
    assert.equal(sent.length, 1 + count);
    await clock.advance(10);

    assert.equal(sent[1 + count].keys.length, count);
  }
});

test('a server that cannot renew many is asked once; then each goes alone, the most urgent first, few at a time', async () => {
  for (const status of [404, 405]) {
    const { clock, sent, losses, hold } = looped();
    const count = 3 * MOST_IN_FLIGHT;
    hold(Object.fromEntries(Array.from({ length: count }, (_, n) => [(n * 37) % count, ((n * 37) % count) / 1e3])));

    clock.block(12);
    await clock.advance(0);
    assert.equal(sent[0].keys.length, count);
    sent[0].answer(status, { error: 'a sentence', code: 'not_found' });
    await clock.advance(0);
    assert.equal(sent.length, 1 + MOST_IN_FLIGHT);
    for (let done = 1; done <= count; done++) {
      sent[done].grant();
      await settle();
      assert.equal(sent.length, 1 + Math.min(MOST_IN_FLIGHT + done, count));
    }
    const queued = sent.slice(1 + MOST_IN_FLIGHT).map(({ keys: [key] }) => Number(key));
    assert.deepEqual(
      queued,
      queued.toSorted((one, other) => one - other),
    );
    await clock.advance(11);

    assert.ok(sent.slice(1).every(({ operation }) => operation === 'renew'));
    assert.deepEqual(losses, []);
  }
});

test('a lease that ends leaves its flight, which goes on for the others and ends with the last', async () => {
  const { loop, clock, sent, losses, hold } = looped();
  const [a, b, c] = hold({ a: 0, b: 0, c: 0 });

  await clock.advance(10);
  loop.end(a);
  assert.equal(sent[0].cancel.aborted, false);
  const refusals = sent[0].keys.map((key) =>
    key === 'b' ? granted('b') : { key, error: '', code: 'lock_ownership_lost' },
  );
  sent[0].answer(200, { leases: refusals });
  await clock.advance(0);

  assert.deepEqual(losses, ['c']);
  assert.deepEqual([a.holding.loss, b.holding.loss, c.holding.isLive], [null, null, false]);

  await clock.advance(10);
  hold({ d: 20, e: 20 });
  sent[1].grant();
  await clock.advance(10);
  assert.equal(sent[2].keys.length, 3);
  for (const kept of loop.all) loop.end(kept);

  assert.equal(sent[2].cancel.aborted, true);
  assert.equal(clock.pending.size, 0);
});

test('a flight that hangs delays nobody else, and each of its leases is lost at its own stop time', async () => {
  const { clock, sent, losses, hold } = looped({ timeout: 100 });
  hold({ a: 0, b: 0.4, c: 1 });

  await clock.advance(10);
  assert.deepEqual(sent[0].keys, ['a', 'b']);
  await clock.advance(1);
  assert.deepEqual(sent[1].keys, ['c']);
  sent[1].grant();
  await clock.advance(18.1);
  assert.deepEqual(losses, ['a']);
  await clock.advance(0.4);

  assert.deepEqual(losses, ['a', 'b']);
});

import assert from 'node:assert/strict';
import { test } from 'node:test';
import { operations, renewals, SERVICE_KEY, sdk, TOKEN, table } from './support.mjs';

const { Holding, Schedule, Trust } = renewals;
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
  held.renewed(request, failed(10), { now: 11, jitter: 0 });

  assert.equal(held.look(28.999), null);
  const loss = held.look(29);

  assert.equal(loss.constructor, sdk.LockLostError);
  assert.equal(loss.cause.constructor, sdk.TransportError);
  assert.deepEqual([loss.status, loss.code], [null, null]);
  assert.ok(loss.message.includes('"k"') && loss.message.includes('7') && !loss.message.includes(TOKEN));
});

test('a lost holding never becomes held again', () => {
  const held = holding(30);
  const loss = held.look(40);

  held.renewed(request, answered(28), { now: 41, jitter: 0 });
  held.answered(grant(41), 0);

  assert.equal(held.look(0), loss);
});

test('a renewal that is refused for good loses the lock at once, others are tried again', () => {
  for (const { status, renewal } of table('error_names')) {
    const held = holding(30);

    held.renewed(request, answered(10, status), { now: 10, jitter: 0 });

    assert.equal(held.loss !== null, renewal === 'final', String(status));
    if (held.loss) assert.equal(held.loss.because.status, status);
    else assert.equal(held.schedule.failures, 1);
  }
});

test("a renewal that returns another lease's fencing token loses the lock", () => {
  const held = holding(30);

  held.renewed(request, answered(10, 200, { fencingToken: 8 }), { now: 10, jitter: 0 });

  assert.match(held.loss.message, /it now has the fencing token 8/);
});

test('a renewal updates the lease in place', () => {
  const held = holding(30);
  const { lease } = held;

  held.renewed(request, answered(10), { now: 10, jitter: 0 });

  assert.equal(lease.expiresAt, '2026-11-29T13:00:00Z');
  assert.equal(held.trust.deadline, 40);
});

test('after its end there is no loss, whatever comes', () => {
  const held = holding(30);
  held.ended = true;

  held.renewed(request, answered(10, 409), { now: 10, jitter: 0 });

  assert.equal(held.look(1e9), null);
});

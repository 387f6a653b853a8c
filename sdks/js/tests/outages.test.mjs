/** Many leases in virtual time: an outage costs none, and none is lost in a queue. */

import assert from 'node:assert/strict';
import { test } from 'node:test';
import { renewals, sdk, TOKEN } from './support.mjs';

const { Holding, Kept, Renewals } = renewals;

const TTLS = [5, 6, 8, 15, 20, 30, 60];

/** A stream of numbers from 0 to below 1 that a seed fixes (mulberry32). */
function randomly(seed) {
  let state = seed;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}

/** Events in the order of their time; only promises run between them. */
class World {
  #now = 0;
  #events = [];

  now() {
    return this.#now;
  }

  at(when, wake) {
    const event = { when, wake };
    this.#events.push(event);
    return () => {
      const index = this.#events.indexOf(event);
      if (index >= 0) this.#events.splice(index, 1);
    };
  }

  async run(end) {
    for (;;) {
      for (let turn = 0; turn < 12; turn++) await undefined;
      let next;
      for (const event of this.#events) if (event.when <= end && !(next?.when <= event.when)) next = event;
      if (!next) return;
      this.#events.splice(this.#events.indexOf(next), 1);
      this.#now = Math.max(this.#now, next.when);
      next.wake();
    }
  }
}

function grant(sentAt) {
  return { sentAt, expiresAt: '2026-11-29T12:00:00Z', fencingToken: 7, expiresIn: null };
}

const requests = {
  renew: () => ({ operation: 'renew' }),
  renewMany: (parts) => ({ operation: 'renewMany', parts }),
};

function good(sentAt, { parts } = {}) {
  const granted = { expires_at: '2026-11-29T12:00:00Z', fencing_token: 7 };
  const body = parts ? { leases: parts.map(({ key }) => ({ key, ...granted })) } : granted;
  return { sentAt, status: 200, headers: new Headers(), body: JSON.stringify(body) };
}

function begin(loop, ttl, losses) {
  const holding = new Holding(ttl, 'k', TOKEN, { firstSentAt: 0, grant: grant(0) }, 0);
  const kept = new Kept(holding, () => losses.push(holding));
  loop.keep(kept);
  return kept;
}

/** Leases of these TTLs, whose server is away for a while from some moment on: which were lost? */
async function lostOf(ttls, random) {
  const world = new World();
  const shortest = Math.min(...ttls);
  const from = random() * 2 * shortest;
  const until = from + (shortest >= 15 ? shortest / 2 : shortest / 3);
  const kind = ['hang', 'reset', 'refusal', 'mixture'][Math.floor(random() * 4)];
  const fail = (sentAt, timeout) => {
    const way = kind === 'mixture' ? ['hang', 'reset', 'refusal'][Math.floor(random() * 3)] : kind;
    const wait = way === 'hang' ? timeout : 0.002;
    const failure = { sentAt, failure: new sdk.TransportError(way), reached: way !== 'refusal' };
    return new Promise((resolve) => world.at(sentAt + wait, () => resolve(failure)));
  };
  const losses = [];
  const loop = new Renewals({
    ...requests,
    clock: world,
    timeout: 10,
    jitter: () => 2 * random() - 1,
    send: ({ request, timeout }) => {
      const sentAt = world.now();
      const isAway = sentAt >= from && sentAt < until;
      return isAway
        ? fail(sentAt, timeout)
        : new Promise((resolve) => world.at(sentAt + 0.005, () => resolve(good(sentAt, request))));
    },
  });
  const all = ttls.map((ttl) => begin(loop, ttl, losses));
  await world.run(3.2 * shortest);
  for (const kept of all) loop.end(kept);
  return losses.map(({ ttl }) => ({ ttl, from, kind }));
}

test('of 2 000 leases with one outage each of a third of the TTL (a half from 15 s) none is lost', async () => {
  const random = randomly(4);
  const lost = [];
  for (let lease = 0; lease < 2_000; lease++) {
    lost.push(...(await lostOf([TTLS[lease % TTLS.length]], random)));
  }

  assert.deepEqual(lost, []);
});

test('nor of 60 leases at a time that one client holds and renews together', async () => {
  const random = randomly(7);
  const lost = [];
  for (let round = 0; round < 35; round++) {
    const shortest = round % TTLS.length;
    const ttls = Array.from({ length: 60 }, (_, n) => TTLS[Math.max(shortest, n % TTLS.length)]);
    lost.push(...(await lostOf(ttls, random)));
  }

  assert.deepEqual(lost, []);
});

test('the measure is sharp: an outage of the whole TTL costs leases', async () => {
  const world = new World();
  const losses = [];
  const loop = new Renewals({
    ...requests,
    clock: world,
    timeout: 10,
    jitter: () => 0,
    send: ({ timeout }) => {
      const failure = { sentAt: world.now(), failure: new sdk.TransportError('away'), reached: false };
      return new Promise((resolve) => world.at(world.now() + timeout, () => resolve(failure)));
    },
  });
  begin(loop, 30, losses);

  await world.run(28.9);
  assert.equal(losses.length, 0);
  await world.run(29);

  assert.equal(losses.length, 1);
  assert.equal(losses[0].loss.cause.message, 'away');
});

test('60 leases of 5 s whose renewals take 200 ms each: none is lost to a queue', async () => {
  const world = new World();
  const random = randomly(60);
  const losses = [];
  let renewed = 0;
  const loop = new Renewals({
    ...requests,
    clock: world,
    timeout: 10,
    jitter: () => 2 * random() - 1,
    send: ({ request }) => {
      const sentAt = world.now();
      renewed += request.parts?.length ?? 1;
      return new Promise((resolve) => world.at(sentAt + 0.2, () => resolve(good(sentAt, request))));
    },
  });
  const all = Array.from({ length: 60 }, () => begin(loop, 5, losses));

  await world.run(60);
  for (const kept of all) loop.end(kept);
  await world.run(61);

  assert.deepEqual(losses, []);
  assert.ok(renewed > 60 * 25, String(renewed));
});

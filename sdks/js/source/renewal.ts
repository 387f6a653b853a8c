/**
 * When to renew, and until when to trust a lease: first the pure half (`now`, jitter and answers go in), then
 * the loop that acts on it for all locks that a client holds. One idea, so one file.
 *
 *     send          ttl/3 ±10 %        stop time    deadline                        + 1 s
 *     |--- trusted --- renewal due --- tries --- | -- margin -- | server: lapsed -- | somebody else's
 *     ^ the deadline counts from here: the send of the try that was answered well
 *
 * All times are seconds of the local suspend-aware clock; the server's `expires_at` is for people.
 * The rules in words: docs/semantics.md#local-deadline, #renewal, #retries.
 * The formulas as data, the same in every SDK: conformance/tables/renewal_delay.json.
 */

import type { Clock } from './clock.js';
import { LockLostError, type VolcanoError } from './errors.js';
import { Heap } from './heap.js';
import { type LockLease, updated } from './lease.js';
import type { Acquired, Grant, Outcome, Part, Renewed, Request, Try } from './operations.js';
import * as operations from './operations.js';

/** Seconds: the server's hard deadline of 90 days less a thousandth, for clocks that drift apart. */
export const LONGEST_TRUST = 89.91 * 86_400;

/**
 * Seconds from the send of the last success to the next renewal: a third of the TTL, ±10 % by `jitter` (-1 to
 * 1). Where the server left less than the TTL, half of what `remaining` from that send to the stop time, so
 * that a renewal still fits.
 */
export function renewalDelay(ttl: number, remaining: number, jitter: number): number {
  return Math.max(Math.min((ttl / 3) * (1 + 0.1 * jitter), remaining / 2), 0.5);
}

/**
 * Seconds from the send of a failed try to the next; `failures` in a row, 1 or more. `remaining`: from the
 * send of the failed try to the stop time. `jitter`: -1 to 1.
 */
export function retryDelay(ttl: number, failures: number, remaining: number, jitter: number): number {
  const longest = Math.min(ttl / 10, Math.max(5, ttl / 100));
  const delay = Math.min(0.1 * 2 ** (failures - 1), longest) * (1 + 0.5 * jitter);
  return Math.min(delay, Math.max(remaining / 2, 0.1));
}

/** How long one renewal try may take: room for two more in what `remaining` to the stop time. */
export function tryTimeout(remaining: number, clientTimeout: number): number {
  return Math.min(Math.max(remaining / 3, Math.min(0.5, remaining / 2)), clientTimeout);
}

/** Until when the holder may act. `ttl`: the shortest that any request of the lease carried. */
export class Trust {
  constructor(
    readonly firstSentAt: number,
    readonly ttl: number,
    readonly deadline: number,
  ) {}

  /** From a good acquire; two tries of it may have been sent, the lease is as old as the first. */
  static begun({ firstSentAt, grant }: Acquired, ttl: number): Trust {
    return new Trust(firstSentAt, ttl, Number.NEGATIVE_INFINITY).answered(grant);
  }

  /** From here on no renewal can help. */
  get stopAt(): number {
    return this.deadline - Math.max(1, this.ttl / 1000);
  }

  /** A request with this TTL went out: if it shortens the lease, it does so from now on. */
  sent(at: number, ttl: number): Trust {
    return new Trust(this.firstSentAt, Math.min(this.ttl, ttl), Math.min(this.deadline, at + ttl));
  }

  /** A good answer, also a late one: worth its send time and the shortest TTL; never less than before. */
  answered({ sentAt, expiresIn }: Grant): Trust {
    const worth = Math.min(sentAt + this.ttl, sentAt + (expiresIn ?? this.ttl), this.firstSentAt + LONGEST_TRUST);
    return new Trust(this.firstSentAt, this.ttl, Math.max(this.deadline, worth));
  }
}

/** When the next renewal is sent; `dueAt` is infinite when none will be. */
export class Schedule {
  constructor(
    readonly dueAt: number,
    readonly failures = 0,
    readonly isLast = false,
  ) {}

  static afterSuccess(trust: Trust, { sentAt, jitter }: { sentAt: number; jitter: number }): Schedule {
    return new Schedule(sentAt + renewalDelay(trust.ttl, trust.stopAt - sentAt, jitter));
  }

  afterFailure(
    trust: Trust,
    { sentAt, now, jitter, retryAfter }: { sentAt: number; now: number; jitter: number; retryAfter: number | null },
  ): Schedule {
    const failures = this.failures + 1;
    if (this.isLast) return new Schedule(Number.POSITIVE_INFINITY, failures);
    const dueAt = sentAt + retryDelay(trust.ttl, failures, trust.stopAt - sentAt, jitter);
    if (retryAfter !== null && now + retryAfter >= trust.stopAt) {
      // The server wants us back when it is too late: one last try, midway.
      return new Schedule(Math.max(dueAt, now + (trust.stopAt - now) / 2), failures, true);
    }
    return new Schedule(Math.max(dueAt, now + (retryAfter ?? 0)), failures);
  }

  /** From when on it may go along with another lease's: brought forward by a little, a retry by nothing. */
  earliest({ ttl }: Trust): number {
    return this.failures > 0 ? this.dueAt : this.dueAt - Math.min(0.5, ttl / 30);
  }

  /** A shorter TTL came up: no later than a renewal of that TTL would be. */
  noLaterThan(dueAt: number): Schedule {
    return new Schedule(Math.min(this.dueAt, dueAt), this.failures, this.isLast);
  }
}

/**
 * One held lock, from its grant to its end: what it knows, never what time it is.
 *
 *     held ── refused, another fencing token, stop time, closed ──> lost      (announced once)
 *       └──── the body ended, or our own release was sent ────────> ended     (never lost any more)
 */
export class Holding {
  lease: LockLease;
  trust: Trust;
  schedule: Schedule;
  loss: LockLostError | null = null;
  ended = false;
  released = false;
  #latestFailure: VolcanoError | null = null;

  constructor(
    readonly ttl: number,
    key: string,
    token: string,
    acquired: Acquired,
    jitter: number,
  ) {
    this.lease = operations.leaseOf(key, token, acquired.grant);
    this.trust = Trust.begun(acquired, ttl);
    this.schedule = Schedule.afterSuccess(this.trust, { sentAt: acquired.grant.sentAt, jitter });
  }

  get isLive(): boolean {
    return this.loss === null && !this.ended;
  }

  /** The loss, if there is one by `now`. Every question about the lock comes through here. */
  look(now: number): LockLostError | null {
    if (this.isLive && now >= this.trust.stopAt) {
      this.loss = this.#lost('was not renewed in time', { because: this.#latestFailure });
    }
    return this.loss;
  }

  /** The first loss counts; after the end there is none. */
  lose(how: string, refusal: VolcanoError | null = null): void {
    if (this.isLive) this.loss = this.#lost(how, { ...refusal, because: refusal });
  }

  /** Our release was answered 409: if no loss was known, we had lost it unawares. */
  releaseRefused(refusal: VolcanoError): void {
    this.loss ??= this.#lost('was lost: its release was refused', { ...refusal, because: refusal });
  }

  #lost(how: string, details: ConstructorParameters<typeof LockLostError>[1]): LockLostError {
    const { key, fencingToken } = this.lease;
    return new LockLostError(`the lock "${key}" (fencing token ${fencingToken}) ${how}`, details);
  }

  /** What a renewal says of this lease. */
  get part(): Part {
    const { key, token } = this.lease;
    return { key, token, ttl: this.ttl };
  }

  /** A renewal is sent at `now`; the seconds that it may take. */
  renewing(now: number, clientTimeout: number): number {
    this.trust = this.trust.sent(now, this.ttl);
    return tryTimeout(this.trust.stopAt - now, clientTimeout);
  }

  /** A request of a direct call with this lease's token went out. */
  crossed(at: number, ttl: number, jitter: number): void {
    const shorter = ttl < this.trust.ttl;
    this.trust = this.trust.sent(at, ttl);
    if (shorter) {
      this.schedule = this.schedule.noLaterThan(at + renewalDelay(ttl, this.trust.stopAt - at, jitter));
    }
  }

  /** What became of a renewal try. */
  renewed(result: Renewed, { now, jitter }: { now: number; jitter: number }): void {
    if (this.look(now) || this.ended) return;
    if (!('error' in result)) {
      this.answered(result, jitter);
      return;
    }
    const { sentAt, error, isFinal } = result;
    if (isFinal) {
      this.lose('was lost: its renewal was refused', error);
      return;
    }
    this.#latestFailure = error;
    this.schedule = this.schedule.afterFailure(this.trust, { sentAt, now, jitter, retryAfter: error.retryAfter });
  }

  /** A good answer about this lease, to its own renewal or to a direct call. */
  answered(grant: Grant, jitter: number): void {
    if (!this.isLive) return;
    if (grant.fencingToken !== this.lease.fencingToken) {
      this.lose(`was lost: it now has the fencing token ${grant.fencingToken}`);
      return;
    }
    this.#latestFailure = null;
    this.trust = this.trust.answered(grant);
    this.lease = updated(this.lease, grant.expiresAt, grant.fencingToken);
    this.schedule = Schedule.afterSuccess(this.trust, { sentAt: grant.sentAt, jitter });
  }
}

// --- the loop --------------------------------------------------------------------------------------

/** Renewal tries of one client that may be in flight at once; those with the least left go first. */
export const MOST_IN_FLIGHT = 64;

/** What the loop needs of the client. */
export interface Surroundings {
  readonly clock: Clock;
  /** The client's timeout of a try, in seconds. */
  readonly timeout: number;
  /** -1 to 1, anew each time. */
  jitter(): number;
  /** Makes the request of a renewal, with a request id of its own: for one lease, for several. */
  renew(part: Part): Request;
  renewMany(parts: readonly Part[]): Request;
  /** Sends one try; always resolves, also when `cancel` ends it. */
  send(attempt: Try, cancel: AbortSignal): Promise<Outcome>;
}

/** A request under way, and the leases that still care for its answer. */
class Flight {
  readonly leases = new Set<Kept>();
  readonly controller = new AbortController();

  board(kept: Kept): void {
    this.leases.add(kept);
    kept.flight = this;
  }

  /** Nobody waits for an answer that is about no lease any more. */
  leave(kept: Kept): void {
    kept.flight = null;
    this.leases.delete(kept);
    if (this.leases.size === 0) this.controller.abort();
  }
}

/** A held lock in the loop. */
export class Kept {
  stopTimer: Timer | null = null;
  dueTimer: Timer | null = null;
  flight: Flight | null = null;
  isAlone = false; // its next try shares no request
  request: Request | null = null; // of the renewal under way: its tries alone share it
  onChange: () => void = () => {};
  leaving: Promise<VolcanoError | null> | null = null; // its release, which is sent once

  constructor(
    readonly holding: Holding,
    readonly onLoss: (loss: LockLostError) => void,
    /** The caller chose its token, and might choose it again. */
    readonly isOwn = false,
  ) {}
}

interface Timer {
  readonly at: number;
  cancel(): void;
}

/**
 * Renews all locks that a client holds, and tells each of its loss at its stop time at the latest.
 *
 *     coming ── due, or soon and another is due ──> flight ── answered ──> coming
 *        └───── due ──> waiting for one of 64 flights ──┘
 *
 * Those that are due together share a request. docs/semantics.md#renew-many
 */
export class Renewals {
  #around: Surroundings;
  #kept = new Map<string, Set<Kept>>(); // by key and token: {"nightly 0b0f3f7e-…": the `withLock`s that share it}
  #coming = new Heap<Kept>(); // by the moment from which each may go along with another
  #waiting = new Heap<Kept>(); // by their stop times: the one with the least left goes first
  #flying = 0;
  #sharesRequests = true; // until the server turns out to know no renewal of many

  constructor(around: Surroundings) {
    this.#around = around;
  }

  /** All running `withLock`s. */
  get all(): Kept[] {
    return [...this.#kept.values()].flatMap((sharers) => [...sharers]);
  }

  /** Those of one lease: with the caller's own token there may be several. */
  sharing(key: string, token: string): Kept[] {
    return [...(this.#kept.get(`${key} ${token}`) ?? [])];
  }

  /** Begins to renew. */
  keep(kept: Kept): void {
    const { key, token } = kept.holding.lease;
    const sharers = this.#kept.get(`${key} ${token}`) ?? new Set();
    this.#kept.set(`${key} ${token}`, sharers.add(kept));
    this.look(kept);
    this.#arm(kept);
  }

  /** The loss, if there is one by now; announces it. */
  look(kept: Kept): LockLostError | null {
    const known = kept.holding.loss;
    const loss = kept.holding.look(this.#around.clock.now());
    if (loss && !known) this.#announce(kept, loss);
    return loss;
  }

  /** Does what concerns the holding (a crossing call, a loss), then sees to its timers. */
  touch(kept: Kept, change: (holding: Holding) => void): void {
    const known = kept.holding.loss;
    change(kept.holding);
    if (kept.holding.loss && !known) this.#announce(kept, kept.holding.loss);
    else this.look(kept);
    this.#arm(kept);
  }

  /** Stops renewing, for good; a renewal in flight is abandoned. */
  end(kept: Kept): void {
    this.look(kept);
    kept.holding.ended = true;
    this.#arm(kept);
  }

  /** Forgets a lock that is over. */
  forget(kept: Kept): void {
    const { key, token } = kept.holding.lease;
    const sharers = this.#kept.get(`${key} ${token}`);
    sharers?.delete(kept);
    if (sharers?.size === 0) this.#kept.delete(`${key} ${token}`);
  }

  /** Waits until no renewal is overdue, or the lock is lost, or `cancel` says that nobody waits any more. */
  async fresh(kept: Kept, cancel: AbortSignal): Promise<void> {
    const { holding } = kept;
    const isFresh = () =>
      cancel.aborted ||
      !holding.isLive ||
      (holding.schedule.failures === 0 && holding.schedule.dueAt > this.#around.clock.now());
    let check = () => {};
    await new Promise<void>((resolve) => {
      check = () => {
        if (isFresh()) resolve();
      };
      kept.onChange = check;
      cancel.addEventListener('abort', check);
      check();
    });
    cancel.removeEventListener('abort', check);
    kept.onChange = () => {};
  }

  #announce(kept: Kept, loss: LockLostError): void {
    this.#arm(kept);
    kept.onLoss(loss);
    kept.onChange();
  }

  /** Sets both timers, and its place, to what the holding says now; none for a lock that is lost or over. */
  #arm(kept: Kept): void {
    const { holding } = kept;
    const { schedule, trust } = holding;
    if (!holding.isLive) {
      kept.flight?.leave(kept);
      this.#waiting.delete(kept);
    } else if (this.#waiting.has(kept)) this.#waiting.set(kept, trust.stopAt);
    const isIdle = holding.isLive && kept.flight === null && !this.#waiting.has(kept);
    const isDue = isIdle && schedule.dueAt <= this.#around.clock.now();
    const isComing = isIdle && !isDue && schedule.dueAt < Number.POSITIVE_INFINITY;
    if (isComing) this.#coming.set(kept, schedule.earliest(trust));
    else this.#coming.delete(kept);
    kept.stopTimer = this.#timer(kept.stopTimer, holding.isLive ? trust.stopAt : Number.POSITIVE_INFINITY, () => {
      kept.stopTimer = null;
      this.look(kept);
      this.#arm(kept);
    });
    kept.dueTimer = this.#timer(kept.dueTimer, isComing ? schedule.dueAt : Number.POSITIVE_INFINITY, () => {
      kept.dueTimer = null;
      this.#queue(kept);
    });
    if (isDue) this.#queue(kept);
  }

  #timer(old: Timer | null, at: number, wake: () => void): Timer | null {
    if (old?.at === at) return old;
    old?.cancel();
    if (at === Number.POSITIVE_INFINITY) return null;
    return { at, cancel: this.#around.clock.at(at, wake) };
  }

  #queue(kept: Kept): void {
    this.#coming.delete(kept);
    this.#waiting.set(kept, kept.holding.trust.stopAt);
    this.#pump();
  }

  #pump(): void {
    while (this.#flying < MOST_IN_FLIGHT && this.#waiting.size > 0) {
      const leases = this.#boarding();
      if (leases.length > 0) void this.#fly(leases);
    }
  }

  /** The one that is due and has the least left; with it the others that are due, and those that soon will be. */
  #boarding(): Kept[] {
    const now = this.#around.clock.now();
    const leases: Kept[] = [];
    for (let isFull = false; !isFull; isFull = leases.length === operations.MOST_TOGETHER) {
      const early = this.#coming.least <= now ? this.#coming.first : undefined;
      const next = this.#waiting.first ?? early;
      if (!next || (next.isAlone && leases.length > 0)) break;
      this.#waiting.delete(next);
      this.#coming.delete(next);
      leases.push(next);
      if (next.isAlone || !this.#sharesRequests) break;
    }
    for (const kept of leases) this.look(kept);
    return leases.filter(({ holding }) => holding.isLive);
  }

  async #fly(leases: Kept[]): Promise<void> {
    const { clock, timeout, renew, renewMany, send } = this.#around;
    const flight = new Flight();
    const now = clock.now();
    const seconds = leases.map(({ holding }) => holding.renewing(now, timeout));
    const parts = leases.map(({ holding }) => holding.part);
    const [first] = leases as [Kept];
    const isMany = leases.length > 1;
    if (!isMany) first.request ??= renew(first.holding.part);
    const request = isMany ? renewMany(parts) : (first.request as Request);
    this.#flying += 1;
    for (const kept of leases) flight.board(kept);
    for (const kept of leases) this.#arm(kept); // the stop time may be nearer now
    const outcome = await send({ request, timeout: Math.min(...seconds) }, flight.controller.signal);
    this.#flying -= 1;
    const results = isMany ? operations.renewedMany(request, parts, outcome) : [operations.renewed(request, outcome)];
    this.#land(flight, leases, results);
    this.#pump();
  }

  /** Gives each lease its result; those that ended meanwhile have left the flight. */
  #land(flight: Flight, leases: Kept[], results: Renewed[] | 'singly' | 'unsupported'): void {
    if (results === 'unsupported') this.#sharesRequests = false;
    const now = this.#around.clock.now();
    leases.forEach((kept, place) => {
      if (!flight.leases.has(kept)) return;
      kept.flight = null;
      kept.isAlone = results === 'singly';
      if (typeof results === 'string') this.#queue(kept);
      else {
        const result = results[place] as Renewed;
        this.touch(kept, (holding) => holding.renewed(result, { now, jitter: this.#around.jitter() }));
        if (kept.holding.schedule.failures === 0) kept.request = null;
        kept.onChange();
      }
    });
  }
}

/**
 * When to try again for a key that is held: first the pure half (`now`, chance and answers go in), then the
 * waiters of a client and the one stream that tells them all.
 *
 *     try ── 409 ──> wait ── released, lapsed, stream (re)opened ──> try …     until the time is over
 *      └─ 429, 5xx, no answer: again in a while  └── no stream: read now and then; free ──> try …
 *
 * docs/semantics.md#waiting
 */

import { pause } from './clock.js';
import { ConflictError, VolcanoError } from './errors.js';
import { covers, type Filters, filtersOf, type LockEvent } from './events.js';
import type { LockState } from './lease.js';
import { backoff, isPassing, isUnknown, Stream, type Surroundings } from './stream.js';
import { Incoming, turns } from './transport.js';

/** Seconds after `expires_at` in which nobody can take a key. */
const GRACE = 1;

/** Seconds from an event to the try: at once when alone, a crowd is spread out. `random`: 0 to below 1. */
export function spread(watchers: number, random: number): number {
  return random * Math.min(Math.max(watchers - 1, 0) * 0.002, 1);
}

/** Seconds until a key is read again for want of a stream: 1 to 5, or when its lease will be over, `left` from now. */
export function readDelay(random: number, left = Number.POSITIVE_INFINITY): number {
  const delay = 1 + 4 * random;
  return Number.isNaN(left) ? delay : Math.min(delay, Math.max(left, 0.1));
}

/** What all that wait for a key share: when the next of their tries may begin. */
export class Pace {
  failures = 0; // tries in a row that came to nothing; the last is to be made again, whoever has the key
  notBefore = Number.NEGATIVE_INFINITY;
}

/** One wait for a key, from its first refusal on: what it knows, never what time it is. */
export class Waiting {
  #hopesAt = Number.POSITIVE_INFINITY; // infinite: not before something gives hope
  #endsAt: number;
  #refusal: VolcanoError;
  #pace: Pace;
  #trouble: VolcanoError | null = null; // the last outcome, where that says nothing of the key
  #final: VolcanoError | null = null; // what will not pass, whatever a try under way is answered

  constructor(endsAt: number, refusal: VolcanoError, pace: Pace) {
    this.#endsAt = endsAt;
    this.#refusal = refusal;
    this.#pace = pace;
  }

  /** When to try. */
  get tryAt(): number {
    return Math.max(this.#hopesAt, this.#pace.notBefore);
  }

  /** When to look again: to try, or since it is over. */
  get wakesAt(): number {
    return Math.min(this.tryAt, this.#endsAt);
  }

  /** What the wait has come to, once it is over. */
  outcome(now: number): VolcanoError | null {
    return now >= this.#endsAt ? (this.#final ?? this.#trouble ?? this.#refusal) : null;
  }

  /** The key may be free: try at that time. */
  hope(at: number): void {
    this.#hopesAt = Math.min(this.#hopesAt, at);
  }

  /** Somebody has it. */
  despair(): void {
    if (this.#pace.failures === 0) this.#hopesAt = Number.POSITIVE_INFINITY;
  }

  /** A try begins; what gives hope meanwhile calls for another. */
  trying(): void {
    this.#hopesAt = Number.POSITIVE_INFINITY;
  }

  /** Its answer: held by somebody. */
  refused(refusal: ConflictError): void {
    this.#refusal = refusal;
    this.answered();
  }

  /** A try was answered, whosever it was. */
  answered(): void {
    this.#pace.failures = 0;
    this.heard();
  }

  /** Something is known of the key since: what failed before is not the outcome. */
  heard(): void {
    this.#trouble = null;
  }

  /** Its answer says nothing of the key, or there was none. */
  failed(error: VolcanoError, now: number, random: number): void {
    if (isPassing(error)) this.#pace.failures += 1;
    this.#troubled(error, now, backoff(this.#pace.failures, random));
  }

  /** The key was read, or could not be. */
  read(error: VolcanoError | null, now: number): void {
    if (error) this.#troubled(error, now);
    else this.heard();
  }

  /** There is to be no other try: over, with the last outcome. */
  end(now: number): void {
    this.#endsAt = Math.min(this.#endsAt, now);
  }

  #troubled(error: VolcanoError, now: number, seconds = 0): void {
    this.#trouble = error;
    if (isPassing(error)) {
      this.#pace.notBefore = Math.max(this.#pace.notBefore, now + Math.max(seconds, error.retryAfter ?? 0));
    } else {
      this.#final = error;
      this.#endsAt = now;
    }
  }
}

// --- the waiters of a client -----------------------------------------------------------------------

/** What is waited for, and how it is tried. */
export interface Wait<Result> {
  readonly key: string;
  readonly endsAt: number;
  /** The answer to the first try. */
  readonly refusal: ConflictError;
  readonly cancel: AbortSignal | undefined;
  /** One try. When the wait was cancelled or the client closed, it sends nothing and throws what is to be told. */
  attempt(): Promise<Result>;
  /** Whether there may be another try at all. */
  isWorthAnother(): boolean;
}

/** What waiting needs of the client besides. */
export interface Reader {
  /** Reads a key, until `cancel` ends it. */
  read(key: string, cancel: AbortSignal): Promise<{ state: LockState | null; error: Error | null }>;
}

interface Waiter {
  readonly waiting: Waiting;
  wake(): void;
}

const nothing = () => {};

/**
 * All that wait for one key. Only one of them can get it, so what gives hope is the first one's, and so is a try that
 * is to be made again, whosever it was: its answer holds for all, and what it leaves untried is the next one's.
 */
class Crowd {
  readonly waiters = new Set<Waiter>(); // in the order they came
  readonly pace = new Pace();
  hopes = 0; // how often something gave hope
  watchers = 1; // of the key, as its last event had it
  freed = 0; // the largest fencing token of a lease that is known to be over
  isTold = false; // by a stream
  reading: AbortController | null = null; // ends the reading, now and then, of a key of which no stream tells
  overdue: string | null = null; // the end of a lease that was found over and was not: our clock may be fast
  isDoubtful = false; // a stream went that may have had news of it on its way

  constructor(readonly key: string) {}

  hope(at: number): void {
    this.hopes += 1;
    this.owe(at);
  }

  /** A try is to be made, although nothing new gives hope. */
  owe(at: number): void {
    const [first] = this.waiters;
    first?.waiting.hope(at);
    first?.wake();
  }

  /** Seconds until a lease is over that ends then, by the host's clock; infinite where that was wrong before. */
  left(expiresAt: string, wall: number): number {
    if (expiresAt === this.overdue) return Number.POSITIVE_INFINITY;
    const left = Date.parse(expiresAt) / 1000 + GRACE - wall;
    if (left <= 0) this.overdue = expiresAt;
    return left;
  }

  /** A try found that somebody has the key; `isLatest`: nothing gave hope since it began. */
  answered(isLatest: boolean): void {
    for (const { waiting } of this.waiters) {
      waiting.answered();
      if (isLatest) waiting.despair();
    }
  }

  /** An event says that somebody has it. */
  taken(): void {
    for (const { waiting } of this.waiters) {
      waiting.heard();
      waiting.despair();
    }
  }
}

/**
 * All waits of a client. One stream tells them of their keys; another is opened only to take its place, when a key came
 * up that it does not cover. Without a waiter there is none.
 */
export class Waits {
  #around: Surroundings & Reader;
  #crowds = new Map<string, Crowd>(); // by key
  #stream: Stream;
  #told: Filters | null = null; // what the open connection tells of
  #connection: AbortController | null = null; // ends it
  #opening: AbortController | null = null; // ends the one that is to take its place
  #isMute = false; // the server turned out to have no events
  #isClosed = false;

  constructor(around: Surroundings & Reader) {
    this.#around = around;
    this.#stream = new Stream(around);
  }

  /** Tries whenever the key may be free. Throws what the wait has come to, when that is no success. */
  async wait<Result extends object>(wait: Wait<Result>): Promise<Result> {
    const { clock } = this.#around;
    const { cancel, attempt } = wait;
    const crowd = this.#crowds.get(wait.key) ?? new Crowd(wait.key);
    const waiting = new Waiting(wait.endsAt, wait.refusal, crowd.pace);
    const waiter: Waiter = { waiting, wake: nothing };
    const sleep = (wake: () => void) => {
      waiter.wake = wake;
    };
    this.#join(crowd, waiter);
    try {
      for (;;) {
        if (cancel?.aborted || this.#isClosed) return await attempt();
        const now = clock.now();
        if (!wait.isWorthAnother()) waiting.end(now);
        const outcome = waiting.outcome(now);
        if (outcome) throw outcome;
        if (waiting.tryAt > now) await pause(clock, waiting.wakesAt, cancel, sleep);
        else {
          const granted = await this.#try(crowd, waiting, attempt);
          if (granted) return granted;
        }
      }
    } finally {
      this.#leave(crowd, waiter);
    }
  }

  /** Ends every wait: each hears it from its next try. */
  close(): void {
    this.#isClosed = true;
    for (const { waiters } of this.#crowds.values()) for (const waiter of waiters) waiter.wake();
  }

  /** One try. Where nothing gave hope since it began, its answer holds for all that wait for the key. */
  async #try<Result>(crowd: Crowd, waiting: Waiting, attempt: () => Promise<Result>): Promise<Result | null> {
    const { clock, random } = this.#around;
    const { hopes } = crowd;
    waiting.trying();
    try {
      const granted = await attempt();
      crowd.answered(crowd.hopes === hopes);
      return granted;
    } catch (error) {
      if (!(error instanceof VolcanoError)) {
        waiting.hope(clock.now());
        throw error;
      }
      if (error instanceof ConflictError) {
        waiting.refused(error);
        crowd.answered(crowd.hopes === hopes);
      } else {
        const now = clock.now();
        waiting.failed(error, now, random());
        crowd.owe(now);
        if (crowd.reading) void this.#poll(crowd, readDelay(random()));
      }
      return null;
    }
  }

  #join(crowd: Crowd, waiter: Waiter): void {
    const { clock, random } = this.#around;
    this.#crowds.set(crowd.key, crowd);
    crowd.waiters.add(waiter);
    crowd.isTold ||= this.#told !== null && covers(this.#told, crowd.key);
    if (crowd.isTold)
      waiter.waiting.hope(clock.now()); // what was released before it came is not missed
    else {
      if (!crowd.reading) void this.#poll(crowd, readDelay(random()));
      this.#connect();
    }
  }

  #leave(crowd: Crowd, waiter: Waiter): void {
    crowd.waiters.delete(waiter);
    if (crowd.waiters.size > 0) {
      if (Number.isFinite(waiter.waiting.tryAt)) crowd.hope(waiter.waiting.tryAt);
      return;
    }
    crowd.reading?.abort();
    this.#crowds.delete(crowd.key);
    if (this.#crowds.size > 0) return;
    this.#opening?.abort();
    this.#connection?.abort();
    this.#opening = this.#connection = this.#told = null;
    this.#stream.forget();
  }

  // --- with a stream -------------------------------------------------------------------------------

  /** Sees to it that a stream tells of every key. */
  #connect(): void {
    if (this.#opening || this.#isMute) return;
    for (const { isTold } of this.#crowds.values()) {
      if (isTold) continue;
      void this.#open();
      return;
    }
  }

  async #open(): Promise<void> {
    const opening = new AbortController();
    const { signal } = opening;
    this.#opening = opening;
    await this.#stream.ready(signal);
    const filters = filtersOf(this.#crowds.keys());
    const opened = await this.#stream.open(filters, signal, this.#connection !== null);
    if (signal.aborted) return; // all have left
    this.#opening = null;
    if (opened instanceof Incoming) this.#change(opening, opened, filters);
    else if (opened && isUnknown(opened)) this.#isMute = true;
    this.#connect(); // keys may have come up meanwhile
  }

  /** A new connection takes the place of the open one. */
  #change(connection: AbortController, incoming: Incoming, filters: Filters): void {
    const old = this.#connection;
    this.#connection = connection;
    this.#told = filters;
    void this.#listen(connection, incoming);
    for (const crowd of this.#crowds.values()) {
      if (old && crowd.isTold) this.#doubt(crowd);
      this.#settle(crowd, covers(filters, crowd.key));
    }
    if (old) void turns().then(() => old.abort()); // what has come over it already is still read
  }

  async #listen(connection: AbortController, incoming: Incoming): Promise<void> {
    for await (const event of this.#stream.events(incoming, connection.signal)) this.#hear(event);
    if (this.#connection !== connection) return;
    this.#connection = this.#told = null;
    for (const crowd of this.#crowds.values()) this.#settle(crowd, false);
    this.#connect();
  }

  /** Whether a stream tells of a key. If it does again, or at last, something may have happened before. */
  #settle(crowd: Crowd, isTold: boolean): void {
    const { clock, random } = this.#around;
    if (crowd.isTold === isTold) return;
    crowd.isTold = isTold;
    crowd.reading?.abort();
    crowd.reading = null;
    if (isTold) crowd.hope(clock.now() + spread(crowd.watchers, random()));
    else void this.#poll(crowd, readDelay(random()));
  }

  /** What the old stream may have had on its way is lost with it: one look makes it good. */
  #doubt(crowd: Crowd): void {
    crowd.isDoubtful = true;
    if (!crowd.reading) void this.#poll(crowd, readDelay(this.#around.random()));
  }

  #hear({ type, key, fencingToken, watchers }: LockEvent): void {
    const { clock, random } = this.#around;
    if (type === 'reset') {
      for (const crowd of this.#crowds.values()) {
        crowd.hope(clock.now() + spread(crowd.watchers, random()));
      }
      return;
    }
    const crowd = this.#crowds.get(key);
    if (!crowd) return;
    crowd.watchers = watchers;
    if (type !== 'acquired') {
      crowd.freed = Math.max(crowd.freed, fencingToken);
      crowd.hope(clock.now() + spread(watchers, random()));
    } else if (fencingToken > crowd.freed) crowd.taken();
  }

  // --- without one ---------------------------------------------------------------------------------

  /** Reads the key in so many seconds from when it may be, and then now and then, until a stream tells all of it or nobody waits. */
  async #poll(crowd: Crowd, seconds: number): Promise<void> {
    const { clock, random, read } = this.#around;
    crowd.reading?.abort();
    const reading = new AbortController();
    crowd.reading = reading;
    for (let delay = seconds; ; ) {
      await pause(clock, Math.max(clock.now(), crowd.pace.notBefore) + delay, reading.signal);
      if (reading.signal.aborted) return;
      crowd.isDoubtful = false;
      const { state, error } = await read(crowd.key, reading.signal);
      if (reading.signal.aborted) return;
      const now = clock.now();
      const trouble = error as VolcanoError | null; // what else there is throws
      for (const waiter of crowd.waiters) {
        waiter.waiting.read(trouble, now);
        if (trouble && !isPassing(trouble)) waiter.wake();
      }
      if (state && !state.held) crowd.hope(now);
      if (state && crowd.isTold && !crowd.isDoubtful) {
        crowd.reading = null;
        return;
      }
      const left = state?.expiresAt ? crowd.left(state.expiresAt, clock.wall()) : undefined;
      delay = readDelay(random(), left);
    }
  }
}

/**
 * Time, and the only file that touches it.
 *
 * `now` counts seconds on a clock that nobody sets and that goes on while the host sleeps.
 */

/** What the SDK asks of time. */
export interface Clock {
  /** Seconds since some moment; never set, and a suspend is included. */
  now(): number;
  /** Calls `wake` once, when `now` has come to `when`, however far that is; the result cancels it. */
  at(when: number, wake: () => void): () => void;
}

/** Where the runtime's timers overflow: a longer delay fires at once. */
const LONGEST_DELAY_MS = 2 ** 31 - 1;

/** How often pending timers look for a suspend: the runtime's own timers sleep through one. */
const WATCH_MS = 900;

/** A step between the two clocks that is more than the noise of reading them, in seconds. */
const STEP_BACK = 1;
const STEP_FORWARD = 0.1;

/**
 * Whichever of the monotonic and the wall clock went further, so that a suspend shows: neither
 * `performance.now()` nor a timer counts it. A wall clock set forward looks the same and costs a lease,
 * never a lock; one set back changes nothing.
 */
export class SystemClock implements Clock {
  #behind = 0; // seconds that the monotonic clock has missed
  #offset = wall() - monotonic();
  #watched = 0; // what of it the pending timers have been told
  #pending = new Set<Pending>();
  #watch: ReturnType<typeof setInterval> | undefined;

  now(): number {
    const steady = monotonic();
    const missed = wall() - steady - this.#offset;
    if (missed > this.#behind) this.#behind = missed;
    else if (missed < this.#behind - STEP_BACK) this.#offset -= this.#behind - missed; // set back: count on from here
    return steady + this.#behind;
  }

  at(when: number, wake: () => void): () => void {
    const pending: Pending = { dueAt: when, wake, timer: undefined };
    this.#pending.add(pending);
    this.#arm(pending);
    this.#watch ??= setInterval(() => this.#lookForSuspend(), WATCH_MS);
    return () => this.#drop(pending);
  }

  #arm(pending: Pending): void {
    const left = pending.dueAt - this.now();
    const delay = Math.min(Math.max(Math.ceil(left * 1000), 0), LONGEST_DELAY_MS);
    pending.timer = setTimeout(() => this.#fire(pending), delay);
  }

  #fire(pending: Pending): void {
    if (this.now() < pending.dueAt) {
      this.#arm(pending); // a slice of a long delay, or a timer that was early by a fraction
      return;
    }
    this.#drop(pending);
    pending.wake();
  }

  #drop(pending: Pending): void {
    clearTimeout(pending.timer);
    this.#pending.delete(pending);
    if (this.#pending.size > 0) return;
    clearInterval(this.#watch);
    this.#watch = undefined;
  }

  #lookForSuspend(): void {
    this.now();
    if (this.#behind - this.#watched < STEP_FORWARD) return;
    this.#watched = this.#behind;
    for (const pending of this.#pending) {
      clearTimeout(pending.timer);
      this.#arm(pending);
    }
  }
}

interface Pending {
  readonly dueAt: number;
  readonly wake: () => void;
  timer: ReturnType<typeof setTimeout> | undefined;
}

function monotonic(): number {
  return performance.now() / 1000;
}

function wall(): number {
  return Date.now() / 1000;
}

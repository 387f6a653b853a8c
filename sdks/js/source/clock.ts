/**
 * Time, and the only file that touches it.
 *
 * `now` counts seconds on a clock that nobody sets and that goes on while the host sleeps.
 */

import { Heap } from './heap.js';

/** What the SDK asks of time. */
export interface Clock {
  /** Seconds since some moment; never set, and a suspend is included. */
  now(): number;
  /** Calls `wake` once, when `now` has come to `when`, however far that is; the result cancels it. */
  at(when: number, wake: () => void): () => void;
  /** Seconds since 1970, as the host has it: to be compared with the server's instants, and trusted with nothing. */
  wall(): number;
}

/** Waits until then, which may be never, or until `cancel` aborts; `sooner` is given what ends it before. */
export function pause(
  clock: Clock,
  when: number,
  cancel: AbortSignal | undefined,
  sooner: (wake: () => void) => void = () => {},
): Promise<void> {
  return new Promise((resolve) => {
    let stop = () => {};
    const wake = () => {
      stop();
      cancel?.removeEventListener('abort', wake);
      resolve();
    };
    if (when < Number.POSITIVE_INFINITY) stop = clock.at(when, wake);
    cancel?.addEventListener('abort', wake);
    sooner(wake);
    if (cancel?.aborted) wake();
  });
}

/**
 * The longest that the runtime is asked to wait: its timers sleep through a suspend, so each look at the clock is soon
 * followed by another. (A delay over 2^31 - 1 ms, which fires at once, never comes up.)
 */
const WATCH_MS = 900;

/** A step back of the wall clock that is more than the noise of reading two clocks, in seconds. */
const STEP_BACK = 1;

/**
 * Whichever of the monotonic and the wall clock went further, so that a suspend shows: neither
 * `performance.now()` nor a timer counts it. A wall clock set forward looks the same and costs a lease,
 * never a lock; one set back changes nothing.
 */
export class SystemClock implements Clock {
  #behind = 0; // seconds that the monotonic clock has missed
  #offset = wall() - monotonic();
  #pending = new Heap<{ wake(): void }>(); // by when they are due; one timer of the runtime serves them all
  #timer: ReturnType<typeof setTimeout> | undefined;
  #firesAt = Number.POSITIVE_INFINITY; // that timer, on the monotonic clock

  now(): number {
    const steady = monotonic();
    const missed = wall() - steady - this.#offset;
    if (missed > this.#behind) this.#behind = missed;
    else if (missed < this.#behind - STEP_BACK) this.#offset -= this.#behind - missed; // set back: count on from here
    return steady + this.#behind;
  }

  wall(): number {
    return wall();
  }

  at(when: number, wake: () => void): () => void {
    const pending = { wake };
    this.#pending.set(pending, when);
    if (this.#pending.first === pending) this.#arm();
    return () => {
      this.#pending.delete(pending);
      if (this.#pending.size === 0) this.#disarm();
    };
  }

  /** Sees to it that the runtime calls when the first is due, or to look for a suspend. */
  #arm(): void {
    const left = this.#pending.least - this.now();
    const delay = Math.min(Math.max(Math.ceil(left * 1000), 0), WATCH_MS);
    const firesAt = monotonic() + delay / 1000;
    if (firesAt >= this.#firesAt) return;
    this.#disarm();
    this.#firesAt = firesAt;
    this.#timer = setTimeout(() => this.#fire(), delay);
  }

  #disarm(): void {
    clearTimeout(this.#timer);
    this.#firesAt = Number.POSITIVE_INFINITY;
  }

  #fire(): void {
    this.#firesAt = Number.POSITIVE_INFINITY;
    const now = this.now();
    try {
      for (let next = this.#pending.first; next && this.#pending.least <= now; next = this.#pending.first) {
        this.#pending.delete(next);
        next.wake();
      }
    } finally {
      if (this.#pending.size > 0) this.#arm();
    }
  }
}

function monotonic(): number {
  return performance.now() / 1000;
}

function wall(): number {
  return Date.now() / 1000;
}

/**
 * A stream of events that does not end when a connection does.
 *
 *     opening ── 200 ──> open ── events ──> … ── ended, broken, silent ──> pause ──> opening, behind the last event
 *        └── refused, no answer ──> pause, of `Retry-After` at least ──────────┘
 *
 * docs/semantics.md#events, #waiting
 */

import { type Clock, pause } from './clock.js';
import { RateLimitedError, ServerError, TransportError, type VolcanoError } from './errors.js';
import { EventParser, type Filters, type LockEvent, lockEvent } from './events.js';
import type { Outcome, Request, Try } from './operations.js';
import * as operations from './operations.js';
import { Incoming } from './transport.js';

/** Seconds until what failed so often in a row, 1 or more, is tried again; `random`: 0 to below 1. */
export function backoff(failures: number, random: number): number {
  return Math.min(0.1 * 2 ** (failures - 1), 5) * (0.5 + random);
}

/** What a stream needs of the client. */
export interface Surroundings {
  readonly clock: Clock;
  /** The client's timeout of a try, in seconds: here until the headers have come. */
  readonly timeout: number;
  /** 0 to below 1, anew each time. */
  random(): number;
  /** Makes the request of one connection, with a request id of its own. */
  subscribe(filters: Filters, lastId: string): Request;
  /** Sends it; always resolves, also when `cancel` ends it, then or later. */
  open(attempt: Try, cancel: AbortSignal): Promise<Outcome | Incoming>;
}

/** One connection after another, with the pauses between them and the place to go on from. */
export class Stream {
  #around: Surroundings;
  #lastId = '';
  #failures = 0;
  #opensAt = Number.NEGATIVE_INFINITY;

  constructor(around: Surroundings) {
    this.#around = around;
  }

  /** Whether it goes on behind an event that it has told. */
  get isResumed(): boolean {
    return this.#lastId !== '';
  }

  /** Goes on from nowhere: whoever missed something has left. */
  forget(): void {
    this.#lastId = '';
  }

  /** Waits until it may connect (again). */
  async ready(cancel: AbortSignal): Promise<void> {
    const { clock } = this.#around;
    if (this.#opensAt > clock.now()) await pause(clock, this.#opensAt, cancel);
  }

  /** A connection, or why there is none; null when cancelled. One `beside` another begins with now, else it goes on. */
  async open(filters: Filters, cancel: AbortSignal, beside = false): Promise<Incoming | VolcanoError | null> {
    if (cancel.aborted) return null;
    const { timeout, subscribe, open } = this.#around;
    const request = subscribe(filters, beside ? '' : this.#lastId);
    const outcome = await open({ request, timeout }, cancel);
    if (cancel.aborted) return null;
    if (outcome instanceof Incoming) return outcome;
    const error = 'failure' in outcome ? outcome.failure : operations.notStreamed(request, outcome);
    this.#failed(error);
    return error;
  }

  /** What comes over a connection, to its end; `cancel` is that of its opening. */
  async *events(connection: Incoming, cancel: AbortSignal): AsyncGenerator<LockEvent, void> {
    const parser = new EventParser(this.#lastId);
    try {
      for (let bytes = await connection.read(); bytes; bytes = await connection.read()) {
        this.#failures = 0;
        for (const message of parser.read(bytes)) {
          const event = lockEvent(message);
          if (event) yield event;
        }
        this.#lastId = parser.lastId;
      }
      if (!cancel.aborted) this.#failed(null);
    } finally {
      connection.close();
    }
  }

  #failed(error: VolcanoError | null): void {
    const { clock, random } = this.#around;
    this.#failures += 1;
    this.#opensAt = clock.now() + Math.max(backoff(this.#failures, random()), error?.retryAfter ?? 0);
  }
}

/** Whether asking again may help: no answer, or one that says that the server is unwell or too busy. */
export function isPassing(error: VolcanoError): boolean {
  return error instanceof TransportError || error instanceof ServerError || error instanceof RateLimitedError;
}

/** Whether a refusal says that the server has no events. */
export function isUnknown({ status }: VolcanoError): boolean {
  return status === 404 || status === 405;
}

/**
 * `watch`: the events themselves, to be iterated. Each has a stream of its own, which is open from the first `next` to
 * the end: the caller's `break` or signal, `close` of the client, or a refusal that would come again.
 *
 * docs/semantics.md#watching
 */

import { closed } from './envelopes.js';
import { NotFoundError } from './errors.js';
import { type Filters, type LockEvent, RESET } from './events.js';
import { follow } from './guard.js';
import { isPassing, isUnknown, Stream, type Surroundings } from './stream.js';
import { Incoming } from './transport.js';

/** All watches of a client. */
export class Watches {
  #around: Surroundings;
  #running = new Set<AbortController>();
  #isClosed = false;

  constructor(around: Surroundings) {
    this.#around = around;
  }

  watch(filters: Filters, signal: AbortSignal | undefined): AsyncIterableIterator<LockEvent> {
    const ending = new AbortController();
    const events = this.#events(filters, signal, ending);
    return {
      next: () => events.next(),
      return: () => {
        ending.abort(); // a `next` that waits for an event would never let go
        return events.return(undefined);
      },
      [Symbol.asyncIterator]() {
        return this;
      },
    };
  }

  /** Ends the iteration of each. */
  close(): void {
    this.#isClosed = true;
    for (const ending of this.#running) ending.abort();
  }

  async *#events(
    filters: Filters,
    signal: AbortSignal | undefined,
    ending: AbortController,
  ): AsyncGenerator<LockEvent, undefined> {
    if (this.#isClosed) throw closed();
    const stream = new Stream(this.#around);
    const unfollow = follow(signal, ending);
    this.#running.add(ending);
    let isLater = false; // than the first that opened
    try {
      while (!ending.signal.aborted) {
        await stream.ready(ending.signal);
        const opened = await stream.open(filters, ending.signal);
        if (opened instanceof Incoming) {
          if (isLater && !stream.isResumed) yield RESET; // what happened in between is not told
          isLater = true;
          yield* stream.events(opened, ending.signal);
        } else if (opened && isUnknown(opened)) throw new NotFoundError('this server has no events to watch', opened);
        else if (opened && !isPassing(opened)) throw opened;
      }
    } finally {
      this.#running.delete(ending);
      unfollow();
    }
  }
}

/** The only file that touches the network: one try in, its outcome out. */

import type { Clock } from './clock.js';
import { TransportError } from './errors.js';
import type { Failure, Outcome, Try } from './operations.js';

/** Exchanges of one kind that may be under way at once: a burst of calls must not become one of sockets. */
export const MOST_AT_ONCE = 64;

/** What ended an exchange from our side. */
type Interruption = 'timeout' | 'cancelled';

/** How a try is sent: who may cancel it, how many seconds it is then still waited for, who hears of the send. */
export interface Manner {
  cancel?: AbortSignal | undefined;
  patience?: number;
  onSent?: (at: number) => void;
}

export class Transport {
  #apiUrl: string;
  #clock: Clock;
  #fetch: typeof fetch;

  /** `apiUrl` without a slash at its end. */
  constructor(apiUrl: string, clock: Clock, fetcher: typeof fetch) {
    this.#apiUrl = apiUrl;
    this.#clock = clock;
    this.#fetch = fetcher;
  }

  /**
   * Sends one try and reads its whole answer; never rejects. Its timeout, which a server that dribbles bytes
   * does not extend, and `cancel`, after `patience` more seconds, end it and close its socket, so that no later
   * exchange can meet its answer. `onSent` hears the moment of the send.
   */
  async exchange({ request, timeout }: Try, { cancel, patience = 0, onSent }: Manner = {}): Promise<Outcome> {
    await turns();
    const sentAt = this.#clock.now();
    if (cancel?.aborted) return unsent(sentAt, 'the call was cancelled before it was sent');
    onSent?.(sentAt);
    const controller = new AbortController();
    let interrupt: (why: Interruption) => void = () => {};
    const interrupted = new Promise<Interruption>((resolve) => {
      interrupt = resolve;
    });
    let losePatience = () => {};
    const onCancel = () => {
      if (patience > 0) losePatience = this.#clock.at(this.#clock.now() + patience, () => interrupt('cancelled'));
      else interrupt('cancelled');
    };
    cancel?.addEventListener('abort', onCancel);
    const stopWaiting = this.#clock.at(sentAt + timeout, () => interrupt('timeout'));
    try {
      const outcome = await Promise.race([this.#answer({ request, timeout }, sentAt, controller.signal), interrupted]);
      if (typeof outcome !== 'string') return outcome;
      controller.abort();
      const why = outcome === 'timeout' ? `no answer within ${shortly(timeout)} s` : 'the call was cancelled';
      return { sentAt, failure: transportError(request.operation, why, request.requestId), reached: true };
    } finally {
      stopWaiting();
      losePatience();
      cancel?.removeEventListener('abort', onCancel);
    }
  }

  async #answer({ request }: Try, sentAt: number, signal: AbortSignal): Promise<Outcome> {
    const { method, headers, body, path, operation, requestId } = request;
    try {
      const response = await this.#fetch(`${this.#apiUrl}${path}`, {
        method,
        headers,
        signal,
        redirect: 'manual',
        ...(body === undefined ? {} : { body }),
      });
      return { sentAt, status: response.status, headers: response.headers, body: await response.text() };
    } catch (cause) {
      return {
        sentAt,
        failure: transportError(operation, reason(cause), requestId, cause),
        reached: !isConnectFailure(cause),
      };
    }
  }
}

/**
 * Takes turns: at most `MOST_AT_ONCE` inside, the others in the order they came. Whoever is inside ends by its own
 * timeout, so the line always moves.
 */
export class Lanes {
  #free = MOST_AT_ONCE;
  #line = new Set<() => void>();

  /** Does `work` when there is a lane, or when `cancel` ends the waiting: then it sends nothing and needs none. */
  async run(cancel: AbortSignal | undefined, work: () => Promise<Outcome>): Promise<Outcome> {
    if (this.#free > 0) this.#free -= 1;
    else if (!(await this.#turn(cancel))) return work();
    try {
      return await work();
    } finally {
      const [next] = this.#line;
      if (next) next();
      else this.#free += 1;
    }
  }

  #turn(cancel: AbortSignal | undefined): Promise<boolean> {
    return new Promise((resolve) => {
      const end = (isMine: boolean) => {
        this.#line.delete(go);
        cancel?.removeEventListener('abort', giveUp);
        resolve(isMine);
      };
      const go = () => end(true);
      const giveUp = () => end(false);
      cancel?.addEventListener('abort', giveUp);
      this.#line.add(go);
    });
  }
}

/**
 * Lets the event loop poll its sockets once. After it was blocked, the news that the server has closed a kept
 * connection is still unread, and a request written to that connection would fail.
 */
async function turns(): Promise<void> {
  if (typeof setImmediate !== 'function') return; // not Node: such runtimes have no pool that we could outrun
  for (let turn = 0; turn < 2; turn++) await new Promise<void>((resolve) => setImmediate(resolve));
}

function unsent(at: number, why: string): Failure {
  return { sentAt: at, failure: new TransportError(why), reached: false };
}

function transportError(operation: string, why: string, requestId: string, cause?: unknown): TransportError {
  return new TransportError(`${operation} got no answer: ${why}`, { requestId, cause });
}

/** What `fetch` wraps: the words of the innermost error that has some. */
function reason(thrown: unknown): string {
  const { cause, message, errors } = Object(thrown) as { cause?: unknown; message?: string; errors?: unknown[] };
  if (cause) return reason(cause);
  return message || (errors?.[0] ? reason(errors[0]) : String(thrown));
}

/** No connection came about, so nothing was sent. */
function isConnectFailure(thrown: unknown): boolean {
  const { cause, code, syscall, errors } = Object(thrown) as {
    cause?: unknown;
    code?: string;
    syscall?: string;
    errors?: unknown[];
  };
  if (errors?.length) return errors.every(isConnectFailure); // of each address that was tried
  if (code === 'UND_ERR_CONNECT_TIMEOUT' || syscall === 'connect' || syscall === 'getaddrinfo') return true;
  return cause ? isConnectFailure(cause) : false;
}

function shortly(seconds: number): string {
  return String(Math.round(seconds * 1000) / 1000);
}

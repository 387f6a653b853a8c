/** The only file that touches the network: one try in, its outcome out; or a stream of bytes that goes on. */

import type { Clock } from './clock.js';
import { TransportError } from './errors.js';
import type { Answer, Failure, Outcome, Request, Try } from './operations.js';

/** Exchanges of one kind that may be under way at once: a burst of calls must not become one of sockets. */
export const MOST_AT_ONCE = 64;

/** Seconds: a stream from which nothing came for so long is lost; a server that is there sends a comment every 15. */
export const SILENCE_SECONDS = 40;

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
  exchange(attempt: Try, manner: Manner = {}): Promise<Outcome> {
    return this.#send(attempt, manner, whole);
  }

  /**
   * Opens a stream: resolves when its headers have come, else to what came in its place. `cancel` closes it and its
   * socket, then and later.
   */
  open(attempt: Try, cancel: AbortSignal): Promise<Outcome | Incoming> {
    return this.#send<Outcome | Incoming>(attempt, { cancel }, async (response, sentAt, controller) => {
      const isStream =
        response.status === 200 && /^text\/event-stream\b/i.test(response.headers.get('content-type') ?? '');
      if (!isStream) return whole(response, sentAt);
      if (!response.body) throw new TypeError('this fetch gives no stream of the body');
      return new Incoming(response.body, this.#clock, controller, cancel);
    });
  }

  async #send<Result>(
    { request, timeout }: Try,
    { cancel, patience = 0, onSent }: Manner,
    read: (response: Response, sentAt: number, controller: AbortController) => Promise<Result>,
  ): Promise<Result | Failure> {
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
      const outcome = await Promise.race([this.#answer(request, sentAt, controller, read), interrupted]);
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

  async #answer<Result>(
    { method, headers, body, path, operation, requestId }: Request,
    sentAt: number,
    controller: AbortController,
    read: (response: Response, sentAt: number, controller: AbortController) => Promise<Result>,
  ): Promise<Result | Failure> {
    try {
      const response = await this.#fetch(`${this.#apiUrl}${path}`, {
        method,
        headers,
        signal: controller.signal,
        redirect: 'manual',
        ...(body === undefined ? {} : { body }),
      });
      return await read(response, sentAt, controller);
    } catch (cause) {
      return {
        sentAt,
        failure: transportError(operation, reason(cause), requestId, cause),
        reached: !isConnectFailure(cause),
      };
    }
  }
}

async function whole(response: Response, sentAt: number): Promise<Answer> {
  const { status, headers } = response;
  return { sentAt, status, headers, body: await response.text() };
}

/** A body that comes bit by bit, for as long as it lasts. One reads it at a time. */
export class Incoming {
  #reader: ReadableStreamDefaultReader<Uint8Array>;
  #clock: Clock;
  #connection: AbortController;
  #cancel: AbortSignal;
  #isOver = false;
  #give: (bytes: Uint8Array | null) => void = () => {};

  constructor(body: ReadableStream<Uint8Array>, clock: Clock, connection: AbortController, cancel: AbortSignal) {
    this.#reader = body.getReader();
    this.#clock = clock;
    this.#connection = connection;
    this.#cancel = cancel;
    cancel.addEventListener('abort', this.close);
    if (cancel.aborted || connection.signal.aborted) this.close();
  }

  /** The next bytes; null when it is over: ended, broken, silent for too long, or closed. */
  read(): Promise<Uint8Array | null> {
    return new Promise((resolve) => {
      const stopWaiting = this.#clock.at(this.#clock.now() + SILENCE_SECONDS, this.close);
      this.#give = (bytes) => {
        this.#give = () => {};
        stopWaiting();
        resolve(bytes);
      };
      this.#reader.read().then(({ value }) => (value ? this.#give(value) : this.close()), this.close);
      if (this.#isOver) this.#give(null);
    });
  }

  /** Lets go of the socket, at once. */
  close = (): void => {
    this.#give(null);
    if (this.#isOver) return;
    this.#isOver = true;
    this.#cancel.removeEventListener('abort', this.close);
    this.#connection.abort();
    this.#reader.cancel().catch(() => {}); // where `fetch` does not heed its signal
  };
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
export async function turns(): Promise<void> {
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

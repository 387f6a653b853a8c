/**
 * The conformance driver of the JavaScript SDK: its commands on stdin, replies and events on stdout.
 * The protocol: conformance/protocol.md. Top to bottom: time, the wire, a session (one client), the commands.
 */

import { subscribe } from 'node:diagnostics_channel';
import { createRequire } from 'node:module';
import { createInterface } from 'node:readline';

const require = createRequire(import.meta.url);
const { VolcanoClient, VolcanoError, LockLostError } = require('../build/index.js');
const { version } = require('../package.json');

/** Counts what the SDK does; while it stands still over many turns of the event loop, all is quiet. */
let activity = 0;

/** Exchanges that began and whose request has not yet left for the server: {requestId}. */
const unsent = new Set();

subscribe('undici:client:sendHeaders', ({ headers }) => {
  for (const exchange of unsent) {
    if (!headers.includes(exchange.requestId)) continue;
    unsent.delete(exchange);
    activity += 1;
    return;
  }
});

async function quiet() {
  for (let still = 0, seen = activity; still < 20; still = activity === seen && unsent.size === 0 ? still + 1 : 0) {
    seen = activity;
    await new Promise((resolve) => setImmediate(resolve));
  }
}

// --- time ------------------------------------------------------------------------------------------

/** Stands still until `advance`. */
class VirtualClock {
  #now = 0;
  #wall; // of the start, in seconds since 1970
  #sleeps = new Set(); // {dueAt, seconds, wake}, in the order they were asked

  constructor(wall) {
    this.#wall = Date.parse(wall) / 1000;
  }

  now() {
    return this.#now;
  }

  wall() {
    return this.#wall + this.#now;
  }

  at(when, wake) {
    activity += 1;
    const sleep = { dueAt: when, seconds: Math.max(when - this.#now, 0), wake };
    this.#sleeps.add(sleep);
    return () => {
      activity += 1;
      this.#sleeps.delete(sleep);
    };
  }

  get lengths() {
    return [...this.#sleeps].map(({ seconds }) => seconds);
  }

  async advance(seconds, blocked) {
    const end = this.#now + seconds;
    if (!blocked) {
      await quiet();
      for (let next = this.#earliest(end); next; next = this.#earliest(end)) {
        this.#now = Math.max(this.#now, next.dueAt);
        this.#sleeps.delete(next);
        next.wake();
        await quiet();
      }
    }
    this.#now = end;
  }

  #earliest(end) {
    const due = [...this.#sleeps].filter(({ dueAt }) => dueAt <= end);
    return due.sort((one, other) => one.dueAt - other.dueAt)[0];
  }
}

// --- the wire --------------------------------------------------------------------------------------

/** The global fetch: its exchanges counted until their answer was read whole, they failed, or were aborted; the bytes of its streams. */
class Wire {
  /** Key -> the last 409: where contention is a value, only the wire knows what the server said. */
  refusals = new Map();
  #isCut = false;
  #exchanges = new Set(); // {requestId, cut}
  #streams = new Set(); // {taken, cut}, those that are open

  get inFlight() {
    return this.#exchanges.size;
  }

  get streaming() {
    return [...this.#streams].map(({ taken }) => taken);
  }

  fetch = async (url, init) => {
    if (this.#isCut) return new Promise(() => {});
    const cut = new AbortController();
    const exchange = { requestId: init.headers['X-Volcano-Request-Id'], cut };
    const end = () => {
      unsent.delete(exchange);
      this.#exchanges.delete(exchange);
      activity += 1;
    };
    init.signal.addEventListener('abort', () => {
      cut.abort(init.signal.reason);
      end();
    });
    unsent.add(exchange);
    this.#exchanges.add(exchange);
    try {
      const response = await fetch(url, { ...init, signal: cut.signal });
      const { status, headers } = response;
      if (status === 200 && headers.get('content-type')?.startsWith('text/event-stream')) {
        return { status, headers, body: this.#streamed(response.body, cut) };
      }
      const body = await response.text();
      if (status === 409 && url.includes('/locks/')) this.#note(url, exchange.requestId, body);
      return { status, headers, text: async () => body };
    } finally {
      end();
    }
  };

  /** The same body; how much of it the SDK has taken is known, and when it is over. */
  #streamed(body, cut) {
    const stream = { taken: 0, cut };
    const reader = body.getReader();
    const end = () => {
      activity += 1;
      this.#streams.delete(stream);
    };
    const read = async () => {
      try {
        const { done, value } = await reader.read();
        activity += 1;
        stream.taken += value?.length ?? 0;
        if (done) end();
        return { done, value };
      } catch (error) {
        end();
        throw error;
      }
    };
    cut.signal.addEventListener('abort', end);
    this.#streams.add(stream);
    return { getReader: () => ({ read, cancel: () => reader.cancel() }) };
  }

  #note(url, request_id, body) {
    const { code, error: message } = JSON.parse(body);
    const [, segment] = /\/locks\/([^/]+)/.exec(url);
    this.refusals.set(decodeURIComponent(segment), { error: 'ConflictError', code, status: 409, request_id, message });
  }

  /** Closes all sockets; from now on nothing is sent and nothing comes. */
  cut() {
    this.#isCut = true;
    for (const { cut } of [...this.#exchanges, ...this.#streams]) cut.abort();
  }
}

// --- errors ----------------------------------------------------------------------------------------

/** What `finish` with `raise` throws in the body. */
class BodyError extends Error {}

/** The reason of `cancel`. */
class Cancelled extends Error {}

/** The names of arguments that begin the SDK's own sentences about wrong ones. */
const ARGUMENT = /^(key|prefix|ttl|wait|token|requestId|lease|signal|options|callback) /;

function nameOf(error) {
  if (error instanceof VolcanoError) return error.message === 'this client is closed' ? 'Closed' : error.name;
  if (error instanceof BodyError) return 'BodyError';
  if (error instanceof Cancelled) return 'Cancelled';
  const isArgument = (error instanceof TypeError || error instanceof RangeError) && ARGUMENT.test(error.message);
  return isArgument ? 'InvalidArgument' : 'Unexpected';
}

function described(error) {
  const name = nameOf(error);
  const facts = {
    error: name,
    code: error?.code,
    status: error?.status,
    retry_after: error?.retryAfter,
    request_id: error?.requestId,
    message: name === 'Unexpected' ? `${error?.constructor?.name}: ${error?.message}` : error.message,
  };
  return Object.fromEntries(Object.entries(facts).filter(([, value]) => value !== null && value !== undefined));
}

/** The error, its causes, what was known of a loss, and the release that failed beside it; not the HTTP stack's own. */
function allOf(error, beside) {
  const found = new Set();
  for (const next of [error, error?.cause, error?.because, beside]) {
    for (let one = next; one && !found.has(one); one = one.cause) {
      if (one === error || nameOf(one) !== 'Unexpected') found.add(one);
    }
  }
  return [...found];
}

/** The fields of a `raised` or a `lost` event. */
function errorFields(error, beside) {
  const errors = allOf(error, beside).map(described);
  return { ...errors[0], errors };
}

// --- a session: one client, from one hello to the next -----------------------------------------------

class Session {
  #calls = new Map(); // call -> {cancel, guard, finish}
  #leases = new Map(); // call -> the lease it returned
  #wire = new Wire();
  #isOver = false;
  #running = 0; // calls that have not ended

  constructor({ base_url, service_key, clock, now, timeout }) {
    this.clock = clock === 'virtual' ? new VirtualClock(now) : undefined;
    const options = { apiUrl: base_url, fetch: this.#wire.fetch };
    if (service_key !== null) options.serviceKey = service_key;
    if (timeout !== undefined) options.timeout = timeout * 1000;
    this.client = new VolcanoClient(options, this.clock ? { clock: this.clock } : {});
  }

  /** Drops what is left without a request being sent. */
  end() {
    this.#isOver = true;
    this.#wire.cut();
  }

  get inFlight() {
    return this.#wire.inFlight;
  }

  get streaming() {
    return this.#wire.streaming;
  }

  get isIdle() {
    return this.#running === 0;
  }

  cancel({ call }) {
    this.#calls.get(call).cancel.abort(new Cancelled('cancelled by the scenario'));
  }

  finish({ call, ...how }) {
    this.#calls.get(call).finish(how);
  }

  look({ call }) {
    const { guard } = this.#calls.get(call);
    const { fencingToken, expiresAt } = guard.lease;
    const lost = guard.signal.aborted && guard.signal.reason instanceof LockLostError;
    return { lost, fencing_token: fencingToken, expires_at: expiresAt };
  }

  withLock({ call, key, ...rest }) {
    const started = this.#start(call, key);
    this.#settle(
      call,
      this.client.locks.withLock(key, optionsOf(rest, started), (guard) => this.#body(call, guard)),
    );
  }

  direct(cmd, { call, key, lease, ...rest }) {
    const started = this.#start(call, key);
    const options = optionsOf(rest, started);
    const { locks } = this.client;
    const subject = typeof lease === 'string' ? this.#leases.get(lease) : lease && leaseOf(lease);
    const calls = {
      acquire: () => locks.acquire(key, options),
      renew: () => locks.renew(key, subject, options),
      release: () => locks.release(key, subject, options),
      get: () => locks.get(key, options),
      force_release: () => locks.forceRelease(key, options),
      close: () => this.client.close(),
    };
    this.#settle(call, calls[cmd]());
  }

  watch({ call, ...filters }) {
    const { cancel } = this.#start(call);
    this.#settle(
      call,
      (async () => {
        for await (const event of this.client.locks.watch({ ...filters, signal: cancel.signal })) {
          const { type, key, fencingToken, at, watchers } = event;
          this.#emit({ event: 'watched', call, type, key, fencing_token: fencingToken, at, watchers });
        }
        return {};
      })(),
    );
  }

  #start(call, key) {
    const started = { key, cancel: new AbortController(), finished: undefined, finish: undefined, guard: undefined };
    started.finished = new Promise((resolve) => {
      started.finish = resolve;
    });
    this.#calls.set(call, started);
    return started;
  }

  async #body(call, guard) {
    const started = this.#calls.get(call);
    started.guard = guard;
    const { token, fencingToken, expiresAt } = guard.lease;
    this.#emit({ event: 'entered', call, token, fencing_token: fencingToken, expires_at: expiresAt });
    guard.signal.addEventListener('abort', () => {
      const { reason } = guard.signal;
      if (reason instanceof LockLostError) this.#emit({ event: 'lost', call, ...errorFields(reason) });
    });
    const how = await started.finished;
    if ('raise' in how) throw new BodyError(how.raise);
    if (started.cancel.signal.aborted) throw guard.signal.reason; // the cancellation goes on
    return how.return;
  }

  /** Reports how a call ended, be it by its envelope or, for wrong arguments, by a rejection. */
  #settle(call, promise) {
    this.#running += 1;
    promise
      .then(
        (result) => this.#ended(call, result),
        (error) => ({ event: 'raised', call, ...errorFields(error) }),
      )
      .then((event) => {
        this.#running -= 1;
        this.#emit(event);
      });
  }

  #ended(call, result) {
    const acquired = 'acquired' in result ? { acquired: result.acquired } : {};
    if (result.error) return { event: 'raised', call, ...errorFields(result.error, result.releaseError), ...acquired };
    if (result.acquired === false) {
      const { key } = this.#calls.get(call);
      const contention = this.#wire.refusals.get(key);
      return { event: 'raised', call, ...contention, errors: [contention], acquired: false };
    }
    if (result.lease) {
      this.#leases.set(call, result.lease);
      const { key, token, fencingToken, expiresAt } = result.lease;
      return { event: 'returned', call, value: { key, token, fencing_token: fencingToken, expires_at: expiresAt } };
    }
    if (result.state) {
      const { held, fencingToken, expiresAt } = result.state;
      const value = held ? { held, fencing_token: fencingToken, expires_at: expiresAt } : { held };
      return { event: 'returned', call, value };
    }
    return { event: 'returned', call, value: result.data ?? null };
  }

  #emit(event) {
    activity += 1;
    if (!this.#isOver) write(event);
  }
}

function optionsOf({ ttl, token, request_id, wait }, { cancel }) {
  const options = { signal: cancel.signal };
  if (ttl !== undefined) options.ttl = ttl;
  if (token !== undefined) options.token = token;
  if (request_id !== undefined) options.requestId = request_id;
  if (wait !== undefined) options.wait = wait;
  return options;
}

function leaseOf({ key, token, fencing_token, expires_at }) {
  return { key, token, fencingToken: fencing_token ?? null, expiresAt: expires_at ?? null };
}

// --- commands ----------------------------------------------------------------------------------------

let session;

function write(line) {
  process.stdout.write(`${JSON.stringify(line)}\n`);
}

async function obey({ id, cmd, ...fields }) {
  if (cmd === 'hello') {
    session?.end();
    await quiet();
    session = new Session(fields);
    return {
      sdk: 'js',
      version,
      runtime: `node ${process.versions.node}`,
      capabilities: [
        'with_lock',
        'direct_calls',
        ...(session.clock ? ['virtual_clock'] : []),
        'pushed_loss',
        'cancel',
        'close',
        'contention_is_a_value',
        'renew_many',
        'wait',
        'events',
      ],
    };
  }
  switch (cmd) {
    case 'with_lock':
      return session.withLock(fields);
    case 'finish':
      return session.finish(fields);
    case 'watch':
      return session.watch(fields);
    case 'cancel':
      await quiet(); // in mid-flight, not before the first send
      return session.cancel(fields);
    case 'look':
      await quiet();
      return session.look(fields);
    case 'sleeping':
      if (!session.clock) throw new Unsupported('the clock is real');
      await quiet();
      return { seconds: session.clock.lengths, in_flight: session.inFlight, streaming: session.streaming };
    case 'advance':
      if (!session.clock) throw new Unsupported('the clock is real');
      return session.clock.advance(fields.seconds, fields.blocked === true);
    default:
      return session.direct(cmd, fields);
  }
}

class Unsupported extends Error {}

let queue = Promise.resolve();

createInterface({ input: process.stdin })
  .on('line', (text) => {
    queue = queue.then(async () => {
      const command = JSON.parse(text);
      try {
        write({ id: command.id, ok: (await obey(command)) ?? {} });
      } catch (error) {
        if (error instanceof Unsupported) write({ id: command.id, unsupported: error.message });
        else write({ id: command.id, error: `${error.stack}` });
      }
    });
  })
  .on('close', () => queue.then(end));

/** At the end of stdin: a process with nothing left to do must end by itself, with calls still running it is ended. */
function end() {
  if (session && !session.isIdle) process.exit(0);
  const complain = () => {
    process.stderr.write(`kept alive by: ${process.getActiveResourcesInfo().join(' ')}\n`);
    process.exit(1);
  };
  setTimeout(complain, 2_000).unref();
}

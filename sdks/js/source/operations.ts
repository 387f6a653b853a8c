/**
 * What each call sends and what its answer means. Pure: no I/O, no clock, no randomness.
 *
 * A call that may take more than one try is a *flow*: a generator that yields each `Try` to be sent and is
 * resumed with its `Outcome`, so that every decision is here and the plumbing in locks.ts only carries.
 *
 *     flow ── Try(request, timeout) ──> transport ── Answer | Failure ──> flow ── return or throw
 */

import { ConflictError, fromStatus, ServerError, TransportError, VolcanoError } from './errors.js';
import { discreet, type LockLease, type LockState } from './lease.js';

export const TTL_MIN = 5;
export const TTL_MAX = 7_776_000;
export const KEY_LENGTH = 128;

/**
 * Seconds that one try of a release on the way out may take, and that a cancelled acquire may still wait
 * for its answer.
 */
export const EXIT_TRY_SECONDS = 2;

/** Leases that one request may renew. */
export const MOST_TOGETHER = 500;

const KEY = /^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$/; // no m flag: $ is the very end, a newline is not let through
const UUID = /^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$/i;

// --- arguments -------------------------------------------------------------------------------------

/** The key, or what is written like one; else TypeError or RangeError with the grammar. */
export function checkedKey(key: unknown, name = 'key'): string {
  if (typeof key === 'string' && KEY.test(key)) return key;
  throw wrong(
    typeof key === 'string',
    `${name} must be 1 to ${KEY_LENGTH} characters, a letter or digit followed by letters, digits, '.', '_', ':' or '-' (ASCII); got ${shown(key)}`,
  );
}

/** The TTL in whole seconds; else TypeError or RangeError. */
export function checkedTtl(ttl: unknown): number {
  if (typeof ttl === 'number' && Number.isInteger(ttl) && ttl >= TTL_MIN && ttl <= TTL_MAX) return ttl;
  throw wrong(
    typeof ttl === 'number',
    `ttl must be a whole number of seconds from ${TTL_MIN} to ${TTL_MAX} (90 days); got ${shown(ttl)}`,
  );
}

/** The longest wait in seconds; else TypeError or RangeError. */
export function checkedWait(wait: unknown = 0): number {
  if (typeof wait === 'number' && wait >= 0) return wait; // NaN is not
  throw wrong(typeof wait === 'number', `wait must be a number of seconds from 0, or Infinity; got ${shown(wait)}`);
}

/** The lock token in its canonical form; else an error that does not show it. */
export function checkedToken(token: unknown): string {
  if (typeof token === 'string' && UUID.test(token)) return token.toLowerCase();
  throw wrong(typeof token === 'string', `token must be a UUID; got a ${typeof token} that is none`);
}

/** The request id in its canonical form; else TypeError or RangeError. */
export function checkedRequestId(requestId: unknown): string {
  if (typeof requestId === 'string' && UUID.test(requestId)) return requestId.toLowerCase();
  throw wrong(typeof requestId === 'string', `requestId must be a UUID; got ${shown(requestId)}`);
}

/** The lease's lock token; the lease must be one of this very key. */
export function checkedLease(key: string, lease: unknown): string {
  if (typeof lease !== 'object' || lease === null || !('key' in lease) || !('token' in lease)) {
    throw new TypeError(`lease must be a lease as acquire returns it ({key, token, …}); got ${kind(lease)}`);
  }
  if (lease.key !== key) {
    throw new RangeError(`lease must be a lease of the key ${shown(key)}; it is one of ${shown(lease.key)}`);
  }
  return checkedToken(lease.token);
}

/** The options object; `undefined` stands for one with nothing in it. */
export function checkedOptions(options: unknown): object {
  if (options === undefined) return {};
  if (typeof options === 'object' && options !== null) return options;
  throw new TypeError(`options must be an object, such as { ttl: 60 }; got ${kind(options)}`);
}

/** The user's signal, if there is one. */
export function checkedSignal(signal: unknown): AbortSignal | undefined {
  if (signal === undefined) return undefined;
  // By shape: a signal of another realm is none of our AbortSignal's instances.
  const candidate = signal as Partial<AbortSignal> | null;
  if (typeof candidate?.aborted === 'boolean' && typeof candidate.addEventListener === 'function')
    return signal as AbortSignal;
  throw new TypeError(`signal must be an AbortSignal; got ${kind(signal)}`);
}

function wrong(rightType: boolean, sentence: string): TypeError | RangeError {
  return rightType ? new RangeError(sentence) : new TypeError(sentence);
}

function kind(value: unknown): string {
  return value === null ? 'null' : typeof value === 'object' ? 'an object that is none' : `a ${typeof value}`;
}

function shown(value: unknown): string {
  if (typeof value === 'object' && value !== null) return 'an object';
  const text = typeof value === 'string' ? JSON.stringify(value) : String(value);
  return text.length <= 80 ? text : `${text.slice(0, 77)}...`;
}

// --- requests --------------------------------------------------------------------------------------

export type Operation = 'acquire' | 'renew' | 'renewMany' | 'release' | 'get' | 'forceRelease' | 'watch';

/**
 * One operation, fixed before the first send and identical on every try of it. `path` is relative to the
 * API's URL; `headers` carry the credential and the lock token.
 */
export interface Request {
  readonly operation: Operation;
  readonly method: string;
  readonly path: string;
  readonly requestId: string;
  readonly headers: Readonly<Record<string, string>>;
  readonly body: string | undefined;
}

/** What every request carries. */
export interface Identity {
  readonly serviceKey: string;
  readonly requestId: string;
}

/** What requests about one lease carry besides. */
export interface LeaseIdentity extends Identity {
  readonly token: string;
}

export function acquire(key: string, { ttl, ...identity }: LeaseIdentity & { ttl: number }): Request {
  return leaseRequest('acquire', 'POST', key, identity, ttl);
}

export function renew(key: string, { ttl, ...identity }: LeaseIdentity & { ttl: number }): Request {
  return leaseRequest('renew', 'PATCH', key, identity, ttl);
}

/** What a renewal says of its lease. `token` is the lock token. */
export interface Part {
  readonly key: string;
  readonly token: string;
  readonly ttl: number;
}

/** Renews up to `MOST_TOGETHER` leases, each as `renew` would. docs/semantics.md#renew-many. */
export function renewMany(parts: readonly Part[], identity: Identity): Request {
  const leases = parts.map(({ key, token, ttl }) => ({ key, token, ttl_seconds: ttl }));
  return request('renewMany', 'PATCH', '/lock-leases', identity, {}, JSON.stringify({ leases }));
}

export function release(key: string, identity: LeaseIdentity): Request {
  return leaseRequest('release', 'DELETE', key, identity);
}

export function get(key: string, identity: Identity): Request {
  return request('get', 'GET', path(key), identity);
}

export function forceRelease(key: string, identity: Identity): Request {
  return request('forceRelease', 'DELETE', path(key), identity);
}

function leaseRequest(
  operation: Operation,
  method: string,
  key: string,
  identity: LeaseIdentity,
  ttl?: number,
): Request {
  const body = ttl === undefined ? undefined : JSON.stringify({ ttl_seconds: ttl });
  return request(operation, method, `${path(key)}/lease`, identity, { 'X-Volcano-Lock-Token': identity.token }, body);
}

export function request(
  operation: Operation,
  method: string,
  where: string,
  { serviceKey, requestId }: Identity,
  more: Record<string, string> = {},
  body?: string,
): Request {
  const headers = {
    Authorization: `Bearer ${serviceKey}`,
    'Content-Type': 'application/json',
    'X-Volcano-Request-Id': requestId,
    ...more,
  };
  return { operation, method, path: where, requestId, headers, body };
}

function path(key: string): string {
  return `/locks/${encodeURIComponent(key)}`;
}

// --- answers ---------------------------------------------------------------------------------------

/** What the server said. `sentAt`: when this try was sent, on the local clock. */
export interface Answer {
  readonly sentAt: number;
  readonly status: number;
  readonly headers: Pick<Headers, 'get'>;
  readonly body: string;
}

/** No answer. `reached`: the connection stood, so the server may have acted. */
export interface Failure {
  readonly sentAt: number;
  readonly failure: TransportError;
  readonly reached: boolean;
}

export type Outcome = Answer | Failure;

/** What a flow wants sent: this request, given up after `timeout` seconds. */
export interface Try {
  readonly request: Request;
  readonly timeout: number;
}

/**
 * A good answer to an acquire or a renewal. `expiresIn`: what was left of the lease when the server decided,
 * in seconds, where it says so.
 */
export interface Grant {
  readonly sentAt: number;
  readonly expiresAt: string;
  readonly fencingToken: number;
  readonly expiresIn: number | null;
}

/** Read the answer to an acquire (201) or a renewal (200); any other throws its error. */
export function granted(request: Request, outcome: Outcome): Grant {
  const answer = expected(request, outcome, request.operation === 'acquire' ? 201 : 200);
  const fields = jsonObject(request, answer);
  return {
    sentAt: answer.sentAt,
    expiresAt: instant(request, answer, fields),
    fencingToken: fencingToken(request, answer, fields),
    expiresIn: expiresIn(answer.headers.get('x-volcano-expires-in')),
  };
}

/** A renewal that did not succeed: `isFinal` ends the lease, anything else is worth another try. */
export interface Refusal {
  readonly sentAt: number;
  readonly error: VolcanoError;
  readonly isFinal: boolean;
}

/** What became of the renewal of one lease. */
export type Renewed = Grant | Refusal;

const FINAL = new Set<number | null>([400, 401, 403, 404, 409]);

/** Read the answer to a renewal of one lease. */
export function renewed(request: Request, outcome: Outcome): Renewed {
  return attempted(outcome, FINAL, () => granted(request, outcome));
}

/**
 * Read the answer to a renewal of many, by position. `singly`: these leases are to be renewed one by one;
 * `unsupported`: this server knows no other way.
 */
export function renewedMany(
  request: Request,
  parts: readonly Part[],
  outcome: Outcome,
): Renewed[] | 'singly' | 'unsupported' {
  if ('status' in outcome) {
    if (outcome.status === 404 || outcome.status === 405) return 'unsupported';
    if (outcome.status === 400 || outcome.status === 413) return 'singly';
  }
  const all = attempted(outcome, new Set([401, 403]), () => {
    const answer = expected(request, outcome, 200);
    const { leases } = jsonObject(request, answer);
    const isInOrder =
      Array.isArray(leases) &&
      leases.length === parts.length &&
      parts.every(({ key }, place) => isObject(leases[place]) && leases[place].key === key);
    if (!isInOrder) throw unreadable(request, answer, 'leases');
    return leases.map((fields) => attempted(outcome, FINAL, () => grantedPart(request, answer, fields)));
  });
  return 'error' in all ? parts.map(() => all) : all;
}

/** The statuses that the codes stand for where an answer has no status of its own. */
const STATUS_OF: Readonly<Record<string, number>> = {
  invalid_request: 400,
  authentication_required: 401,
  invalid_credentials: 401,
  permission_denied: 403,
  not_found: 404,
  lock_held: 409,
  lock_ownership_lost: 409,
  lock_rate_limited: 429,
  internal_error: 500,
  lock_service_unavailable: 503,
};

/** The answer about one of many leases; throws its error. */
function grantedPart(request: Request, answer: Answer, fields: Record<string, unknown>): Grant {
  const { code, error, retry_after, expires_in } = fields;
  if (typeof code === 'string') {
    const status = Object.hasOwn(STATUS_OF, code) ? (STATUS_OF[code] as number) : null;
    const Class = fromStatus(status ?? answer.status);
    throw new Class(typeof error === 'string' ? error : 'the renewal was refused without an explanation', {
      status,
      code,
      retryAfter: isSeconds(retry_after) && Number.isInteger(retry_after) ? retry_after : null,
      requestId: request.requestId,
    });
  }
  return {
    sentAt: answer.sentAt,
    expiresAt: instant(request, answer, fields),
    fencingToken: fencingToken(request, answer, fields),
    expiresIn: isSeconds(expires_in) ? expires_in : null,
  };
}

function isSeconds(value: unknown): value is number {
  return typeof value === 'number' && value >= 0;
}

function attempted<Result>(
  { sentAt }: Outcome,
  final: ReadonlySet<number | null>,
  read: () => Result,
): Result | Refusal {
  try {
    return read();
  } catch (error) {
    if (!(error instanceof VolcanoError)) throw error;
    return { sentAt, error, isFinal: final.has(error.status) };
  }
}

/** Read the answer to a read. */
export function state(request: Request, outcome: Outcome): LockState {
  const answer = expected(request, outcome, 200);
  const fields = jsonObject(request, answer);
  if (fields.held === false) return { held: false, expiresAt: null, fencingToken: null };
  if (fields.held !== true) throw unreadable(request, answer, 'held');
  return {
    held: true,
    expiresAt: instant(request, answer, fields),
    fencingToken: fencingToken(request, answer, fields),
  };
}

/** Read the answer to a release or a force release. */
export function released(request: Request, outcome: Outcome): void {
  expected(request, outcome, 204);
}

export function leaseOf(key: string, token: string, { expiresAt, fencingToken }: Grant): LockLease {
  return discreet({ key, token, expiresAt, fencingToken });
}

/** The error that an answer other than the expected one stands for. */
export function problem(request: Request, answer: Answer): VolcanoError {
  const fields = parsedObject(answer.body);
  const told = typeof fields?.error === 'string' && typeof fields.code === 'string';
  const sentence = told ? (fields.error as string) : ''; // a proxy's page says nothing that helps
  const Class = fromStatus(answer.status);
  return new Class(sentence || `${request.operation} was answered ${answer.status} without an explanation`, {
    status: answer.status,
    code: told ? (fields.code as string) : null,
    retryAfter: retryAfter(answer.headers.get('retry-after'), answer.headers.get('date')),
    requestId: request.requestId,
  });
}

/** The error of an answer to `subscribe` that is no stream. */
export function notStreamed(request: Request, answer: Answer): VolcanoError {
  return answer.status === 200 ? unreadable(request, answer, 'content type') : problem(request, answer);
}

/**
 * Seconds that a `Retry-After` header asks for; null where it says nothing of use. A date counts from the
 * answer's own `Date`: the local wall clock may be wrong.
 */
export function retryAfter(value: string | null, date: string | null = null): number | null {
  const text = value?.trim() ?? '';
  if (/^[0-9]{1,18}$/.test(text)) return Number(text);
  const seconds = (httpDate(text) - httpDate(date ?? '')) / 1000;
  return seconds >= 0 ? seconds : null; // NaN is not
}

/** Milliseconds since 1970 of an HTTP date (RFC 9110), NaN for anything else: Date.parse reads "1.5" as one. */
function httpDate(text: string): number {
  return /^[A-Z][a-z]{2}, \d{2} [A-Z][a-z]{2} \d{4} \d{2}:\d{2}:\d{2} GMT$/.test(text) ? Date.parse(text) : Number.NaN;
}

function expected(request: Request, outcome: Outcome, status: number): Answer {
  if ('failure' in outcome) throw outcome.failure;
  if (outcome.status !== status) throw problem(request, outcome);
  return outcome;
}

function isObject(value: unknown): value is Record<string, unknown> {
  return typeof value === 'object' && value !== null && !Array.isArray(value);
}

/** The object that a text is in JSON; what it means that it is none, the caller says. */
export function parsedObject(text: string): Record<string, unknown> | undefined {
  try {
    const value: unknown = JSON.parse(text);
    return isObject(value) ? value : undefined;
  } catch {
    return undefined;
  }
}

function jsonObject(request: Request, answer: Answer): Record<string, unknown> {
  const fields = parsedObject(answer.body);
  if (!fields) throw unreadable(request, answer, 'body');
  return fields;
}

function instant(request: Request, answer: Answer, { expires_at }: Record<string, unknown>): string {
  const isInstant =
    typeof expires_at === 'string' &&
    /^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)$/.test(expires_at) &&
    !Number.isNaN(Date.parse(expires_at));
  if (!isInstant) throw unreadable(request, answer, 'expires_at');
  return expires_at;
}

function fencingToken(request: Request, answer: Answer, { fencing_token }: Record<string, unknown>): number {
  if (!Number.isSafeInteger(fencing_token) || (fencing_token as number) < 0) {
    throw unreadable(request, answer, 'fencing_token');
  }
  return fencing_token as number;
}

function expiresIn(value: string | null): number | null {
  // An addition of ours, which other servers lack.
  return value !== null && /^[0-9]{1,9}(\.[0-9]{1,6})?$/.test(value) ? Number(value) : null;
}

function unreadable(request: Request, answer: Answer, what: string): ServerError {
  return new ServerError(`${request.operation} was answered ${answer.status}, but its ${what} cannot be understood`, {
    status: answer.status,
    requestId: request.requestId,
  });
}

// --- flows -----------------------------------------------------------------------------------------

/** How an acquire flow ends without a lease; `unknown`: the server may have granted one. */
export class AcquireFailed extends Error {
  constructor(
    readonly error: VolcanoError,
    readonly unknown: boolean,
  ) {
    super(error.message);
  }
}

/** How it ends with one. `firstSentAt`: when the first try was sent. */
export interface Acquired {
  readonly grant: Grant;
  readonly firstSentAt: number;
}

export type Flow<Result> = Generator<Try, Result, Outcome>;

/**
 * At most two tries: a transport failure or a 503 is retried once, immediately, unless the caller has given
 * up by then. docs/semantics.md#ambiguous-acquire. Throws AcquireFailed.
 */
export function* acquireFlow(
  request: Request,
  { ttl, timeout, givenUp }: { ttl: number; timeout: number; givenUp: () => boolean },
): Flow<Acquired> {
  const attempt: Try = { request, timeout: Math.min(timeout, ttl - 1) };
  let firstSentAt: number | undefined;
  let unknown = false;
  for (let isLast = false; ; isLast = true) {
    const outcome = yield attempt;
    firstSentAt ??= outcome.sentAt;
    try {
      return { grant: granted(request, outcome), firstSentAt };
    } catch (error) {
      if (!(error instanceof VolcanoError)) throw error;
      unknown = isUnknown(outcome, error, unknown);
      const isWorthAnother = 'failure' in outcome || outcome.status === 503;
      if (isLast || !isWorthAnother || givenUp()) throw new AcquireFailed(error, unknown);
    }
  }
}

function isUnknown(outcome: Outcome, error: VolcanoError, soFar: boolean): boolean {
  if ('failure' in outcome) return soFar || outcome.reached;
  if (outcome.status === 409) return false;
  return soFar || error instanceof ServerError;
}

/**
 * A release on the way out: bounded tries, the second only after no answer or a 5xx. docs/semantics.md#exit.
 * A 409 to a second try counts as released: the first one did it.
 */
export function* releaseFlow(request: Request, { tries }: { tries: number }): Flow<void> {
  const attempt: Try = { request, timeout: EXIT_TRY_SECONDS };
  for (let number = 1; ; number++) {
    const outcome = yield attempt;
    try {
      released(request, outcome);
      return;
    } catch (error) {
      if (error instanceof ConflictError && number > 1) return;
      const isTransient = error instanceof TransportError || error instanceof ServerError;
      if (!isTransient || number >= tries) throw error;
    }
  }
}

/** One try, whatever becomes of it. */
export function* singleFlow<Result>(
  request: Request,
  timeout: number,
  read: (request: Request, outcome: Outcome) => Result,
): Flow<Result> {
  return read(request, yield { request, timeout });
}

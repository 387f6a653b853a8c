/**
 * What can go wrong, as a tree.
 *
 *     VolcanoError
 *     ├── ValidationError        400: the server found the request wrong
 *     ├── AuthenticationError    401, or no service key was configured
 *     │   └── PermissionDeniedError  403
 *     ├── NotFoundError          404
 *     ├── ConflictError          409 of a direct renew or release; contention itself is `acquired: false`
 *     ├── LockLostError          from a guard or `withLock`: we held the lock and may no longer act
 *     ├── RateLimitedError       429; `retryAfter` says when to come back
 *     ├── ServerError            5xx, or an answer that cannot be understood
 *     └── TransportError         no answer arrived: whether the server acted is not known
 *
 * `ConflictError` ("somebody else has it") and `LockLostError` ("I had it and lost it") are apart on
 * purpose. Arguments that cannot be right reject with TypeError or RangeError before anything is sent.
 * The same names in every SDK: conformance/tables/error_names.json.
 */

/** What an error may come with; each is null on the error where it did not. */
export interface VolcanoErrorDetails {
  status?: number | null | undefined;
  code?: string | null | undefined;
  retryAfter?: number | null | undefined;
  requestId?: string | null | undefined;
  cause?: unknown;
}

/** Base of all. */
export class VolcanoError extends Error {
  declare readonly name: string;
  /** The HTTP status. */
  readonly status: number | null;
  /** The server's word for it, such as `lock_held`. */
  readonly code: string | null;
  /** Seconds that the server asks to wait. */
  readonly retryAfter: number | null;
  /** What the server logged the operation under. */
  readonly requestId: string | null;

  constructor(message: string, details: VolcanoErrorDetails = {}) {
    super(message, details.cause == null ? undefined : { cause: details.cause });
    this.status = details.status ?? null;
    this.code = details.code ?? null;
    this.retryAfter = details.retryAfter ?? null;
    this.requestId = details.requestId ?? null;
  }
}

/** The server found a key, TTL, token or request id wrong. */
export class ValidationError extends VolcanoError {
  declare readonly name: 'ValidationError';
}

/** No service key, or one that the server does not know (any more). */
export class AuthenticationError extends VolcanoError {
  declare readonly name: 'AuthenticationError' | 'PermissionDeniedError';
}

/** The credential is good, but may not manage locks. */
export class PermissionDeniedError extends AuthenticationError {
  declare readonly name: 'PermissionDeniedError';
}

/** The server has no such route: is `apiUrl` right? */
export class NotFoundError extends VolcanoError {
  declare readonly name: 'NotFoundError';
}

/** Somebody else holds the lock, or this lock token does not. */
export class ConflictError extends VolcanoError {
  declare readonly name: 'ConflictError';
}

/**
 * We held the lock and may no longer act. `because`: what the server or the network last said of it, if anything:
 * the refusal (then `status` and `code` are its), or the failure of the last renewal. `cause` is the callback's
 * error where the callback failed too, else the same.
 */
export class LockLostError extends VolcanoError {
  declare readonly name: 'LockLostError';
  declare readonly because: VolcanoError | null;

  constructor(message: string, details: VolcanoErrorDetails & { because?: VolcanoError | null } = {}) {
    super(message, { ...details, cause: details.cause ?? details.because });
    Object.defineProperty(this, 'because', { value: details.because ?? null }); // not printed: `cause` is
  }
}

/** The project's quota of this minute is used up. */
export class RateLimitedError extends VolcanoError {
  declare readonly name: 'RateLimitedError';
}

/** The server failed, or said something that cannot be understood. */
export class ServerError extends VolcanoError {
  declare readonly name: 'ServerError';
}

/** No answer arrived. The server may or may not have acted. */
export class TransportError extends VolcanoError {
  declare readonly name: 'TransportError';
}

const classes = {
  VolcanoError,
  ValidationError,
  AuthenticationError,
  PermissionDeniedError,
  NotFoundError,
  ConflictError,
  LockLostError,
  RateLimitedError,
  ServerError,
  TransportError,
};
for (const [name, { prototype }] of Object.entries(classes)) {
  // On the prototype, where stack traces look, and by hand: a minifier renames classes.
  Object.defineProperty(prototype, 'name', { value: name, configurable: true, writable: true });
}

const BY_STATUS: Readonly<Record<number, typeof VolcanoError>> = {
  400: ValidationError,
  401: AuthenticationError,
  403: PermissionDeniedError,
  404: NotFoundError,
  409: ConflictError,
  413: ValidationError,
  429: RateLimitedError,
};

/** The class of an error answer. */
export function fromStatus(status: number): typeof VolcanoError {
  return BY_STATUS[status] ?? (status >= 500 ? ServerError : VolcanoError);
}

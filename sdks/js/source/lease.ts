/** The values that callers get: silent about the lock token where they are printed. */

/**
 * One acquisition of a key. A renewal updates it in place, so whoever holds it reads the latest.
 *
 * `token` is the lock token, a UUID and a secret: whoever knows it holds the lease. `console.log` hides it,
 * `JSON.stringify` does not (that is how a lease is handed to another process).
 */
export interface LockLease {
  readonly key: string;
  readonly token: string;
  /** The server's instant, RFC 3339 in UTC, for people; trust the guard's `signal` instead. */
  readonly expiresAt: string;
  /** Rises with each new holder of the key and stays the same through renewals; exact. */
  readonly fencingToken: number;
}

/** What is known of a lease that an acquire could not get: enough to try again, or to release it. */
export interface UnprovenLease {
  readonly key: string;
  readonly token: string;
  readonly expiresAt: null;
  readonly fencingToken: null;
}

/** What a read tells of a key. */
export interface LockState {
  readonly held: boolean;
  readonly expiresAt: string | null;
  readonly fencingToken: number | null;
}

/** The lease, with a token that `console.log` and `util.inspect` do not show. */
export function discreet<Lease extends LockLease | UnprovenLease>(lease: Lease): Lease {
  // The well-known symbol of Node, Deno and Bun; it is not enumerable, so the lease stays a plain object.
  return Object.defineProperty(lease, Symbol.for('nodejs.util.inspect.custom'), {
    value: () => ({ ...lease, token: '[secret]' }),
  });
}

/** Writes what a renewal brought into the lease; a frozen one is left alone and a new one returned. */
export function updated<Lease extends LockLease>(lease: Lease, expiresAt: string, fencingToken: number): Lease {
  const fresh = { expiresAt, fencingToken };
  return Object.isFrozen(lease) ? discreet({ ...lease, ...fresh }) : Object.assign(lease, fresh);
}

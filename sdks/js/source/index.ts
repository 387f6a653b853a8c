/** Leases for work that must not run twice. See docs/sdks/js.md. */

export { VolcanoAuth, VolcanoAuth as VolcanoClient, type VolcanoOptions } from './client.js';
export type { AcquireResult, GetResult, ReleaseResult, RenewResult, WithLockResult } from './envelopes.js';
export {
  AuthenticationError,
  ConflictError,
  LockLostError,
  NotFoundError,
  PermissionDeniedError,
  RateLimitedError,
  ServerError,
  TransportError,
  ValidationError,
  VolcanoError,
} from './errors.js';
export type { LockEvent } from './events.js';
export type { LockGuard } from './guard.js';
export type { LockLease, LockState, UnprovenLease } from './lease.js';
export type { AcquireOptions, CallOptions, Locks, RenewOptions, WatchOptions } from './locks.js';

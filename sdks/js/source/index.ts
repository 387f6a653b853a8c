/** Leases for work that must not run twice. See docs/sdks/js.md. */

export { VolcanoAuth, VolcanoAuth as VolcanoClient, type VolcanoOptions } from './client.js';
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
export type { LockGuard } from './guard.js';
export type { LockLease, LockState, UnprovenLease } from './lease.js';
export type {
  AcquireOptions,
  AcquireResult,
  CallOptions,
  GetResult,
  Locks,
  ReleaseResult,
  RenewOptions,
  RenewResult,
  WithLockResult,
} from './locks.js';

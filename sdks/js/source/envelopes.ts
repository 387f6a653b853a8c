/** What the calls answer: envelopes, in which an error is a value. Inside they throw, as everything else does. */

import { LockLostError, VolcanoError } from './errors.js';
import type { LockLease, LockState, UnprovenLease } from './lease.js';
import type { Holding } from './renewal.js';

/** `error` is a VolcanoError, or the reason of the caller's signal. Held by somebody: both null. */
export type AcquireResult =
  | { acquired: true; lease: LockLease; error: null }
  | { acquired: false; lease: null; error: null }
  | { acquired: false; lease: UnprovenLease; error: Error };

export type RenewResult = { lease: LockLease; error: null } | { lease: null; error: Error };

export type ReleaseResult = { error: Error | null };

export type GetResult = { state: LockState; error: null } | { state: null; error: Error };

/**
 * `error` is a VolcanoError, what the callback threw, or the reason of the caller's signal. `acquired` false
 * without an error: somebody else holds the lock. A result of the callback stands beside a LockLostError in
 * `data`. `releaseError`: the release on the way out failed, so the key stays taken until the lease lapses.
 */
export type WithLockResult<Data> =
  | { acquired: true; data: Data; error: null; releaseError?: VolcanoError }
  | { acquired: false; data: null; error: null }
  | { acquired: boolean; data: Data | null; error: Error; releaseError?: VolcanoError };

/** What is told of a client that was closed. */
export function closed(): VolcanoError {
  return new VolcanoError('this client is closed');
}

/** Thrown inside where the caller's signal ended a call. */
export class Cancelled {
  constructor(readonly reason: unknown) {}
}

/** How a callback ended. */
export type Ending<Data> = { failed: false; data: Data } | { failed: true; thrown: unknown };

/** Also what throws before its first await, and what returns no promise. */
export async function settled<Data>(work: () => Data | PromiseLike<Data>): Promise<Ending<Data>> {
  try {
    return { failed: false, data: await work() };
  } catch (thrown) {
    return { failed: true, thrown };
  }
}

/** The envelope: neither the callback's error or result nor the loss masks the other. */
export function concluded<Data>(
  { loss }: Holding,
  ending: Ending<Data>,
  releaseError: VolcanoError | null,
): WithLockResult<Data> {
  if (loss) {
    if (!ending.failed) return { acquired: true, data: ending.data, error: loss };
    const isItself = ending.thrown === loss;
    const beside = new LockLostError(loss.message, { ...loss, because: loss.because, cause: ending.thrown });
    return { acquired: true, data: null, error: isItself ? loss : beside };
  }
  const noted = releaseError ? { releaseError } : {};
  if (ending.failed) return { acquired: true, data: null, error: thrownError(ending.thrown), ...noted };
  return { acquired: true, data: ending.data, error: null, ...noted };
}

/** What an envelope's `error` says. Anything that is not an answer or a cancellation is a fault of ours, and thrown. */
export function told(thrown: unknown): Error {
  if (thrown instanceof VolcanoError) return thrown;
  if (thrown instanceof Cancelled) return thrownError(thrown.reason);
  throw thrown;
}

/** As it was thrown; but `throw undefined` must not look like success. */
function thrownError(thrown: unknown): Error {
  return (thrown || new Error(`${String(thrown)} was thrown`)) as Error;
}

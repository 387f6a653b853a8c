/** The public surface as a strict TypeScript program sees it: checked, never run. */

import {
  type AuthenticationError,
  ConflictError,
  type LockEvent,
  type LockGuard,
  type LockLease,
  LockLostError,
  PermissionDeniedError,
  RateLimitedError,
  VolcanoAuth,
  type VolcanoClient,
  VolcanoError,
  type WithLockResult,
} from '@volcano.dev/sdk';

/** Fails to compile unless both types are the same. */
function same<One, Other>(
  ..._: (<T>() => T extends One ? 1 : 2) extends <T>() => T extends Other ? 1 : 2 ? [] : [never]
) {}

const volcano: VolcanoClient = new VolcanoAuth({ apiUrl: 'http://x', anonKey: undefined, timeout: 5_000, fetch });

export async function envelopes(): Promise<string | undefined> {
  const result = await volcano.locks.withLock('k', { ttl: 60 }, async ({ signal, lease }) => {
    same<typeof signal, AbortSignal>();
    same<typeof lease, LockLease>();
    await fetch('http://x', { signal });
    return lease.expiresAt;
  });
  same<typeof result, WithLockResult<string>>();
  if (result.error) throw result.error;
  if (!result.acquired) {
    same<typeof result.data, null>();
    return undefined;
  }
  same<typeof result.data, string>();
  return result.data;
}

export async function directCalls(lease: LockLease) {
  const acquired = await volcano.locks.acquire('k', { ttl: 30, token: 'x', signal: AbortSignal.timeout(5) });
  if (acquired.acquired) same<typeof acquired.lease, LockLease>();
  else if (acquired.error) same<typeof acquired.lease.expiresAt, null>();
  else same<typeof acquired.lease, null>();
  const renewed = await volcano.locks.renew('k', lease, { ttl: 30 });
  if (!renewed.error) same<typeof renewed.lease.fencingToken, number>();
  const { state } = await volcano.locks.get('k');
  same<
    typeof state,
    { readonly held: boolean; readonly expiresAt: string | null; readonly fencingToken: number | null } | null
  >;
  const { error } = await volcano.locks.release('k', lease);
  same<typeof error, Error | null>();
  await volcano.locks.forceRelease('k', { requestId: 'x' });
  await volcano.close();
}

export async function waitingAndWatching(signal: AbortSignal) {
  await volcano.locks.acquire('k', { ttl: 30, wait: Number.POSITIVE_INFINITY });
  await volcano.locks.withLock('k', { ttl: 30, wait: 0.5, signal }, () => 1);
  const keys: readonly string[] = ['a', 'b'];
  for await (const event of volcano.locks.watch({ key: keys, prefix: 'c', signal })) {
    same<typeof event, LockEvent>();
    if (event.type === 'reset') same<typeof event.key, null>();
    else if (event.type === 'released') same<typeof event.fencingToken, number>();
    else same<typeof event.type, 'acquired' | 'force_released' | 'lapsed'>();
  }
  const events: AsyncIterable<LockEvent> = volcano.locks.watch({ prefix: 'c' });
  return events;
}

export function errors(error: Error): number | null | undefined {
  if (error instanceof LockLostError) return error.because?.status;
  if (error instanceof RateLimitedError) return error.retryAfter;
  if (error instanceof ConflictError) return error.status;
  if (error instanceof PermissionDeniedError) {
    const wider: AuthenticationError = error;
    return wider.status;
  }
  return error instanceof VolcanoError ? error.status : undefined;
}

export async function mistakes({ lease, signal }: LockGuard) {
  // @ts-expect-error: there is no lock without a TTL
  await volcano.locks.withLock('k', {}, () => 1);
  // @ts-expect-error: seconds are a number
  await volcano.locks.acquire('k', { ttl: '30' });
  // @ts-expect-error: so is a wait
  await volcano.locks.withLock('k', { ttl: 30, wait: '5' }, () => 1);
  // @ts-expect-error: a watch is of something
  volcano.locks.watch();
  // @ts-expect-error: a renewal needs the lease
  await volcano.locks.renew('k', { ttl: 30 });
  // @ts-expect-error: a lease is read, never written
  lease.expiresAt = 'never';
  // @ts-expect-error: as is the guard's signal
  signal.aborted = false;
  // @ts-expect-error: time and chance are no public options
  new VolcanoAuth({ apiUrl: 'http://x' }, {});
  // @ts-expect-error: and there is no such option
  new VolcanoAuth({ apiURL: 'http://x' });
}

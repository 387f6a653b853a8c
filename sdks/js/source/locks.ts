/**
 * `volcano.locks`: the five calls and `withLock`. Plumbing: what to send and what an answer means is decided in
 * operations.ts, how long to trust and when to renew in renewal.ts.
 *
 *     withLock ── acquire ──> renewed in time ── callback ── release ──> {acquired, data, error}
 *                   │ held: {acquired: false}       │ lost: signal aborts, LockLostError
 *                   └ not known: give back          └ the caller's signal: signal aborts, callback may settle
 */

import type { Clock } from './clock.js';
import {
  type AcquireResult,
  Cancelled,
  closed,
  concluded,
  type Ending,
  type GetResult,
  type ReleaseResult,
  type RenewResult,
  settled,
  told,
  type WithLockResult,
} from './envelopes.js';
import { AuthenticationError, ConflictError, ServerError, TransportError, VolcanoError } from './errors.js';
import { checkedFilters, type LockEvent, subscribe } from './events.js';
import { follow, type LockGuard, watchful } from './guard.js';
import { discreet, type LockLease, updated } from './lease.js';
import type { Acquired, Flow, Identity, LeaseIdentity, Outcome, Try } from './operations.js';
import * as operations from './operations.js';
import { Holding, Kept, Renewals, Trust } from './renewal.js';
import type { Surroundings } from './stream.js';
import { Lanes, type Manner, type Transport } from './transport.js';
import { Waits } from './waiting.js';
import { Watches } from './watching.js';

/** What every call takes: `requestId` is a UUID for the server's logs, `signal` cancels. */
export interface CallOptions {
  requestId?: string | undefined;
  signal?: AbortSignal | undefined;
}

/** `ttl`: whole seconds, 5 to 7 776 000 (90 days). */
export interface RenewOptions extends CallOptions {
  ttl: number;
}

/**
 * `token`: a UUID of your own, to be able to acquire the same lease again after a crash. `wait`: for how many seconds to
 * wait for a key that is held, `Infinity` included; 0 by default.
 */
export interface AcquireOptions extends RenewOptions {
  token?: string | undefined;
  wait?: number | undefined;
}

/** `key`, `prefix`: one or several, 64 together at most. */
export interface WatchOptions {
  key?: string | readonly string[] | undefined;
  prefix?: string | readonly string[] | undefined;
  signal?: AbortSignal | undefined;
}

/** What the client gives to its locks. Times in seconds; `random` from 0 to below 1. @internal */
export interface Settings {
  readonly transport: Transport;
  readonly clock: Clock;
  readonly serviceKey: string | undefined;
  readonly timeout: number;
  random(): number;
  uuid(): string;
}

/** Tokens that a caller knows and that were released are remembered up to this many; the oldest go first. */
const MOST_REMEMBERED = 10_000;

/**
 * An acquire as it was asked for: fixed before the first send. `isOwn`: the caller chose the token. What is tried again
 * later is an operation of its own: only then do `requestId` and, once released, `token` change.
 */
interface Plan {
  readonly key: string;
  readonly ttl: number;
  readonly wait: number;
  token: string;
  requestId: string;
  readonly isOwn: boolean;
  readonly signal: AbortSignal | undefined;
}

export class Locks {
  #settings: Settings;
  #renewals: Renewals;
  #waits: Waits;
  #watches: Watches;
  #calls: Lanes;
  #exits: Lanes;
  #spent = new Set<string>();
  #isClosed = false;

  /** @internal */
  constructor(settings: Settings) {
    const { clock, random, timeout, transport, uuid } = settings;
    this.#settings = settings;
    this.#calls = new Lanes();
    this.#exits = new Lanes();
    this.#renewals = new Renewals({
      clock,
      timeout,
      jitter: () => this.#jitter(),
      renew: ({ key, token, ttl }) => operations.renew(key, { ...this.#lease(token, uuid()), ttl }),
      renewMany: (parts) => operations.renewMany(parts, this.#identity(uuid())),
      send: (attempt, cancel) => transport.exchange(attempt, { cancel }),
    });
    const events: Surroundings = {
      clock,
      timeout,
      random,
      subscribe: (filters, lastId) => subscribe(filters, lastId, this.#identity(uuid())),
      open: (attempt, cancel) => transport.open(attempt, cancel),
    };
    this.#waits = new Waits({ ...events, read: (key, signal) => this.get(key, { signal }) });
    this.#watches = new Watches(events);
  }

  /**
   * Takes the key, or the same lease again where `token` has it. The lease is yours to renew and to release.
   * Wrong arguments reject with TypeError or RangeError.
   */
  async acquire(key: string, options: AcquireOptions): Promise<AcquireResult> {
    const plan = this.#plan(key, options);
    return this.#following(plan.signal, async (cancel) => {
      try {
        const { grant } = await this.#patiently(plan, cancel, async () => {
          const acquired = await this.#obtain(plan, cancel, !plan.isOwn);
          await this.#refuseLate(plan, acquired);
          return acquired;
        });
        return { acquired: true, lease: operations.leaseOf(key, plan.token, grant), error: null };
      } catch (thrown) {
        if (thrown instanceof ConflictError) return { acquired: false, lease: null, error: null };
        const error = told(thrown);
        const { token } = plan;
        return { acquired: false, lease: discreet({ key, token, expiresAt: null, fencingToken: null }), error };
      }
    });
  }

  /** Counts the TTL of the lease from now. Updates the lease that it was given, and returns it. */
  async renew(key: string, lease: LockLease, options: RenewOptions): Promise<RenewResult> {
    operations.checkedKey(key);
    const token = operations.checkedLease(key, lease);
    const { requestId, signal, ttl } = this.#asked(options);
    const seconds = operations.checkedTtl(ttl);
    return this.#following(signal, async (cancel) => {
      try {
        const request = operations.renew(key, { ...this.#lease(token, requestId), ttl: seconds });
        const flow = operations.singleFlow(request, this.#settings.timeout, operations.granted);
        const grant = await this.#crossing({ key, token, ttl: seconds }, cancel, flow);
        if (Number.isInteger(lease.fencingToken) && grant.fencingToken !== lease.fencingToken) {
          const details = { status: 200, requestId };
          throw new ServerError(
            `renew was answered with another lease's fencing token, ${grant.fencingToken}`,
            details,
          );
        }
        return { lease: updated(lease, grant.expiresAt, grant.fencingToken), error: null };
      } catch (thrown) {
        return { lease: null, error: told(thrown) };
      }
    });
  }

  /** Frees the key at once. Releasing what is free already is no error. */
  async release(key: string, lease: Pick<LockLease, 'key' | 'token'>, options?: CallOptions): Promise<ReleaseResult> {
    operations.checkedKey(key);
    const token = operations.checkedLease(key, lease);
    const { requestId, signal } = this.#asked(options);
    return this.#following(signal, async (cancel) => {
      const sharers = this.#renewals.sharing(key, token);
      const onSent = () => {
        this.#spend(token);
        for (const kept of sharers) this.#renewals.end(kept);
      };
      try {
        const request = operations.release(key, this.#lease(token, requestId));
        await this.#run(operations.singleFlow(request, this.#settings.timeout, operations.released), this.#calls, {
          cancel,
          onSent,
        });
        for (const { holding } of sharers) holding.released = true;
        return { error: null };
      } catch (thrown) {
        return { error: told(thrown) };
      }
    });
  }

  /** Who holds the key, without a secret: for people and dashboards. */
  async get(key: string, options?: CallOptions): Promise<GetResult> {
    operations.checkedKey(key);
    const { requestId, signal } = this.#asked(options);
    return this.#following(signal, async (cancel) => {
      try {
        const request = operations.get(key, this.#identity(requestId));
        const flow = operations.singleFlow(request, this.#settings.timeout, operations.state);
        return { state: await this.#run(flow, this.#calls, { cancel }), error: null };
      } catch (thrown) {
        return { state: null, error: told(thrown) };
      }
    });
  }

  /** Frees the key whoever holds it; the holder learns of it by its next renewal. */
  async forceRelease(key: string, options?: CallOptions): Promise<ReleaseResult> {
    operations.checkedKey(key);
    const { requestId, signal } = this.#asked(options);
    return this.#following(signal, async (cancel) => {
      try {
        const request = operations.forceRelease(key, this.#identity(requestId));
        await this.#run(operations.singleFlow(request, this.#settings.timeout, operations.released), this.#calls, {
          cancel,
        });
        return { error: null };
      } catch (thrown) {
        return { error: told(thrown) };
      }
    });
  }

  /**
   * Runs `callback` while the lock is held and renewed, and releases it when what the callback returned has
   * settled. If somebody else holds the lock, and still does when `wait` is over, the callback does not run:
   * `{acquired: false, error: null}`.
   */
  async withLock<Data>(
    key: string,
    options: AcquireOptions,
    callback: (guard: LockGuard) => Data | PromiseLike<Data>,
  ): Promise<WithLockResult<Data>> {
    const plan = this.#plan(key, options);
    if (typeof callback !== 'function') throw new TypeError(`callback must be a function; got a ${typeof callback}`);
    const call = new AbortController();
    const unfollow = follow(plan.signal, call);
    try {
      const acquired = await this.#patiently(plan, call.signal, () => this.#obtain(plan, call.signal, true));
      return await this.#hold(plan, acquired, call, callback);
    } catch (thrown) {
      if (thrown instanceof ConflictError) return { acquired: false, data: null, error: null };
      return { acquired: false, data: null, error: told(thrown) };
    } finally {
      unfollow();
    }
  }

  /**
   * Tells what becomes of these keys, and of those that begin with these prefixes, until the loop is left or `signal`
   * aborts. It reconnects by itself; a `reset` says that events may be missing. Throws TypeError or RangeError
   * at once, and what the server refuses out of the iteration.
   */
  watch(options: WatchOptions): AsyncIterableIterator<LockEvent> {
    const { signal, ...filters } = operations.checkedOptions(options) as WatchOptions;
    return this.#watches.watch(checkedFilters(filters), operations.checkedSignal(signal));
  }

  /** Every running `withLock` loses its lock, then each is released; the first error of a release. @internal */
  async close(): Promise<{ error: VolcanoError | null }> {
    this.#isClosed = true;
    this.#waits.close();
    this.#watches.close();
    const { all } = this.#renewals;
    for (const kept of all) this.#renewals.touch(kept, (holding) => holding.lose(CLOSED));
    const errors = await Promise.all(all.map((kept) => this.#leave(kept)));
    return { error: errors.find((error) => error !== null) ?? null };
  }

  // --- acquiring -----------------------------------------------------------------------------------

  #plan(key: string, options: AcquireOptions): Plan {
    operations.checkedKey(key);
    const { requestId, signal, ttl, token, wait } = this.#asked(options);
    const seconds = operations.checkedTtl(ttl);
    const patience = operations.checkedWait(wait);
    const isOwn = token !== undefined;
    const checked = isOwn ? operations.checkedToken(token) : this.#settings.uuid();
    if (isOwn && this.#spent.has(checked)) {
      throw new RangeError('token was released before and cannot acquire again: make a new one');
    }
    return { key, ttl: seconds, wait: patience, token: checked, requestId, isOwn, signal };
  }

  /** Tries at once and, while `wait` lasts, again whenever the key may be free. */
  async #patiently(plan: Plan, cancel: AbortSignal | undefined, attempt: () => Promise<Acquired>): Promise<Acquired> {
    if (plan.wait === 0) return attempt();
    const endsAt = this.#settings.clock.now() + plan.wait;
    try {
      return await attempt();
    } catch (refusal) {
      if (!(refusal instanceof ConflictError)) throw refusal;
      const isReleased = () => this.#spent.has(plan.token);
      const again = () => {
        plan.requestId = this.#settings.uuid();
        if (isReleased()) plan.token = this.#settings.uuid();
        return attempt();
      };
      const isWorthAnother = () => !(plan.isOwn && isReleased());
      return this.#waits.wait({ key: plan.key, endsAt, refusal, cancel, attempt: again, isWorthAnother });
    }
  }

  /** The grant. Throws what went wrong, after a release where the server may have granted it all the same. */
  async #obtain(plan: Plan, cancel: AbortSignal | undefined, givesBack: boolean): Promise<Acquired> {
    const { key, ttl, token } = plan;
    if (cancel?.aborted) throw new Cancelled(cancel.reason);
    if (this.#isClosed) throw closed();
    const request = operations.acquire(key, { ...this.#lease(token, plan.requestId), ttl });
    const flow = operations.acquireFlow(request, {
      ttl,
      timeout: this.#settings.timeout,
      givenUp: () => cancel?.aborted ?? false,
    });
    const patience = givesBack ? operations.EXIT_TRY_SECONDS : 0;
    let acquired: Acquired;
    try {
      acquired = await this.#crossing({ key, token, ttl }, cancel, flow, patience);
    } catch (thrown) {
      if (!(thrown instanceof operations.AcquireFailed)) throw thrown;
      if (thrown.unknown && givesBack) await this.#giveBack(plan);
      throw cancel?.aborted ? new Cancelled(cancel.reason) : thrown.error;
    }
    if (!cancel?.aborted) return acquired;
    if (givesBack) await this.#giveBack(plan);
    throw new Cancelled(cancel.reason);
  }

  /** An answer that came after the lease's stop time is worth nothing to a direct caller. */
  async #refuseLate(plan: Plan, acquired: Acquired): Promise<void> {
    if (this.#settings.clock.now() < Trust.begun(acquired, plan.ttl).stopAt) return;
    if (!plan.isOwn) await this.#giveBack(plan);
    throw new TransportError('acquire was answered too late to be of use: the lock is not held', {
      requestId: plan.requestId,
    });
  }

  /** Releases what may have been granted. */
  async #giveBack({ key, token }: Plan): Promise<void> {
    const request = operations.release(key, this.#lease(token, this.#settings.uuid()));
    const onSent = () => {
      this.#spend(token);
      this.#loseSharers(key, token);
    };
    try {
      await this.#run(operations.releaseFlow(request, { tries: 2 }), this.#exits, { onSent });
    } catch (error) {
      if (!(error instanceof VolcanoError)) throw error;
      // The caller gets the error that made this necessary; the lease, if there is one, ends with its TTL.
    }
  }

  // --- holding -------------------------------------------------------------------------------------

  async #hold<Data>(
    plan: Plan,
    acquired: Acquired,
    call: AbortController,
    callback: (guard: LockGuard) => Data | PromiseLike<Data>,
  ): Promise<WithLockResult<Data>> {
    const { key, token, ttl } = plan;
    const holding = new Holding(ttl, key, token, acquired, this.#jitter());
    const kept = new Kept(holding, (loss) => call.abort(loss), plan.isOwn);
    const signal = watchful(call, () => this.#renewals.look(kept));
    this.#renewals.keep(kept);
    if (this.#isClosed) this.#renewals.touch(kept, () => holding.lose(CLOSED));
    await this.#renewals.fresh(kept, signal);
    const ending: Ending<Data> = signal.aborted
      ? { failed: true, thrown: signal.reason }
      : await settled(() => callback({ signal, lease: holding.lease }));
    return concluded(holding, ending, await this.#leave(kept));
  }

  /** The way out: stop renewing, then release, once. Resolves to what the release failed with. */
  #leave(kept: Kept): Promise<VolcanoError | null> {
    kept.leaving ??= this.#release(kept);
    return kept.leaving;
  }

  async #release(kept: Kept): Promise<VolcanoError | null> {
    const { holding } = kept;
    const wasReleasing = holding.ended; // by a call of the user's
    this.#renewals.end(kept);
    try {
      if (holding.released) return null;
      const { key, token } = holding.lease;
      const request = operations.release(key, this.#lease(token, this.#settings.uuid()));
      const onSent = () => {
        if (kept.isOwn) this.#spend(token);
        this.#loseSharers(key, token);
      };
      await this.#run(operations.releaseFlow(request, { tries: holding.loss ? 1 : 2 }), this.#exits, { onSent });
      return null;
    } catch (error) {
      if (!(error instanceof VolcanoError)) throw error;
      if (!(error instanceof ConflictError)) return error;
      if (!wasReleasing) holding.releaseRefused(error);
      return null;
    } finally {
      this.#renewals.forget(kept);
    }
  }

  // --- sending -------------------------------------------------------------------------------------

  /** Carries a flow to its end. */
  async #run<Result>(flow: Flow<Result>, lanes: Lanes, manner: Manner): Promise<Result> {
    const { transport } = this.#settings;
    const send = (attempt: Try): Promise<Outcome> =>
      lanes.run(manner.cancel, () => transport.exchange(attempt, manner));
    try {
      let step = flow.next();
      while (!step.done) step = flow.next(await send(step.value));
      return step.value;
    } catch (error) {
      if (error instanceof TransportError && manner.cancel?.aborted) throw new Cancelled(manner.cancel.reason);
      throw error;
    }
  }

  /** Carries a flow of a direct call, whose tries and answer also count for a running `withLock` with its token. */
  async #crossing<Result extends operations.Grant | Acquired>(
    { key, token, ttl }: { key: string; token: string; ttl: number },
    cancel: AbortSignal | undefined,
    flow: Flow<Result>,
    patience = 0,
  ): Promise<Result> {
    const tell = (change: (holding: Holding) => void) => {
      for (const kept of this.#renewals.sharing(key, token)) this.#renewals.touch(kept, change);
    };
    const onSent = (at: number) => tell((holding) => holding.crossed(at, ttl, this.#jitter()));
    try {
      const result = await this.#run(flow, this.#calls, { cancel, patience, onSent });
      tell((holding) => holding.answered('grant' in result ? result.grant : result, this.#jitter()));
      return result;
    } catch (error) {
      const refusal = error instanceof operations.AcquireFailed ? error.error : error;
      if (refusal instanceof ConflictError)
        tell((holding) => holding.lose('was lost: its holder was refused', refusal));
      throw error;
    }
  }

  /** A release frees the key for whoever shares the token; the one that releases has ended, and loses nothing. */
  #loseSharers(key: string, token: string): void {
    for (const kept of this.#renewals.sharing(key, token)) this.#renewals.touch(kept, (its) => its.lose(SHARED));
  }

  #spend(token: string): void {
    this.#spent.delete(token);
    this.#spent.add(token);
    const [oldest] = this.#spent;
    if (this.#spent.size > MOST_REMEMBERED && oldest !== undefined) this.#spent.delete(oldest);
  }

  #asked(options: unknown) {
    const asked = operations.checkedOptions(options) as Partial<AcquireOptions>;
    const requestId =
      asked.requestId === undefined ? this.#settings.uuid() : operations.checkedRequestId(asked.requestId);
    return { ...asked, requestId, signal: operations.checkedSignal(asked.signal) };
  }

  /** With a signal of the call's own, where the user's may end it. */
  async #following<Result>(
    signal: AbortSignal | undefined,
    work: (cancel: AbortSignal | undefined) => Promise<Result>,
  ): Promise<Result> {
    if (!signal) return work(undefined); // a controller is what costs most of a call
    const call = new AbortController();
    const unfollow = follow(signal, call);
    try {
      return await work(call.signal);
    } finally {
      unfollow();
    }
  }

  #lease(token: string, requestId: string): LeaseIdentity {
    return { ...this.#identity(requestId), token };
  }

  #identity(requestId: string): Identity {
    const { serviceKey } = this.#settings;
    if (serviceKey !== undefined) return { serviceKey, requestId };
    throw new AuthenticationError('no service key: pass accessToken (or serviceKey), or set VOLCANO_SERVICE_KEY');
  }

  #jitter(): number {
    return 2 * this.#settings.random() - 1;
  }
}

const CLOSED = 'was given up: the client was closed';
const SHARED = 'was lost: another withLock of its lock token has ended';

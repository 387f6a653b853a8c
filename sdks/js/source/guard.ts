/** What the callback of `withLock` receives, and how its signal tells the truth without a timer. */

import type { LockLease } from './lease.js';

/**
 * `signal` aborts when the lock is lost (its reason is a LockLostError) or when the caller's own signal does.
 * It is a real AbortSignal: hand it to `fetch`, timers, streams, `AbortSignal.any`. Each look at `aborted`,
 * `reason` or `throwIfAborted()` checks the clock first, so the first look after the event loop was blocked, or
 * after the host slept, sees a loss that no timer had time to announce.
 *
 * `lease` shows the latest renewal.
 */
export interface LockGuard {
  readonly signal: AbortSignal;
  readonly lease: LockLease;
}

/** The controller's own signal, that calls `look` before it answers. */
export function watchful({ signal }: AbortController, look: () => void): AbortSignal {
  const asked = (name: 'aborted' | 'reason') => {
    const answer = Object.getOwnPropertyDescriptor(AbortSignal.prototype, name)?.get;
    return {
      configurable: true,
      get(): unknown {
        look();
        return answer?.call(signal);
      },
    };
  };
  const throwIfAborted = {
    configurable: true,
    value(): void {
      if (signal.aborted) throw signal.reason;
    },
  };
  return Object.defineProperties(signal, { aborted: asked('aborted'), reason: asked('reason'), throwIfAborted });
}

const followers = new WeakMap<AbortSignal, Set<AbortController>>();

/**
 * Aborts the controller when the user's signal does, until the returned function is called. All followers of
 * one signal share one listener: a signal that lives as long as the process does not collect them, and Node
 * does not warn of a leak when many locks are held under it.
 */
export function follow(signal: AbortSignal | undefined, controller: AbortController): () => void {
  if (!signal) return () => {};
  if (signal.aborted) {
    controller.abort(signal.reason);
    return () => {};
  }
  const all = followers.get(signal) ?? listened(signal);
  all.add(controller);
  return () => {
    all.delete(controller);
    if (all.size > 0) return;
    followers.delete(signal);
    signal.removeEventListener('abort', abortAll);
  };
}

function listened(signal: AbortSignal): Set<AbortController> {
  const all = new Set<AbortController>();
  followers.set(signal, all);
  signal.addEventListener('abort', abortAll);
  return all;
}

function abortAll(this: AbortSignal): void {
  for (const controller of followers.get(this) ?? []) controller.abort(this.reason);
}

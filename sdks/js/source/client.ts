/** Credentials and settings, and from them `.locks`. */

import { type Clock, SystemClock } from './clock.js';
import type { VolcanoError } from './errors.js';
import { Locks } from './locks.js';
import { Transport } from './transport.js';

/** What is absent comes from VOLCANO_API_URL, VOLCANO_ANON_KEY and VOLCANO_SERVICE_KEY, where there is an environment. */
export interface VolcanoOptions {
  /** Where the server is, such as `http://127.0.0.1:7654`; a path in front of `/locks` is kept. */
  apiUrl?: string | undefined;
  /** The project's public key (`ak-…`). It may not manage locks. */
  anonKey?: string | undefined;
  /** The service key (`sk-…`) that every lock call carries. A secret: never in a browser. */
  accessToken?: string | undefined;
  /** Another name for `accessToken`. */
  serviceKey?: string | undefined;
  /** How long one try of a call may take, in milliseconds; 10 000 by default. */
  timeout?: number | undefined;
  /** Used in the place of the global `fetch`: for a proxy, an agent of your own, or tests. */
  fetch?: typeof fetch | undefined;
}

/** What the conformance driver and the tests put in the place of time and chance. */
export interface Chance {
  clock: Clock;
  random(): number;
  uuid(): string;
}

const DEFAULT_TIMEOUT_MS = 10_000;

/**
 * One project's client. It may be shared by everything in a process, holds no connection of its own and keeps no
 * process alive.
 */
export class VolcanoAuth {
  readonly locks: Locks;

  constructor(options?: VolcanoOptions);
  /** @internal */
  constructor(options: VolcanoOptions, chance: Partial<Chance>);
  constructor(options: VolcanoOptions = {}, { clock, random, uuid }: Partial<Chance> = {}) {
    if (typeof options !== 'object' || options === null) {
      throw new TypeError('options must be an object, such as { apiUrl, accessToken }');
    }
    const apiUrl = checkedUrl(options.apiUrl ?? environment('VOLCANO_API_URL'));
    const anonKey = checkedCredential('anonKey', options.anonKey ?? environment('VOLCANO_ANON_KEY'));
    const serviceKey = checkedServiceKey(options);
    refuseBrowser([anonKey, serviceKey]);
    const time = clock ?? new SystemClock();
    this.locks = new Locks({
      transport: new Transport(apiUrl, time, checkedFetch(options.fetch)),
      clock: time,
      serviceKey,
      timeout: checkedTimeout(options.timeout) / 1000,
      random: random ?? Math.random,
      uuid: uuid ?? (() => crypto.randomUUID()),
    });
  }

  /**
   * Ends every running `withLock`: first its lock is lost to its callback (LockLostError), then released.
   * Resolves to the first error that a release met. Leases of direct `acquire` calls stay the caller's.
   */
  close(): Promise<{ error: VolcanoError | null }> {
    return this.locks.close();
  }
}

function environment(name: string): string | undefined {
  // Not every runtime has a process; an empty variable counts as absent.
  const { process } = globalThis as { process?: { env?: Record<string, string | undefined> } };
  try {
    return process?.env?.[name] || undefined;
  } catch {
    return undefined; // Deno without --allow-env: there is no environment for us
  }
}

function checkedUrl(apiUrl: unknown): string {
  if (apiUrl === undefined) {
    throw new TypeError(
      'no server: pass apiUrl, or set VOLCANO_API_URL. A local server for development starts with: volcano-server dev',
    );
  }
  const url = typeof apiUrl === 'string' && URL.canParse(apiUrl) ? new URL(apiUrl) : undefined;
  if (!url || !/^https?:$/.test(url.protocol) || url.search || url.hash || url.username || url.password) {
    const got = url?.username || url?.password ? 'one with credentials' : JSON.stringify(apiUrl);
    throw new TypeError(`apiUrl must be an http or https URL without credentials, query or fragment; got ${got}`);
  }
  return url.href.replace(/\/+$/, '');
}

function checkedServiceKey({ accessToken, serviceKey }: VolcanoOptions): string | undefined {
  if (accessToken !== undefined && serviceKey !== undefined && accessToken !== serviceKey) {
    throw new TypeError('accessToken and serviceKey are two names for one thing, and differ: pass one of them');
  }
  const name = serviceKey === undefined ? 'accessToken' : 'serviceKey';
  return checkedCredential(name, accessToken ?? serviceKey ?? environment('VOLCANO_SERVICE_KEY'));
}

/** A credential goes into a header: printable ASCII without blanks. The error does not show it. */
function checkedCredential(name: string, value: unknown): string | undefined {
  if (value === undefined || (typeof value === 'string' && /^[!-~]+$/.test(value))) return value;
  throw new TypeError(
    `${name} must be a key as the server printed it, without blanks; got ${typeof value === 'string' ? 'another text' : `a ${typeof value}`}`,
  );
}

function checkedTimeout(timeout: unknown = DEFAULT_TIMEOUT_MS): number {
  if (typeof timeout === 'number' && Number.isFinite(timeout) && timeout > 0) return timeout;
  throw new (typeof timeout === 'number' ? RangeError : TypeError)(
    `timeout must be a number of milliseconds above 0; got ${String(timeout)}`,
  );
}

function checkedFetch(fetcher: unknown): typeof fetch {
  if (fetcher === undefined) {
    if (typeof globalThis.fetch === 'function') return (...request) => globalThis.fetch(...request);
    throw new TypeError('this runtime has no fetch: pass one as the option fetch');
  }
  if (typeof fetcher === 'function') return fetcher as typeof fetch;
  throw new TypeError(`fetch must be a function like the global fetch; got a ${typeof fetcher}`);
}

/** A page shows its keys to whoever looks, so one that may take and break any lock has no place there. */
function refuseBrowser(credentials: (string | undefined)[]): void {
  if (!isBrowser() || !credentials.some((credential) => credential?.startsWith('sk-'))) return;
  throw new TypeError('a service key (sk-…) must never reach a browser: call your own backend, and lock there');
}

function isBrowser(): boolean {
  const here = globalThis as { window?: { document?: unknown }; importScripts?: unknown; Deno?: unknown };
  const isPage = typeof here.window === 'object' && typeof here.window.document === 'object';
  const isWebWorker = typeof here.importScripts === 'function' && here.Deno === undefined;
  return isPage || isWebWorker;
}

/**
 * What the server tells of locks, and how it is asked to. Pure: no I/O, no clock, no randomness.
 *
 *     keys ── filtersOf ──> Filters ── subscribe ──> GET /lock-events?key=…&prefix=…
 *     bytes ── EventParser ──> Message ── lockEvent ──> LockEvent
 *
 * docs/semantics.md#events. The rules as data, the same in every SDK: conformance/tables/event_stream.json,
 * event_filters.json.
 */

import type { Identity, Request } from './operations.js';
import * as operations from './operations.js';

/**
 * What became of a key's lease. `fencingToken`: that lease's. `at`: the server's instant, RFC 3339 in UTC.
 * `watchers`: how many streams asked the server for this very key. A `reset` says that events may be missing from
 * here on: read again.
 */
export type LockEvent =
  | {
      readonly type: 'acquired' | 'released' | 'force_released' | 'lapsed';
      readonly key: string;
      readonly fencingToken: number;
      readonly at: string;
      readonly watchers: number;
    }
  | {
      readonly type: 'reset';
      readonly key: null;
      readonly fencingToken: null;
      readonly at: null;
      readonly watchers: null;
    };

// --- what is asked for -----------------------------------------------------------------------------

/** Of whose events a stream tells. */
export interface Filters {
  readonly keys: readonly string[];
  readonly prefixes: readonly string[];
}

/** Filters that one stream may have. */
export const MOST_FILTERS = 64;

/** The filters of a watch; else TypeError or RangeError. */
export function checkedFilters({ key, prefix }: { key?: unknown; prefix?: unknown }): Filters {
  const filters = { keys: each('key', key), prefixes: each('prefix', prefix) };
  const count = filters.keys.length + filters.prefixes.length;
  if (count >= 1 && count <= MOST_FILTERS) return filters;
  throw new RangeError(`key and prefix must be 1 to ${MOST_FILTERS} together; got ${count || 'none'}`);
}

function each(name: string, value: unknown): string[] {
  if (value === undefined) return [];
  return (Array.isArray(value) ? value : [value]).map((one) => operations.checkedKey(one, name));
}

/** What one stream asks for on behalf of all these keys: the keys, or prefixes that are as long as can be. */
export function filtersOf(keys: Iterable<string>): Filters {
  const distinct = [...new Set(keys)].sort();
  if (distinct.length <= MOST_FILTERS) return { keys: distinct, prefixes: [] };
  const prefixes = (length: number) => new Set(distinct.map((key) => key.slice(0, length)));
  let [enough, tooLong] = [1, operations.KEY_LENGTH]; // a key has one of 62 first characters
  while (tooLong - enough > 1) {
    const length = (enough + tooLong) >> 1;
    if (prefixes(length).size <= MOST_FILTERS) enough = length;
    else tooLong = length;
  }
  return { keys: [], prefixes: [...prefixes(enough)] };
}

/** Whether a stream with these filters tells of the key. */
export function covers({ keys, prefixes }: Filters, key: string): boolean {
  return keys.includes(key) || prefixes.some((prefix) => key.startsWith(prefix));
}

/** Opens a stream, behind the last event of an earlier one where `lastId` is not empty. */
export function subscribe({ keys, prefixes }: Filters, lastId: string, identity: Identity): Request {
  const query = [
    ...keys.map((key) => `key=${encodeURIComponent(key)}`),
    ...prefixes.map((prefix) => `prefix=${encodeURIComponent(prefix)}`),
  ];
  const more = { Accept: 'text/event-stream', ...(lastId && { 'Last-Event-ID': headerValue(lastId) }) };
  return operations.request('watch', 'GET', `/lock-events?${query.join('&')}`, identity, more);
}

/** The bytes of its UTF-8, each as a character: that is how `fetch` takes them. */
function headerValue(text: string): string {
  return String.fromCharCode(...new TextEncoder().encode(text));
}

// --- what comes ------------------------------------------------------------------------------------

/** One event as it was sent; `id`: the last that was seen when it ended. */
export interface Message {
  readonly type: string;
  readonly data: string;
  readonly id: string;
}

/**
 * Reads a `text/event-stream` in whatever pieces it comes, as the HTML standard says ("event stream
 * interpretation"). `retry` is ignored: how soon to come back is decided here.
 */
export class EventParser {
  /** What a reconnect sends as `Last-Event-ID`; empty: nothing. */
  lastId: string;
  #decoder = new TextDecoder(); // also takes a byte order mark at the start away
  #unfinished = ''; // the line that has no end yet
  #endedInCr = false; // a newline that comes next belongs to that line end
  #id: string;
  #type = '';
  #data: string[] = [];

  constructor(lastId = '') {
    this.lastId = lastId;
    this.#id = lastId;
  }

  /** The events that these bytes bring to their end. */
  *read(bytes: Uint8Array): Generator<Message, void> {
    const text = this.#decoder.decode(bytes, { stream: true });
    if (text === '') return;
    const isSecondHalf = this.#endedInCr && text.startsWith('\n');
    this.#endedInCr = text.endsWith('\r');
    const lines = (this.#unfinished + (isSecondHalf ? text.slice(1) : text)).split(/\r\n|\r|\n/);
    this.#unfinished = lines.pop() as string;
    for (const line of lines) {
      if (line !== '') this.#field(line);
      else yield* this.#end();
    }
  }

  #field(line: string): void {
    const colon = line.indexOf(':');
    const name = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? '' : line.slice(colon + 1).replace(/^ /, '');
    if (name === 'event') this.#type = value;
    else if (name === 'data') this.#data.push(value);
    else if (name === 'id' && !value.includes('\0')) this.#id = value;
  }

  *#end(): Generator<Message, void> {
    this.lastId = this.#id;
    const message = { type: this.#type || 'message', data: this.#data.join('\n'), id: this.lastId };
    const isEvent = this.#data.length > 0;
    this.#type = '';
    this.#data = [];
    if (isEvent) yield message;
  }
}

export const RESET: LockEvent = Object.freeze({
  type: 'reset',
  key: null,
  fencingToken: null,
  at: null,
  watchers: null,
});

/**
 * What a message says of a lock; null where it is of a kind that came up later. One that cannot be understood is a
 * `reset`: something happened.
 */
export function lockEvent({ type, data }: Message): LockEvent | null {
  if (type === 'reset') return RESET;
  if (type !== 'acquired' && type !== 'released' && type !== 'force_released' && type !== 'lapsed') return null;
  const { key, fencing_token: fencingToken, at, watchers } = operations.parsedObject(data) ?? {};
  const isWhole = typeof key === 'string' && isCount(fencingToken) && typeof at === 'string' && isCount(watchers);
  return isWhole ? Object.freeze({ type, key, fencingToken, at, watchers }) : RESET;
}

function isCount(value: unknown): value is number {
  return Number.isSafeInteger(value) && (value as number) >= 0;
}

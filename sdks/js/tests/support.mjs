/** What the tests stand on: the build, a clock that stands still, scripted servers and the reference server. */

import { spawn } from 'node:child_process';
import { existsSync, readFileSync } from 'node:fs';
import { createServer } from 'node:http';
import { createRequire } from 'node:module';
import { tmpdir } from 'node:os';
import { fileURLToPath } from 'node:url';

const require = createRequire(import.meta.url);

export const sdk = require('../build/index.js');
export const clocks = require('../build/clock.js');
export const errors = require('../build/errors.js');
export const events = require('../build/events.js');
export const { Heap } = require('../build/heap.js');
export const guards = require('../build/guard.js');
export const operations = require('../build/operations.js');
export const renewals = require('../build/renewal.js');
export const streams = require('../build/stream.js');
export const transports = require('../build/transport.js');
export const waits = require('../build/waiting.js');

export const SERVICE_KEY = 'sk-test-0123456789';
export const TOKEN = '0b0f3f7e-8c1c-4e9c-9c53-0d4c2f6b3a11';

/** The rows of a table that all SDKs share, or what else is in it. */
export function table(name, part = 'rows') {
  const path = fileURLToPath(new URL(`../../../conformance/tables/${name}.json`, import.meta.url));
  return JSON.parse(readFileSync(path, 'utf8'))[part];
}

/** Lets everything go on that waits for no timer and no socket. */
export async function settle() {
  for (let turn = 0; turn < 10; turn++) await new Promise((resolve) => setImmediate(resolve));
}

/** Resolves when `condition` holds; fails after ten seconds, so that a fault is a failure and not a hang. */
export async function until(condition, what = String(condition)) {
  const deadline = performance.now() + 10_000;
  for (let value = await condition(); ; value = await condition()) {
    if (value) return value;
    if (performance.now() > deadline) throw new Error(`did not come true within 10 s: ${what}`);
    await new Promise((resolve) => setTimeout(resolve, 2));
  }
}

/** Time that stands still until `advance`, or `block` (an event loop that hung: no timer runs). */
export class ManualClock {
  #now = 1_000;
  pending = new Set();

  now() {
    return this.#now;
  }

  at(when, wake) {
    const pending = { when, wake };
    this.pending.add(pending);
    return () => this.pending.delete(pending);
  }

  /** Seconds since 1970: 1 December 2026, and what has passed here. */
  wall() {
    return 1_796_083_200 + this.#now - 1_000;
  }

  block(seconds) {
    this.#now += seconds;
  }

  async advance(seconds) {
    const end = this.#now + seconds;
    for (;;) {
      await settle();
      const due = [...this.pending].filter(({ when }) => when <= end).sort((a, b) => a.when - b.when)[0];
      if (!due) break;
      this.#now = Math.max(this.#now, due.when);
      this.pending.delete(due);
      due.wake();
    }
    this.#now = end;
  }
}

/** A local HTTP server whose requests wait for their test: `next()` is the next one that came. */
export async function scripted(t) {
  const waiting = [];
  const takers = [];
  let count = 0;
  const server = createServer((request, response) => {
    const chunks = [];
    request.on('data', (chunk) => chunks.push(chunk));
    request.on('end', () => {
      const asked = new Asked(request, response, Buffer.concat(chunks).toString());
      count += 1;
      const taker = takers.shift();
      if (taker) taker(asked);
      else waiting.push(asked);
    });
  });
  await new Promise((resolve) => server.listen(0, '127.0.0.1', resolve));
  t.after(() => {
    server.closeAllConnections();
    server.close();
  });
  return {
    server,
    url: `http://127.0.0.1:${server.address().port}`,
    next: () => {
      const asked = waiting.shift();
      if (asked) return Promise.resolve(asked);
      return new Promise((resolve, reject) => {
        const patience = setTimeout(() => reject(new Error('no request came within 10 s')), 10_000);
        takers.push((came) => {
          clearTimeout(patience);
          resolve(came);
        });
      });
    },
    /** The next that is none of an event stream; such a one waits on. */
    nextCall: async function nextCall() {
      const asked = await this.next();
      if (!asked.what.startsWith('GET /lock-events')) return asked;
      const call = await this.nextCall();
      waiting.unshift(asked);
      return call;
    },
    get count() {
      return count;
    },
  };
}

class Asked {
  constructor(request, response, body) {
    this.what = `${request.method} ${request.url}`;
    this.headers = request.headers;
    this.body = body;
    this.response = response;
    this.socket = request.socket;
  }

  get isClosed() {
    return this.socket.destroyed;
  }

  answer(status, body, headers = {}) {
    this.response.writeHead(status, { 'content-type': 'application/json', ...headers });
    this.response.end(body === undefined ? undefined : typeof body === 'string' ? body : JSON.stringify(body));
  }

  grant(fencingToken = 7, headers = {}) {
    const status = this.what.startsWith('POST') ? 201 : 200;
    this.answer(status, { expires_at: '2026-11-29T12:00:00.000Z', fencing_token: fencingToken }, headers);
  }

  released() {
    this.answer(204);
  }

  refuse(status = 409, code = 'lock_ownership_lost', headers = {}) {
    this.answer(status, { error: 'a sentence', code }, headers);
  }

  lose() {
    this.response.socket.destroy();
  }

  /** The answer of an event stream; with the first comment line, by which a client knows that it is heard. */
  stream() {
    this.response.writeHead(200, { 'content-type': 'text/event-stream' });
    this.send(':\n\n');
  }

  send(text) {
    this.response.write(text);
  }

  /** One event on it; what is not named is made up. */
  tell(type, fields = {}, id = '1') {
    const data = { key: 'k', fencing_token: 7, at: '2026-12-01T00:00:00.000Z', watchers: 1, ...fields };
    this.send(`event: ${type}\nid: ${id}\ndata: ${JSON.stringify(type === 'reset' ? {} : data)}\n\n`);
  }
}

/** A client of a scripted server, under a clock that stands still and without jitter. */
export async function arranged(t, options = {}) {
  const server = await scripted(t);
  const clock = new ManualClock();
  const client = new sdk.VolcanoAuth(
    { apiUrl: server.url, accessToken: SERVICE_KEY, ...options },
    { clock, random: () => 0.5 },
  );
  return { server, clock, client, locks: client.locks };
}

/** `volcano-server dev`, in a process of its own; undefined where it is not installed. */
export function serverProgram() {
  const { VOLCANO_SERVER } = process.env;
  if (VOLCANO_SERVER) return VOLCANO_SERVER;
  const places = ['.venv/bin', '.nox/environment/bin'].map((folder) =>
    fileURLToPath(new URL(`../../../${folder}/volcano-server`, import.meta.url)),
  );
  return places.find(existsSync);
}

/** Starts the reference server for one test file; the result has its `url`, `serviceKey` and `anonKey`. */
export async function startServer(after, ...more) {
  const child = spawn(serverProgram(), ['dev', '--port', '0', '--ephemeral', '--json', '--quota', '0', ...more], {
    cwd: tmpdir(),
    stdio: ['ignore', 'pipe', 'inherit'],
  });
  after(() => child.kill());
  const ready = await new Promise((resolve, reject) => {
    let said = '';
    child.on('exit', () => reject(new Error(`volcano-server ended: ${said}`)));
    child.stdout.on('data', (chunk) => {
      said += chunk;
      if (said.includes('\n')) resolve(JSON.parse(said.split('\n')[0]));
    });
  });
  return { url: ready.url, serviceKey: ready.service_key, anonKey: ready.anon_key, child };
}

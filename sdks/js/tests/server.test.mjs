/** Against the real reference server, in a process of its own and in real time. */

import assert from 'node:assert/strict';
import { spawn } from 'node:child_process';
import { getEventListeners } from 'node:events';
import { after, before, describe, test } from 'node:test';
import { fileURLToPath } from 'node:url';
import { sdk, serverProgram, startServer, table, until } from './support.mjs';

const skip = serverProgram() ? false : 'volcano-server is not installed here (./dev test js installs it)';

describe('with the reference server', { skip }, () => {
  let server;
  let locks;
  const cleanUp = [];
  before(async () => {
    server = await startServer((work) => cleanUp.push(work));
    locks = new sdk.VolcanoAuth({ apiUrl: server.url, accessToken: server.serviceKey }).locks;
  });
  after(() => {
    for (const work of cleanUp) work();
  });

  test('a lease from its grant to its release', async () => {
    const { lease } = await locks.acquire('a', { ttl: 30 });
    const other = await locks.acquire('a', { ttl: 30 });
    const { state } = await locks.get('a');
    const first = lease.expiresAt;
    const renewed = await locks.renew('a', lease, { ttl: 600 });
    const released = await locks.release('a', lease);

    assert.deepEqual(other, { acquired: false, lease: null, error: null });
    assert.deepEqual(state, { held: true, expiresAt: first, fencingToken: lease.fencingToken });
    assert.equal(renewed.lease, lease);
    assert.ok(lease.expiresAt > first);
    assert.deepEqual(released, { error: null });
    assert.deepEqual((await locks.get('a')).state, { held: false, expiresAt: null, fencingToken: null });
  });

  test('the next lease has a larger fencing token', async () => {
    const one = await locks.withLock('b', { ttl: 5 }, ({ lease }) => lease.fencingToken);
    const two = await locks.withLock('b', { ttl: 5 }, ({ lease }) => lease.fencingToken);

    assert.ok(two.data > one.data);
  });

  test('a lock is renewed while its callback works longer than the TTL', async () => {
    const { data, error } = await locks.withLock('c', { ttl: 5 }, async ({ signal, lease }) => {
      const { expiresAt } = lease;
      await new Promise((resolve) => setTimeout(resolve, 5_600));
      return { renewed: lease.expiresAt > expiresAt, aborted: signal.aborted };
    });

    assert.deepEqual([data, error], [{ renewed: true, aborted: false }, null]);
  });

  test('a holder that was displaced by force learns of it at its next renewal', async () => {
    const { error } = await locks.withLock('d', { ttl: 5 }, async ({ signal }) => {
      await locks.forceRelease('d');
      await new Promise((resolve) => signal.addEventListener('abort', resolve));
      signal.throwIfAborted();
    });

    assert.deepEqual([error.constructor, error.code], [sdk.LockLostError, 'lock_ownership_lost']);
  });

  test('every key of the table is a byte-equal round trip', async () => {
    for (const { key, valid } of table('keys').filter((row) => 'key' in row)) {
      if (!valid) continue;
      const { lease, error } = await locks.acquire(key, { ttl: 30 });

      assert.equal(error, null, key);
      assert.deepEqual(await locks.release(key, lease), { error: null });
    }
  });

  test('twenty callers on one client: every answer goes to its own question', async () => {
    const answers = await Promise.all(
      Array.from({ length: 200 }, (_, n) =>
        locks.withLock(`many:${n % 20}:${n}`, { ttl: 30 }, async ({ lease }) => {
          const { state } = await locks.get(lease.key);
          return [lease.key, state.fencingToken === lease.fencingToken];
        }),
      ),
    );

    for (const [n, { data }] of answers.entries()) assert.deepEqual(data, [`many:${n % 20}:${n}`, true]);
  });

  test('an anon key may not lock, an unknown key is unknown', async () => {
    for (const [accessToken, kind] of [
      [server.anonKey, sdk.PermissionDeniedError],
      ['sk-unknown', sdk.AuthenticationError],
    ]) {
      const client = new sdk.VolcanoAuth({ apiUrl: server.url, accessToken });

      assert.equal((await client.locks.acquire('e', { ttl: 5 })).error.constructor, kind);
    }
  });

  test('a thousand locks in a row leave no socket, listener or timer', async () => {
    const { signal } = new AbortController();
    const inUse = () => process.getActiveResourcesInfo().filter((name) => /Timeout|Immediate|TCP/.test(name)).length;
    await locks.withLock('f', { ttl: 30, signal }, () => {});
    const base = inUse();

    for (let n = 0; n < 1_000; n++) await locks.withLock(`f${n % 10}`, { ttl: 30, signal }, () => {});

    assert.equal(getEventListeners(signal, 'abort').length, 0);
    await until(() => inUse() <= base + 1);
  });

  test('thirty who wait for one key get it one after the other, over one stream', async () => {
    const asked = [];
    const client = new sdk.VolcanoAuth({
      apiUrl: server.url,
      accessToken: server.serviceKey,
      fetch: (url, init) => {
        asked.push(new URL(url).pathname);
        return fetch(url, init);
      },
    });
    let inside = 0;
    const results = await Promise.all(
      Array.from({ length: 30 }, () =>
        client.locks.withLock('queue', { ttl: 30, wait: 30 }, async ({ lease }) => {
          inside += 1;
          await new Promise((resolve) => setImmediate(resolve));
          inside -= 1;
          return [inside, lease.fencingToken];
        }),
      ),
    );

    for (const { data, error } of results) assert.deepEqual([data?.[0], error], [0, null]);
    assert.equal(new Set(results.map(({ data }) => data[1])).size, 30);
    assert.equal(asked.filter((path) => path === '/lock-events').length, 1);
    assert.ok(asked.length < 30 * 5, `${asked.length} requests`);
  });

  test('a watch tells of a lease from its grant to its end, and of a force release', async () => {
    const seen = [];
    const told = (async () => {
      for await (const { type, key, fencingToken } of locks.watch({ key: 'seen', prefix: 'seen:' })) {
        if (key === 'seen:last' && type === 'force_released') return;
        if (key === 'seen') seen.push([type, fencingToken]);
        else if (seen.length === 0 && type === 'released') ready();
      }
    })();
    let ready;
    const isOpen = new Promise((resolve) => {
      ready = resolve;
    });
    const knocking = setInterval(() => locks.withLock('seen:first', { ttl: 5 }, () => {}), 20);
    await isOpen;
    clearInterval(knocking);

    const { data } = await locks.withLock('seen', { ttl: 30 }, ({ lease }) => lease.fencingToken);
    await locks.acquire('seen:last', { ttl: 30 });
    await locks.forceRelease('seen:last');
    await told;

    assert.deepEqual(seen, [
      ['acquired', data],
      ['released', data],
    ]);
  });

  test('a program ends by itself when its wait or its watch is over', async () => {
    const { lease } = await locks.acquire('h', { ttl: 30 });
    const program = `
      const { VolcanoAuth } = require(${JSON.stringify(fileURLToPath(new URL('..', import.meta.url)))});
      const { locks } = new VolcanoAuth({ apiUrl: process.argv[1], accessToken: process.argv[2] });
      const waits = async () => {
        const { acquired } = await locks.acquire('h', { ttl: 5, wait: 0.3 });
        return acquired;
      };
      const watches = async () => {
        const knocking = setInterval(() => locks.withLock('i', { ttl: 5 }, () => {}), 20);
        for await (const { type } of locks.watch({ key: 'i' })) if (type === 'released') break;
        clearInterval(knocking);
        return 'released';
      };
      Promise.all([waits(), watches()]).then((ends) => process.stdout.write(ends.join()));`;
    const child = spawn(process.execPath, ['-e', program, server.url, server.serviceKey], {
      stdio: ['ignore', 'pipe', 'inherit'],
    });
    let said = '';
    let overAt;
    child.stdout.on('data', (chunk) => {
      said += chunk;
      overAt = performance.now();
    });

    const status = await new Promise((resolve) => child.on('exit', resolve));

    assert.deepEqual([status, said], [0, 'false,released']);
    assert.ok(performance.now() - overAt < 1_000);
    await locks.release('h', lease);
  });

  test('a program ends by itself within a second of its last lock', async () => {
    const program = `
      const { VolcanoAuth } = require(${JSON.stringify(fileURLToPath(new URL('..', import.meta.url)))});
      const { locks } = new VolcanoAuth({ apiUrl: process.argv[1], accessToken: process.argv[2] });
      locks.withLock('g', { ttl: 5 }, async ({ signal }) => {
        // Only the lock keeps the process: nothing else is waited for until the first renewal has been seen.
        await new Promise((resolve) => { process.once('renewed', resolve); });
      }).then(({ error }) => { if (error) throw error; process.stdout.write('over'); });
      const { fetch } = globalThis;
      globalThis.fetch = async (url, init) => {
        const response = await fetch(url, init);
        if (init.method === 'PATCH') process.emit('renewed');
        return response;
      };`;
    const child = spawn(process.execPath, ['-e', program, server.url, server.serviceKey], {
      stdio: ['ignore', 'pipe', 'inherit'],
    });
    let overAt;
    child.stdout.on('data', () => {
      overAt = performance.now();
    });

    const status = await new Promise((resolve) => child.on('exit', resolve));

    assert.equal(status, 0);
    assert.ok(performance.now() - overAt < 1_000);
  });
});

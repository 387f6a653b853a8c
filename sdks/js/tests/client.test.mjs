import assert from 'node:assert/strict';
import { afterEach, test } from 'node:test';
import { SERVICE_KEY, scripted, sdk } from './support.mjs';

const { VolcanoAuth, VolcanoClient } = sdk;
const apiUrl = 'http://127.0.0.1:1234';

const before = { ...process.env };
afterEach(() => {
  for (const name of ['VOLCANO_API_URL', 'VOLCANO_ANON_KEY', 'VOLCANO_SERVICE_KEY']) {
    if (name in before) process.env[name] = before[name];
    else delete process.env[name];
  }
  for (const name of ['window', 'importScripts', 'Deno']) delete globalThis[name];
});

/** What a client of these options sends. */
async function sent(t, options) {
  const { url, next } = await scripted(t);
  const client = new VolcanoAuth({ ...options, apiUrl: url + (options.path ?? '') });
  const result = client.locks.get('k');
  const asked = await next();
  asked.answer(200, { held: false });
  await result;
  return asked;
}

test('it goes by two names', () => {
  assert.equal(VolcanoAuth, VolcanoClient);
});

test('the service key may be called accessToken or serviceKey', async (t) => {
  for (const options of [{ accessToken: SERVICE_KEY }, { serviceKey: SERVICE_KEY }]) {
    assert.equal((await sent(t, options)).headers.authorization, `Bearer ${SERVICE_KEY}`);
  }
});

test('what is absent comes from the environment, and an option goes first', async (t) => {
  const server = await scripted(t);
  process.env.VOLCANO_API_URL = server.url;
  process.env.VOLCANO_SERVICE_KEY = 'sk-of-the-environment';

  for (const [options, key] of [
    [{}, 'sk-of-the-environment'],
    [{ accessToken: SERVICE_KEY }, SERVICE_KEY],
  ]) {
    const result = new VolcanoAuth(options).locks.get('k');
    const asked = await server.next();
    asked.answer(200, { held: false });
    await result;

    assert.equal(asked.headers.authorization, `Bearer ${key}`);
  }
});

test('an environment that may not be read counts as empty', (t) => {
  const { env } = process;
  t.after(() => {
    process.env = env;
  });
  process.env = new Proxy(
    {},
    {
      get() {
        throw new Error('Requires env access');
      },
    },
  );

  new VolcanoAuth({ apiUrl, serviceKey: SERVICE_KEY });
  assert.throws(() => new VolcanoAuth(), /pass apiUrl/);
});

test('a path in front of the routes is kept, slashes at its end are not', async (t) => {
  assert.equal((await sent(t, { serviceKey: SERVICE_KEY, path: '/volcano/v1//' })).what, 'GET /volcano/v1/locks/k');
});

test('no URL: the error names the option, the variable and the command', () => {
  delete process.env.VOLCANO_API_URL;

  assert.throws(() => new VolcanoAuth(), /pass apiUrl, or set VOLCANO_API_URL.*volcano-server dev/);
});

test('wrong options are refused with a sentence that names them, and no secret', () => {
  for (const [options, sentence] of [
    [{ apiUrl: 'localhost:80' }, /^apiUrl must be an http or https URL/],
    [{ apiUrl: 'ftp://x' }, /^apiUrl must be/],
    [{ apiUrl: 'http://x/?a=b' }, /^apiUrl must be/],
    [{ apiUrl: 'http://me:secret@x' }, /^apiUrl must be/],
    [{ apiUrl: 7 }, /^apiUrl must be/],
    [{ apiUrl, accessToken: 'sk-secret\n' }, /^accessToken must be/],
    [{ apiUrl, serviceKey: ' sk-secret' }, /^serviceKey must be/],
    [{ apiUrl, serviceKey: '' }, /^serviceKey must be/],
    [{ apiUrl, anonKey: 7 }, /^anonKey must be/],
    [{ apiUrl, accessToken: 'sk-secret', serviceKey: 'sk-secret2' }, /^accessToken and serviceKey are two names/],
    [{ apiUrl, timeout: '10' }, /^timeout must be/],
    [{ apiUrl, timeout: 0 }, /^timeout must be/],
    [{ apiUrl, timeout: Number.POSITIVE_INFINITY }, /^timeout must be/],
    [{ apiUrl, fetch: 7 }, /^fetch must be/],
    [null, /^options must be/],
    ['http://x', /^options must be/],
  ]) {
    assert.throws(
      () => new VolcanoAuth(options),
      ({ name, message }) => /^(Type|Range)Error$/.test(name) && sentence.test(message) && !message.includes('secret'),
      JSON.stringify(options),
    );
  }
});

test('a runtime without fetch is told so, unless one is passed', (t) => {
  const { fetch } = globalThis;
  t.after(() => {
    globalThis.fetch = fetch;
  });
  globalThis.fetch = undefined;

  assert.throws(() => new VolcanoAuth({ apiUrl }), /this runtime has no fetch/);
  new VolcanoAuth({ apiUrl, fetch });
});

test('the fetch that is there when a call is made is used, be it a stand-in', async (t) => {
  const { fetch } = globalThis;
  t.after(() => {
    globalThis.fetch = fetch;
  });
  const client = new VolcanoAuth({ apiUrl, serviceKey: SERVICE_KEY });

  globalThis.fetch = async () => new Response('{"held":false}');

  assert.equal((await client.locks.get('k')).state.held, false);
});

test('a service key in a browser is refused, whichever option carries it', () => {
  const places = [{ window: { document: {} } }, { importScripts: () => {} }];
  for (const place of places) {
    Object.assign(globalThis, place);
    for (const name of ['accessToken', 'serviceKey', 'anonKey']) {
      assert.throws(
        () => new VolcanoAuth({ apiUrl, [name]: SERVICE_KEY }),
        ({ message }) => /must never reach a browser/.test(message) && !message.includes(SERVICE_KEY),
      );
    }
    new VolcanoAuth({ apiUrl, anonKey: 'ak-public', accessToken: 'a-users-token' });
    for (const name of Object.keys(place)) delete globalThis[name];
  }
});

test('a server-side runtime that has some of what a browser has is none', () => {
  globalThis.window = globalThis; // as in Deno 1, and in many a test set-up
  new VolcanoAuth({ apiUrl, serviceKey: SERVICE_KEY });
  delete globalThis.window;
  Object.assign(globalThis, { importScripts: () => {}, Deno: {} }); // a worker of Deno's

  new VolcanoAuth({ apiUrl, serviceKey: SERVICE_KEY });
});

import assert from 'node:assert/strict';
import { getEventListeners } from 'node:events';
import { createServer } from 'node:http';
import { createServer as createSocketServer } from 'node:net';
import { test } from 'node:test';
import {
  clocks,
  events,
  ManualClock,
  operations,
  SERVICE_KEY,
  scripted,
  settle,
  TOKEN,
  transports,
  until,
} from './support.mjs';

const identity = { serviceKey: SERVICE_KEY, requestId: TOKEN };
const request = operations.get('a:b', identity);
const attempt = { request, timeout: 10 };

async function arranged(t) {
  const server = await scripted(t);
  const clock = new ManualClock();
  return { server, clock, transport: new transports.Transport(server.url, clock, fetch) };
}

/** A server of raw sockets; its URL. */
async function raw(t, onConnection) {
  const sockets = new Set();
  const server = createSocketServer((socket) => {
    sockets.add(socket);
    socket.on('error', () => {});
    onConnection(socket);
  });
  await new Promise((resolve) => server.listen(0, '127.0.0.1', resolve));
  t.after(() => {
    for (const socket of sockets) socket.destroy();
    server.close();
  });
  return `http://127.0.0.1:${server.address().port}`;
}

test('an answer comes back with the moment of its send', async (t) => {
  const { server, clock, transport } = await arranged(t);
  const sentAt = clock.now();

  const outcome = transport.exchange(attempt);
  const asked = await server.next();
  clock.block(3);
  asked.answer(200, { held: false });
  const { status, body, headers, ...rest } = await outcome;

  assert.equal(asked.what, 'GET /locks/a%3Ab');
  assert.equal(asked.headers.authorization, `Bearer ${SERVICE_KEY}`);
  assert.deepEqual([status, body, headers.get('Content-Type')], [200, '{"held":false}', 'application/json']);
  assert.deepEqual(rest, { sentAt });
  assert.equal(clock.pending.size, 0);
});

test('a connection that cannot be made is known: nothing was sent', async () => {
  const closed = createServer();
  await new Promise((resolve) => closed.listen(0, '127.0.0.1', resolve));
  const { port } = closed.address();
  await new Promise((resolve) => closed.close(resolve));

  for (const url of [`http://127.0.0.1:${port}`, `http://localhost:${port}`, 'http://nowhere.invalid:8080']) {
    const outcome = await new transports.Transport(url, new ManualClock(), fetch).exchange(attempt);

    assert.equal(outcome.reached, false, url);
    assert.match(outcome.failure.message, /^get got no answer: .*(ECONNREFUSED|ENOTFOUND|EAI_AGAIN)/);
    assert.equal(outcome.failure.requestId, TOKEN);
  }
});

test('a connection that broke after it stood may have reached the server', async (t) => {
  const { server, transport } = await arranged(t);

  const outcome = transport.exchange(attempt);
  (await server.next()).lose();

  assert.equal((await outcome).reached, true);
});

test('what an injected fetch throws, be it nothing at all, is a failure and no rejection', async () => {
  for (const thrown of [null, undefined, 'text', {}, new Error('')]) {
    const transport = new transports.Transport('http://127.0.0.1', new ManualClock(), () => Promise.reject(thrown));

    assert.equal((await transport.exchange(attempt)).reached, true);
  }
  const throwing = new transports.Transport('http://127.0.0.1', new ManualClock(), () => {
    throw new Error('at once');
  });
  assert.match((await throwing.exchange(attempt)).failure.message, /at once/);
});

test('a try ends at its timeout and its socket is closed', async (t) => {
  const { server, clock, transport } = await arranged(t);

  const outcome = transport.exchange(attempt);
  const asked = await server.next();
  await clock.advance(10);

  assert.match((await outcome).failure.message, /no answer within 10 s/);
  assert.equal((await outcome).reached, true);
  await until(() => asked.isClosed);
  assert.equal(clock.pending.size, 0);
});

test('a server that dribbles bytes does not extend the timeout', async (t) => {
  const clock = new ManualClock();
  let isClosed = false;
  const url = await raw(t, (socket) => {
    socket.write('HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n');
    const dribble = setInterval(() => socket.write('x'), 5);
    socket.on('close', () => {
      clearInterval(dribble);
      isClosed = true;
    });
  });

  const outcome = new transports.Transport(url, clock, fetch).exchange(attempt);
  await new Promise((resolve) => setTimeout(resolve, 50));
  await clock.advance(10);

  assert.match((await outcome).failure.message, /no answer within/);
  await until(() => isClosed);
});

test('a fetch that ignores its signal does not extend the timeout either', async () => {
  const clock = new ManualClock();
  const transport = new transports.Transport('http://127.0.0.1', clock, () => new Promise(() => {}));

  const outcome = transport.exchange(attempt);
  await clock.advance(10);

  assert.equal((await outcome).reached, true);
});

test('a cancelled try ends at once, or after the patience that was asked for', async (t) => {
  const { server, clock, transport } = await arranged(t);
  for (const patience of [0, 2]) {
    const cancel = new AbortController();
    const outcome = transport.exchange(attempt, { cancel: cancel.signal, patience });
    const asked = await server.next();

    cancel.abort();
    await settle();
    assert.equal(clock.pending.size, patience === 0 ? 0 : 2);
    await clock.advance(patience);

    assert.match((await outcome).failure.message, /cancelled/);
    await until(() => asked.isClosed);
    assert.equal(clock.pending.size, 0);
  }
});

test('an answer that comes while patience lasts is taken', async (t) => {
  const { server, transport } = await arranged(t);
  const cancel = new AbortController();

  const outcome = transport.exchange(attempt, { cancel: cancel.signal, patience: 2 });
  const asked = await server.next();
  cancel.abort();
  asked.answer(200, {});

  assert.equal((await outcome).status, 200);
});

test('what is cancelled before its send is not sent', async (t) => {
  const { server, transport } = await arranged(t);

  const outcome = await transport.exchange(attempt, { cancel: AbortSignal.abort(), onSent: assert.fail });

  assert.equal(outcome.reached, false);
  assert.equal(server.count, 0);
});

test('a redirect is not followed', async (t) => {
  const { server, transport } = await arranged(t);

  const outcome = transport.exchange(attempt);
  (await server.next()).answer(302, '', { location: `${server.url}/elsewhere` });

  assert.equal((await outcome).status, 302);
  assert.equal(server.count, 1);
});

test('a kept connection that the server closed while the event loop was blocked is not used', async (t) => {
  const { server } = await scripted(t).then((server) => ({ server }));
  const transport = new transports.Transport(server.url, new clocks.SystemClock(), fetch);
  const connections = [];
  server.server.on('connection', (socket) => connections.push(socket));
  for (let round = 0; round < 5; round++) {
    const first = transport.exchange(attempt);
    (await server.next()).answer(200, {});
    await first;
    for (const socket of connections) socket.end(); // the news is on its way; before it is read …
    const blockedUntil = performance.now() + 20;
    while (performance.now() < blockedUntil);

    const second = transport.exchange(attempt); // … the next request goes out
    (await server.next()).answer(200, {});

    assert.equal((await second).status, 200);
  }
});

// --- streams -----------------------------------------------------------------------------------------

const opening = { request: events.subscribe({ keys: ['a'], prefixes: [] }, '', identity), timeout: 10 };

/** A stream that is open: its first comment was read. */
async function opened(t) {
  const all = await arranged(t);
  const cancel = new AbortController();
  const pending = all.transport.open(opening, cancel.signal);
  const asked = await all.server.next();
  asked.stream();
  const incoming = await pending;
  assert.equal(text(await incoming.read()), ':\n\n');
  return { ...all, asked, cancel, incoming };
}

const text = (bytes) => bytes && new TextDecoder().decode(bytes);

test('a stream is given when its headers have come, and its bytes as they come', async (t) => {
  const { asked, incoming, clock } = await opened(t);

  for (const part of ['one', 'two']) {
    const read = incoming.read();
    asked.send(part);
    assert.equal(text(await read), part);
  }
  assert.equal(clock.pending.size, 0);
  const read = incoming.read();
  asked.response.end();

  assert.equal(await read, null);
  assert.equal(await incoming.read(), null);
  assert.equal(clock.pending.size, 0);
});

test('whatever ends it ends a read, once and for all, closes the socket and leaves no listener', async (t) => {
  for (const end of [
    ({ cancel }) => cancel.abort(),
    ({ incoming }) => incoming.close(),
    ({ asked }) => asked.lose(),
    ({ clock }) => clock.advance(transports.SILENCE_SECONDS),
  ]) {
    const all = await opened(t);
    const read = all.incoming.read();

    await end(all);

    assert.equal(await read, null, String(end));
    assert.equal(await all.incoming.read(), null);
    await until(() => all.asked.isClosed);
    assert.equal(all.clock.pending.size, 0);
    assert.equal(getEventListeners(all.cancel.signal, 'abort').length, 0);
  }
});

test('silence counts from the latest byte', async (t) => {
  const { asked, incoming, clock } = await opened(t);
  for (let n = 0; n < 3; n++) {
    const read = incoming.read();
    await clock.advance(39.9);
    asked.send(':');
    assert.equal(text(await read), ':');
  }
  incoming.close();
});

test('an answer that is no stream is read whole', async (t) => {
  const { server, transport } = await arranged(t);
  for (const [status, type] of [
    [404, 'application/json'],
    [200, 'application/json'],
    [200, 'text/event-streams'],
    [503, 'text/event-stream'],
  ]) {
    const outcome = transport.open(opening, new AbortController().signal);
    (await server.next()).answer(status, '{}', { 'content-type': type });

    const { status: told, body } = await outcome;
    assert.deepEqual([told, body], [status, '{}'], `${status} ${type}`);
  }
});

test('a stream whose headers do not come in time, or that is cancelled before, is none', async (t) => {
  for (const end of [({ clock }) => clock.advance(10), ({ cancel }) => cancel.abort()]) {
    const all = { ...(await arranged(t)), cancel: new AbortController() };
    const outcome = all.transport.open(opening, all.cancel.signal);
    const asked = await all.server.next();

    await end(all);

    assert.equal((await outcome).reached, true);
    await until(() => asked.isClosed);
    assert.equal(all.clock.pending.size, 0);
    assert.equal(getEventListeners(all.cancel.signal, 'abort').length, 0);
  }
});

test('an injected fetch may ignore its signal, or give no stream', async () => {
  let isLetGo = false;
  const body = new ReadableStream({
    cancel() {
      isLetGo = true;
    },
  });
  const headers = new Headers({ 'content-type': 'text/event-stream; charset=utf-8' });
  let signal;
  const answering = (answer) =>
    new transports.Transport('http://127.0.0.1', new ManualClock(), async (_, init) => {
      signal = init.signal;
      return { status: 200, headers, ...answer };
    });
  const cancel = new AbortController();

  const incoming = await answering({ body }).open(opening, cancel.signal);
  const read = incoming.read();
  cancel.abort();
  assert.equal(await read, null);
  assert.equal(isLetGo, true);
  assert.equal(signal.aborted, true, 'or it heeds nothing else');

  const { failure } = await answering({ body: null }).open(opening, new AbortController().signal);
  assert.match(failure.message, /this fetch gives no stream of the body/);
});

// --- lanes -------------------------------------------------------------------------------------------

test('more calls than there are lanes take turns, and who is cancelled in the line leaves it at once', async () => {
  const lanes = new transports.Lanes();
  const ends = [];
  const busy = Array.from({ length: transports.MOST_AT_ONCE }, () =>
    lanes.run(undefined, () => new Promise((resolve) => ends.push(resolve))),
  );
  const cancel = new AbortController();
  const order = [];
  const next = lanes.run(undefined, async () => order.push('next'));
  const cancelled = lanes.run(cancel.signal, async () => order.push('cancelled'));
  const last = lanes.run(undefined, async () => order.push('last'));
  await settle();
  assert.deepEqual(order, []);

  cancel.abort();
  await cancelled;
  ends[0]('done');
  await Promise.all([next, last]);
  for (const end of ends) end('done');
  await Promise.all(busy);

  assert.deepEqual(order, ['cancelled', 'next', 'last']);
});

test('a lane is free again when its work is over, be it by an error', async () => {
  const lanes = new transports.Lanes();

  for (let call = 0; call < 3 * transports.MOST_AT_ONCE; call++) {
    await assert.rejects(
      lanes.run(undefined, () => Promise.reject(new Error('fault'))),
      /fault/,
    );
  }

  assert.equal(await lanes.run(undefined, async () => 'done'), 'done');
});

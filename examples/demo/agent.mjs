// One agent on the JavaScript SDK: node agent.mjs NAME DESK ROLE. What it does is written in agent.py.

import { readFileSync } from 'node:fs';
import { setTimeout as sleep } from 'node:timers/promises';
import { LockLostError, RateLimitedError, VolcanoAuth } from '@volcano.dev/sdk';

const TTL = 5;
const LOOK_AGAIN_SECONDS = 10; // an event is a hint, and may be missed

const [name, desk, firstRole] = process.argv.slice(2);
const { locks } = new VolcanoAuth();
let role = firstRole;

const free = [];
let heard = () => {};

/** Until no ticket is open. */
async function run() {
  const events = locks.watch({ prefix: 'ticket:' });
  const listening = listen(events);
  let ticket = null;
  for (let open = await openTickets(); open.length > 0; open = await openTickets()) {
    if (ticket === null) free.push(...shuffled(open));
    else if (open.includes(ticket)) await take(ticket);
    ticket = await next();
  }
  await events.return();
  await listening;
}

/** While all tickets are held nobody asks: whoever lets go of one is heard by all. */
async function listen(events) {
  for await (const { type, key } of events) {
    if (type === 'acquired') continue;
    free.push(type === 'reset' ? null : Number(key.slice('ticket:'.length)));
    heard();
  }
}

/** A ticket that was free a moment ago. null: look at all of them. */
async function next() {
  if (free.length === 0) {
    const event = new Promise((resolve) => {
      heard = resolve;
    });
    await Promise.race([event, sleep(LOOK_AGAIN_SECONDS * 1000, undefined, { ref: false })]);
  }
  return free.shift() ?? null;
}

async function take(ticket) {
  const { error } = await locks.withLock(`ticket:${ticket}`, { ttl: TTL }, async ({ lease, signal }) => {
    tell('granted', ticket, lease);
    await answer(ticket, lease, signal);
    tell('released', ticket, lease);
  });
  // No error: it was ours, or somebody else has it. On to the next.
  if (error instanceof RateLimitedError) {
    await sleep((error.retryAfter ?? 1) * 1000);
    free.push(ticket);
  } else if (error instanceof LockLostError) {
    console.log(JSON.stringify({ event: 'lost', agent: name, ticket }));
  } else if (error) throw error;
}

async function answer(ticket, lease, signal) {
  if (!(await openTickets()).includes(ticket)) return; // answered between our look at the desk and our grant
  await write(ticket, lease);
  tell('working', ticket, lease);
  const present = role;
  role = 'steady';
  if (present === 'steady') {
    // Stands for the model call that writes the answer; stops early when the lock is lost.
    await sleep(between(0.3, 1.2) * 1000, undefined, { signal });
  } else {
    await sleep(TTL * 600); // and then writes without a look
  }
  const written = await write(ticket, lease, 'Try it off and on.');
  tell(written ? 'answered' : 'refused', ticket, lease);
}

async function openTickets() {
  return (await request('/tickets')).json();
}

/** Under our fencing token: without an answer it only keeps older holders from writing. */
async function write(ticket, { fencingToken }, text = null) {
  const body = JSON.stringify({ fencing_token: fencingToken, agent: name, answer: text });
  return (await request(`/tickets/${ticket}`, { method: 'POST', body })).status !== 409;
}

async function request(path, options) {
  const response = await fetch(desk + path, options);
  if (!response.ok && response.status !== 409) throw new Error(`${path}: ${response.status}`);
  return response;
}

function tell(event, ticket, { fencingToken, expiresAt }) {
  const at = Number(process.hrtime.bigint()) / 1e9; // the clock that all processes of this machine share
  const expires_at = at + (Date.parse(expiresAt) - Date.now()) / 1000;
  console.log(JSON.stringify({ event, agent: name, ticket, fencing_token: fencingToken, at, expires_at }));
}

const between = (low, high) => low + Math.random() * (high - low);

const shuffled = (list) =>
  list
    .map((each) => [Math.random(), each])
    .sort(([a], [b]) => a - b)
    .map(([, each]) => each);

console.log(JSON.stringify({ event: 'ready', agent: name }));
readFileSync(0); // until the demo says go
await run();

// One agent on the JavaScript SDK: node agent.mjs NAME DESK ROLE. What it does is written in agent.py.

import { readFileSync } from 'node:fs';
import { setTimeout as sleep } from 'node:timers/promises';
import { LockLostError, RateLimitedError, VolcanoAuth } from '@volcano.dev/sdk';

const TTL = 5;
const POLL_SECONDS = 1;

const [name, desk, firstRole] = process.argv.slice(2);
const { locks } = new VolcanoAuth();
let role = firstRole;

async function run() {
  for (let open = await openTickets(); open.length > 0; open = await openTickets()) {
    if (!(await takeOneOf(shuffled(open).slice(0, 3)))) {
      // All of those are held: leave the others some of the project's quota.
      await sleep(between(0.6, 0.9) * POLL_SECONDS * 1000);
    }
  }
}

async function takeOneOf(tickets) {
  for (const ticket of tickets) {
    if (await take(ticket)) return true;
  }
  return false;
}

/** Whether the ticket was ours for a while. */
async function take(ticket) {
  const { acquired, error } = await locks.withLock(`ticket:${ticket}`, { ttl: TTL }, async ({ lease, signal }) => {
    tell('granted', ticket, lease);
    await answer(ticket, lease, signal);
    tell('released', ticket, lease);
  });
  if (error instanceof RateLimitedError) await sleep((error.retryAfter ?? POLL_SECONDS) * 1000);
  else if (error instanceof LockLostError) console.log(JSON.stringify({ event: 'lost', agent: name, ticket }));
  else if (error) throw error;
  return acquired; // false: somebody else has it, on to the next
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

// Answers the tickets of a backlog: node worker.mjs NAME BACKLOG_URL. Start as many as you like, anywhere.

import { setTimeout as sleep } from 'node:timers/promises';
import { VolcanoAuth } from '@volcano.dev/sdk';

const [name, backlog] = process.argv.slice(2);
const volcano = new VolcanoAuth(); // VOLCANO_API_URL and VOLCANO_SERVICE_KEY

for (let tickets = await openTickets(); tickets.length > 0; tickets = await openTickets()) {
  let answered = 0;
  for (const ticket of tickets) {
    const result = await volcano.locks.withLock(`ticket:${ticket}`, { ttl: 30 }, ({ signal, lease }) =>
      answerTicket(ticket, { signal, fencingToken: lease.fencingToken }),
    );
    if (result.error) throw result.error;
    if (result.acquired && result.data) answered += 1; // not acquired: a colleague is at it, on to the next
  }
  if (answered === 0) await sleep(500); // all that is left is being worked on
}

/** Whether the answer was written. */
async function answerTicket(ticket, { signal, fencingToken }) {
  // The list may be older than the last answer, so look again now that nobody else can write.
  if (!(await openTickets(signal)).includes(ticket)) return false;
  const answer = await think(signal);
  const written = await fetch(`${backlog}/tickets/${ticket}`, {
    method: 'POST',
    body: JSON.stringify({ fencing_token: fencingToken, agent: name, answer }),
    signal, // aborts when the lock is lost
  });
  if (written.status === 409) return false; // a later holder has written: our answer is not wanted
  if (!written.ok) throw new Error(`ticket ${ticket}: ${written.status}`);
  console.log(`${name} answered ticket ${ticket}`);
  return true;
}

/** Stands for a model, a person, a build: what takes long, and must not be done twice. */
async function think(signal) {
  await sleep(100 + Math.random() * 200, undefined, { signal });
  return 'Try it off and on.';
}

async function openTickets(signal) {
  const response = await fetch(`${backlog}/tickets`, { signal });
  if (!response.ok) throw new Error(`${backlog}: ${response.status}`);
  return response.json();
}

// An agent that stops in the middle of a request when it may no longer act: node agent.mjs TASK MODEL_URL
//
// The signal goes into everything that takes time. It aborts when the lock is lost, so the request to the model is given up,
// no further step is begun, and nothing is paid for that somebody else is doing now. Ctrl-C comes through the same signal.

import { LockLostError, VolcanoAuth } from '@volcano.dev/sdk';

const [task, model] = process.argv.slice(2);
const volcano = new VolcanoAuth();
const interrupted = new AbortController();
for (const name of ['SIGINT', 'SIGTERM']) process.once(name, () => interrupted.abort(new Error(name)));

const { acquired, error } = await volcano.locks.withLock(
  `task:${task}`,
  { ttl: 5, signal: interrupted.signal },
  async ({ signal, lease }) => {
    const steps = [];
    for (let step = 1; step <= 3; step += 1) {
      signal.throwIfAborted();
      console.log(`step ${step} begins`);
      steps.push(await think(`${task}, step ${step}`, signal));
    }
    await save(steps, lease.fencingToken, signal);
  },
);
if (error instanceof LockLostError) {
  console.log('stopped: the lock is lost');
  process.exitCode = 75; // EX_TEMPFAIL: whoever has the lock now goes on
} else if (error && interrupted.signal.aborted) {
  console.log(`stopped: ${interrupted.signal.reason.message}; the lock is given back`);
  process.exitCode = 130;
} else if (error) {
  throw error;
} else {
  console.log(acquired ? 'done' : 'another agent is at it');
}

async function think(prompt, signal) {
  const response = await fetch(`${model}/think`, { method: 'POST', body: prompt, signal });
  if (!response.ok) throw new Error(`the model answered ${response.status}`);
  return response.text();
}

/** The receiver compares the token with the largest that it has seen: see ../guarded-writes. */
async function save(steps, fencingToken, signal) {
  const body = JSON.stringify({ steps, fencing_token: fencingToken });
  const response = await fetch(`${model}/results/${task}`, { method: 'PUT', body, signal });
  if (!response.ok) throw new Error(`the result was refused: ${response.status}`);
}

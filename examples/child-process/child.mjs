// Goes on under a lease that another process has taken: reads it from stdin.

import { text } from 'node:stream/consumers';
import { setTimeout as sleep } from 'node:timers/promises';
import { VolcanoAuth } from '@volcano.dev/sdk';

const handed = JSON.parse(await text(process.stdin)); // { key, token, fencingToken, expiresAt }
const workSeconds = Number(process.env.WORK_SECONDS ?? '0.5');
const { locks } = new VolcanoAuth();

// Acquiring again with the same lock token is the same lease, with the same fencing token, and now it is renewed here.
const { acquired, error } = await locks.withLock(handed.key, { ttl: 30, token: handed.token }, async (guard) => {
  // Another fencing token: the lease lapsed before we came, and this one is new. What the parent looked at may have changed.
  if (guard.lease.fencingToken !== handed.fencingToken) throw new Error('handed over too late');
  console.log('child: the same lease');
  await sleep(1000 * workSeconds, undefined, { signal: guard.signal }); // stands for the work
  console.log('child: done');
});
if (error) throw error;
if (!acquired) throw new Error('handed over too late: somebody else has the lock');

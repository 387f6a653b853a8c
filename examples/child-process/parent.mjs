// Takes the lock, then hands it to a child process: node parent.mjs KEY
//
// Why: the parent decides whether there is anything to do and answers at once; the child does what takes long, and outlives it.

import { spawn } from 'node:child_process';
import { VolcanoAuth } from '@volcano.dev/sdk';

const [key] = process.argv.slice(2);
const { locks } = new VolcanoAuth();

const { acquired, lease, error } = await locks.acquire(key, { ttl: 30 });
if (error) throw error;
if (!acquired) {
  console.log('somebody else is at it');
} else {
  const child = spawn(process.execPath, [new URL('child.mjs', import.meta.url).pathname], {
    detached: true,
    stdio: ['pipe', 'inherit', 'inherit'],
  });
  child.stdin.on('error', () => {}); // it could not be started, or is dead: told below
  const started = await new Promise((resolve) => {
    child.on('error', () => resolve(false));
    // By stdin: everybody can read a process's arguments, and its children its environment.
    child.stdin.end(JSON.stringify(lease), () => resolve(child.pid !== undefined));
  });
  if (started) {
    child.unref(); // From here on the lease is the child's. The parent neither renews nor releases it.
    console.log(`parent: handed over to ${child.pid}`);
  } else {
    await locks.release(key, lease);
    throw new Error('the child could not be started; the lock is given back');
  }
}

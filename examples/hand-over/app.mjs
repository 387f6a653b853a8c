// An application that starts when its schema is there: node app.mjs NAME SCHEMA_FILE. The migration is a program in Ruby.
//
// The lock says whether somebody is at it; whether it is done, only the data can say. So we wait for the lock, which we are given
// as soon as the migration has given it back or its lease is over, look, and give it back at once.

import { readFile } from 'node:fs/promises';
import { VolcanoAuth } from '@volcano.dev/sdk';

const NEEDED = 3;
const KEY = 'migration:shop';
const [name, file] = process.argv.slice(2);
const { locks } = new VolcanoAuth();

while ((await schemaVersion()) < NEEDED) {
  const { acquired, data: version, error } = await locks.withLock(KEY, { ttl: 10, wait: 3600 }, schemaVersion);
  if (error) throw error;
  if (acquired && version < NEEDED) {
    console.log(`${name}: the schema is at ${version}, and nobody changes it`);
    await somethingHappens();
  }
}
console.log(`${name}: started on schema ${NEEDED}`);

/** Until a migration begins. An event is a hint and may be missed: we look again after half a minute in any case. */
async function somethingHappens() {
  for await (const _ of locks.watch({ key: KEY, signal: AbortSignal.timeout(30_000) })) return;
}

async function schemaVersion() {
  try {
    return JSON.parse(await readFile(file, 'utf8')).version;
  } catch (error) {
    if (error.code !== 'ENOENT') throw error;
    return 0;
  }
}

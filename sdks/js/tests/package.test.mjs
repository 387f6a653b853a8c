/** The package as its users get it: packed, installed from the tarball, and run. */

import assert from 'node:assert/strict';
import { execFile } from 'node:child_process';
import { readFileSync } from 'node:fs';
import { mkdtemp, readdir, readFile, rm, stat, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import { after, before, test } from 'node:test';
import { fileURLToPath } from 'node:url';
import { promisify } from 'node:util';
import { createContext, runInContext } from 'node:vm';
import { scripted } from './support.mjs';

const run = promisify(execFile);
const home = fileURLToPath(new URL('..', import.meta.url));
const bin = (name) => join(home, 'node_modules', '.bin', name);

const load = "import { VolcanoAuth } from '@volcano.dev/sdk';";

let folder; // where only the tarball was installed
let tarball;
before(async () => {
  folder = await mkdtemp(join(tmpdir(), 'volcano-sdk-'));
  const { stdout } = await run('npm', ['pack', '--json', '--pack-destination', folder], { cwd: home });
  tarball = JSON.parse(stdout)[0] ?? Object.values(JSON.parse(stdout))[0];
  await writeFile(join(folder, 'package.json'), '{"private": true}');
  await run('npm', ['install', '--offline', '--no-audit', '--no-fund', join(folder, tarball.filename)], {
    cwd: folder,
  });
});
after(() => rm(folder, { recursive: true, force: true }));

/** The product page's program, its lines verbatim, in a function, with what they take for granted around them. */
async function product({ load, types = false }) {
  const page = await readFile(join(home, 'tests', 'programs', 'product.txt'), 'utf8');
  const [required, ...lines] = page.trimEnd().split('\n');
  assert.equal(required, "const { VolcanoAuth } = require('@volcano.dev/sdk');");
  const typed = (text) => (types ? text : '');
  return [
    load ?? required,
    typed('declare const process: { argv: string[] };'),
    `const [apiUrl, anonKey, serviceKey] = process.argv.slice(2)${typed(' as [string, string, string]')};`,
    typed('interface Ticket { id: number }'),
    `const answerTicket = async (ticket${typed(': Ticket')}, options${typed(': { signal: AbortSignal; fencingToken: number }')}) =>`,
    "  [ticket.id, options.fencingToken, options.signal instanceof AbortSignal].join(' ');",
    `async function main(ticket${typed(': Ticket')})${typed(': Promise<string | undefined>')} {`,
    ...lines,
    typed('return undefined;'),
    '}',
    'main({ id: 4821 }).then((data) => console.log(data));',
  ].join('\n');
}

/** Runs a program in the folder against a server that grants and releases; what it printed. */
async function printed(t, file) {
  const server = await scripted(t);
  const running = run(process.execPath, [file, server.url, 'ak-public', 'sk-secret'], { cwd: folder });
  const acquire = await server.next();
  assert.equal(acquire.what, 'POST /locks/ticket%3A4821/lease');
  assert.equal(acquire.body, '{"ttl_seconds":60}');
  acquire.grant(7);
  (await server.next()).released();
  return (await running).stdout.trim();
}

test("the product page's program runs unchanged with require, where only the tarball is installed", async (t) => {
  await writeFile(join(folder, 'page.cjs'), await product({}));

  assert.equal(await printed(t, 'page.cjs'), '4821 7 true');
});

test('and as an ES module', async (t) => {
  await writeFile(join(folder, 'page.mjs'), await product({ load }));

  assert.equal(await printed(t, 'page.mjs'), '4821 7 true');
});

test('and as TypeScript under strict, for both module systems', async (t) => {
  for (const kind of ['mts', 'cts']) {
    await writeFile(join(folder, `typed.${kind}`), await product({ load, types: true }));
    const config = {
      compilerOptions: {
        strict: true,
        exactOptionalPropertyTypes: true,
        noUncheckedIndexedAccess: true,
        skipLibCheck: false,
        module: 'nodenext',
        target: 'es2022',
        lib: ['es2022', 'dom'],
        types: [],
        outDir: 'out',
      },
      files: [`typed.${kind}`],
    };
    await writeFile(join(folder, 'tsconfig.json'), JSON.stringify(config));
    await run(bin('tsc'), ['-p', '.'], { cwd: folder });

    assert.equal(await printed(t, join('out', `typed.${kind.replace('ts', 'js')}`)), '4821 7 true');
  }
});

test('require and import load one implementation: instanceof holds across both', async () => {
  const program = `import { createRequire } from 'node:module';
import * as imported from '@volcano.dev/sdk';
const required = createRequire(import.meta.url)('@volcano.dev/sdk');
const names = Object.keys(required).sort();
if (names.some((name) => imported[name] !== required[name])) throw new Error('two implementations');
console.log(names.join(' '));
`;
  await writeFile(join(folder, 'both.mjs'), program);

  const { stdout } = await run(process.execPath, ['both.mjs'], { cwd: folder });

  assert.equal(
    stdout.trim(),
    'AuthenticationError ConflictError LockLostError NotFoundError PermissionDeniedError RateLimitedError ' +
      'ServerError TransportError ValidationError VolcanoAuth VolcanoClient VolcanoError',
  );
});

test('the types that it leaves out are those that nobody can reach', async () => {
  const build = join(folder, 'node_modules', '@volcano.dev', 'sdk', 'build');
  const packed = (await readdir(build)).filter((file) => file.endsWith('.d.ts'));
  const reached = new Set(['index.d.ts']);
  for (const file of reached) {
    const text = await readFile(join(build, file), 'utf8');
    for (const [, module] of text.matchAll(/['"]\.\/(\w+)\.js['"]/g)) reached.add(`${module}.d.ts`);
  }

  assert.deepEqual([...reached].sort(), packed.sort());
});

test('it is small, has what it should, depends on nothing and runs nothing when it is installed', async () => {
  const installed = join(folder, 'node_modules', '@volcano.dev', 'sdk');
  const manifest = JSON.parse(await readFile(join(installed, 'package.json'), 'utf8'));
  const files = (await readdir(installed)).sort();

  assert.ok((await stat(join(folder, tarball.filename))).size < 40_000);
  assert.deepEqual(files, ['CHANGELOG.md', 'LICENSE', 'README.md', 'build', 'package.json']);
  assert.equal(manifest.dependencies, undefined);
  const scripts = Object.keys(manifest.scripts);
  assert.deepEqual(
    scripts.filter((name) => /install|prepare|prepack|publish/.test(name)),
    [],
  );
  assert.deepEqual(await readdir(join(folder, 'node_modules')), ['.package-lock.json', '@volcano.dev']);
});

test('no declaration speaks of what is internal', async () => {
  const build = join(folder, 'node_modules', '@volcano.dev', 'sdk', 'build');

  for (const name of ['client.d.ts', 'locks.d.ts']) {
    assert.doesNotMatch(await readFile(join(build, name), 'utf8'), /@internal|constructor\(settings|chance:/, name);
  }
});

test('the lock file names no host and no package with an install script', async () => {
  const { packages } = JSON.parse(await readFile(join(home, 'package-lock.json'), 'utf8'));

  for (const [name, { resolved, hasInstallScript }] of Object.entries(packages)) {
    assert.deepEqual([resolved, hasInstallScript], [undefined, undefined], name);
  }
});

test('publint finds nothing', async () => {
  const { publint } = await import('publint');
  const installed = join(folder, 'node_modules', '@volcano.dev', 'sdk');
  const { messages } = await publint({ pkgDir: installed, pack: false, strict: true });
  assert.deepEqual(messages, []);
});

test('are-the-types-wrong finds nothing', async () => {
  const { stdout } = await run(bin('attw'), [join(folder, tarball.filename), '--format', 'json']);

  const { analysis, problems } = JSON.parse(stdout);
  assert.equal(analysis.types.kind, 'included');
  assert.deepEqual(problems ?? {}, {});
});

test('the same build works where there is no process, no Buffer, no setImmediate and no document', async (t) => {
  const server = await scripted(t);
  const names = ['AbortController', 'AbortSignal', 'TextDecoder', 'URL', 'crypto', 'fetch', 'performance'];
  const timers = { setTimeout, clearTimeout, setInterval, clearInterval };
  const sandbox = { ...Object.fromEntries(names.map((name) => [name, globalThis[name]])), ...timers };
  const context = createContext(sandbox);
  const loaded = new Map();
  const loadIn = (file) => {
    if (!loaded.has(file)) {
      const module = { exports: {} };
      loaded.set(file, module);
      const source = readFileSync(file, 'utf8');
      const wrapped = runInContext(`(function (exports, require, module) {${source}\n})`, context, { filename: file });
      wrapped(module.exports, (name) => loadIn(join(dirname(file), name)), module);
    }
    return loaded.get(file).exports;
  };
  assert.deepEqual(
    runInContext('[typeof process, typeof Buffer, typeof setImmediate, typeof window, typeof require]', context),
    runInContext('Array(5).fill("undefined")', context),
  );
  const { VolcanoAuth } = loadIn(join(folder, 'node_modules', '@volcano.dev', 'sdk', 'build', 'index.js'));

  assert.throws(() => new VolcanoAuth(), /pass apiUrl/);
  const { locks } = new VolcanoAuth({ apiUrl: server.url, accessToken: 'sk-secret' });
  const options = { ttl: 30, wait: 5 };
  const result = locks.withLock('k', options, ({ signal, lease }) => [signal.aborted, lease.fencingToken]);
  (await server.next()).refuse(409, 'lock_held');
  const stream = await server.next();
  stream.stream();
  (await server.next()).refuse(409, 'lock_held');
  stream.tell('released');
  (await server.next()).grant(7);
  (await server.next()).released();

  const { acquired, data, error } = await result;
  assert.deepEqual([acquired, ...data, error], [true, false, 7, null]);
});

import assert from 'node:assert/strict';
import { getEventListeners } from 'node:events';
import { test } from 'node:test';
import { guards } from './support.mjs';

/** A watchful signal whose loss comes up at the first look after `lose()`. */
function arranged() {
  const controller = new AbortController();
  const loss = new Error('lost');
  let isLost = false;
  const signal = guards.watchful(controller, () => {
    if (isLost) controller.abort(loss);
  });
  return { signal, loss, lose: () => (isLost = true) };
}

test('it is a real AbortSignal', async () => {
  const { signal, lose } = arranged();

  assert.ok(signal instanceof AbortSignal);
  assert.equal(AbortSignal.any([signal]).aborted, false);
  lose();
  await assert.rejects(fetch('http://127.0.0.1:9/', { signal }), /lost/);
});

test('each of its three looks sees the loss first', () => {
  for (const look of [
    ({ aborted }) => assert.equal(aborted, true),
    ({ reason }) => assert.equal(reason.message, 'lost'),
    (signal) => assert.throws(() => signal.throwIfAborted(), /lost/),
  ]) {
    const { signal, lose } = arranged();
    assert.deepEqual([signal.aborted, signal.reason, signal.throwIfAborted()], [false, undefined, undefined]);

    lose();

    look(signal);
  }
});

test('the look that sees the loss tells the listeners, once', () => {
  const { signal, lose } = arranged();
  let told = 0;
  signal.addEventListener('abort', () => {
    told += 1;
    assert.equal(signal.aborted, true);
  });
  signal.onabort = () => {
    told += 1;
  };

  lose();
  void [signal.aborted, signal.aborted];

  assert.equal(told, 2);
});

test('signals that are derived from it abort with it', () => {
  const { signal, loss, lose } = arranged();
  const derived = AbortSignal.any([signal, new AbortController().signal]);

  lose();
  void signal.aborted;

  assert.equal(derived.reason, loss);
});

test('all followers of one signal share one listener, which goes with the last', () => {
  const { signal } = new AbortController();
  const unfollows = Array.from({ length: 50 }, () => guards.follow(signal, new AbortController()));

  assert.equal(getEventListeners(signal, 'abort').length, 1);
  for (const unfollow of unfollows) unfollow();

  assert.equal(getEventListeners(signal, 'abort').length, 0);
});

test('each follower aborts with the reason, those that stopped following do not', () => {
  const user = new AbortController();
  const [one, two, gone] = [new AbortController(), new AbortController(), new AbortController()];
  guards.follow(user.signal, one);
  guards.follow(user.signal, two);
  guards.follow(user.signal, gone)();

  user.abort('enough');

  assert.deepEqual([one.signal.reason, two.signal.reason, gone.signal.aborted], ['enough', 'enough', false]);
});

test('a signal that is aborted already is followed at once, without a listener', () => {
  const controller = new AbortController();
  const signal = AbortSignal.abort('before');

  guards.follow(signal, controller)();

  assert.equal(controller.signal.reason, 'before');
  assert.equal(getEventListeners(signal, 'abort').length, 0);
});

import assert from 'node:assert/strict';
import { test } from 'node:test';
import { Heap } from './support.mjs';

test('the first is always the one at the least number, whatever comes, moves and goes', () => {
  const heap = new Heap();
  const plain = new Map(); // the same, the slow way
  let state = 1;
  const random = (below) => {
    state = (state * 48_271) % 2_147_483_647;
    return state % below;
  };

  for (let step = 0; step < 20_000; step++) {
    const item = random(60);
    if (random(3) === 0) {
      heap.delete(item);
      plain.delete(item);
    } else {
      const at = random(1_000);
      heap.set(item, at);
      plain.set(item, at);
    }

    assert.equal(heap.size, plain.size);
    assert.equal(heap.has(item), plain.has(item));
    assert.equal(heap.least, Math.min(...plain.values()));
    assert.equal(plain.get(heap.first), plain.size > 0 ? heap.least : undefined);
  }
});

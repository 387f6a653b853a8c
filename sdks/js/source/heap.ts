/** Puts each item at a number: the one at the least is at hand, and any may move or leave, each in log n steps. */
export class Heap<Item> {
  #entries: Entry<Item>[] = [];
  #entry = new Map<Item, Entry<Item>>();

  get size(): number {
    return this.#entries.length;
  }

  /** The item at the least number. */
  get first(): Item | undefined {
    return this.#entries[0]?.item;
  }

  /** That number; infinite when there is no item. */
  get least(): number {
    return this.#entries[0]?.at ?? Number.POSITIVE_INFINITY;
  }

  has(item: Item): boolean {
    return this.#entry.has(item);
  }

  /** Puts the item in, or moves it. */
  set(item: Item, at: number): void {
    let entry = this.#entry.get(item);
    if (!entry) {
      entry = { item, at, place: this.#entries.length };
      this.#entry.set(item, entry);
      this.#entries.push(entry);
    }
    entry.at = at;
    this.#settle(entry);
  }

  delete(item: Item): void {
    const entry = this.#entry.get(item);
    if (!entry) return;
    this.#entry.delete(item);
    const last = this.#entries.pop() as Entry<Item>;
    if (last === entry) return;
    this.#put(last, entry.place);
    this.#settle(last);
  }

  /** Moves the entry up or down until no parent is above its child. */
  #settle(entry: Entry<Item>): void {
    for (;;) {
      const parent = this.#entries[(entry.place - 1) >> 1];
      if (!parent || parent.at <= entry.at) break;
      this.#swap(entry, parent);
    }
    for (;;) {
      const [left, right] = [this.#entries[2 * entry.place + 1], this.#entries[2 * entry.place + 2]];
      const child = right && left && right.at < left.at ? right : left;
      if (!child || entry.at <= child.at) return;
      this.#swap(child, entry);
    }
  }

  #swap(one: Entry<Item>, other: Entry<Item>): void {
    const { place } = one;
    this.#put(one, other.place);
    this.#put(other, place);
  }

  #put(entry: Entry<Item>, place: number): void {
    entry.place = place;
    this.#entries[place] = entry;
  }
}

interface Entry<Item> {
  readonly item: Item;
  at: number;
  place: number;
}

/** The same implementation for `import`: loaded once, so `instanceof` holds across `require` and `import`. */

export * from './index.js';

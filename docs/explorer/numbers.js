// Small numerical tools: vectors as Float64Array, and random numbers that are the same in every browser.

export function dot(a, b) {
  let sum = 0;
  for (let i = 0; i < a.length; i++) sum += a[i] * b[i];
  return sum;
}

export function plus(a, b) {
  return a.map((value, i) => value + b[i]);
}

export function length(a) {
  return Math.sqrt(dot(a, a));
}

/** Length of the difference in units of the mean length: 0 for equal vectors, at most 2 (`relative_l2` of the library). */
export function relativeDistance(a, b) {
  const mean = (length(a) + length(b)) / 2;
  return mean === 0 ? 0 : length(a.map((value, i) => value - b[i])) / mean;
}

/** `matrix` is an array of rows; returns `matrix x vector`. */
export function times(matrix, vector) {
  return Float64Array.from(matrix, (row) => dot(row, vector));
}

export function softmax(logits) {
  const largest = Math.max(...logits);
  const powers = logits.map((value) => Math.exp(value - largest));
  const sum = powers.reduce((a, b) => a + b, 0);
  return powers.map((value) => value / sum);
}

export function range(count, start = 0) {
  return Array.from({ length: count }, (_, i) => start + i);
}

/** A hash of a text: 32 bits (FNV-1a), then mixed so that similar texts have unrelated hashes. */
export function hash(text) {
  let value = 0x811c9dc5;
  for (const character of text) value = Math.imul(value ^ character.codePointAt(0), 0x01000193);
  value = Math.imul(value ^ (value >>> 16), 0x85ebca6b);
  value = Math.imul(value ^ (value >>> 13), 0xc2b2ae35);
  return (value ^ (value >>> 16)) >>> 0;
}

/** Uniform numbers between 0 and 1 (mulberry32). */
export function generator(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let mixed = Math.imul(state ^ (state >>> 15), state | 1);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61);
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 4294967296;
  };
}

/** `count` numbers from a standard normal distribution (Box-Muller). */
export function normals(seedText, count) {
  const uniform = generator(hash(seedText));
  return Float64Array.from({ length: count }, () => {
    const radius = Math.sqrt(-2 * Math.log(1 - uniform()));
    return radius * Math.cos(2 * Math.PI * uniform());
  });
}

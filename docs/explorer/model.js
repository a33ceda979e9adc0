// One self-attention layer with fixed random weights, and the dog test on it.
//
// logit[i, j] of a head = query(i) . key(j) / sqrt(headDim) + bias(i, j), as in hf_posenc/schemes/parts.py.

import { dot, normals, plus, range, relativeDistance, softmax, times } from "./numbers.js";

export const HIDDEN = 64;
export const HEAD_DIM = 64;
export const MOST_HEADS = 8;
/** Longer sentences are cut here: every pair of words is drawn. */
export const MOST_WORDS = 32;

/** The words of a sentence; `key` ignores case and punctuation around the word, so that "Dog," equals "dog". */
export function wordsOf(sentence) {
  const words = sentence.split(/\s+/u).filter((text) => text !== "");
  return words.slice(0, MOST_WORDS).map((text) => {
    const key = text.toLowerCase().replace(/^[^\p{L}\p{N}]+|[^\p{L}\p{N}]+$/gu, "");
    return { text, key: key || text };
  });
}

/** Words that occur at least twice, each with the places of its first two occurrences. */
export function repeatedWords(words) {
  const places = new Map();
  words.forEach(({ key }, place) => places.set(key, [...(places.get(key) ?? []), place]));
  return [...places].filter(([, found]) => found.length > 1).map(([key, found]) => ({ key, first: found[0], second: found[1] }));
}

/** The vector of a word: HIDDEN numbers from N(0, 1), always the same for the same word. */
export function wordVector(key) {
  return normals(`word ${key}`, HIDDEN);
}

/** A random matrix of `rows` rows that keeps the variance of its input. */
function matrix(name, rows, columns) {
  return range(rows).map((row) => normals(`${name} ${row}`, columns).map((value) => value / Math.sqrt(columns)));
}

const weights = new Map();

/** The layer's weights: per head `query`, `key` and `value` of (HEAD_DIM, HIDDEN), and `output` of (HIDDEN, HEAD_DIM). */
export function headWeights(head) {
  if (!weights.has(head)) {
    weights.set(head, {
      query: matrix(`query ${head}`, HEAD_DIM, HIDDEN),
      key: matrix(`key ${head}`, HEAD_DIM, HIDDEN),
      value: matrix(`value ${head}`, HEAD_DIM, HIDDEN),
      output: matrix(`output ${head}`, HIDDEN, HEAD_DIM),
    });
  }
  return weights.get(head);
}

/** Turns the pairs of a query or key at a (possibly real) position. `rotation` is described in schemes/registry.js. */
export function turned(vector, position, rotation, isKey) {
  if (!rotation) return vector;
  const result = Float64Array.from(vector);
  const { frequencies, layout = "half", factor = 1, strength } = rotation;
  const pairs = frequencies.length;
  for (let m = 0; m < pairs; m++) {
    const [a, b] = layout === "interleaved" ? [2 * m, 2 * m + 1] : [m, m + pairs];
    const angle = position * frequencies[m] * (layout === "half_reversed" ? -1 : 1);
    let size = factor;
    if (strength) size *= Math.exp((isKey ? -1 : 1) * (position - strength.origin) * strength.decay[m]);
    const cosine = Math.cos(angle) * size;
    const sine = Math.sin(angle) * size;
    result[a] = vector[a] * cosine - vector[b] * sine;
    result[b] = vector[b] * cosine + vector[a] * sine;
  }
  return result;
}

/** The logits of one head before the mask, as rows of queries, for untouched queries and keys. */
export function logits(parts, queries, keys, head) {
  const scaling = 1 / Math.sqrt(HEAD_DIM);
  const near = parts.pair === undefined;
  const ownQueries = near ? queries.map((query, i) => turned(query, i, parts.rotation, false)) : [];
  const ownKeys = near ? keys.map((key, j) => turned(key, j, parts.rotation, true)) : [];
  return queries.map((query, i) =>
    keys.map((key, j) => {
      const [from, to] = near ? [i, j] : parts.pair(i, j);
      const product = near
        ? dot(ownQueries[i], ownKeys[j])
        : dot(turned(query, from, parts.rotation, false), turned(key, to, parts.rotation, true));
      return product * scaling + (parts.bias ? parts.bias(head, from, to) : 0);
    }),
  );
}

/**
 * Runs the layer on words.
 *
 * @param {{key: string}[]} words
 * @param parts what a scheme's `build` returned, for a sequence of this length.
 * @param {{heads: number, causal: boolean}} place
 * @returns attention weights by head and query, and the output vector of each word.
 */
export function attend(words, parts, place) {
  const inputs = words.map(({ key }, position) => {
    const vector = wordVector(key);
    return parts.added ? plus(vector, parts.added(position)) : vector;
  });
  const outputs = words.map(() => new Float64Array(HIDDEN));
  const attention = range(place.heads).map((head) => {
    const { query, key, value, output } = headWeights(head);
    const values = inputs.map((input) => times(value, input));
    const rows = logits(parts, inputs.map((input) => times(query, input)), inputs.map((input) => times(key, input)), head);
    return rows.map((row, i) => {
      const seen = place.causal ? row.slice(0, i + 1) : row;
      const shares = attentionShares(seen, values);
      times(output, shares.mixed).forEach((number, c) => (outputs[i][c] += number / Math.sqrt(place.heads)));
      return [...shares.weights, ...Array(row.length - seen.length).fill(null)];
    });
  });
  return { attention, outputs };
}

function attentionShares(row, values) {
  const weightsOfRow = softmax(row);
  const mixed = new Float64Array(HEAD_DIM);
  weightsOfRow.forEach((weight, j) => values[j].forEach((value, c) => (mixed[c] += weight * value)));
  return { weights: weightsOfRow, mixed };
}

/** How far apart the layer's outputs for two places of one word are. */
export function outputDistance(outputs, first, second) {
  return relativeDistance(outputs[first], outputs[second]);
}

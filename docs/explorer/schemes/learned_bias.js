// Biases whose numbers are learned: T5, TISA, FIRE. The weights come from data/tables.json and data/trained.json.

import { HIDDEN } from "../model.js";

const WEIGHTS = { trained: "trained for this page", initial: "new, drawn with seed 0" };

/** T5's bucket of a distance. It rounds to float32 where the library does, because bucket edges depend on it. */
export function bucketOf(distance, buckets, maxDistance, bidirectional) {
  const count = bidirectional ? buckets / 2 : buckets;
  const first = bidirectional && distance > 0 ? count : 0;
  const steps = bidirectional ? Math.abs(distance) : Math.max(-distance, 0);
  const exact = Math.floor(count / 2);
  if (steps < exact) return first + steps;
  const logarithm = Math.fround(Math.log(Math.fround(steps / exact)));
  const growth = Math.fround(Math.fround(logarithm / Math.fround(Math.log(maxDistance / exact))) * (count - exact));
  return first + Math.min(exact + Math.floor(growth), count - 1);
}

/** The trained table has the library's default number of buckets. */
const TRAINED_BUCKETS = 32;
const fewestDistances = (options, place) => (options.num_buckets ?? TRAINED_BUCKETS) / (place.causal ? 2 : 4) + 1;

export const t5 = {
  name: "t5",
  steps: "bias",
  learn: "One learned number per group of distances. Near distances have one each; far ones share.",
  failure:
    "Fails past its longest distance: all words beyond it get the same number, and it knows nothing before it is trained.",
  weights: WEIGHTS,
  controls: [
    { option: "num_buckets", from: 4, to: 64, step: 4, when: (options) => options.weights !== "trained" },
    { option: "max_distance", from: fewestDistances, to: 512, step: 1 },
    { option: "initialization", when: (options) => options.weights !== "trained" },
  ],
  build(options, { causal, tables, trained }) {
    const own = options.weights === "trained";
    const deviation = options.initialization === "t5" ? HIDDEN ** -0.5 : 0.02;
    const table = own ? trained("t5").weight : tables.t5.map((row) => row.map((value) => value * deviation));
    const buckets = own ? TRAINED_BUCKETS : options.num_buckets;
    return {
      heads: table[0].length,
      bias: (head, query, key) => table[bucketOf(key - query, buckets, options.max_distance, !causal)][head],
    };
  },
};

export const tisa = {
  name: "tisa",
  steps: "bias",
  learn: "Each head places bumps along the distance: higher is where it looks. Left and right may differ.",
  failure: "Fails far away: beyond its bumps the bias is zero, so all distant words look equally far.",
  weights: WEIGHTS,
  controls: [{ option: "num_kernels", from: 1, to: 8, step: 1, when: (options) => options.weights !== "trained" }],
  build({ num_kernels, weights }, { tables, trained }) {
    const { amplitudes, sharpness, offsets } = weights === "trained" ? trained("tisa") : tables.tisa;
    const count = weights === "trained" ? amplitudes[0].length : num_kernels;
    return {
      heads: amplitudes.length,
      bias(head, query, key) {
        let sum = 0;
        for (let s = 0; s < count; s++) {
          sum += amplitudes[head][s] * Math.exp(-Math.abs(sharpness[head][s]) * (key - query - offsets[head][s]) ** 2);
        }
        return sum;
      },
    };
  },
};

export const fire = {
  name: "fire",
  steps: "bias",
  learn: "A small network reads the distance as a share of the longest one, so longer texts bring no new numbers.",
  failure: "Fails at exactness: in a long text, nearby distances are squeezed together and hard to tell apart.",
  weights: WEIGHTS,
  controls: [
    { option: "initial_c", from: 0.001, to: 10, log: true, when: (options) => options.weights !== "trained" },
    { option: "initial_threshold", from: 1, to: 1024, log: true, when: (options) => options.weights !== "trained" },
  ],
  build({ initial_c, initial_threshold, weights }, { causal, length, tables, trained }) {
    const own = weights === "trained" ? trained("fire") : null;
    const network = own ?? tables.fire;
    const c = Math.abs(own ? own.c[0] : initial_c);
    // The trained weights began with the library's threshold of 512 tokens.
    const threshold = Math.abs(own ? own.threshold_factor[0] * 512 : initial_threshold);
    const compressed = (steps) => Math.log1p(c * steps);
    return {
      heads: network.output_bias.length,
      bias(head, query, key) {
        const farthest = Math.max(causal ? query : length - 1, threshold);
        const share = compressed(Math.abs(key - query)) / (compressed(farthest) + 1e-6);
        return network.hidden_weight.reduce(
          (sum, weight, unit) =>
            sum + network.output_weight[head][unit] * Math.max(share * weight + network.hidden_bias[unit], 0),
          network.output_bias[head],
        );
      },
    };
  },
};

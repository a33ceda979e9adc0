// Biases with a formula of a few numbers per head: ALiBi, KERPLE, Sandwich.

import { range } from "../numbers.js";

const AWAY = -10000;

function slopes(heads) {
  const lower = 2 ** Math.floor(Math.log2(heads));
  const powers = range(lower, 1).map((head) => 2 ** ((-8 * head) / lower));
  const between = range(lower).map((i) => 2 ** ((-4 * (2 * i + 1)) / lower));
  return [...powers, ...between].slice(0, heads);
}

export const alibi = {
  name: "alibi",
  steps: "bias",
  learn: "A straight line per head: steep heads see only the next words, flat heads see far.",
  failure:
    "Fails at distant facts: what is far away is always weakened, however important it is. Fixed slopes cannot unlearn that.",
  controls: [
    { option: "variant", choices: (_, place) => (place.causal || place.heads < 2 ? ["auto"] : ["auto", "asymmetric"]) },
  ],
  build({ variant }, { heads }) {
    if (variant !== "asymmetric") {
      const slope = slopes(heads);
      return { bias: (head, query, key) => -slope[head] * Math.abs(key - query) };
    }
    const left = Math.ceil(heads / 2);
    const slope = [...slopes(left), ...slopes(heads - left)];
    return {
      bias(head, query, key) {
        const away = head < left ? key > query : key < query;
        return away ? AWAY : -slope[head] * Math.abs(key - query);
      },
    };
  },
};

export const kerple = {
  name: "kerple",
  steps: "bias",
  learn: "Two learned numbers per head bend ALiBi's line. The logarithm hardly falls after the first words.",
  failure:
    "Fails at direction: in a model that reads both ways it cannot tell whether a word stands before or after.",
  weights: { trained: "trained for this page", initial: "new, drawn with seed 0" },
  controls: [
    { option: "variant", when: (options) => options.weights !== "trained" },
    { option: "exponent", from: 0.05, to: 2, step: 0.05, start: null, preset: 1, nullable: "learned",
      when: (options) => options.variant === "power" && options.weights !== "trained" },
    { option: "minimum", from: 0.001, to: 1, log: true },
  ],
  build({ weights, variant, exponent, minimum }, { tables, trained }) {
    const log = weights === "trained" || variant === "log";
    const [first, second] = weights === "trained" ? [1, 1] : log ? [2, 1] : [1, 2];
    const { r1, r2 } = weights === "trained" ? trained("kerple") : tables.kerple;
    const factor = r1.map((value) => Math.max(value * first, minimum));
    const rate = r2.map((value) => Math.min(Math.max(value * second, minimum), log ? Infinity : 2));
    return {
      heads: r1.length,
      bias(head, query, key) {
        const steps = Math.abs(key - query);
        return -factor[head] * (log ? Math.log1p(rate[head] * steps) : steps ** (exponent ?? rate[head]));
      },
    };
  },
};

export const sandwich = {
  name: "sandwich",
  steps: "bias",
  learn: "The product of two sinusoidal vectors, without the words. It falls first and then swings.",
  failure:
    "Fails at direction, like every symmetric bias. In the first head the bias is so strong that the words hardly matter.",
  controls: [
    { option: "width", from: 2, to: 256, step: 2 },
    { option: "base", from: 10, to: 1e6, log: true },
  ],
  build({ width, base }, { heads }) {
    const frequencies = range(width / 2).map((n) => base ** ((-2 * n) / width));
    const known = new Map();
    return {
      bias(head, query, key) {
        const steps = Math.abs(key - query);
        if (!known.has(steps)) known.set(steps, frequencies.reduce((sum, one) => sum + Math.cos(steps * one), 0));
        return (heads / (8 * (head + 1))) * known.get(steps);
      },
    };
  },
};

// The position itself, or its fraction of the sequence, along one direction.

import { HIDDEN } from "../model.js";

const CONTROLS = [
  { option: "scale", from: 0.05, to: 2, step: 0.05 },
  { option: "direction", choices: ["ones", "random", "one_hot"] },
];

function direction(name, tables) {
  if (name === "random") return Float64Array.from(tables.integer.random);
  if (name === "one_hot") return Float64Array.from({ length: HIDDEN }, (_, c) => (c === 0 ? Math.sqrt(HIDDEN) : 0));
  return new Float64Array(HIDDEN).fill(1);
}

export const integer = {
  name: "integer",
  steps: "shift",
  learn: "Every word vector is pushed along one direction, one step further for each position.",
  failure:
    "Fails because the push has no bound: after a few positions it is longer than the word vector itself, and the model no longer sees the words.",
  controls: CONTROLS,
  build(options, place) {
    const along = direction(options.direction, place.tables);
    return { added: (position) => along.map((value) => value * position * options.scale) };
  },
};

export const normalizedInteger = {
  name: "normalized_integer",
  steps: "shift",
  learn: "The push is bounded now: the last word of any sequence gets almost the same one.",
  failure:
    "Fails because the size of one step depends on the length of the sequence: the same two neighbours look different in a long text and in a short one.",
  controls: [
    { option: "length", from: 1, to: 256, step: 1, start: null, preset: 64, nullable: "the current length" },
    { option: "subtract_one" },
    ...CONTROLS,
  ],
  build(options, place) {
    const along = direction(options.direction, place.tables);
    const divisor = Math.max((options.length ?? place.length) - (options.subtract_one ? 1 : 0), 1);
    return { added: (position) => along.map((value) => (value * position * options.scale) / divisor) };
  },
};

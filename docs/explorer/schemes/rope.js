// Rotations with RoPE's frequencies: all of them, scaled, or without the slow ones.

import { HEAD_DIM } from "../model.js";
import { range } from "../numbers.js";
import { SCALING_CONTROLS, scaled, scalingOptions } from "./rope_scaling.js";

export const ROTARY_CONTROLS = [
  { option: "theta", from: 10, to: 1e7, log: true },
  { option: "rotary_dim", from: 4, to: HEAD_DIM, step: 2, start: HEAD_DIM, sameAsNone: true },
];
const LAYOUT = { option: "layout" };

/** Radians per position of each pair. */
export function ropeFrequencies(theta, rotaryDim) {
  return range(rotaryDim / 2).map((m) => theta ** ((-2 * m) / rotaryDim));
}

/** RoPE as it is, with the same frequencies, to compare with. */
export function plainRope(text) {
  return ({ theta, rotary_dim }) => ({ text, parts: { rotation: { frequencies: ropeFrequencies(theta, rotary_dim) } } });
}

/** "auto" is the pairing of the architecture; the page has none, as in Llama. */
export function layoutOf(options) {
  return options.layout === "auto" ? "half" : options.layout;
}

export const rope = {
  name: "rope",
  steps: "plane",
  learn: "Query and key turn with their position. The angle between them, and so their product, depends on the distance only.",
  failure:
    "Fails past the training length: slow pairs reach angles that were never trained. That is what the scalings are for.",
  controls: [...ROTARY_CONTROLS, ...SCALING_CONTROLS, LAYOUT],
  options: scalingOptions,
  compare: (options) => (options.scaling === "none" ? null : plainRope("without scaling")(options)),
  build(options, { length }) {
    return { rotation: { layout: layoutOf(options), ...scaled(options, length) } };
  },
};

export const pRope = {
  name: "p_rope",
  steps: "plane",
  learn: "The slowest pairs stand still. They carry meaning that no distance disturbs.",
  failure: "Fails like RoPE past the training length if it keeps pairs that are too slow to complete a turn there.",
  controls: [ROTARY_CONTROLS[0], { option: "fraction", from: 0, to: 1, step: 0.03125 }, ROTARY_CONTROLS[1], LAYOUT],
  compare: plainRope("rope"),
  build(options) {
    const kept = Math.floor((options.fraction * options.rotary_dim) / 2);
    const frequencies = ropeFrequencies(options.theta, options.rotary_dim).map((one, m) => (m < kept ? one : 0));
    return { rotation: { layout: layoutOf(options), frequencies } };
  },
};

export const hope = {
  name: "hope",
  steps: "plane",
  learn: "Only pairs that complete a turn within the training length rotate, so a longer text brings no new angles.",
  failure: "Fails at far distances: without slow pairs, distant positions repeat the angles of near ones and are harder to tell apart.",
  controls: [
    ROTARY_CONTROLS[0],
    { option: "training_length", from: 7, to: 2048, step: 1, start: 64 },
    ROTARY_CONTROLS[1],
    LAYOUT,
  ],
  compare: plainRope("rope"),
  build(options) {
    const slowest = (2 * Math.PI) / options.training_length;
    const frequencies = ropeFrequencies(options.theta, options.rotary_dim).map((one) => (one < slowest ? 0 : one));
    return { rotation: { layout: layoutOf(options), frequencies } };
  },
};

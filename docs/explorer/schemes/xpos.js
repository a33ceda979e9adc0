// RoPE whose pairs also decay with distance.

import { layoutOf, plainRope, ROTARY_CONTROLS, ropeFrequencies } from "./rope.js";

export const xpos = {
  name: "xpos",
  steps: "plane",
  learn: "Queries shrink and keys grow with their position, so that a product fades with distance, fast pairs first.",
  failure: "Fails in models that read both ways: towards later words the factor would grow instead of fade.",
  controls: [
    ...ROTARY_CONTROLS,
    { option: "gamma", from: 0.05, to: 4, step: 0.05 },
    { option: "scale_base", from: 8, to: 2048, log: true },
    { option: "layout" },
  ],
  compare: plainRope("rope"),
  build(options) {
    const { theta, rotary_dim: d, gamma, scale_base, origin = 0 } = options;
    const frequencies = ropeFrequencies(theta, d);
    const decay = frequencies.map((_, m) => Math.log(((2 * m) / d + gamma) / (1 + gamma)) / scale_base);
    return { rotation: { layout: layoutOf(options), frequencies, strength: { decay, origin } } };
  },
};

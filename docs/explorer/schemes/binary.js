// The binary digits of the position.

import { HIDDEN } from "../model.js";

export const binary = {
  name: "binary",
  steps: "bits",
  learn: "Fast digits on the left, slow ones on the right. All numbers stay between 0 and the scale.",
  failure:
    "Fails because it jumps: from position 7 to 8 four digits flip at once, so two neighbours can be as far apart as two distant words.",
  controls: [
    { option: "bits", from: 1, to: 12, step: 1, start: 6 },
    { option: "scale", from: 0.05, to: 2, step: 0.05 },
  ],
  build({ bits, scale }) {
    return {
      reach: 2 ** bits,
      reachReason: `${bits} bits count to ${2 ** bits}; the next position would repeat the first one.`,
      added(position) {
        if (position >= 2 ** bits) return null;
        const digit = (c) => Math.floor(position / 2 ** Math.floor((c * bits) / HIDDEN)) % 2;
        return Float64Array.from({ length: HIDDEN }, (_, c) => digit(c) * scale);
      },
    };
  },
};

// Sines and cosines of the position.

import { HIDDEN } from "../model.js";
import { range } from "../numbers.js";

/** Radians per position of each pair. */
export function sinusoidalFrequencies({ base, frequencies }, hidden = HIDDEN) {
  const half = hidden / 2;
  const step = frequencies === "vaswani" ? 1 / half : 1 / (half - 1);
  return range(half).map((m) => base ** (-m * step));
}

export const sinusoidal = {
  name: "sinusoidal",
  steps: "waves",
  learn:
    "Like binary digits that turn smoothly: fast waves in the first dimensions, slow ones in the last. The product of two position vectors depends on their distance only.",
  failure:
    "Fails past the training length: the slow waves reach values that the model has never seen, and position and meaning share one vector.",
  controls: [
    { option: "base", from: 10, to: 1e6, log: true },
    { option: "scale", from: 0.05, to: 2, step: 0.05 },
    { option: "frequencies" },
    { option: "layout" },
    { option: "offset", from: 0, to: 16, step: 1 },
  ],
  build(options) {
    const frequencies = sinusoidalFrequencies(options);
    const half = frequencies.length;
    const [sine, cosine] = {
      interleaved: [(m) => 2 * m, (m) => 2 * m + 1],
      concatenated: [(m) => m, (m) => m + half],
      cosines_first: [(m) => m + half, (m) => m],
    }[options.layout];
    return {
      added(position) {
        const vector = new Float64Array(HIDDEN);
        frequencies.forEach((frequency, m) => {
          const angle = (position + options.offset) * frequency;
          vector[sine(m)] = Math.sin(angle) * options.scale;
          vector[cosine(m)] = Math.cos(angle) * options.scale;
        });
        return vector;
      },
    };
  },
};

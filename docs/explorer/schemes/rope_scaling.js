// RoPE's scalings to longer sequences. One entry each: the frequencies and the factor of cosine and sine.

import { range } from "../numbers.js";

const powers = (theta, d) => range(d / 2).map((m) => theta ** ((2 * m) / d));
const stretchedBase = (theta, d, stretch) => theta * stretch ** (d / (d - 2));

/** The divisors of LongRoPE on this page: 1 for the fastest pair, `longest` for the slowest, geometric between. */
function longFactors(longest, pairs) {
  return range(pairs).map((m) => longest ** (m / Math.max(pairs - 1, 1)));
}

const SCALINGS = {
  linear: ({ theta, rotary_dim: d, factor }) => ({ frequencies: powers(theta, d).map((one) => 1 / one / factor) }),

  ntk: ({ theta, rotary_dim: d, factor }) => ({
    frequencies: powers(stretchedBase(theta, d, factor), d).map((one) => 1 / one),
  }),

  dynamic({ theta, rotary_dim: d, factor, original_max_positions: original }, length) {
    const stretch = (factor * Math.max(length, original)) / original - (factor - 1);
    return { frequencies: powers(stretchedBase(theta, d, stretch), d).map((one) => 1 / one) };
  },

  yarn({ theta, rotary_dim: d, factor, original_max_positions: original, beta_fast, beta_slow }) {
    const pairWithTurns = (turns) => (d * Math.log(original / (turns * 2 * Math.PI))) / (2 * Math.log(theta));
    const low = Math.max(Math.floor(pairWithTurns(beta_fast)), 0);
    let high = Math.min(Math.ceil(pairWithTurns(beta_slow)), d - 1);
    if (low === high) high += 0.001;
    const frequencies = powers(theta, d).map((wavelength, m) => {
      const kept = 1 - Math.min(Math.max((m - low) / (high - low), 0), 1);
      return (1 / (factor * wavelength)) * (1 - kept) + (1 / wavelength) * kept;
    });
    return { frequencies, factor: 0.1 * Math.log(factor) + 1 };
  },

  llama3({ theta, rotary_dim: d, factor, low_freq_factor, high_freq_factor, original_max_positions: original }) {
    const frequencies = powers(theta, d).map((one) => {
      const plain = 1 / one;
      const turns = (original * plain) / (2 * Math.PI);
      if (turns < low_freq_factor) return plain / factor;
      if (turns > high_freq_factor) return plain;
      const blend = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
      return ((1 - blend) * plain) / factor + blend * plain;
    });
    return { frequencies };
  },

  longrope({ theta, rotary_dim: d, factor, original_max_positions: original, long_factor }, length) {
    const divisors = length > original ? longFactors(long_factor, d / 2) : range(d / 2).map(() => 1);
    return {
      frequencies: powers(theta, d).map((one, m) => 1 / (divisors[m] * one)),
      factor: factor <= 1 ? 1 : Math.sqrt(1 + Math.log(factor) / Math.log(original)),
    };
  },
};

/** Frequencies and factor of the chosen scaling, for a sequence of this length. */
export function scaled(options, length) {
  if (options.scaling === "none") {
    return { frequencies: powers(options.theta, options.rotary_dim).map((one) => 1 / one) };
  }
  return SCALINGS[options.scaling](options, length);
}

const HAS_LENGTH = ["dynamic", "yarn", "llama3", "longrope"];
const of = (...kinds) => (options) => kinds.includes(options.scaling);

export const SCALING_CONTROLS = [
  { option: "scaling", choices: ["none", ...Object.keys(SCALINGS)], start: "none" },
  { option: "factor", in: "scaling", from: 1, to: 32, step: 0.5, start: 4, when: of(...Object.keys(SCALINGS)) },
  { option: "original_max_positions", in: "scaling", from: 8, to: 512, step: 8, start: 64, when: of(...HAS_LENGTH) },
  { option: "beta_slow", in: "scaling", from: 0.5, to: 8, step: 0.5, start: 1, when: of("yarn") },
  {
    option: "beta_fast", in: "scaling", from: (options) => options.beta_slow + 1, to: 64, step: 0.5, start: 32,
    when: of("yarn"),
  },
  { option: "low_freq_factor", in: "scaling", from: 0.5, to: 8, step: 0.5, start: 1, when: of("llama3") },
  {
    option: "high_freq_factor", in: "scaling", from: (options) => options.low_freq_factor + 0.5, to: 16, step: 0.5,
    start: 4, when: of("llama3"),
  },
  {
    option: "long_factor", in: "scaling", from: 1, to: 64, step: 0.5, start: 16, when: of("longrope"),
    note:
      "The divisor of the slowest pair in sequences longer than original_max_positions. The fastest pair has 1, and " +
      "those between follow a geometric series.",
  },
];

/** The library's options: the scaling is a group of its own. */
export function scalingOptions({ scaling, ...options }) {
  const names = SCALING_CONTROLS.filter((control) => control.in && control.when({ scaling })).map((one) => one.option);
  const group = Object.fromEntries(names.map((name) => [name, options[name]]));
  const rest = Object.fromEntries(
    Object.entries(options).filter(([name]) => !SCALING_CONTROLS.some((control) => control.option === name)),
  );
  if (scaling === "none") return rest;
  if (scaling === "longrope") {
    const pairs = options.rotary_dim / 2;
    group.short_factor = range(pairs).map(() => 1);
    group.long_factor = longFactors(options.long_factor, pairs);
  }
  return { ...rest, scaling: { type: scaling, ...group } };
}

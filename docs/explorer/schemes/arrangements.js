// No positions, and schemes that act on other schemes. `place.build(name)` builds another scheme with its defaults.

import { plus } from "../numbers.js";

export const none = {
  name: "none",
  steps: "nothing",
  learn: "Nothing tells the model where a word stands. Equal words get equal outputs.",
  failure: "Fails at order itself: “dog bites man” and “man bites dog” are the same bag of words, unless a causal mask hides the later words.",
  controls: [],
  build: () => ({}),
};

/** Positions of far pairs: a query and the keys up to `lastKey` use `query` and `key` instead of their own positions. */
function far(inner, lastKey, query, key) {
  return { ...inner, pair: (i, j) => (j <= lastKey(i) ? [query(i), key(j)] : [i, j]) };
}

const innerAlone = ({ inner }, place) => ({ text: `${inner} alone`, parts: place.build(inner) });

export const selfExtend = {
  name: "self_extend",
  steps: "pairs",
  learn: "Near words keep their exact distance. Far words share positions in groups, so no distance is longer than in training.",
  failure: "Fails at exact far positions: within a group, words have no order.",
  controls: [
    { option: "inner", choices: ["rope", "alibi", "t5"] },
    { option: "group", from: 1, to: 16, step: 1, start: 4 },
    { option: "window", from: 1, to: 128, step: 1, start: 16 },
  ],
  compare: innerAlone,
  build({ inner, group, window }, place) {
    const shift = window - Math.floor(window / group);
    const grouped = (position) => Math.floor(position / group);
    return far(place.build(inner), (i) => i - window, (i) => grouped(i) + shift, grouped);
  },
};

export const rerope = {
  name: "rerope",
  steps: "pairs",
  learn: "Distances stop growing at the window, or grow more slowly with a factor.",
  failure: "Fails at order beyond the window: without a factor, all far words are equally far.",
  controls: [
    { option: "inner", choices: ["rope", "alibi"] },
    { option: "window", from: 1, to: 128, step: 1, start: 16 },
    { option: "factor", from: 1, to: 32, step: 1, start: null, preset: 16, nullable: "infinite" },
  ],
  compare: innerAlone,
  build({ inner, window, factor }, place) {
    const query = factor === null ? () => window : (i) => window + (i - window) / factor;
    return far(place.build(inner), (i) => i - window, query, (j) => (factor === null ? 0 : j / factor));
  },
};

export const dualChunk = {
  name: "dual_chunk",
  steps: "pairs",
  learn: "The positions of far words restart in every chunk, so no distance is longer than the chunk size. Near words keep their exact distance.",
  failure: "Fails at order between chunks: words at the same place of two far chunks are equally far.",
  controls: [
    { option: "inner", choices: ["rope", "alibi", "t5"] },
    { option: "chunk_size", from: 17, to: 128, step: 1, start: 24 },
    { option: "local_size", from: 1, to: 8, step: 1, start: 4 },
  ],
  compare: innerAlone,
  build({ inner, chunk_size: size, local_size: local }, place) {
    const chunk = size - local;
    const lastKey = (i) => Math.floor((i - local - 1) / chunk) * chunk - 1;
    return far(place.build(inner), lastKey, () => size, (j) => j % chunk);
  },
};

export const positionScale = {
  name: "position_scale",
  steps: "pairs",
  learn: "All positions are squeezed, so that a long text fits into the positions of a short one.",
  failure: "Fails at neighbours: they come closer together than in training, until the model is trained for it.",
  controls: [
    { option: "inner", choices: ["rope", "alibi", "sinusoidal", "kerple"] },
    { option: "factor", from: 0.05, to: 2, step: 0.05 },
  ],
  compare: innerAlone,
  build({ inner, factor }, place) {
    const parts = place.build(inner);
    return {
      ...parts,
      ...(parts.added ? { added: (position) => parts.added(factor * position) } : {}),
      pair: (i, j) => [factor * i, factor * j],
    };
  },
};

export const composed = {
  name: "composed",
  steps: "bias",
  learn: "Vectors and biases add up; at most one part may rotate.",
  failure: "Fails where the parts disagree: a bias that hides far words also hides what a rotation could find there.",
  controls: [
    {
      option: "parts",
      choices: ["rope+alibi", "sinusoidal+alibi", "sinusoidal+t5", "rope+kerple", "learned+alibi"],
      start: "rope+alibi",
    },
  ],
  options: ({ parts }) => ({ parts: parts.split("+") }),
  build({ parts }, place) {
    const [first, second] = parts.split("+").map((name) => place.build(name));
    const added = [first.added, second.added].filter(Boolean);
    return {
      ...first,
      ...second,
      ...(added.length === 2 ? { added: (position) => plus(added[0](position), added[1](position)) } : {}),
    };
  },
};

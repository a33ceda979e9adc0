// Everything that is computed from a state: the parts of every scheme, the attention, and the dog test.

import { attend, outputDistance, repeatedWords, wordsOf } from "./model.js";
import { SCHEMES, schemeNamed } from "./schemes/registry.js";
import { controlsOf, validOptions } from "./state.js";

/** The parts of a scheme for a sequence of `length` positions. */
export function partsOf(scheme, wanted, place, data) {
  const options = validOptions(scheme, wanted, place, data.library);
  return scheme.build(options, full(place, data));
}

/** A place with everything that formulas read. */
function full(place, data) {
  return {
    ...place,
    tables: data.tables,
    trained: (name) => data.trained.schemes[name][place.causal ? "causal" : "masked"],
    build: (name) => partsOf(schemeNamed(name), {}, place, data),
  };
}

/** A place for this scheme: models that read both ways are not possible for every scheme. */
function placeFor(scheme, state, length, data) {
  const forced = data.library.schemes[scheme.name].causal_only === true;
  return { heads: state.heads, causal: state.causal || forced, length, forced: forced && !state.causal };
}

/** The layer's attention and outputs with one scheme; `refusal` if the sentence is too long for it. */
export function layerOf(scheme, wanted, words, state, data) {
  const place = placeFor(scheme, state, words.length, data);
  const parts = partsOf(scheme, wanted, place, data);
  if (parts.reach < words.length) return { place, refusal: `Too long: ${parts.reachReason}` };
  const heads = Math.min(place.heads, parts.heads ?? place.heads);
  return { place: { ...place, heads }, ...attend(words, parts, { ...place, heads }) };
}

/** The distance between the two places of a word, for every scheme. Those with default options are remembered. */
export function createDogTest(data) {
  let known = new Map();
  let knownFor = "";
  return (state, words, pair) => {
    const key = JSON.stringify([words.map((word) => word.key), pair.key, state.heads, state.causal]);
    if (key !== knownFor) [known, knownFor] = [new Map(), key];
    return SCHEMES.map((scheme) => {
      if (data.library.schemes[scheme.name].causal_only && !state.causal) return { scheme, causalOnly: true };
      const settings = JSON.stringify([scheme.name, state.wanted[scheme.name]]);
      if (!known.has(settings)) {
        const layer = layerOf(scheme, state.wanted[scheme.name], words, state, data);
        known.set(settings, {
          scheme,
          refusal: layer.refusal,
          distance: layer.refusal ? null : outputDistance(layer.outputs, pair.first, pair.second),
        });
      }
      return known.get(settings);
    });
  };
}

/** What the panels draw. */
export function createView(data) {
  const dogTest = createDogTest(data);
  return (state) => {
    const scheme = schemeNamed(state.scheme);
    const place = placeFor(scheme, state, state.n, data);
    const options = validOptions(scheme, state.wanted[scheme.name], place, data.library);
    const parts = partsOf(scheme, options, place, data);
    const heads = Math.min(place.heads, parts.heads ?? place.heads);
    const words = wordsOf(state.text);
    const repeated = repeatedWords(words);
    const pair = repeated.find(({ key }) => key === state.word) ?? repeated[0];
    return {
      state,
      data,
      scheme,
      library: data.library.schemes[scheme.name],
      controls: controlsOf(scheme, options, place, data.library),
      options,
      parts,
      reference: scheme.compare?.(options, full(place, data)) ?? null,
      place: { ...place, heads },
      words,
      repeated,
      pair,
      layer: words.length ? layerOf(scheme, options, words, state, data) : null,
      /** The same layer without positions, to compare with. */
      plain: () => layerOf(schemeNamed("none"), {}, words, { ...state, causal: place.causal }, data),
      dogs: pair ? dogTest(state, words, pair) : null,
    };
  };
}

/** The options as the library takes them. */
export function libraryOptions({ scheme, options }) {
  const { weights, ...own } = options;
  return scheme.options ? scheme.options(own) : own;
}

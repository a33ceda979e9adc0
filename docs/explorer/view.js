// Everything that is computed from a state: the parts of every scheme, the attention, and the dog test.

import { attend, outputDistance, repeatedWords, wordsOf } from "./model.js";
import { range } from "./numbers.js";
import { SCHEMES, schemeNamed } from "./schemes/registry.js";
import { controlsOf, sidesOf, validOptions } from "./state.js";

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

/** The chosen scheme for which later words are hidden without being asked: not every scheme can read both ways. */
const forcedBy = (sides, state, data) =>
  state.causal ? undefined : sides.find(({ name }) => data.library.schemes[name].causal_only)?.name;

/** The layer's attention and outputs with one scheme; `refusal` if it cannot be known for these words. */
export function layerOf(scheme, wanted, words, state, data) {
  const place = { heads: state.heads, causal: state.causal, length: words.length };
  const parts = partsOf(scheme, wanted, place, data);
  if (parts.reach < words.length) return { place, refusal: `Too long: ${parts.reachReason}` };
  if (parts.layers) return { place, refusal: "One scheme per layer", layers: parts.layers };
  const heads = Math.min(place.heads, parts.heads ?? place.heads);
  if (parts.recorded) return { place: { ...place, heads }, ...recordedLayer(parts.recorded, words, place) };
  return { place: { ...place, heads }, ...attend(words, parts, { ...place, heads }) };
}

/** What the library computed for its sentence. Other words would need the library. */
function recordedLayer({ sentence, heads, attention, distance }, words, place) {
  const same = JSON.stringify(words.map(({ key }) => key)) === JSON.stringify(wordsOf(sentence).map(({ key }) => key));
  if (!same || place.heads !== heads) return { refusal: `Only for “${sentence}” and ${heads} heads`, short: "needs the library", sentence, heads };
  const row = (head, query) => words.map((_, key) => (place.causal && key > query ? null : attention.at(head, query, key)));
  return { attention: range(heads).map((head) => words.map((_, query) => row(head, query))), distance };
}

/** The distance between the two places of a word, for every scheme. Those with default options are remembered. */
export function createDogTest(data) {
  let known = new Map();
  let knownFor = "";
  /** The distances of all schemes, and those of the chosen ones, which may be one scheme with two sets of options. */
  return (state, words, pair, sides) => {
    const key = JSON.stringify([words.map((word) => word.key), pair.key, state.heads, state.causal]);
    if (key !== knownFor) [known, knownFor] = [new Map(), key];
    const measured = (scheme, wanted) => {
      if (data.library.schemes[scheme.name].causal_only && !state.causal) return { scheme, causalOnly: true };
      const settings = JSON.stringify([scheme.name, wanted]);
      if (!known.has(settings)) {
        const layer = layerOf(scheme, wanted, words, state, data);
        const { refusal, short } = layer;
        const distance = refusal ? null : (layer.distance ?? outputDistance(layer.outputs, pair.first, pair.second));
        known.set(settings, { scheme, refusal, short, distance });
      }
      return known.get(settings);
    };
    const wantedOf = ({ name }) => sides.find((side) => side.name === name)?.wanted ?? state.wanted[name];
    const all = SCHEMES.map((scheme) => measured(scheme, wantedOf(scheme)));
    return { all, chosen: sides.map(({ name, wanted }) => measured(schemeNamed(name), wanted)) };
  };
}

/** What the panels draw: one view per chosen scheme. */
export function createViews(data) {
  const dogTest = createDogTest(data);
  return (state) => {
    const words = wordsOf(state.text);
    const repeated = repeatedWords(words);
    const pair = repeated.find(({ key }) => key === state.word) ?? repeated[0];
    const sides = sidesOf(state);
    const forced = forcedBy(sides, state, data);
    // Both schemes of a comparison see the same words.
    const shown = forced ? { ...state, causal: true } : state;
    const dogs = pair ? dogTest(shown, words, pair, sides) : null;
    return sides.map((side, i) => ({ ...viewOf(side, shown, words, data), forced, words, repeated, pair, dogs: dogs?.all, dog: dogs?.chosen[i] }));
  };
}

function viewOf({ name, wanted }, state, words, data) {
  const scheme = schemeNamed(name);
  const place = { heads: state.heads, causal: state.causal, length: state.n };
  const options = validOptions(scheme, wanted, place, data.library);
  const parts = partsOf(scheme, options, place, data);
  const heads = Math.min(place.heads, parts.heads ?? place.heads);
  return {
    state,
    data,
    scheme,
    library: data.library.schemes[scheme.name],
    controls: controlsOf(scheme, options, place, data.library),
    options,
    parts,
    /** The animation; an example of the library may have none. */
    steps: scheme.examples ? parts.steps : scheme.steps,
    reference: scheme.compare?.(options, full(place, data)) ?? null,
    place: { ...place, heads, length: parts.most ?? place.length },
    layer: words.length ? layerOf(scheme, options, words, state, data) : null,
    /** The same layer without positions, to compare with. */
    plain: () => layerOf(schemeNamed("none"), {}, words, state, data),
  };
}

/** The options as the library takes them. */
export function libraryOptions({ scheme, options }) {
  const { weights, ...own } = options;
  return scheme.options ? scheme.options(own) : own;
}

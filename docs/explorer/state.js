// What the reader has chosen, and its form in the address: #rope&theta=500000&scaling=yarn&n=128&text=The+dog...
// Only what differs from the start of the page is in the address.

import { MOST_HEADS } from "./model.js";
import { SCHEMES, schemeNamed } from "./schemes/registry.js";

export const SENTENCE = "The dog chased another dog";
const LONGEST_TEXT = 2000;
export const FIRST_SCHEME = "rope";
export const PLACE_CONTROLS = [
  { name: "n", label: "positions shown", from: 8, to: 256, start: 64 },
  { name: "heads", label: "attention heads", from: 1, to: MOST_HEADS, start: 4 },
];

/** The controls of a scheme with everything a widget needs: library texts, and limits at the current values. */
export function controlsOf(scheme, options, place, library) {
  const weights = scheme.weights
    ? [{ option: "weights", kind: "choice", choices: Object.keys(scheme.weights), names: scheme.weights,
         start: Object.keys(scheme.weights)[0], meaning: "where the learned numbers come from; not an option of the library." }]
    : [];
  const shown = scheme.controls.filter((control) => !control.when || control.when(options, place));
  return [...weights, ...shown.map((control) => described(control, scheme, options, place, library))];
}

function described(control, scheme, options, place, library) {
  const group = control.in ? library.scalings[options[control.in]] : library.schemes[scheme.name];
  const known = group.options.find((one) => one.name === control.option);
  const value = (limit) => (typeof limit === "function" ? limit(options, place) : limit);
  const hasDefault = known.default !== null && known.default !== "required";
  const kind = known.type === "bool" ? "boolean" : control.from === undefined ? "choice" : "number";
  return {
    ...control,
    kind,
    from: value(control.from),
    to: value(control.to),
    choices: value(control.choices) ?? known.choices,
    start: control.start !== undefined ? control.start : known.default,
    libraryDefault: hasDefault && control.start !== undefined && control.start !== known.default ? known.default : undefined,
    // A group of options is explained by the group that is chosen.
    meaning: control.note ?? library.scalings[options[control.option]]?.summary ?? known.meaning,
  };
}

/** The options of a scheme, with every value missing or out of range replaced by the start value or the nearest limit. */
export function validOptions(scheme, wanted, place, library, problems = []) {
  const options = {};
  const all = [...(scheme.weights ? [{ option: "weights" }] : []), ...scheme.controls];
  for (const { option } of all) {
    // Earlier options decide which later ones exist, so they are read one by one.
    const control = controlsOf(scheme, options, place, library).find((one) => one.option === option);
    if (!control) continue;
    const value = wanted[option] === undefined ? control.start : wanted[option];
    options[option] = allowed(control, value);
    if (value !== undefined && options[option] !== value) problems.push(`${option} cannot be ${value} here.`);
  }
  return options;
}

function allowed(control, value) {
  if (control.kind === "boolean") return value === true || value === false ? value : control.start;
  if (control.kind === "choice") return control.choices.includes(value) ? value : control.start ?? control.choices[0];
  if (value === null && control.nullable) return null;
  if (typeof value !== "number" || Number.isNaN(value)) return control.start;
  const whole = !control.log && Number.isInteger(control.step) ? Math.round(value) : value;
  const even = control.step === 2 ? 2 * Math.round(whole / 2) : whole;
  return Math.min(Math.max(even, control.from), control.to);
}

export function startState() {
  return {
    scheme: FIRST_SCHEME,
    wanted: Object.fromEntries(SCHEMES.map((scheme) => [scheme.name, {}])),
    n: 64,
    heads: 4,
    causal: false,
    text: SENTENCE,
    word: null,
  };
}

/** Reads an address. Unknown names are collected in `problems`, and the start values are used instead. */
export function readHash(hash, library, problems = []) {
  const state = startState();
  const [name, ...pairs] = hash.replace(/^#/, "").split("&");
  if (name && schemeNamed(decode(name))) state.scheme = decode(name);
  else if (name) problems.push(`There is no scheme “${decode(name)}”. This is ${state.scheme}.`);
  const options = {};
  for (const pair of pairs) {
    const [key, ...rest] = pair.split("=");
    const text = decode(rest.join("="));
    const control = PLACE_CONTROLS.find((one) => one.name === key);
    if (key === "text") state.text = text.slice(0, LONGEST_TEXT);
    else if (key === "word") state.word = text;
    else if (key === "causal") state.causal = text === "1";
    else if (control) state[key] = allowed({ ...control, kind: "number", step: 1 }, Number(text));
    else options[decode(key)] = parsed(text);
  }
  const scheme = schemeNamed(state.scheme);
  state.wanted[scheme.name] = validOptions(scheme, options, state, library, problems);
  for (const key of Object.keys(options)) {
    if (!(key in state.wanted[scheme.name])) problems.push(`${scheme.name} has no option ${key} here.`);
  }
  return state;
}

/** The address of a state. */
export function writeHash(state, library) {
  const scheme = schemeNamed(state.scheme);
  const options = validOptions(scheme, state.wanted[scheme.name], state, library);
  const start = startState();
  const pairs = [];
  for (const control of controlsOf(scheme, options, state, library)) {
    if (options[control.option] !== control.start) pairs.push([control.option, String(options[control.option])]);
  }
  for (const { name } of PLACE_CONTROLS) if (state[name] !== start[name]) pairs.push([name, String(state[name])]);
  if (state.causal) pairs.push(["causal", "1"]);
  if (state.text !== start.text) pairs.push(["text", state.text]);
  if (state.word) pairs.push(["word", state.word]);
  const encoded = pairs.map(([key, value]) => `${key}=${encodeURIComponent(value).replace(/%20/g, "+")}`);
  return `#${[scheme.name, ...encoded].join("&")}`;
}

function decode(text) {
  try {
    return decodeURIComponent(text.replace(/\+/g, " "));
  } catch {
    return text;
  }
}

function parsed(text) {
  if (text === "null") return null;
  if (text === "true" || text === "false") return text === "true";
  return text !== "" && !Number.isNaN(Number(text)) ? Number(text) : text;
}

// What the reader has chosen, and its form in the address: #rope&theta=500000&scaling=yarn&n=128&text=The+dog...
// Two schemes beside each other are #alibi,rope; the options of the second one begin with "2.", as in 2.theta=500000.
// Only what differs from the start of the page is in the address.

import { MOST_HEADS } from "./model.js";
import { SCHEMES, nearest, schemeNamed } from "./schemes/registry.js";

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
  const examples = scheme.examples
    ? [{ option: "example", kind: "choice", choices: Object.keys(scheme.examples), start: Object.keys(scheme.examples)[0],
         title: "Example", meaning: "the options that the library has computed pictures for." }]
    : [];
  const shown = scheme.controls.filter((control) => !control.when || control.when(options, place));
  return [...weights, ...examples, ...shown.map((control) => described(control, scheme, options, place, library))];
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
  const all = [...(scheme.weights ? [{ option: "weights" }] : []), ...(scheme.examples ? [{ option: "example" }] : []), ...scheme.controls];
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
  const empty = () => Object.fromEntries(SCHEMES.map((scheme) => [scheme.name, {}]));
  return { scheme: FIRST_SCHEME, second: null, wanted: empty(), wantedSecond: empty(), n: 64, heads: 4, causal: false, text: SENTENCE, word: null, same: true };
}

/** The chosen schemes: one, or two that are drawn beside each other. */
export function sidesOf(state) {
  const first = { name: state.scheme, wanted: state.wanted[state.scheme], all: state.wanted, prefix: "" };
  if (!state.second) return [first];
  return [first, { name: state.second, wanted: state.wantedSecond[state.second], all: state.wantedSecond, prefix: "2." }];
}

/** Reads an address. What cannot be understood is collected in `problems`, and the start values are used instead. */
export function readHash(hash, library, problems = []) {
  const state = startState();
  const [names, ...pairs] = hash.replace(/^#/, "").split("&");
  readNames(decode(names).split(","), state, problems);
  const options = {};
  for (const pair of pairs) {
    const [key, ...rest] = pair.split("=");
    const text = decode(rest.join("="));
    const control = PLACE_CONTROLS.find((one) => one.name === key);
    if (key === "text") state.text = text.slice(0, LONGEST_TEXT);
    else if (key === "word") state.word = text;
    else if (key === "causal") state.causal = text === "1";
    else if (key === "axes") state.same = text !== "own";
    else if (control) state[key] = allowed({ ...control, kind: "number", step: 1 }, Number(text));
    else options[decode(key)] = parsed(text);
  }
  const sides = sidesOf(state);
  for (const [key, value] of Object.entries(options)) {
    const side = sides.find(({ prefix }) => prefix && key.startsWith(prefix)) ?? sides[0];
    side.wanted[key.slice(side.prefix.length)] = value;
  }
  for (const { name, all } of sides) {
    const given = Object.keys(all[name]);
    all[name] = validOptions(schemeNamed(name), all[name], state, library, problems);
    for (const key of given) if (!(key in all[name])) problems.push(`${name} has no option ${key} here.`);
  }
  return state;
}

function readNames([first, second, ...more], state, problems) {
  const unknown = (name, instead) => problems.push({ text: `There is no scheme “${name}”${instead}. The nearest names: `, names: nearest(name) });
  if (schemeNamed(first)) state.scheme = first;
  else if (first) unknown(first, `, so this is ${state.scheme}`);
  if (schemeNamed(second)) state.second = second;
  else if (second) unknown(second, " to compare with");
  if (more.length) problems.push("Two schemes can be compared, and not more.");
}

/** The address of a state. */
export function writeHash(state, library) {
  const start = startState();
  const pairs = [];
  const sides = sidesOf(state);
  for (const { name, wanted, prefix } of sides) {
    const scheme = schemeNamed(name);
    const options = validOptions(scheme, wanted, state, library);
    for (const control of controlsOf(scheme, options, state, library)) {
      if (options[control.option] !== control.start) pairs.push([prefix + control.option, String(options[control.option])]);
    }
  }
  for (const { name } of PLACE_CONTROLS) if (state[name] !== start[name]) pairs.push([name, String(state[name])]);
  if (state.causal) pairs.push(["causal", "1"]);
  if (!state.same) pairs.push(["axes", "own"]);
  if (state.text !== start.text) pairs.push(["text", state.text]);
  if (state.word) pairs.push(["word", state.word]);
  const encoded = pairs.map(([key, value]) => `${key}=${encodeURIComponent(value).replace(/%20/g, "+")}`);
  return `#${[sides.map(({ name }) => name).join(","), ...encoded].join("&")}`;
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

// The schemes of the explorer: all of the library's, in the order of data/options.json.
//
// A scheme has a formula in this folder, or the library has computed its pictures (recorded.js). A new scheme of the
// library is in data/options.json and data/recorded.json after `python docs/explorer/make_data.py`, and then on the page.
//
// To give a scheme sliders and the reader's own sentence, write its formula:
//   1. Add its name to FORMULAS in docs/explorer/make_data.py and run that script. It reads the names, defaults, limits
//      and meanings of the options from the library's config class, so that they are not typed here.
//   2. Write one file in this folder, or add an entry to the file of its family, and list it below.
//   3. tests/explorer/test_formulas.py then compares it with the library: add option values to try in `CASES` there.
//
// An entry is an object with these fields:
//   name      the library's name of the scheme.
//   group     added here: a key of the groups in data/options.json.
//   steps     the animation that explains it: a name in steps/index.js.
//   learn     what to look at, one or two sentences.
//   failure   where the scheme fails, one sentence.
//   controls  the options that can be changed, in order. Each has `option` (the library's name) and, for numbers,
//             `from`, `to`, `step` or `log: true`. `start` is the value of the page where the library has no default or
//             one that shows nothing on 64 positions; `sameAsNone` says that None means it too. `nullable` says what None means. `choices` restricts the choices.
//             `when(options, place)` hides the control. `from`, `to` and `choices` may be functions of the same.
//   weights   optional: where learned numbers come from, name -> text; the first one is the start.
//   options   optional: converts the page's values to options of the library's config.
//   compare   optional: (options, place) -> {text, parts} of what the scheme changes, drawn as a dashed line, or null.
//   build     (options, place) -> parts. `place` has heads, causal, length, tables (data/tables.json),
//             trained(name) (data/trained.json), and build(name) for other schemes. Parts may have:
//               added(position)                the vector that is added to a word, `null` past the last row
//               rotation                       {frequencies, layout, factor, strength} of queries and keys; see
//                                              `turned` in model.js
//               bias(head, query, key)         the number that is added to a logit; positions may be real numbers
//               pair(query, key)               the two positions to use for a pair, instead of its own
//               reach, reachReason             the longest sequence, and why
//               heads                          the number of heads with weights, if fewer than the place has

import { binary } from "./binary.js";
import { alibi, kerple, sandwich } from "./fixed_bias.js";
import { integer, normalizedInteger } from "./integer.js";
import { learned } from "./learned.js";
import { fire, t5, tisa } from "./learned_bias.js";
import { composed, dualChunk, none, positionScale, rerope, selfExtend } from "./arrangements.js";
import { recordedScheme } from "./recorded.js";
import { hope, pRope, rope } from "./rope.js";
import { sinusoidal } from "./sinusoidal.js";
import { xpos } from "./xpos.js";

const FORMULAS = [
  none, integer, normalizedInteger, binary, sinusoidal, learned, alibi, t5, kerple, sandwich, tisa, fire,
  rope, pRope, hope, xpos, selfExtend, rerope, dualChunk, positionScale, composed,
];

export const SCHEMES = [];
export const GROUPS = {};

/** Lists every scheme of the library. Called once, before anything else of this folder. */
export function fillRegistry(library, recorded) {
  Object.assign(GROUPS, library.groups);
  for (const [name, { group, formulas }] of Object.entries(library.schemes)) {
    const own = formulas ? FORMULAS.find((scheme) => scheme.name === name) : recordedScheme(name, recorded);
    SCHEMES.push({ ...own, group });
  }
}

export function schemeNamed(name) {
  return SCHEMES.find((scheme) => scheme.name === name);
}

/** The names that look most like a text, at most `count` of them. */
export function nearest(text, count = 3) {
  const wanted = text.toLowerCase();
  const far = (name) => (wanted.length > 2 && name.includes(wanted) ? 0.5 : edits(wanted, name));
  return SCHEMES.map(({ name }) => [far(name), name])
    .sort(([a], [b]) => a - b)
    .slice(0, count)
    .map(([, name]) => name);
}

/** How many letters have to be added, removed or replaced to make one text of the other. */
function edits(one, other) {
  let row = Array.from({ length: other.length + 1 }, (_, i) => i);
  for (const [i, letter] of [...one].entries()) {
    const next = [i + 1];
    for (let j = 1; j <= other.length; j++) {
      next.push(Math.min(next[j - 1] + 1, row[j] + 1, row[j - 1] + (letter === other[j - 1] ? 0 : 1)));
    }
    row = next;
  }
  return row[other.length];
}

// The schemes of the explorer, in the order of its list.
//
// To add a scheme:
//   1. Add its name to SCHEMES in docs/explorer/make_data.py and run that script. It reads the names, defaults, limits
//      and meanings of the options from the library's config class, so that they are not typed here.
//   2. Write one file in this folder, or add an entry to the file of its family, and list it below.
//   3. tests/explorer/test_formulas.py then compares it with the library: add option values to try in `CASES` there.
// An entry for a runtime, another modality or a study result can carry more fields; panels read only those they know.
//
// An entry is an object with these fields:
//   name      the library's name of the scheme.
//   group     "none", "added", "bias", "rotation" or "arrangement".
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
import { composed, none, positionScale, rerope, selfExtend } from "./arrangements.js";
import { hope, pRope, rope } from "./rope.js";
import { sinusoidal } from "./sinusoidal.js";
import { xpos } from "./xpos.js";

export const SCHEMES = [
  none,
  integer,
  normalizedInteger,
  binary,
  sinusoidal,
  learned,
  alibi,
  t5,
  kerple,
  sandwich,
  tisa,
  fire,
  rope,
  pRope,
  hope,
  xpos,
  selfExtend,
  rerope,
  positionScale,
  composed,
];

export const GROUPS = {
  none: "No positions",
  added: "Added to the words",
  bias: "Added to the attention",
  rotation: "Rotates queries and keys",
  arrangement: "Changes another scheme",
};

export function schemeNamed(name) {
  return SCHEMES.find((scheme) => scheme.name === name);
}

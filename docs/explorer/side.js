// What the box of options says of one scheme: its summary, links, formula and options.

import { drawControls } from "./controls.js";
import { titleOf } from "./charts/columns.js";
import { html } from "./charts/svg.js";

/** The documentation is one folder up on its site, and absent where the explorer stands alone. */
export const ON_SITE = /\/explorer\/(index\.html)?$/.test(location.pathname);

/** What is said of pictures that the library has computed. */
export function recordedNote({ parts, scheme, library }) {
  if (parts.layers) return `${scheme.name} gives every layer a scheme of its own, so there is no picture of one layer.`;
  if (!parts.recorded) return "";
  const { readsWords, sentence, note } = parts.recorded;
  const words = readsWords ? ` What ${scheme.name} does depends on the words, so they show one example: 64 random words, and “${sentence}”.` : "";
  const only = library.causal_only ? " It is for causal models." : "";
  return `The library computed these pictures for a few options.${words}${only} ${note}`.trim();
}

/**
 * @param {string} suffix of the ids of the elements: "" for the first scheme, "-2" for the second.
 * @param views of all chosen schemes.
 * @param {(option: string, value: any) => void} change
 */
export function drawSide(suffix, views, i, change) {
  const at = (id) => document.getElementById(id + suffix);
  const view = views[i];
  const { scheme, library } = view;
  if (suffix) at("side-title").textContent = titleOf(views, i);
  at("summary").textContent = library.summary;
  at("paper").hidden = !library.paper;
  at("paper").href = `https://arxiv.org/abs/${library.paper}`;
  at("more").hidden = !ON_SITE;
  at("more").href = `../reference/schemes/${scheme.name}.html`;
  at("formula").textContent = library.formula ?? "";
  at("formula").hidden = !library.formula;
  at("recorded").textContent = recordedNote(view);
  at("recorded").hidden = at("recorded").textContent === "";
  drawControls(at("options"), view, change, suffix);
  at("registry").hidden = !scheme.examples || library.options.length === 0;
  if (scheme.examples) at("registry-list").replaceChildren(...library.options.flatMap(described));
}

/** An option of the library with its default and its meaning. */
function described({ name, default: start, meaning }) {
  const value = start === "required" ? "required" : `default ${start === null ? "None" : JSON.stringify(start)}`;
  return [html("dt", {}, html("code", {}, name), ` ${value}`), html("dd", {}, meaning)];
}

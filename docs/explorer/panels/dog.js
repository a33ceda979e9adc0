// The dog test: the distance between the outputs of two places of one word, for every scheme.

import { html, short } from "../charts/svg.js";
import { GROUPS } from "../schemes/registry.js";

/** Where the axis ends: the next quarter above the longest bar. */
const axisEnd = (dogs) => Math.max(Math.ceil(Math.max(...dogs.map(({ distance }) => distance ?? 0)) * 4) / 4, 0.25);

export function drawDog(container, view) {
  const note = document.getElementById("dog-note");
  drawWordChoice(view);
  const name = view.pair?.key ?? "dog";
  document.getElementById("dog-title").textContent =
    name === "dog" ? "Can it tell the two dogs apart?" : `Can it tell the two places of “${name}” apart?`;
  if (!view.dogs) {
    container.replaceChildren();
    note.textContent = view.words.length
      ? "No word occurs twice. Repeat a word, and its two places are compared."
      : "Type a sentence in which a word occurs twice.";
    return;
  }
  const { pair, words, state } = view;
  const [first, second] = [words[pair.first].text, words[pair.second].text];
  note.textContent =
    `Distance between the outputs for “${first}” (word ${pair.first + 1}) and “${second}” (word ${pair.second + 1}). ` +
    (state.causal
      ? "With a causal mask even “none” is above 0: the two words see different beginnings of the sentence."
      : "At 0 the layer cannot tell the two apart.") +
    (view.place.forced ? ` ${view.scheme.name} is for causal models: tick the causal mask to see its bar.` : "");
  const list = html("ol", { class: "bars" });
  const full = axisEnd(view.dogs);
  let group = "";
  for (const { scheme, distance, refusal, causalOnly } of view.dogs) {
    if (scheme.group !== group) list.append(html("li", { class: "group", "aria-hidden": "true" }, GROUPS[scheme.group]));
    group = scheme.group;
    const chosen = scheme === view.scheme;
    const row = html("li", { class: chosen ? "bar chosen" : "bar", "data-scheme": scheme.name });
    row.append(html("a", { href: `#${scheme.name}`, ...(chosen ? { "aria-current": "true" } : {}) }, scheme.name));
    if (distance === null || causalOnly) {
      row.append(html("span", { class: "why", title: refusal ?? "" }, causalOnly ? "causal models only" : refusal));
    } else {
      const share = Math.min(distance / full, 1) * 100;
      const track = html("span", { class: "track" }, html("span", { class: "fill", style: `width: ${share}%` }));
      row.append(track, html("span", { class: "value" }, short(distance)));
      row.dataset.distance = String(distance);
    }
    list.append(row);
  }
  const scale = html("li", { class: "bar scale", "aria-hidden": "true" }, html("span"), html("span", { class: "ends" }));
  scale.lastChild.append(...[0, full / 2, full].map((value) => html("span", {}, short(value))));
  list.append(scale);
  container.replaceChildren(list);
}

function drawWordChoice({ repeated, pair }) {
  const field = document.getElementById("word-field");
  field.hidden = repeated.length < 2;
  const select = document.getElementById("word");
  select.replaceChildren(...repeated.map(({ key }) => html("option", { value: key }, key)));
  if (pair) select.value = pair.key;
}

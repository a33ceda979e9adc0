// The dog test: the distance between the outputs of two places of one word, for every scheme.

import { titleOf } from "../charts/columns.js";
import { html, short } from "../charts/svg.js";
import { GROUPS } from "../schemes/registry.js";

/** Where the axis ends: the next quarter above the longest bar. */
const axisEnd = (dogs) => Math.max(Math.ceil(Math.max(...dogs.map(({ distance }) => distance ?? 0)) * 4) / 4, 0.25);

export function drawDog(container, views) {
  const [view] = views;
  const note = document.getElementById("dog-note");
  drawWordChoice(view);
  const name = view.pair?.key ?? "dog";
  document.getElementById("dog-title").textContent =
    name === "dog" ? "Can it tell the two dogs apart?" : `Can it tell the two places of “${name}” apart?`;
  if (!view.dogs) {
    for (const one of [container, document.getElementById("dog-chosen")]) one.replaceChildren();
    document.getElementById("dog-full").textContent = "";
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
      : "At 0 the layer cannot tell the two apart.");
  const full = axisEnd(view.dogs);
  document.getElementById("dog-full").textContent = `A full bar is ${short(full)}.`;
  const few = views.map(({ dog }, i) => bar(dog, views, full, titleOf(views, i), i));
  if (views.every(({ scheme }) => scheme.name !== "none")) few.unshift(bar(view.dogs.find(({ scheme }) => scheme.name === "none"), views, full));
  document.getElementById("dog-chosen").replaceChildren(html("ol", { class: "bars few" }, ...few));
  const list = html("ol", { class: "bars all" });
  let group = "";
  for (const dog of view.dogs) {
    const row = bar(dog, views, full);
    if (dog.scheme.group !== group) list.append(html("li", { class: "group", "aria-hidden": "true" }, GROUPS[dog.scheme.group]));
    group = dog.scheme.group;
    list.append(row);
  }
  container.replaceChildren(list);
}

/** The row of one scheme: its name, and its distance as a bar or why it has none. */
function bar({ scheme, distance, refusal, short: reason, causalOnly }, views, full, title = scheme.name, side = views.findIndex((view) => view.scheme === scheme)) {
  const other = views[1];
  const place = ["", " chosen", " chosen second"][side + 1];
  const row = html("li", { class: `bar${place}`, "data-scheme": scheme.name });
  const address = other ? `#${scheme.name},${other.scheme.name}` : `#${scheme.name}`;
  row.append(html("a", { href: address, ...(place ? { "aria-current": "true" } : {}) }, title));
  if (causalOnly || distance === null) {
    row.append(html("span", { class: "why", title: refusal ?? "" }, causalOnly ? "causal models only" : (reason ?? refusal)));
    return row;
  }
  const share = Math.min(distance / full, 1) * 100;
  const track = html("span", { class: "track" }, html("span", { class: "fill", style: `width: ${share}%` }));
  row.append(track, html("span", { class: "value" }, short(distance)));
  row.dataset.distance = String(distance);
  return row;
}

function drawWordChoice({ repeated, pair }) {
  const field = document.getElementById("word-field");
  field.hidden = repeated.length < 2;
  const select = document.getElementById("word");
  select.replaceChildren(...repeated.map(({ key }) => html("option", { value: key }, key)));
  if (pair) select.value = pair.key;
}

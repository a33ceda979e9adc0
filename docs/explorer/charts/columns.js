// One column per chosen scheme: beside each other, or below each other where there is no room.

import { html } from "./svg.js";

/** Empties a container and returns one box per view, under the names of the schemes if there are two. */
export function columns(container, views) {
  if (views.length === 1) {
    const box = html("div", { class: "chart" });
    container.replaceChildren(box);
    return [box];
  }
  const boxes = views.map(() => html("div", { class: "chart" }));
  const sides = boxes.map((box, i) => html("div", { class: `column side-${i + 1}` }, html("h3", {}, titleOf(views, i)), box));
  container.replaceChildren(html("div", { class: "columns" }, ...sides));
  return boxes;
}

/** The name of a scheme; numbered if it is compared with itself. */
export function titleOf(views, i) {
  const { name } = views[i].scheme;
  return views.length > 1 && views[1 - i].scheme.name === name ? `${name} (${i + 1})` : name;
}

/** The sentences of the views, each after the name of its scheme if they differ. */
export function sentences(views, textOf) {
  const texts = views.map(textOf);
  if (texts.every((text) => text === texts[0])) return texts[0];
  return texts.map((text, i) => (text ? `${titleOf(views, i)}: ${text}` : "")).filter(Boolean).join(" ");
}

/** What stands in the place of a picture of an arrangement of layers: links to the schemes of its layers. */
export function layersInstead({ layers }) {
  const names = [...new Set(layers)];
  const links = names.flatMap((name, i) => [i ? " and " : "", html("a", { href: `#${name}` }, name)]);
  return html("p", { class: "empty" }, "Each layer has its own scheme. See ", ...links, ".");
}

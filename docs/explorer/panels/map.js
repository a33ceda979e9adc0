// The heat maps: positions by dimensions, or queries by keys.

import { drawHeatmap } from "../charts/heatmap.js";
import { html } from "../charts/svg.js";
import { HIDDEN } from "../model.js";

const AWAY = -1000;
/** Rows and columns of a map of pairs, at most: more cannot be seen. */
const MOST_CELLS = 128;

export function drawMap(container, view, head) {
  const { parts, place } = view;
  container.replaceChildren();
  const what = [];
  const box = (name) => {
    const node = html("div", { class: "chart", "data-chart": name });
    container.append(node);
    return node;
  };
  if (parts.added) {
    const rows = Array.from({ length: place.length }, (_, position) => parts.added(position));
    drawHeatmap(box("added"), {
      rows: place.length,
      columns: HIDDEN,
      value: (position, c) => (rows[position] ? rows[position][c] : null),
      xLabel: "dimension",
      yLabel: "position",
      height: 320,
      label: "Heat map of the position vectors: one row per position, one column per dimension",
      tell: (position, c) => `position ${position}, dimension ${c}`,
    });
    what.push("What is added to a word: one row per position, one column per dimension. Two equal rows would be two positions that cannot be told apart.");
  }
  if (parts.rotation) {
    const { frequencies } = parts.rotation;
    const scaledPosition = (position) => (parts.pair && view.scheme.name === "position_scale" ? parts.pair(position, 0)[0] : position);
    drawHeatmap(box("rotation"), {
      rows: place.length,
      columns: frequencies.length,
      value: (position, m) => Math.cos(scaledPosition(position) * frequencies[m]),
      xLabel: "pair of dimensions",
      yLabel: "position",
      height: parts.added || parts.bias ? 220 : 320,
      limit: 1,
      label: "Heat map of the rotation: the cosine of the angle of each pair at each position",
      tell: (position, m) => `position ${position}, pair ${m}: cosine of the angle`,
    });
    what.push("The cosine of the angle by which each pair of dimensions has turned. Pairs on the left turn fast and repeat; pairs on the right hardly move.");
    if (parts.pair && view.scheme.name !== "position_scale") what.push("Pairs of far words use other positions, as the animation shows.");
  }
  if (parts.bias) {
    const shown = Math.min(place.length, MOST_CELLS);
    drawHeatmap(box("bias"), {
      rows: shown,
      columns: shown,
      value(query, key) {
        if (place.causal && key > query) return null;
        const bias = parts.bias(head, ...(parts.pair ? parts.pair(query, key) : [query, key]));
        return bias < AWAY ? null : bias;
      },
      xLabel: "key position",
      yLabel: "query position",
      height: parts.rotation || parts.added ? 240 : 320,
      label: `Heat map of the bias of head ${head + 1}: one row per query, one column per key`,
      tell: (query, key) => `query ${query}, key ${key}`,
    });
    what.push(`What head ${head + 1} adds to the logit of each pair of words. Equal colours along diagonals mean that only the distance counts.`);
  }
  if (what.length === 0) container.append(html("p", { class: "empty" }, "Every entry would be 0."));
  document.getElementById("map-what").textContent = what.join(" ");
}

// The attention weights of the random layer on the reader's sentence.

import { drawHeatmap } from "../charts/heatmap.js";
import { html, svg } from "../charts/svg.js";

const LONGEST_LABEL = 11;

function cut(text) {
  const characters = [...text];
  return characters.length > LONGEST_LABEL ? `${characters.slice(0, LONGEST_LABEL - 1).join("")}…` : text;
}

/** `change` draws the difference to the layer without positions. */
export function drawAttention(container, { layer, words, scheme, plain }, head, change) {
  const note = document.getElementById("attention-note");
  note.textContent = layer?.place?.forced ? `${scheme.name} is for causal models, so the later words are hidden here.` : "";
  if (!layer || layer.refusal) {
    container.replaceChildren(html("p", { class: "empty" }, layer ? layer.refusal : "Type a sentence."));
    return;
  }
  const own = Math.min(head, layer.attention.length - 1);
  const before = change ? plain().attention[own] : null;
  const weights = layer.attention[own].map((row, i) => row.map((value, j) => (value === null || !change ? value : value - before[i][j])));
  const count = words.length;
  const size = Math.min(Math.max(count * 34 + 110, 220), 420);
  const every = Math.ceil(count / ((size - 100) / 13));
  const names = words.map(({ text }, i) => [i, i % every ? "" : cut(text)]);
  const { chart, numbers } = drawHeatmap(container, {
    rows: count,
    columns: count,
    value: (query, key) => weights[query][key],
    signed: change,
    xTicks: names.map(([i]) => [i, ""]),
    yTicks: names,
    xLabel: "",
    yLabel: "",
    height: size,
    margin: { left: 84, right: count > 8 ? 44 : 12, bottom: 14, top: 78 },
    label: `${change ? "Change of the attention" : "Attention"} of head ${own + 1}: ${strongest(layer.attention[own], words)}`,
    tell: (query, key) => `“${words[query].text}” looks at “${words[key].text}”`,
  });
  const { root, sx, sy, edge, inner } = chart;
  for (const [i, text] of names) {
    root.append(svg("text", { class: "tick", transform: `translate(${sx(i) + 3} ${edge.top - 6}) rotate(-50)` }, text));
  }
  root.append(svg("text", { class: "axis-label", x: 4, y: edge.top - 6 }, "looks at →"));
  if (inner.width / count < 34 || count > 12) return;
  const over = svg("svg", { class: "cells", width: chart.width, height: chart.height, "aria-hidden": "true" });
  const largest = Math.max(...numbers.flat().map((one) => Math.abs(one ?? 0)));
  numbers.forEach((row, i) =>
    row.forEach((value, j) => {
      if (value === null) return;
      const className = Math.abs(value) > 0.45 * largest ? "cell strong" : "cell";
      over.append(svg("text", { class: className, x: sx(j), y: sy(i) + 4, "text-anchor": "middle" }, value.toFixed(2).replace(/^(-?)0/, "$1").replace("-", "−")));
    }),
  );
  container.insertBefore(over, container.querySelector(".readout"));
}

function strongest(weights, words) {
  return words
    .slice(0, 12)
    .map(({ text }, i) => {
      const row = weights[i].map((value) => value ?? 0);
      return `${text} looks most at ${words[row.indexOf(Math.max(...row))].text}`;
    })
    .join(", ");
}

// The attention weights of the random layer on the reader's sentence.

import { columns, layersInstead } from "../charts/columns.js";
import { drawHeatmap, isLight } from "../charts/heatmap.js";
import { html, svg } from "../charts/svg.js";

const LONGEST_LABEL = 11;

function cut(text) {
  const characters = [...text];
  return characters.length > LONGEST_LABEL ? `${characters.slice(0, LONGEST_LABEL - 1).join("")}…` : text;
}

/** The weights of one head by query and key; with `change`, what they differ by from a layer without positions. */
function weightsOf({ layer, plain }, head, change) {
  if (!layer?.attention) return null;
  const own = Math.min(head, layer.attention.length - 1);
  const before = change ? plain().attention[own] : null;
  return layer.attention[own].map((row, i) => row.map((value, j) => (value === null || !change ? value : value - before[i][j])));
}

/** `change` draws the difference to the layer without positions. */
export function drawAttention(container, views, head, change, restore) {
  const [{ forced }] = views;
  document.getElementById("attention-note").textContent = forced ? `${forced} is for causal models, so later words are hidden on this page.` : "";
  const weights = views.map((view) => weightsOf(view, head, change));
  const most = (all) => Math.max(...all.flat(2).map((value) => Math.abs(value ?? 0)));
  columns(container, views).forEach((box, i) => {
    const chart = html("div", { class: "chart" });
    box.append(chart);
    if (weights[i]) drawWeights(chart, views[i], weights[i], { head, change, limit: most(views[0].state.same ? weights : [weights[i]]) });
    else box.replaceChildren(instead(views[i], restore));
  });
}

/** What stands in the place of the weights where there are none. */
function instead({ layer }, restore) {
  if (layer?.layers) return layersInstead(layer);
  const box = html("div", { class: "empty" }, html("p", {}, layer ? `${layer.refusal}.`.replace("..", ".") : "Type a sentence."));
  if (layer?.sentence) {
    const button = html("button", { type: "button" }, "Use this sentence");
    button.addEventListener("click", () => restore(layer.sentence, layer.heads));
    box.append(html("p", {}, "The library computed it for this page; other words need the library."), button);
  }
  return box;
}

function drawWeights(container, { layer, words }, weights, { head, change, limit }) {
  const own = Math.min(head, layer.attention.length - 1);
  const count = words.length;
  const narrow = container.clientWidth < 420;
  const left = narrow ? 70 : 84;
  const size = Math.min(Math.max(count * 34 + 110, 220), 420);
  const every = Math.ceil(count / ((size - 100) / 13));
  const names = words.map(({ text }, i) => [i, i % every ? "" : cut(text)]);
  const { chart, numbers, color } = drawHeatmap(container, {
    rows: count,
    columns: count,
    value: (query, key) => weights[query][key],
    signed: change,
    limit,
    xTicks: names.map(([i]) => [i, ""]),
    yTicks: names,
    xLabel: "",
    yLabel: "",
    height: size,
    // The slanted names of the last words need room on the right.
    margin: { left, right: 44, bottom: 14, top: 78 },
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
  numbers.forEach((row, i) =>
    row.forEach((value, j) => {
      if (value === null) return;
      const className = isLight(color(value)) ? "cell on-light" : "cell on-dark";
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

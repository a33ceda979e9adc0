// The dog test in a pretrained model, layer by layer: numbers that the library measured (data/dog_minilm.json).

import { drawLines } from "../charts/lines.js";
import { svg } from "../charts/svg.js";

const FLOOR = -5.6;
const height = (value) => (value > 0 ? Math.log10(value) : FLOOR);

export function drawMinilm(container, { data, scheme }) {
  const { distances, layers } = data.minilm;
  const own = distances[scheme.name];
  const names = Object.keys(distances).filter((name) => !["native", "none", scheme.name].includes(name));
  const points = (name) => distances[name].map((value, layer) => [layer, height(value)]);
  const series = names.map((name) => ({ text: name, points: points(name), color: "var(--muted-line)", width: 1.2 }));
  series.push({ text: "none", points: points("none"), color: "var(--series-7)", dash: "2 3" });
  series.push({ text: "MiniLM’s own learned table", points: points("native"), color: "var(--series-6)", dash: "7 3" });
  if (own && scheme.name !== "none") series.push({ text: scheme.name, points: points(scheme.name), color: "var(--accent)", width: 3 });
  const chart = drawLines(container, {
    series,
    x: [0, layers],
    y: [FLOOR, 0.5],
    xTicks: Array.from({ length: layers + 1 }, (_, layer) => [layer, String(layer)]),
    yTicks: [[0, "1"], [-1, "0.1"], [-2, "0.01"], [-3, "0.001"], [-4, "0.0001"], [FLOOR, "0"]],
    xLabel: "layer (0: embeddings)",
    yLabel: "distance of the two dogs",
    height: 310,
    margin: { left: 68 },
    legend: false,
    label: `Distance of the two dogs by layer of MiniLM; with ${scheme.name}: ${own ? own.join(", ") : "not measured"}`,
  });
  label(chart, "none", 0.1, FLOOR + 0.22, "var(--text-soft)");
  label(chart, "own learned table", layers, height(distances.native[layers]) + 0.2, "var(--series-6-text)", "end");
  if (own && scheme.name !== "none") {
    const below = Math.abs(height(own[layers]) - height(distances.native[layers])) < 0.45 ? -0.5 : 0.22;
    label(chart, scheme.name, layers, height(own[layers]) + below, "var(--accent-text)", "end");
  }
  document.getElementById("minilm-note").textContent = own
    ? `Thick: ${scheme.name}, patched into the pretrained model without training. Thin grey: the other schemes.`
    : `${scheme.name} was not measured here${data.library.schemes[scheme.name].causal_only ? ": MiniLM reads both ways, and this scheme is for causal models" : ""}. Thin grey: the other schemes.`;
}

function label({ root, sx, sy }, text, x, y, color, anchor = "start") {
  root.append(svg("text", { class: "direct", x: sx(x), y: sy(y), style: `fill: ${color}`, "text-anchor": anchor }, text));
}

// The dog test in a pretrained model, layer by layer: numbers that the library measured (data/dog_minilm.json).

import { drawLines } from "../charts/lines.js";
import { svg } from "../charts/svg.js";

const FLOOR = -5.6;
/** Of the lines and names of the chosen schemes. */
const COLORS = ["var(--accent)", "var(--warm)"];
const TEXT_COLORS = ["var(--accent-text)", "var(--warm-text)"];
const height = (value) => (value > 0 ? Math.log10(value) : FLOOR);

export function drawMinilm(container, views) {
  const { data } = views[0];
  const { distances, layers } = data.minilm;
  const chosen = [...new Set(views.map(({ scheme }) => scheme.name))];
  const shown = chosen.filter((name) => distances[name] && name !== "none");
  const names = Object.keys(distances).filter((name) => !["native", "none", ...chosen].includes(name));
  const points = (name) => distances[name].map((value, layer) => [layer, height(value)]);
  const series = names.map((name) => ({ text: name, points: points(name), color: "var(--muted-line)", width: 1.2 }));
  series.push({ text: "none", points: points("none"), color: "var(--series-7)", dash: "2 3" });
  series.push({ text: "MiniLM’s own learned table", points: points("native"), color: "var(--series-6)", dash: "7 3" });
  shown.forEach((name) => series.push({ text: name, points: points(name), color: COLORS[chosen.indexOf(name)], width: 3 }));
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
    label: `Distance of the two dogs by layer of MiniLM; ${chosen.map((name) => `with ${name}: ${distances[name]?.join(", ") ?? "not measured"}`).join("; ")}`,
  });
  label(chart, "none", 0.1, FLOOR + 0.22, "var(--text-soft)");
  // The names at the right end are kept apart from one another.
  const ends = [["own learned table", distances.native[layers], "var(--series-6-text)"]];
  shown.forEach((name) => ends.push([name, distances[name][layers], TEXT_COLORS[chosen.indexOf(name)]]));
  let below = Infinity;
  for (const [text, value, color] of ends.sort((a, b) => b[1] - a[1])) {
    below = Math.max(Math.min(height(value) + 0.2, below - 0.34), FLOOR + 0.22);
    label(chart, text, layers, below, color, "end");
  }
  const note = (name) => {
    if (distances[name]) return `Thick: ${name}, patched into the pretrained model without training.`;
    const why = data.library.schemes[name].causal_only ? ": MiniLM reads both ways, and this scheme is for causal models" : "";
    return `${name} was not measured here${why}.`;
  };
  document.getElementById("minilm-note").textContent = `${chosen.map(note).join(" ")} Thin grey: the other schemes.`;
}

function label({ root, sx, sy }, text, x, y, color, anchor = "start") {
  root.append(svg("text", { class: "direct", x: sx(x), y: sy(y), style: `fill: ${color}`, "text-anchor": anchor }, text));
}

// How the effect of positions changes with the distance between two words.

import { drawLines } from "../charts/lines.js";
import { html, seriesColor } from "../charts/svg.js";
import { HEAD_DIM, HIDDEN } from "../model.js";
import { dot, range } from "../numbers.js";

const AWAY = -1000;
/** What to look at, by what the scheme acts on. */
const LOOK = {
  added: "A peak at 0 means that near positions are alike; a slope without end means that the vectors only get longer.",
  rotation: "The higher the line, the better a word matches an equal word at that distance. The wiggles come from pairs that turn at different speeds.",
  bias: "Only differences within a line matter: where it is higher, the head looks more.",
};

/** The mean product of a query with an equal key, in units of its value at distance 0: sum of cosines over the pairs. */
export function rotationProduct(rotation, query, key) {
  const { frequencies, factor = 1, strength } = rotation;
  const turning = frequencies.reduce(
    (sum, frequency, m) => sum + Math.cos((query - key) * frequency) * Math.exp(strength ? strength.decay[m] * (query - key) : 0),
    0,
  );
  return (turning * factor ** 2 + (HEAD_DIM / 2 - frequencies.length)) / (HEAD_DIM / 2);
}

/** The curves of a scheme, by what it acts on: `[{quantity, unit, lines: [[distance, value]...] by head}]`. */
export function decayCurves({ parts, place }) {
  const last = place.length - 1;
  const query = place.causal ? last : Math.floor(last / 2);
  const keys = range(place.causal ? last + 1 : place.length).filter((key) => !(parts.reach <= Math.max(key, query) && parts.added));
  const at = (key) => (parts.pair ? parts.pair(query, key) : [query, key]);
  const over = (value) => keys.map((key) => [key - query, value(key)]);
  const curves = [];
  if (parts.added && parts.added(query) !== null) {
    const own = parts.added(query);
    curves.push({ name: "added", yLabel: "product / 64", text: "product of the two position vectors, divided by their width",
                  lines: [over((key) => dot(own, parts.added(key)) / HIDDEN)] });
  }
  if (parts.rotation) {
    curves.push({ name: "rotation", yLabel: "mean product", text: "product of a query with an equal key, on average over random queries (1 at distance 0 without a scaling)",
                  lines: [over((key) => rotationProduct(parts.rotation, ...at(key)))] });
  }
  if (parts.bias) {
    curves.push({ name: "bias", yLabel: "bias", text: "number added to the attention logit, one line per head",
                  lines: range(place.heads).map((head) => over((key) => parts.bias(head, ...at(key))).filter(([, value]) => value > AWAY)) });
  }
  return curves;
}

export function drawDecay(container, view) {
  const curves = decayCurves(view);
  container.replaceChildren();
  if (curves.length === 0) {
    const why = view.parts.reach ? "The position in the middle has no vector here: " + view.parts.reachReason : "";
    container.append(html("p", { class: "empty" }, why || "Nothing depends on distance: there is no line to draw. That is the problem."));
  }
  const others = view.reference ? decayCurves({ parts: view.reference.parts, place: view.place }) : [];
  for (const { yLabel, text, lines, name } of curves) {
    const box = html("div", { class: "chart", "data-chart": name });
    container.append(box);
    const xs = lines.flat().map(([x]) => x);
    const series = lines.map((points, head) => ({ text: `head ${head + 1}`, points, color: seriesColor(head) }));
    if (lines.length === 1) Object.assign(series[0], { text: view.scheme.name, color: "var(--accent)" });
    const other = others.find((one) => one.name === name);
    // A second line for every head would hide the first ones.
    if (other && lines.length === 1) series.unshift({ text: view.reference.text, points: other.lines[0], color: "var(--series-8)", dash: "5 3" });
    drawLines(box, {
      series,
      x: [Math.min(...xs, -1), Math.max(...xs, 0)],
      xLabel: "key position − query position (tokens)",
      yLabel,
      height: curves.length > 1 ? 190 : 320,
      label: `${text}, over distance`,
    });
    box.append(html("p", { class: "caption" }, curves.length > 1 ? `Above: ${text}. ${LOOK[name]}` : LOOK[name]));
  }
  document.getElementById("decay-what").textContent = curves.length === 1 ? `Drawn: ${curves[0].text}.` : "";
}

// How the effect of positions changes with the distance between two words.

import { columns, layersInstead, sentences } from "../charts/columns.js";
import { drawLines, limits } from "../charts/lines.js";
import { html, seriesColor } from "../charts/svg.js";
import { HEAD_DIM, HIDDEN } from "../model.js";
import { dot, range } from "../numbers.js";

const AWAY = -1000;
/** By what the scheme acts on: the quantity, its axis, and what to look at. */
const CURVES = {
  added: {
    yLabel: "product / 64",
    text: "product of the two position vectors, divided by their width",
    look: "A peak at 0 means that near positions are alike; a slope without end means that the vectors only get longer.",
  },
  rotation: {
    yLabel: "mean product",
    text: "product of a query with an equal key, on average over random queries (1 at distance 0 without a scaling)",
    look: "The higher the line, the better a word matches an equal word at that distance. The wiggles come from pairs that turn at different speeds.",
  },
  bias: {
    yLabel: "bias",
    text: "number added to the attention logit, one line per head",
    look: "Only differences within a line matter: where it is higher, the head looks more.",
  },
  scale: {
    yLabel: "factor",
    xLabel: "position of the query",
    text: "number that all logits of a query are multiplied by, over its position",
    look: "A larger factor makes the attention sharper. It is the same for all keys of a query, so it tells no word from another. Without a causal mask all queries see the same number of keys.",
  },
  positions: {
    yLabel: "position used",
    xLabel: "position of the word",
    text: "position that the other scheme is told, over the position of the word",
    look: "Where the line is not a straight diagonal, words are told other positions than their own.",
  },
};
const DISTANCE = "key − query position (tokens)";

/** The mean product of a query with an equal key, in units of its value at distance 0: sum of cosines over the pairs. */
export function rotationProduct(rotation, query, key) {
  const { frequencies, factor = 1, strength } = rotation;
  const turning = frequencies.reduce(
    (sum, frequency, m) => sum + Math.cos((query - key) * frequency) * Math.exp(strength ? strength.decay[m] * (query - key) : 0),
    0,
  );
  return (turning * factor ** 2 + (HEAD_DIM / 2 - frequencies.length)) / (HEAD_DIM / 2);
}

/** The curves of a scheme, by what it acts on: `[{name, lines: [[x, y]...] by head, titles}]`. */
export function decayCurves({ parts, place }) {
  if (parts.recorded) return parts.recorded.curves;
  if (parts.layers) return [];
  const last = place.length - 1;
  const query = place.causal ? last : Math.floor(last / 2);
  const keys = range(place.causal ? last + 1 : place.length).filter((key) => !(parts.reach <= Math.max(key, query) && parts.added));
  const at = (key) => (parts.pair ? parts.pair(query, key) : [query, key]);
  const over = (value) => keys.map((key) => [key - query, value(key)]);
  const curves = [];
  if (parts.added && parts.added(query) !== null) {
    const own = parts.added(query);
    curves.push({ name: "added", lines: [over((key) => dot(own, parts.added(key)) / HIDDEN)] });
  }
  if (parts.rotation) curves.push({ name: "rotation", lines: [over((key) => rotationProduct(parts.rotation, ...at(key)))] });
  if (parts.bias) {
    const line = (head) => over((key) => parts.bias(head, ...at(key))).filter(([, value]) => value > AWAY);
    curves.push({ name: "bias", lines: range(place.heads).map(line) });
  }
  return curves;
}

/** The limits of both axes by name of a curve, over all schemes that are shown. */
function sharedLimits(curves) {
  const limitsOf = {};
  const distances = curves.filter(({ name }) => !CURVES[name].xLabel);
  for (const { name } of curves) {
    const same = curves.filter((one) => one.name === name);
    const xs = (CURVES[name].xLabel ? same : distances).flatMap(({ lines }) => lines.flat().map(([x]) => x));
    limitsOf[name] = { x: [Math.min(...xs, -1 * !CURVES[name].xLabel), Math.max(...xs, 0)], y: limits(same.flatMap(({ lines }) => lines.flat().map(([, y]) => y))) };
  }
  return limitsOf;
}

export function drawDecay(container, views) {
  const found = views.map(decayCurves);
  // A second line for every head would hide the first ones.
  const single = (i, name) => found[i].some((one) => one.name === name && one.lines.length === 1);
  const others = views.map(({ reference, place }, i) => (reference ? decayCurves({ parts: reference.parts, place }).filter(({ name }) => single(i, name)) : []));
  const own = views.map((_, i) => [...found[i], ...others[i]]);
  const { same } = views[0].state;
  const boxes = columns(container, views);
  views.forEach((view, i) => drawCurves(boxes[i], view, found[i], others[i], sharedLimits(same ? own.flat() : own[i])));
  const drawn = sentences(views, ({ parts }) => (parts.recorded?.readsWords ? "The words matter too: this is one text of 64 random words." : ""));
  const names = [...new Set(found.flat().map(({ name }) => name))];
  document.getElementById("decay-what").textContent = [names.length === 1 ? `Drawn: ${CURVES[names[0]].text}.` : "", drawn].join(" ");
}

function drawCurves(container, view, curves, others, shared) {
  if (view.parts.layers) {
    container.append(layersInstead(view.parts));
    return;
  }
  if (curves.length === 0) {
    const why = view.parts.reach ? "The position in the middle has no vector here: " + view.parts.reachReason : "";
    container.append(html("p", { class: "empty" }, why || "Nothing depends on distance: there is no line to draw. That is the problem."));
  }
  for (const { name, lines, titles } of curves) {
    const { xLabel = DISTANCE, yLabel, text, look } = CURVES[name];
    const box = html("div", { class: "chart", "data-chart": name });
    container.append(box);
    const series = lines.map((points, head) => ({ text: titles?.[head] ?? `head ${head + 1}`, points, color: seriesColor(head) }));
    if (lines.length === 1) Object.assign(series[0], { text: titles?.[0] ?? view.scheme.name, color: "var(--accent)" });
    const other = others.find((one) => one.name === name);
    if (other) series.unshift({ text: view.reference.text, points: other.lines[0], color: "var(--series-8)", dash: "5 3" });
    drawLines(box, { series, ...shared[name], xLabel, yLabel, height: curves.length > 1 ? 190 : 320, label: `${text}, over ${CURVES[name].xLabel ? "position" : "distance"}` });
    box.append(html("p", { class: "caption" }, curves.length > 1 ? `Above: ${text}. ${look}` : look));
  }
}

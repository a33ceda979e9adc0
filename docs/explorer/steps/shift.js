import { frame, short, svg } from "../charts/svg.js";
import { wordVector } from "../model.js";
import { dot, length } from "../numbers.js";

export function drawShift(container, { parts, words }, position) {
  const whole = parts.added(1);
  const unit = whole.map((value) => value / length(whole));
  const word = wordVector(words[0]?.key ?? "dog");
  const along = dot(word, unit);
  const across = Math.sqrt(Math.max(dot(word, word) - along ** 2, 0));
  const push = (p) => dot(parts.added(p), unit);
  const far = Math.max(push(position) * 1.15, 14);
  const chart = frame(container, {
    x: [Math.min(along, 0) - far * 0.05, far + Math.max(along, 0)],
    y: [0, Math.max(far * 0.5, 12)],
    xLabel: "along the direction of the positions",
    yLabel: "all other directions",
    height: 300,
    label: `The vector of a word at position ${Math.round(position)}`,
  });
  const { root, sx, sy } = chart;
  for (let p = 0; p <= position; p++) root.append(svg("circle", { class: "trail", cx: sx(along + push(p)), cy: sy(across), r: 2.5 }));
  const arrow = (x0, y0, x1, y1, name) => root.append(svg("line", { class: name, x1: sx(x0), y1: sy(y0), x2: sx(x1), y2: sy(y1), "marker-end": "url(#tip)" }));
  arrow(0, 0, along, across, "arrow soft");
  arrow(along, across, along + push(position), across, "arrow dashed");
  arrow(0, 0, along + push(position), across, "arrow strong");
  root.append(svg("circle", { class: "dot", cx: sx(along + push(position)), cy: sy(across), r: 5 }));
  return `Position ${Math.round(position)}: pushed by ${short(push(Math.round(position)))}. The word itself has the length ${short(length(word))}.`;
}

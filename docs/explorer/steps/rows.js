import { drawLines } from "../charts/lines.js";
import { html, short } from "../charts/svg.js";
import { dot, length } from "../numbers.js";

export function drawRows(container, { parts }, position) {
  const p = Math.round(position);
  const [row, next] = [parts.added(p), parts.added(p + 1)];
  if (row === null) {
    container.replaceChildren(html("p", { class: "empty" }, `There is no row for position ${p}. ${parts.reachReason}`));
    return `Position ${p}: the model stops with an error.`;
  }
  const line = (values) => [...values].map((value, c) => [c, value]);
  const series = [{ text: `position ${p}`, points: line(row), color: "var(--accent)", width: 2.4 }];
  if (next) series.push({ text: `position ${p + 1}`, points: line(next), color: "var(--series-2)", dash: "5 3" });
  drawLines(container, {
    series, x: [0, row.length - 1], xLabel: "dimension", yLabel: "value added", height: 300,
    label: `The rows of positions ${p} and ${p + 1} of the table`,
  });
  if (!next) return `Position ${p} is the last row of the table.`;
  return `The rows of positions ${p} and ${p + 1} have a cosine similarity of ${short(dot(row, next) / (length(row) * length(next)))} (1: same direction, 0: unrelated).`;
}

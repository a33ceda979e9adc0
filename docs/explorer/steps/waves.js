import { drawLines } from "../charts/lines.js";
import { short, svg } from "../charts/svg.js";
import { range } from "../numbers.js";

const DIMENSIONS = [0, 21];

export function drawWaves(container, { parts, place }, position) {
  const most = place.length - 1;
  // Four points per position, so that the fastest wave is round. Formulas accept real positions.
  const points = (c) => range(most * 4 + 1).map((i) => [i / 4, parts.added(i / 4)[c]]);
  const chart = drawLines(container, {
    series: DIMENSIONS.map((c) => ({ text: `dimension ${c}`, points: points(c) })),
    x: [0, most],
    xLabel: "position",
    yLabel: "value added",
    height: 300,
    marker: position,
    label: "Two dimensions of the position vector over positions",
  });
  const now = parts.added(position);
  DIMENSIONS.forEach((c, i) =>
    chart.root.append(svg("circle", { class: "dot", style: `fill: var(--series-${i + 1})`, cx: chart.sx(position), cy: chart.sy(now[c]), r: 5.5 })),
  );
  const exact = parts.added(Math.round(position));
  return `Position ${Math.round(position)}: dimension 0 is ${short(exact[0])}, dimension 21 is ${short(exact[21])}. The fast wave tells neighbours apart, the slow one tells near from far.`;
}

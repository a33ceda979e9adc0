// Lines over a number axis.

import { frame, legend, seriesColor, svg } from "./svg.js";

/**
 * @param container
 * @param {{series: {text: string, points: number[][], color?: string, dash?: string, width?: number}[]}} settings
 *   and those of `frame`; limits of y are taken from the points if they are missing. `marker` draws a vertical line.
 */
export function drawLines(container, settings) {
  const { series } = settings;
  const y = settings.y ?? limits(series.flatMap(({ points }) => points.map((point) => point[1])));
  const chart = frame(container, { ...settings, y });
  const { root, sx, sy } = chart;
  if (y[0] < 0 && y[1] > 0) root.append(svg("line", { class: "zero", x1: chart.edge.left, x2: chart.width - chart.edge.right, y1: sy(0), y2: sy(0) }));
  series.forEach((one, index) => {
    const path = one.points.map(([px, py], i) => `${i && !one.gaps?.has(i) ? "L" : "M"}${sx(px).toFixed(2)} ${sy(py).toFixed(2)}`).join("");
    root.append(
      svg("path", {
        class: "series", d: path, style: `stroke: ${one.color ?? seriesColor(index)}; stroke-width: ${one.width ?? 2}`,
        "stroke-dasharray": one.dash ?? "none", opacity: one.opacity ?? 1,
      }),
    );
  });
  if (settings.marker !== undefined) {
    root.append(svg("line", { class: "marker", x1: sx(settings.marker), x2: sx(settings.marker), y1: chart.edge.top, y2: chart.height - chart.edge.bottom }));
  }
  if (settings.legend !== false && series.length > 1) {
    legend(container, series.map((one, index) => ({ text: one.text, color: one.color ?? seriesColor(index), dash: one.dash })));
  }
  return chart;
}

/** Limits with a margin, around zero if all values are equal. */
export function limits(values) {
  const low = Math.min(0, ...values);
  const high = Math.max(0, ...values);
  if (low === high) return [-1, 1];
  const margin = (high - low) * 0.06;
  return [low < 0 ? low - margin : 0, high > 0 ? high + margin : 0];
}

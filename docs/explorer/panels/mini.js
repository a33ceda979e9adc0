// A glance at the result beside the options, where the panels are further down the page.

import { seriesColor, short, svg } from "../charts/svg.js";
import { limits } from "../charts/lines.js";
import { decayCurves } from "./decay.js";

const [WIDTH, HEIGHT] = [120, 40];

export function drawMini(container, view) {
  const lines = decayCurves(view).at(-1)?.lines.filter((points) => points.length > 1) ?? [];
  const root = svg("svg", { width: WIDTH, height: HEIGHT });
  const [low, high] = limits(lines.flat().map(([, y]) => y));
  const xs = lines.flat().map(([x]) => x);
  const [first, last] = [Math.min(...xs), Math.max(...xs)];
  lines.forEach((points, head) => {
    const path = points.map(([x, y]) => `${(((x - first) / (last - first)) * WIDTH).toFixed(1)} ${(HEIGHT * (1 - (y - low) / (high - low))).toFixed(1)}`);
    const color = lines.length === 1 ? "var(--accent)" : seriesColor(head);
    root.append(svg("path", { class: "series", d: `M${path.join("L")}`, style: `stroke: ${color}` }));
  });
  const distance = view.dog?.distance ?? null;
  const text = document.createElement("span");
  text.textContent = distance === null ? "effect over distance" : `over distance; the two words: ${short(distance)}`;
  container.replaceChildren(...(lines.length ? [root] : []), text);
}

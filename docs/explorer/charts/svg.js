// Axes and other parts that all charts share. Colours are CSS variables, so that themes need no redraw.

const NAMESPACE = "http://www.w3.org/2000/svg";

export function svg(name, attributes = {}, ...children) {
  const node = document.createElementNS(NAMESPACE, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

export function html(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

/** A number with at most three significant digits, as short as possible. */
export function short(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-3) return value.toExponential(1).replace("e+", "e");
  return String(Number(value.toPrecision(3)));
}

/** Round numbers between two limits, about `count` of them. */
export function ticks(low, high, count = 5) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(Number((i * step).toPrecision(12)));
  return found;
}

/**
 * Empties a container and returns an SVG with axes that fills its width.
 *
 * @param container
 * @param {{x: number[], y: number[], xLabel: string, yLabel: string, height: number, label: string}} settings
 *   `x` and `y` are the limits; `xTicks` and `yTicks` may replace the ticks by [value, text] pairs.
 */
export function frame(container, settings) {
  const { x, y, xLabel, yLabel, height = 220, label, margin = {} } = settings;
  const width = Math.max(container.clientWidth, 200);
  const edge = { left: 62, right: 12, top: 10, bottom: 40, ...margin };
  const inner = { width: width - edge.left - edge.right, height: height - edge.top - edge.bottom };
  const sx = (value) => edge.left + ((value - x[0]) / (x[1] - x[0])) * inner.width;
  const sy = (value) => edge.top + inner.height - ((value - y[0]) / (y[1] - y[0])) * inner.height;
  const root = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  const withText = (given, values) => given ?? values.map((value) => [value, short(value)]);
  for (const [value, text] of withText(settings.yTicks, ticks(Math.min(...y), Math.max(...y)))) {
    root.append(svg("line", { class: "grid", x1: edge.left, x2: width - edge.right, y1: sy(value), y2: sy(value) }));
    root.append(svg("text", { class: "tick", x: edge.left - 6, y: sy(value) + 4, "text-anchor": "end" }, text));
  }
  for (const [value, text] of withText(settings.xTicks, ticks(...x, width < 420 ? 4 : 8))) {
    root.append(svg("line", { class: "tickmark", x1: sx(value), x2: sx(value), y1: height - edge.bottom, y2: height - edge.bottom + 4 }));
    root.append(svg("text", { class: "tick", x: sx(value), y: height - edge.bottom + 17, "text-anchor": "middle" }, text));
  }
  root.append(svg("line", { class: "axis", x1: edge.left, x2: width - edge.right, y1: height - edge.bottom, y2: height - edge.bottom }));
  root.append(svg("text", { class: "axis-label", x: edge.left + inner.width / 2, y: height - 5, "text-anchor": "middle" }, xLabel));
  if (yLabel) {
    const middle = edge.top + inner.height / 2;
    root.append(svg("text", { class: "axis-label", transform: `translate(10 ${middle}) rotate(-90)`, "text-anchor": "middle" }, yLabel));
  }
  container.replaceChildren(root);
  return { root, sx, sy, width, height, edge, inner };
}

/** A legend of lines or points below a chart. */
export function legend(container, entries) {
  const list = html("ul", { class: "legend" });
  for (const { text, color, dash } of entries) {
    const line = svg("svg", { width: 22, height: 10, "aria-hidden": "true" },
      svg("line", { x1: 1, x2: 21, y1: 5, y2: 5, style: `stroke: ${color}`, class: "series", "stroke-dasharray": dash ?? "none" }));
    list.append(html("li", {}, line, text));
  }
  container.append(list);
}

/** The colour of a series, by its number. Past eight, dashes tell lines apart. */
export function seriesColor(index) {
  return `var(--series-${(index % 8) + 1})`;
}

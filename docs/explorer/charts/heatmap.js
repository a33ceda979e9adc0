// Colour maps of numbers on a canvas, with axes around it.

import { frame, html, short } from "./svg.js";

/** The red, green and blue of a CSS variable in the current theme. */
function themeColor(container, name) {
  const probe = html("span", { style: `color: var(${name}); display: none` });
  container.append(probe);
  const numbers = getComputedStyle(probe).color.match(/[\d.]+/g).map(Number);
  probe.remove();
  return numbers.slice(0, 3);
}

function mixed(from, to, share) {
  return from.map((value, i) => Math.round(value + (to[i] - value) * share));
}

/** A function from numbers to colours: around zero if `signed`, else from zero up. `null` is the colour of hidden pairs. */
export function colorScale(container, limit, signed) {
  const zero = themeColor(container, "--heat-zero");
  const high = themeColor(container, "--heat-high");
  const low = themeColor(container, "--heat-low");
  const hidden = themeColor(container, "--heat-hidden");
  return (value) => {
    if (value === null || Number.isNaN(value)) return hidden;
    const share = Math.min(Math.abs(value) / (limit || 1), 1);
    return mixed(zero, value < 0 && signed ? low : high, share);
  };
}

/** Whether black can be read better than white on a colour. */
export function isLight(color) {
  const linear = color.map((part) => part / 255).map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] > 0.19;
}

/**
 * @param container
 * @param {{rows: number, columns: number, value: (row: number, column: number) => number | null, signed: boolean}} settings
 *   and those of `frame` without limits. Row 0 is at the top. `names` of rows and columns replace the numbers.
 * @returns the chart, the numbers, the colours of numbers, and the magnitude at which the colour is full.
 */
export function drawHeatmap(container, settings) {
  const { rows, columns, value, signed = true } = settings;
  const numbers = Array.from({ length: rows }, (_, r) => Array.from({ length: columns }, (_, c) => value(r, c)));
  const seen = numbers.flat().filter((one) => one !== null);
  const limit = settings.limit ?? seen.reduce((most, one) => Math.max(most, Math.abs(one)), 0);
  const chart = frame(container, { ...settings, x: [-0.5, columns - 0.5], y: [rows - 0.5, -0.5] });
  chart.root.querySelectorAll(".grid").forEach((line) => line.remove());
  const small = html("canvas", { width: columns, height: rows, class: "heat", "aria-hidden": "true" });
  const context = small.getContext("2d");
  const image = context.createImageData(columns, rows);
  const color = colorScale(container, limit, signed);
  numbers.flat().forEach((one, i) => image.data.set([...color(one), 255], 4 * i));
  context.putImageData(image, 0, 0);
  Object.assign(small.style, {
    left: `${chart.edge.left}px`, top: `${chart.edge.top}px`, width: `${chart.inner.width}px`, height: `${chart.inner.height}px`,
  });
  const readout = html("p", { class: "readout", "aria-hidden": "true" }, colorKey(limit, signed));
  const idle = [...readout.childNodes];
  small.addEventListener("pointermove", (event) => {
    const column = Math.min(Math.floor((event.offsetX / small.clientWidth) * columns), columns - 1);
    const row = Math.min(Math.floor((event.offsetY / small.clientHeight) * rows), rows - 1);
    if (row < 0 || column < 0) return;
    const one = numbers[row][column];
    readout.replaceChildren(`${settings.tell(row, column)}: ${one === null ? "hidden" : short(one)}`);
  });
  small.addEventListener("pointerleave", () => readout.replaceChildren(...idle));
  container.append(small, readout);
  return { chart, limit, numbers, color };
}

function colorKey(limit, signed) {
  const key = html("span", { class: "key" });
  const ramp = html("span", { class: signed ? "ramp signed" : "ramp" });
  key.append(signed ? `−${short(limit)}` : "0", ramp, short(limit));
  return key;
}

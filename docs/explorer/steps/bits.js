import { html, svg } from "../charts/svg.js";

const flips = (p, bits) => [...Array(bits).keys()].filter((b) => ((p >> b) & 1) !== (((p - 1) >> b) & 1));

export function drawBits(container, { options, place }, position) {
  const p = Math.round(position);
  const { bits } = options;
  const width = Math.max(container.clientWidth, 200);
  const size = Math.min((width - 20) / bits, 64);
  const left = (width - size * bits) / 2;
  const root = svg("svg", { width, height: 300, role: "img", "aria-label": `Position ${p} in binary digits` });
  const changed = p > 0 ? flips(p, bits) : [];
  for (let b = 0; b < bits; b++) {
    const on = (p >> b) & 1;
    const x = left + b * size;
    root.append(svg("rect", { class: `bit ${on ? "on" : "off"} ${changed.includes(b) ? "flipped" : ""}`, x: x + 3, y: 30, width: size - 6, height: size - 6, rx: 6 }));
    root.append(svg("text", { class: on ? "bit-text on" : "bit-text", x: x + size / 2, y: 30 + size / 2 + 3, "text-anchor": "middle" }, String(on)));
    root.append(svg("text", { class: "tick", x: x + size / 2, y: 20, "text-anchor": "middle" }, String(2 ** b)));
  }
  const shown = Math.min(place.length, 64, 2 ** bits);
  const step = (width - 20) / shown;
  for (let q = 1; q < shown; q++) {
    const tall = (flips(q, bits).length / bits) * 90;
    root.append(svg("rect", { class: q === p ? "flips now" : "flips", x: 10 + q * step, y: 250 - tall, width: Math.max(step - 2, 1), height: tall }));
  }
  root.append(svg("text", { class: "axis-label", x: width / 2, y: 280, "text-anchor": "middle" }, "bits that flip at each position"));
  container.replaceChildren(root);
  if (p >= 2 ** bits) return `Position ${p} is too large for ${bits} bits.`;
  const count = changed.length;
  return p === 0 ? "Position 0: all bits are off." : `From position ${p - 1} to ${p}: ${count} of ${bits} bits flip${count === 1 ? "s" : ""}.`.replace("bits flips", "bits flips");
}

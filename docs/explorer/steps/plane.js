import { short, svg } from "../charts/svg.js";

/** `settings.pair` is the pair of dimensions, `settings.distance` how far the query is after the key. */
export function drawPlane(container, { parts }, position, settings) {
  const { frequencies, layout, strength } = parts.rotation;
  const m = Math.min(settings.pair, frequencies.length - 1);
  const sign = layout === "half_reversed" ? -1 : 1;
  const width = Math.max(container.clientWidth, 200);
  const height = 300;
  // The names beside the arrows need room on both sides.
  const [cx, cy, radius] = [width / 2, height / 2, Math.min(125, width / 2 - 66)];
  const root = svg("svg", { width, height, role: "img", "aria-label": `Pair ${m}: query and key as arrows in the plane` });
  root.append(svg("circle", { class: "orbit", cx, cy, r: radius }));
  root.append(svg("line", { class: "grid", x1: cx - radius - 12, x2: cx + radius + 12, y1: cy, y2: cy }));
  root.append(svg("line", { class: "grid", x1: cx, x2: cx, y1: cy - radius - 12, y2: cy + radius + 12 }));
  const arrow = (p, isKey, name, text) => {
    const angle = sign * p * frequencies[m];
    const size = strength ? Math.exp((isKey ? -1 : 1) * (p - strength.origin) * strength.decay[m]) : 1;
    const reach = Math.min(size, 1.12) * radius * 0.97;
    const [x, y] = [cx + reach * Math.cos(angle), cy - reach * Math.sin(angle)];
    root.append(svg("line", { class: `arrow ${name}`, x1: cx, y1: cy, x2: x, y2: y }));
    root.append(svg("circle", { class: `dot ${name}`, cx: x, cy: y, r: 6 }));
    const out = 1 + 16 / Math.max(reach, 1);
    const side = Math.cos(angle) < -0.3 ? "end" : Math.cos(angle) > 0.3 ? "start" : "middle";
    root.append(svg("text", { class: `direct ${name}`, x: cx + (x - cx) * out, y: cy + (y - cy) * out + 4, "text-anchor": side }, text));
    return angle;
  };
  const keyAngle = arrow(position, true, "key-arrow", `key ${Math.round(position)}`);
  const queryAngle = arrow(position + settings.distance, false, "query-arrow", `query ${Math.round(position + settings.distance)}`);
  root.append(arc(cx, cy, radius * 0.38, keyAngle, queryAngle));
  container.replaceChildren(root);
  const between = settings.distance * frequencies[m];
  const turns = frequencies[m] === 0 ? "This pair does not turn." : `This pair needs ${short((2 * Math.PI) / frequencies[m])} positions for a turn.`;
  return `The angle between query and key is ${short((between * 180) / Math.PI)}°, at every position. ${turns}`;
}

function arc(cx, cy, r, from, to) {
  const [a, b] = from < to ? [from, to] : [to, from];
  const sweep = Math.min(b - a, 2 * Math.PI - 0.001);
  const point = (angle) => `${cx + r * Math.cos(angle)} ${cy - r * Math.sin(angle)}`;
  return svg("path", { class: "arc", d: `M${point(a)} A${r} ${r} 0 ${sweep > Math.PI ? 1 : 0} 0 ${point(a + sweep)}` });
}

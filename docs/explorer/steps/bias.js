import { drawHeatmap } from "../charts/heatmap.js";
import { short, svg } from "../charts/svg.js";
import { range, softmax } from "../numbers.js";

export function drawBias(container, { parts, place, scheme }, position) {
  const query = Math.round(position);
  const keys = range(Math.min(place.length, 64));
  const rows = range(place.heads).map((head) => {
    const seen = keys.filter((key) => !place.causal || key <= query);
    const pairOf = (key) => (parts.pair ? parts.pair(query, key) : [query, key]);
    const shares = softmax(seen.map((key) => parts.bias(head, ...pairOf(key))));
    return keys.map((key) => shares[key] ?? null);
  });
  const { chart } = drawHeatmap(container, {
    rows: place.heads,
    columns: keys.length,
    value: (head, key) => rows[head][key],
    signed: false,
    yTicks: rows.map((_, head) => [head, `head ${head + 1}`]),
    xLabel: "key position",
    yLabel: "",
    height: 275,
    margin: { left: 52, top: 24 },
    label: `Attention of the word at position ${query} ${scheme.examples ? "by the effect of positions alone" : "if all words were equal"}`,
    tell: (head, key) => `head ${head + 1} on position ${key}`,
  });
  const x = chart.sx(query);
  chart.root.append(svg("path", { class: "pointer", d: `M${x - 6} 8 L${x + 6} 8 L${x} 20 Z` }));
  const reach = rows.map((row) => row.reduce((sum, share, key) => sum + (share ?? 0) * Math.abs(key - query), 0));
  return `The word at position ${query} looks ${short(reach[0])} words away on average in head 1${place.heads > 1 ? `, and ${short(reach[place.heads - 1])} in head ${place.heads}` : ""}.`;
}

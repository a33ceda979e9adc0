import { drawLines } from "../charts/lines.js";
import { short } from "../charts/svg.js";
import { range } from "../numbers.js";

export function drawPairs(container, { parts, place }, position) {
  const query = Math.round(position);
  const keys = range(place.causal ? query + 1 : Math.min(place.length, 64));
  const used = (key) => {
    const [from, to] = parts.pair ? parts.pair(query, key) : [query, key];
    return from - to;
  };
  const most = Math.min(place.length, 64) - 1;
  drawLines(container, {
    series: [
      { text: "what the model is told", points: keys.map((key) => [query - key, used(key)]), color: "var(--accent)", width: 2.6 },
      { text: "the real distance", points: keys.map((key) => [query - key, query - key]), color: "var(--series-8)", dash: "4 3" },
    ],
    x: [place.causal ? 0 : -most, most],
    y: [place.causal ? 0 : -most, most],
    xLabel: "real distance (tokens)",
    yLabel: "distance used",
    height: 300,
    label: `Distances that are used for the query at position ${query}`,
  });
  return query === 0 ? "Position 0 is the first word." : `The word at position ${query} is really ${query} words after the first one. The model is told: ${short(used(0))}.`;
}

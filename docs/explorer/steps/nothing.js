import { svg } from "../charts/svg.js";
import { generator, hash } from "../numbers.js";

const MOST = 8;

export function drawNothing(container, { words, place }, position) {
  const p = Math.round(position);
  const width = Math.max(container.clientWidth, 200);
  const random = generator(hash(`shuffle ${p}`));
  const shown = words.slice(0, MOST).map((word) => ({ ...word, rank: p === 0 ? 0 : random() }));
  const order = p === 0 ? shown : [...shown].sort((a, b) => a.rank - b.rank);
  const sorted = [...shown].sort((a, b) => (a.key < b.key ? -1 : 1));
  const root = svg("svg", { width, height: 300, role: "img", "aria-label": "The words in a new order, and the same bag of words" });
  const line = (list, y, name, title) => {
    root.append(svg("text", { class: "axis-label", x: width / 2, y: y - 30, "text-anchor": "middle" }, title));
    list.forEach(({ text }, i) => {
      const cell = (width - 20) / list.length;
      const characters = Math.max(Math.floor(cell / 8), 2);
      const short = [...text].length > characters ? `${[...text].slice(0, characters - 1).join("")}…` : text;
      root.append(svg("rect", { class: name, x: 10 + i * cell + 3, y: y - 18, width: cell - 6, height: 34, rx: 8 }));
      root.append(svg("text", { class: "word", x: 10 + (i + 0.5) * cell, y: y + 4, "text-anchor": "middle" }, short));
    });
  };
  line(order, 90, "chip", "what was written");
  line(sorted, 220, "chip soft", place.causal ? "what the last word sees: a bag of words" : "what the layer sees: a bag of words");
  container.replaceChildren(root);
  if (place.causal) return "With a causal mask the order shows a little: each word sees only the bag of words before it.";
  return "Whatever the order, the layer computes the same output for each word.";
}

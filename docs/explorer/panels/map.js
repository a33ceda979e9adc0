// The heat maps: positions by dimensions, queries by keys, or the places of a grid.

import { columns, layersInstead, sentences } from "../charts/columns.js";
import { drawHeatmap } from "../charts/heatmap.js";
import { html } from "../charts/svg.js";
import { HIDDEN } from "../model.js";

const AWAY = -1000;
/** Rows and columns of a map of pairs, at most: more cannot be seen. */
const MOST_CELLS = 128;
const PAIRS = { xLabel: "key position", yLabel: "query position" };

/** Texts by what is drawn; `largest` fixes the end of the colours. */
const MAPS = {
  added: {
    xLabel: "dimension", yLabel: "position",
    label: "Heat map of the position vectors: one row per position, one column per dimension",
    tell: (position, c) => `position ${position}, dimension ${c}`,
    what: () => "What is added to a word: one row per position, one column per dimension. Two equal rows would be two positions that cannot be told apart.",
  },
  rotation: {
    xLabel: "pair of dimensions", yLabel: "position", largest: 1,
    label: "Heat map of the rotation: the cosine of the angle of each pair at each position",
    tell: (position, m) => `position ${position}, pair ${m}: cosine of the angle`,
    what: ({ parts, scheme }) => "The cosine of the angle by which each pair of dimensions has turned. Pairs on the left turn fast and repeat; pairs on the right hardly move."
      + (parts.pair && scheme.name !== "position_scale" ? " Pairs of far words use other positions, as the animation shows." : ""),
  },
  bias: {
    ...PAIRS,
    label: "Heat map of the bias: one row per query, one column per key",
    tell: (query, key) => `query ${query}, key ${key}`,
    what: ({ parts }, head) => `What head ${head + 1} adds to the logit of each pair of words. `
      + (parts.recorded?.readsWords ? "Speckles come from the words, which are random here." : "Equal colours along diagonals mean that only the distance counts."),
  },
  equal: {
    ...PAIRS,
    label: "Heat map of the mean product of equal queries and keys: one row per query, one column per key",
    tell: (query, key) => `query ${query}, key ${key}: mean product`,
    what: ({ parts }, head) => `The mean product of a query with an equal key in head ${head + 1}, for each pair of positions. `
      + (parts.recorded?.readsWords ? "The words between them change the angles." : "Equal colours along diagonals mean that only the distance counts."),
  },
  grid: {
    xLabel: "column of the key", yLabel: "row of the key",
    label: "Heat map of a grid: the logit of a query in the centre and an equal key at each place",
    tell: (row, column) => `row ${row}, column ${column}: logit`,
    what: (view, head) => `In a picture: how much the place in the centre of a grid of 11 rows and columns is attracted by an equal word at each place, compared with the mean of all places, in head ${head + 1}.`,
  },
};

/** The maps of a scheme: `[{name, rows, columns, value(row, column)}]`. */
function mapsOf({ parts, place, scheme }, head) {
  const hidden = (name, query, key) => place.causal && key > query && (name === "bias" || name === "equal");
  if (parts.recorded) {
    return parts.recorded.maps.map(({ name, rows, columns, at }) => ({ name, rows, columns, value: (row, column) => (hidden(name, row, column) ? null : at(head, row, column)) }));
  }
  const maps = [];
  if (parts.added) {
    const vectors = Array.from({ length: place.length }, (_, position) => parts.added(position));
    maps.push({ name: "added", rows: place.length, columns: HIDDEN, value: (position, c) => vectors[position]?.[c] ?? null });
  }
  if (parts.rotation) {
    const { frequencies } = parts.rotation;
    const used = (position) => (parts.pair && scheme.name === "position_scale" ? parts.pair(position, 0)[0] : position);
    maps.push({ name: "rotation", rows: place.length, columns: frequencies.length, value: (position, m) => Math.cos(used(position) * frequencies[m]) });
  }
  if (parts.bias) {
    const shown = Math.min(place.length, MOST_CELLS);
    const value = (query, key) => {
      if (hidden("bias", query, key)) return null;
      const bias = parts.bias(head, ...(parts.pair ? parts.pair(query, key) : [query, key]));
      return bias < AWAY ? null : bias;
    };
    maps.push({ name: "bias", rows: shown, columns: shown, value });
  }
  return maps;
}

/** Maps of the same name get the same rows, columns and colours. */
function align(maps) {
  for (const map of maps) {
    const same = maps.filter(({ name }) => name === map.name);
    map.rows = Math.min(...same.map(({ rows }) => rows));
    map.columns = Math.min(...same.map(({ columns }) => columns));
    map.limit = MAPS[map.name].largest ?? Math.max(...same.map(largest));
  }
}

function largest({ rows, columns, value }) {
  let most = 0;
  for (let row = 0; row < rows; row++) for (let column = 0; column < columns; column++) most = Math.max(most, Math.abs(value(row, column) ?? 0));
  return most;
}

export function drawMap(container, views, head) {
  const heads = views.map(({ place }) => Math.min(head, place.heads - 1));
  const found = views.map((view, i) => mapsOf(view, heads[i]));
  if (views[0].state.same) align(found.flat());
  else found.forEach(align);
  const boxes = columns(container, views);
  views.forEach((view, i) => drawMaps(boxes[i], view, found[i]));
  const names = [...new Set(found.flat().map(({ name }) => name))];
  const whats = names.map((name) => {
    const having = views.filter((_, i) => found[i].some((map) => map.name === name));
    return sentences(having, (view) => MAPS[name].what(view, heads[views.indexOf(view)]));
  });
  document.getElementById("map-what").textContent = whats.join(" ");
}

function drawMaps(container, { parts }, maps) {
  if (parts.layers) container.append(layersInstead(parts));
  else if (maps.length === 0) {
    const factor = parts.recorded?.curves.some(({ name }) => name === "scale");
    container.append(html("p", { class: "empty" }, factor ? "All keys of a query get the same factor, which the panel over distance shows." : "Every entry would be 0."));
  }
  for (const { name, ...map } of maps) {
    const box = html("div", { class: "chart", "data-chart": name });
    container.append(box);
    const { xLabel, yLabel, label, tell } = MAPS[name];
    drawHeatmap(box, { ...map, xLabel, yLabel, label, tell, height: maps.length > 1 ? 240 : 320 });
  }
}

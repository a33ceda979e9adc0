// A table with one row per position.

const DEVIATION = 0.02;

function table(weights, { tables, trained }) {
  if (weights === "minilm") return tables.learned.minilm;
  if (weights === "trained") return trained("learned").weight;
  return tables.learned.initial.map((row) => row.map((value) => value * DEVIATION));
}

/** Row `position` of the table, stretched over `length` positions if the table is shorter. */
function stretched(rows, position, length) {
  const place = (position * (rows.length - 1)) / Math.max(length - 1, 1);
  const low = Math.floor(place);
  const high = rows[Math.min(low + 1, rows.length - 1)];
  return Float64Array.from(rows[low], (value, c) => value * (1 - (place - low)) + high[c] * (place - low));
}

export const learned = {
  name: "learned",
  steps: "rows",
  learn: "Before training the rows are noise. In MiniLM's trained table, neighbouring rows have become alike.",
  failure:
    "Fails at the end of its table: a position that was not trained has no row, or a row of noise.",
  weights: {
    minilm: "pretrained MiniLM (first 64 positions and dimensions)",
    trained: "trained for this page (first 64 dimensions)",
    initial: "new, drawn with seed 0",
  },
  controls: [
    { option: "num_positions", from: 2, to: 64, step: 1, start: 64 },
    { option: "extension" },
  ],
  build(options, place) {
    const rows = table(options.weights, place).slice(0, options.num_positions);
    const extended = options.extension === "interpolate";
    return {
      ...(extended ? {} : { reach: rows.length, reachReason: `The table has ${rows.length} rows.` }),
      added(position) {
        if (position >= rows.length && !extended) return null;
        return stretched(rows, position, Math.max(extended ? place.length : 0, rows.length));
      },
    };
  },
};

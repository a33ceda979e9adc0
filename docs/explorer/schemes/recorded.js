// Schemes without a formula in this folder: the library has computed their pictures for a few options, and for one
// sentence (data/recorded.json, written by recorded.py).

const MODES = ["both", "causal"];
/** The product of a standard normal query with itself, divided by the root of its 64 dimensions. */
const EQUAL_LOGIT = 8;

/** The numbers of a packed array, in the order of its shape. */
export function unpacked({ cells, bits, largest }) {
  const bytes = Uint8Array.from(atob(cells), (character) => character.charCodeAt(0));
  const integers = bits === 8 ? new Int8Array(bytes.buffer) : new Int16Array(bytes.buffer);
  const most = 2 ** (bits - 1) - 1;
  return Float64Array.from(integers, (value) => (value * largest) / most);
}

/** A packed array of heads, rows and columns as a function of them. Where all heads are alike, it holds one. */
function table(packed) {
  const [heads, rows, columns] = packed.shape;
  const numbers = unpacked(packed);
  return { heads, rows, columns, at: (head, row, column) => numbers[(Math.min(head, heads - 1) * rows + row) * columns + column] };
}

/** A packed curve as `[[x, y]...]` by line. */
function curve({ name, start, titles, ...packed }) {
  const [count, length] = packed.shape;
  const numbers = unpacked(packed);
  const line = (row) => Array.from({ length }, (_, i) => [start + i, numbers[row * length + i]]);
  return { name, titles, lines: Array.from({ length: count }, (_, row) => line(row)) };
}

/** The parts of one example: a bias for the animation, the vectors that are added, and `recorded` for the panels. */
function partsOf(name, example, mode, { sentence, heads }) {
  if (example.layers) return { layers: example.layers, heads, steps: "layers" };
  const found = example[mode] ?? example[MODES.find((one) => example[one])];
  const maps = (found.maps ?? example.both.maps).map(({ name, ...packed }) => ({ name, ...table(packed) }));
  const curves = found.curves.map(curve);
  const own = Object.fromEntries(maps.map((map) => [map.name, map]));
  const recorded = { sentence, heads, maps, curves, distance: found.distance, attention: table(found.attention), readsWords: example.reads_words === true, note: example.note ?? "" };
  const parts = { heads, recorded };
  if (own.added) parts.added = (position) => Float64Array.from({ length: own.added.columns }, (_, c) => own.added.at(0, position, c));
  if (own.bias) return { ...parts, bias: own.bias.at, most: own.bias.rows, steps: "bias_alone" };
  const product = productOf(own.equal, curves);
  if (product) return { ...parts, bias: (head, query, key) => EQUAL_LOGIT * product.at(head, query, key), most: product.rows, steps: "bias" };
  return { ...parts, most: own.added?.rows ?? 2, steps: own.added ? "rows" : null };
}

/** The mean product of equal queries and keys by positions: a map, or a curve over distance. */
function productOf(map, curves) {
  const line = curves.find(({ name }) => name === "rotation");
  if (map || !line) return map;
  const rows = Math.floor(line.lines[0].length / 2) - 4;
  const start = line.lines[0][0][0];
  const at = (head, query, key) => line.lines[Math.min(head, line.lines.length - 1)][key - query - start]?.[1] ?? line.lines[0][query - key - start][1];
  return { rows, at };
}

export function recordedScheme(name, recorded) {
  const examples = recorded.schemes[name];
  return {
    name,
    examples,
    controls: [],
    learn: "",
    failure: "",
    options: ({ example }) => examples[example].options,
    build: ({ example }, { causal }) => partsOf(name, examples[example], causal ? "causal" : "both", recorded),
  };
}

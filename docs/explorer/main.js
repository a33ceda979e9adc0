// Starts the page: reads the data and the address, and draws all panels whenever something changes.

import { short } from "./charts/svg.js";
import { drawControls, fillSchemeList } from "./controls.js";
import { drawAttention } from "./panels/attention.js";
import { drawDecay } from "./panels/decay.js";
import { drawDog } from "./panels/dog.js";
import { drawMap } from "./panels/map.js";
import { drawMini } from "./panels/mini.js";
import { drawMinilm } from "./panels/minilm.js";
import { createPlayer } from "./player.js";
import { pythonCall } from "./python.js";
import { PLACE_CONTROLS, readHash, writeHash } from "./state.js";
import { STEPS } from "./steps/index.js";
import { startTheme } from "./theme.js";
import { createView } from "./view.js";

/** The documentation is one folder up on its site, and absent where the explorer stands alone. */
const onSite = /\/explorer\/(index\.html)?$/.test(location.pathname);

const at = (id) => document.getElementById(id);

async function loadData() {
  const read = async (name) => (await fetch(new URL(`data/${name}.json`, import.meta.url))).json();
  const [library, tables, trained, minilm] = await Promise.all(["options", "tables", "trained", "dog_minilm"].map(read));
  return { library, tables, trained, minilm };
}

async function start() {
  const data = await loadData();
  const viewOf = createView(data);
  const turning = { pair: 4, distance: 3 };
  let head = 0;
  const problems = [];
  let state = readHash(location.hash, data.library, problems);
  let view = viewOf(state);
  let written = location.hash;

  fillSchemeList(at("scheme"));
  const player = createPlayer(
    { figure: at("figure"), play: at("play"), back: at("back"), forward: at("forward"), slider: at("position"), readout: at("steps-text") },
    (position) => STEPS[view.scheme.steps].draw(at("steps"), view, position, turning),
  );

  function drawSide() {
    at("scheme").value = state.scheme;
    at("summary").textContent = view.library.summary;
    at("paper").hidden = !view.library.paper;
    at("paper").href = `https://arxiv.org/abs/${view.library.paper}`;
    at("more").hidden = !onSite;
    at("more").href = `../reference/schemes/${state.scheme}.html`;
    at("formula").textContent = view.library.formula ?? "";
    at("formula").hidden = !view.library.formula;
    at("learn").textContent = view.scheme.learn;
    at("failure").textContent = view.scheme.failure;
    at("code").textContent = pythonCall(view);
    drawControls(at("options"), view, (option, value) => {
      state.wanted[state.scheme] = { ...view.options, [option]: value };
      changed();
    });
    for (const { name } of PLACE_CONTROLS) {
      at(name).value = String(state[name]);
      at(`${name}-value`).textContent = String(state[name]);
    }
    at("causal").checked = state.causal;
    if (at("text").value !== state.text && document.activeElement !== at("text")) at("text").value = state.text;
  }

  function drawHeads() {
    const count = view.place.heads;
    head = Math.min(head, count - 1);
    const select = at("head");
    if (select.options.length !== count) {
      select.replaceChildren(...Array.from({ length: count }, (_, i) => new Option(`head ${i + 1}`, String(i))));
    }
    select.value = String(head);
  }

  function drawSteps() {
    const { title, start, smooth = false, turning: turns = false } = STEPS[view.scheme.steps];
    at("steps-title").textContent = title;
    at("turning").hidden = !turns;
    if (turns) {
      at("pair").max = String(view.parts.rotation.frequencies.length - 1);
      turning.pair = Math.min(turning.pair, Number(at("pair").max));
      at("pair").value = String(turning.pair);
    }
    for (const name of ["pair", "distance"]) at(`${name}-value`).textContent = String(turning[name]);
    const rows = view.parts.added && view.parts.reach ? view.parts.reach : Infinity;
    player.set({ most: Math.max(Math.min(view.place.length, 64, rows) - 1, 1), smooth, start, kind: view.scheme.steps });
  }

  function drawAll() {
    drawSide();
    drawHeads();
    drawDog(at("dog"), view);
    drawSteps();
    drawDecay(at("decay"), view);
    drawMini(at("mini"), view);
    drawAttention(at("attention"), view, head, at("shown").value === "change");
    drawMap(at("map"), view, head);
    drawMinilm(at("minilm"), view);
    document.title = `${state.scheme}: position encodings, explored`;
  }

  /** Something was changed on the page: the address follows. */
  function changed() {
    view = viewOf(state);
    written = writeHash(state, data.library);
    history.replaceState(null, "", written);
    tell([]);
    requestDraw();
  }

  let waiting = false;
  function requestDraw() {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      drawAll();
    });
  }

  function tell(problems) {
    at("problems").hidden = problems.length === 0;
    at("problems").textContent = problems.join(" ");
  }

  /** The address was changed, by a link or by hand: the page follows. Options of other schemes are kept. */
  function follow() {
    const found = [];
    const next = readHash(location.hash, data.library, found);
    const plain = !location.hash.includes("&");
    // A link in the list of dogs names a scheme only; the sentence and the place stay as they are.
    state = plain ? { ...state, scheme: next.scheme } : { ...next, wanted: { ...state.wanted, [next.scheme]: next.wanted[next.scheme] } };
    at("text").value = state.text;
    view = viewOf(state);
    tell(found);
    written = writeHash(state, data.library);
    history.replaceState(null, "", written);
    requestDraw();
  }

  window.addEventListener("hashchange", () => location.hash !== written && follow());
  at("scheme").addEventListener("change", () => {
    state.scheme = at("scheme").value;
    changed();
  });
  for (const { name } of PLACE_CONTROLS) {
    at(name).addEventListener("input", () => {
      state[name] = Number(at(name).value);
      changed();
    });
  }
  at("causal").addEventListener("change", () => {
    state.causal = at("causal").checked;
    changed();
  });
  at("text").addEventListener("input", () => {
    state.text = at("text").value;
    state.word = null;
    changed();
  });
  at("word").addEventListener("change", () => {
    state.word = at("word").value;
    changed();
  });
  at("head").addEventListener("change", () => {
    head = Number(at("head").value);
    requestDraw();
  });
  at("shown").addEventListener("change", requestDraw);
  for (const name of ["pair", "distance"]) {
    at(name).addEventListener("input", () => {
      turning[name] = Number(at(name).value);
      at(`${name}-value`).textContent = at(name).value;
      player.redraw();
    });
  }
  at("copy").addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(location.href);
      at("copied").textContent = "Copied.";
    } catch {
      at("copied").textContent = location.href;
    }
  });
  document.querySelector("[data-inside]").addEventListener("click", (event) => {
    event.preventDefault();
    at("controls").focus();
  });
  at("docs-link").hidden = !onSite;
  // Where panels are stacked, the way to the first picture is short.
  for (const part of document.querySelectorAll(".side details")) part.open = window.innerWidth > 760;
  startTheme(at("theme"), requestDraw);
  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    if (window.innerWidth !== width) requestDraw();
    width = window.innerWidth;
  });

  at("text").value = state.text;
  tell(problems);
  drawAll();
  document.documentElement.dataset.ready = "true";
}

start().catch((error) => {
  at("problems").hidden = false;
  at("problems").textContent = `The page could not start: ${error.message}. Serve this folder with a web server, for example: python -m http.server`;
  throw error;
});

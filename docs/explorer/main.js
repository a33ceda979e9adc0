// Starts the page: reads the data and the address, and draws all panels whenever something changes.

import { columns, sentences, titleOf } from "./charts/columns.js";
import { html } from "./charts/svg.js";
import { fillSchemeList } from "./controls.js";
import { drawAttention } from "./panels/attention.js";
import { drawDecay } from "./panels/decay.js";
import { drawDog } from "./panels/dog.js";
import { drawMap } from "./panels/map.js";
import { drawMini } from "./panels/mini.js";
import { drawMinilm } from "./panels/minilm.js";
import { createPlayer } from "./player.js";
import { pythonCall } from "./python.js";
import { fillRegistry } from "./schemes/registry.js";
import { ON_SITE, drawSide } from "./side.js";
import { PLACE_CONTROLS, readHash, sidesOf, writeHash } from "./state.js";
import { STEPS } from "./steps/index.js";
import { startTheme } from "./theme.js";
import { createViews } from "./view.js";

const SUFFIXES = ["", "-2"];

const at = (id) => document.getElementById(id);

async function loadData() {
  const read = async (name) => (await fetch(new URL(`data/${name}.json`, import.meta.url))).json();
  const names = ["options", "recorded", "tables", "trained", "dog_minilm"];
  const [library, recorded, tables, trained, minilm] = await Promise.all(names.map(read));
  return { library, recorded, tables, trained, minilm };
}

async function start() {
  const data = await loadData();
  fillRegistry(data.library, data.recorded);
  const viewsOf = createViews(data);
  const turning = { pair: 4, distance: 3 };
  let head = 0;
  const problems = [];
  let state = readHash(location.hash, data.library, problems);
  let views = viewsOf(state);
  let written = location.hash;

  fillSchemeList(at("scheme"));
  fillSchemeList(at("second"), "nothing");
  const player = createPlayer(
    { figure: at("figure"), play: at("play"), back: at("back"), forward: at("forward"), slider: at("position"), readout: at("steps-text") },
    drawMoment,
  );

  function drawSides() {
    at("scheme").value = state.scheme;
    at("second").value = state.second ?? "";
    at("side-2").hidden = at("same-field").hidden = views.length === 1;
    at("same").checked = state.same;
    sidesOf(state).forEach(({ name, all }, i) => {
      drawSide(SUFFIXES[i], views, i, (option, value) => {
        all[name] = { ...views[i].options, [option]: value };
        changed();
      });
    });
    const alike = views.length > 1 && state.scheme === state.second;
    const named = (text, i) => (views.length > 1 && !alike ? [html("strong", {}, `${titleOf(views, i)}: `), text] : [text]);
    const lines = (key) => (alike ? views.slice(1) : views).map((view, i) => [view.scheme[key], i]).filter(([text]) => text).map(([text, i]) => html("p", {}, ...named(text, i)));
    at("learn").replaceChildren(...lines("learn"));
    at("failure").replaceChildren(...lines("failure"));
    at("failure").hidden = at("failure").childElementCount === 0;
    at("code").textContent = views.map(pythonCall).join("\n");
    for (const { name } of PLACE_CONTROLS) {
      at(name).value = String(state[name]);
      at(`${name}-value`).textContent = String(state[name]);
    }
    at("causal").checked = state.causal;
    if (at("text").value !== state.text && document.activeElement !== at("text")) at("text").value = state.text;
  }

  function drawHeads() {
    const count = Math.max(...views.map(({ place }) => place.heads));
    head = Math.min(head, count - 1);
    const select = at("head");
    if (select.options.length !== count) {
      select.replaceChildren(...Array.from({ length: count }, (_, i) => new Option(`head ${i + 1}`, String(i))));
    }
    select.value = String(head);
  }

  /** The last position of a scheme's animation. */
  function lastStep({ parts, place }) {
    const rows = parts.layers?.length ?? (parts.added && parts.reach ? parts.reach : Infinity);
    return Math.max(Math.min(parts.layers ? rows : place.length, 64, rows) - 1, 1);
  }

  /** One moment of the animation, or of two beside each other. */
  function drawMoment(position) {
    const boxes = columns(at("steps"), views);
    return sentences(views, (view) => {
      const box = boxes[views.indexOf(view)];
      if (view.steps) return STEPS[view.steps].draw(box, view, Math.min(position, lastStep(view)), turning);
      box.replaceChildren(html("p", { class: "empty" }, "It has no vector, rotation or bias that could be shown position by position."));
      return "";
    });
  }

  function drawSteps() {
    const kinds = views.map(({ steps }) => STEPS[steps] ?? {});
    at("steps-title").textContent = (views.length === 1 && kinds[0].title) || "Position by position";
    const turns = views.filter((_, i) => kinds[i].turning);
    at("turning").hidden = turns.length === 0;
    at("player").hidden = views.every(({ steps }) => !steps);
    if (turns.length) {
      at("pair").max = String(Math.max(...turns.map(({ parts }) => parts.rotation.frequencies.length - 1)));
      turning.pair = Math.min(turning.pair, Number(at("pair").max));
      at("pair").value = String(turning.pair);
    }
    for (const name of ["pair", "distance"]) at(`${name}-value`).textContent = String(turning[name]);
    const smooth = kinds.some((kind) => kind.smooth);
    player.set({ most: Math.max(...views.map(lastStep)), smooth, start: kinds[0].start, kind: views.map(({ steps }) => steps).join() });
  }

  function drawAll() {
    document.documentElement.dataset.sides = String(views.length);
    drawSides();
    drawHeads();
    drawDog(at("dog"), views);
    drawSteps();
    drawDecay(at("decay"), views);
    drawMini(at("mini"), views[0]);
    drawAttention(at("attention"), views, head, at("shown").value === "change", restore);
    drawMap(at("map"), views, head);
    drawMinilm(at("minilm"), views);
    document.title = `${views.map((_, i) => titleOf(views, i)).join(" and ")}: position encodings, explored`;
  }

  /** The sentence and the heads for which the library has computed attention. */
  function restore(text, heads) {
    Object.assign(state, { text, heads, word: null });
    at("text").value = text;
    changed();
  }

  /** Something was changed on the page: the address follows. */
  function changed() {
    views = viewsOf(state);
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
    const link = (name, i) => [i ? ", " : "", html("a", { href: `#${name}` }, name)];
    const line = (one) => (typeof one === "string" ? [one, " "] : [one.text, ...one.names.flatMap(link), ". "]);
    at("problems").replaceChildren(...problems.flatMap(line));
  }

  /** The address was changed, by a link or by hand: the page follows. Options of other schemes are kept. */
  function follow() {
    const found = [];
    const next = readHash(location.hash, data.library, found);
    const plain = !location.hash.includes("&");
    const merged = (key, name) => ({ ...state[key], ...(name ? { [name]: next[key][name] } : {}) });
    // A link in the list of dogs names schemes only; the sentence and the place stay as they are.
    state = plain
      ? { ...state, scheme: next.scheme, second: next.second }
      : { ...next, wanted: merged("wanted", next.scheme), wantedSecond: merged("wantedSecond", next.second) };
    at("text").value = state.text;
    views = viewsOf(state);
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
  at("second").addEventListener("change", () => {
    state.second = at("second").value || null;
    changed();
  });
  for (const { name } of PLACE_CONTROLS) {
    at(name).addEventListener("input", () => {
      state[name] = Number(at(name).value);
      changed();
    });
  }
  at("same").addEventListener("change", () => {
    state.same = at("same").checked;
    changed();
  });
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
  at("docs-link").hidden = at("schemes-link").hidden = !ON_SITE;
  at("alone").hidden = ON_SITE;
  keepInSight(document.querySelector(".side"));
  // Where panels are stacked, the way to the first picture is short.
  for (const part of document.querySelectorAll("details.place")) part.open = window.innerWidth > 760;
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

/** A box beside the panels stays in sight: its lower end, if it is longer than the window, or else its upper end. */
function keepInSight(box) {
  const place = () => (box.style.top = `${Math.min(12, window.innerHeight - box.offsetHeight - 12)}px`);
  new ResizeObserver(place).observe(box);
  window.addEventListener("resize", place);
}

start().catch((error) => {
  at("problems").hidden = false;
  at("problems").textContent = `The page could not start: ${error.message}. Serve this folder with a web server, for example: python -m http.server`;
  throw error;
});

// The list of schemes and the widgets for options.

import { html, short } from "./charts/svg.js";
import { GROUPS, SCHEMES } from "./schemes/registry.js";

const LOG_STEPS = 600;

/** Fills a list of schemes; `first` is the text of an entry without a scheme. */
export function fillSchemeList(select, first) {
  if (first) select.append(html("option", { value: "" }, first));
  for (const [group, title] of Object.entries(GROUPS)) {
    const options = SCHEMES.filter((scheme) => scheme.group === group).map(({ name }) => html("option", { value: name }, name));
    select.append(html("optgroup", { label: title }, ...options));
  }
}

/**
 * Draws one widget per control. Widgets that stay are kept, so that the one in use keeps the focus.
 *
 * @param container
 * @param view what `createView` returned.
 * @param {(option: string, value: any) => void} change
 * @param {string} suffix of the ids, so that the widgets of two schemes differ.
 */
export function drawControls(container, view, change, suffix = "") {
  const signature = JSON.stringify([view.scheme.name, view.controls.map(({ option, choices, from, to, meaning }) => [option, choices, from, to, meaning])]);
  if (container.dataset.signature !== signature) {
    const focused = document.activeElement?.id;
    container.dataset.signature = signature;
    container.replaceChildren(...view.controls.map((control) => widget(control, change, suffix)));
    if (view.controls.length === 0) container.append(html("p", { class: "empty" }, "This scheme has no options."));
    if (focused) document.getElementById(focused)?.focus();
  }
  for (const control of view.controls) container.querySelector(`[data-option="${control.option}"]`).update(view.options[control.option]);
}

/** A widget for one control; its `update(value)` shows another value. */
function widget(control, change, suffix) {
  const id = `option${suffix}-${control.option}`;
  const box = html("div", { class: "control", "data-option": control.option });
  const hint = hintOf(control, `${id}-hint`);
  const described = { id, "aria-describedby": hint.id };
  const label = html("label", { for: id }, control.title ?? html("code", {}, control.option));
  if (control.kind === "boolean") {
    const input = html("input", { type: "checkbox", ...described });
    input.addEventListener("change", () => change(control.option, input.checked));
    box.append(html("div", { class: "line" }, input, label), hint);
    box.update = (value) => (input.checked = value);
  } else if (control.kind === "choice") {
    const select = html("select", described, ...control.choices.map((one) => html("option", { value: one }, control.names?.[one] ?? one)));
    select.addEventListener("change", () => change(control.option, select.value));
    box.append(label, select, hint);
    box.update = (value) => (select.value = value);
  } else {
    numberWidget(box, control, label, described, hint, change);
  }
  return box;
}

function numberWidget(box, control, label, described, hint, change) {
  const { option, from, to, step, log, nullable } = control;
  const [min, max, stride] = log ? [0, LOG_STEPS, 1] : [from, to, step];
  const slider = html("input", { type: "range", min, max, step: stride, ...described });
  const exact = html("input", { type: "number", min: from, max: to, step: log ? "any" : step, id: `${described.id}-exact`, "aria-label": `${option}, exact value` });
  const toSlider = (value) => (log ? (Math.log(value / from) / Math.log(to / from)) * LOG_STEPS : value);
  const fromSlider = (at) => (log ? Number((from * (to / from) ** (at / LOG_STEPS)).toPrecision(3)) : at);
  slider.addEventListener("input", () => change(option, fromSlider(Number(slider.value))));
  exact.addEventListener("change", () => {
    const typed = Number(exact.value);
    change(option, exact.value === "" || Number.isNaN(typed) ? control.start ?? control.preset : typed);
  });
  box.append(html("div", { class: "line" }, label, exact), slider);
  let free = null;
  if (nullable) {
    free = html("input", { type: "checkbox", id: `${slider.id}-none` });
    free.addEventListener("change", () => change(option, free.checked ? null : control.preset));
    box.append(html("div", { class: "line none" }, free, html("label", { for: free.id }, `None: ${nullable}`)));
  }
  box.append(hint);
  box.update = (value) => {
    slider.disabled = exact.disabled = value === null;
    if (free) free.checked = value === null;
    const shown = value ?? control.preset;
    slider.value = String(toSlider(shown));
    slider.setAttribute("aria-valuetext", value === null ? nullable : short(value));
    if (document.activeElement !== exact) exact.value = value === null ? "" : String(shown);
  };
}

/** The first sentence of the meaning is shown; the rest is there for the pointer and for screen readers. */
function hintOf({ meaning, libraryDefault }, id) {
  const own = libraryDefault === undefined ? "" : ` The library’s default is ${libraryDefault}.`;
  const text = meaning.charAt(0).toUpperCase() + meaning.slice(1);
  const first = text.match(/^.*?(?=[.](?: [A-Z]|$))/s)?.[0] ?? text;
  const rest = text.slice(first.length);
  return html("p", { class: "hint", id, title: text + own }, first.endsWith(".") ? first : `${first}.`, html("span", { class: "visually-hidden" }, rest), own);
}

import { html } from "../charts/svg.js";

/** The schemes of the layers of a small model, as links; the layer at `position` is marked. */
export function drawLayers(container, { parts }, position) {
  const here = Math.round(position);
  const list = html("ol", { class: "layers" });
  parts.layers.forEach((name, layer) => {
    const mark = layer === here ? { class: "now", "aria-current": "step" } : {};
    list.append(html("li", mark, `layer ${layer + 1}: `, html("a", { href: `#${name}` }, name)));
  });
  container.replaceChildren(list);
  return `Layer ${here + 1} of ${parts.layers.length} has ${parts.layers[here]}.`;
}

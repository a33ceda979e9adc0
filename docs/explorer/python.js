// The call of the library that gives the chosen scheme.

import { libraryOptions } from "./view.js";

function python(value) {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (Array.isArray(value)) return value.length > 6 && typeof value[0] === "number" ? `(${python(value[0])}, ...)` : `[${value.map(python).join(", ")}]`;
  if (typeof value === "object") return `{${Object.entries(value).map(([key, one]) => `"${key}": ${python(one)}`).join(", ")}}`;
  return typeof value === "string" ? `"${value}"` : String(value);
}

export function pythonCall(view) {
  const { scheme, library } = view;
  const given = Object.entries(libraryOptions(view)).filter(([name, value]) => {
    const known = library.options.find((one) => one.name === name);
    const control = scheme.controls.find((one) => one.option === name);
    const same = JSON.stringify(known.default) === JSON.stringify(value);
    return !same && !(control?.sameAsNone && value === control.start);
  });
  const own = Object.fromEntries(given);
  // A temperature is used beside the model's own scheme, and `patch_model` has an argument called layers.
  if (scheme.group === "scale") return `hf_posenc.patch_model(model, ["native", ${python(given.length ? { scheme: scheme.name, ...own } : scheme.name)}])`;
  if ("layers" in own) return `hf_posenc.patch_model(model, ${python({ scheme: scheme.name, ...own })})`;
  const options = given.map(([name, value]) => `, ${name}=${python(value)}`).join("");
  return `hf_posenc.patch_model(model, "${scheme.name}"${options})`;
}

// Light, dark, or what the system says. The choice is kept in this browser where that is allowed.

const ORDER = ["auto", "light", "dark"];
const KEY = "hf_posenc theme";

function stored() {
  try {
    return localStorage.getItem(KEY);
  } catch {
    return null; // Frames of other sites may not store anything.
  }
}

export function startTheme(button, redraw) {
  let theme = ORDER.includes(stored()) ? stored() : "auto";
  const apply = () => {
    document.documentElement.dataset.theme = theme;
    button.textContent = `Theme: ${theme}`;
    redraw();
  };
  button.addEventListener("click", () => {
    theme = ORDER[(ORDER.indexOf(theme) + 1) % ORDER.length];
    try {
      localStorage.setItem(KEY, theme);
    } catch {
      // The choice then lasts as long as the page.
    }
    apply();
  });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  apply();
}

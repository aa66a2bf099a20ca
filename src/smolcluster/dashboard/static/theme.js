// Colours are defined once, in the style sheet; canvases ask for them here.

let cache = new Map();
const listeners = new Set();

export function color(name) {
  if (!cache.has(name)) cache.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  return cache.get(name);
}

/** The colour of a rank, the same everywhere. */
export const COLORS = 8;
export const rankColor = (rank) => `s${((rank % COLORS) + COLORS) % COLORS}`;

export function onTheme(listener) {
  listeners.add(listener);
}

function changed() {
  cache = new Map();
  for (const listener of listeners) listener();
}

function stored() {
  try {
    return localStorage.getItem("theme");
  } catch {
    return null; // storage may be forbidden
  }
}

export function startTheme(button) {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const show = (wish) => {
    if (wish === "light" || wish === "dark") root.dataset.theme = wish;
    else delete root.dataset.theme;
    changed();
  };
  show(stored());
  dark.addEventListener("change", changed);
  button.addEventListener("click", () => {
    const now = root.dataset.theme ?? (dark.matches ? "dark" : "light");
    const next = now === "dark" ? "light" : "dark";
    try {
      localStorage.setItem("theme", next);
    } catch {
      // then for this page only
    }
    show(next);
  });
}

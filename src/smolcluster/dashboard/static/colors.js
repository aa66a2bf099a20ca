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

export function changed() {
  cache = new Map();
  for (const listener of listeners) listener();
}

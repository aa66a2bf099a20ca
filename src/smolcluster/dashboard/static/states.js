// The states of a machine and the kinds of events: a word, a colour and a shape each, so that none stands alone.

import { svg } from "./dom.js";

export const STATES = {
  training: { word: "training", color: "good" },
  finished: { word: "finished", color: "good" },
  starting: { word: "starting", color: "muted" },
  waiting: { word: "waiting", color: "warn" },
  silent: { word: "silent", color: "warn" },
  lost: { word: "lost", color: "bad" },
  evicted: { word: "evicted", color: "bad" },
  left: { word: "left", color: "muted" },
  stopped: { word: "stopped", color: "muted" },
};

export const RUN_STATES = {
  training: "good",
  finished: "good",
  starting: "muted",
  silent: "warn",
  failed: "bad",
  interrupted: "warn",
};

const stroke = { fill: "none", stroke: "currentColor", "stroke-width": 1.8, "stroke-linecap": "round", "stroke-linejoin": "round" };

// Drawn in a square of 16.
const GLYPHS = {
  training: () => [svg("circle", { cx: 8, cy: 8, r: 5, fill: "currentColor" })],
  finished: () => [svg("circle", { cx: 8, cy: 8, r: 6, ...stroke }), svg("path", { d: "M5.2 8.2l2 2 3.6-4", ...stroke })],
  starting: () => [svg("circle", { cx: 8, cy: 8, r: 5.5, ...stroke, "stroke-dasharray": "2 3" })],
  waiting: () => [svg("path", { d: "M5.8 4v8M10.2 4v8", ...stroke, "stroke-width": 2.4 })],
  silent: () => [svg("circle", { cx: 8, cy: 8, r: 5.5, ...stroke }), svg("path", { d: "M5.6 8h4.8", ...stroke })],
  lost: () => [svg("path", { d: "M4 4l8 8M12 4l-8 8", ...stroke, "stroke-width": 2.4 })],
  evicted: () => [svg("circle", { cx: 8, cy: 8, r: 5.5, ...stroke }), svg("path", { d: "M4.2 11.8l7.6-7.6", ...stroke })],
  left: () => [svg("path", { d: "M3.5 8h8.5M9 4.8L12.2 8 9 11.2", ...stroke })],
  stopped: () => [svg("rect", { x: 4, y: 4, width: 8, height: 8, rx: 1.5, fill: "currentColor" })],
  // Events
  begin: () => [svg("path", { d: "M5 3.5l7 4.5-7 4.5z", fill: "currentColor" })],
  join: () => [svg("path", { d: "M8 3.5v9M3.5 8h9", ...stroke, "stroke-width": 2.2 })],
  leave: () => [svg("path", { d: "M3.5 8h9", ...stroke, "stroke-width": 2.2 })],
  evict: () => [svg("circle", { cx: 8, cy: 8, r: 5, ...stroke }), svg("path", { d: "M4.5 11.5l7-7", ...stroke })],
  checkpoint: () => [svg("path", { d: "M8 2.5L13.5 8 8 13.5 2.5 8z", fill: "currentColor" })],
  warning: () => [svg("path", { d: "M8 3l5.6 10H2.4z", ...stroke })],
  error: () => [svg("path", { d: "M8 3l5.6 10H2.4z", fill: "currentColor" })],
  end: () => [svg("path", { d: "M4 13.5V3h8l-2 2.7 2 2.7H4.6", ...stroke })],
};

export const EVENTS = {
  begin: { word: "server", color: "accent" },
  join: { word: "join", color: "good" },
  leave: { word: "leave", color: "muted" },
  lost: { word: "lost", color: "bad" },
  evict: { word: "evicted", color: "bad" },
  checkpoint: { word: "checkpoint", color: "accent" },
  warning: { word: "warning", color: "warn" },
  error: { word: "error", color: "bad" },
  end: { word: "end", color: "good" },
};

/** A glyph as a group, to be placed in a picture. */
export function glyph(name) {
  return svg("g", { class: "glyph", "aria-hidden": "true" }, ...(GLYPHS[name] ?? GLYPHS.starting)());
}

/** The same as a picture of its own, for text. */
export function badge(name) {
  return svg("svg", { class: "badge", viewBox: "0 0 16 16", width: 14, height: 14, "aria-hidden": "true" }, glyph(name));
}

// The machines with their layers, in order, and the tokens that pass through them.
//
//   layers 0-14              layers 15-29                the model, as wide as it is deep
//   mini1  mini2             pi5             | spare     their machines

import { el, keyed, text } from "./dom.js";

const LOST_S = 8; // a machine that is gone is shown for so long
const APART_MS = 90; // tokens that come faster than this share a dot
const MAX_DOTS = 8;
const COLORS = 8;

/** First and number of the layers of each stage: `layers` has its first and its last. */
const spans = (stages) => stages.map(({ layers: [first, last] }) => ({ first, count: Math.max(1, last - first + 1) }));

/** Return a sentence about missing layers; null if none is missing. */
export function missing(state) {
  const all = (state.stages ?? []).filter((stage) => Array.isArray(stage.layers));
  const starting = state.wanted ? `: ${state.there ?? 0} of ${state.wanted} stages are there` : "";
  if (!all.length && state.ready === false) return `No machine holds the model yet${starting}. It waits for them to join.`;
  const holes = spans(all).filter((_, i) => !(all[i].machines ?? []).some((machine) => machine.state !== "lost"));
  if (!holes.length && state.ready !== false) return null;
  if (!holes.length) {
    const there = all.filter((stage) => stage.machines.some((machine) => machine.state === "ready")).length;
    return `The model is loading: ${there} of ${all.length} stages ready. Questions are answered as soon as it is there.`;
  }
  const which = holes.map(layersOf).join(" and ");
  return `${which[0].toUpperCase()}${which.slice(1)} of the model ${holes.length > 1 || holes[0].count > 1 ? "are" : "is"} on no machine. It goes on when one is back.`;
}

const layersOf = ({ first, count }) => (count === 1 ? `layer ${first}` : `layers ${first}–${first + count - 1}`);

export class Strip {
  constructor(node, { say }) {
    this.node = node;
    this.say = say;
    [this.stages, this.spares] = node.children;
    this.state = null;
    this.lost = new Map(); // name -> {machine, stage, until}
    this.shownLosses = new Set(); // of those that the server reports
    this.lastDot = 0;
    this.passed = 0;
    this.still = matchMedia("(prefers-reduced-motion: reduce)");
  }

  set(state) {
    const before = this.state;
    const stages = (state.stages ?? []).filter((stage) => Array.isArray(stage.layers) && stage.layers.length === 2);
    this.state = { ...state, stages, spares: state.spares ?? [] };
    this.noteLost(before);
    this.draw();
    const tokens = (all) => Math.max(0, ...(all?.stages[0]?.machines ?? []).map((machine) => machine.tokens ?? 0));
    if (before && !this.own && tokens(this.state) > tokens(before)) this.dot(); // of other clients
  }

  noteLost(before) {
    const names = new Set([...this.state.stages.flatMap((stage) => stage.machines ?? []), ...this.state.spares].map((machine) => machine.name));
    const until = Date.now() + LOST_S * 1000;
    before?.stages.forEach((stage, i) => {
      for (const machine of stage.machines ?? []) {
        if (names.has(machine.name) || this.lost.has(machine.name) || machine.state === "lost") continue;
        this.lost.set(machine.name, { machine: { ...machine, state: "lost", busy: 0 }, stage: i, until });
        this.say(`${machine.name} is lost`);
        setTimeout(() => this.draw(), LOST_S * 1000 + 50);
      }
    });
    for (const machine of this.state.lost ?? []) {
      // Reported by the server, also to a page that was opened later.
      const ago = Math.max(0, Date.now() / 1000 - Number(machine.at)); // by two clocks: it may never be over
      const loss = `${machine.name} ${machine.at}`;
      const known = this.shownLosses.has(loss) || names.has(machine.name) || this.lost.has(machine.name);
      this.shownLosses.add(loss);
      if (known || !(ago < LOST_S)) continue;
      this.lost.set(machine.name, { machine: { ...machine, state: "lost", busy: 0 }, stage: machine.stage ?? 0, until: Date.now() + (LOST_S - ago) * 1000 });
      setTimeout(() => this.draw(), (LOST_S - ago) * 1000 + 50);
    }
    for (const [name, { until: end }] of this.lost) if (names.has(name) || Date.now() > end) this.lost.delete(name);
  }

  draw() {
    const { stages, spares } = this.state;
    for (const [name, { until }] of this.lost) if (Date.now() > until) this.lost.delete(name);
    const wide = spans(stages);
    const gone = [...this.lost.values()];
    const columns = stages.map((stage, i) => ({
      ...wide[i],
      key: i,
      machines: [...(stage.machines ?? []), ...gone.filter((one) => Math.min(one.stage, stages.length - 1) === i).map((one) => one.machine)],
    }));
    this.node.hidden = !columns.length;
    keyed(this.stages, columns, (column) => column.key, newStage, (node, column) => {
      node.style.flexGrow = column.count;
      text(node.firstChild.lastChild, layersOf(column).replace(/^\w+ /, ""));
      node.title = layersOf(column);
      keyed(node.lastChild, column.machines.length ? column.machines : [{ name: "", state: "lost" }], naming(), newMachine, showMachine);
    });
    this.spares.hidden = !spares.length;
    keyed(this.spares, spares, naming(), newMachine, (node, machine) => showMachine(node, machine, "spare"));
  }

  /** Show a token of this page's own answer. */
  token() {
    this.passed += 1;
    this.node.dataset.tokens = this.passed;
    this.own = performance.now();
    this.dot();
  }

  ended() {
    setTimeout(() => (this.own = 0), 1000); // the state tells of its last tokens a little later
  }

  dot() {
    const now = performance.now();
    if (this.still.matches || document.hidden || this.node.hidden || now - this.lastDot < APART_MS) return;
    if (this.node.querySelectorAll(".dot").length >= MAX_DOTS) return;
    this.lastDot = now;
    const columns = [...this.stages.children];
    const { left: edge, top: above } = this.node.getBoundingClientRect();
    const left = edge - this.node.scrollLeft;
    const boxes = columns.map((column) => column.children[1].getBoundingClientRect());
    const [from, to] = [boxes[0].left - left, boxes.at(-1).right - left];
    const top = boxes[0].top - above + boxes[0].height / 2;
    const duration = Math.min(1400, 450 + 150 * columns.length);
    const dot = el("i", { class: "dot", "aria-hidden": "true" });
    this.node.append(dot);
    const at = (x, opacity, scale) => ({ transform: `translate(${x}px, ${top}px) translate(-50%, -50%) scale(${scale})`, opacity });
    const frames = [at(from, 0, 0.4), { ...at(from + (to - from) * 0.06, 1, 1), offset: 0.06 }, { ...at(from + (to - from) * 0.94, 1, 1), offset: 0.94 }, at(to, 0, 1.6)];
    const moving = dot.animate(frames, { duration, easing: "linear" });
    moving.onfinish = moving.oncancel = () => dot.remove();
    columns.forEach((column, i) => {
      const machine = column.querySelector(".machine:not([data-state=lost])");
      const middle = ((boxes[i].left + boxes[i].right) / 2 - left - from) / (to - from || 1);
      column.children[1].animate([{ opacity: 0.45 }, { opacity: 1 }, { opacity: 0.45 }], { duration: 400, delay: Math.max(0, middle * duration - 200) });
      machine?.animate([{ borderColor: "var(--border)" }, { borderColor: "var(--tone)" }, { borderColor: "var(--border)" }], { duration: 320, delay: Math.max(0, middle * duration - 160) });
    });
  }
}

/** Return unique keys for machines, several of which may have one name. */
function naming() {
  const seen = new Map();
  return ({ name }) => {
    seen.set(name, (seen.get(name) ?? 0) + 1);
    return `${name}#${seen.get(name)}`;
  };
}

function newStage(column) {
  const label = el("div", { class: "label" }, el("span", { class: "word" }, "layers "), el("span"));
  const node = el("div", { class: "stage" }, label, el("div", { class: "rail" }), el("div", { class: "holders" }));
  node.style.setProperty("--tone", `var(--s${column.key % COLORS})`);
  return node;
}

function newMachine() {
  return el("div", { class: "machine" }, el("b"), el("span", { class: "detail" }), el("span", { class: "meter", "aria-hidden": "true" }, el("i")));
}

function showMachine(node, machine, role = "") {
  const nobody = machine.name === "";
  const state = machine.state ?? "ready";
  const word = role || (state === "ready" ? "" : state);
  text(node.children[0], nobody ? "no machine" : machine.name);
  text(node.children[1], nobody ? "" : [word, word === "lost" ? "" : machine.device].filter(Boolean).join(" · "));
  node.dataset.state = role || state;
  const busy = Number.isFinite(machine.busy) ? Math.min(1, Math.max(0, machine.busy)) : 0;
  node.children[2].firstChild.style.width = `${Math.round(busy * 100)}%`;
  node.title = nobody ? "" : [machine.name, role || state, machine.device, Number.isFinite(machine.tokens) ? `${machine.tokens.toLocaleString("en")} tokens` : "", `${Math.round(busy * 100)} % busy`, Number.isFinite(machine.sequences) ? `${machine.sequences} sequences` : "", machine.why ?? ""].filter(Boolean).join(", ");
}

// The machines: who is connected to whom, what each is, and bytes that move.

import { attr, hideTip, showTip, svg, text, el } from "./dom.js";
import { byteRate, bytes, degrees, duration, known, number, percent, short } from "./format.js";
import { layout, together, way } from "./layout.js";
import { glyph, STATES } from "./states.js";
import { rankColor } from "./colors.js";

const PERIOD = 16; // between two dots of a link
const SIDE = 4.5; // of a link's two directions
const calm = matchMedia("(prefers-reduced-motion: reduce)");

/** Pixels per second of dots, for bytes per second: a thousand times more is 70 px/s faster. */
export const speed = (perSecond) => (perSecond > 0 ? 14 + 23 * Math.max(0, Math.log10(perSecond / 1e3)) : 0);

export class Picture {
  constructor(parent, { hover }) {
    this.hover = hover;
    this.rails = svg("g");
    this.labels = svg("g", { class: "rates", "aria-hidden": "true" });
    this.cards = svg("g");
    this.node = svg("svg", { class: "picture", role: "group" }, this.rails, this.labels, this.cards);
    this.machines = new Map();
    this.links = new Map();
    parent.append(this.node);
    new ResizeObserver(() => this.state && this.set(this.state)).observe(parent);
    calm.addEventListener("change", () => this.links.forEach((link) => this.move(link)));
  }

  set(state) {
    this.state = state;
    const width = this.node.parentElement.clientWidth;
    if (!width) return;
    const workers = state.machines.filter((m) => m.role !== "server").map((m) => m.rank);
    const server = state.machines.find((m) => m.role === "server")?.rank ?? null;
    const plan = layout(state.shape, workers, server, width);
    attr(this.node, "viewBox", `0 0 ${width} ${plan.height}`);
    attr(this.node, "width", width);
    attr(this.node, "height", plan.height);
    attr(this.node, "aria-label", describe(state));
    this.drawMachines(state, plan);
    this.drawLinks(state, plan);
  }

  drawMachines(state, plan) {
    const gone = new Set(this.machines.keys());
    for (const machine of state.machines) {
      gone.delete(machine.rank);
      const place = plan.places.get(machine.rank);
      const round = Boolean(place.round);
      let made = this.machines.get(machine.rank);
      if (!made || made.round !== round) {
        made?.node.remove();
        made = this.make(machine.rank, round);
        this.machines.set(machine.rank, made);
        this.cards.append(made.node);
      }
      made.machine = machine;
      this.update(made, machine, place);
    }
    for (const rank of gone) {
      this.machines.get(rank).node.remove();
      this.machines.delete(rank);
    }
  }

  make(rank, round) {
    const made = { round, state: null };
    made.frame = round ? svg("circle", { class: "frame" }) : svg("rect", { class: "frame", rx: 9 });
    made.mark = svg("g", { class: "mark" });
    made.stripe = svg("rect", { class: "stripe", rx: 1.5 });
    made.name = svg("text", { class: "name" });
    made.where = svg("tspan", { class: "where" });
    made.state_ = svg("tspan", { class: "state" });
    made.heat = svg("text", { class: "heat" });
    made.memory = svg("rect", { class: "meter", rx: 1.5 });
    made.used = svg("rect", { class: "used", rx: 1.5 });
    made.words = svg("text", {}, made.state_, made.where);
    const parts = round ? [made.frame, made.name] : [made.frame, made.stripe, made.mark, made.name, made.heat, made.words, made.memory, made.used];
    made.node = svg("g", { class: "machine", tabindex: "0", role: "img", data: { rank } }, ...parts);
    const show = (x, y) => {
      this.hover(rank);
      showTip(x, y, details(made.machine));
    };
    made.node.addEventListener("pointermove", (event) => show(event.clientX, event.clientY));
    made.node.addEventListener("focus", () => {
      const box = made.node.getBoundingClientRect();
      show(box.right - 20, box.bottom - 20);
    });
    for (const event of ["pointerleave", "blur"]) {
      made.node.addEventListener(event, () => {
        this.hover(null);
        hideTip();
      });
    }
    return made;
  }

  update(made, machine, place) {
    const { word, color } = STATES[machine.state] ?? STATES.starting;
    attr(made.node, "transform", `translate(${place.x.toFixed(1)} ${place.y.toFixed(1)})`);
    attr(made.node, "aria-label", `${machine.name} on ${machine.host || "an unknown host"}: ${word}`);
    attr(made.node, "data-state", machine.state);
    made.node.style.color = `var(--${color})`;
    if (made.round) {
      attr(made.frame, "r", place.w / 2);
      const sign = { lost: "×", evicted: "⊘", left: "→" }[machine.state];
      text(made.name, place.w > 20 ? (sign ?? machine.rank) : "");
      attr(made.name, "text-anchor", "middle");
      attr(made.name, "y", 4);
      return;
    }
    // A machine that is higher than its words has them in its middle; one that is lower has fewer of them.
    const [x, w, h] = [-place.w / 2, place.w, Math.min(64, place.h)];
    const y = -h / 2;
    for (const [name, value] of Object.entries({ x, y: -place.h / 2, width: w, height: place.h })) attr(made.frame, name, value);
    const server = machine.role === "server";
    const inset = h < 46 ? 6 : 9;
    for (const [name, value] of Object.entries({ x: x + 5, y: inset - place.h / 2, width: 3, height: place.h - 2 * inset })) attr(made.stripe, name, value);
    made.stripe.style.fill = server ? "var(--fg)" : `var(--${rankColor(machine.rank)})`;
    if (made.state !== machine.state) {
      made.state = machine.state;
      made.mark.replaceChildren(glyph(machine.state));
    }
    const first = h < 46 ? 0 : y + 15; // the middle of the first line
    attr(made.mark, "transform", `translate(${x + 14} ${first - 8})`);
    place_(made.name, x + 34, first + 4.5, machine.name);
    place_(made.heat, x + w - 10, first + 4.5, known(heatOf(machine)) && w > 140 ? degrees(heatOf(machine)) : "");
    attr(made.heat, "text-anchor", "end");
    attr(made.words, "x", x + 15);
    attr(made.words, "y", y + 37);
    attr(made.words, "visibility", h < 46 ? "hidden" : "visible");
    text(made.state_, word);
    fit(made, [machine.host, deviceOf(machine)].filter(Boolean).join(" · "), word, w - 25);
    const [used, total] = memoryOf(machine);
    const share = h >= 64 && known(used) && total ? Math.min(1, used / total) : null;
    attr(made.memory, "visibility", share === null ? "hidden" : "visible");
    attr(made.used, "visibility", share === null ? "hidden" : "visible");
    for (const [bar, width] of [[made.memory, w - 26], [made.used, (w - 26) * (share ?? 0)]]) {
      for (const [name, value] of Object.entries({ x: x + 15, y: y + h - 14, width: Math.max(0, width), height: 4 })) attr(bar, name, value);
    }
    attr(made.used, "class", share > 0.92 ? "used full" : "used");
  }

  drawLinks(state, plan) {
    const gone = new Set(this.links.keys());
    const down = new Set(state.machines.filter((m) => ["lost", "evicted", "left"].includes(m.state)).map((m) => m.rank));
    for (const link of state.links) {
      const found = way(plan, link.source, link.target);
      if (!found) continue;
      const key = `${link.source}>${link.target}`;
      gone.delete(key);
      let made = this.links.get(key);
      if (!made) {
        made = { rail: svg("path", { class: "rail" }), flow: svg("path", { class: "flow" }) };
        made.node = svg("g", { class: "link" }, made.rail, made.flow);
        this.links.set(key, made);
        this.rails.append(made.node);
      }
      const path = drawn(found);
      attr(made.rail, "d", path);
      attr(made.flow, "d", path);
      const broken = down.has(link.source) || down.has(link.target);
      attr(made.node, "class", broken ? "link broken" : "link");
      const worker = state.machines.find((m) => m.rank === link.source)?.role === "server" ? link.target : link.source;
      made.flow.style.stroke = `var(--${rankColor(worker)})`;
      made.flow.style.strokeWidth = plan.compact ? "2.6px" : `${3 + Math.min(2, Math.max(0, Math.log10((link.per_s || 1) / 1e4)) * 0.7)}px`;
      made.perSecond = broken ? 0 : link.per_s;
      this.move(made);
    }
    for (const key of gone) {
      this.links.get(key).node.remove();
      this.links.delete(key);
    }
    this.drawRates(state, plan);
  }

  move(link) {
    const fast = speed(link.perSecond);
    attr(link.flow, "visibility", fast > 0 ? "visible" : "hidden");
    if (calm.matches || fast === 0) {
      link.animation?.cancel();
      link.animation = null;
      return;
    }
    link.animation ??= link.flow.animate([{ strokeDashoffset: 0 }, { strokeDashoffset: -PERIOD }], { duration: 1000, iterations: Infinity });
    const wanted = fast / PERIOD;
    if (Math.abs(link.animation.playbackRate - wanted) > 0.1 * wanted) link.animation.updatePlaybackRate(wanted);
  }

  /** Bytes per second above or beside the links. */
  drawRates(state, plan) {
    const labels = [];
    for (const links of plan.compact ? [] : together(plan, state.links)) {
      const found = way(plan, links[0].source, links[0].target);
      const total = links.reduce((sum, link) => sum + link.per_s, 0);
      if (!found || !total) continue;
      const words = byteRate(total);
      const { x, y, anchor = "middle", turned, boxed } = found.label;
      const label = svg("text", { "text-anchor": anchor, y: 4 }, words);
      const width = words.length * 6.2 + 12;
      const box = boxed ? svg("rect", { x: -width / 2, y: -9, width, height: 18, rx: 9 }) : null;
      labels.push(svg("g", { transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})${turned ? " rotate(-90)" : ""}` }, box, label));
    }
    this.labels.replaceChildren(...labels);
  }

  highlight(rank) {
    for (const [key, made] of this.machines) attr(made.node, "data-hover", key === rank ? "yes" : null);
  }
}

/** A link as a path; the two directions of one lie beside each other. */
function drawn({ points, alone }) {
  const [[x0, y0], [x1, y1]] = points;
  const length = Math.hypot(x1 - x0, y1 - y0) || 1;
  const [nx, ny] = alone ? [0, 0] : [(-(y1 - y0) / length) * SIDE, ((x1 - x0) / length) * SIDE];
  return `M${points.map(([x, y]) => `${(x + nx).toFixed(1)} ${(y + ny).toFixed(1)}`).join("L")}`;
}

function place_(node, x, y, words) {
  attr(node, "x", x);
  attr(node, "y", y);
  text(node, words);
}

/** As much of the host and device as there is room for after the state. */
function fit(made, where, word, room) {
  const wanted = `${word}|${where}|${room}`;
  if (made.fitted === wanted) return;
  made.fitted = wanted;
  text(made.where, where ? `  ${where}` : "");
  for (let most = where.length - 1; most > 0 && made.words.getComputedTextLength() > room; most--) {
    text(made.where, `  ${where.slice(0, most).trimEnd()}…`);
  }
  if (made.words.getComputedTextLength() > room) text(made.where, "");
}

export const deviceOf = (machine) => machine.device || (machine.facts.device_memory_total_bytes ? "gpu" : "");
export const heatOf = (machine) => machine.facts.device_temperature_c ?? machine.facts.temperature_c;
/** Used, total, and whose: everything on the machine or on its GPU, not this process alone. */
export const memoryOf = ({ facts }) =>
  known(facts.device_memory_total_bytes)
    ? [facts.device_memory_used_bytes, facts.device_memory_total_bytes, "GPU"]
    : [facts.memory_used_bytes, facts.memory_total_bytes, "host"];

function describe(state) {
  const words = state.machines.map((machine) => `${machine.name} ${STATES[machine.state]?.word ?? machine.state}`);
  return `${state.machines.length} machines, as a ${state.shape}: ${words.join(", ")}`;
}

/** Everything that is known of a machine, as lines of the small window. */
export function details(machine) {
  const { facts } = machine;
  const [used, total, whose] = memoryOf(machine);
  const rows = [
    ["state", [STATES[machine.state]?.word ?? machine.state, machine.reason].filter(Boolean).join(": ")],
    ["host", machine.host],
    ["device", [machine.device, facts.device_name].filter(Boolean).join(", ")],
    [`memory of the ${whose}`, total ? `${bytes(used)} of ${bytes(total)}` : ""],
    ["temperature", known(heatOf(machine)) ? degrees(heatOf(machine)) : ""],
    ["load", known(facts.load) ? `${percent(facts.load)} of ${facts.cores} cores` : ""],
    [machine.own_steps ? "own step" : "step", known(machine.step) ? short(machine.step) : ""],
    ["loss", known(machine.loss) ? number(machine.loss) : ""],
    ["step time", known(machine.step_time_s) ? duration(machine.step_time_s) : ""],
    ["sent", bytes(machine.sent)],
    ["received", bytes(machine.received)],
    ["lost so far", machine.losses ? `${machine.losses} times` : ""],
  ];
  const lines = rows.filter(([, value]) => value).map(([name, value]) => el("div", {}, el("span", {}, name), el("b", {}, value)));
  return [el("strong", {}, machine.name), ...lines];
}

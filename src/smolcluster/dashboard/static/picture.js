// The machines: who is connected to whom, what each is, and bytes that move.

import { attr, hideTip, showTip, svg, text, el } from "./dom.js";
import { byteRate, bytes, degrees, duration, known, number, percent, short } from "./format.js";
import { glyph, STATES } from "./states.js";
import { rankColor } from "./theme.js";

const CARD = { w: 158, h: 64 };
const PERIOD = 16; // between two dots of a link
const SIDE = 4.5; // of a link's two directions
const calm = matchMedia("(prefers-reduced-motion: reduce)");

/** Where everybody stands. Pure: the same machines and width, the same picture. */
export function layout(shape, ranks, server, width) {
  const narrow = width < 600;
  const num = ranks.length;
  const compact = num > (narrow ? 12 : 10);
  const places = new Map();
  const put = (rank, x, y, size) => places.set(rank, { x, y, ...size });
  const card = { w: narrow ? Math.min(CARD.w, (width - 28) / 2) : CARD.w, h: CARD.h };
  const done = (height, size = card) => ({ places, height, compact, narrow, size });

  if (compact) {
    const height = narrow ? 320 : 380;
    const across = Math.max(6, Math.min(34, (0.92 * Math.PI * (width + height)) / 2 / num - 4));
    const size = { w: across, h: across, round: true };
    const [rx, ry] = [width / 2 - size.w / 2 - 4, height / 2 - size.h / 2 - 4];
    ranks.forEach((rank, i) => {
      const angle = -Math.PI / 2 + (2 * Math.PI * i) / num;
      put(rank, width / 2 + rx * Math.cos(angle), height / 2 + ry * Math.sin(angle), size);
    });
    if (server !== null) put(server, width / 2, height / 2, card);
    return done(height, size);
  }
  if (shape === "alone") {
    ranks.forEach((rank) => put(rank, width / 2, 70, card));
    return done(140);
  }
  if (shape === "line") {
    const many = narrow ? 1 : Math.min(num, Math.floor(width / 150));
    const size = { w: narrow ? card.w : Math.min(CARD.w, width / many - 44), h: card.h };
    ranks.forEach((rank, i) => {
      const [row, column] = [Math.floor(i / many), i % many];
      put(rank, (width / many) * (column + 0.5), 46 + row * (card.h + 48), size);
    });
    return done(92 + (Math.ceil(num / many) - 1) * (card.h + 48), size);
  }
  const half = Math.ceil(num / 2);
  if (shape === "star" && !narrow) {
    // The server in the middle, workers in a column on either side.
    const step = card.h + 26;
    const height = Math.max(150, half * step + 10);
    ranks.forEach((rank, i) => {
      const [left, row] = [i % 2 === 0, i >> 1];
      const inColumn = left ? half : num - half;
      put(rank, left ? card.w / 2 + 6 : width - card.w / 2 - 6, height / 2 + (row - (inColumn - 1) / 2) * step, card);
    });
    put(server, width / 2, height / 2, card);
    return done(height);
  }
  if (shape === "star") {
    put(server, width / 2, 8 + card.h / 2, card);
    ranks.forEach((rank, i) => {
      const inRow = Math.min(2, num - (i - (i % 2)));
      put(rank, (width / inRow) * ((i % 2) + 0.5), card.h + 62 + (i >> 1) * (card.h + 46) + card.h / 2, card);
    });
    return done(card.h + 62 + half * (card.h + 46) - 38);
  }
  // A ring goes along the upper row and back along the lower one; a coordinator stands between them.
  if (narrow) {
    const top = server === null ? 8 : card.h + 62;
    ranks.forEach((rank, i) => {
      const row = i < half ? i : num - 1 - i;
      put(rank, i < half ? card.w / 2 + 4 : width - card.w / 2 - 4, top + row * (card.h + 46) + card.h / 2, card);
    });
    if (server !== null) put(server, width / 2, 8 + card.h / 2, card);
    return done(top + half * (card.h + 46) - 38);
  }
  const size = { w: Math.min(CARD.w, width / half - 46), h: CARD.h };
  const between = server === null ? 66 : CARD.h + 96;
  const height = num === 2 && server === null ? 130 : 2 * size.h + between + 16;
  ranks.forEach((rank, i) => {
    const upper = i < half;
    const [inRow, column] = upper ? [half, i] : [num - half, num - 1 - i];
    const y = num === 2 && server === null ? height / 2 : upper ? 8 + size.h / 2 : height - 8 - size.h / 2;
    const x = num === 2 && server === null ? (i ? width - size.w / 2 - 30 : size.w / 2 + 30) : (width / inRow) * (column + 0.5);
    put(rank, x, y, size);
  });
  if (server !== null) put(server, width / 2, height / 2, card);
  return done(height, size);
}

/** Where the line from a to b leaves a. */
export function edge(a, b) {
  const [dx, dy] = [b.x - a.x, b.y - a.y];
  const length = Math.hypot(dx, dy) || 1;
  if (a.round) return { x: a.x + (dx / length) * (a.w / 2 + 3), y: a.y + (dy / length) * (a.w / 2 + 3) };
  const scale = Math.min(dx ? (a.w / 2 + 3) / Math.abs(dx) : Infinity, dy ? (a.h / 2 + 3) / Math.abs(dy) : Infinity);
  return { x: a.x + dx * scale, y: a.y + dy * scale };
}

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
    const [x, y, w, h] = [-place.w / 2, -place.h / 2, place.w, place.h];
    for (const [name, value] of Object.entries({ x, y, width: w, height: h })) attr(made.frame, name, value);
    const server = machine.role === "server";
    for (const [name, value] of Object.entries({ x: x + 5, y: y + 9, width: 3, height: h - 18 })) attr(made.stripe, name, value);
    made.stripe.style.fill = server ? "var(--fg)" : `var(--${rankColor(machine.rank)})`;
    if (made.state !== machine.state) {
      made.state = machine.state;
      made.mark.replaceChildren(glyph(machine.state));
    }
    attr(made.mark, "transform", `translate(${x + 14} ${y + 7})`);
    place_(made.name, x + 34, y + 19.5, machine.name);
    place_(made.heat, x + w - 10, y + 19.5, known(heatOf(machine)) && w > 140 ? degrees(heatOf(machine)) : "");
    attr(made.heat, "text-anchor", "end");
    attr(made.words, "x", x + 15);
    attr(made.words, "y", y + 37);
    text(made.state_, word);
    fit(made, [machine.host, deviceOf(machine)].filter(Boolean).join(" · "), word, w - 25);
    const [used, total] = memoryOf(machine);
    const share = known(used) && total ? Math.min(1, used / total) : null;
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
      const [a, b] = [plan.places.get(link.source), plan.places.get(link.target)];
      if (!a || !b) continue;
      const key = `${link.source}>${link.target}`;
      gone.delete(key);
      let made = this.links.get(key);
      if (!made) {
        made = { rail: svg("path", { class: "rail" }), flow: svg("path", { class: "flow" }) };
        made.node = svg("g", { class: "link" }, made.rail, made.flow);
        this.links.set(key, made);
        this.rails.append(made.node);
      }
      const [from, to] = [edge(a, b), edge(b, a)];
      const length = Math.hypot(to.x - from.x, to.y - from.y) || 1;
      const [nx, ny] = [(-(to.y - from.y) / length) * SIDE, ((to.x - from.x) / length) * SIDE];
      const path = `M${(from.x + nx).toFixed(1)} ${(from.y + ny).toFixed(1)}L${(to.x + nx).toFixed(1)} ${(to.y + ny).toFixed(1)}`;
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

  /** Bytes per second beside the links, where there is room. */
  drawRates(state, plan) {
    const pairs = new Map();
    for (const link of state.links) {
      const key = [link.source, link.target].sort((a, b) => a - b).join();
      if (!pairs.has(key)) pairs.set(key, []);
      pairs.get(key).push(link);
    }
    const shown = !plan.compact && pairs.size <= 10;
    const labels = [];
    for (const links of shown ? pairs.values() : []) {
      const [a, b] = [plan.places.get(links[0].source), plan.places.get(links[0].target)];
      const total = links.reduce((sum, link) => sum + link.per_s, 0);
      if (!a || !b || !total) continue;
      const [from, to] = [edge(a, b), edge(b, a)];
      const words = byteRate(total);
      const width = words.length * 6.2 + 12;
      if (Math.hypot(to.x - from.x, to.y - from.y) < 34) continue;
      const box = svg("rect", { x: -width / 2, y: -9, width, height: 18, rx: 9 });
      const label = svg("text", { "text-anchor": "middle", y: 4 }, words);
      labels.push(svg("g", { transform: `translate(${(from.x + to.x) / 2} ${(from.y + to.y) / 2})` }, box, label));
    }
    this.labels.replaceChildren(...labels);
  }

  highlight(rank) {
    for (const [key, made] of this.machines) attr(made.node, "data-hover", key === rank ? "yes" : null);
  }
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
}

export const deviceOf = (machine) => machine.device || (machine.facts.device_memory_total_bytes ? "gpu" : "");
export const heatOf = (machine) => machine.facts.device_temperature_c ?? machine.facts.temperature_c;
export const memoryOf = ({ facts }) =>
  known(facts.device_memory_total_bytes)
    ? [facts.device_memory_used_bytes, facts.device_memory_total_bytes]
    : [facts.memory_used_bytes, facts.memory_total_bytes];

function describe(state) {
  const words = state.machines.map((machine) => `${machine.name} ${STATES[machine.state]?.word ?? machine.state}`);
  return `${state.machines.length} machines, as a ${state.shape}: ${words.join(", ")}`;
}

/** Everything that is known of a machine, as lines of the small window. */
export function details(machine) {
  const { facts } = machine;
  const [used, total] = memoryOf(machine);
  const rows = [
    ["state", [STATES[machine.state]?.word ?? machine.state, machine.reason].filter(Boolean).join(": ")],
    ["host", machine.host],
    ["device", [machine.device, facts.device_name].filter(Boolean).join(", ")],
    ["memory", total ? `${bytes(used)} of ${bytes(total)}` : ""],
    ["temperature", known(heatOf(machine)) ? degrees(heatOf(machine)) : ""],
    ["load", known(facts.load) ? `${percent(facts.load)} of ${facts.cores} cores` : ""],
    ["step", known(machine.step) ? short(machine.step) : ""],
    ["loss", known(machine.loss) ? number(machine.loss) : ""],
    ["step time", known(machine.step_time_s) ? duration(machine.step_time_s) : ""],
    ["sent", bytes(machine.sent)],
    ["received", bytes(machine.received)],
    ["lost so far", machine.losses ? `${machine.losses} times` : ""],
  ];
  const lines = rows.filter(([, value]) => value).map(([name, value]) => el("div", {}, el("span", {}, name), el("b", {}, value)));
  return [el("strong", {}, machine.name), ...lines];
}

// The time line: when each machine took part, and what happened meanwhile.

import { attr, hideTip, showTip, svg, text, el } from "./dom.js";
import { clock, timeOfDay } from "./format.js";
import { EVENTS, glyph } from "./states.js";
import { rankColor } from "./colors.js";

const MAX_LANES = 14;
const STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400, 172800, 604800];
const ABOVE = new Set(["checkpoint", "begin", "end", "warning", "error"]);

export class Timeline {
  constructor(parent) {
    this.node = svg("svg", { class: "timeline", role: "img" });
    parent.append(this.node);
    new ResizeObserver(() => this.state && this.set(this.state)).observe(parent);
  }

  set(state) {
    this.state = state;
    const width = this.node.parentElement.clientWidth;
    const start = Math.min(state.numbers.started ?? Infinity, ...state.events.map((e) => e.time));
    if (!width || !Number.isFinite(start)) return;
    // Extend only the bars of workers in state training; the bar of a silent worker ends at its last row.
    const ended = !["starting", "training"].includes(state.status);
    const seen = state.machines.map((m) => m.last_seen ?? start);
    const last = Math.max(start + 1, ...state.events.map((e) => e.time), ...state.machines.flatMap((m) => m.spans.flat()), ...seen);
    const end = ended ? last : Math.max(last, state.time);
    const left = width < 520 ? 66 : 84;
    const x = (time) => left + ((time - start) / (end - start)) * (width - left - 14);
    const shown = state.machines.slice(0, MAX_LANES);
    const lane = shown.length > 6 ? 20 : 26;
    const height = 34 + shown.length * lane + 22;
    attr(this.node, "viewBox", `0 0 ${width} ${height}`);
    attr(this.node, "width", width);
    attr(this.node, "height", height);
    attr(this.node, "aria-label", `Timeline of ${clock(end - start)} with ${state.events.length} events; the list beside it has them in words`);

    const parts = [...this.axis(start, end, x, width, height)];
    const lanes = new Map(shown.map((machine, i) => [machine.rank, 34 + i * lane]));
    for (const machine of shown) parts.push(...this.lane(machine, lanes.get(machine.rank), x, end, ended));
    for (const event of state.events) {
      const y = ABOVE.has(event.kind) ? 6 : (lanes.get(event.rank) ?? 6);
      parts.push(this.mark(event, x(event.time), y + 2, start));
    }
    this.node.replaceChildren(...parts);
  }

  axis(start, end, x, width, height) {
    const rough = (end - start) / Math.max(2, (width - 90) / 90);
    const step = STEPS.find((s) => s >= rough) ?? STEPS.at(-1);
    const parts = [];
    for (let at = 0; at <= end - start; at += step) {
      const px = Math.round(x(start + at)) + 0.5;
      parts.push(svg("path", { class: "tick", d: `M${px} 4V${height - 18}` }));
      if (px < width - 20) parts.push(svg("text", { class: "time", x: px, y: height - 5, "text-anchor": "middle" }, clock(at)));
    }
    return parts;
  }

  lane(machine, y, x, end, ended) {
    const name = svg("text", { class: "lane", x: 0, y: y + 13 });
    text(name, machine.name);
    const silent = machine.state === "silent";
    const bars = machine.spans.map(([from, to]) => {
      const until = to ?? (silent ? Math.max(from, machine.last_seen ?? from) : end);
      const bar = svg("rect", { class: to === null && !ended && !silent ? "span open" : "span", x: x(from), y: y + 5, width: Math.max(2, x(until) - x(from)), height: 10, rx: 3 });
      bar.style.fill = machine.role === "server" ? "var(--fg)" : `var(--${rankColor(machine.rank)})`;
      return bar;
    });
    return [name, ...bars];
  }

  mark(event, x, y, start) {
    const { color } = EVENTS[event.kind] ?? EVENTS.warning;
    const node = svg("g", { class: "event", transform: `translate(${(x - 8).toFixed(1)} ${y})` }, svg("circle", { class: "halo", cx: 8, cy: 8, r: 8 }), glyph(event.kind));
    node.style.color = `var(--${color})`;
    node.addEventListener("pointermove", (at) =>
      showTip(at.clientX, at.clientY, [el("strong", {}, `${timeOfDay(event.time)}, after ${clock(event.time - start)}`), el("div", {}, event.text)]),
    );
    node.addEventListener("pointerleave", hideTip);
    return node;
  }
}

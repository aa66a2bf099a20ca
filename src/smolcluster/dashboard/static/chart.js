// Curves on a canvas: lines, bands and stacked areas; a cross-hair that all charts share; zoom by dragging.

import { el, hideTip, showTip, swatch } from "./dom.js";
import { axis as axisText, clock, count } from "./format.js";
import { color, onTheme } from "./colors.js";

const PAD = { top: 10, right: 12, bottom: 24, left: 52 };
const charts = new Set();
onTheme(() => charts.forEach((chart) => chart.draw()));

/** Columns in the order of the first: rows of a server that evaluates beside training come late. */
export function sortedBy(xs, ...columns) {
  let sorted = true;
  for (let i = 1; i < xs.length && sorted; i++) sorted = xs[i] >= xs[i - 1];
  if (sorted) return [xs, ...columns];
  const order = xs.map((_, i) => i).sort((a, b) => xs[a] - xs[b]);
  return [xs, ...columns].map((column) => order.map((i) => column[i]));
}

/** Round values between two ends: 0, 200, 400, ... `least`: between two of them. */
export function ticks(low, high, most, least = 0) {
  if (!(high > low)) return [low];
  const rough = (high - low) / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= Math.max(rough, least)) ?? least;
  const found = [];
  for (let i = Math.ceil(low / step); i * step <= high + step * 1e-9; i++) found.push(i * step);
  return found.length ? found : [low, high];
}

function timeTicks(low, high, most) {
  const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800];
  const rough = (high - low) / Math.max(1, most);
  const step = steps.find((s) => s >= rough) ?? steps.at(-1);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high; at += step) found.push(at);
  return found.length > 1 ? found : [low, high];
}

/** 0.1, 0.2, 0.5, 1, 2, ... */
export function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    for (const m of [1, 2, 5]) {
      const value = m * 10 ** power;
      if (value >= low * 0.999 && value <= high * 1.001) found.push(value);
    }
  }
  return found.length > 1 ? found : [low, high];
}

/** The index of the last x that is not beyond `at`, or the nearer neighbour. */
export function nearest(xs, at) {
  let low = 0;
  let high = xs.length - 1;
  if (high < 0) return -1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (xs[middle] <= at) low = middle;
    else high = middle - 1;
  }
  return low + 1 < xs.length && xs[low + 1] - at < at - xs[low] ? low + 1 : low;
}

export class Chart {
  /** `format` for values, `zero`: the axis begins at 0, `stack`: series are areas on top of each other, `cut`: a rare peak does
   * not make all the rest flat; it is marked at the top instead. */
  constructor(parent, { label, height = 220, format = axisText, zero = false, stack = false, cut = false }) {
    Object.assign(this, { label, format, zero, stack, cut });
    this.series = [];
    this.x = "step";
    this.log = false;
    this.zoom = null;
    this.canvas = el("canvas", { tabindex: "0", role: "img", "aria-label": label });
    this.canvas.style.height = `${height}px`;
    this.reset = el("button", { type: "button", class: "reset", hidden: true, on: { click: () => this.setZoom(null) } }, "Reset zoom");
    this.empty = el("p", { class: "empty" }, "no rows yet");
    this.readout = el("p", { class: "sr", "aria-live": "polite" });
    this.node = el("div", { class: "chart" }, this.canvas, this.empty, this.reset, this.readout);
    parent.append(this.node);
    charts.add(this);
    new ResizeObserver(() => this.draw()).observe(this.canvas);
    this.listen();
  }

  /** `series`: [{id, name, color, x: [], y: [], low?, high?, width?, alpha?, dots?, dash?}]. */
  set({ series, x = this.x, log = this.log }) {
    if (x !== this.x) this.zoom = null;
    Object.assign(this, { series, x, log });
    this.draw();
  }

  setZoom(range) {
    for (const chart of charts) {
      if (chart.x === this.x && chart.group === this.group) {
        chart.zoom = range;
        chart.draw();
      }
    }
  }

  remove() {
    charts.delete(this);
    this.node.remove();
  }

  draw() {
    if (this.pending) return;
    this.pending = requestAnimationFrame(() => {
      this.pending = 0;
      this.paint();
    });
  }

  // From data to the canvas

  stacked() {
    let below = null;
    return this.series.map((one) => {
      const y = one.y.map((value, i) => (value ?? 0) + (below ? below[i] ?? 0 : 0));
      const floor = below ?? y.map(() => 0);
      below = y;
      return { ...one, y, floor, own: one.y };
    });
  }

  range(series) {
    let [x0, x1, y0, y1] = [Infinity, -Infinity, Infinity, -Infinity];
    for (const { x } of series) {
      if (x.length) {
        x0 = Math.min(x0, x[0]);
        x1 = Math.max(x1, x.at(-1));
      }
    }
    if (this.zoom) [x0, x1] = this.zoom;
    for (const one of series) {
      for (let i = 0; i < one.x.length; i++) {
        if (one.x[i] < x0 || one.x[i] > x1) continue;
        for (const value of [one.y[i], one.band ? one.low?.[i] : null, one.band ? one.high?.[i] : null]) {
          if (value === null || value === undefined || (this.log && value <= 0)) continue;
          y0 = Math.min(y0, value);
          y1 = Math.max(y1, value);
        }
      }
    }
    if (!(x1 >= x0) || !(y1 >= y0)) return null;
    if (this.cut) y1 = this.usual(series, x0, x1, y1);
    if (this.zero) y0 = Math.min(0, y0);
    if (y1 === y0) {
      y1 += Math.abs(y1) * 0.1 || 1;
      if (!this.zero) y0 -= Math.abs(y0) * 0.1;
    }
    const room = (y1 - y0) * 0.06;
    if (!this.log) {
      y1 += room;
      if (!this.zero) y0 -= room;
    }
    if (x1 === x0) [x0, x1] = x0 > 0 ? [0, 2 * x0] : [x0 - 1, x0 + 1]; // a single point is in the middle
    return { x0, x1, y0, y1 };
  }

  usual(series, x0, x1, highest) {
    const top = this.stack ? series.slice(-1) : series;
    const values = top.flatMap((one) => one.y.filter((v, i) => v !== null && v !== undefined && one.x[i] >= x0 && one.x[i] <= x1));
    const usual = values.sort((a, b) => a - b)[Math.floor(values.length * 0.96)];
    return values.length > 20 && highest > 2.5 * usual ? 1.5 * usual : highest;
  }

  paint() {
    const width = this.canvas.clientWidth;
    const height = this.canvas.clientHeight;
    if (!width || !height) return;
    const ratio = devicePixelRatio || 1;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    const g = this.canvas.getContext("2d");
    g.scale(ratio, ratio);
    const series = this.stack ? this.stacked() : this.series;
    const range = this.range(series);
    this.view = null;
    this.empty.hidden = range !== null;
    this.reset.hidden = this.zoom === null;
    if (!range) return;

    const map = this.log ? Math.log : (v) => v;
    const [ly0, ly1] = [map(range.y0), map(range.y1)];
    const plot = { x: PAD.left, y: PAD.top, w: width - PAD.left - PAD.right, h: height - PAD.top - PAD.bottom };
    const px = (v) => plot.x + ((v - range.x0) / (range.x1 - range.x0)) * plot.w;
    const py = (v) => plot.y + plot.h - ((map(v) - ly0) / (ly1 - ly0 || 1)) * plot.h;
    this.view = { ...range, plot, px, py, series };

    this.axes(g, plot, range, px, py);
    g.save();
    g.beginPath();
    g.rect(plot.x - 5, plot.y - 5, plot.w + 10, plot.h + 10);
    g.clip();
    for (const one of series) this.stack ? this.area(g, one, px, py) : this.line(g, one, px, py);
    g.restore();
    if (this.cut) this.peaks(g, this.stack ? series.slice(-1) : series, range, plot, px);
    this.cursor(g, plot, px, py, series);
    this.describe(series);
  }

  axes(g, plot, range, px, py) {
    g.font = `11px ${color("font")}`;
    g.lineWidth = 1;
    g.textBaseline = "middle";
    g.textAlign = "right";
    const ys = this.log ? logTicks(range.y0, range.y1) : ticks(range.y0, range.y1, Math.max(2, plot.h / 44));
    for (const value of ys) {
      const y = Math.round(py(value)) + 0.5;
      if (y < plot.y - 1 || y > plot.y + plot.h + 1) continue;
      g.strokeStyle = color("grid");
      g.beginPath();
      g.moveTo(plot.x, y);
      g.lineTo(plot.x + plot.w, y);
      g.stroke();
      g.fillStyle = color("muted");
      g.fillText(this.format(value), plot.x - 8, y);
    }
    g.textBaseline = "top";
    g.textAlign = "center";
    const most = Math.max(5, plot.w / 90);
    const xs = this.x === "time" ? timeTicks(range.x0, range.x1, most) : ticks(range.x0, range.x1, most, 1); // there is no half of a step
    for (const value of xs) {
      const x = px(value);
      const text = this.x === "time" ? clock(value) : axisText(value);
      const half = g.measureText(text).width / 2;
      g.fillText(text, Math.max(plot.x + half - 8, Math.min(x, plot.x + plot.w + PAD.right - half - 1)), plot.y + plot.h + 8);
    }
  }

  line(g, one, px, py) {
    const { x, y, low, high } = one;
    const ok = (v) => v !== null && v !== undefined && !(this.log && v <= 0);
    if (one.band && low && high) {
      g.fillStyle = color(one.color);
      g.globalAlpha = 0.13;
      g.beginPath();
      let started = false;
      for (let i = 0; i < x.length; i++) if (ok(high[i])) started ? g.lineTo(px(x[i]), py(high[i])) : (g.moveTo(px(x[i]), py(high[i])), (started = true));
      for (let i = x.length - 1; i >= 0; i--) if (ok(low[i])) g.lineTo(px(x[i]), py(low[i]));
      g.fill();
    }
    g.globalAlpha = one.alpha ?? 1;
    g.strokeStyle = color(one.color);
    g.lineWidth = one.width ?? 1.5;
    g.lineJoin = "round";
    g.setLineDash(one.dash ?? []);
    g.beginPath();
    let pen = false;
    for (let i = 0; i < x.length; i++) {
      if (!ok(y[i])) {
        pen = false;
        continue;
      }
      if (pen) g.lineTo(px(x[i]), py(y[i]));
      else g.moveTo(px(x[i]), py(y[i]));
      pen = true;
    }
    g.stroke();
    g.setLineDash([]);
    if (one.dots || x.length === 1) {
      g.fillStyle = color("surface");
      g.lineWidth = 1.8;
      for (let i = 0; i < x.length; i++) {
        if (!ok(y[i])) continue;
        g.beginPath();
        g.arc(px(x[i]), py(y[i]), x.length > 60 ? 1.6 : 3, 0, 7);
        g.fill();
        g.stroke();
      }
    }
    g.globalAlpha = 1;
  }

  area(g, { x, y, floor, color: name }, px, py) {
    if (!x.length) return;
    g.fillStyle = color(name);
    g.globalAlpha = 0.8;
    g.beginPath();
    g.moveTo(px(x[0]), py(floor[0]));
    for (let i = 0; i < x.length; i++) g.lineTo(px(x[i]), py(y[i]));
    for (let i = x.length - 1; i >= 0; i--) g.lineTo(px(x[i]), py(floor[i]));
    g.fill();
    g.globalAlpha = 1;
  }

  /** Small arrows where a curve goes beyond the frame. */
  peaks(g, series, range, plot, px) {
    g.fillStyle = color("muted");
    for (const { x, y } of series) {
      for (let i = 0; i < x.length; i++) {
        if (!(y[i] > range.y1) || x[i] < range.x0 || x[i] > range.x1) continue;
        const at = px(x[i]);
        g.beginPath();
        g.moveTo(at, plot.y - 6);
        g.lineTo(at + 3.5, plot.y);
        g.lineTo(at - 3.5, plot.y);
        g.fill();
      }
    }
  }

  cursor(g, plot, px, py, series) {
    if (this.drag) {
      g.fillStyle = color("accent");
      g.globalAlpha = 0.14;
      g.fillRect(Math.min(this.drag[0], this.drag[1]), plot.y, Math.abs(this.drag[1] - this.drag[0]), plot.h);
      g.globalAlpha = 1;
    }
    if (this.at === null || this.at === undefined) return;
    const x = Math.round(px(this.at)) + 0.5;
    if (x < plot.x || x > plot.x + plot.w) return;
    g.strokeStyle = color("muted");
    g.setLineDash([3, 3]);
    g.beginPath();
    g.moveTo(x, plot.y);
    g.lineTo(x, plot.y + plot.h);
    g.stroke();
    g.setLineDash([]);
    for (const one of series) {
      const i = nearest(one.x, this.at);
      if (i < 0 || one.y[i] === null || one.y[i] === undefined) continue;
      g.fillStyle = color(one.color);
      g.beginPath();
      g.arc(px(one.x[i]), py(one.y[i]), 3, 0, 7);
      g.fill();
    }
  }

  describe(series) {
    const parts = series.slice(0, 6).map((one) => {
      const value = (one.own ?? one.y).findLast((v) => v !== null && v !== undefined);
      return value === undefined ? null : `${one.name} ${this.format(value)}`;
    });
    const label = `${this.label}: ${parts.filter(Boolean).join(", ") || "no rows yet"}`;
    if (this.canvas.getAttribute("aria-label") !== label) this.canvas.setAttribute("aria-label", label);
  }

  // People

  listen() {
    const xOf = (event) => event.clientX - this.canvas.getBoundingClientRect().left;
    const valueAt = (x) => {
      const { x0, x1, plot } = this.view;
      return x0 + (Math.max(0, Math.min(plot.w, x - plot.x)) / plot.w) * (x1 - x0);
    };
    this.canvas.addEventListener("pointermove", (event) => {
      if (!this.view) return;
      if (this.drag) this.drag[1] = Math.max(PAD.left, Math.min(xOf(event), PAD.left + this.view.plot.w));
      point(this, valueAt(xOf(event)));
      this.tell(event.clientX, event.clientY);
    });
    this.canvas.addEventListener("pointerleave", () => {
      point(this, null);
      hideTip();
    });
    this.canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0 || event.pointerType === "touch" || !this.view) return;
      this.canvas.setPointerCapture(event.pointerId);
      this.drag = [xOf(event), xOf(event)];
    });
    this.canvas.addEventListener("pointerup", () => {
      const drag = this.drag;
      this.drag = null;
      if (drag && this.view && Math.abs(drag[1] - drag[0]) > 8) {
        this.setZoom([valueAt(Math.min(...drag)), valueAt(Math.max(...drag))]);
      } else this.draw();
    });
    this.canvas.addEventListener("dblclick", () => this.setZoom(null));
    this.canvas.addEventListener("keydown", (event) => {
      if (!this.view) return;
      if (event.key === "Escape") this.setZoom(null);
      const longest = this.series.reduce((a, b) => (b.x.length > a.length ? b.x : a), []);
      const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
      if (step === undefined || !longest.length) return;
      event.preventDefault();
      const from = this.at === null || this.at === undefined ? longest.length - 1 : nearest(longest, this.at);
      point(this, longest[Math.max(0, Math.min(longest.length - 1, from + step))]);
      const box = this.canvas.getBoundingClientRect();
      this.tell(box.left + this.view.px(this.at), box.top + PAD.top);
      this.readout.textContent = [this.title(), ...this.values().map(([one, value]) => `${one.name} ${this.format(value)}`)].join(", ");
    });
    this.canvas.addEventListener("blur", () => {
      point(this, null);
      hideTip();
    });
  }

  title() {
    return this.x === "time" ? `at ${clock(this.at)}` : `step ${count(this.at)}`;
  }

  values() {
    return this.view.series
      .map((one) => {
        const i = nearest(one.x, this.at);
        return [one, i < 0 ? null : (one.own ?? one.y)[i]];
      })
      .filter(([, value]) => value !== null && value !== undefined);
  }

  tell(x, y) {
    const rows = this.values().slice(0, 12);
    if (!rows.length) return hideTip();
    const lines = rows.map(([one, value]) => el("div", {}, swatch(one.color), el("span", {}, one.name), el("b", {}, this.format(value))));
    showTip(x, y, [el("strong", {}, this.title()), ...lines]);
  }
}

/** The cross-hair of one chart is the cross-hair of its group. */
function point(from, at) {
  for (const chart of charts) {
    if (chart === from || (chart.group === from.group && chart.x === from.x)) {
      chart.at = at;
      chart.draw();
    }
  }
}

/** A button for each curve, which hides it. */
export class Legend {
  constructor(changed) {
    this.off = new Set();
    this.changed = changed;
    this.node = el("div", { class: "legend", role: "group", "aria-label": "Curves" });
  }

  set(items) {
    const wanted = items.map((item) => `${item.id}|${item.name}|${item.color}`).join();
    if (wanted === this.shown) return;
    this.shown = wanted;
    this.node.replaceChildren(...items.map((item) => this.chip(item)));
  }

  chip(item) {
    const chip = el("button", { type: "button", "aria-pressed": String(!this.off.has(item.id)) }, swatch(item.color, item.kind), item.name);
    chip.addEventListener("click", () => {
      this.off.has(item.id) ? this.off.delete(item.id) : this.off.add(item.id);
      chip.setAttribute("aria-pressed", String(!this.off.has(item.id)));
      this.changed();
    });
    return chip;
  }

  visible(id) {
    return !this.off.has(id);
  }
}

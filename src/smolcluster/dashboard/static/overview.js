// The first view: numbers, machines, curves, links, events.

import { Chart, Legend, sortedBy } from "./chart.js";
import { attr, card, choice, el, keyed, swatch, text } from "./dom.js";
import { byteRate, bytes, clock, count, DASH, degrees, duration, known, number, percent, rate, short, timeOfDay } from "./format.js";
import { deviceOf, heatOf, memoryOf, Picture } from "./picture.js";
import { badge, EVENTS, STATES } from "./states.js";
import { rankColor } from "./colors.js";
import { Timeline } from "./timeline.js";

const SPLIT = [
  ["compute_s", "compute", "split0"],
  ["comm_s", "communication", "split1"],
  ["wait_s", "waiting", "split2"],
];

export class Overview {
  constructor() {
    this.x = "step";
    this.log = false;
    this.hovered = null;
    this.tiles = new Tiles();
    const draw = () => this.state && this.curves(this.state);

    // Machines
    this.summary = el("span", { class: "note" });
    const pictureBox = el("div", { class: "box" });
    this.picture = new Picture(pictureBox, { hover: (rank) => this.hover(rank) });
    this.table = new Machines((rank) => this.hover(rank));
    const machines = card("Machines", { id: "machines", note: this.summary }, pictureBox);
    const table = card("Workers", { id: "who" }, this.table.node);

    // Curves
    const axis = choice("Horizontal axis", [["step", "Step"], ["time", "Time"]], this.x, (value) => {
      this.x = value;
      draw();
    });
    const scale = choice("Scale", [["linear", "Linear"], ["log", "Log"]], "linear", (value) => {
      this.log = value === "log";
      draw();
    });
    this.legend = new Legend(draw);
    const loss = card("Loss", { id: "loss", tools: el("div", { class: "tools" }, axis, scale) });
    this.loss = new Chart(loss, { label: "Loss", height: 268, format: (v) => (Math.abs(v) < 1e4 && Math.abs(v) >= 1e-3 ? String(Number(v.toPrecision(5))) : number(v)) });
    loss.append(this.legend.node);

    const split = card("Time of a step", { id: "split", note: el("span", { class: "note" }, "mean of the workers") });
    this.split = new Chart(split, { label: "Time of a step", height: 186, format: duration, zero: true, stack: true, cut: true });
    this.splitLegend = el("div", { class: "legend" }, ...SPLIT.map(([, name, color]) => el("span", {}, swatch(color), name)));
    this.bars = el("div", { class: "bars" });
    split.append(this.splitLegend, this.bars);

    const throughput = card("Throughput", { id: "throughput" });
    this.throughputNote = throughput.querySelector("h2");
    this.throughput = new Chart(throughput, { label: "Throughput", height: 180, format: short, zero: true, cut: true });
    const staleness = card("Staleness", { id: "staleness", note: el("span", { class: "note" }, "versions behind") });
    this.staleness = new Chart(staleness, { label: "Staleness", height: 180, zero: true });
    this.metricsLegend = new Legend(draw);
    this.metricsCard = card("Metrics", { id: "metrics", note: el("span", { class: "note" }, "of the validation samples") });
    this.metrics = new Chart(this.metricsCard, { label: "Metrics", height: 180, format: number });
    this.metricsCard.append(this.metricsLegend.node);
    for (const chart of [this.loss, this.split, this.throughput, this.staleness, this.metrics]) chart.group = "overview";

    // Traffic and events
    this.links = new Links();
    const links = card("Bytes per link", { id: "links" }, this.links.node);
    const lineBox = el("div", { class: "box" });
    const line = card("Timeline", { id: "timeline" }, lineBox);
    this.timeline = new Timeline(lineBox);
    this.events = el("ol", { class: "events", "aria-label": "Events, the newest first" });
    const events = card("Events", { id: "events" }, this.events);

    this.node = el("div", { class: "grid" }, this.tiles.node, machines, table, loss, split, this.metricsCard, throughput, staleness, links, line, events);
  }

  hover(rank) {
    if (this.hovered === rank) return;
    this.hovered = rank;
    this.picture.highlight(rank);
    this.table.highlight(rank);
    if (this.state) this.curves(this.state);
  }

  tick() {
    if (this.state) this.tiles.set(this.state);
  }

  set(state) {
    this.state = state;
    this.tiles.set(state);
    const words = {};
    for (const { state: name } of state.machines) words[name] = (words[name] ?? 0) + 1;
    text(this.summary, Object.entries(words).map(([name, num]) => `${num} ${STATES[name]?.word ?? name}`).join(", "));
    this.picture.set(state);
    this.table.set(state);
    this.curves(state);
    this.links.set(state);
    this.timeline.set(state);
    this.listEvents(state);
  }

  curves(state) {
    const start = state.numbers.started ?? 0;
    const xs = (columns) => (this.x === "time" ? columns.time.map((t) => t - start) : columns.step);
    const ordered = (columns, ...names) => sortedBy(xs(columns), ...names.map((name) => columns[name] ?? []));
    const broken = (columns, name, spans) => ordered({ ...columns, [name]: withGaps(columns.time, columns[name], spans) }, name);
    const workers = state.machines.filter((m) => m.role !== "server");
    const several = workers.length > 1 || state.machines.some((m) => m.role === "server");

    // Loss: every worker thin, all of them together strong, evaluations as dots.
    const items = [];
    const series = [];
    const draws = (rank) => this.legend.visible(`rank${rank}`);
    for (const { rank, name, spans } of several ? workers : []) {
      const curve = state.curves[`rank${rank}`];
      items.push({ id: `rank${rank}`, name, color: rankColor(rank) });
      if (!curve || !draws(rank)) continue;
      const [x, y] = broken(curve.columns, "loss", spans);
      const alpha = this.hovered === null ? 0.55 : this.hovered === rank ? 1 : 0.12;
      series.push({ id: rank, name, color: rankColor(rank), x, y, width: this.hovered === rank ? 2 : 1.1, alpha });
    }
    const { joined, val } = state.curves;
    items.unshift({ id: "val", name: "validation", color: "val", kind: "ring" });
    items.unshift({ id: "joined", name: several ? "all workers" : "training", color: "fg" });
    if (joined && this.legend.visible("joined")) {
      const [x, y, low, high] = ordered(joined.columns, "loss", "lowest", "highest");
      const faded = this.hovered !== null && workers.some((m) => m.rank === this.hovered);
      series.push({ id: "joined", name: items[0].name, color: "fg", x, y, low, high, band: joined.stride > 1, width: 1.9, alpha: faded ? 0.3 : 1 });
    }
    if (val?.columns.step.length && this.legend.visible("val")) {
      const [x, y] = ordered(val.columns, "val_loss");
      series.push({ id: "val", name: "validation", color: "val", x, y, width: 1.4, dash: [4, 4], dots: true });
    }
    this.drawMetrics(state, ordered);
    this.legend.set(items.slice(0, 18));
    this.loss.set({ series, x: this.x, log: this.log });

    // Where the time of a step goes.
    const split = state.curves.workers?.columns;
    this.split.set({
      x: this.x,
      series: split
        ? SPLIT.map(([field, name, color]) => {
            const [x, y] = ordered(split, field);
            return { id: field, name, color, x, y };
          })
        : [],
    });
    this.splitBars(workers);

    // Throughput: samples where there are no tokens.
    const field = joined?.columns.tokens_per_s.some((v) => v) ? "tokens_per_s" : "samples_per_s";
    text(this.throughputNote, field === "tokens_per_s" ? "Tokens per second" : "Samples per second");
    const each = (name, most) =>
      workers.slice(0, most).flatMap(({ rank, name: title, spans }) => {
        const curve = state.curves[`rank${rank}`];
        if (!curve || !draws(rank)) return [];
        const [x, y] = broken(curve.columns, name, spans);
        return [{ id: rank, name: title, color: rankColor(rank), x, y, width: 1.2, alpha: this.hovered === null ? 0.75 : this.hovered === rank ? 1 : 0.15 }];
      });
    const all = joined ? [{ id: "joined", name: several ? "all workers" : "training", color: "fg", ...pair(ordered(joined.columns, field)), width: 1.8 }] : [];
    this.throughput.set({ x: this.x, series: several ? [...each(field, 16), ...all] : all });
    this.staleness.set({ x: this.x, series: each("staleness", 16) });
  }

  /** What the task itself measures, where it does. */
  drawMetrics(state, ordered) {
    const found = Object.keys(state.curves).filter((id) => id.startsWith("val_"));
    const items = found.map((id, i) => ({ id, name: id.slice("val_".length), color: rankColor(i) }));
    this.metricsCard.hidden = !items.length;
    this.metricsLegend.set(items);
    this.metrics.set({
      x: this.x,
      series: items.filter(({ id }) => this.metricsLegend.visible(id)).map((item) => {
        const [x, y] = ordered(state.curves[item.id].columns, item.id);
        return { ...item, x, y, width: 1.4, dots: true };
      }),
    });
  }

  /** The last row of each worker: the same three parts, side by side. */
  splitBars(workers) {
    const rows = workers.filter((m) => known(m.step_time_s) && m.step_time_s > 0).slice(0, 8);
    const longest = Math.max(...rows.map((m) => m.step_time_s), 0);
    keyed(
      this.bars,
      rows,
      (m) => m.rank,
      (m) => {
        const parts = SPLIT.map(([, , color]) => {
          const part = el("i");
          part.style.background = `var(--${color})`;
          return part;
        });
        return el("div", {}, el("span", {}, m.name), el("div", { class: "bar" }, ...parts), el("b"));
      },
      (row, m) => {
        const [, bar, total] = row.children;
        SPLIT.forEach(([field], i) => (bar.children[i].style.width = `${(100 * Math.max(0, m[field] ?? 0)) / longest}%`));
        const words = SPLIT.map(([field, name]) => `${name} ${duration(m[field])}`).join(", ");
        attr(row, "title", words);
        text(total, duration(m.step_time_s));
      },
    );
  }

  listEvents(state) {
    const newest = state.events.slice(-120).reverse();
    const stamp = newest.map((event) => event.time + event.kind).join();
    if (stamp === this.listed) return;
    this.listed = stamp;
    const rows = newest.map((event) => {
      const { word, color } = EVENTS[event.kind] ?? EVENTS.warning;
      const mark = el("span", { class: "kind", title: word }, badge(event.kind), el("span", { class: "sr" }, word));
      mark.style.color = `var(--${color})`;
      return el("li", { data: { kind: event.kind } }, mark, el("time", {}, timeOfDay(event.time)), el("span", {}, event.text));
    });
    this.events.replaceChildren(...(rows.length ? rows : [el("li", { class: "none" }, "nothing has happened yet")]));
  }
}

const pair = ([x, y]) => ({ x, y });

/** The first value after an absence is left out, so that no line is drawn over the time that a machine was gone. */
function withGaps(times, values, spans) {
  const ends = spans.map(([, to]) => to).filter((to) => to !== null);
  if (!ends.length) return values;
  return values.map((value, i) => (i && ends.some((end) => times[i - 1] <= end && end < times[i]) ? null : value));
}

/** The strip at the top. */
class Tiles {
  constructor() {
    this.node = el("section", { class: "tiles", "aria-label": "Numbers" });
    this.made = new Map();
    for (const [id, label] of [
      ["step", "Step"], ["loss", "Training loss"], ["val", "Validation loss"], ["rate", "Throughput"],
      ["time", "Step time"], ["traffic", "Traffic"], ["stale", "Staleness"], ["left", "Time left"],
    ]) this.add(id, label);
    this.bar = el("i");
    this.progress = el("div", { class: "progress", role: "progressbar", "aria-label": "Steps done", "aria-valuemin": "0", "aria-valuemax": "100" }, this.bar);
    this.made.get("step").tile.append(this.progress);
    this.received = 0;
  }

  add(id, label) {
    const value = el("b");
    const sub = el("small");
    const tile = el("div", { class: "tile", data: { tile: id } }, el("span", {}, label), value, sub);
    this.made.set(id, { value, sub, tile });
    this.node.append(tile);
  }

  put(id, value, sub = "", title = null) {
    const { value: big, sub: small } = this.made.get(id);
    text(big, value);
    text(small, sub);
    attr(small, "title", title);
  }

  set(state) {
    const n = state.numbers;
    if (state !== this.state) {
      this.state = state;
      this.received = performance.now();
    }
    const moving = state.status === "training";
    const since = moving ? (performance.now() - this.received) / 1000 : 0;
    const elapsed = known(n.elapsed_s) ? n.elapsed_s + since : null;
    const share = known(n.step) && n.steps ? Math.min(1, n.step / n.steps) : null;
    this.put("step", count(n.step), n.steps ? `of ${count(n.steps)}${share === null ? "" : `, ${percent(share)}`}` : "");
    this.progress.hidden = share === null;
    this.bar.style.width = `${100 * (share ?? 0)}%`;
    attr(this.progress, "aria-valuenow", share === null ? null : Math.round(share * 100));
    this.put("loss", number(n.loss), known(n.lr) ? `lr ${Number(n.lr.toPrecision(3))}` : "", "learning rate");
    const accuracy = known(n.val_accuracy) ? `, accuracy ${(100 * n.val_accuracy).toFixed(1)} %` : "";
    this.put("val", number(n.val_loss), known(n.best_val_loss) ? `best ${number(n.best_val_loss)}${accuracy}` : "not evaluated yet");
    for (const [name, value] of Object.entries(n.metrics ?? {})) {
      const id = `val_${name}`;
      if (!this.made.has(id)) this.add(id, name);
      this.put(id, number(value), "validation");
    }
    if (n.skipped && !this.made.has("skipped")) this.add("skipped", "Skipped steps");
    if (this.made.has("skipped")) {
      this.made.get("skipped").tile.hidden = !n.skipped;
      this.put("skipped", count(n.skipped), "gradient not finite");
    }
    this.put("rate", ...rate(n));
    this.put("time", duration(n.step_time_s), known(n.compute_s) && n.step_time_s ? `${percent(n.compute_s / n.step_time_s)} compute` : "");
    this.put("traffic", moving ? byteRate(n.bytes_per_s) : bytes(n.bytes), moving ? `${bytes(n.bytes)} so far` : "in all");
    this.put("stale", known(n.staleness) ? n.staleness.toFixed(n.staleness < 10 && n.staleness % 1 ? 1 : 0) : DASH, n.stale_rejected ? `${count(n.stale_rejected)} refused` : "versions behind");
    if (moving) this.put("left", clock(known(n.eta_s) ? Math.max(0, n.eta_s - since) : null), `running for ${clock(elapsed)}`);
    else this.put("left", clock(elapsed), ["finished", "failed", "interrupted"].includes(state.status) ? "in all" : "since it began");
    text(this.made.get("left").tile.firstChild, moving ? "Time left" : "Time");
  }
}

const COLUMNS = [
  ["", "machine", ""],
  ["state", "state", ""],
  ["device", "device", "wide"],
  ["step", "step", "n"],
  ["loss", "loss", "n"],
  ["time", "step time", "n"],
  ["memory", "memory", "n wide"],
  ["heat", "temp", "n wide"],
];

class Machines {
  constructor(hover) {
    this.hover = hover;
    const head = COLUMNS.map(([, title, kind]) => el("th", { scope: "col", class: kind || null }, title));
    this.body = el("tbody");
    this.table = el("table", { class: "machines" }, el("thead", {}, el("tr", {}, ...head)), this.body);
    this.node = el("div", { class: "scroll" }, this.table);
  }

  set(state) {
    this.table.classList.toggle("cool", !state.machines.some((m) => known(heatOf(m)))); // no sensor, no column
    keyed(this.body, state.machines, (m) => m.rank, (m) => this.row(m), (row, m) => this.update(row, m, state));
  }

  row(machine) {
    const row = el("tr", {}, el("th", { scope: "row" }, el("i", { class: "swatch" }), el("span")), ...COLUMNS.slice(1).map(([, , kind]) => el("td", { class: kind || null })));
    row.addEventListener("pointerenter", () => this.hover(machine.rank));
    row.addEventListener("pointerleave", () => this.hover(null));
    return row;
  }

  update(row, m, state) {
    const [name, status, device, step, loss, time, memory, heat] = row.children;
    const server = m.role === "server";
    name.firstChild.style.background = server ? "var(--fg)" : `var(--${rankColor(m.rank)})`;
    text(name.lastChild, m.name);
    attr(name, "title", m.host);
    const { word, color } = STATES[m.state] ?? STATES.starting;
    if (status.dataset.state !== m.state) {
      status.dataset.state = m.state;
      const mark = el("span", { class: "badged" }, badge(m.state), word);
      mark.style.color = `var(--${color})`;
      status.replaceChildren(mark);
    }
    attr(status, "title", m.reason);
    attr(row, "data-state", m.state);
    text(device, [m.host, deviceOf(m)].filter(Boolean).join(" · ") || DASH);
    attr(device, "title", m.facts.device_name);
    text(step, known(m.step) && m.own_steps ? `${count(m.step)} own` : count(m.step));
    attr(step, "title", m.own_steps ? "steps of this worker since it joined; the run counts the server's" : null);
    text(loss, number(m.loss));
    text(time, server && state.machines.length > 1 ? DASH : duration(m.step_time_s));
    const [used, total, whose] = memoryOf(m);
    text(memory, total && known(used) ? `${percent(used / total)} of ${whose}` : DASH);
    attr(memory, "title", total ? `${bytes(used)} of ${bytes(total)} in use on the ${whose}, by all processes` : null);
    text(heat, degrees(heatOf(m)));
  }

  highlight(rank) {
    for (const row of this.body.children) attr(row, "data-hover", row.dataset.key === String(rank) ? "yes" : null);
  }
}

const VISIBLE_LINKS = 8; // as many as the box has room for: see `.scroll.tall`

class Links {
  constructor() {
    this.body = el("tbody");
    const head = el("tr", {}, ...[["link", ""], ["now", "n"], ["in all", "n"]].map(([title, kind]) => el("th", { scope: "col", class: kind || null }, title)));
    this.count = el("p", { class: "fine", data: { count: "links" } });
    this.note = el("p", { class: "fine", hidden: true }, "≈ follows from what each machine sent and received in all");
    this.node = el("div", {}, el("div", { class: "scroll tall" }, el("table", { class: "links" }, el("thead", {}, head), this.body)), this.count, this.note);
  }

  set(state) {
    const names = new Map(state.machines.map((m) => [m.rank, m.name]));
    const most = Math.max(1, ...state.links.map((link) => link.bytes));
    keyed(
      this.body,
      state.links.slice(0, 200),
      (link) => `${link.source}>${link.target}`,
      () => el("tr", {}, el("th", { scope: "row" }), el("td", { class: "n" }), el("td", { class: "n" }, el("i", { class: "fill" }), el("span"))),
      (row, link) => {
        const [name, now, all] = row.children;
        text(name, `${names.get(link.source)} → ${names.get(link.target)}`);
        text(now, link.per_s ? byteRate(link.per_s) : DASH);
        all.firstChild.style.width = `${(100 * link.bytes) / most}%`;
        text(all.lastChild, (link.inferred ? "≈ " : "") + bytes(link.bytes));
      },
    );
    const most_shown = Math.min(200, state.links.length);
    text(this.count, state.links.length > VISIBLE_LINKS ? `${most_shown} of ${state.links.length} links; scroll for the others` : "");
    this.count.hidden = state.links.length <= VISIBLE_LINKS;
    this.note.hidden = !state.links.some((link) => link.inferred);
    if (!state.links.length) this.body.replaceChildren(el("tr", {}, el("td", { colspan: "3", class: "none" }, "one machine, no links")));
  }
}

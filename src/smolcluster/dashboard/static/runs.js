// All runs of the folder, and several of them beside each other.

import { Chart, Legend, sortedBy } from "./chart.js";
import { card, choice, el, swatch } from "./dom.js";
import { clock, count, day, DASH, duration, known, number, short } from "./format.js";
import { RUN_STATES } from "./states.js";
import { ask } from "./store.js";
import { COLORS } from "./colors.js";

const MAX_CHOSEN = 8;
const HINT = "choose up to eight to compare";

export class Runs {
  constructor({ open }) {
    this.open = open;
    this.chosen = [];
    this.x = "step";
    this.body = el("tbody");
    const titles = [["", ""], ["run", ""], ["status", ""], ["strategy", ""], ["workers", "n wide"], ["steps", "n"], ["loss", "n"], ["val loss", "n"], ["speed", "n wide"], ["time", "n wide"], ["last change", "n wide"]];
    const head = el("tr", {}, ...titles.map(([title, kind]) => el("th", { scope: "col", class: kind || null }, title || el("span", { class: "sr" }, "compare"))));
    this.hint = el("span", { class: "note" }, HINT);
    const list = card("Runs", { id: "runs", note: this.hint }, el("div", { class: "scroll" }, el("table", { class: "runs" }, el("thead", {}, head), this.body)));

    this.legend = new Legend(() => this.draw());
    const axis = choice("Horizontal axis", [["step", "Step"], ["time", "Time"]], this.x, (value) => {
      this.x = value;
      this.draw();
    });
    this.lossCard = card("Training loss", { id: "compare-loss", tools: el("div", { class: "tools" }, axis) });
    this.loss = new Chart(this.lossCard, { label: "Training loss of several runs", height: 280, format: (v) => String(Number(v.toPrecision(5))) });
    this.lossCard.append(this.legend.node);
    this.valCard = card("Validation loss", { id: "compare-val" });
    this.val = new Chart(this.valCard, { label: "Validation loss of several runs", height: 280, format: (v) => String(Number(v.toPrecision(5))) });
    this.loss.group = this.val.group = "compare";
    this.numbers = el("div", { class: "scroll" });
    this.differences = el("div", { class: "scroll" });
    this.compared = el("div", { class: "grid inner loose", hidden: true }, this.lossCard, this.valCard, card("Numbers", { id: "compare-numbers" }, this.numbers), card("What differs", { id: "compare-config" }, this.differences));
    this.node = el("div", {}, el("div", { class: "single" }, list), this.compared);
  }

  list(runs, current) {
    const stamp = JSON.stringify([runs, current, this.chosen]);
    if (stamp === this.stamp) return;
    this.stamp = stamp;
    this.runs = runs;
    this.current = current;
    if (!this.started && current) {
      this.started = true;
      this.chosen = [current];
      this.load();
    }
    const { tagName, dataset: { run: focused } = {} } = document.activeElement ?? {};
    this.body.replaceChildren(...runs.map((run) => this.row(run)));
    if (focused) [...this.body.querySelectorAll("[data-run]")].find((node) => node.dataset.run === focused && node.tagName === tagName)?.focus();
    if (!runs.length) this.body.replaceChildren(el("tr", {}, el("td", { colspan: "11", class: "none" }, "no runs yet")));
  }

  row(run) {
    const box = el("input", { type: "checkbox", "aria-label": `compare ${run.name}`, data: { run: run.name } });
    box.checked = this.chosen.includes(run.name);
    box.addEventListener("change", () => {
      this.chosen = box.checked ? [...this.chosen, run.name].slice(-MAX_CHOSEN) : this.chosen.filter((name) => name !== run.name);
      this.list(this.runs, this.current);
      this.load();
    });
    const link = el("a", { href: this.open(run.name), data: { run: run.name } }, run.name);
    const status = el("span", { class: "pill small" }, run.status);
    status.dataset.tone = RUN_STATES[run.status] ?? "muted";
    const speed = run.tokens_per_s ? `${short(run.tokens_per_s)} tok/s` : run.samples_per_s ? `${short(run.samples_per_s)} samples/s` : DASH;
    const cells = [count(run.workers), count(run.steps), number(run.train_loss), number(run.val_loss), speed, clock(run.wall_s), day(run.changed)];
    const kinds = ["n wide", "n", "n", "n", "n wide", "n wide", "n wide"];
    return el("tr", { "aria-current": run.name === this.current ? "true" : null }, el("td", {}, box), el("th", { scope: "row" }, link), el("td", {}, status), el("td", {}, run.strategy), ...cells.map((words, i) => el("td", { class: kinds[i] }, words)));
  }

  async load() {
    const names = this.chosen;
    this.compared.hidden = !names.length;
    if (!names.length) return;
    const asked = new URLSearchParams(names.map((name) => ["run", name]));
    let found;
    try {
      found = await ask(`/api/compare?${asked}`);
    } catch {
      this.hint.textContent = "these runs could not be read";
      return;
    }
    if (names !== this.chosen) return;
    this.hint.textContent = HINT;
    this.found = found;
    this.draw();
  }

  draw() {
    if (!this.found) return;
    const names = Object.keys(this.found.runs);
    const colored = names.map((name, i) => ({ id: name, name, color: `s${i % COLORS}` }));
    this.legend.set(colored);
    const lines = (which, field, style) =>
      colored
        .filter(({ id }) => this.legend.visible(id))
        .map(({ id, name, color }) => {
          const { columns } = this.found.runs[id].curves[which];
          const start = this.found.runs[id].numbers.started ?? columns.time[0] ?? 0;
          const [x, y] = sortedBy(this.x === "time" ? columns.time.map((t) => t - start) : columns.step, columns[field]);
          return { id, name, color, x, y, ...style };
        });
    this.loss.set({ series: lines("joined", "loss", { width: 1.6 }), x: this.x });
    this.val.set({ series: lines("val", "val_loss", { width: 1.4, dots: true }), x: this.x });
    this.table(names);
  }

  table(names) {
    const rows = [
      ["status", (run) => run.status], ["strategy", (run) => run.strategy], ["workers", (run) => count(run.num_workers)],
      ["steps", ({ numbers: n }) => count(n.step)], ["training loss", ({ numbers: n }) => number(n.loss)],
      ["validation loss", ({ numbers: n }) => number(n.val_loss)], ["best validation loss", ({ numbers: n }) => number(n.best_val_loss)],
      ["tokens per second", ({ numbers: n }) => short(n.tokens_per_s)], ["step time", ({ numbers: n }) => duration(n.step_time_s)],
      ["staleness", ({ numbers: n }) => (known(n.staleness) ? n.staleness.toFixed(1) : DASH)], ["time", ({ numbers: n }) => clock(n.elapsed_s)],
    ];
    const titles = () => names.map((name, i) => el("th", { scope: "col", class: "n" }, swatch(`s${i % COLORS}`), name));
    const head = () => el("thead", {}, el("tr", {}, el("th", { scope: "col" }, ""), ...titles()));
    this.numbers.replaceChildren(el("table", {}, head(), el("tbody", {}, ...rows.map(([title, value]) => el("tr", {}, el("th", { scope: "row" }, title), ...names.map((name) => el("td", { class: "n" }, value(this.found.runs[name]))))))));
    const { differences } = this.found;
    this.differences.replaceChildren(
      differences.length
        ? el("table", {}, head(), el("tbody", {}, ...differences.map((row) => el("tr", {}, el("th", { scope: "row" }, row.key), ...names.map((name) => el("td", { class: "n" }, row.values[name]))))))
        : el("p", { class: "none" }, names.length > 1 ? "nothing: the configurations are the same" : "choose a second run above"),
    );
  }
}

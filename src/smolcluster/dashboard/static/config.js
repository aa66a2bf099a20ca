// What was asked for, what came of it, what was saved.

import { card, el } from "./dom.js";
import { bytes, clock, count, day, DASH, known, number, short } from "./format.js";

const SUMMARY = {
  wall_s: clock, tokens: short, samples: short, tokens_per_s: short, samples_per_s: short, bytes_sent: bytes, bytes_received: bytes,
  peak_memory_bytes: bytes, train_loss: number, val_loss: number, finished: day, steps: count,
};

export class Config {
  constructor() {
    this.search = el("input", { type: "search", placeholder: "Find a key", "aria-label": "Find a key", autocomplete: "off", spellcheck: "false" });
    this.search.addEventListener("input", () => this.state && this.draw(this.state));
    this.keys = el("div", { class: "keys" });
    this.summary = el("div", { class: "scroll" });
    this.saved = el("div", { class: "scroll" });
    this.node = el(
      "div",
      { class: "grid loose" },
      card("Configuration", { id: "config", tools: this.search }, this.keys),
      card("Summary", { id: "summary" }, this.summary),
      card("Checkpoints", { id: "checkpoints" }, this.saved),
    );
  }

  set(state) {
    this.state = state;
    const stamp = JSON.stringify([state.name, state.summary, state.checkpoints]);
    if (!this.node.isConnected || (stamp === this.stamp && state.config === this.config)) return;
    Object.assign(this, { stamp, config: state.config });
    this.draw(state);
  }

  draw(state) {
    const wanted = this.search.value.toLowerCase();
    const sections = new Map();
    for (const [key, value] of Object.entries(state.config)) {
      if (wanted && !`${key} ${value}`.toLowerCase().includes(wanted)) continue;
      const [section, ...rest] = key.split(".");
      if (!sections.has(section)) sections.set(section, []);
      sections.get(section).push([rest.join(".") || section, value]);
    }
    const rows = (entries) => entries.map(([key, value]) => el("div", { class: value === "null" ? "unset" : null }, el("dt", {}, key), el("dd", {}, value === "null" ? "automatic" : value)));
    this.keys.replaceChildren(
      ...(sections.size ? [...sections].map(([name, entries]) => el("section", {}, el("h3", {}, name), el("dl", {}, ...rows(entries)))) : [el("p", { class: "none" }, "no key fits")]),
    );

    const summary = Object.entries(state.summary ?? {}).filter(([, value]) => value !== null && value !== "");
    this.summary.replaceChildren(
      summary.length
        ? el("dl", { class: "wide" }, ...summary.map(([key, value]) => el("div", {}, el("dt", {}, key), el("dd", {}, known(value) && SUMMARY[key] ? SUMMARY[key](value) : String(value)))))
        : el("p", { class: "none" }, "written at the end"),
    );
    const saved = [...state.checkpoints].reverse();
    this.saved.replaceChildren(
      saved.length
        ? el(
            "table",
            {},
            el("thead", {}, el("tr", {}, ...["step", "when", "val loss", "size", ""].map((title, i) => el("th", { scope: "col", class: i && i < 4 ? "n" : null }, title)))),
            el("tbody", {}, ...saved.map((c) => el("tr", {}, el("th", { scope: "row" }, count(c.step)), el("td", { class: "n" }, day(c.time)), el("td", { class: "n" }, number(c.val_loss)), el("td", { class: "n" }, bytes(c.bytes)), el("td", {}, c.best ? "best" : "")))),
          )
        : el("p", { class: "none" }, known(state.numbers.step) ? "nothing saved yet" : DASH),
    );
  }
}

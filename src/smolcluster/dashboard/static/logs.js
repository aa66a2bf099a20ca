// Logs with search: pages of the server's, the newest at the end.

import { card, el } from "./dom.js";
import { ask } from "./store.js";

const LEVELS = [["", "all levels"], ["INFO", "info and above"], ["WARNING", "warnings and errors"], ["ERROR", "errors"]];

export class Logs {
  constructor() {
    this.search = el("input", { type: "search", placeholder: "Search the logs", "aria-label": "Search the logs", autocomplete: "off", spellcheck: "false", id: "log-search" });
    this.level = el("select", { "aria-label": "Least level", id: "log-level" }, ...LEVELS.map(([value, name]) => el("option", { value }, name)));
    this.process = el("select", { "aria-label": "Process", id: "log-process" }, el("option", { value: "" }, "all processes"));
    this.follow = el("input", { type: "checkbox", checked: true, id: "log-follow" });
    this.older = el("button", { type: "button", class: "older", hidden: true, on: { click: () => this.goBack() } }, "Older lines");
    this.list = el("ol", { class: "log", tabindex: "0", "aria-label": "Log lines, the newest last" });
    this.status = el("p", { class: "fine", role: "status" });
    const tools = el("div", { class: "filters" }, this.search, this.level, this.process, el("label", { class: "check" }, this.follow, "follow"));
    this.box = el("div", { class: "logbox" }, this.older, this.list);
    this.node = el("div", { class: "single" }, card("Logs", { id: "logs", note: this.status }, tools, this.box));
    let timer = 0;
    this.search.addEventListener("input", () => {
      clearTimeout(timer);
      timer = setTimeout(() => this.load("newest"), 150);
    });
    for (const control of [this.level, this.process]) control.addEventListener("change", () => this.load("newest"));
    this.follow.addEventListener("change", () => this.follow.checked && this.load("newest"));
    this.bytes = -1;
  }

  show(name) {
    if (name !== this.name) {
      this.name = name;
      this.bytes = -1;
      this.process.replaceChildren(el("option", { value: "" }, "all processes"));
      this.list.replaceChildren();
      this.asked = (this.asked ?? 0) + 1; // what is under way is of another run
    }
  }

  /** Load older lines, and stop following: new lines must not scroll them away. */
  goBack() {
    this.follow.checked = false;
    this.load("older");
  }

  set(state) {
    if (!this.node.isConnected || state.log_bytes === this.bytes) return;
    const first = this.bytes === -1;
    this.bytes = state.log_bytes;
    if (first || this.follow.checked) this.load("newest");
  }

  async load(which) {
    const number = (this.asked = (this.asked ?? 0) + 1);
    const asked = new URLSearchParams({ search: this.search.value, level: this.level.value, process: this.process.value });
    if (which === "older" && this.before) asked.set("before", JSON.stringify(this.before));
    let page;
    try {
      page = await ask(`/api/run/${encodeURIComponent(this.name)}/logs?${asked}`);
    } catch {
      if (number === this.asked) this.status.textContent = "the logs could not be read";
      return;
    }
    if (number !== this.asked) return; // something newer was asked meanwhile
    this.before = page.before;
    this.older.hidden = page.before === null;
    this.offer(page.processes);
    const lines = page.lines.map((line) => this.line(line));
    const atEnd = this.box.scrollTop + this.box.clientHeight >= this.box.scrollHeight - 40;
    if (which === "older") {
      const height = this.box.scrollHeight;
      this.list.prepend(...lines);
      this.box.scrollTop += this.box.scrollHeight - height;
    } else {
      this.list.replaceChildren(...lines);
      if (atEnd || this.follow.checked) this.box.scrollTop = this.box.scrollHeight;
    }
    const shown = this.list.children.length;
    this.status.textContent = shown ? `${shown} ${shown === 1 ? "line" : "lines"}${page.before ? ", older ones above" : ""}` : page.before ? "nothing in the newest part; look at older lines" : "no line fits";
  }

  offer(names) {
    const known = [...this.process.options].slice(1).map((option) => option.value);
    if (known.join() === names.join()) return;
    const chosen = this.process.value;
    this.process.replaceChildren(el("option", { value: "" }, "all processes"), ...names.map((value) => el("option", { value }, value.replace(/\.log$/, ""))));
    this.process.value = names.includes(chosen) ? chosen : "";
  }

  line(line) {
    const who = line.process.replace(/\.log$/, "");
    const time = line.time ? new Date(line.time) : null;
    const when = time && !Number.isNaN(time.getTime()) ? time.toLocaleTimeString([], { hour12: false }) : "";
    const message = el("span", { class: "message" }, ...this.marked(line.message));
    if (line.exception) message.append(el("pre", {}, ...this.marked(line.exception)));
    return el("li", { data: { level: line.level } }, el("time", { title: line.time }, when), el("b", {}, line.level), el("span", { class: "who" }, who), message);
  }

  /** The text with what was searched for marked in it. */
  marked(words) {
    const wanted = this.search.value.toLowerCase();
    const lower = words.toLowerCase();
    if (!wanted || lower.length !== words.length) return [words];
    const parts = [];
    let at = 0;
    for (let found = lower.indexOf(wanted); found >= 0; found = lower.indexOf(wanted, at)) {
      parts.push(words.slice(at, found), el("mark", {}, words.slice(found, found + wanted.length)));
      at = found + wanted.length;
    }
    return [...parts, words.slice(at)];
  }
}

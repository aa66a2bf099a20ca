// Sampling settings. Only those that the user has set are sent; the server has defaults for the others.

import { el } from "./dom.js";

const KEY = "smolcluster.settings";

// name in the request, words, range. `whole`: a whole number. `slide`: worth a slider.
const FIELDS = [
  { name: "temperature", label: "Temperature", hint: "0: always the likeliest word", min: 0, max: 2, step: 0.05, slide: true, usual: 1 },
  { name: "top_p", label: "Top-p", hint: "Only the likeliest words that make up this share", min: 0.05, max: 1, step: 0.05, slide: true, usual: 1 },
  { name: "repetition_penalty", label: "Repetition penalty", hint: "Above 1: fewer repetitions", min: 1, max: 2, step: 0.05, slide: true, usual: 1 },
  { name: "top_k", label: "Top-k", hint: "Only so many of the likeliest words", min: 1, max: 1000, step: 1, whole: true, empty: "all" },
  { name: "max_tokens", label: "Max tokens", hint: "The longest answer", min: 1, max: 1_000_000, step: 1, whole: true, empty: "automatic" },
  { name: "seed", label: "Seed", hint: "The same seed, the same answer", min: 0, max: 2 ** 31 - 1, step: 1, whole: true, empty: "random" },
];
const LONGEST_PROMPT = 20_000;

export class Settings {
  constructor(form, { changed }) {
    this.form = form;
    this.changed = changed;
    this.defaults = {};
    this.set = stored();
    this.rows = new Map();
    this.system = form.querySelector("#system");
    this.model = form.querySelector("#model");
    this.system.maxLength = LONGEST_PROMPT;
    this.system.addEventListener("input", () => this.change("system", this.system.value.trim() ? this.system.value : null));
    this.model.addEventListener("change", () => this.change("model", this.model.value));
    form.querySelector("#sampling").append(...FIELDS.map((field) => this.row(field)));
    form.querySelector("#reset").addEventListener("click", () => this.reset());
    form.addEventListener("submit", (event) => event.preventDefault());
    this.show();
  }

  row(field) {
    const id = `set-${field.name}`;
    const number = el("input", { id, type: "number", inputmode: field.whole ? "numeric" : "decimal", min: field.min, max: field.max, step: field.whole ? 1 : "any", "aria-describedby": `${id}-hint`, autocomplete: "off" });
    const slider = field.slide ? el("input", { type: "range", min: field.min, max: field.max, step: field.step, "aria-label": `${field.label}, slider` }) : null;
    number.addEventListener("change", () => this.change(field.name, fitting(number.value, this.ranged(field))));
    slider?.addEventListener("input", () => this.change(field.name, fitting(slider.value, field)));
    this.rows.set(field.name, { field, number, slider });
    return el("div", { class: "field" }, el("label", { for: id }, field.label), number, slider, el("p", { class: "hint", id: `${id}-hint` }, field.hint));
  }

  ranged(field) {
    return field.name === "max_tokens" && this.context ? { ...field, max: this.context } : field;
  }

  /** The server's configuration: {context, sampling: {temperature, ...}, limits: {max_tokens}, ...}, and its models. */
  learn(config, models) {
    if (Number.isInteger(config?.context) && config.context > 0) this.context = config.context;
    const known = { ...config?.sampling, max_tokens: config?.limits?.max_tokens };
    this.defaults = Object.fromEntries(FIELDS.map(({ name }) => [name, known[name]]).filter(([name, value]) => typeof value === "number" && name !== "seed"));
    this.models = models;
    this.model.replaceChildren(...models.map((name) => el("option", { value: name }, name)));
    this.show();
  }

  change(name, value) {
    if (value === null) delete this.set[name];
    else this.set[name] = value;
    this.kept();
    this.show();
  }

  reset() {
    this.set = {};
    this.kept();
    this.show();
  }

  kept() {
    try {
      localStorage.setItem(KEY, JSON.stringify(this.set));
    } catch {
      // then for this page only
    }
    this.changed();
  }

  show() {
    for (const { field, number, slider } of this.rows.values()) {
      const value = this.set[field.name];
      const otherwise = this.defaults[field.name] ?? field.usual;
      number.max = this.ranged(field).max;
      number.value = value ?? "";
      number.placeholder = otherwise ?? field.empty;
      if (slider) slider.value = value ?? otherwise;
      number.parentElement.dataset.set = value === undefined ? "" : "yes";
    }
    if (document.activeElement !== this.system) this.system.value = this.set.system ?? "";
    this.model.value = this.chosenModel() ?? "";
    this.form.querySelector("#reset").disabled = this.touched() === 0;
  }

  touched() {
    return Object.keys(this.set).filter((name) => name !== "model").length;
  }

  chosenModel() {
    const models = this.models ?? [];
    return models.includes(this.set.model) ? this.set.model : models[0];
  }

  /** Return the fields of a request beside the conversation. */
  request() {
    const sampling = Object.fromEntries(FIELDS.filter(({ name }) => this.set[name] !== undefined).map((field) => [field.name, fitting(this.set[field.name], this.ranged(field))]));
    return { model: this.chosenModel(), ...sampling };
  }

  systemPrompt() {
    return this.set.system ?? "";
  }
}

/** Clamp to the range; null if it is not a number. */
function fitting(value, { min, max, whole }) {
  const number = typeof value === "string" && !value.trim() ? Number.NaN : Number(value);
  if (!Number.isFinite(number)) return null;
  const inside = Math.min(max, Math.max(min, number));
  return whole ? Math.round(inside) : Math.round(inside * 1000) / 1000;
}

function stored() {
  try {
    const found = JSON.parse(localStorage.getItem(KEY));
    if (!found || typeof found !== "object") return {};
    const numbers = FIELDS.map((field) => [field.name, typeof found[field.name] === "number" ? fitting(found[field.name], field) : null]).filter(([, value]) => value !== null);
    const words = ["system", "model"].filter((name) => typeof found[name] === "string").map((name) => [name, found[name].slice(0, LONGEST_PROMPT)]);
    return Object.fromEntries([...numbers, ...words]);
  } catch {
    return {};
  }
}

/** A label for screen readers. */
export function summary(settings) {
  const count = settings.touched();
  return count === 0 ? "Settings" : `Settings, ${count} changed`;
}

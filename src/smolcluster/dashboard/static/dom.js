// The parts of these pages, beyond plain elements.

import { el } from "./elements.js";

export { el, keyed, svg, text } from "./elements.js";

export function attr(node, name, value) {
  if (value === null || value === undefined || value === false) node.removeAttribute(name);
  else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

export function card(title, { id, note, tools } = {}, ...body) {
  const heading = el("h2", { id: id ? `${id}-title` : null }, title);
  const head = el("div", { class: "head" }, heading, note ?? null, el("span", { class: "grow" }), tools ?? null);
  return el("section", { class: "card", id, "aria-labelledby": id ? `${id}-title` : null }, head, ...body);
}

/** A mark in a colour of the style sheet. `kind` is another class. */
export function swatch(color, kind = "") {
  const mark = el("i", { class: `swatch ${kind}` });
  mark.style.background = `var(--${color})`;
  return mark;
}

/** One of several choices. `choose` gets the value. */
export function choice(label, options, value, choose) {
  const group = el("div", { class: "choice", role: "group", "aria-label": label });
  const show = (chosen) => {
    for (const button of group.children) button.setAttribute("aria-pressed", String(button.dataset.value === chosen));
  };
  for (const [name, title] of options) {
    const pick = () => {
      show(name);
      choose(name);
    };
    group.append(el("button", { type: "button", data: { value: name }, on: { click: pick } }, title));
  }
  show(value);
  return group;
}

/** A tooltip, on hover and focus. */
const tip = () => document.getElementById("tip");

export function showTip(x, y, lines) {
  const box = tip();
  box.replaceChildren(...lines);
  box.hidden = false;
  const width = box.offsetWidth;
  const height = box.offsetHeight;
  const left = x + 14 + width > innerWidth - 8 ? x - 14 - width : x + 14;
  box.style.left = `${Math.max(8, Math.min(left, innerWidth - width - 8))}px`;
  box.style.top = `${Math.max(8, Math.min(y + 14, innerHeight - height - 8))}px`;
}

export function hideTip() {
  tip().hidden = true;
}

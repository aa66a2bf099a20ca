// Elements without HTML: text from a run is only ever text.

const SVG = "http://www.w3.org/2000/svg";

/** `el("td", {class: "number", title: "..."}, "12")`. `on` has listeners, `data` data attributes. */
export function el(tag, props = {}, ...children) {
  return fill(document.createElement(tag), props, children);
}

export function svg(tag, props = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

function fill(node, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    else if (name === "data") Object.assign(node.dataset, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

export function text(node, value) {
  const string = String(value);
  if (node.textContent !== string) node.textContent = string;
}

export function attr(node, name, value) {
  if (value === null || value === undefined || value === false) node.removeAttribute(name);
  else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

/** Children of `parent`, one for each item, made once and updated in place: focus and selection survive. */
export function keyed(parent, items, key, create, update) {
  const old = new Map();
  for (const child of parent.children) old.set(child.dataset.key, child);
  let place = parent.firstElementChild;
  for (const item of items) {
    const name = String(key(item));
    let child = old.get(name);
    if (child) old.delete(name);
    else {
      child = create(item);
      child.dataset.key = name;
    }
    if (child === place) place = place.nextElementSibling;
    else parent.insertBefore(child, place);
    update(child, item);
  }
  for (const child of old.values()) child.remove();
}

export function card(title, { id, note, tools } = {}, ...body) {
  const heading = el("h2", { id: id ? `${id}-title` : null }, title);
  const head = el("div", { class: "head" }, heading, note ?? null, el("span", { class: "grow" }), tools ?? null);
  return el("section", { class: "card", id, "aria-labelledby": id ? `${id}-title` : null }, head, ...body);
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

/** A small window beside the pointer, for whoever hovers or focuses. */
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

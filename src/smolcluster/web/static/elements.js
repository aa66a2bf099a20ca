// DOM elements without HTML strings: logs and model output are only ever text. Shared by all pages.

const SVG = "http://www.w3.org/2000/svg";

/** `el("button", {class: "quiet", on: {click}}, "Stop")`. `on` has listeners, `data` data attributes. */
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
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export function text(node, value) {
  const string = String(value);
  if (node.textContent !== string) node.textContent = string;
}

/** Keep one child of `parent` for each item, updated in place: focus and selection survive. */
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

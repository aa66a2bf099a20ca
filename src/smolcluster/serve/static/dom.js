// Icons and copy buttons, beside the elements that all pages share.

import { el, svg, text } from "./elements.js";

export { el, keyed, text } from "./elements.js";

/** An icon of 20 by 20, drawn with strokes. */
export function icon(path) {
  const line = svg("path", { d: path, fill: "none", stroke: "currentColor", "stroke-width": 1.6, "stroke-linecap": "round", "stroke-linejoin": "round" });
  return svg("svg", { viewBox: "0 0 20 20", width: 18, height: 18, "aria-hidden": "true" }, line);
}

/** Copy to the clipboard; with execCommand in an insecure context (http from another machine). */
export async function copy(string) {
  try {
    await navigator.clipboard.writeText(string);
    return true;
  } catch {
    const before = document.activeElement;
    const box = el("textarea", { class: "sr", readonly: true, "aria-hidden": "true" });
    box.value = string;
    document.body.append(box);
    box.select();
    let done = false;
    try {
      done = document.execCommand("copy");
    } catch {
      // not supported
    }
    box.remove();
    before?.focus?.();
    return done;
  }
}

/** A button that copies, and confirms it for a moment. */
export function copyButton(label, read) {
  const button = el("button", { type: "button", class: "quiet", "aria-label": label }, "Copy");
  let timer = 0;
  button.addEventListener("click", async () => {
    text(button, (await copy(read())) ? "Copied" : "Cannot copy");
    clearTimeout(timer);
    timer = setTimeout(() => text(button, "Copy"), 1500);
  });
  return button;
}

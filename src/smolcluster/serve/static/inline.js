// Inline Markdown to nodes: code, emphasis, links, line breaks. Everything else stays text.
//
// Every step is linear in the length of the text, or bounded: a model may write anything.

import { el } from "./dom.js";

const DEEPEST = 12; // emphasis within emphasis
const LONGEST_ADDRESS = 2048;
const LONGEST = 20_000; // characters of one paragraph: a longer one would be drawn again with every word
const ESCAPABLE = /[!-/:-@[-`{-~]/;
const SPECIAL = /[\\`*_~[!<\nh]/g;
const SPACE = /\s/;
const PUNCTUATION = /[\p{P}\p{S}]/u;
const BARE = /https?:\/\/[^\s<>"'`]{1,2100}/y;
const ANGLE = /<((?:https?:\/\/|mailto:)[^\s<>]{1,2100})>/y;

/** Return the address if it is absolute and http, https or mailto; else null. */
export function safeAddress(address) {
  if (address.length > LONGEST_ADDRESS) return null;
  try {
    const url = new URL(address.trim());
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null; // relative, or none at all
  }
}

function link(address, children) {
  return el("a", { href: address, title: address, target: "_blank", rel: "noopener noreferrer" }, children);
}

/** Nodes for a run of text. */
export function inline(source, { links = true } = {}) {
  if (source.length > LONGEST) return source.split("\n").flatMap((line, i) => (i ? [el("br"), line] : [line]));
  const { codes, brackets } = scan(source, links);
  const out = new Sequence();
  let at = 0;
  while (at < source.length) {
    SPECIAL.lastIndex = at;
    const found = SPECIAL.exec(source);
    const next = found ? found.index : source.length;
    if (next > at) out.text(source.slice(at, next));
    at = next;
    if (at >= source.length) break;
    const char = source[at];
    if (char === "\\") {
      const escaped = source[at + 1];
      if (escaped === "\n") out.node(el("br"));
      else if (escaped !== undefined && ESCAPABLE.test(escaped)) out.text(escaped);
      else {
        out.text("\\");
        at += 1;
        continue;
      }
      at += 2;
    } else if (char === "\n") {
      out.trimEnd();
      out.node(el("br"));
      at += 1;
      while (source[at] === " ") at += 1;
    } else if (char === "`") {
      const code = codes.get(at);
      if (code) {
        out.node(el("code", {}, code.text));
        at = code.end;
      } else at = out.run(source, at);
    } else if (char === "*" || char === "_" || char === "~") at = out.delimiter(source, at);
    else if (char === "[" || char === "!") {
      const picture = char === "!";
      const open = picture ? at + 1 : at;
      const close = links && source[open] === "[" ? brackets.get(open) : undefined;
      const target = close === undefined ? null : destination(source, close + 1);
      const address = target && safeAddress(target.address);
      if (address) {
        const label = source.slice(open + 1, close);
        // A picture would be fetched from elsewhere, which this page never does: it becomes a link.
        out.node(link(address, picture ? label || address : inline(label, { links: false })));
        at = target.end;
      } else {
        out.text(char);
        at += 1;
      }
    } else {
      const bare = char === "h";
      const pattern = bare ? BARE : ANGLE;
      pattern.lastIndex = at;
      const match = links && !(bare && /\w/.test(source[at - 1] ?? "")) ? pattern.exec(source) : null;
      const words = match && (bare ? withoutTail(match[0]) : match[1]);
      const address = words && safeAddress(words);
      if (address) {
        out.node(link(address, words));
        at += bare ? words.length : match[0].length;
      } else {
        out.text(char);
        at += 1;
      }
    }
  }
  return out.nodes();
}

/** Find code spans and matching brackets first: both bind stronger than emphasis. */
function scan(source, links) {
  const runs = []; // of backticks
  for (const match of source.matchAll(/`+/g)) runs.push({ at: match.index, length: match[0].length });
  const next = new Map(); // by length, the nearest run behind
  for (let i = runs.length - 1; i >= 0; i -= 1) {
    runs[i].close = next.get(runs[i].length);
    next.set(runs[i].length, runs[i]);
  }
  const codes = new Map();
  const brackets = new Map();
  const byPlace = new Map(runs.map((run) => [run.at, run]));
  const open = [];
  const interesting = /[\\`[\]]/g;
  for (let match = interesting.exec(source); match; match = interesting.exec(source)) {
    const at = match.index;
    if (match[0] === "\\") interesting.lastIndex = at + 2;
    else if (match[0] === "`") {
      const run = byPlace.get(at) ?? partOf(source, at);
      if (byPlace.has(at) && run.close) {
        codes.set(at, { text: unpadded(source.slice(at + run.length, run.close.at)), end: run.close.at + run.length });
        interesting.lastIndex = run.close.at + run.length;
      } else interesting.lastIndex = at + run.length;
    } else if (!links) continue;
    else if (match[0] === "[") open.push(at);
    else if (open.length) brackets.set(open.pop(), at);
  }
  return { codes, brackets };
}

/** What is left of a run of backticks whose first was escaped. */
function partOf(source, at) {
  let end = at;
  while (source[end] === "`") end += 1;
  return { length: end - at };
}

function unpadded(code) {
  const flat = code.replaceAll("\n", " ");
  return flat.length > 2 && flat.startsWith(" ") && flat.endsWith(" ") && flat.trim() ? flat.slice(1, -1) : flat;
}

/** Parse `(address "title")` at a position; null if there is none. */
function destination(source, at) {
  if (source[at] !== "(") return null;
  const limit = Math.min(source.length, at + LONGEST_ADDRESS + 200);
  let depth = 0;
  for (let end = at; end < limit; end += 1) {
    const char = source[end];
    if (char === "\\") end += 1;
    else if (char === "\n") return null;
    else if (char === "(" && (depth += 1) > 8) return null;
    else if (char === ")" && (depth -= 1) === 0) {
      const inside = source.slice(at + 1, end).trim();
      const [, angle, plain] = inside.match(/^(?:<([^<>]*)>|(\S*))/);
      return { address: (angle ?? plain).replace(/\\([!-/:-@[-`{-~])/g, "$1"), end: end + 1 };
    }
  }
  return null;
}

/** A bare address without the punctuation of the sentence that it stands in. */
function withoutTail(address) {
  let open = 0;
  for (const char of address) open += char === "(" ? 1 : char === ")" ? -1 : 0;
  let end = address.length;
  for (; end > 0; end -= 1) {
    const char = address[end - 1];
    if (char === ")" && open < 0) open += 1;
    else if (!/[.,;:!?*_~\]]/.test(char)) break;
  }
  return address.slice(0, end);
}

/** Nodes so far, and the marks among them that may still become emphasis. */
class Sequence {
  constructor() {
    this.items = []; // strings; {node, depth}; {list, depth}: what was too deep; {mark, count, length, closes}
    this.openers = []; // places of marks that may open
    this.floor = {}; // by kind of closer: no opener for it lies below
  }

  text(string) {
    const last = this.items.length - 1;
    if (typeof this.items[last] === "string") this.items[last] += string;
    else this.items.push(string);
  }

  node(node, depth = 0) {
    this.items.push({ node, depth });
  }

  trimEnd() {
    const last = this.items.length - 1;
    if (typeof this.items[last] === "string") this.items[last] = this.items[last].replace(/ {1,8}$/, "");
  }

  /** A run of characters that mean nothing. */
  run(source, at) {
    let end = at;
    while (source[end] === source[at]) end += 1;
    this.text(source.slice(at, end));
    return end;
  }

  delimiter(source, at) {
    const mark = source[at];
    let end = at;
    while (source[end] === mark) end += 1;
    const length = end - at;
    if (mark === "~" && length !== 2) return this.run(source, at);
    const before = source[at - 1] ?? " ";
    const after = source[end] ?? " ";
    const left = !SPACE.test(after) && (!PUNCTUATION.test(after) || SPACE.test(before) || PUNCTUATION.test(before));
    const right = !SPACE.test(before) && (!PUNCTUATION.test(before) || SPACE.test(after) || PUNCTUATION.test(after));
    const opens = left && (mark !== "_" || !right || PUNCTUATION.test(before));
    const closes = right && (mark !== "_" || !left || PUNCTUATION.test(after));
    let count = length;
    if (closes) count = this.close(mark, length, opens);
    if (count > 0) {
      if (opens) {
        this.openers.push(this.items.length);
        this.items.push({ mark, count, length, closes });
      } else this.text(mark.repeat(count));
    }
    return end;
  }

  /** Wrap what lies between this mark and the ones that opened for it; returns how many of its characters are left. */
  close(mark, length, opens) {
    let count = length;
    while (count > 0) {
      const kind = `${mark}${opens}${length % 3}`;
      let i = this.openers.length - 1;
      const floor = this.floor[kind] ?? 0;
      const fits = (opener) => opener.mark === mark && !((opens || opener.closes) && (opener.length + length) % 3 === 0 && (opener.length % 3 || length % 3));
      while (i >= floor && !fits(this.items[this.openers[i]])) i -= 1;
      if (i < floor) {
        this.floor[kind] = this.openers.length;
        break;
      }
      const place = this.openers[i];
      const opener = this.items[place];
      const used = mark === "~" ? 2 : Math.min(2, count, opener.count);
      this.openers.length = i + 1; // later openers stay unmatched
      for (const name of Object.keys(this.floor)) this.floor[name] = Math.min(this.floor[name], i + 1);
      const inside = this.items.splice(place + 1);
      const depth = 1 + inside.reduce((most, item) => Math.max(most, item.depth ?? 0), 0);
      opener.count -= used;
      count -= used;
      if (depth > DEEPEST) {
        this.items[place] = { list: [mark.repeat(opener.count + used), ...inside, mark.repeat(used)], depth: DEEPEST };
        opener.count = 0;
      } else {
        this.items.push({ node: el(mark === "~" ? "s" : used === 2 ? "strong" : "em", {}, flat(inside)), depth });
        if (opener.count === 0) this.items.splice(place, 1);
      }
      if (opener.count === 0) this.openers.pop();
      for (const name of Object.keys(this.floor)) this.floor[name] = Math.min(this.floor[name], this.openers.length);
    }
    return count;
  }

  nodes() {
    return flat(this.items);
  }
}

/** Strings and nodes. Lists may lie in lists thousands deep: no recursion. */
function flat(items) {
  const found = [];
  const stack = [[items, 0]];
  while (stack.length) {
    const top = stack[stack.length - 1];
    if (top[1] === top[0].length) {
      stack.pop();
      continue;
    }
    const item = top[0][top[1]++];
    if (item.list) stack.push([item.list, 0]);
    else if (typeof item === "string") found.push(item);
    else found.push(item.mark ? item.mark.repeat(item.count) : item.node);
  }
  return found;
}

// Incremental Markdown to DOM nodes. HTML is not supported: tags are text.
//
//   blocks(text)     parse into blocks: pure, plain objects
//   new Markdown()   a node that text is pushed to; only the blocks that may still change are drawn again

import { copyButton, el } from "./dom.js";
import { inline } from "./inline.js";

const DEEPEST = 8; // quotes and lists within each other
const MAX_COLUMNS = 40;
const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?=[ \t]|$)/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|(\d{1,9})[.)])(?:( +)|$)/;

// Blocks

/** [{kind, from, to, ...}]: `from` and `to` are lines of the text. */
export function blocks(text) {
  return parse(text.split("\n"), 0);
}

function parse(lines, depth) {
  const found = [];
  let at = 0;
  while (at < lines.length) {
    if (blank(lines[at])) at += 1;
    else {
      const block = depth < DEEPEST ? (fence(lines, at) ?? heading(lines, at) ?? rule(lines, at) ?? quote(lines, at, depth) ?? list(lines, at, depth) ?? table(lines, at)) : null;
      found.push(block ?? paragraph(lines, at, depth));
      at = found.at(-1).to;
    }
  }
  return found;
}

const blank = (line) => !/\S/.test(line);

function fence(lines, from) {
  const open = lines[from].match(FENCE);
  if (!open) return null;
  const [, mark, info] = open;
  const indent = lines[from].indexOf(mark[0]);
  let to = from + 1;
  let closed = false;
  for (; to < lines.length && !closed; to += 1) {
    const line = lines[to].trim();
    closed = line.length >= mark.length && line[0] === mark[0] && line === mark[0].repeat(line.length) && leading(lines[to]) < 4;
  }
  const inside = lines.slice(from + 1, closed ? to - 1 : to).map((line) => line.slice(Math.min(indent, leading(line))));
  return { kind: "code", from, to, closed, language: info.trim().split(/\s/)[0].slice(0, 40), text: inside.join("\n") };
}

const leading = (line) => line.length - line.trimStart().length;

function heading(lines, from) {
  const open = lines[from].match(HEADING);
  if (!open) return null;
  const words = lines[from].slice(open[0].length).trim();
  let end = words.length;
  while (words[end - 1] === "#") end -= 1;
  const closes = end < words.length && (end === 0 || /[ \t]/.test(words[end - 1]));
  return { kind: "heading", from, to: from + 1, level: open[1].length, text: closes ? words.slice(0, end).trim() : words };
}

function rule(lines, from) {
  return isRule(lines[from]) ? { kind: "rule", from, to: from + 1 } : null;
}

function isRule(line) {
  if (leading(line) > 3) return false;
  const marks = line.replace(/[ \t]/g, "");
  return marks.length >= 3 && "-*_".includes(marks[0]) && marks === marks[0].repeat(marks.length);
}

function quote(lines, from, depth) {
  if (!QUOTE.test(lines[from])) return null;
  const inside = [];
  let to = from;
  for (; to < lines.length; to += 1) {
    if (QUOTE.test(lines[to])) inside.push(lines[to].replace(QUOTE, ""));
    else if (!blank(lines[to]) && !blank(inside.at(-1)) && !begins(lines[to])) inside.push(lines[to]); // a paragraph that goes on
    else break;
  }
  return { kind: "quote", from, to, inside: parse(inside, depth + 1) };
}

function list(lines, from, depth) {
  const first = item(lines[from]);
  if (!first || first.indent > 3) return null;
  const items = [];
  let loose = false;
  let to = from;
  for (let at = from; at < lines.length; ) {
    const head = item(lines[at]);
    if (!head || head.kind !== first.kind || head.indent > first.indent + 3 || isRule(lines[at])) break;
    const inside = [head.rest];
    let end = at + 1;
    let gap = 0;
    let fenced = FENCE.test(head.rest) ? head.rest.match(FENCE)[1] : null;
    for (let next = end; next < lines.length; next += 1) {
      const line = lines[next];
      if (blank(line)) {
        gap += 1;
        continue;
      }
      const inner = item(line);
      const within = leading(line) >= head.width || (!fenced && inner !== null && inner.indent >= head.indent + 2); // nested, if barely
      const lazy = gap === 0 && !fenced && !inner && !begins(line) && !blank(inside.at(-1));
      if (!within && !lazy) break;
      for (; gap > 0; gap -= 1) inside.push("");
      inside.push(line.slice(Math.min(head.width, leading(line))));
      const mark = inside.at(-1).match(FENCE)?.[1];
      if (mark && !fenced) fenced = mark;
      else if (mark && mark.startsWith(fenced)) fenced = null;
      end = next + 1;
    }
    to = end;
    items.push({ inside: parse(inside, depth + 1), number: head.number });
    let next = end;
    while (next < lines.length && blank(lines[next])) next += 1;
    if (next > end && next < lines.length && item(lines[next])?.kind === first.kind) loose = true;
    at = next;
  }
  return items.length ? { kind: "list", from, to, ordered: first.number !== null, start: first.number ?? 1, loose, items } : null;
}

/** Parse the marker of a list item: its indentation, and where its text begins. */
function item(line) {
  const found = line.match(ITEM);
  if (!found) return null;
  const [whole, space, mark, number, gap] = found;
  const pad = gap && gap.length < 5 ? gap.length : 1;
  const width = space.length + mark.length + pad;
  return { indent: space.length, kind: number === undefined ? mark : mark.at(-1), number: number === undefined ? null : Number(number), width, rest: gap ? line.slice(Math.min(width, whole.length)) : "" };
}

function table(lines, from) {
  const rule = lines[from + 1];
  if (rule === undefined || !lines[from].includes("|") || !/^[ \t|:-]+$/.test(rule) || !rule.includes("-")) return null;
  const head = cells(lines[from]);
  const marks = cells(rule);
  if (head.length !== marks.length || head.length > MAX_COLUMNS || !marks.every((mark) => /^:?-+:?$/.test(mark))) return null;
  const align = marks.map((mark) => (mark.endsWith(":") ? (mark.startsWith(":") ? "center" : "right") : null));
  const rows = [];
  let to = from + 2;
  for (; to < lines.length && !blank(lines[to]) && lines[to].includes("|"); to += 1) {
    const row = cells(lines[to]).slice(0, head.length);
    while (row.length < head.length) row.push("");
    rows.push(row);
  }
  return { kind: "table", from, to, head, align, rows };
}

/** `| a | b \| c |` -> ["a", "b | c"]. A bar within code is the cell's own only when it is escaped, as everywhere. */
function cells(line) {
  const row = line.trim();
  const found = [""];
  for (let at = row[0] === "|" ? 1 : 0; at < row.length; at += 1) {
    if (row[at] === "\\" && row[at + 1] === "|") {
      found[found.length - 1] += "|";
      at += 1;
    } else if (row[at] === "|") {
      if (at < row.length - 1) found.push("");
    } else found[found.length - 1] += row[at];
  }
  return found.map((cell) => cell.trim());
}

/** Whether a line begins a block of its own, also right behind a paragraph. */
function begins(line) {
  if (FENCE.test(line) || HEADING.test(line) || QUOTE.test(line) || isRule(line)) return true;
  const head = item(line);
  return head !== null && head.rest !== "" && (head.number === null || head.number === 1);
}

function paragraph(lines, from, depth) {
  let to = from + 1;
  while (to < lines.length && !blank(lines[to]) && !(depth < DEEPEST && (begins(lines[to]) || table(lines, to)))) to += 1;
  return { kind: "paragraph", from, to, text: lines.slice(from, to).map((line) => line.trimStart()).join("\n").trimEnd() };
}

// Nodes

function draw(block, tight = false) {
  switch (block.kind) {
    case "code":
      return codeBlock(block);
    case "heading": // the page has a heading of its own above
      return el(`h${Math.min(6, block.level + 2)}`, { data: { level: block.level } }, inline(block.text));
    case "rule":
      return el("hr");
    case "quote":
      return el("blockquote", {}, block.inside.map((inner) => draw(inner)));
    case "list": {
      const items = block.items.map((item) => drawItem(block, item));
      return block.ordered ? el("ol", { start: block.start === 1 ? null : block.start }, items) : el("ul", {}, items);
    }
    case "table":
      return drawTable(block);
    default:
      return el(tight ? "span" : "p", { class: tight ? "tight" : null }, inline(block.text));
  }
}

const drawItem = ({ loose }, { inside }) => el("li", {}, inside.map((inner) => draw(inner, !loose)));

function codeBlock(block) {
  const code = el("code", {}, block.text);
  const bar = el("div", { class: "codebar" }, el("span", {}, block.language || "code"), copyButton("Copy this code", () => code.textContent));
  return el("div", { class: "code" }, bar, el("pre", { tabindex: "0" }, code));
}

function drawTable(block) {
  const body = el("tbody", {}, block.rows.map((values) => drawRow(block, values)));
  return el("div", { class: "wide", tabindex: "0", role: "group", "aria-label": "Table" }, el("table", {}, el("thead", {}, drawRow(block, block.head, "th")), body));
}

const drawRow = ({ align }, values, tag = "td") => el("tr", {}, values.map((value, i) => el(tag, { class: align[i], scope: tag === "th" ? "col" : null }, inline(value))));

/** Extend a block that has only grown, so that a selection in it survives. Return false if that is not possible. */
function grown(node, old, block) {
  if (old.kind !== block.kind) return false;
  if (block.kind === "code" && old.language === block.language && block.text.startsWith(old.text)) {
    const code = node.querySelector("code");
    if (block.text.length > old.text.length) (code.firstChild ?? code.appendChild(document.createTextNode(""))).appendData(block.text.slice(old.text.length));
    return true;
  }
  if (block.kind === "table" && same(old.head, block.head) && same(old.align, block.align)) {
    patch(node.querySelector("tbody"), old.rows, block.rows, (values) => drawRow(block, values));
    return true;
  }
  if (block.kind === "list" && same([old.ordered, old.start, old.loose], [block.ordered, block.start, block.loose])) {
    patch(node, old.items, block.items, (item) => drawItem(block, item));
    return true;
  }
  return false;
}

function patch(parent, old, items, make) {
  let alike = 0;
  while (alike < old.length && alike < items.length && same(old[alike], items[alike])) alike += 1;
  while (parent.children.length > alike) parent.lastElementChild.remove();
  for (const item of items.slice(alike)) parent.append(make(item));
}

/** A text that grows. */
export class Markdown {
  constructor() {
    this.node = el("div", { class: "markdown", dir: "auto" });
    this.source = "";
    this.settled = 0; // characters whose blocks cannot change any more
    this.open = []; // {block, node} of those that can
  }

  push(piece) {
    this.source += piece;
  }

  /** Draw what has changed. A block is settled once the next one is recognized. */
  draw() {
    const rest = this.source.slice(this.settled);
    const found = blocks(rest);
    const nodes = found.map((block, i) => this.place(this.open[i], block));
    for (const { node } of this.open.slice(found.length)) node.remove();
    const numLines = rest.split("\n").length;
    let keep = 0;
    const whole = ({ kind, from }) => from + (kind === "table" ? 2 : 1) < numLines;
    while (keep + 1 < found.length && whole(found[keep + 1])) keep += 1;
    if (keep > 0) this.settled += offset(rest, found[keep].from);
    const from = found[keep]?.from ?? 0;
    this.open = found.slice(keep).map((block, i) => ({ block: { ...block, from: block.from - from, to: block.to - from }, node: nodes[keep + i] }));
  }

  place(old, block) {
    if (old && (grown(old.node, old.block, block) || same(old.block, block))) return old.node;
    const node = draw(block);
    if (old) old.node.replaceWith(node);
    else this.node.append(node);
    return node;
  }
}

const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);

function offset(text, line) {
  let at = 0;
  for (let i = 0; i < line; i += 1) at = text.indexOf("\n", at) + 1;
  return at;
}

/** Draw a whole text at once. */
export function markdown(source) {
  const whole = new Markdown();
  whole.push(source);
  whole.draw();
  return whole.node;
}

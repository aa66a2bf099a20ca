// The page: one conversation, the answer that is being streamed, and the controls around them.

import { ask, chat, Failure, follow, login } from "./api.js";
import * as conversations from "./conversations.js";
import { copyButton, el, icon, keyed, text } from "./dom.js";
import { Markdown, markdown } from "./markdown.js";
import { Settings, summary } from "./settings.js";
import { missing, Strip } from "./strip.js";
import { startTheme } from "./theme.js";

const $ = (id) => document.getElementById(id);
const AT_END_PX = 48;
const MAX_RETRIES = 20; // automatic, when the server sent Retry-After
const OPENINGS = ["Once upon a time", "It was a quiet morning when", "The most important thing to know is"];
const SUGGESTIONS = ["Why is the sky blue?", "Write a haiku about old computers.", "Explain recursion to a child."];

let conversation = conversations.create();
let running = null; // {controller, message, view}
let editing = false;
let waiting = null; // a countdown to the next try
let tries = 0;
let atEnd = true;
let lastTop = 0;
let engine = null; // the last state of the engine
let connected = null;
let continues = false; // the model has no chat template: it continues a text
let whenReady = []; // answers that wait for stages which are still starting
const deleted = new Set(); // of this page: an answer that ends later does not bring its conversation back

const question = $("question");
const scroller = $("scroller");
const log = $("log");
const announce = (message) => text($("said"), message); // for screen readers
const strip = new Strip($("strip"), { say: announce });
const settings = new Settings($("settings").querySelector("form"), { changed: () => showSettings() });

// The conversation on the page

function show() {
  stopWaiting();
  log.setAttribute("aria-busy", "true"); // an old conversation is not read out as if it were new
  log.replaceChildren(...conversation.messages.map(drawn));
  requestAnimationFrame(() => log.removeAttribute("aria-busy"));
  around();
  atEnd = true;
  toEnd();
}

/** Update what depends on the conversation: the list, the title, the buttons. */
function around() {
  const { messages } = conversation;
  $("empty").hidden = messages.length > 0;
  document.title = messages.length ? conversations.title(conversation) : "smolcluster chat";
  $("send").hidden = running !== null;
  $("stop").hidden = running === null;
  $("send").disabled = !question.value.trim();
  const users = log.querySelectorAll("article.user");
  const answers = log.querySelectorAll("article.assistant");
  for (const node of users) node.querySelector(".edit").hidden = node !== users[users.length - 1] || running !== null;
  for (const node of answers) node.querySelector(".retry").hidden = node !== log.lastElementChild || running !== null;
  list();
}

function list() {
  const all = conversations.all();
  if (conversation.messages.length && !deleted.has(conversation.id) && !all.some(({ id }) => id === conversation.id)) all.unshift(conversation);
  keyed($("conversations"), all, ({ id }) => id, newEntry, (node, one) => {
    text(node.firstChild, conversations.title(one));
    node.firstChild.title = conversations.title(one);
    if (one.id === conversation.id) node.firstChild.setAttribute("aria-current", "true");
    else node.firstChild.removeAttribute("aria-current");
  });
}

function newEntry({ id }) {
  const open = el("button", { type: "button", class: "entry", on: { click: () => choose(id) } });
  const remove = el("button", { type: "button", class: "icon remove", "aria-label": "Delete this conversation" }, icon("M6 6l8 8M14 6l-8 8"));
  let sure = 0;
  const calm = () => {
    sure = 0;
    remove.classList.remove("sure");
    remove.replaceChildren(icon("M6 6l8 8M14 6l-8 8"));
    remove.setAttribute("aria-label", "Delete this conversation");
  };
  remove.addEventListener("click", () => {
    if (!sure) {
      sure = setTimeout(calm, 3000);
      remove.classList.add("sure");
      remove.replaceChildren("Delete");
      remove.setAttribute("aria-label", "Really delete this conversation");
      return;
    }
    clearTimeout(sure);
    conversations.forget(id);
    deleted.add(id);
    if (id === conversation.id) fresh();
    else around();
  });
  return el("li", {}, open, remove);
}

function choose(id) {
  const found = conversations.all().find((one) => one.id === id);
  if (!found) return;
  if (found.id !== conversation.id) {
    stop();
    cancelEdit();
    conversation = found;
    show();
  }
  drawer("side", false);
}

function fresh() {
  stop();
  cancelEdit();
  conversation = conversations.create();
  show();
  drawer("side", false);
  question.focus();
}

function drawn(message) {
  return message.role === "user" ? userNode(message) : new Answer(message).node;
}

function userNode(message) {
  const edit = el("button", { type: "button", class: "quiet edit", on: { click: beginEdit } }, "Edit");
  return el("article", { class: "user" }, el("h3", { class: "sr" }, "You"), edit, el("div", { class: "bubble", dir: "auto" }, message.content));
}

/** One answer: its text and its statistics. */
class Answer {
  constructor(message, { live = false } = {}) {
    this.message = message;
    this.markdown = live ? new Markdown() : null;
    this.body = live ? this.markdown.node : markdown(message.content);
    this.numbers = el("span", { class: "numbers" });
    this.tools = el("div", { class: "under" }, copyButton("Copy the answer", () => message.content), el("button", { type: "button", class: "quiet retry", on: { click: retry } }, "Retry"), this.numbers);
    this.node = el("article", { class: "assistant", "aria-busy": live ? "true" : null }, el("h3", { class: "sr" }, "Answer"), this.body, this.tools);
    this.pending = 0;
    this.tookMs = 0;
    if (live) {
      this.tools.hidden = true;
      this.node.dataset.live = "first";
    } else this.tell();
  }

  push(piece) {
    this.message.content += piece;
    this.markdown.push(piece);
    if (this.node.dataset.live === "first") this.node.dataset.live = "yes";
    if (this.pending) return;
    // Long answers are drawn less often, so that the page stays responsive.
    const wait = Math.min(1000, this.tookMs * 4 - 16);
    const later = () => (this.pending = requestAnimationFrame(() => this.draw()));
    if (wait > 16) this.pending = setTimeout(later, wait);
    else later();
  }

  draw() {
    this.pending = 0;
    const began = performance.now();
    this.markdown.draw();
    this.tookMs = performance.now() - began;
  }

  end() {
    this.draw();
    this.tools.hidden = false;
    delete this.node.dataset.live;
    this.node.removeAttribute("aria-busy");
    this.tell();
  }

  tell() {
    const { stats = {}, ended } = this.message;
    const known = (value) => typeof value === "number" && Number.isFinite(value);
    const words = [
      known(stats.rate) ? `${stats.rate.toFixed(1)} tokens/s` : null,
      known(stats.first) ? `first after ${stats.first < 0.9995 ? `${Math.round(stats.first * 1000)} ms` : `${stats.first.toFixed(2)} s`}` : null,
      known(stats.tokens) ? `${stats.tokens} ${stats.tokens === 1 ? "token" : "tokens"}` : null,
      { length: "cut off at the longest answer", stopped: "stopped", broken: "broken off" }[ended] ?? null,
    ];
    text(this.numbers, words.filter(Boolean).join(" · "));
  }
}

// Asking

function submit() {
  const content = question.value.trim();
  if (!content || running) return;
  if (editing) {
    dropFrom(conversation.messages.findLastIndex((message) => message.role === "user"));
    cancelEdit({ clear: false });
  }
  stopWaiting();
  const message = { role: "user", content };
  conversation.messages.push(message);
  log.append(userNode(message));
  question.value = "";
  grow();
  tries = 0;
  atEnd = true;
  answer();
}

function retry() {
  if (running || !conversation.messages.length) return;
  stopWaiting();
  if (conversation.messages.at(-1).role === "assistant") dropFrom(conversation.messages.length - 1);
  atEnd = true;
  answer();
}

function dropFrom(index) {
  if (index < 0) return;
  conversation.messages.length = index;
  while (log.children.length > index) log.lastElementChild.remove();
}

async function answer() {
  const system = settings.systemPrompt();
  const asked = conversation.messages.map(({ role, content }) => ({ role, content }));
  const body = continues
    ? { ...settings.request(), prompt: soFar(asked) }
    : { ...settings.request(), messages: system ? [{ role: "system", content: system }, ...asked] : asked };
  const message = { role: "assistant", content: "" };
  const view = new Answer(message, { live: true });
  const mine = { controller: new AbortController(), message, view, of: conversation };
  running = mine;
  mine.of.updated = Date.now();
  keep(mine.of);
  log.append(view.node);
  around();
  toEnd();
  announce("The answer is being written.");

  const began = performance.now();
  let first = null;
  let last = null;
  let pieces = 0;
  let usage = null;
  let problem = null;
  try {
    await ready(mine.controller.signal);
    for await (const piece of chat(body, mine.controller.signal)) {
      if (piece.text !== undefined) {
        last = performance.now();
        first ??= last;
        pieces += 1;
        view.push(piece.text);
        strip.token();
      }
      if (piece.finish) message.ended = piece.finish;
      if (piece.usage) usage = piece.usage;
    }
  } catch (error) {
    if (error.name === "AbortError") message.ended = "stopped";
    else {
      message.ended = "broken";
      problem = error instanceof Failure ? error : new Failure(`This page failed: ${error.message}`, { kind: "broken" });
    }
  }
  strip.ended();
  const tokens = Number.isInteger(usage?.completion_tokens) ? usage.completion_tokens : pieces;
  message.stats = { tokens };
  if (first !== null) message.stats.first = (first - began) / 1000;
  if (last > first && tokens > 1) message.stats.rate = ((tokens - 1) * 1000) / (last - first);
  view.end();
  running = null;
  const empty = !message.content && (problem !== null || message.ended === "stopped");
  if (empty) view.node.remove();
  else mine.of.messages.push(message);
  keep(mine.of);
  around();
  if (problem) fail(problem);
  else {
    tries = 0;
    announce(message.ended === "stopped" ? "Stopped." : "The answer is complete.");
  }
}

/** The text to continue; each message of the user begins a new line. */
function soFar(messages) {
  return messages.reduce((text, { role, content }) => text + (role === "user" && text && !text.endsWith("\n") ? "\n" : "") + content, "");
}

/** Wait while stages are starting; the notice shows their progress. */
function ready(signal) {
  if (engine?.ready !== false) return Promise.resolve();
  return new Promise((resolve, reject) => {
    whenReady.push(resolve);
    signal.addEventListener("abort", () => reject(signal.reason), { once: true });
  });
}

/** Abort the running answer; `answer` keeps the text received so far. */
function stop() {
  stopWaiting();
  running?.controller.abort();
}

function keep(one) {
  if (!deleted.has(one.id) && !conversations.keep(one)) notice("This browser has no room for the conversation: it will be gone with this page.", "warn");
}

// Failures

function fail(problem) {
  if (problem.kind === "key") {
    const asked = conversation;
    askForKey(() => asked === conversation && retry()); // not the last answer of another one
    return;
  }
  const words = el("span", {}, problem.message);
  const again = el("button", { type: "button", on: { click: () => ((tries = 0), retry()) } }, "Retry");
  const wrong = problem.status >= 400 && problem.status < 500 && problem.kind === "refused";
  $("failure").replaceChildren(words, wrong ? "" : again);
  if (wrong) takeBack(); // it would be refused again, and everything after it
  $("failure").hidden = false;
  if (problem.retryAfter !== null && tries < MAX_RETRIES) {
    tries += 1;
    const until = performance.now() + problem.retryAfter * 1000;
    const count = el("span", { class: "count", "aria-hidden": "true" });
    words.after(count);
    const tick = () => {
      const left = Math.ceil((until - performance.now()) / 1000);
      if (left <= 0) retry();
      else text(count, `Next try in ${left} s`);
    };
    waiting = setInterval(tick, 250);
    tick();
  }
}

/** Move the last question from the conversation back to the input. */
function takeBack() {
  const last = conversation.messages.at(-1);
  if (last?.role !== "user") return;
  cancelEdit({ clear: false }); // that question is no more
  dropFrom(conversation.messages.length - 1);
  if (!question.value) question.value = last.content;
  keep(conversation);
  grow();
  around();
}

function stopWaiting() {
  clearInterval(waiting);
  waiting = null;
  $("failure").hidden = true;
  $("failure").replaceChildren();
}

function notice(words, tone = "") {
  const node = $("notice");
  if (node.dataset.kind === "key") return;
  node.dataset.tone = tone;
  text(node, words);
  node.hidden = !words;
}

let withKey = null; // what is done when there is one

function askForKey(then) {
  const node = $("notice");
  if (node.dataset.kind === "key") return;
  withKey = then;
  const input = el("input", { type: "password", "aria-label": "Key", autocomplete: "off" });
  const words = el("span", {}, "This server needs its key.");
  const form = el("form", {}, words, input, el("button", { type: "submit" }, "Open"));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    let good = false;
    try {
      good = await login(input.value.trim());
    } catch (error) {
      text(words, error.message);
      return;
    }
    if (!good) {
      text(words, "That is not it; smolcluster serve printed it when it started.");
      return;
    }
    opened();
  });
  node.dataset.kind = "key";
  node.dataset.tone = "";
  node.replaceChildren(form);
  node.hidden = false;
  input.focus();
}

function opened() {
  delete $("notice").dataset.kind;
  notice("");
  const then = withKey;
  withKey = null;
  then?.();
  question.focus();
}

/** Take `#key=...` from the address. Return whether there was one and it is right. */
async function takeKey() {
  const key = location.hash.match(/^#(?:key|token)=(.+)$/)?.[1];
  if (!key) return false;
  history.replaceState(null, "", location.pathname); // not to be left in the address bar
  try {
    return await login(decodeURIComponent(key));
  } catch {
    return false; // no answer, or an invalid key: the next request reports it
  }
}

// Changing the last question

function beginEdit() {
  const last = conversation.messages.findLast((message) => message.role === "user");
  if (!last || running) return;
  stopWaiting();
  editing = true;
  $("editing").hidden = false;
  question.value = last.content;
  grow();
  question.focus();
  question.setSelectionRange(question.value.length, question.value.length);
  around();
}

function cancelEdit({ clear = true } = {}) {
  if (!editing) return;
  editing = false;
  $("editing").hidden = true;
  if (clear) question.value = "";
  grow();
  around();
}

// The engine

function engineChanged(state) {
  engine = state;
  if (state.ready !== false) for (const go of whenReady.splice(0)) go();
  strip.set(state);
  status();
}

function status() {
  const gap = engine && missing(engine);
  const [words, tone] = connected === false ? ["reconnecting", "warn"] : !engine ? ["connecting", ""] : !gap ? ["ready", "good"] : gap.startsWith("The model is loading") ? ["loading", "warn"] : ["machines missing", "bad"];
  text($("status"), words);
  $("status").dataset.tone = tone;
  notice(gap ?? "", tone);
  const { running: busy = 0, waiting: queue = 0 } = engine ?? {};
  text($("load"), engine && connected ? [busy ? `${busy} answering` : "", queue ? `${queue} waiting` : ""].filter(Boolean).join(", ") : "");
}

/** Called when the connection opens or breaks. A server that is back may serve another model. */
function heard(good) {
  const back = good && connected === false;
  connected = good;
  status();
  if (back) learn();
}

async function learn() {
  let models;
  try {
    models = (await ask("/v1/models")).data.map((model) => model.id);
  } catch (error) {
    if (error.kind === "key") askForKey(learn);
    else setTimeout(learn, 3000); // it may be starting
    return;
  }
  const config = await ask("/config").catch(() => null);
  settings.learn(config, models);
  offer(config);
  showSettings();
  if (!learn.following) {
    learn.following = true;
    follow({ changed: engineChanged, connection: heard });
  }
}

/** What the empty page offers: questions, or beginnings of a text for a model that has no chat template. */
function offer(config) {
  continues = config?.chat === false;
  const own = Array.isArray(config?.openings) ? config.openings.filter((words) => typeof words === "string" && words) : [];
  const words = continues ? (own.length ? own : OPENINGS) : SUGGESTIONS;
  $("suggestions").replaceChildren(...words.map((one) => el("button", { type: "button", on: { click: () => ((question.value = one), submit()) } }, one)));
  text($("empty").querySelector("h2"), continues ? "Continue a text." : "Ask something.");
  question.placeholder = continues ? "Begin a text" : "Ask something";
  text(document.querySelector("label[for=question]"), continues ? "Your text" : "Your question");
  $("system").closest(".field").hidden = continues;
}

function showSettings() {
  const model = settings.chosenModel();
  text($("name"), model ?? "…");
  $("name").title = model ?? "";
  const room = settings.context ? `, with room for ${settings.context.toLocaleString("en")} tokens` : "";
  const how = continues ? " It has no chat template: it goes on with what you write." : "";
  text($("what"), model ? `${model} runs on your own machines${room}.${how}` : "");
  $("open-settings").dataset.touched = settings.touched() ? "yes" : "";
  $("open-settings").setAttribute("aria-label", summary(settings));
}

// Drawers, scrolling, sizes

const OPENERS = { side: "menu", settings: "open-settings" };

function drawer(name, open) {
  const root = document.documentElement;
  const was = root.dataset[name] === "open";
  if (open) root.dataset[name] = "open";
  else delete root.dataset[name];
  $(OPENERS[name]).setAttribute("aria-expanded", String(open));
  $("scrim").hidden = !(root.dataset.side || root.dataset.settings);
  if (open) $(name).querySelector("button, select, textarea, input")?.focus();
  else if (was && $(name).contains(document.activeElement)) $(OPENERS[name]).focus();
}

const isOpen = (name) => document.documentElement.dataset[name] === "open";

function toEnd() {
  scroller.scrollTop = scroller.scrollHeight;
  lastTop = scroller.scrollTop;
}

function scrolled() {
  // The event may come when the answer has already grown again: only a user who scrolls up has left the end.
  const gap = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight;
  if (gap < AT_END_PX) atEnd = true;
  else if (scroller.scrollTop < lastTop - 1) atEnd = false;
  lastTop = scroller.scrollTop;
  $("to-end").hidden = atEnd;
}

function grow() {
  question.style.height = "auto";
  question.style.height = `${Math.min(question.scrollHeight + 2, innerHeight * 0.4)}px`;
  $("send").disabled = !question.value.trim();
}

function keys(event) {
  if (event.isComposing || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape") {
    if (running) stop();
    else if (waiting) stopWaiting();
    else if (editing) cancelEdit();
    else for (const name of ["settings", "side"]) drawer(name, false);
  } else if (event.key === "/" && !event.target.matches("input, select, textarea")) {
    event.preventDefault();
    question.focus();
  }
}

function composing(event) {
  if (event.isComposing || event.keyCode === 229) return; // an input method is at work
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    submit();
  } else if (event.key === "ArrowUp" && !question.value && !editing) {
    event.preventDefault();
    beginEdit();
  }
}

async function start() {
  startTheme($("theme"));
  $("menu").append(icon("M3 5.5h14M3 10h14M3 14.5h14"));
  $("open-settings").append(icon("M3 6h7M14 6h3M3 14h3M10 14h7M12 4v4M8 12v4"));
  $("close-settings").append(icon("M5 5l10 10M15 5L5 15"));
  $("send").append(icon("M10 16V4M5 9l5-5 5 5"));
  $("stop").append(icon("M6 6h8v8H6z"));
  offer(null);

  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  $("stop").addEventListener("click", stop);
  $("new").addEventListener("click", fresh);
  $("editing").querySelector("button").addEventListener("click", () => cancelEdit());
  $("menu").addEventListener("click", () => drawer("side", !isOpen("side")));
  $("open-settings").addEventListener("click", () => drawer("settings", !isOpen("settings")));
  $("close-settings").addEventListener("click", () => drawer("settings", false));
  $("scrim").addEventListener("click", () => ["side", "settings"].forEach((name) => drawer(name, false)));
  $("to-end").addEventListener("click", toEnd);
  question.addEventListener("input", grow);
  question.addEventListener("keydown", composing);
  addEventListener("keydown", keys);
  scroller.addEventListener("scroll", scrolled, { passive: true });
  // The end stays in view when anything around it grows: the strip of machines, a notice, the question.
  const sizes = new ResizeObserver(() => atEnd && toEnd());
  for (const node of [scroller, ...scroller.children]) sizes.observe(node);
  conversations.onOthers(list);
  // Where the keyboard of a phone covers the page instead of shrinking it.
  const fit = () => document.documentElement.style.setProperty("--height", `${visualViewport.height}px`);
  visualViewport?.addEventListener("resize", fit);
  addEventListener("pagehide", () => {
    if (running?.message.content) conversations.keep({ ...running.of, messages: [...running.of.messages, { ...running.message, ended: "stopped" }] });
  });

  addEventListener("hashchange", async () => {
    if ((await takeKey()) && $("notice").dataset.kind === "key") opened(); // put into the address of a page that asks for it
  });
  await takeKey();
  show();
  await learn();
  if (matchMedia("(hover: hover)").matches && !$("notice").querySelector("input")) question.focus();
}

start();

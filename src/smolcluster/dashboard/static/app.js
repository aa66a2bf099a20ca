// The page: which run, which view, and the line to the server. The views are loaded while the run is already asked for.

import { changed } from "./colors.js";
import { attr, el, hideTip, text } from "./dom.js";
import { RUN_STATES } from "./states.js";
import { ask, follow, login, NeedsToken } from "./store.js";
import { startTheme } from "./theme.js";

const VIEWS = ["overview", "logs", "config", "runs"];
const $ = (id) => document.getElementById(id);
const main = $("main");
const views = {};
let makers = null; // of the views, when they are loaded
let runs = [];
let more = false; // whether there are runs beyond those
let listed = false; // whether they are known yet
let chosen = null; // the run that the command named
let current; // the run that is shown, null while there is none; not known at first
let view = "overview";
let state = null;
let stop = null;
let follows = "connecting";

/** `#/RUN/VIEW`. Without a run: the one that was named, or the newest. */
function readAddress() {
  const [, name = "", which = ""] = location.hash.match(/^#\/([^/]*)\/?(\w*)/) ?? [];
  let run = "";
  try {
    run = decodeURIComponent(name);
  } catch {
    // not one of ours
  }
  return { run: run || null, view: VIEWS.includes(which) ? which : "overview" };
}

const address = (run, which) => `#/${encodeURIComponent(run ?? "")}/${which}`;

/** Without one in the address it is that of the command, or the newest; and then that one, also when another is newer. */
const wanted = () => readAddress().run ?? chosen ?? (listed && !more && !isThere(current) ? null : current) ?? runs[0]?.name ?? null;

const isThere = (run) => runs.some((one) => one.name === run);

function show() {
  const asked = readAddress();
  if (view !== asked.view) scrollTo(0, 0);
  view = asked.view;
  const run = wanted();
  for (const link of document.querySelectorAll(".tabs a")) {
    link.href = address(asked.run, link.dataset.view);
    attr(link, "aria-current", link.dataset.view === view ? "page" : null);
  }
  hideTip();
  if (run !== current && (listed || asked.run)) open(run);
  if (makers) {
    views[view] ??= makers[view]();
    if (main.firstChild !== views[view].node) main.replaceChildren(views[view].node);
    views.logs?.show(current);
  }
  draw();
}

function open(run) {
  stop?.();
  stop = null;
  state = null;
  current = run;
  main.dataset.empty = "yes";
  text($("status"), "…"); // that of the run before
  $("status").dataset.tone = "muted";
  document.title = "smolcluster";
  if (!run || (listed && !more && !isThere(run))) {
    note(run ? `waiting for the run ${run} to begin` : "waiting for the first run in this folder: smolcluster train");
    return;
  }
  note("");
  stop = follow(run, { changed: (next) => ((state = next), draw()), connection: (what) => ((follows = what), line()) });
}

let pending = 0;
function draw() {
  if (pending) return;
  pending = requestAnimationFrame(() => {
    pending = 0;
    pickers();
    line();
    if (view === "runs") views.runs?.list(runs, current);
    if (!state) return;
    delete main.dataset.empty;
    if (!stop && follows !== "ended") return;
    document.title = `${title(state)} · ${state.name}`;
    const pill = $("status");
    text(pill, state.status);
    pill.dataset.tone = RUN_STATES[state.status] ?? "muted";
    if (state.error) note(state.error, "bad");
    else if (state.reading) note("reading a long run…");
    else if (state.status === "silent") note("nothing has been written for a while: the run may have been killed", "warn");
    else note("");
    if (view !== "runs") views[view]?.set(state);
  });
}

function title({ status, numbers }) {
  const share = numbers.steps && numbers.step ? `${Math.floor((100 * numbers.step) / numbers.steps)} %` : "";
  return status === "training" ? share || "training" : status;
}

function pickers() {
  const select = $("run");
  const names = runs.map((run) => run.name);
  if (current && !names.includes(current)) names.unshift(current);
  const stamp = names.join("\n");
  if (select.dataset.stamp !== stamp) {
    select.dataset.stamp = stamp;
    select.replaceChildren(...(names.length ? names : [""]).map((name) => el("option", { value: name }, name || "no runs yet")));
  }
  select.value = current ?? "";
}

function line() {
  const words = { live: "live", broken: "reconnecting", ended: "the dashboard has ended", connecting: "connecting" }[follows];
  const over = state && ["finished", "failed", "interrupted"].includes(state.status) && follows === "live";
  const node = $("line");
  text(node.lastElementChild, over ? "up to date" : words);
  node.dataset.line = over ? "over" : follows;
}

function note(words, tone = "") {
  const node = $("notice");
  if (node.dataset.kind === "token") return;
  node.hidden = !words;
  node.dataset.tone = tone;
  text(node, words);
}

/** Without the token nothing can be shown: ask for it. */
function askForToken() {
  const node = $("notice");
  if (node.dataset.kind === "token") return;
  const input = el("input", { type: "password", "aria-label": "Token", autocomplete: "off" });
  const form = el("form", {}, el("span", {}, "This dashboard needs the token that its command printed."), input, el("button", { type: "submit" }, "Open"));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (await login(input.value.trim())) await opened();
    else text(form.firstChild, "That is not it; the address that the command printed has it behind #token=.");
  });
  node.dataset.kind = "token";
  node.replaceChildren(form);
  node.hidden = false;
  input.focus();
}

/** With the token, what was asked for in vain is asked for again. */
async function opened() {
  const node = $("notice");
  delete node.dataset.kind;
  node.hidden = true;
  stop?.();
  stop = null;
  current = undefined;
  await refresh();
}

/** `#token=...`, as the command prints it. Whether there was one that opens the page. */
async function takeToken() {
  const token = location.hash.match(/^#token=(.+)$/)?.[1];
  if (!token) return false;
  history.replaceState(null, "", location.pathname); // not to be left in the address bar
  return login(token).catch(() => false);
}

async function refresh() {
  try {
    const found = await ask("/api/runs");
    runs = found.runs;
    more = found.more;
    chosen = found.chosen;
    listed = true;
    const run = wanted();
    if (stop && !state && !more && run === current && !isThere(run)) open(run); // there is none yet
    else if ((!stop && follows !== "ended" && (more || isThere(run))) || (run !== current && !current)) {
      current = undefined;
      show();
    } else draw();
  } catch (error) {
    if (error instanceof NeedsToken) askForToken();
  }
}

async function load() {
  const [{ Overview }, { Logs }, { Config }, { Runs }] = await Promise.all([import("./overview.js"), import("./logs.js"), import("./config.js"), import("./runs.js")]);
  makers = { overview: () => new Overview(), logs: () => new Logs(), config: () => new Config(), runs: () => new Runs({ open: (name) => address(name, "overview") }) };
  show();
}

async function start() {
  startTheme($("theme"), changed);
  await takeToken();
  addEventListener("hashchange", async () => {
    if (!location.hash.startsWith("#token=")) show();
    else if (await takeToken()) await opened(); // put into the address of a page that asks for it
  });
  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault(); // the address has the run and the view
    main.focus();
  });
  $("run").addEventListener("change", (event) => (location.hash = address(event.target.value, view)));
  addEventListener("keydown", (event) => {
    if (event.target.matches("input:not([type=checkbox]), select, textarea") || event.metaKey || event.ctrlKey || event.altKey) return;
    if (event.key === "/") {
      event.preventDefault();
      location.hash = address(readAddress().run, "logs");
      setTimeout(() => $("log-search")?.focus(), 50);
    } else if (/^[1-4]$/.test(event.key)) location.hash = address(readAddress().run, VIEWS[event.key - 1]);
  });
  load();
  if (readAddress().run) show(); // no need to wait for the list
  await refresh();
  setInterval(() => {
    if (document.hidden) return;
    if (view === "overview") views.overview?.tick();
  }, 1000);
  setInterval(() => !document.hidden && refresh(), 4000);
}

start();

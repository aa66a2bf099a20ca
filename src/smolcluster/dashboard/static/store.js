// The run as this page knows it: a snapshot, kept up to date by changes.

/** Curves arrive as columns from some point on; what was there from that point on is replaced. */
export function applyCurve(old, news) {
  const columns = {};
  for (const [name, values] of Object.entries(news.columns)) {
    const kept = news.from > 0 && old ? (old.columns[name] ?? []).slice(0, news.from) : [];
    columns[name] = kept.concat(values);
  }
  return { stride: news.stride, rows: news.rows, columns };
}

export function applySnapshot(news) {
  const curves = {};
  for (const [name, curve] of Object.entries(news.curves)) curves[name] = applyCurve(null, curve);
  return { ...news, curves };
}

const MAX_EVENTS = 400;

/** A checkpoint is an event as long as it is kept. */
const saved = ({ time, text, step }) => ({ time, kind: "checkpoint", text, step });

export function applyChanges(state, news) {
  const next = { ...state, ...news, curves: state.curves, events: state.events };
  if (news.curves) {
    next.curves = { ...state.curves };
    for (const [name, curve] of Object.entries(news.curves)) next.curves[name] = applyCurve(state.curves[name], curve);
  }
  if (news.events || news.checkpoints) {
    const events = state.events.filter((event) => event.kind !== "checkpoint").concat(news.events ?? []);
    events.sort((a, b) => a.time - b.time);
    next.events = events.slice(-MAX_EVENTS).concat(next.checkpoints.map(saved)).sort((a, b) => a.time - b.time);
  }
  return next;
}

/** Server-sent events of one run; reconnects when the connection breaks. Returns a function that ends them. */
export function follow(name, { changed, connection }) {
  let source = null;
  let state = null;
  let retry = 0;
  let lastMessageAt = Date.now();
  let serverEnded = false;
  let closed = false;

  const lost = () => connection(serverEnded ? "ended" : "broken");
  const again = () => {
    clearTimeout(retry);
    if (!closed) retry = setTimeout(open, 3000);
  };
  const open = () => {
    source = new EventSource(`/api/run/${encodeURIComponent(name)}/events`);
    source.addEventListener("snapshot", (event) => {
      state = applySnapshot(JSON.parse(event.data));
      received();
      changed(state);
    });
    source.addEventListener("changes", (event) => {
      received();
      if (state === null) return;
      state = applyChanges(state, JSON.parse(event.data));
      changed(state);
    });
    source.addEventListener("beat", received);
    source.addEventListener("bye", () => {
      serverEnded = true;
      source.close();
      lost();
      again(); // it may be started again
    });
    source.addEventListener("error", () => {
      lost();
      // The browser tries again by itself, unless the server refused.
      if (source.readyState === EventSource.CLOSED) again();
    });
  };
  const received = () => {
    lastMessageAt = Date.now();
    serverEnded = false;
    connection("live");
  };
  const watch = setInterval(() => {
    if (Date.now() - lastMessageAt > 12000) lost();
  }, 2000);
  const close = () => {
    closed = true;
    clearTimeout(retry);
    clearInterval(watch);
    source?.close();
  };
  open();
  return close; // to show another run
}

export class NeedsToken extends Error {}

export async function ask(path) {
  const answer = await fetch(path, { cache: "no-store" });
  if (answer.status === 401) throw new NeedsToken();
  if (!answer.ok) throw new Error(`${answer.status}`);
  return answer.json();
}

export async function login(token) {
  const answer = await fetch("/api/login", { headers: { authorization: `Bearer ${token}` }, cache: "no-store" });
  return answer.ok;
}

// Client of the server: streamed answers, and the state of the engine. Errors become sentences.

export class Failure extends Error {
  /** `kind`: key, busy, away, lost, broken, refused. `retryAfter` in seconds, if the server sent it. */
  constructor(message, { kind, status = null, retryAfter = null }) {
    super(message);
    Object.assign(this, { kind, status, retryAfter });
  }
}

const UNREACHABLE = "The server cannot be reached. Is smolcluster serve still running?";

async function send(path, options) {
  try {
    return await fetch(path, { cache: "no-store", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure(UNREACHABLE, { kind: "lost" });
  }
}

export async function ask(path) {
  const answer = await send(path);
  if (!answer.ok) throw await failure(answer);
  return answer.json();
}

/** Return whether the key is right; then the browser has a cookie. */
export async function login(key) {
  const answer = await send("/login", { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify({ key }) });
  return answer.ok;
}

/** Yield {text}, {finish} and {usage} as they arrive. Throws if the stream ends before the answer does. */
export async function* chat(body, signal) {
  const answer = await send(body.messages ? "/v1/chat/completions" : "/v1/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  if (!answer.ok) throw await failure(answer);
  let whole = false;
  for await (const data of events(answer.body)) {
    if (data === "[DONE]") return;
    let chunk;
    try {
      chunk = JSON.parse(data);
    } catch {
      throw new Failure("The server sent something that is no answer.", { kind: "broken" });
    }
    if (chunk.error) throw new Failure(sentence(chunk.error.message, "The server could not go on with the answer."), { kind: "broken" });
    const choice = chunk.choices?.[0];
    const piece = choice?.delta?.content ?? choice?.text;
    if (typeof piece === "string" && piece) yield { text: piece };
    if (choice?.finish_reason) {
      whole = true;
      yield { finish: choice.finish_reason };
    }
    if (chunk.usage) yield { usage: chunk.usage };
  }
  if (!whole) throw new Failure("The answer broke off: the connection to the server was lost.", { kind: "broken" });
}

/** Yield the data of server-sent events. */
async function* events(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read().catch((error) => {
        if (error.name === "AbortError") throw error;
        return { done: true };
      });
      if (done) return;
      rest += decoder.decode(value, { stream: true });
      const lines = rest.split(/\r?\n/);
      rest = lines.pop();
      for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function failure(answer) {
  let reason = "";
  try {
    reason = (await answer.json())?.error?.message ?? "";
  } catch {
    // not JSON
  }
  const wait = Number.parseFloat(answer.headers.get("retry-after"));
  const details = { status: answer.status, retryAfter: Number.isFinite(wait) ? Math.min(Math.max(wait, 0), 600) : null };
  switch (answer.status) {
    case 401:
      return new Failure("This server needs a key.", { kind: "key", ...details });
    case 429:
      return new Failure(sentence(reason, "Too many questions at once."), { kind: "busy", ...details, retryAfter: details.retryAfter ?? 2 });
    case 503:
      return new Failure(sentence(reason, "The model is not ready."), { kind: "away", ...details, retryAfter: details.retryAfter ?? 5 });
    case 413:
      return new Failure(sentence(reason, "The conversation is too long for this server. Begin a new one."), { kind: "refused", ...details });
    default:
      return new Failure(sentence(reason, `The server failed to answer (${answer.status}).`), { kind: "refused", ...details });
  }
}

/** Capitalize, and end with a full stop. */
function sentence(words, otherwise) {
  const trimmed = String(words ?? "").trim();
  if (!trimmed) return otherwise;
  const upper = trimmed[0].toUpperCase() + trimmed.slice(1);
  return /[.!?]$/.test(upper) ? upper : `${upper}.`;
}

/** Report the engine's state whenever it changes. Reconnects when the connection breaks. */
export function follow({ changed, connection }) {
  let retry = 0;
  const open = () => {
    const source = new EventSource("/events");
    const received = (event) => {
      let state;
      try {
        state = JSON.parse(event.data);
      } catch {
        return;
      }
      connection(true);
      if (state && typeof state === "object") changed(state);
    };
    source.addEventListener("message", received);
    source.addEventListener("error", () => {
      connection(false);
      if (source.readyState !== EventSource.CLOSED) return; // the browser tries again by itself
      clearTimeout(retry);
      retry = setTimeout(open, 3000);
    });
  };
  open();
}

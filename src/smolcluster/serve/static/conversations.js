// Conversations, stored in this browser only. One entry each, so that two windows do not overwrite each other.

const PREFIX = "smolcluster.chat.";
const MAX_STORED = 50;
const MAX_CHARACTERS = 2_000_000; // of all together; browsers give about 5 MB

function entries() {
  const found = [];
  try {
    for (let i = 0; i < localStorage.length; i += 1) {
      const key = localStorage.key(i);
      if (!key.startsWith(PREFIX)) continue;
      const value = localStorage.getItem(key);
      const conversation = read(value);
      if (conversation) found.push({ conversation, size: value.length });
    }
  } catch {
    // storage may be forbidden
  }
  return found.sort((a, b) => b.conversation.updated - a.conversation.updated);
}

/** Parse a stored conversation, which may be of another version or another server at this address. */
function read(value) {
  let found;
  try {
    found = JSON.parse(value);
  } catch {
    return null;
  }
  if (!found || typeof found.id !== "string" || typeof found.updated !== "number" || !Array.isArray(found.messages)) return null;
  const messages = found.messages.filter((message) => ["user", "assistant"].includes(message?.role) && typeof message.content === "string");
  return { id: found.id, updated: found.updated, messages };
}

export const all = () => entries().map(({ conversation }) => conversation);

export function create() {
  const random = crypto.getRandomValues(new Uint32Array(2));
  return { id: `${Date.now().toString(36)}${random[0].toString(36)}${random[1].toString(36)}`, updated: Date.now(), messages: [] };
}

/** Store a conversation; delete the oldest others if there is no room. Return false if it could not be stored. */
export function keep(conversation) {
  if (!conversation.messages.length) return true;
  const value = JSON.stringify(conversation);
  const others = entries().filter((entry) => entry.conversation.id !== conversation.id);
  let size = value.length + others.reduce((sum, entry) => sum + entry.size, 0);
  while (others.length && (others.length >= MAX_STORED || size > MAX_CHARACTERS)) {
    const oldest = others.pop();
    size -= oldest.size;
    forget(oldest.conversation.id);
  }
  for (;;) {
    try {
      localStorage.setItem(PREFIX + conversation.id, value);
      return true;
    } catch {
      if (!others.length) return false;
      forget(others.pop().conversation.id);
    }
  }
}

export function forget(id) {
  try {
    localStorage.removeItem(PREFIX + id);
  } catch {
    // storage may be forbidden
  }
}

/** Its first words. */
export function title(conversation) {
  const words = conversation.messages.find((message) => message.role === "user")?.content.trim().replace(/\s+/g, " ") ?? "";
  return words ? (words.length > 60 ? `${words.slice(0, 59)}…` : words) : "New conversation";
}

export function onOthers(listener) {
  addEventListener("storage", (event) => {
    if (event.key === null || event.key.startsWith(PREFIX)) listener();
  });
}

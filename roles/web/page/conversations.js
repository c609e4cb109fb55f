// Conversations with models. They are kept in this browser only: an item of localStorage each, within bounds.

const PREFIX = "chat:";
const MOST = 50;
const MOST_CHARS = 2_000_000; // of all together; browsers allow about 5 million

export class Conversations {
  #known = new Map(); // id → conversation, and the characters that it takes

  /** `changed()` is called after a change in another tab. */
  constructor(changed) {
    for (const key of Object.keys(localStorage)) this.#take(key, localStorage.getItem(key));
    addEventListener("storage", ({ key, newValue }) => {
      if (!key?.startsWith(PREFIX)) return;
      this.#known.delete(key.slice(PREFIX.length));
      this.#take(key, newValue);
      changed();
    });
  }

  /** All of them, the newest first. */
  get all() {
    const found = [...this.#known.values()].map(({ conversation }) => conversation);
    return found.sort((a, b) => b.at - a.at);
  }

  find(id) {
    return this.#known.get(id)?.conversation;
  }

  /** Keep it, if need be instead of the oldest ones. Returns false if it is too long. */
  save(conversation) {
    conversation.at = Date.now();
    const item = JSON.stringify(conversation);
    if (item.length > MOST_CHARS) return false;
    this.#known.set(conversation.id, { conversation, chars: item.length });
    const oldest = this.all.reverse();
    while (this.#known.size > MOST || this.#chars > MOST_CHARS) this.remove(oldest.shift().id);
    while (!put(PREFIX + conversation.id, item)) {
      const { id } = oldest.shift();
      this.remove(id);
      if (id === conversation.id) return false;
    }
    return true;
  }

  remove(id) {
    this.#known.delete(id);
    localStorage.removeItem(PREFIX + id);
  }

  get #chars() {
    return [...this.#known.values()].reduce((sum, { chars }) => sum + chars, 0);
  }

  #take(key, item) {
    if (!key.startsWith(PREFIX) || item === null) return;
    const conversation = parse(item);
    if (conversation) this.#known.set(conversation.id, { conversation, chars: item.length });
  }
}

/** The conversation of an item; null if it is none, as after an update of the page. */
function parse(item) {
  try {
    const conversation = JSON.parse(item);
    return typeof conversation?.id === "string" && Array.isArray(conversation.messages) ? conversation : null;
  } catch {
    return null;
  }
}

/** Store an item. Returns false if there is no room. */
function put(key, item) {
  try {
    localStorage.setItem(key, item);
    return true;
  } catch (error) {
    if (error.name !== "QuotaExceededError") throw error;
    return false;
  }
}

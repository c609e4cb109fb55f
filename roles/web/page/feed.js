// Requests to the seed's API, and the stream of updates: the key, reconnecting, silence.

const BASE = "/api/v1/";
const SILENCE_S = 15; // after so many seconds without a message the seed is asked whether it is there
const LONGEST_WAIT_S = 30; // between two tries to connect
const LOOK_MS = 3000; // between two looks for a first job
const KEY = "api-key"; // kept for this tab only

/** An error for people: what happened, and what to do. */
export class Problem extends Error {
  /** `details`: the error's other fields; `retryAfterS`: when the seed wants to be asked again. */
  constructor(message, remedy = "", status = 0, details = {}, retryAfterS = 0) {
    super(message);
    Object.assign(this, { remedy, status, details, retryAfterS });
  }
}

export const setKey = (key) => sessionStorage.setItem(KEY, key);

/** Send a request to the API and return the JSON of the answer. Raises Problem. */
export async function ask(path, { timeoutS = 90, ...options } = {}) {
  const answer = await request(BASE + path, { timeoutS, ...options });
  return answer.json().catch(() => ({}));
}

/** Send a request and return its answer. Raises Problem, and AbortError after `signal`. */
export async function request(path, { method = "GET", body, timeoutS, signal } = {}) {
  const key = sessionStorage.getItem(KEY);
  if (key && !/^[\x21-\x7e]+$/.test(key)) {
    sessionStorage.removeItem(KEY); // a browser cannot send it
    throw new Problem("this key is wrong: it has characters that no key has", "copy it from the seed's file", 401);
  }
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  if (body !== undefined) headers["content-type"] = "application/json";
  let answer;
  try {
    const options = { method, headers, body: body && JSON.stringify(body), cache: "no-store" };
    answer = await fetch(path, { ...options, signal: timeoutS ? AbortSignal.timeout(1000 * timeoutS) : signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    const why = error.name === "TimeoutError" ? `did not answer within ${timeoutS} s` : "cannot be reached";
    const remedy = "is it running, and is the network up? Training goes on without it";
    throw new Problem(`the seed at ${location.host} ${why}`, remedy);
  }
  if (answer.ok) return answer;
  const content = await answer.json().catch(() => null);
  const without = `the seed answered ${answer.status} ${answer.statusText}`;
  throw problemOf(content?.error ?? content, without, answer.status, Number(answer.headers.get("retry-after")));
}

/** The Problem of an error in JSON: an object with a message, or, of servers behind a verifier, just a text. */
export function problemOf(error, without, status = 0, retryAfterS = 0) {
  const message = typeof error === "string" ? error : error?.message;
  return new Problem(message || without, error?.remedy, status, error ?? {}, retryAfterS);
}

/** The connection. It is `live`, `connecting`, `lost` (until `retryAt`, Unix ms), or `locked` (a key is needed). */
export class Feed {
  state = "connecting";
  problem = null;
  retryAt = 0;
  heardAt = 0; // Unix ms of the last message
  #store;
  #changed;
  #socket = null;
  #liveAt = 0;
  #wake = () => {};

  /** `changed()` is called after every change of the store or of this connection. */
  constructor(store, changed) {
    this.#store = store;
    this.#changed = changed;
    addEventListener("online", () => this.retry());
    setInterval(() => this.#listen(), 5000);
  }

  /** Connect, and stay connected. Never returns. */
  async run() {
    for (let failures = 0; ;) {
      try {
        await this.#follow();
        failures = 0;
        continue; // another job is followed
      } catch (problem) {
        failures = this.state === "live" && Date.now() - this.#liveAt > 1000 * SILENCE_S ? 0 : failures + 1;
        if (!(problem instanceof Problem)) console.error(problem);
        this.#enter(problem.status === 401 ? "locked" : "lost", problem);
      }
      const waitMs = 1000 * Math.min(LONGEST_WAIT_S, 0.5 * 2 ** failures) * (0.75 + Math.random() / 2);
      this.retryAt = Date.now() + waitMs;
      await new Promise((resolve) => {
        this.#wake = resolve;
        if (this.state !== "locked") setTimeout(resolve, waitMs);
      });
    }
  }

  /** Connect now instead of later. */
  retry() {
    this.#wake();
  }

  /** Follow another job. */
  choose(job) {
    this.#store.choose(job);
    if (this.#socket) this.#socket.close(1000);
    else this.retry();
  }

  #enter(state, problem = null) {
    this.state = state;
    this.problem = problem;
    this.#changed();
  }

  /** One connection, until the page ends it to follow another job. Raises Problem if it ends otherwise. */
  async #follow() {
    if (this.state === "locked") this.#enter("connecting");
    const { items } = await ask("training/jobs?limit=200", { timeoutS: 10 });
    this.#store.jobs.clear();
    this.#store.apply("jobs", items);
    const job = this.#store.jobs.has(this.#store.job) ? this.#store.job : this.#store.currentJob()?.id;
    if (job === undefined) return this.#lookAgain();
    this.#store.choose(job);
    return this.#stream(job);
  }

  /** There is no job, so there is no stream to follow: look at the nodes, and for a job a little later. */
  async #lookAgain() {
    const paths = ["metrics/cluster/summary", "cluster/nodes?limit=200", "serving?limit=200"];
    const [{ cluster }, nodes, serving] = await Promise.all(paths.map((path) => ask(path)));
    this.#store.apply("cluster", [cluster]);
    this.#store.peers.clear();
    this.#store.apply("peers", nodes.items);
    this.#store.serving.clear();
    this.#store.apply("serving", serving.items);
    this.heardAt = Date.now();
    this.#enter("live");
    await new Promise((resolve) => {
      this.#wake = resolve;
      setTimeout(resolve, LOOK_MS);
    });
  }

  #stream(job) {
    const key = sessionStorage.getItem(KEY);
    const path = `${BASE}metrics/stream/${encodeURIComponent(job)}?after_step=${this.#store.resumeAfter(job)}`;
    const url = new URL(path, location.href);
    url.protocol = url.protocol.replace("http", "ws");
    return new Promise((resolve, reject) => {
      const socket = new WebSocket(url, ["p2ptrain.v1", ...(key ? [`bearer.${key}`] : [])]);
      this.#socket = socket;
      socket.onopen = () => {
        this.heardAt = Date.now();
        this.#store.beginSnapshot();
      };
      socket.onmessage = ({ data }) => {
        const { topic, items } = JSON.parse(data);
        this.heardAt = Date.now();
        this.#store.apply(topic, items);
        if (topic === "ready") {
          this.#liveAt = this.heardAt;
          this.#enter("live");
        } else this.#changed();
      };
      socket.onclose = ({ code, reason }) => {
        if (this.#socket === socket) this.#socket = null;
        if (code === 1000 && this.#store.job !== job) resolve();
        else reject(new Problem(reason || `the seed at ${location.host} ended the connection`, "it is dialled again"));
      };
    });
  }

  /** Find a connection that is dead although it looks open. */
  async #listen() {
    const socket = this.#socket;
    if (this.state !== "live" || !socket || Date.now() - this.heardAt < 1000 * SILENCE_S) return;
    try {
      await ask("training/jobs?limit=1", { timeoutS: 5 });
      this.heardAt = Date.now();
    } catch {
      if (this.#socket === socket) socket.onclose({ code: 1006, reason: `the seed at ${location.host} fell silent` });
      socket.close();
    }
  }
}

// The messages of a conversation as they are shown: a question, and an answer that may still grow.

import { byId, h, setText } from "./dom.js";
import * as format from "./format.js";
import { GrowingMarkdown } from "./markdown.js";

const ENDINGS = { length: "ended by its limit", stopped: "stopped" };

const action = (label, verb, about) =>
  h("button", { type: "button", class: "quiet", "data-verb": verb, "aria-label": `${label} ${about}` }, label);

export function questionView({ content }, index) {
  const actions = h("div", { class: "message-actions" }, action("Edit", "edit", "the question"));
  const text = h("div", { class: "message-text", dir: "auto" }, content);
  return h("article", { class: "question", "aria-label": "You", "data-index": index }, text, actions);
}

/** An answer: its text, what keeps it from being written, who wrote it, and how fast. */
export class AnswerView {
  #text = h("div", { class: "markdown", dir: "auto" });
  #markdown = new GrowingMarkdown(this.#text);
  #notice = h("div", { class: "notice" });
  #facts = h("p", { class: "facts dim" });
  #shown = "";

  constructor(answer, index) {
    const actions = [action("Copy", "copy", "the answer"), action("Retry", "retry", "the answer")];
    const foot = h("div", { class: "message-foot" }, this.#facts, h("div", { class: "message-actions" }, actions));
    const label = { class: "answer", "aria-label": format.text(answer.model, 60), "data-index": index };
    this.element = h("article", label, this.#text, this.#notice, foot);
  }

  update(answer, isWriting) {
    if (answer.content !== this.#shown) this.#markdown.show(answer.content);
    this.#shown = answer.content;
    this.element.classList.toggle("is-waiting", isWriting && !answer.content && !answer.loading);
    setText(this.#facts, factsOf(answer).join(" · "));
    const problem = answer.problem;
    const loading = isWriting ? answer.loading : undefined; // a page that is closed leaves it in what it stores
    const notice = JSON.stringify([problem, loading]);
    if (this.#notice.dataset.shown === notice) return;
    this.#notice.dataset.shown = notice;
    this.#notice.replaceChildren(...(problem ? problemNotice(problem) : loading ? loadingNotice(loading) : []));
  }
}

export function problemNotice({ message, remedy, status }) {
  const isNew = remedy && !message.includes(remedy);
  return [
    h("p", {}, h("strong", { class: "bad" }, format.text(message, 1000))),
    ...(isNew ? [h("p", {}, format.text(remedy, 1000))] : []),
    ...(status === 401 || status === 403 ? [action("Enter another key", "unlock", "")] : []),
  ];
}

/** `state`: `loading`, or `away` for a server that does not answer its verifier. */
function loadingNotice({ message, state, percent, ready_s: leftS }) {
  const left = format.isFigure(leftS) ? ` (about ${format.duration(leftS)} left)` : "";
  const bar = { max: 100, value: percent, "aria-label": "The model loads" };
  const isKnown = state === "loading" && format.isFigure(percent);
  return [
    h("p", {}, `${format.text(message, 500)}${left}. This page asks again by itself.`),
    ...(isKnown ? [h("progress", bar)] : []),
  ];
}

/** Who wrote an answer, and how fast: short texts. */
function factsOf(answer) {
  const { verifier, upstream, stages, drafters, accepted, first_ms: firstMs, tokens, tokens_per_s: pace } = answer;
  const least = answer.is_least ? "≥ " : ""; // while it is written, the tokens in a piece are not known
  return [
    verifier && format.text(verifier, 40) + (upstream ? " (upstream)" : ""),
    stages && `stages: ${format.text(stages, 200)}`,
    drafters && `drafted by ${format.text(drafters, 100)}, ${format.percent(accepted)} accepted`,
    format.isFigure(firstMs) && `first token ${format.millis(firstMs)}`,
    format.isFigure(tokens) && `${least}${format.plural(tokens, "token")}`,
    format.isFigure(pace) && `${least}${format.threeDigits(pace)} tokens/s`,
    answer.left_out && `${format.plural(answer.left_out, "earlier message")} left out`,
    ENDINGS[answer.reason],
  ].filter(Boolean);
}

/** What the records of the feed tell of who writes an answer of `model`. */
export function writersOf(store, model, verifier) {
  const isIt = (item) => item.role === "verifier" && item.model === model && item.name === verifier;
  const serving = [...store.serving.values()].find(isIt);
  const isServed = (part) => part.name === model && !store.jobs.has(part.model); // others are in training
  const parts = [...store.parts.values()].filter(isServed).sort((a, b) => a.start - b.start);
  return {
    upstream: Boolean(serving?.upstream),
    stages: parts.map((part) => `${part.peer_name} ${part.start}–${part.stop}`).join(", "),
    drafters: (serving?.drafters ?? []).map(({ peer }) => store.nameOf(peer)).join(", "),
    accepted: serving?.stats?.alpha,
  };
}

/** Fill the list of conversations; `shown`: the one in view. */
export function showList(conversations, shown) {
  const row = ({ id, messages, at }) => {
    const title = format.text(messages[0]?.content ?? "", 60);
    const open = { type: "button", class: "open", "data-open": id, "aria-current": id === shown ? "true" : undefined };
    const remove = { type: "button", class: "quiet", "data-delete": id, "aria-label": `Delete ${title}` };
    const time = h("span", { class: "dim" }, format.clock(at / 1000));
    return h("li", {}, h("button", open, h("span", { class: "title" }, title), time), h("button", remove, "✕"));
  };
  byId("conversations").replaceChildren(...conversations.map(row));
}

// The chat: conversations with the models that verifiers of this cluster serve.

import { answerOf, listModels } from "./completion.js";
import { Conversations } from "./conversations.js";
import { announce, byId, confirmed, copy, h, notify, openDialog, setText } from "./dom.js";
import { Problem } from "./feed.js";
import { text } from "./format.js";
import { AnswerView, problemNotice, questionView, showList, writersOf } from "./messages.js";

const SETTINGS = "chat-settings"; // name → text, and the model
const NEAR_PX = 60; // who has scrolled up by more reads, and is not taken to the end
const NOBODY = "No model is served. A verifier serves one: p2ptrain join ADDRESS --role verifier --model DIRECTORY";
const KEYS = "Enter sends, Shift+Enter begins a line, Esc stops, ↑ edits the last question.";

const newId = () => Date.now().toString(36) + Math.random().toString(36).slice(2);
const newConversation = () => ({ id: newId(), messages: [] });

export class Chat {
  isAvailable = false;
  #store;
  #changed;
  #unlock;
  #conversations = new Conversations(() => this.#follow());
  #settings = JSON.parse(localStorage.getItem(SETTINGS) ?? "{}");
  #shown = newConversation();
  #writing = null; // {conversation, answer, abort}, while an answer is written
  #editing = -1; // index of the question that is changed
  #lastView = null; // of the newest answer shown
  #served = null; // for what the models were listed
  #hint = []; // what is shown in a conversation without messages
  #isDrawing = false;

  /** `changed()`: it became available, or is no more; `unlock(problem)` asks for a key. */
  constructor(store, { changed, unlock }) {
    this.#store = store;
    this.#changed = changed;
    this.#unlock = unlock;
    const clicks = {
      "chat-new": () => this.#choose(newConversation()),
      "chat-menu": () => this.#showMenu(!byId("chat").classList.contains("is-listing")),
      "chat-set": () => this.#set(),
      "chat-stop": () => this.#stop(),
      "chat-leave": () => this.#edit(-1),
    };
    for (const [id, does] of Object.entries(clicks)) byId(id).addEventListener("click", does);
    byId("chat-model").addEventListener("change", ({ target }) => this.#keepSettings({ model: target.value }));
    byId("chat-text").addEventListener("keydown", (event) => this.#type(event));
    byId("chat-log").addEventListener("click", ({ target }) => this.#click(target));
    byId("conversations").addEventListener("click", ({ target }) => this.#clickList(target.closest("button")?.dataset));
    byId("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    document.addEventListener("keydown", ({ key }) => key === "Escape" && this.#escape());
    addEventListener("pagehide", () => this.#writing && this.#conversations.save(this.#writing.conversation));
    this.#open(this.#shown);
  }

  /** Take what the feed brought: other models, or other figures of who writes. */
  update(isLive) {
    const served = isLive ? JSON.stringify(this.#verifiers.map(({ id, loaded }) => [id, loaded < 1])) : null;
    if (isLive && served !== this.#served) this.#listModels();
    this.#served = served;
    if (this.#writing) this.#drawSoon();
  }

  focus() {
    byId("chat-text").focus();
  }

  // ----------------------------------------------------------------------------------------------------------- models

  get #verifiers() {
    return [...this.#store.serving.values()].filter(({ role }) => role === "verifier");
  }

  async #listModels() {
    try {
      const models = await listModels();
      this.#offer(models.map(({ id }) => id));
      this.isAvailable = true;
    } catch (problem) {
      if (!(problem instanceof Problem)) throw problem;
      if (problem.status === 404) this.isAvailable = false; // a seed without this interface
      if (problem.status === 403) this.isAvailable = true; // it has one, for other keys
      this.#hint = problemNotice(problem);
    }
    this.#showHint();
    this.#changed();
  }

  /** Offer models: those that can be used now, and those that are loading. */
  #offer(ready) {
    const choice = byId("chat-model");
    const before = choice.value;
    const ids = [...new Set([...ready, ...this.#verifiers.map(({ model }) => model)])];
    const label = (id) => text(id, 60) + (ready.includes(id) ? "" : " (loading)");
    choice.replaceChildren(...ids.map((id) => h("option", { value: id }, label(id))));
    this.#chooseModel(before, this.#shown.messages.at(-1)?.model, this.#settings.model, ids[0]);
    choice.disabled = !ids.length;
    this.#hint = [h("p", {}, ids.length ? KEYS : NOBODY)];
  }

  /** Choose the first of these that is offered. */
  #chooseModel(...models) {
    const choice = byId("chat-model");
    choice.value = models.find((model) => [...choice.options].some(({ value }) => value === model)) ?? "";
  }

  #showHint() {
    if (!this.#shown.messages.length) byId("chat-log").replaceChildren(h("div", { class: "hint dim" }, this.#hint));
  }

  // ---------------------------------------------------------------------------------------------------------- settings

  async #set() {
    const form = byId("chat-settings").querySelector("form");
    for (const field of form.querySelectorAll("[name]")) field.value = this.#settings[field.name] ?? "";
    const values = await openDialog("chat-settings");
    if (values) this.#keepSettings(values);
  }

  #keepSettings(changes) {
    Object.assign(this.#settings, changes);
    localStorage.setItem(SETTINGS, JSON.stringify(this.#settings));
  }

  /** The request for the last answer of a conversation. Questions that got no answer are left out. */
  #request({ messages }) {
    const { system, model: _, ...others } = this.#settings;
    const figures = Object.entries(others).filter(([, value]) => value !== "");
    const last = messages.length - 2;
    const counts = ({ role, content }, at) => (role === "user" ? at === last || messages[at + 1].content : content);
    const turns = messages.slice(0, last + 1).filter(counts).map(({ role, content }) => ({ role, content }));
    return {
      model: messages.at(-1).model,
      messages: system ? [{ role: "system", content: system }, ...turns] : turns,
      ...Object.fromEntries(figures.map(([name, value]) => [name, Number(value)])),
    };
  }

  // ----------------------------------------------------------------------------------------------------------- writing

  #send() {
    const field = byId("chat-text");
    const content = field.value.trim();
    if (!content || this.#writing || !byId("chat-model").value) return;
    const { messages } = this.#shown;
    if (this.#editing >= 0) messages.splice(this.#editing);
    field.value = "";
    this.#edit(-1);
    messages.push({ role: "user", content });
    this.#write(this.#shown);
  }

  #retry() {
    if (this.#writing || !byId("chat-model").value) return;
    this.#shown.messages.pop();
    this.#write(this.#shown);
  }

  #stop() {
    this.#writing?.abort.abort();
    this.focus();
  }

  /** Have the answer to the last question of a conversation written. */
  async #write(conversation) {
    const answer = { role: "assistant", content: "", model: byId("chat-model").value };
    conversation.messages.push(answer);
    const abort = new AbortController();
    this.#writing = { conversation, answer, abort };
    const isStored = this.#conversations.save(conversation);
    this.#open(conversation);
    try {
      const clock = {};
      for await (const event of answerOf(this.#request(conversation), abort.signal)) {
        take(answer, event, clock);
        this.#drawSoon();
      }
    } catch (problem) {
      if (abort.signal.aborted) answer.reason = "stopped";
      else {
        if (!(problem instanceof Problem)) console.error(problem);
        answer.problem = { message: problem.message, remedy: problem.remedy, status: problem.status };
      }
    }
    Object.assign(answer, this.#writers(answer), { loading: undefined });
    this.#writing = null;
    if (isStored && this.#conversations.find(conversation.id)) this.#conversations.save(conversation);
    else if (!isStored) notify("This conversation is too long to be stored", { role: "bad" });
    this.#showState();
    this.#drawSoon();
    announce(text(answer.problem?.message ?? `${answer.model}: ${answer.content}`, 1000));
  }

  #writers({ model, verifier }) {
    return verifier === undefined ? {} : writersOf(this.#store, model, verifier);
  }

  // ----------------------------------------------------------------------------------------------------------- drawing

  /** Draw the newest answer with the browser's next frame. The other messages stay as they are. */
  #drawSoon() {
    if (this.#isDrawing) return;
    this.#isDrawing = true;
    requestAnimationFrame(() => {
      this.#isDrawing = false;
      const answer = this.#shown.messages.at(-1);
      if (!answer) return;
      const log = byId("chat-log");
      const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_PX;
      const isWriting = answer === this.#writing?.answer;
      if (isWriting) Object.assign(answer, this.#writers(answer));
      this.#lastView.update(answer, isWriting);
      if (isAtEnd) log.scrollTop = log.scrollHeight;
    });
  }

  /** Show a conversation. */
  #open(conversation) {
    this.#shown = conversation;
    this.#chooseModel(conversation.messages.at(-1)?.model, byId("chat-model").value);
    this.#edit(-1);
    const views = conversation.messages.map((message, index) => {
      if (message.role === "user") return questionView(message, index);
      this.#lastView = new AnswerView(message, index);
      this.#lastView.update(message, message === this.#writing?.answer);
      return this.#lastView.element;
    });
    const log = byId("chat-log");
    log.replaceChildren(...views);
    log.scrollTop = log.scrollHeight;
    this.#showHint();
    this.#showState();
  }

  #showState() {
    const isWriting = this.#writing !== null;
    byId("chat").classList.toggle("is-writing", isWriting);
    byId("chat-log").setAttribute("aria-busy", isWriting);
    byId("chat-stop").hidden = !isWriting;
    byId("chat-send").hidden = isWriting;
    showList(this.#conversations.all, this.#shown.id);
  }

  #showMenu(isOpen) {
    byId("chat").classList.toggle("is-listing", isOpen);
    byId("chat-menu").setAttribute("aria-expanded", isOpen);
  }

  /** Another tab has changed the conversations. */
  #follow() {
    const known = this.#conversations.find(this.#shown.id);
    if (known && known !== this.#shown && !this.#writing && this.#editing < 0) this.#open(known);
    else this.#showState();
  }

  // -------------------------------------------------------------------------------------------------- keys and buttons

  /** Take a question into the field, to send it again; -1: leave it as it is. */
  #edit(index) {
    const field = byId("chat-text");
    if (index >= 0) field.value = this.#shown.messages[index].content;
    else if (this.#editing >= 0) field.value = "";
    this.#editing = index;
    byId("chat-editing").hidden = index < 0;
    const isReplaced = (article) => index >= 0 && Number(article.dataset.index) >= index;
    for (const article of byId("chat-log").children) article.classList.toggle("is-replaced", isReplaced(article));
    if (index >= 0) field.focus();
  }

  #type(event) {
    if (event.isComposing) return; // Enter ends a word of an input method
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      this.#send();
    } else if (event.key === "ArrowUp" && !event.target.value && !this.#writing) {
      event.preventDefault();
      const last = this.#shown.messages.findLastIndex(({ role }) => role === "user");
      if (last >= 0) this.#edit(last);
    }
  }

  #escape() {
    if (!document.body.classList.contains("is-chatting") || document.querySelector("dialog[open]")) return;
    if (this.#writing) this.#stop();
    else if (this.#editing >= 0) this.#edit(-1);
    else this.#showMenu(false);
  }

  #click(target) {
    const code = target.closest("[data-copy]")?.closest(".code").querySelector("code");
    if (code) return copy(code.textContent, code);
    const article = target.closest("article");
    const { verb } = target.dataset;
    if (verb === "copy") copy(this.#shown.messages[article.dataset.index].content, article.querySelector(".markdown"));
    else if (verb === "unlock") this.#enterKey();
    else if (verb === "edit" && !this.#writing) this.#edit(Number(article.dataset.index));
    else if (verb === "retry") this.#retry();
  }

  async #enterKey() {
    await this.#unlock(new Problem("Texts are written with the operator key only.", "", 401));
    await this.#listModels();
  }

  #choose(conversation) {
    this.#open(conversation);
    this.#showMenu(false);
    this.focus();
  }

  async #clickList({ open, delete: removed } = {}) {
    if (open) this.#choose(this.#conversations.find(open));
    if (!removed || !(await confirmed("Delete this conversation?", "It is kept nowhere else."))) return;
    if (this.#writing?.conversation.id === removed) this.#stop();
    this.#conversations.remove(removed);
    if (this.#shown.id === removed) this.#open(newConversation());
    else this.#showState();
  }
}

/** Add an event to an answer. `clock`: the times of its request, of its first and its last text, and its pieces. */
function take(answer, { askedAt, loading, verifier, leftOut, text: piece, reason, usage }, clock) {
  if (askedAt !== undefined) clock.askedAt = askedAt;
  if (loading) answer.loading = loading;
  if (verifier !== undefined) Object.assign(answer, { loading: undefined, verifier, left_out: leftOut });
  if (reason) answer.reason = reason;
  if (piece) {
    answer.content = (answer.content + piece).trimStart(); // indented, it would be drawn as code
    clock.lastAt = performance.now();
    clock.firstAt ??= clock.lastAt;
    clock.pieces = (clock.pieces ?? 0) + 1;
    answer.first_ms = clock.firstAt - clock.askedAt;
  }
  answer.is_least = !usage;
  answer.tokens = usage?.completion_tokens ?? clock.pieces;
  const seconds = (clock.lastAt - clock.firstAt) / 1000;
  answer.tokens_per_s = seconds > 0 ? (answer.tokens - 1) / seconds : undefined;
}

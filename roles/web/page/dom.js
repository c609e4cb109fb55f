// Elements, tables that are updated in place, dialogs, and messages. Text is only ever set as text, never as HTML.

/** Make an element. Properties: `class`, `on…` handlers, other attributes; undefined leaves one out. */
export function h(tag, properties = {}, ...children) {
  return build(document.createElement(tag), properties, children);
}

export function svg(tag, properties = {}, ...children) {
  return build(document.createElementNS("http://www.w3.org/2000/svg", tag), properties, children);
}

function build(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat());
  return element;
}

export const byId = (id) => document.getElementById(id);

/** Set the text of an element, if it is another one. */
export function setText(element, said) {
  if (element.textContent !== said) element.textContent = said;
}

/** Fill a cell. `value`: a text, or an object with `text` and some of
 *  `symbol`, `role`: a state and its colour; `title`: more, shown on hover;
 *  `bar`: part of a whole, 0 to 1; `stack`: parts of a bar, `[role, value, title]`;
 *  `buttons`: `[label, action]`, handled by the table. */
export function fill(cell, value) {
  if (value.buttons) return fillButtons(cell, value.buttons);
  const { text, symbol, role, title, bar, stack } = typeof value === "string" ? { text: value } : value;
  cell.title = title ?? "";
  const shown = symbol ? [h("span", { class: `symbol ${role}`, "aria-hidden": "true" }, symbol), ` ${text}`] : [text];
  const total = stack?.reduce((sum, [, part]) => sum + part, 0);
  const parts =
    bar === undefined ? (stack ?? []).map(([kind, part, said]) => [kind, part / total, said]) : [["fill", bar]];
  if (parts.length) {
    const width = (part) => Math.round(1000 * Math.min(Math.max(part, 0), 1)) / 10;
    let x = 0;
    const shape = { viewBox: "0 0 100 4", preserveAspectRatio: "none" };
    const drawn = svg("svg", { class: "bar", "aria-hidden": "true", ...shape });
    for (const [kind, part, said] of parts) {
      drawn.append(svg("rect", { class: kind, x, width: width(part), height: 4 }, said ? svg("title", {}, said) : ""));
      x += width(part);
    }
    shown.push(drawn);
  }
  cell.replaceChildren(...shown);
}

/** Buttons stay the same elements while their number does, so that the focus stays on them. */
function fillButtons(cell, buttons) {
  while (cell.childElementCount > buttons.length) cell.lastElementChild.remove();
  while (cell.childElementCount < buttons.length) cell.append(h("button", { type: "button" }));
  buttons.forEach(([label, action, about], index) => {
    const button = cell.children[index];
    setText(button, label);
    button.dataset.action = action;
    button.setAttribute("aria-label", `${label} ${about}`);
    button.classList.toggle("danger", ["cancel", "forget", "delete", "evict"].includes(action));
  });
}

/** A table whose rows follow records. On a narrow screen each row becomes a card; the explicit roles keep the table's
 *  meaning for screen readers then. The first column names its row. */
export class Table {
  #rows = new Map(); // key → row, and what its cells show
  #body;
  #empty;

  /** `columns`: `{label, value(record), class}`; `act(action, record)` handles buttons. */
  constructor(place, caption, columns, { key = (record) => String(record.id), empty, act } = {}) {
    this.columns = columns;
    this.key = key;
    this.#body = h("tbody", { role: "rowgroup" });
    const head = (column) => h("th", { role: "columnheader", scope: "col", class: column.class }, column.label);
    const heads = h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, columns.map(head)));
    const table = h("table", { role: "table" }, h("caption", { class: "hidden" }, caption), heads, this.#body);
    this.#empty = h("p", { class: "empty" }, empty ?? "");
    place.append(h("div", { class: "scroll" }, table), this.#empty);
    table.addEventListener("click", ({ target }) => {
      const { action } = target.dataset;
      if (action) act(action, this.#rows.get(target.closest("tr").dataset.key).record);
    });
  }

  update(records) {
    const wanted = new Set(records.map(this.key));
    for (const [key, { row }] of this.#rows) {
      if (wanted.has(key)) continue;
      row.remove();
      this.#rows.delete(key);
    }
    records.forEach((record, index) => {
      const key = this.key(record);
      if (!this.#rows.has(key)) this.#rows.set(key, this.#newRow(key));
      const known = this.#rows.get(key);
      known.record = record;
      this.columns.forEach((column, at) => {
        const value = column.value(record);
        const shown = typeof value === "string" ? value : JSON.stringify(value);
        if (known.shown[at] === shown) return;
        known.shown[at] = shown;
        fill(known.row.children[at], value);
      });
      const there = this.#body.children[index] ?? null;
      if (there !== known.row) this.#body.insertBefore(known.row, there);
    });
    this.#body.parentElement.parentElement.hidden = records.length === 0;
    this.#empty.hidden = records.length > 0;
  }

  #newRow(key) {
    const cells = this.columns.map((column, index) => {
      const [tag, role, scope] = index ? ["td", "cell", undefined] : ["th", "rowheader", "row"];
      return h(tag, { role, scope, class: column.class, "data-label": column.label });
    });
    return { row: h("tr", { role: "row", "data-key": key }, cells), shown: [] };
  }
}

// A button that dismisses is no submit button, or Enter in a field would press it: it is the first of its form.
addEventListener("click", ({ target }) => target.closest("[data-close]")?.closest("dialog").close());

/** Open a dialog of index.html and wait for its end. Returns the values of its form, or null if it was dismissed. */
export function openDialog(id) {
  const dialog = byId(id);
  if (dialog.open) return Promise.resolve(null);
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    const done = () =>
      resolve(dialog.returnValue === "yes" ? Object.fromEntries(new FormData(dialog.querySelector("form"))) : null);
    dialog.addEventListener("close", done, { once: true });
  });
}

/** Ask before something that cannot be undone. */
export async function confirmed(question, consequence) {
  setText(byId("confirm-question"), question);
  setText(byId("confirm-consequence"), consequence);
  setText(byId("confirm-yes"), question.replace("?", ""));
  return (await openDialog("confirm")) !== null;
}

/** Tell a screen reader, at its next pause. */
export const announce = (said) => setText(byId("announcer"), said);

/** Show a message for some seconds; one with a `role` of "bad" until it is dismissed. */
export function notify(said, { remedy = "", role = "good" } = {}) {
  const close = h(
    "button",
    { type: "button", class: "quiet", "aria-label": "Dismiss", onclick: () => note.remove() },
    "✕",
  );
  const words = h("div", {}, h("strong", {}, said), ...(remedy ? [h("p", {}, remedy)] : []));
  const note = h("div", { class: `note ${role}`, role: role === "bad" ? "alert" : "status" }, words, close);
  const notes = byId("notes");
  notes.append(note);
  while (notes.childElementCount > 4) notes.firstElementChild.remove();
  if (role !== "bad") setTimeout(() => note.remove(), 6000);
}

/** Copy `text`, or select `place`, which shows it, if the browser forbids to copy. */
export function copy(text, place) {
  const byHand = () => getSelection().selectAllChildren(place);
  navigator.clipboard.writeText(text).then(() => notify("Copied"), byHand);
}

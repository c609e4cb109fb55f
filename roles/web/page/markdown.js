// Markdown as elements. What a model writes becomes elements of a few kinds and text, never HTML.

import { h } from "./dom.js";

/* global markdownit */

const parser = markdownit({ html: false });
const HEADINGS = { h1: "h3", h2: "h4", h3: "h5" }; // below the page's own; all smaller ones are h6
const WEB = /^(https?|mailto):/i;

/** Markdown that grows. Blocks that are complete are never built again: new text costs no more than its last block. */
export class GrowingMarkdown {
  #place;
  #references = {}; // [name]: address
  #built = 0; // elements of complete blocks,
  #read = 0; // and the characters that they were made of

  /** `place`: the element that it is shown in. */
  constructor(place) {
    this.#place = place;
  }

  /** Show `text`, which begins with all that was shown before. */
  show(text) {
    const rest = text.replace(/\r\n?/g, "\n").slice(this.#read);
    const tokens = parser.parse(rest, this.#references);
    const last = tokens.findLastIndex(({ level, nesting }) => level === 0 && nesting >= 0);
    while (this.#place.childNodes.length > this.#built) this.#place.lastChild.remove();
    append(this.#place, tokens.slice(0, Math.max(last, 0)));
    const start = last > 0 ? startOfLine(rest, tokens[last].map[0]) : 0;
    if (start && rest.includes("\n", start)) { // before its first line ends, it may still belong to the block before
      this.#built = this.#place.childNodes.length;
      this.#read += start;
    }
    append(this.#place, tokens.slice(Math.max(last, 0)));
  }
}

function startOfLine(text, line) {
  let at = 0;
  for (; line > 0; line -= 1) at = text.indexOf("\n", at) + 1;
  return at;
}

function append(place, tokens) {
  const open = [place];
  for (const token of tokens) {
    if (token.hidden) continue;
    if (token.type === "inline") append(open.at(-1), token.children);
    else if (token.nesting < 0) open.pop();
    else {
      const element = token.nesting ? container(token) : leaf(token);
      open.at(-1).append(element);
      if (token.nesting) open.push(element);
    }
  }
}

function container(token) {
  const { type, tag } = token;
  if (type === "link_open") return link(token.attrGet("href"));
  if (type === "heading_open") return h(HEADINGS[tag] ?? "h6");
  if (type === "ordered_list_open") return h("ol", { start: token.attrGet("start") ?? undefined });
  const align = token.attrGet("style")?.replace("text-align:", "");
  return h(tag, { class: align && `align-${align}` });
}

function leaf(token) {
  const { type, content } = token;
  if (type === "softbreak" || type === "hardbreak") return h("br");
  if (type === "hr") return h("hr");
  if (type === "code_inline") return h("code", {}, content);
  if (type === "image") return link(token.attrGet("src"), content || "picture"); // nothing is loaded from elsewhere
  return type === "fence" || type === "code_block" ? codeBlock(content, token.info.trim().split(/\s/)[0]) : content;
}

function link(address, ...children) {
  const leads = WEB.test(address) ? { href: address, target: "_blank", rel: "noopener noreferrer" } : {};
  return h("a", leads, ...children);
}

function codeBlock(code, language) {
  const copy = h("button", { type: "button", class: "quiet", "data-copy": "", "aria-label": "Copy the code" }, "Copy");
  const head = h("div", { class: "code-head" }, language, copy);
  return h("div", { class: "code" }, head, h("pre", {}, h("code", {}, code)));
}

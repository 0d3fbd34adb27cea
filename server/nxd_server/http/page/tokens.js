// Tokens coloured by how likely each was; the pointer or the arrow keys show the other candidates.

import { bar, h, table } from "./dom.js";

const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(logprob > -7 ? 1 : 4)} %`;

/** A token's bytes; completions give those of no text as `bytes:\xe2\x80`. */
const bytesOf = (name) =>
  name.startsWith("bytes:\\x")
    ? [...name.matchAll(/\\x(..)/g)].map(([, digits]) => parseInt(digits, 16))
    : [...new TextEncoder().encode(name)];

/** The entries of `logprobs` in either of OpenAI's forms, as those of chats. */
export function entries(logprobs) {
  if (!logprobs?.tokens) return logprobs?.content ?? [];
  return logprobs.tokens.map((token, place) => {
    const top = Object.entries(logprobs.top_logprobs[place] ?? {});
    const others = top.map(([token, logprob]) => ({ token, logprob })).sort((a, b) => b.logprob - a.logprob);
    return { token, logprob: logprobs.token_logprobs[place], bytes: bytesOf(token), top_logprobs: others };
  });
}

export class Tokens {
  #decoder = new TextDecoder(); // of characters whose bytes are in several tokens
  #entries = [];
  #shown = -1;
  #tip = h("div", { class: "tip", role: "status", hidden: true });
  #list = h("div", { tabindex: 0, role: "group", "aria-label": "Tokens; the arrow keys show how likely each was" });
  element = h("div", { class: "tokens" }, this.#list, this.#tip);

  constructor() {
    const list = this.#list;
    const over = ({ target }) => this.#show([...list.children].indexOf(target));
    for (const kind of ["pointerover", "click"]) list.addEventListener(kind, over);
    for (const kind of ["pointerleave", "blur"]) list.addEventListener(kind, () => this.#show(-1));
    list.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      this.#show(Math.max(0, Math.min(list.children.length - 1, this.#shown + step)));
    });
  }

  add(entry) {
    const shade = Math.min(4, Math.floor(5 * (1 - Math.exp(entry.logprob))));
    const text = this.#decoder.decode(Uint8Array.from(entry.bytes), { stream: true });
    this.#list.append(h("span", { class: `p${shade}` }, text));
    this.#entries.push(entry);
  }

  #show(place) {
    const token = this.#list.children[place];
    this.#list.children[this.#shown]?.classList.remove("current");
    this.#shown = place;
    this.#tip.hidden = !token;
    if (!token) return;
    token.classList.add("current");
    const { token: text, logprob, top_logprobs: top } = this.#entries[place];
    const row = ({ token, logprob }) => [JSON.stringify(token), percent(logprob), bar(Math.exp(logprob))];
    this.#tip.replaceChildren(table(`${JSON.stringify(text)} ${percent(logprob)}`, [], top.map(row)));
    const most = this.element.clientWidth - this.#tip.offsetWidth;
    this.#tip.style.left = `${Math.max(0, Math.min(token.offsetLeft, most))}px`;
    this.#tip.style.top = `${token.offsetTop + token.offsetHeight + 4}px`;
  }
}

// An answer as it streams in: reasoning, text or tokens, calls of tools, and how fast it came.

import { h } from "./dom.js";
import { entries, Tokens } from "./tokens.js";

const shown = ({ function: { name, arguments: given } }) => h("pre", { class: "call" }, `${name}(${given})`);

function indent(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return "";
  }
}

export class Answer {
  text = "";
  reasoning = "";
  calls = [];
  #times = { asked: performance.now(), first: null, last: null };
  #usage = null;
  #reason = "";
  #tokens = null;
  #thought = h("p");
  #thinking = h("details", { hidden: true, open: true }, h("summary", {}, "Reasoning"), this.#thought);
  #body = h("div", { class: "text" });
  #called = h("div");
  #figures = h("p", { class: "figures" });
  element = h("article", { class: "answer" }, this.#thinking, this.#body, this.#called, this.#figures);

  /** Takes the next event of a stream of chats or completions. */
  take(event) {
    this.#usage = event.usage ?? this.#usage;
    const choice = event.choices[0];
    if (!choice) return;
    const { content = choice.text, reasoning_content: thought, tool_calls: calls = [] } = choice.delta ?? {};
    this.#reason = choice.finish_reason ?? this.#reason;
    for (const entry of entries(choice.logprobs)) {
      if (!this.#tokens) this.#body.replaceChildren((this.#tokens = new Tokens()).element);
      this.#tokens.add(entry);
    }
    if (thought) {
      this.reasoning += thought;
      this.#thinking.hidden = false;
      this.#thought.append(thought);
    }
    if (content) {
      this.text += content;
      if (!this.#tokens) this.#body.append(content);
    }
    for (const { index, id, function: part = {} } of calls) {
      const call = (this.calls[index] ??= { id, type: "function", function: { name: "", arguments: "" } });
      for (const name of ["name", "arguments"]) call.function[name] += part[name] ?? "";
    }
    if (calls.length) this.#called.replaceChildren(...this.calls.map(shown));
    if (content || thought || calls.length) {
      this.#times.last = performance.now();
      this.#times.first ??= this.#times.last;
    }
  }

  /** Says how it went; `json`: whether its text is to be JSON, which is then indented. */
  end(json, stopped = false) {
    const { asked, first, last } = this.#times;
    const tokens = this.#usage?.completion_tokens ?? 0;
    const parts = [stopped ? "stopped" : `ended by ${this.#reason}`];
    if (first !== null) parts.unshift(`first token after ${Math.round(first - asked)} ms`);
    if (tokens > 1 && last > first) parts.unshift(`${((1000 * (tokens - 1)) / (last - first)).toFixed(1)} tokens/s`);
    if (tokens) parts.unshift(`${tokens} tokens`);
    const indented = json && indent(this.text);
    if (indented && !this.#tokens) this.#body.textContent = indented;
    if (json) parts.push(indented ? "valid JSON" : "no complete JSON");
    this.#figures.textContent = parts.join(" · ");
  }

  /** Says why there is no more of it; `again` asks once more. */
  fail(error, again) {
    const retry = h("button", { type: "button", onclick: again }, "Try again");
    this.#figures.replaceChildren(h("span", { class: "error", role: "alert" }, error.message), " ", retry);
  }

  /** The message that a conversation goes on with. */
  get message() {
    const message = { role: "assistant", content: this.text };
    if (this.reasoning) message.reasoning_content = this.reasoning;
    return this.calls.length ? { ...message, tool_calls: this.calls } : message;
  }
}

// A view of streamed answers: a field and what was asked in it, one request at a time, beside the parameters.

import { stream } from "./api.js";
import { Answer } from "./answer.js";
import { h } from "./dom.js";
import { Parameters } from "./parameters.js";

export class Talk {
  running = null; // the AbortController of the request that runs
  #send = h("button", {}, "Send");
  #stop = h("button", { type: "button", hidden: true, onclick: () => this.stop() }, "Stop (Esc)");
  log = h("div", { class: "log", role: "log", "aria-label": "Answers" });

  /** `begin(text)` is called with what is sent, by a key for which `sends(event)` holds or the button. */
  constructor(card, input, sends, begin, ...buttons) {
    this.parameters = new Parameters(card, buttons.length > 0);
    const form = h("form", { class: "ask" }, input, h("div", { class: "buttons" }, this.#send, this.#stop, buttons));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (!this.running && input.value.trim()) begin(input.value);
    });
    form.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.stop();
      if (event.key !== "Enter" || event.isComposing || event.target !== input || !sends(event)) return;
      event.preventDefault();
      form.requestSubmit();
    });
    this.element = h("div", { class: "columns" }, h("div", {}, this.log, form), this.parameters.element);
  }

  /** How far below the window the log ends. */
  get #below() {
    return this.log.parentNode.getBoundingClientRect().bottom - innerHeight;
  }

  stop() {
    this.running?.abort();
  }

  #run(controller) {
    this.running = controller;
    this.#send.hidden = controller !== null;
    this.#stop.hidden = controller === null;
  }

  /** Streams an answer into the log. Returns it; null if it failed, with a button that calls `again`. */
  async ask(path, body, again) {
    const answer = new Answer();
    this.log.append(answer.element);
    this.#run(new AbortController());
    try {
      for await (const event of stream(path, { ...this.parameters.read(), ...body }, this.running.signal)) {
        const seen = this.#below < 80;
        answer.take(event);
        if (seen && this.#below > 0) scrollBy(0, this.#below);
      }
      answer.end(this.parameters.value("form") !== "text");
      return answer;
    } catch (error) {
      if (error.name === "AbortError") {
        answer.end(false, true);
        return answer;
      }
      answer.fail(error, () => {
        answer.element.remove();
        again();
      });
      return null;
    } finally {
      this.#run(null);
    }
  }
}

// A conversation. Of a tool that the model calls, the reader types the result.

import { field, h } from "./dom.js";
import { Talk } from "./talk.js";

export const chat = {
  name: "chat",
  title: "Chat",
  fits: (card) => card.chat,

  make(session) {
    const messages = [];
    const placeholder = "Enter sends, Shift+Enter breaks a line";
    const input = h("textarea", { rows: 2, "aria-label": "Message", placeholder });
    const fresh = h("button", { type: "button", onclick: clear }, "New conversation");
    const talk = new Talk(session.card, input, (event) => !event.shiftKey, say, fresh);

    function say(content) {
      input.value = "";
      messages.push({ role: "user", content });
      talk.log.append(h("article", { class: "asked" }, content));
      answer();
    }

    async function answer() {
      const asked = messages.length;
      const system = talk.parameters.value("system");
      const all = system ? [{ role: "system", content: system }, ...messages] : [...messages];
      const given = await talk.ask("v1/chat/completions", { model: session.model, messages: all }, answer);
      if (!given || messages.length !== asked) return; // it failed, or belongs to the conversation before
      messages.push(given.message);
      if (given.calls.length) talk.log.append(results(given.calls));
    }

    function results(calls) {
      const inputs = calls.map(() => h("input", { required: true, autocomplete: "off" }));
      const fields = calls.map((call, place) => field(`Result of ${call.function.name}`, inputs[place]));
      const form = h("form", { class: "results" }, fields, h("button", {}, "Send results"));
      form.addEventListener("submit", (event) => {
        event.preventDefault();
        if (talk.running) return;
        const told = (input, place) => ({ role: "tool", tool_call_id: calls[place].id, content: input.value });
        messages.push(...inputs.map(told));
        for (const one of form.elements) one.disabled = true;
        answer();
      });
      return form;
    }

    function clear() {
      talk.stop();
      messages.length = 0;
      talk.log.replaceChildren();
      input.focus();
    }

    return talk.element;
  },
};

// A text that the model continues.

import { h } from "./dom.js";
import { Talk } from "./talk.js";

export const complete = {
  name: "complete",
  title: "Complete",
  fits: ({ task }) => task === "generate",

  make(session) {
    const placeholder = "A text to continue; Ctrl+Enter sends it";
    const input = h("textarea", { rows: 5, "aria-label": "Prompt", placeholder });
    const talk = new Talk(session.card, input, (event) => event.ctrlKey || event.metaKey, run);

    function run(prompt) {
      talk.log.replaceChildren();
      talk.ask("v1/completions", { model: session.model, prompt }, () => run(input.value));
    }

    return talk.element;
  },
};

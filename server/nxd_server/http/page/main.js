// Ties the page together: the key, the model, the server's state, and the view that the address's hash names.

import { ask, key } from "./api.js";
import { chat } from "./chat.js";
import { complete } from "./complete.js";
import { h, options } from "./dom.js";
import { classify, embed, rank } from "./encode.js";
import { server } from "./server.js";
import { Watch } from "./watch.js";

const VIEWS = [chat, complete, embed, rank, classify, server];
const [door, field, main, model, notice, state, views] =
  ["door", "key", "main", "model", "notice", "state", "views"].map((id) => document.getElementById(id));
const watch = new Watch();
/** What a view knows: the model's card, and the name to ask for, which may be an adapter's. */
const session = { card: {}, watch, get model() { return model.value; } };
let made = null; // the model whose views are there

function say(text) {
  notice.textContent = text;
  notice.hidden = !text;
}

async function load() {
  try {
    const { data } = await ask("v1/models");
    say("");
    field.removeAttribute("aria-invalid");
    const chosen = data.find(({ id }) => id === model.value) ?? data[0];
    model.replaceChildren(...options(Object.fromEntries(data.map(({ id }) => [id, id]))));
    model.value = chosen.id;
    session.card = data[0];
    build();
  } catch (error) {
    if (error.status === 401) {
      say(key.get() ? "The server refused this API key." : "This server needs an API key.");
      field.setAttribute("aria-invalid", "true");
      field.focus();
    } else if (error.status) say(error.message); // else the state says it
  }
}

/** Makes the model's views. If it is the same one, they stay as they are, with what was typed and answered. */
function build() {
  if (made === session.card.id) return;
  made = session.card.id;
  const fitting = VIEWS.filter((view) => view.fits(session.card));
  views.replaceChildren(...fitting.map(({ name, title }) => h("a", { href: `#${name}` }, title)));
  const sections = fitting.map((view) => h("section", { "aria-label": view.title }, view.make(session)));
  main.replaceChildren(...sections);
  show();
}

function show() {
  const links = [...views.children];
  const chosen = Math.max(0, links.findIndex(({ hash }) => hash === location.hash));
  links.forEach((link, place) => link.setAttribute("aria-current", place === chosen ? "page" : "false"));
  [...main.children].forEach((section, place) => (section.hidden = place !== chosen));
}

watch.addEventListener("state", () => {
  state.dataset.state = watch.state.name;
  state.textContent = watch.state.text;
});
watch.addEventListener("ready", load);
addEventListener("hashchange", show);
door.addEventListener("submit", (event) => event.preventDefault());
door.addEventListener("change", () => {
  key.set(field.value.trim());
  load();
});
field.value = key.get();
build(); // the server's view, which needs no model
watch.run();

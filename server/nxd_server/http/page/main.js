// Ties the page together: the key, the model, the server's state, and the view that the address's hash names.

import { ask, key } from "./api.js";
import { chat } from "./chat.js";
import { complete } from "./complete.js";
import { h, options } from "./dom.js";
import { classify, embed, rank } from "./encode.js";
import { routes } from "./routes.js";
import { server } from "./server.js";
import { Watch } from "./watch.js";

const VIEWS = [chat, complete, embed, rank, classify, server, routes];
const [door, field, main, model, notice, state, views] =
  ["door", "key", "main", "model", "notice", "state", "views"].map((id) => document.getElementById(id));
const watch = new Watch();
/** What a view knows: the model's card, and the name to ask for, which may be an adapter's. */
const session = { card: {}, watch, get model() { return model.value; } };
let cards = {}; // by the names of the models
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
    const before = model.value;
    cards = Object.fromEntries(data.map((card) => [card.id, card]));
    model.replaceChildren(...options(Object.fromEntries(data.map(({ id }) => [id, id]))));
    if (before in cards) model.value = before;
    build();
  } catch (error) {
    if (error.status === 401) {
      say(key.get() ? "The server refused this API key." : "This server needs an API key.");
      field.setAttribute("aria-invalid", "true");
      field.focus();
    } else if (error.status) say(error.message); // else the state says it
  }
}

/** Makes the chosen model's views. Those of the one before, or of its adapter, stay, with all that they hold. */
function build() {
  session.card = cards[model.value] ?? {};
  const base = session.card.parent ?? session.card.id;
  if (made === base) return;
  made = base;
  const fitting = VIEWS.filter((view) => view.fits(session.card));
  views.replaceChildren(...fitting.map(({ name, title }) => h("a", { href: `#${name}` }, title)));
  const sections = fitting.map((view) => h("section", { "aria-label": view.title }, view.make(session)));
  main.replaceChildren(...sections);
  show();
}

function show() {
  const links = [...views.children];
  const wanted = location.hash || (location.pathname.endsWith("/docs") ? "#routes" : "");
  const chosen = Math.max(0, links.findIndex(({ hash }) => hash === wanted));
  links.forEach((link, place) => link.setAttribute("aria-current", place === chosen ? "page" : "false"));
  [...main.children].forEach((section, place) => (section.hidden = place !== chosen));
  main.children[chosen].firstChild.dispatchEvent(new Event("shown"));
}

watch.addEventListener("state", () => {
  state.dataset.state = watch.state.name;
  state.textContent = watch.state.text;
});
watch.addEventListener("ready", load);
addEventListener("hashchange", show);
model.addEventListener("change", build);
door.addEventListener("submit", (event) => event.preventDefault());
door.addEventListener("change", () => {
  key.set(field.value.trim());
  load();
});
field.value = key.get();
build(); // the server's view, which needs no model
watch.run();

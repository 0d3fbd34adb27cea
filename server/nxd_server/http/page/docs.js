// What the document of the routes says, to read.

import { ask, key } from "./api.js";
import { h, table } from "./dom.js";

const [main, form, notice] = ["main", "form", "#notice"].map((one) => document.querySelector(one));

function named({ $ref, items, anyOf, type = "any" }) {
  if ($ref) return $ref.split("/").pop();
  return items ? `[${named(items)}]` : anyOf ? anyOf.map(named).join(" | ") : type;
}
const part = (title, text = "", names, rows) =>
  h("details", {}, h("summary", {}, title), h("p", {}, text), table(title, names, rows));

function route(title, { description, requestBody, responses }) {
  const forms = ([what, { content }]) =>
    Object.entries(content).map(([kind, { schema }]) => [what, kind, named(schema)]);
  const answers = Object.entries(responses).map(([status, one]) => [`${status} ${one.description}`, one]);
  const all = requestBody ? [["Body", requestBody], ...answers] : answers;
  return part(title, description, ["", "Content type", "Form"], all.flatMap(forms));
}

function shape(name, { description, properties = {} }) {
  const rows = Object.entries(properties).map(([field, one]) => [field, named(one), one.description ?? ""]);
  return part(name, description, ["Field", "Form", ""], rows);
}

async function show() {
  try {
    const { paths, components } = await ask("openapi.json");
    const routes = Object.entries(paths).flatMap(([path, methods]) =>
      Object.entries(methods).map(([method, one]) => route(`${method.toUpperCase()} ${path}`, one)));
    const shapes = Object.entries(components.schemas).map((one) => shape(...one));
    main.replaceChildren(...routes, h("h2", {}, "Forms"), ...shapes);
    form.hidden = notice.hidden = true;
  } catch (error) {
    form.hidden = error.status !== 401;
    notice.hidden = false;
    notice.textContent = error.message;
  }
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  key.set(form.querySelector("input").value);
  show();
});
show();

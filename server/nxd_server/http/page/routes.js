// What the document of the server's routes says, to read.

import { ask } from "./api.js";
import { h, table } from "./dom.js";

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

async function parts() {
  const { paths, components } = await ask("openapi.json");
  const methods = ([path, each]) =>
    Object.entries(each).map(([method, one]) => route(`${method.toUpperCase()} ${path}`, one));
  const shapes = Object.entries(components.schemas).map((one) => shape(...one));
  return [...Object.entries(paths).flatMap(methods), h("h2", {}, "Forms"), ...shapes];
}

export const routes = {
  name: "routes",
  title: "Routes",
  fits: () => true,

  make() {
    const list = h("div", { onshown: () => list.querySelector("details") || load() });
    const error = ({ message }) => [h("p", { class: "error", role: "alert" }, message)];
    const load = async () => list.replaceChildren(...(await parts().catch(error)));
    return list;
  },
};

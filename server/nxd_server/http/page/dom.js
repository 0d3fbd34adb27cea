// Elements in one call: h("button", { type: "button", onclick: act }, "Stop").

function filled(node, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (typeof value === "boolean" || name === "value") node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child || child === 0));
  return node;
}

const SVG = "http://www.w3.org/2000/svg";
export const h = (tag, properties = {}, ...children) => filled(document.createElement(tag), properties, children);
export const svg = (tag, properties, ...children) => filled(document.createElementNS(SVG, tag), properties, children);

let fields = 0;

/** An input with its label. */
export function field(label, input) {
  input.id = `field-${++fields}`;
  return h("div", { class: "field" }, h("label", { for: input.id }, label), input);
}
export const options = (values) => Object.entries(values).map(([value, text]) => h("option", { value }, text));

/** A place for tables that may be wider than it: the keys move what it shows. */
export const wide = (name) => h("div", { class: "wide", tabindex: 0, role: "region", "aria-label": name });

/** A table with a heading in front of each row; a cell is a text or an element. */
export function table(caption, names, rows) {
  const head = names.length ? h("thead", {}, h("tr", {}, names.map((name) => h("th", { scope: "col" }, name)))) : "";
  const cell = (one) => (one instanceof HTMLTableCellElement ? one : h("td", {}, one));
  const body = rows.map(([first, ...rest]) => h("tr", {}, h("th", { scope: "row" }, first), rest.map(cell)));
  return h("table", {}, h("caption", {}, caption), head, h("tbody", {}, body));
}

/** A bar of a share of its place, from 0 to 1. */
export function bar(share) {
  const inner = h("span", { class: "bar" });
  inner.style.width = `${100 * Math.max(0, Math.min(1, share))}%`; // the policy allows no style in a text
  return h("span", { class: "track" }, inner);
}

// A plot over the last minutes: axes, a line for each series, and the values under the pointer or the arrow keys.

import { h, svg } from "./dom.js";

const HEIGHT = 150;
const [LEFT, RIGHT, TOP, BOTTOM] = [56, 10, 8, 22];
const GAP = 4; // seconds without a value that break a line

export const FORMATS = {
  number: (value) => `${+value.toFixed(value < 100 ? 1 : 0)}`,
  share: (value) => `${+(100 * value).toFixed(1)} %`,
  time: (value) => (value < 1 ? `${+(1000 * value).toPrecision(3)} ms` : `${+value.toPrecision(3)} s`),
};

/** The end of an axis that has room for `most`, and the step of its ticks. */
function scale(most) {
  const power = 10 ** Math.floor(Math.log10(most || 1));
  const step = [0.2, 0.5, 1, 2, 5].map((part) => part * power).find((size) => most <= 4 * size);
  return [step * Math.max(1, Math.ceil(most / step - 1e-9)), step];
}

const clock = (at) => new Date(1000 * at).toTimeString().slice(0, 8);

export class Plot {
  #points = [];
  #chosen = null; // the place of the point under the pointer
  #x = () => 0; // from a time to its place
  #legend = h("span", { class: "legend" });
  #svg = svg("svg", { role: "img", tabindex: 0, height: HEIGHT });

  /** `name`: of a point's part that holds the series; `format`: of their values. */
  constructor(title, name, format) {
    Object.assign(this, { title, name, format });
    this.element = h("figure", {}, h("figcaption", {}, h("b", {}, title), " ", this.#legend), this.#svg);
    const choose = (place) => {
      this.#chosen = place;
      this.draw(this.#points);
    };
    const under = ({ clientX }) => {
      const distance = ({ at }) => Math.abs(this.#x(at) - clientX + this.#svg.getBoundingClientRect().left);
      const distances = this.#points.map(distance);
      choose(distances.length ? distances.indexOf(Math.min(...distances)) : null);
    };
    for (const kind of ["pointermove", "pointerdown"]) this.#svg.addEventListener(kind, under);
    for (const kind of ["pointerleave", "blur"]) this.#svg.addEventListener(kind, () => choose(null));
    this.#svg.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step) return;
      event.preventDefault();
      const last = this.#points.length - 1;
      choose(Math.max(0, Math.min(last, (this.#chosen ?? last) + step)));
    });
  }

  draw(points) {
    this.#points = points;
    const width = this.#svg.clientWidth;
    if (!width || !points.length) return;
    const now = points.at(-1).at;
    const span = Math.max(60, now - points[0].at); // seconds that it shows
    const x = (this.#x = (at) => LEFT + (width - LEFT - RIGHT) * (1 - (now - at) / span));
    const names = [...new Set(points.flatMap((point) => Object.keys(point[this.name])))];
    const [top, step] = scale(Math.max(0, ...points.flatMap((point) => Object.values(point[this.name]))));
    const y = (value) => HEIGHT - BOTTOM - (value / top) * (HEIGHT - BOTTOM - TOP);
    const text = (x, y, anchor, words) => svg("text", { x, y, "text-anchor": anchor }, words);
    const line = (kind, x1, x2, y1, y2) => svg("line", { class: kind, x1, x2, y1, y2 });
    const drawn = [];
    for (let value = 0; value <= top * 1.001; value += step) {
      drawn.push(line("grid", LEFT, width - RIGHT, y(value), y(value)));
      drawn.push(text(LEFT - 6, y(value) + 4, "end", this.format(value)));
    }
    const tick = [15, 30, 60].find((seconds) => span / seconds <= 5.5);
    for (let at = Math.ceil((now - span) / tick) * tick; at < now - 5; at += tick) {
      drawn.push(text(x(at), HEIGHT - 6, "middle", clock(at)));
    }
    names.forEach((name, place) => {
      let [path, last] = ["", -Infinity];
      for (const point of points) {
        const value = point[this.name][name] ?? null;
        if (value === null) continue;
        path += `${point.at - last > GAP ? "M" : "L"}${x(point.at).toFixed(1)} ${y(value).toFixed(1)}h0`;
        last = point.at;
      }
      drawn.push(svg("path", { class: `line s${place % 4}`, d: path }));
    });
    const point = points[this.#chosen] ?? points.at(-1);
    const when = points[this.#chosen] ? clock(point.at) : "";
    if (when) drawn.push(line("cursor", x(point.at), x(point.at), TOP, HEIGHT - BOTTOM));
    this.#svg.replaceChildren(...drawn);
    const value = (name) => point[this.name][name] ?? null;
    const told = names.map((name) => [name, value(name) === null ? "–" : this.format(value(name))]);
    const key = ([name, value], place) => h("span", { class: `key s${place % 4}` }, `${name} `, h("b", {}, value));
    this.#legend.replaceChildren(...told.map(key), when);
    this.#svg.setAttribute("aria-label", `${this.title} ${when}: ${told.map((pair) => pair.join(" ")).join(", ")}`);
  }
}

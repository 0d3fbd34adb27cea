// The server as its metrics show it: plots, the compiled graphs, the ranks.

import { h, table, wide } from "./dom.js";
import { FORMATS, Plot } from "./plots.js";

const { number, share, time } = FORMATS;
/** Title, part of a point, format, and whether it is of models that generate, or only of others. */
const PLOTS = [
  ["Tokens per second", "tokens", number, true],
  ["Tokens or rows per second", "rows", number, false],
  ["Time to first token", "first", time, true],
  ["Time between tokens", "next", time, true],
  ["Queue", "queue", number],
  ["Batch fill", "fill", share, true],
  ["Padding", "padding", share],
  ["Cache", "cache", share, true],
  ["Step time of each rank", "ranks", time],
];

function buckets(reading) {
  const whole = reading.sum("nxd_bucket_seconds_total");
  const rows = (reading.samples.get("nxd_bucket_executions_total") ?? []).map(({ labels, value: runs }) => {
    const [seconds, useful, padding] = ["seconds", "useful_tokens", "padding_tokens"].map((name) =>
      reading.sum(`nxd_bucket_${name}_total`, labels),
    );
    const told = [time(seconds / runs), share(seconds / whole), share(padding / (useful + padding))];
    return [labels.graph, `${labels.batch} × ${labels.seq}`, runs, ...(runs ? told : ["", "", ""])];
  });
  return table("Buckets", ["Graph", "Batch × length", "Runs", "Mean step", "Of all time", "Padding"], rows);
}

function ranks(reading) {
  const rows = reading.values("nxd_rank_alive", "rank").map((rank) => {
    const of = (name) => reading.sum(name, { rank });
    const age = time(of("nxd_worker_heartbeat_age_seconds"));
    return [rank, of("nxd_rank_alive") ? "alive" : "ended", of("nxd_rank_steps_total"), age];
  });
  return table("Ranks", ["Rank", "State", "Steps", "Last step ago"], rows);
}

export const server = {
  name: "server",
  title: "Server",
  fits: () => true,

  make({ card, watch }) {
    const fits = ([, , , generates]) => generates === undefined || generates === (card.task === "generate");
    const plots = PLOTS.filter(fits).map((one) => new Plot(...one));
    const below = wide("Tables");
    const element = h("div", {}, h("div", { class: "plots" }, plots.map((plot) => plot.element)), below);
    const draw = () => {
      const reading = watch.readings.at(-1);
      if (!reading || !element.clientWidth) return; // another view is shown
      for (const plot of plots) plot.draw(watch.points);
      below.replaceChildren(buckets(reading), ranks(reading));
    };
    watch.addEventListener("reading", draw);
    for (const kind of ["hashchange", "resize"]) addEventListener(kind, () => requestAnimationFrame(draw));
    return element;
  },
};

// Prometheus' text format, and what two readings of it say about the time between them.

const number = (text) => Number(text.replace("Inf", "Infinity"));

export class Reading {
  at = Date.now() / 1000;
  samples = new Map();

  constructor(text) {
    for (const [, name, labels = "", value] of text.matchAll(/^(\w+)(?:\{(.*)\})? (\S+)$/gm)) {
      const found = [...labels.matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)].map(([, label, text]) => [label, text]);
      if (!this.samples.has(name)) this.samples.set(name, []);
      this.samples.get(name).push({ labels: Object.fromEntries(found), value: number(value) });
    }
    this.run = this.sum("nxd_start_time_seconds"); // of the server
  }

  /** The sum of a metric's samples, or of those with these `labels`. */
  sum(name, wanted = {}) {
    const fits = ({ labels }) => Object.entries(wanted).every(([label, value]) => labels[label] === value);
    return (this.samples.get(name) ?? []).filter(fits).reduce((total, { value }) => total + value, 0);
  }

  /** The different values of a label. */
  values(name, label) {
    return [...new Set((this.samples.get(name) ?? []).map(({ labels }) => labels[label]))];
  }
}

/** The value that the share `q` of a histogram is below, by straight lines within its buckets; null of an empty one. */
export function quantile(q, bounds, counts) {
  const wanted = q * counts.at(-1);
  if (!wanted) return null;
  const place = counts.findIndex((count) => count >= wanted);
  const [low, below] = place ? [bounds[place - 1], counts[place - 1]] : [0, 0];
  return bounds[place] === Infinity ? low : low + ((bounds[place] - low) * (wanted - below)) / (counts[place] - below);
}

/** What happened between two readings of one run, by plot and series; null where nothing can be said. */
export function between(before, now) {
  const grown = (name, labels) => Math.max(0, now.sum(name, labels) - before.sum(name, labels));
  const rate = (name) => grown(name) / (now.at - before.at);
  const share = (part, whole) => (whole > 0 ? part / whole : null);
  const times = (name) => {
    const bounds = now.values(name, "le").sort((a, b) => number(a) - number(b));
    const counts = bounds.map((le) => grown(name, { le }));
    return { median: quantile(0.5, bounds.map(number), counts), "95 %": quantile(0.95, bounds.map(number), counts) };
  };
  const useful = (labels) => grown("nxd_bucket_useful_tokens_total", labels);
  const padding = (labels) => grown("nxd_bucket_padding_tokens_total", labels);
  const step = (rank) => share(grown("nxd_rank_seconds_total", { rank }), grown("nxd_rank_steps_total", { rank }));
  const one = { seq: "1" };
  return {
    at: now.at,
    tokens: { generated: rate("nxd_generation_tokens_total"), prompts: rate("nxd_prompt_tokens_total") },
    rows: { "of requests": rate("nxd_bucket_useful_tokens_total") },
    first: times("nxd_time_to_first_token_seconds_bucket"),
    next: times("nxd_inter_token_latency_seconds_bucket"),
    queue: { waiting: now.sum("nxd_num_requests_waiting"), running: now.sum("nxd_num_requests_running") },
    fill: { "rows in use while decoding": share(useful(one), useful(one) + padding(one)) },
    padding: { "of all tokens": share(padding(), useful() + padding()) },
    cache: {
      "prompt tokens found": share(grown("nxd_prefix_cache_hits_total"), grown("nxd_prompt_tokens_total")),
      "in use": share(now.sum("nxd_kv_cache_usage_perc"), now.samples.get("nxd_kv_cache_usage_perc")?.length),
    },
    ranks: Object.fromEntries(now.values("nxd_rank_steps_total", "rank").map((rank) => [`rank ${rank}`, step(rank)])),
  };
}

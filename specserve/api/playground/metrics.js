// The server's metrics as figures over time. Knows Prometheus' text and the names in it, and no page.

export const WINDOW_S = 600;

const PREFIX = "specserve_";
const LINE = /^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)$/;

// What is drawn. `of` gets the growth of counters since the sample before, and gauges as they are; null where there is nothing to go by.
export const FIGURES = [
  { name: "Tokens a second", unit: "tokens/s", of: ({ growth, seconds }) => growth("generation_tokens_total") / seconds },
  { name: "Drafts accepted", unit: "%", most: 100, of: ({ growth }) => share(growth("spec_decode_num_accepted_tokens_total"), growth("spec_decode_num_draft_tokens_total")) },
  { name: "Drafts a round (gamma)", unit: "", of: ({ gauge }) => gauge("gamma") },
  { name: "Requests running", unit: "", counts: true, of: ({ gauge }) => gauge("num_requests_running") },
  { name: "Requests waiting", unit: "", counts: true, of: ({ gauge }) => gauge("num_requests_waiting") },
  { name: "First token after", unit: "ms", of: ({ growth }) => mean(growth("time_to_first_token_seconds_sum"), growth("time_to_first_token_seconds_count"), 1000) },
  { name: "KV cache in use", unit: "%", most: 100, of: ({ gauge }) => scaled(gauge("kv_cache_usage_perc", 'role="target"'), 100) },
  { name: "Workers restarted", unit: "", counts: true, of: ({ total }) => total("worker_restarts_total") },
];

// A sample's values by name, and by name and label. Where models are told apart, those of one.
export function valuesOf(text, model) {
  const one = `model_name="${model}"`;
  const values = new Map();
  for (const line of text.split("\n")) {
    const [, name, labels, number] = LINE.exec(line) ?? [];
    if (!name?.startsWith(PREFIX)) continue;
    if (labels?.includes("model_name=") && !labels.split(",").includes(one)) continue;
    const short = name.slice(PREFIX.length);
    add(values, short, +number);
    for (const one of labels?.split(",") ?? []) add(values, `${short} ${one}`, +number);
  }
  return values;
}

// The samples of the last ten minutes, the oldest first.
export class Samples {
  #kept = [];

  add(seconds, values) {
    this.#kept.push({ seconds, values });
    while (seconds - this.#kept[0].seconds > WINDOW_S) this.#kept.shift();
  }

  get length() {
    return this.#kept.length;
  }

  get span() {
    return this.length ? this.#kept.at(-1).seconds - this.#kept[0].seconds : 0;
  }

  // [seconds before the last sample, value or null] of each sample but the first.
  line({ of }) {
    const last = this.#kept.at(-1)?.seconds;
    return this.#kept.slice(1).map((sample, i) => [last - sample.seconds, finite(of(between(this.#kept[i], sample)))]);
  }
}

function between(before, after) {
  const total = (name, label) => after.values.get(label ? `${name} ${label}` : name) ?? null;
  return {
    seconds: after.seconds - before.seconds,
    gauge: total,
    total,
    growth: (name) => {
      const grown = (after.values.get(name) ?? 0) - (before.values.get(name) ?? 0);
      return grown < 0 ? NaN : grown; // the server was started again
    },
  };
}

function add(values, name, number) {
  values.set(name, (values.get(name) ?? 0) + number);
}

function share(part, whole) {
  return whole ? (100 * part) / whole : null;
}

function mean(sum, count, factor) {
  return count ? (factor * sum) / count : null;
}

function scaled(value, factor) {
  return value === null ? null : value * factor;
}

function finite(value) {
  return Number.isFinite(value) ? value : null;
}

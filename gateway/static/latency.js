// Percentiles out of the histograms in /metrics: of the last minutes, by the difference of two looks, and since the start.

import { duration, element } from "./dom.js";

const SHOWN = [
  ["First token", "noria_gateway_time_to_first_token_seconds", "from the queue to the first token"],
  ["Per token", "noria_gateway_latency_per_token_seconds", "a whole answer's time over its tokens"],
  ["Iteration", "noria_engine_iteration_seconds", "one turn of an engine"],
];
const WINDOW = 5 * 60_000;
const SHARES = [0.5, 0.9, 0.99];

/** The buckets of one histogram, summed over its labels: [[upper bound, count up to it]], ascending. */
export function buckets(text, name) {
  const sums = new Map();
  for (const line of text.split("\n")) {
    if (!line.startsWith(`${name}_bucket{`)) continue;
    const bound = Number(/le="([^"]+)"/.exec(line)[1].replace("+Inf", "Infinity"));
    sums.set(bound, (sums.get(bound) ?? 0) + Number(line.slice(line.lastIndexOf(" ") + 1)));
  }
  return [...sums].sort(([a], [b]) => a - b);
}

/** The value below which `share` of all lie, taken as evenly spread within a bucket; null where there is none. */
export function percentile(found, share) {
  const total = found.at(-1)?.[1] ?? 0;
  if (!total) return null;
  let [below, before] = [0, 0];
  for (const [bound, upTo] of found) {
    if (upTo >= share * total) {
      if (bound === Infinity) return below;
      return below + ((bound - below) * (share * total - before)) / (upTo - before);
    }
    [below, before] = [bound, upTo];
  }
  return below;
}

export class Latency {
  #place;
  #window;
  #looks = []; // {at, histograms: {name: buckets}}

  constructor(place, window) {
    this.#place = place;
    this.#window = window;
  }

  /** Takes what /metrics says now; returns the median time to the first token of late, or null. */
  take(text) {
    const at = performance.now();
    const now = Object.fromEntries(SHOWN.map(([, name]) => [name, buckets(text, name)]));
    this.#looks.push({ at, now });
    while (this.#looks.length > 2 && at - this.#looks[1].at >= WINDOW) this.#looks.shift();
    const minutes = Math.max(1, Math.round((at - this.#looks[0].at) / 60_000));
    const heads = [`Last ${minutes} min`, "Since the start"];
    this.#place.replaceChildren(this.#table(heads, now));
    this.#window.textContent = "of this gateway";
    return percentile(this.#late(SHOWN[0][1], now), 0.5);
  }

  #late(name, now) {
    const before = new Map(this.#looks[0].now[name]);
    return now[name].map(([bound, upTo]) => [bound, Math.max(0, upTo - (before.get(bound) ?? 0))]);
  }

  #table(heads, now) {
    const groups = element(
      "tr",
      {},
      element("td"),
      ...heads.map((head) => element("th", { scope: "colgroup", colspan: SHARES.length, textContent: head })),
    );
    const top = element("tr", {}, element("td"), ...heads.flatMap(() => SHARES.map(column)));
    const rows = SHOWN.map(([label, name, text]) =>
      element(
        "tr",
        {},
        element("th", { scope: "row", title: text, textContent: label }),
        ...[this.#late(name, now), now[name]].flatMap((found) => SHARES.map((share) => cell(percentile(found, share)))),
      ),
    );
    return element("table", { class: "percentiles" }, element("thead", {}, groups, top), element("tbody", {}, ...rows));
  }
}

const column = (share) => element("th", { class: "number", scope: "col", textContent: `p${100 * share}` });

const cell = (seconds) => element("td", { class: "number", textContent: seconds === null ? "–" : duration(seconds) });

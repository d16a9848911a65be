// What projects used, day by day, from the organisation's usage: a bar for each day, a table of the projects.

import { count, element } from "./dom.js";

const DAYS = 14;
const DAY = 86_400;

export class Usage {
  #api;
  #place;

  constructor(api, place) {
    this.#api = api;
    this.#place = place;
  }

  async show() {
    const today = Math.floor(Date.now() / 1000 / DAY) * DAY;
    const asked = `start_time=${today - (DAYS - 1) * DAY}&bucket_width=1d&limit=${DAYS}`;
    const [usage, costs, projects] = await Promise.all([
      this.#api.json(`/v1/organization/usage/completions?${asked}&group_by=project_id`),
      this.#api.json(`/v1/organization/costs?${asked}&group_by=project_id`),
      this.#api.json("/v1/organization/projects?limit=100&include_archived=true"),
    ]);
    const names = new Map(projects.data.map(({ id, name }) => [id, name]));
    this.#place.replaceChildren(days(usage.data), projectTable(usage.data, costs.data, names));
  }
}

const tokens = (result) => result.input_tokens + result.output_tokens;

function days(buckets) {
  const sums = buckets.map(({ start_time, results }) => [start_time, results.reduce((sum, result) => sum + tokens(result), 0)]);
  const most = Math.max(1, ...sums.map(([, sum]) => sum));
  const bars = sums.map(([start, sum]) => {
    const day = new Date(1000 * start).toISOString().slice(5, 10);
    const bar = element("i");
    bar.style.height = `${(100 * sum) / most}%`;
    return element("li", { title: `${day}: ${count(sum)} tokens` }, bar, element("span", { textContent: day }), element("span", { class: "visually-hidden", textContent: `: ${count(sum)} tokens` }));
  });
  return element("ol", { class: "days", "aria-label": "Tokens by day" }, ...bars);
}

function projectTable(usage, costs, names) {
  const sums = new Map();
  const of = (id) => sums.get(id) ?? sums.set(id, { requests: 0, input: 0, cached: 0, output: 0, cost: 0 }).get(id);
  for (const result of usage.flatMap((bucket) => bucket.results)) {
    const sum = of(result.project_id);
    sum.requests += result.num_model_requests;
    sum.input += result.input_tokens;
    sum.cached += result.input_cached_tokens;
    sum.output += result.output_tokens;
  }
  for (const result of costs.flatMap((bucket) => bucket.results)) of(result.project_id).cost += result.amount.value;
  if (!sums.size) return element("p", { class: "empty", textContent: "Nothing was used with a stored key in these days." });
  const heads = ["Project", "Requests", "Input", "of it cached", "Output", "Cost"];
  const number = (text) => element("td", { class: "number", textContent: text });
  const rows = [...sums].sort(([, a], [, b]) => b.input + b.output - a.input - a.output).map(([id, sum]) =>
    element(
      "tr",
      {},
      element("td", { textContent: names.get(id) ?? id }),
      number(count(sum.requests)),
      number(count(sum.input)),
      number(count(sum.cached)),
      number(count(sum.output)),
      number(sum.cost ? `$${sum.cost.toFixed(4)}` : "–"),
    ),
  );
  const head = element("tr", {}, ...heads.map((name, place) => element("th", { scope: "col", class: place ? "number" : "", textContent: name })));
  return element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows));
}

// What waits and who runs it, from /v1/admin/queues: tiles of the whole, a queue for each model, a table of engines.

import { count, duration, element } from "./dom.js";

const CLASSES = ["priority", "default", "flex", "batch"];
const TENANTS = 8;
const SPEED_OVER = 8_000; // milliseconds over which tokens per second are taken

/** Tokens a second of each engine, by the difference of two looks. */
class Speeds {
  #looks = new Map();

  of(engine, total) {
    const now = performance.now();
    const looks = this.#looks.get(engine) ?? [];
    if (looks.length && total < looks.at(-1).total) looks.length = 0; // it has started anew
    looks.push({ now, total });
    while (looks.length > 2 && now - looks[1].now > SPEED_OVER) looks.shift();
    this.#looks.set(engine, looks);
    const time = now - looks[0].now;
    return time > 0 ? (1000 * (total - looks[0].total)) / time : 0;
  }
}

const speeds = new Speeds();

/** Shows the queues in the places given; `firstToken` is the median of late in seconds, or null. */
export function showOverview(queues, firstToken, { tiles, queuesPlace, enginesPlace }) {
  const engines = queues.flatMap((queue) =>
    queue.engines.map((engine) => ({ ...engine, model: queue.id, speed: speeds.of(engine.engine, engine.stats.generation_tokens_total) })),
  );
  const sum = (value) => engines.reduce((total, engine) => total + value(engine), 0);
  const waiting = queues.reduce((total, queue) => total + CLASSES.reduce((of, name) => of + queue.depth[name], 0), 0);
  const blocks = sum(({ stats }) => stats.kv_blocks_total);
  const used = blocks ? (100 * sum(({ stats }) => stats.kv_blocks_used)) / blocks : 0;
  const dead = queues.reduce((total, queue) => total + queue.dead_letters, 0);
  tiles.replaceChildren(
    tile("Running", count(sum(({ stats }) => stats.running))),
    tile("Waiting", count(waiting)),
    tile("Tokens a second", sum(({ speed }) => speed).toFixed(1)),
    tile("KV memory", `${Math.round(used)} %`),
    tile("First token, median", firstToken === null ? "–" : duration(firstToken)),
    tile("Dead letters", count(dead)),
  );
  queuesPlace.replaceChildren(...(queues.length ? queues.map((queue) => shownQueue(queue, queues.length > 1)) : [none("No model is known.")]));
  enginesPlace.replaceChildren(engines.length ? engineTable(engines) : none("No engine is there."));
}

const tile = (name, value) => element("div", {}, element("dt", { textContent: name }), element("dd", { textContent: value }));

const none = (text) => element("p", { class: "empty", textContent: text });

function shownQueue(queue, named) {
  const most = Math.max(1, ...CLASSES.map((name) => queue.depth[name]));
  const classes = CLASSES.flatMap((name) => {
    const bar = element("i");
    bar.style.width = `${(100 * queue.depth[name]) / most}%`;
    return [
      element("span", { textContent: name }),
      element("span", { class: "track", "aria-hidden": "true" }, bar),
      element("span", { class: "number", textContent: count(queue.depth[name]) }),
    ];
  });
  return element(
    "div",
    { class: "queue" },
    named ? element("h3", { textContent: queue.id }) : null,
    element("div", { class: "classes" }, ...classes),
    queue.tenants.length ? tenantTable(queue) : null,
  );
}

function tenantTable(queue) {
  const rows = queue.tenants
    .slice(0, TENANTS)
    .map(({ tenant, requests, tokens }) => row(element("td", { textContent: tenant }), number(count(requests)), number(count(tokens))));
  const more = queue.tenants.length - TENANTS;
  if (more > 0) rows.push(row(element("td", { class: "muted", colspan: 3, textContent: `and ${count(more)} more` })));
  return titled(["Tenant", "Waiting", "Tokens at most"], rows);
}

function engineTable(engines) {
  const rows = engines.map(({ engine, model, lease_seconds, held, stats, speed }) => {
    const share = stats.kv_blocks_total ? stats.kv_blocks_used / stats.kv_blocks_total : 0;
    const state = lease_seconds < 0 ? "lapsed" : stats.draining ? "draining" : "live";
    const kind = { live: "live", lapsed: "bad", draining: "" }[state];
    const meter = element("meter", { min: 0, max: 1, value: share, "aria-label": "KV memory in use" });
    return row(
      element("td", { class: "mono", textContent: engine }),
      element("td", { textContent: model }),
      element("td", {}, element("span", { class: `tag ${kind}`, textContent: state })),
      number(`${lease_seconds.toFixed(1)} s`),
      number(count(held)),
      number(count(stats.batch_size)),
      element("td", {}, meter, ` ${Math.round(100 * share)} %`),
      number(speed.toFixed(1)),
      number(count(stats.iterations_total)),
    );
  });
  return titled(["Engine", "Model", "State", "Lease", "Held", "Batch", "KV memory", "Tokens/s", "Iterations"], rows);
}

const NUMBERS = new Set(["Lease", "Held", "Batch", "Tokens/s", "Iterations", "Waiting", "Tokens at most"]);

function titled(names, rows) {
  const heads = names.map((name) => element("th", { scope: "col", class: NUMBERS.has(name) ? "number" : "", textContent: name }));
  return element("table", {}, element("thead", {}, row(...heads)), element("tbody", {}, ...rows));
}

const row = (...cells) => element("tr", {}, ...cells);
const number = (text) => element("td", { class: "number", textContent: text });

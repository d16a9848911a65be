// The wheels of all engines, live: reads /v1/admin/wheel and shows each engine's batch as a carousel and as a table.

import { Carousel, COLOURS } from "./carousel.js";
import { count, duration, element } from "./dom.js";

const QUIET = 5_000; // milliseconds without a word after which an engine's panel goes
const UNSEEN = 2_500; // and, at least, after which a request that did not step is taken for gone
const TABLE_EVERY = 250;
const STEP = 60; // degrees that the mark turns with an iteration: its buckets are so far apart

/** One colour for each name, the least used one for a new name. */
class Palette {
  #byName = new Map();

  of(name) {
    if (!this.#byName.has(name)) {
      if (this.#byName.size >= 500) this.#byName.delete(this.#byName.keys().next().value);
      const used = new Map(COLOURS.map((colour) => [colour, 0]));
      for (const colour of [...this.#byName.values()].slice(-COLOURS.length + 1)) used.set(colour, used.get(colour) + 1);
      this.#byName.set(name, COLOURS.reduce((best, colour) => (used.get(colour) < used.get(best) ? colour : best)));
    }
    return this.#byName.get(name);
  }
}

const palettes = { tenant: new Palette(), request: new Palette() };

class EngineWheel {
  #news = null;
  #lanes = new Map(); // lane -> what is in it
  #drawn = 0;
  #slowest = 0; // milliseconds of the longest iteration that was heard of last

  #colours = element(
    "select",
    { class: "end", "aria-label": "Colours of the wheel" },
    ...["request", "tenant"].map((name) => element("option", { value: name, textContent: `colour by ${name}` })),
  );

  constructor() {
    const canvas = element("canvas", { role: "img" });
    this.canvas = canvas;
    this.carousel = new Carousel(canvas);
    this.facts = element("p", { class: "facts" });
    this.title = element("h2");
    this.tip = element("div", { class: "tip", hidden: true });
    this.body = element("tbody");
    this.element = element(
      "section",
      { class: "panel wheel" },
      element("header", {}, this.title, this.facts, this.#colours),
      element("div", { class: "turning" }, canvas, this.tip),
      legend(),
      element("div", { class: "batch scroll", tabIndex: 0, role: "group", "aria-label": "Requests in the batch" }, table(this.body)),
    );
    canvas.addEventListener("mousemove", (event) => this.#point(event));
    canvas.addEventListener("mouseleave", () => (this.tip.hidden = true));
  }

  take(news) {
    this.#news = news;
    this.heard = performance.now();
    const columns = news.iterations.map((turn) => this.#column(news, turn));
    this.carousel.add(columns, news.max_batch_size);
    if (news.iterations.length) this.#slowest = Math.max(...news.iterations.map((turn) => turn.forward_us / 1000));
    this.#forget();
    if (this.heard - this.#drawn > TABLE_EVERY || !news.iterations.length) this.#show();
  }

  #column(news, turn) {
    const rows = turn.rows.map(([lane, place, phase, tokens, context, end]) => {
      const request = news.requests[place];
      const by = this.#colours.value;
      const colour = palettes[by].of(by === "tenant" ? request.tenant : request.id);
      const row = { lane, phase, tokens, context, end, request, colour, name: `${request.tenant} ${request.id.slice(0, 6)}` };
      if (end) this.#lanes.delete(lane);
      else if (phase !== "-") this.#lanes.set(lane, { ...row, seen: this.heard });
      return row;
    });
    return { rows, memory: turn.blocks_used / news.num_blocks };
  }

  #forget() {
    const patience = Math.max(UNSEEN, 3 * this.#slowest);
    for (const [lane, { seen }] of this.#lanes) if (this.heard - seen > patience) this.#lanes.delete(lane);
  }

  #show() {
    this.#drawn = this.heard;
    const news = this.#news;
    const last = news.iterations.at(-1);
    this.title.textContent = news.model;
    const facts = [["slots", `${this.#lanes.size} of ${news.max_batch_size}`], ["policy", news.policy]];
    if (last) {
      facts.push(["iteration", duration(last.forward_us / 1e6)]);
      facts.push(["tokens", count(last.rows.reduce((sum, row) => sum + row[3], 0))]);
      facts.push(["KV", `${Math.round((100 * last.blocks_used) / news.num_blocks)} %`]);
      if (last.waiting) facts.push(["waiting here", count(last.waiting)]);
    }
    facts.push(["engine", news.engine]);
    this.facts.replaceChildren(...facts.map(([name, value]) => element("span", {}, `${name} `, element("b", { textContent: value }))));
    this.canvas.ariaLabel = `The batch of ${news.model}: ${this.#lanes.size} of ${news.max_batch_size} slots taken`;
    const rows = [...this.#lanes.values()].sort((a, b) => a.lane - b.lane);
    this.body.replaceChildren(...(rows.length ? rows.map(line) : [nobody()]));
  }

  #point(event) {
    const row = this.carousel.at(event.offsetX, event.offsetY);
    this.tip.hidden = row === null;
    if (row === null) return;
    const { request } = row;
    this.tip.replaceChildren(
      element("b", { textContent: request.id }),
      element("br"),
      `${request.tenant} · ${request.service_class}`,
      element("br"),
      `slot ${row.lane + 1}: ${describe(row)}${row.end ? `, ${row.end}` : ""}`,
    );
    const room = this.canvas.clientWidth - this.tip.offsetWidth;
    this.tip.style.left = `${14 + Math.max(0, Math.min(room, event.offsetX + 14))}px`;
    this.tip.style.top = `${event.offsetY + 26}px`;
  }
}

const describe = (row) =>
  row.phase === "p"
    ? `reads its prompt, ${count(row.context)} of ${count(row.request.prompt_tokens)} tokens`
    : row.phase === "d"
      ? `output token ${count(row.context - row.request.prompt_tokens + 1)} of ${count(row.request.max_tokens)} at most`
      : "padding";

function table(body) {
  const heads = ["Slot", "Request", "Tenant", "Class", "Does"].map((name) => element("th", { scope: "col", textContent: name }));
  return element("table", {}, element("thead", {}, element("tr", {}, ...heads)), body);
}

function line(row) {
  const { request } = row;
  const swatch = element("i", { class: "swatch" });
  swatch.style.background = row.colour;
  const output = Math.max(0, row.context - request.prompt_tokens + 1);
  const share = row.phase === "p" ? row.context / request.prompt_tokens : output / request.max_tokens;
  const meter = element("meter", { min: 0, max: 1, value: Math.min(1, share), "aria-label": "Share done" });
  return element(
    "tr",
    { data: { request: request.id } },
    element("td", {}, swatch, String(row.lane + 1)),
    element("td", { class: "mono", textContent: request.id }),
    element("td", { textContent: request.tenant }),
    element("td", { textContent: request.service_class }),
    element("td", {}, meter, " ", describe(row)),
  );
}

const nobody = () =>
  element("tr", {}, element("td", { colspan: 5, class: "empty", textContent: "The batch is empty." }));

function legend() {
  const item = (name, text) => element("span", {}, element("i", { class: name }), text);
  return element(
    "p",
    { class: "legend" },
    item("prompt", "reads its prompt"),
    item("decode", "a token each iteration"),
    item("leaves", "leaves"),
    element("span", { textContent: "× preempted" }),
  );
}

export class Wheels {
  #api;
  #place;
  #mark;
  #engines = new Map();
  #stop = null;
  #angle = 0;

  /** `mark`: the wheel in the bar, which turns a bucket further with every iteration. */
  constructor(api, place, mark) {
    this.#api = api;
    this.#place = place;
    this.#mark = mark;
    this.#empty();
    setInterval(() => this.#sweep(), 1000);
  }

  /** Watch until `stop`, whatever breaks meanwhile. `told(error)` hears of what does; null: it works. */
  async start(told) {
    const stopping = (this.#stop = new AbortController());
    while (!stopping.signal.aborted) {
      try {
        for await (const data of this.#api.events("/v1/admin/wheel", { signal: stopping.signal })) {
          told(null);
          this.#take(JSON.parse(data));
        }
      } catch (error) {
        if (stopping.signal.aborted) return;
        told(error);
        if (error.status === 401 || error.status === 403) return;
      }
      await new Promise((resolve) => setTimeout(resolve, 1500));
    }
  }

  stop() {
    this.#stop?.abort();
    this.#engines.clear();
    this.#empty();
  }

  #take(news) {
    let wheel = this.#engines.get(news.engine);
    if (!wheel) {
      wheel = new EngineWheel();
      if (!this.#engines.size) this.#place.replaceChildren();
      this.#engines.set(news.engine, wheel);
      this.#place.append(wheel.element);
    }
    wheel.take(news);
    this.#angle += STEP * news.iterations.length;
    this.#mark.style.rotate = `${this.#angle}deg`;
  }

  #sweep() {
    for (const [id, wheel] of this.#engines) {
      if (performance.now() - wheel.heard < QUIET) continue;
      wheel.element.remove();
      this.#engines.delete(id);
    }
    if (!this.#engines.size && !this.#place.querySelector(".empty")) this.#empty();
  }

  #empty() {
    this.#place.replaceChildren(element("p", { class: "panel empty", textContent: "No engine turns at the moment." }));
  }
}

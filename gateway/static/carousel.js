// One engine's carousel on a canvas: a lane per slot of the batch, a column per iteration, the newest at the right.

const COLUMN = 9; // pixels of an iteration
const KEPT = 400; // iterations kept
const MEMORY = 22; // pixels of the strip that shows the KV memory
const GAP = 7;
const SLIDE = 160; // milliseconds in which a new column moves in

/** Told apart by people who do not see red and green alike; neighbours are far from each other. */
export const COLOURS = [
  "#4e8cc4", "#ef8e3b", "#4fa75a", "#b57bb0", "#e0625f", "#3fa7a1",
  "#d0a52c", "#a4785f", "#7b7fd4", "#ea7fa2", "#7ab648", "#5a93a5",
]; // fmt: skip

const still = matchMedia("(prefers-reduced-motion: reduce)");

export class Carousel {
  #canvas;
  #columns = []; // {rows: [{lane, name, colour, phase, end, ...}], memory: share of KV blocks}
  #lanes = 8;
  #moved = 0; // when the newest column came
  #frame = 0;
  #ink = {};

  constructor(canvas) {
    this.#canvas = canvas;
    new ResizeObserver(() => this.#redraw()).observe(canvas);
    document.addEventListener("noria:theme", () => this.#recolour());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#recolour());
    this.#recolour();
  }

  /** `slots`: those of the batch. As many lanes are shown as are used, and some room. */
  add(columns, slots) {
    this.#columns.push(...columns);
    this.#columns.splice(0, this.#columns.length - KEPT);
    const used = 1 + Math.max(-1, ...this.#columns.flatMap((column) => column.rows.map((row) => row.lane)));
    const lanes = Math.min(slots, Math.max(8, Math.ceil((used + 1) / 4) * 4));
    if (lanes !== this.#lanes) {
      this.#lanes = lanes;
      this.#canvas.style.height = `${this.height}px`;
    }
    if (columns.length) this.#moved = performance.now();
    this.#redraw();
  }

  get #lane() {
    return this.#lanes > 32 ? 9 : this.#lanes > 16 ? 13 : 17;
  }

  get height() {
    return this.#lanes * this.#lane + GAP + MEMORY;
  }

  /** The row at a point of the canvas, or null. */
  at(x, y) {
    const column = this.#columns.at(-1 - Math.floor((this.#canvas.clientWidth - x) / COLUMN));
    const lane = Math.floor(y / this.#lane);
    return column?.rows.find((row) => row.lane === lane) ?? null;
  }

  #recolour() {
    const probe = document.createElement("i");
    document.body.append(probe);
    for (const name of ["ink", "sunken", "line", "muted", "panel"]) {
      probe.style.color = `var(--${name})`;
      this.#ink[name] = getComputedStyle(probe).color;
    }
    probe.remove();
    this.#canvas.style.height = `${this.height}px`;
    this.#redraw();
  }

  #redraw() {
    this.#frame ||= requestAnimationFrame(() => this.#draw());
  }

  #draw() {
    this.#frame = 0;
    const scale = devicePixelRatio;
    const width = this.#canvas.clientWidth;
    const height = this.height;
    if (this.#canvas.width !== Math.round(width * scale)) this.#canvas.width = Math.round(width * scale);
    if (this.#canvas.height !== Math.round(height * scale)) this.#canvas.height = Math.round(height * scale);
    const draw = this.#canvas.getContext("2d");
    draw.setTransform(scale, 0, 0, scale, 0, 0);
    draw.clearRect(0, 0, width, height);
    draw.fillStyle = this.#ink.sunken;
    for (let lane = 0; lane < this.#lanes; lane += 1) draw.fillRect(0, lane * this.#lane, width, this.#lane - 2);
    const late = still.matches ? 0 : Math.max(0, 1 - (performance.now() - this.#moved) / SLIDE);
    const right = width + late * late * COLUMN;
    const shown = this.#columns.slice(-Math.ceil(width / COLUMN) - 2);
    const left = (index) => right - (shown.length - index) * COLUMN;
    this.#memory(draw, shown, left, width);
    shown.forEach((column, index) => column.rows.forEach((row) => this.#cell(draw, row, left(index))));
    this.#names(draw, shown, left, width);
    if (late > 0) this.#redraw();
  }

  #cell(draw, row, x) {
    const y = row.lane * this.#lane;
    const tall = this.#lane - 2;
    if (row.phase === "-") {
      draw.fillStyle = this.#ink.line;
      draw.fillRect(x, y + tall / 2 - 1, COLUMN - 1, 2);
      return;
    }
    draw.globalAlpha = row.phase === "p" ? 1 : 0.5;
    draw.fillStyle = row.colour;
    draw.fillRect(x, y, row.phase === "p" ? COLUMN : COLUMN - 1, tall);
    draw.globalAlpha = 1;
    if (!row.end) return;
    draw.fillStyle = draw.strokeStyle = this.#ink.ink;
    if (row.end !== "preempted") return draw.fillRect(x + COLUMN - 2, y, 2, tall);
    draw.lineWidth = 1.5;
    draw.beginPath();
    for (const [from, to] of [[0.25, 0.75], [0.75, 0.25]]) {
      draw.moveTo(x + 1, y + from * tall);
      draw.lineTo(x + COLUMN - 2, y + to * tall);
    }
    draw.stroke();
  }

  /** The request's name on each of its bars that has room for it. */
  #names(draw, shown, left, width) {
    if (this.#lane < 13) return;
    draw.font = `${this.#lane < 17 ? 10 : 11}px system-ui, "DejaVu Sans", sans-serif`;
    draw.textBaseline = "middle";
    draw.fillStyle = this.#ink.ink;
    const bars = new Map(); // lane -> {name, first, last}
    const label = (bar) => {
      const from = Math.max(0, left(bar.first));
      const room = Math.min(width, left(bar.last + 1)) - from - 10;
      if (room > 40) draw.fillText(shorten(draw, bar.name, room), from + 5, (bar.lane + 0.5) * this.#lane - 0.5);
    };
    shown.forEach((column, index) => {
      for (const { lane, name, phase } of column.rows) {
        const bar = bars.get(lane);
        if (bar && bar.name === name && bar.last === index - 1) bar.last = index;
        else if (phase !== "-") {
          if (bar) label(bar);
          bars.set(lane, { lane, name, first: index, last: index });
        }
      }
    });
    bars.forEach(label);
  }

  #memory(draw, shown, left, width) {
    const base = this.height;
    draw.fillStyle = this.#ink.sunken;
    draw.fillRect(0, base - MEMORY, width, MEMORY);
    draw.fillStyle = this.#ink.muted;
    draw.globalAlpha = 0.45;
    shown.forEach(({ memory }, index) => draw.fillRect(left(index), base - memory * MEMORY, COLUMN, memory * MEMORY));
    draw.globalAlpha = 1;
    draw.font = '10.5px system-ui, "DejaVu Sans", sans-serif';
    draw.textBaseline = "middle";
    draw.fillStyle = this.#ink.ink;
    draw.fillText("KV memory", 5, base - MEMORY / 2);
  }
}

function shorten(draw, text, room) {
  if (draw.measureText(text).width <= room) return text;
  let kept = text.length;
  while (kept > 1 && draw.measureText(`${text.slice(0, kept)}…`).width > room) kept -= 1;
  return kept > 1 ? `${text.slice(0, kept)}…` : "";
}

/* The strip of numbers: each with its unit, its meaning in words, and a small graph of the last minute.
   Knows how to show numbers; where they come from is for others. */

const SECONDS = 60; // samples of what is told once a second
const MOST_COARSE = 11; // few samples do not stretch over the whole graph
const EVENTS = 16; // samples of what happens now and then

const CELLS = [
  { id: "fps", label: "Frames", unit: "/s", digits: 1, about: "Pictures shown per second" },
  {
    id: "speed",
    label: "Speed",
    unit: "× real time",
    digits: 2,
    line: 1,
    about: "Seconds of video made per second of work; below 1 the world cannot keep up",
  },
  {
    id: "prompt",
    label: "Prompt to picture",
    unit: "ms",
    digits: 0,
    kept: EVENTS,
    about: "From sending a prompt to seeing the first picture made under it",
  },
  {
    id: "key",
    label: "Key to picture",
    unit: "ms",
    digits: 0,
    kept: EVENTS,
    about: "From pressing a key to seeing the first picture made under it",
  },
  { id: "bitrate", label: "Bitrate", unit: "kbit/s", digits: 0, about: "Video received by this page" },
  { id: "loss", label: "Lost", unit: "%", digits: 1, ceiling: 5, about: "Packets lost on the way to this page" },
  {
    id: "memory",
    label: "Memory",
    unit: "MB",
    digits: 1,
    about: "What the world remembers: its key-value cache, by tier",
  },
  {
    id: "drift",
    label: "Drift",
    unit: "",
    digits: 2,
    ceiling: 1,
    about: "How far the picture's quality has moved from the world's beginning",
  },
];

export class Stats {
  constructor(list) {
    this.cells = new Map(CELLS.map((cell) => [cell.id, new Cell(cell)]));
    list.replaceChildren(...[...this.cells.values()].map((cell) => cell.element));
    new ResizeObserver(() => this.redraw()).observe(list);
    matchMedia("(prefers-color-scheme: light)").addEventListener("change", () => this.redraw());
  }

  set(id, value, detail = "") {
    this.cells.get(id).add(value, detail);
  }

  clear() {
    for (const cell of this.cells.values()) cell.clear();
  }

  redraw() {
    for (const cell of this.cells.values()) cell.draw();
  }
}

class Cell {
  constructor(kind) {
    this.kind = kind;
    this.kept = kind.kept ?? SECONDS;
    this.samples = [];
    this.element = document.createElement("div");
    this.element.id = `stat-${kind.id}`;
    this.element.title = kind.about;
    this.name = child(this.element, "dt", kind.label);
    this.value = child(this.element, "dd", "");
    this.graph = document.createElement("canvas");
    this.graph.setAttribute("aria-hidden", "true");
    this.element.append(this.graph);
    this.clear();
  }

  /** A cell without a value is not shown: nothing on the strip is a placeholder for a number nobody has. */
  clear() {
    this.samples = [];
    this.element.hidden = true;
    delete this.element.dataset.value;
  }

  add(value, detail) {
    if (!Number.isFinite(value)) return;
    this.samples.push(value);
    if (this.samples.length > this.kept) this.samples.shift();
    this.element.hidden = false;
    this.element.dataset.value = String(value);
    this.element.title = detail ? `${this.kind.about}. ${detail}` : this.kind.about;
    const unit = document.createElement("small");
    unit.textContent = this.kind.unit;
    this.value.replaceChildren(value.toFixed(this.kind.digits), " ", unit);
    this.draw();
  }

  draw() {
    const pen = sharpPen(this.graph);
    if (!pen || !this.samples.length) return;
    const { context, width, height } = pen;
    const top = Math.max(this.kind.ceiling ?? 0, this.kind.line ?? 0, ...this.samples) * 1.15 || 1;
    const x = (i) => 2 + (i * (width - 4)) / Math.max(MOST_COARSE, this.samples.length - 1);
    const y = (value) => height - 1.5 - (Math.max(0, value) / top) * (height - 4);
    const colour = getComputedStyle(this.graph);
    if (this.kind.line) rule(context, y(this.kind.line), width, colour.getPropertyValue("--faint"));
    trace(
      context,
      this.samples.map((value, i) => [x(i), y(value)]),
      height,
      colour.color,
    );
  }
}

/** A canvas as sharp as the screen; null while it has no size. */
export function sharpPen(canvas) {
  const { clientWidth: width, clientHeight: height } = canvas;
  if (!width || !height) return null;
  const scale = devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  return { context, width, height };
}

function rule(context, y, width, colour) {
  context.strokeStyle = colour;
  context.lineWidth = 1;
  context.setLineDash([2, 3]);
  context.beginPath();
  context.moveTo(0, y);
  context.lineTo(width, y);
  context.stroke();
  context.setLineDash([]);
}

function trace(context, points, height, colour) {
  context.strokeStyle = context.fillStyle = colour;
  context.lineWidth = 1.5;
  context.lineJoin = "round";
  context.beginPath();
  for (const [x, y] of points) context.lineTo(x, y);
  context.stroke();
  context.lineTo(points.at(-1)[0], height);
  context.lineTo(points[0][0], height);
  context.globalAlpha = 0.1;
  context.fill();
  context.globalAlpha = 1;
  context.beginPath();
  context.arc(...points.at(-1), 2, 0, 2 * Math.PI);
  context.fill();
}

function child(parent, tag, text) {
  const element = document.createElement(tag);
  element.textContent = text;
  parent.append(element);
  return element;
}

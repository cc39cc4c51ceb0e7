/* The waterfall: the last blocks, each a row of the phases it was made of, against the time a block may take.
   Knows `block` events; the names of phases are the engine's own. */

import { sharpPen } from "./stats.js";

const ROWS = 10;
const ROW_PX = 18;
const COLOURS = 8; // --phase-0 … in style.css

export class Waterfall {
  constructor(canvas, legend) {
    this.canvas = canvas;
    this.legend = legend;
    this.blocks = [];
    this.phases = []; // in the order they were first seen: a phase keeps its colour
    new ResizeObserver(() => this.draw()).observe(canvas);
    matchMedia("(prefers-color-scheme: light)").addEventListener("change", () => this.draw());
  }

  /** `fps` gives the time the block's own frames last: the time there is to make the next. */
  add(event, fps) {
    this.blocks.push({
      number: event.block,
      phases: event.phases_ms,
      periodMs: (event.frames / fps) * 1000,
      dueMs: event.due_in_ms,
    });
    if (this.blocks.length > ROWS) this.blocks.shift();
    for (const name of Object.keys(event.phases_ms)) if (!this.phases.includes(name)) this.#meet(name);
    this.draw();
  }

  clear() {
    this.blocks = [];
    this.phases = [];
    this.legend.replaceChildren();
    this.draw();
  }

  draw() {
    this.canvas.style.height = `${Math.max(1, this.blocks.length) * ROW_PX + 18}px`;
    const pen = sharpPen(this.canvas);
    if (!pen || !this.blocks.length) return;
    const style = getComputedStyle(this.canvas);
    const axis = this.#axis(pen.width);
    this.#limit(pen, axis, style);
    this.blocks.forEach((block, row) => this.#row(pen.context, block, 16 + row * ROW_PX, axis, style));
    this.canvas.setAttribute("aria-label", this.#words());
  }

  #meet(name) {
    const item = document.createElement("li");
    item.className = `phase-${this.phases.length % COLOURS}`;
    item.textContent = name.replaceAll("_", " ");
    this.phases.push(name);
    this.legend.append(item);
  }

  #axis(width) {
    const longestMs = Math.max(...this.blocks.map((block) => Math.max(total(block), block.periodMs)));
    const left = 44;
    const right = 92;
    return { left, end: width - right, perMs: (width - left - right) / longestMs };
  }

  #row(context, block, y, axis, style) {
    let x = axis.left;
    for (const [name, ms] of Object.entries(block.phases)) {
      context.fillStyle = style.getPropertyValue(`--phase-${this.phases.indexOf(name) % COLOURS}`);
      const wide = ms * axis.perMs;
      context.fillRect(x, y, Math.max(0.5, wide - 1), ROW_PX - 6);
      x += wide;
    }
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.fillStyle = style.getPropertyValue("--muted");
    context.textAlign = "right";
    context.fillText(String(block.number), axis.left - 8, y + ROW_PX / 2 - 3);
    context.textAlign = "left";
    if (block.dueMs < 0) context.fillStyle = style.getPropertyValue("--bad");
    context.fillText(
      block.dueMs < 0 ? `${Math.round(-block.dueMs)} ms late` : `${Math.round(total(block))} ms`,
      Math.max(x, axis.left) + 6,
      y + ROW_PX / 2 - 3,
    );
  }

  #limit({ context, height }, axis, style) {
    const periodMs = this.blocks.at(-1).periodMs;
    const x = Math.round(axis.left + periodMs * axis.perMs) + 0.5;
    context.strokeStyle = context.fillStyle = style.getPropertyValue("--muted");
    context.setLineDash([2, 3]);
    context.beginPath();
    context.moveTo(x, 14);
    context.lineTo(x, height);
    context.stroke();
    context.setLineDash([]);
    context.font = "11px system-ui, sans-serif";
    context.textAlign = "center";
    context.textBaseline = "top";
    context.fillText(`${Math.round(periodMs)} ms`, x, 0);
  }

  #words() {
    const mean = this.blocks.reduce((sum, block) => sum + total(block), 0) / this.blocks.length;
    const late = this.blocks.filter((block) => block.dueMs < 0).length;
    const parts = Object.entries(this.blocks.at(-1).phases).map(
      ([name, ms]) => `${name.replaceAll("_", " ")} ${Math.round(ms)} ms`,
    );
    const all = `Last ${this.blocks.length} blocks took ${Math.round(mean)} ms on average, ${late} late.`;
    return `${all} Block ${this.blocks.at(-1).number}: ${parts.join(", ")}.`;
  }
}

function total(block) {
  return Object.values(block.phases).reduce((sum, ms) => sum + ms, 0);
}

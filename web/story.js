/* The timeline of prompts: what was said, and the block and time at which it took effect.
   Knows prompts by id; it is told of every one, whoever sent it. A prompt's `scene` is what the model made of it. */

const KEPT = 40;

export class Story {
  constructor(list, onAgain) {
    this.list = list;
    this.onAgain = onAgain;
    this.items = new Map(); // id -> {id, text, scene, mode, state, block, mediaMs, ignored, message}
  }

  /** Begin again from the server's record, keeping what we sent and it does not know yet. */
  load(prompts) {
    const unknown = [...this.items.values()].filter((item) => item.state === "sent");
    const before = new Map(this.items);
    this.items.clear();
    for (const p of prompts.filter((prompt) => prompt.state !== "scheduled")) {
      const atMs = p.media_ms ?? (p.at_s == null ? null : p.at_s * 1000);
      this.#put({
        ...before.get(p.id),
        id: p.id,
        text: p.text,
        mode: p.mode,
        state: p.state,
        block: p.block,
        mediaMs: atMs,
      });
    }
    for (const item of unknown) if (!this.items.has(item.id)) this.#put(item);
    this.#draw();
  }

  clear() {
    this.items.clear();
    this.#draw();
  }

  sent(id, text, mode) {
    this.#put({ id, text, mode, state: "sent" });
    this.#draw();
  }

  acked(id) {
    this.#change(id, { state: "waiting" });
  }

  applied(event) {
    const known = this.items.get(event.id) ?? { id: event.id };
    this.items.delete(event.id); // to the end: the order is the order of taking effect
    const { block, media_ms: mediaMs, ignored = [], text: scene } = event;
    this.#put({
      ...known,
      text: known.text || scene,
      scene,
      mode: event.mode ?? known.mode,
      state: "applied",
      block,
      mediaMs,
      ignored,
    });
    this.#draw();
  }

  refused(id, message) {
    this.#change(id, { state: "refused", message });
  }

  has(id) {
    return this.items.has(id);
  }

  unacked() {
    return [...this.items.values()].filter((item) => item.state === "sent");
  }

  /** The words that make the world now: what the model made of the last prompt, or the prompt itself. */
  inForce() {
    const item = this.current();
    return item?.scene || item?.text || "";
  }

  current() {
    return [...this.items.values()].findLast((item) => item.state === "applied");
  }

  #put(item) {
    this.items.set(item.id, item);
    if (this.items.size > KEPT) this.items.delete(this.items.keys().next().value);
  }

  #change(id, change) {
    const item = this.items.get(id);
    if (!item || item.state === "applied") return;
    Object.assign(item, change);
    this.#draw();
  }

  #draw() {
    const items = [...this.items.values()];
    const waiting = (item) => item.state === "sent" || item.state === "waiting";
    items.sort((a, b) => waiting(a) - waiting(b)); // stable: what has not happened yet comes last
    const current = this.current();
    const focused = this.list.contains(document.activeElement) ? document.activeElement.parentElement.dataset.id : null;
    this.list.replaceChildren(
      ...items.map((item, i) => this.#entry(item, item === current, spanOf(item, items[i + 1]))),
    );
    if (focused) this.list.querySelector(`[data-id="${CSS.escape(focused)}"] button`)?.focus();
    else this.list.scrollLeft = this.list.scrollWidth;
  }

  #entry(item, isCurrent, seconds) {
    const entry = document.createElement("li");
    entry.className = item.state;
    entry.dataset.id = item.id;
    entry.style.flexGrow = String(Math.min(40, Math.max(6, seconds)));
    if (isCurrent) entry.setAttribute("aria-current", "true");
    const again = document.createElement("button");
    again.type = "button";
    again.textContent = item.text;
    again.title = "Say this again";
    again.onclick = () => this.onAgain(item.text);
    entry.append(again, line("when", whenOf(item)));
    if (item.scene && item.scene !== item.text) entry.append(line("scene", item.scene));
    if (item.ignored?.length) entry.append(line("ignored", `not understood: ${item.ignored.join(", ")}`));
    return entry;
  }
}

export function clockTime(ms) {
  const s = Math.floor(ms / 1000);
  const minutes = Math.floor(s / 60) % 60;
  const hours = Math.floor(s / 3600);
  const tail = String(s % 60).padStart(2, "0");
  return hours ? `${hours}:${String(minutes).padStart(2, "0")}:${tail}` : `${minutes}:${tail}`;
}

function whenOf(item) {
  if (item.state === "applied")
    return `${clockTime(item.mediaMs ?? 0)} · block ${item.block ?? 0}${item.mode === "blend" ? " · slowly" : ""}`;
  if (item.state === "refused") return item.message || "refused";
  return item.state === "waiting" ? "from the next block" : "sending";
}

/** Seconds a prompt was in force: the width of its part of the line. */
function spanOf(item, next) {
  return next?.mediaMs != null && item.mediaMs != null ? (next.mediaMs - item.mediaMs) / 1000 : 12;
}

function line(kind, text) {
  const small = document.createElement("small");
  small.className = kind;
  small.textContent = text;
  return small;
}

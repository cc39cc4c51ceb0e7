/* Held keys: what the model calls its keys, which key or finger holds them, and letting go when nobody looks any more.
   Knows the keyboard and the on-screen buttons; sends nothing itself. */

const HELD_AGAIN_MS = 1_000; // a held key is said again, so that a lost message cannot let a world run on alone

/** Physical keys that mean a model's key, whatever the keyboard's language. */
const CODES = {
  left: ["ArrowLeft", "KeyA"],
  right: ["ArrowRight", "KeyD"],
  up: ["ArrowUp", "KeyW"],
  forward: ["ArrowUp", "KeyW"],
  down: ["ArrowDown", "KeyS"],
  back: ["ArrowDown", "KeyS"],
  backward: ["ArrowDown", "KeyS"],
  jump: ["Space"],
  space: ["Space"],
  fast: ["ShiftLeft", "ShiftRight"],
  run: ["ShiftLeft", "ShiftRight"],
  shift: ["ShiftLeft", "ShiftRight"],
  sprint: ["ShiftLeft", "ShiftRight"],
  look_left: ["KeyJ"],
  look_right: ["KeyL"],
  look_up: ["KeyI"],
  look_down: ["KeyK"],
  use: ["KeyE"],
  attack: ["KeyF"],
  zoom_in: ["Equal", "NumpadAdd"],
  zoom_out: ["Minus", "NumpadSubtract"],
};
const SIGNS = { left: "←", right: "→", up: "↑", forward: "↑", down: "↓", back: "↓", backward: "↓" };

export class Keys {
  constructor(container, onHeld) {
    this.container = container;
    this.onHeld = onHeld;
    this.names = new Map(); // event.code -> the model's key
    this.holders = new Map(); // the model's key -> set of what holds it: codes and pointers
    document.addEventListener("keydown", (event) => this.#down(event));
    document.addEventListener("keyup", (event) => this.#up(event.code));
    window.addEventListener("blur", () => this.release());
    document.addEventListener("visibilitychange", () => document.hidden && this.release());
    setInterval(() => this.held().length && this.onHeld(this.held()), HELD_AGAIN_MS);
  }

  /** Offer the keys of a model: physical ones at once, buttons on the page. */
  offer(names) {
    this.release();
    this.names = new Map(names.flatMap((name) => codesOf(name).map((code) => [code, name])));
    this.container.replaceChildren(...names.map((name) => this.#button(name)));
  }

  held() {
    return [...this.holders].filter(([, by]) => by.size).map(([name]) => name);
  }

  release() {
    if (!this.held().length) return;
    this.holders.clear();
    this.#tell();
  }

  #down(event) {
    const name = this.names.get(event.code);
    if (!name || event.ctrlKey || event.metaKey || event.altKey || isFor(event.target, event.code)) return;
    event.preventDefault();
    if (!event.repeat) this.#hold(name, event.code);
  }

  #up(code) {
    const name = this.names.get(code);
    if (name) this.#letGo(name, code);
  }

  #hold(name, by) {
    if (!this.holders.has(name)) this.holders.set(name, new Set());
    this.holders.get(name).add(by);
    this.#tell();
  }

  #letGo(name, by) {
    if (this.holders.get(name)?.delete(by)) this.#tell();
  }

  #tell() {
    const held = this.held();
    for (const button of this.container.children) button.classList.toggle("held", held.includes(button.dataset.key));
    this.onHeld(held);
  }

  #button(name) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "key";
    button.dataset.key = name;
    button.textContent = SIGNS[name] ?? name.replaceAll("_", " ");
    button.setAttribute("aria-label", `Hold: ${name.replaceAll("_", " ")}`);
    button.title = [...new Set(codesOf(name).map(label))].join(" or ");
    button.onpointerdown = (event) => {
      button.setPointerCapture(event.pointerId);
      this.#hold(name, `pointer-${event.pointerId}`);
    };
    button.onpointerup =
      button.onpointercancel =
      button.onlostpointercapture =
        (event) => this.#letGo(name, `pointer-${event.pointerId}`);
    button.oncontextmenu = (event) => event.preventDefault();
    button.onkeydown = (event) => !event.repeat && PRESS.has(event.code) && this.#hold(name, "press");
    button.onkeyup = (event) => PRESS.has(event.code) && this.#letGo(name, "press");
    button.onblur = () => this.#letGo(name, "press");
    return button;
  }
}

const PRESS = new Set(["Enter", "Space", "NumpadEnter"]);

function codesOf(name) {
  const key = name.toLowerCase();
  if (CODES[key]) return CODES[key];
  return /^[a-z]$/.test(key) ? [`Key${key.toUpperCase()}`] : /^[0-9]$/.test(key) ? [`Digit${key}`] : [name];
}

function label(code) {
  return code.replace(/^(Key|Digit|Arrow)/, "").replace(/^Shift.*/, "Shift");
}

/** Does the element the key was pressed in want this key itself? An empty text box has no use for arrows. */
function isFor(target, code) {
  if (!(target instanceof Element)) return false;
  if (target.matches("button, a, summary, [popover]")) return PRESS.has(code);
  if (target.matches("input:not([type=checkbox]), textarea"))
    return !(target.id === "prompt" && target.value === "" && code.startsWith("Arrow"));
  return target.matches("select, input") || target.isContentEditable;
}

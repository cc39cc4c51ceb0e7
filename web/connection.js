/* The session's WebSocket: messages down, events up, and the way back after it was lost.
   Knows sequence numbers and patience; what the messages mean is for others. */

const SILENCE_MS = 12_000; // no message for so long, although we ping: the line is dead
const PING_MS = 4_000;
const PERSONAL = new Set(["ack", "pong", "error"]);
const FINAL = new Map([
  [1000, "over"],
  [4401, "token"],
  [4403, "forbidden"],
  [4404, "gone"],
]);

/** Growing pauses with jitter, so that a thousand pages do not come back in the same instant. */
export class Backoff {
  constructor(firstMs = 500, mostMs = 10_000) {
    this.firstMs = firstMs;
    this.mostMs = mostMs;
    this.tries = 0;
  }

  nextMs() {
    const fullMs = Math.min(this.mostMs, this.firstMs * 2 ** this.tries++);
    return Math.round(fullMs * (0.7 + 0.3 * Math.random()));
  }

  reset() {
    this.tries = 0;
  }
}

/** States: `connecting`, `open`, `waiting` (until `retryAt`), `closed` (for good; `why` says why). */
export class Connection {
  constructor(path, credentials, { onEvent, onState }) {
    this.path = path;
    this.credentials = credentials;
    this.onEvent = onEvent;
    this.onState = onState;
    this.backoff = new Backoff();
    this.lastSeq = null;
    this.state = "connecting";
    this.why = "";
    this.retryAt = 0;
    this.open();
  }

  open() {
    this.#stopTimers();
    this.#become("connecting");
    const socket = new WebSocket(this.#address(), this.credentials.protocols());
    this.socket = socket;
    socket.onmessage = (message) => socket === this.socket && this.#hear(JSON.parse(message.data));
    socket.onclose = (close) => socket === this.socket && this.#lost(close.code);
    this.#watch(socket);
  }

  /** False when there is nobody to hear it; the caller keeps what it wanted to say. */
  send(message) {
    if (this.state !== "open" || this.socket.readyState !== WebSocket.OPEN) return false;
    this.socket.send(JSON.stringify(message));
    return true;
  }

  close() {
    this.#stopTimers();
    const socket = this.socket;
    this.socket = null;
    this.state = "closed";
    socket?.close(1000);
  }

  #address() {
    const url = new URL(this.path, location.href);
    url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
    if (this.lastSeq !== null) url.searchParams.set("after", this.lastSeq);
    return url.href;
  }

  #hear(event) {
    this.heardAt = performance.now();
    this.#count(event);
    if (event.type === "welcome") {
      this.backoff.reset();
      this.#become("open");
    }
    this.onEvent(event);
  }

  /** What only we are sent repeats the latest number, ahead of missed events still on their way: it does not count. */
  #count({ type, seq, gap }) {
    const isOurs = PERSONAL.has(type) || (type === "welcome" && this.lastSeq !== null && !gap);
    if (!isOurs) this.lastSeq = Math.max(this.lastSeq ?? 0, seq ?? 0);
  }

  #lost(code) {
    this.#stopTimers();
    this.why = FINAL.get(code) ?? "";
    if (this.why) return this.#become("closed");
    const pauseMs = this.backoff.nextMs();
    this.retryAt = performance.now() + pauseMs;
    this.retryTimer = setTimeout(() => this.open(), pauseMs);
    this.#become("waiting");
  }

  /** A half-open line says nothing at all: notice the silence ourselves. */
  #watch(socket) {
    this.heardAt = performance.now();
    this.pingTimer = setInterval(() => {
      if (performance.now() - this.heardAt > SILENCE_MS) {
        socket.close();
        if (socket === this.socket) this.#lost(1006);
        return;
      }
      this.send({ type: "ping" });
    }, PING_MS);
  }

  #stopTimers() {
    clearInterval(this.pingTimer);
    clearTimeout(this.retryTimer);
  }

  #become(state) {
    this.state = state;
    this.onState(this);
  }
}

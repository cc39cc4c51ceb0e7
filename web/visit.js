/* The visit: who we are to the server and which world we are in; finding one, starting one, and trying again where
   that can help.
   Knows sessions as records; their sockets and pictures are opened by whoever hears `onEnter`. */

import { Fault, freshId } from "./api.js";
import { Backoff } from "./connection.js";

const CREATE_MS = 30_000; // the server itself waits half of it for its engine
const WENT_MS = 3_000;
const WENT_LOOKS = 6;
export const LIVE = new Set(["queued", "starting", "running", "paused"]);
const FINAL = new Set([
  "token-required",
  "token-unknown",
  "link-expired",
  "role-too-low",
  "not-your-session",
  "origin-not-allowed",
  "host-not-allowed",
  "session-not-found",
  "invalid",
  "model-unknown",
]);

export class Visit {
  constructor(api, { onModels, onLeave, onEnter, onChange }) {
    this.api = api;
    this.onModels = onModels;
    this.onLeave = onLeave;
    this.onEnter = onEnter;
    this.onChange = onChange;
    this.backoff = new Backoff(1000, 15_000);
    this.turn = 0; // a later wish makes an earlier answer void
    this.me = null;
    this.engine = { state: "ready", reason: "" };
    this.session = null;
    this.opening = { step: "server", fault: null, retryAt: 0 };
  }

  openAs(token) {
    this.api.credentials.remember(token);
    return this.open();
  }

  /** From nothing: who we are, what there is, and the world the address names, or ours, or a new one. */
  open() {
    const key = freshId("page");
    this.me = null;
    return this.go(async () => {
      this.me = await this.api.get("/v1/me");
      await this.askEngine();
      this.opening.step = "world";
      this.onChange();
      return this.#choose(key);
    });
  }

  /** What there is to start, and whether the engine is ready for it. */
  async askEngine() {
    const { engine, models } = await this.api.get("/v1/models");
    this.engine = engine;
    this.onModels(models);
  }

  /** Leave where we are and enter the session that `choose` answers. */
  async go(choose) {
    const turn = ++this.turn;
    clearTimeout(this.retryTimer);
    this.#giveUpPlace();
    this.onLeave();
    this.session = null;
    this.choose = choose;
    this.opening = { step: this.me ? "world" : "server", fault: null, retryAt: 0 };
    this.onChange();
    try {
      const session = await choose();
      if (turn === this.turn) this.#enter(session);
    } catch (fault) {
      if (!(fault instanceof Fault)) throw fault;
      if (turn === this.turn) this.#failed(fault, choose);
    }
  }

  again() {
    if (this.opening.fault) this.go(this.choose);
  }

  join(session) {
    if (session.id === this.session?.id) return;
    return this.go(() => this.api.get(session.urls.self));
  }

  start(wish = {}) {
    const key = freshId("page");
    return this.go(() => this.#create(wish, key));
  }

  /** A world that ended may have ended with its server: then it begins again as soon as there is one. */
  async startIfServerWent(wish) {
    const { turn } = this;
    for (let i = 0; i < WENT_LOOKS && turn === this.turn; i++) {
      await new Promise((resolve) => setTimeout(resolve, WENT_MS));
      const fault = await this.api.get("/healthz").then(
        () => null,
        (fault) => fault,
      );
      if (turn === this.turn && fault?.code === "unreachable") return this.isViewer() ? this.open() : this.start(wish);
    }
  }

  /** The same beginning under another seed. Making room first is no loss: the old seed and prompts can make it again. */
  exchange(prompt, isLeft) {
    const { session } = this;
    const key = freshId("page");
    return this.go(async () => {
      if (isLeft && LIVE.has(session.state) && this.owns(session)) await this.api.delete(session.urls.self);
      return this.#create({ model: session.model, prompt }, key);
    });
  }

  owns(session) {
    return this.me?.role === "admin" || (this.me?.role === "player" && session.owner === this.me.name);
  }

  isViewer() {
    return this.me?.role === "viewer";
  }

  /** Who goes elsewhere does not keep others waiting behind them. */
  #giveUpPlace() {
    const left = this.session;
    if (left?.state === "queued" && this.owns(left)) this.api.delete(left.urls.self).catch(() => {});
  }

  #enter(session) {
    this.backoff.reset();
    this.session = session;
    this.opening = { step: "done", fault: null, retryAt: 0 };
    this.onEnter(session);
  }

  /** One wish, one key: an answer that was lost is asked for again, and is the same world. */
  #create(wish, key) {
    return this.api.post("/v1/sessions", { ...wish, queue: true }, { "Idempotency-Key": key }, CREATE_MS);
  }

  async #choose(key) {
    const named = this.me.session ?? location.pathname.match(/^\/s\/([^/]+)/)?.[1];
    if (named) return this.api.get(`/v1/sessions/${encodeURIComponent(named)}`);
    const { sessions } = await this.api.get("/v1/sessions");
    const found = sessions.find((session) => LIVE.has(session.state) && (this.isViewer() || this.owns(session)));
    if (found) return found;
    if (this.isViewer()) throw new Fault("nothing-on", "no world is on, and a viewer cannot start one");
    return this.#create({}, key);
  }

  #failed(fault, choose) {
    this.opening = { ...this.opening, fault };
    if (!FINAL.has(fault.code)) {
      const pauseMs = fault.retryAfterS ? fault.retryAfterS * (1000 + 200 * Math.random()) : this.backoff.nextMs();
      this.opening.retryAt = performance.now() + pauseMs;
      this.retryTimer = setTimeout(() => this.go(choose), pauseMs);
    }
    this.onChange();
  }
}

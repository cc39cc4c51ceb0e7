/* The page: finds a world to show, or starts one, and joins its parts.

   1. open(): who are we, what is there, which world → enter()
   2. enter(): the world's socket (connection.js) and its picture (picture.js), each with its own way back
   3. events come up the socket to `hear`; wishes go down it from controls.js and keys.js
   4. render(): all states together become one line and at most one notice (trouble.js) */

import { Api, Credentials, Fault, freshId } from "./api.js";
import { Backoff, Connection } from "./connection.js";
import { Controls } from "./controls.js";
import { Keys } from "./keys.js";
import { Notice } from "./notice.js";
import { Outputs } from "./outputs.js";
import { Photon } from "./photon.js";
import { Picture } from "./picture.js";
import { Pulse } from "./pulse.js";
import { Share } from "./share.js";
import { Stage } from "./stage.js";
import { Stats } from "./stats.js";
import { Story, clockTime } from "./story.js";
import { diagnose } from "./trouble.js";
import { Waterfall } from "./waterfall.js";
import { LIVE, Worlds } from "./worlds.js";

const FINAL = new Set(["token-required", "token-unknown", "link-expired", "role-too-low", "origin-not-allowed", "session-not-found", "invalid", "model-unknown", "not-your-session", "host-not-allowed"]);
const STUCK_S = 8; // frames are made, none arrive: take a new connection
const LATE_S = 3;

class Page {
  constructor(parts) {
    this.parts = parts;
    this.credentials = new Credentials();
    this.api = new Api(this.credentials);
    this.backoff = new Backoff(1000, 15_000);
    this.turn = 0;
    this.session = null;
    this.socket = null;
    this.canSteer = true;
    this.opening = { step: "server", fault: null, retryAt: 0 };
    this.#makeWatching();
    this.#makeSteering();
    this.#listen();
  }

  #makeWatching() {
    const { parts, api } = this;
    this.photon = new Photon((measured) => this.#measured(measured));
    this.picture = new Picture(parts.video, api, {
      onState: () => this.render(),
      onFrame: (rtp, at) => { this.photon.frame(rtp, at); this.pulse.frameShown(); },
      onOrigin: (origin) => this.photon.setOrigin(origin),
    });
    this.stage = new Stage(parts);
    this.stats = new Stats(parts.stats);
    this.pulse = new Pulse(this.picture, this.stats, parts.metrics);
    this.waterfall = new Waterfall(parts.waterfall, parts.legend);
    this.story = new Story(parts.story, (text) => { parts.prompt.value = text; parts.prompt.focus(); });
  }

  #makeSteering() {
    const { parts, api } = this;
    this.controls = new Controls(parts, {
      onPrompt: (text, mode) => this.say(text, mode), onPause: () => this.togglePause(),
      onReseed: () => this.reseed(), onFullscreen: () => this.stage.toggleFullscreen(),
    });
    this.keys = new Keys(parts.keys, (held) => this.hold(held));
    this.notice = new Notice(parts, {
      onAction: (does) => this.act(does),
      onToken: (token) => { this.credentials.remember(token); this.open(); },
    });
    this.worlds = new Worlds(parts, api, {
      onJoin: (session) => { parts.worlds.hidePopover(); this.go(() => api.get(session.urls.self)); },
      onCreate: (wish) => { parts.worlds.hidePopover(); this.go(() => this.create(wish)); },
      onEnd: (session) => api.delete(session.urls.self).then(() => this.worlds.refresh()).catch((fault) => this.worlds.note(fault.message)),
      mayEnd: (session) => this.#owns(session),
    });
    this.outputs = new Outputs(parts, api);
    this.share = new Share(parts, api);
  }

  #listen() {
    window.addEventListener("pagehide", () => this.picture.leave());
    window.addEventListener("pageshow", (event) => event.persisted && this.open());
    window.addEventListener("online", () => this.act("retry"));
    document.addEventListener("visibilitychange", () => !document.hidden && this.socket?.state === "waiting" && this.act("retry"));
    setInterval(() => this.#tick(), 1000);
  }

  // ------------------------------------------------------------------------------------ finding a world

  open() {
    this.opening.step = "server";
    return this.go(async () => {
      this.me = await this.api.get("/v1/me");
      const { models } = await this.api.get("/v1/models");
      this.worlds.offer(models);
      this.opening.step = "world";
      this.render();
      return this.#choose();
    });
  }

  /** Leave where we are and enter the session that `choose` answers; when it fails, try again where that can help. */
  async go(choose) {
    const turn = ++this.turn;
    clearTimeout(this.retryTimer);
    this.leave();
    this.choose = choose;
    this.opening = { step: this.me ? "world" : "server", fault: null, retryAt: 0 };
    this.render();
    try {
      const session = await choose();
      if (turn === this.turn) this.enter(session);
    } catch (fault) {
      if (!(fault instanceof Fault)) throw fault;
      if (turn === this.turn) this.#failed(fault, choose);
    }
  }

  create(wish = {}) {
    return this.api.post("/v1/sessions", { ...wish, queue: true }, { "Idempotency-Key": freshId("page") });
  }

  leave() {
    this.keys.release();
    this.socket?.close();
    this.socket = null;
    this.session = null;
    this.picture.stop();
    for (const part of [this.story, this.stats, this.waterfall, this.pulse]) part.clear();
    this.photon.forget();
  }

  enter(session) {
    this.backoff.reset();
    this.opening = { step: "done", fault: null, retryAt: 0 };
    this.canSteer = this.me.role !== "viewer";
    const search = this.credentials.access ? `?access=${encodeURIComponent(this.credentials.access)}` : "";
    history.replaceState(null, "", session.urls.page + search);
    this.#load(session);
    this.controls.suggest(session.suggestions ?? []);
    this.keys.offer(session.action_keys ?? []);
    this.stage.setSize(session.width, session.height);
    this.socket = new Connection(session.urls.ws, this.credentials, { onEvent: (event) => this.hear(event), onState: () => this.render() });
    this.#show();
  }

  async #choose() {
    const named = this.me.session ?? location.pathname.match(/^\/s\/([^/]+)/)?.[1];
    if (named) return this.api.get(`/v1/sessions/${encodeURIComponent(named)}`);
    const { sessions } = await this.api.get("/v1/sessions");
    const isMine = (session) => this.me.role === "viewer" || this.#owns(session);
    const found = sessions.find((session) => LIVE.has(session.state) && isMine(session));
    if (found) return found;
    if (this.me.role === "viewer") throw new Fault("nothing-on", "no world is on, and a viewer cannot start one");
    return this.create();
  }

  #owns(session) {
    return this.me?.role === "admin" || (this.me?.role === "player" && session.owner === this.me.name);
  }

  #failed(fault, choose) {
    this.opening = { ...this.opening, fault, retryAt: 0 };
    if (!FINAL.has(fault.code)) {
      const pauseMs = Math.max(this.backoff.nextMs(), fault.retryAfterS * 1000);
      this.opening.retryAt = performance.now() + pauseMs;
      this.retryTimer = setTimeout(() => this.go(choose), pauseMs);
    }
    this.render();
  }

  #load(session) {
    this.session = session;
    this.worlds.here = session.id;
    this.outputs.load(session);
    this.share.session = session;
    this.story.load(session.prompts ?? []);
    if (session.stats) this.pulse.told(session.stats);
  }

  /** The picture, as soon as there is something to see. */
  #show() {
    const isLive = ["starting", "running", "paused"].includes(this.session.state);
    if (isLive && this.picture.state === "idle") this.picture.start(this.session.urls.whep, this.me.ice_servers ?? []);
    if (!isLive && this.session.state !== "queued") this.picture.stop();
    this.render();
  }

  // ---------------------------------------------------------------------------------------- what is heard

  hear(event) {
    const act = {
      "welcome": () => this.#welcomed(event),
      "ack": () => this.story.acked(event.id),
      "state": () => this.#changed(event),
      "block": () => this.waterfall.add(event, this.session.fps),
      "stats": () => this.pulse.told(event),
      "viewers": () => { this.session.viewers = event.viewers; this.render(); },
      "output": () => this.#outputChanged(event.output),
      "signal.applied": () => this.#applied(event),
      "signal.shown": () => this.photon.shown(event.id, event.pts),
      "error": () => this.#refused(event),
    }[event.type];
    act?.(); // an event of a later version is no reason to stop
  }

  #welcomed({ session, can_steer: canSteer }) {
    this.canSteer = canSteer;
    this.#load(session);
    for (const item of this.story.unacked()) this.socket.send({ type: "prompt", id: item.id, text: item.text, mode: item.mode });
    if (canSteer && this.keys.held().length) this.hold(this.keys.held());
    this.#show();
  }

  #changed({ state, reason, queue_position: place }) {
    const { session } = this;
    if (state === "starting" && ["running", "paused"].includes(session.state)) session.restarts = (session.restarts ?? 0) + 1;
    Object.assign(session, { state, reason, queue_position: place });
    if (state === "running") this.pulse.movedAt = performance.now();
    this.#show();
  }

  #applied(event) {
    if (event.signal !== "prompt") return;
    this.story.applied(event);
    this.controls.note(event.ignored?.length ? `Not understood: ${event.ignored.join(", ")}` : "");
    this.announce(`In force from block ${event.block}: ${event.text}`);
    this.render();
  }

  #refused({ id, message }) {
    if (id && this.story.has(id)) this.story.refused(id, message);
    this.controls.note(message, true);
    this.announce(message);
  }

  #outputChanged(output) {
    this.outputs.changed(output);
    if (output.kind === "rtmp") this.announce(`Broadcast to ${output.target}: ${output.state} ${output.reason}`);
  }

  #measured({ kind, ms }) {
    this.stats.set(kind, ms);
    document.dispatchEvent(new CustomEvent("inferix:photon", { detail: { kind, ms } }));
  }

  // --------------------------------------------------------------------------------------- what is wished

  say(text, mode) {
    const id = freshId("p");
    const at = performance.now();
    if (!this.#send({ type: "prompt", id, text, mode, ...this.#seen() })) return false;
    this.photon.sent(id, "prompt", at);
    this.story.sent(id, text, mode);
    this.controls.note("");
    return true;
  }

  hold(held) {
    if (!this.socket || !this.canSteer) return;
    const wasHeld = this.heldBefore ?? "";
    this.heldBefore = held.join();
    if (this.heldBefore === wasHeld) return this.socket.send({ type: "action", keys: held });
    const id = freshId("a");
    if (this.socket.send({ type: "action", id, keys: held, ...this.#seen() }) && held.length) this.photon.sent(id, "key", performance.now());
  }

  togglePause() {
    if (this.session) this.#send({ type: this.session.state === "paused" ? "resume" : "pause", id: freshId("x") });
  }

  /** Alone in a world that goes nowhere else, it makes room for the next: its seed and prompts can make it again. */
  reseed() {
    const { session } = this;
    if (!session) return;
    const wish = { model: session.model, prompt: this.story.current()?.text || session.prompt };
    const isLeft = this.#owns(session) && session.viewers <= 1 && !this.outputs.isUsed();
    this.go(async () => {
      if (isLeft && LIVE.has(session.state)) await this.api.delete(session.urls.self);
      return this.create(wish);
    });
  }

  act(does) {
    if (does === "worlds") return this.parts.worlds.showPopover();
    if (does === "create") return this.go(() => this.create());
    if (this.opening.fault) return this.go(this.choose);
    if (this.socket?.state === "waiting") this.socket.open();
    if (this.picture.state === "waiting") this.picture.connect();
  }

  #send(message) {
    if (!this.canSteer) return false;
    if (this.socket?.send(message)) return true;
    this.controls.note("Not sent: steering is cut off. Try again in a moment.", true);
    return false;
  }

  #seen() {
    const mediaMs = this.photon.mediaMs();
    return mediaMs === null ? {} : { seen_ms: Math.round(mediaMs) };
  }

  // ------------------------------------------------------------------------------------------ what is seen

  announce(text) {
    this.parts.live.textContent = text;
  }

  render() {
    const { parts, session } = this;
    const seen = diagnose(this.#situation());
    if (seen.notice?.actions && this.me?.role === "viewer") seen.notice.actions = seen.notice.actions.filter(({ does }) => does !== "create");
    if (document.body.dataset.phase !== seen.phase) this.announce(seen.notice ? `${seen.notice.title}. ${seen.notice.text}` : seen.status);
    document.body.dataset.phase = seen.phase;
    document.body.dataset.role = this.canSteer ? "player" : "spectator";
    parts["status-text"].textContent = seen.status;
    parts.watching.hidden = !session?.viewers;
    parts.watching.textContent = session?.viewers ? `${session.viewers} watching` : "";
    parts["paused-flag"].hidden = seen.phase !== "paused";
    this.notice.show(seen.notice);
    this.controls.showPaused(session?.state === "paused");
    const prompt = this.story.current()?.text || session?.prompt;
    document.title = prompt ? `${prompt} · Inferix` : "Inferix";
    parts.video.setAttribute("aria-label", prompt ? `Live picture: ${prompt}` : "Live picture of the world");
  }

  #situation() {
    const { opening, session, socket, picture } = this;
    return { opening, session, socket, picture, now: performance.now(), host: location.hostname, isMoving: this.pulse.silence().pictureS < LATE_S };
  }

  async #tick() {
    await this.pulse.beat();
    const { pictureS, engineS } = this.pulse.silence();
    const isStuck = this.session?.state === "running" && this.picture.state === "playing" && pictureS > STUCK_S && engineS < LATE_S;
    if (isStuck) this.picture.retry(new Fault("picture-lost", `no frame for ${STUCK_S} s`));
    const mediaMs = this.photon.mediaMs() ?? this.session?.stats?.media_ms;
    this.parts.clock.textContent = mediaMs == null || !this.session ? "" : clockTime(mediaMs);
    this.render();
  }
}

const parts = Object.fromEntries([...document.querySelectorAll("[id]")].map((element) => [element.id, element]));
new Page({ ...parts, top: document.querySelector(".top") }).open();

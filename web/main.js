/* The page: joins its parts.

   1. visit.js finds a world, or starts one → enter()
   2. enter(): the world's socket (connection.js) and its picture (picture.js), each with its own way back
   3. events come up the socket to hear(); wishes go down it through steering.js
   4. render(): all states together become one line and at most one notice (trouble.js) */

import { Api, Credentials, Fault } from "./api.js";
import { Connection } from "./connection.js";
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
import { Steering } from "./steering.js";
import { Story, clockTime } from "./story.js";
import { diagnose } from "./trouble.js";
import { View } from "./view.js";
import { LIVE, Visit } from "./visit.js";
import { Waterfall } from "./waterfall.js";
import { Worlds } from "./worlds.js";

const STUCK_S = 6; // frames are made, none arrive: take a new connection
const LATE_S = 3;

class Page {
  constructor(parts) {
    this.parts = parts;
    this.api = new Api(new Credentials());
    this.socket = null;
    this.canSteer = true;
    this.visit = new Visit(this.api, {
      onModels: (models) => this.worlds.offer(models),
      onLeave: () => this.#leave(),
      onEnter: (session) => this.#enter(session),
      onChange: () => this.render(),
    });
    this.#makeWatching();
    this.#makeSteering();
    this.#listen();
  }

  #makeWatching() {
    const { parts, api } = this;
    this.photon = new Photon((measured) => this.#measured(measured));
    this.picture = new Picture(parts.video, api, {
      onState: () => this.render(),
      onFrame: (rtp, at) => {
        this.photon.frame(rtp, at);
        this.pulse.frameShown();
      },
      onOrigin: (origin) => this.photon.setOrigin(origin),
    });
    this.stage = new Stage(parts);
    this.stats = new Stats(parts.stats);
    this.pulse = new Pulse(this.picture, this.stats, parts.metrics);
    this.waterfall = new Waterfall(parts.waterfall, parts.legend);
    this.story = new Story(parts.story, (text) => {
      parts.prompt.value = text;
      parts.prompt.focus();
    });
  }

  #makeSteering() {
    const { parts, api, visit } = this;
    const unsent = () => this.controls.note("Not sent: steering is cut off. Try again in a moment.", true);
    this.steering = new Steering(() => (this.canSteer ? this.socket : null), this.photon, unsent);
    this.controls = new Controls(parts, {
      onPrompt: (text, mode) => this.say(text, mode),
      onPause: () => this.steering.pause(visit.session?.state === "paused"),
      onReseed: () => this.reseed(),
      onFullscreen: () => this.stage.toggleFullscreen(),
    });
    this.keys = new Keys(parts.keys, (held) => this.steering.hold(held));
    const notice = new Notice(parts, {
      onAction: (does) => this.act(does),
      onToken: (token) => visit.openAs(token),
    });
    this.view = new View(parts, notice);
    this.worlds = new Worlds(parts, api, {
      onJoin: (session) => visit.join(session),
      onCreate: (wish) => visit.start(wish),
      mayEnd: (session) => visit.owns(session),
    });
    this.outputs = new Outputs(parts, api);
    this.share = new Share(parts, api);
  }

  #listen() {
    window.addEventListener("pagehide", () => this.picture.leave());
    window.addEventListener("pageshow", (event) => event.persisted && this.visit.open());
    window.addEventListener("online", () => this.act("retry"));
    document.addEventListener("visibilitychange", () => !document.hidden && this.act("retry"));
    setInterval(() => this.#tick(), 1000);
  }

  // ------------------------------------------------------------------------------- in and out of a world

  #leave() {
    this.keys.release();
    this.socket?.close();
    this.socket = null;
    this.picture.stop();
    for (const part of [this.story, this.stats, this.waterfall, this.pulse]) part.clear();
    this.photon.forget();
  }

  #enter(session) {
    this.canSteer = !this.visit.isViewer();
    const { access } = this.api.credentials;
    const search = access ? `?access=${encodeURIComponent(access)}` : "";
    history.replaceState(null, "", session.urls.page + search);
    this.#load(session);
    this.controls.suggest(session.suggestions ?? []);
    this.keys.offer(session.action_keys ?? []);
    this.stage.setSize(session.width, session.height);
    this.socket = new Connection(session.urls.ws, this.api.credentials, {
      onEvent: (event) => this.hear(event),
      onState: (socket) => this.#reached(socket),
    });
    this.#show();
  }

  #load(session) {
    this.visit.session = session;
    this.worlds.here = session.id;
    this.outputs.load(session);
    this.share.session = session;
    this.story.load(session.prompts ?? []);
    if (session.stats) this.pulse.told(session.stats);
  }

  /** The picture, as soon as there is something to see. */
  #show() {
    const { session } = this.visit;
    const hasPicture = ["starting", "running", "paused"].includes(session.state);
    if (hasPicture && this.picture.state === "idle")
      this.picture.start(session.urls.whep, this.visit.me.ice_servers ?? []);
    if (!LIVE.has(session.state)) this.picture.stop();
    this.render();
  }

  /** A session that vanished while we were in it went with its server: begin it again where we may. */
  #reached(socket) {
    const { session } = this.visit;
    const same = session && { model: session.model, prompt: this.#prompt(), seed: session.seed };
    if (socket.why === "gone" && LIVE.has(session?.state) && this.visit.owns(session)) return this.visit.start(same);
    if (socket.why === "over") this.visit.startIfServerWent(same);
    this.render();
  }

  // ---------------------------------------------------------------------------------------- what is heard

  hear(event) {
    const { session } = this.visit;
    const act = {
      welcome: () => this.#welcomed(event),
      ack: () => this.story.acked(event.id),
      state: () => this.#changed(event),
      block: () => this.waterfall.add(event, session.fps),
      stats: () => this.pulse.told(event),
      viewers: () => {
        session.viewers = event.viewers;
        this.render();
      },
      output: () => this.#outputChanged(event.output),
      "signal.applied": () => this.#applied(event),
      "signal.shown": () => this.photon.shown(event.id, event.pts),
      error: () => this.#refused(event),
    }[event.type];
    act?.(); // an event of a later version is no reason to stop
  }

  #welcomed({ session, can_steer: canSteer }) {
    this.canSteer = canSteer;
    this.#load(session);
    for (const item of this.story.unacked()) this.steering.sayAgain(item);
    if (this.keys.held().length) this.steering.hold(this.keys.held());
    this.#show();
  }

  #changed({ state, reason, queue_position: place }) {
    const { session } = this.visit;
    if (state === "starting" && ["running", "paused"].includes(session.state))
      session.restarts = (session.restarts ?? 0) + 1;
    Object.assign(session, { state, reason, queue_position: place });
    if (state === "running") this.pulse.expectFrames();
    this.#show();
  }

  #applied(event) {
    if (event.signal !== "prompt") return;
    this.story.applied(event);
    this.controls.note(event.ignored?.length ? `Not understood: ${event.ignored.join(", ")}` : "");
    this.view.announce(`In force from block ${event.block}: ${this.story.current().text}`);
    this.render();
  }

  #refused({ id, message }) {
    if (id && this.story.has(id)) this.story.refused(id, message);
    this.controls.note(message, true);
    this.view.announce(message);
  }

  #outputChanged(output) {
    this.outputs.changed(output);
    if (output.kind === "rtmp") this.view.announce(`Broadcast to ${output.target}: ${output.state} ${output.reason}`);
  }

  #measured({ kind, ms }) {
    this.stats.set(kind, ms);
    document.dispatchEvent(new CustomEvent("inferix:photon", { detail: { kind, ms } }));
  }

  // --------------------------------------------------------------------------------------- what is wished

  say(text, mode) {
    const id = this.steering.say(text, mode);
    if (!id) return false;
    this.story.sent(id, text, mode);
    this.controls.note("");
    return true;
  }

  /** A world that only we see goes; one that others see, or that goes elsewhere too, stays. */
  reseed() {
    const { session } = this.visit;
    if (session) this.visit.exchange(this.#prompt(), session.viewers <= 1 && !this.outputs.isUsed());
  }

  act(does) {
    if (does === "worlds") return this.parts.worlds.showPopover();
    if (does === "create") return this.visit.start();
    this.visit.again();
    if (this.socket?.state === "waiting") this.socket.open();
    if (this.picture.state === "waiting") this.picture.connect();
  }

  // ------------------------------------------------------------------------------------------ what is seen

  render() {
    const { session } = this.visit;
    const hasPicture = this.picture.state === "playing";
    const seen = diagnose(this.#situation());
    this.view.show(seen, { session, hasPicture, canSteer: this.canSteer, prompt: this.#prompt() });
    this.controls.showPaused(session?.state === "paused");
  }

  #prompt() {
    return this.story.inForce() || this.visit.session?.prompt;
  }

  #situation() {
    const { visit, socket, picture, pulse } = this;
    const { opening, session, engine } = visit;
    const states = { opening, session, engine, socket, picture };
    const flow = { isMoving: pulse.silence().pictureS < LATE_S, isSlow: pulse.isSlow() };
    return { ...states, ...flow, now: performance.now(), host: location.hostname, mayCreate: !visit.isViewer() };
  }

  async #tick() {
    const { session } = this.visit;
    if (session?.state === "queued") await this.visit.askEngine().catch(() => {}); // asked again in a second
    await this.pulse.beat();
    const { pictureS, engineS } = this.pulse.silence();
    const isStuck =
      session?.state === "running" && this.picture.state === "playing" && pictureS > STUCK_S && engineS < LATE_S;
    if (isStuck) this.picture.retry(new Fault("picture-lost", `no frame for ${STUCK_S} s`));
    const pts = this.photon.pts();
    const shownMs = pts === null ? session?.media_ms : pts / 90;
    this.parts.clock.textContent = shownMs == null ? "" : clockTime(shownMs);
    this.render();
  }
}

const parts = Object.fromEntries([...document.querySelectorAll("[id]")].map((element) => [element.id, element]));
new Page({ ...parts, top: document.querySelector(".top") }).visit.open();

/* The live picture: one WHEP connection, its `<video>`, and the way back after it was lost.
   Knows WebRTC; does not know why a session has no picture, nor what to tell the viewer about it. */

import { Fault } from "./api.js";
import { Backoff } from "./connection.js";

const CONNECT_MS = 12_000;
const DISCONNECTED_MS = 3_000;
const ORIGIN_TRIES = 20;

/** States: `idle`, `connecting`, `playing`, `waiting` (until `retryAt`, because of `fault`), `refused` (for good). */
export class Picture {
  constructor(video, api, { onState, onFrame, onOrigin }) {
    this.video = video;
    this.api = api;
    this.onState = onState;
    this.onFrame = onFrame;
    this.onOrigin = onOrigin;
    this.backoff = new Backoff(700, 12_000);
    this.state = "idle";
    this.fault = null;
    this.retryAt = 0;
    this.failures = 0;
    this.#countFrames();
  }

  start(path, iceServers) {
    this.stop();
    this.path = path;
    this.iceServers = iceServers;
    this.failures = 0;
    this.backoff.reset();
    this.connect();
  }

  stop() {
    this.#drop();
    this.fault = null;
    this.#become("idle");
  }

  async connect() {
    this.#drop();
    this.#become("connecting");
    const peer = new RTCPeerConnection({ iceServers: this.iceServers });
    this.peer = peer;
    this.deadline = setTimeout(() => this.#late(peer), CONNECT_MS);
    peer.addTransceiver("video", { direction: "recvonly" });
    peer.ontrack = ({ streams, track }) => {
      this.video.srcObject = streams[0] ?? new MediaStream([track]);
    };
    peer.onconnectionstatechange = () => this.#changed(peer);
    try {
      await peer.setLocalDescription();
      await this.#post(peer);
    } catch (error) {
      this.#lost(peer, error instanceof Fault ? error : new Fault("bad-answer", error.message));
    }
  }

  /** Tell the server at once that we are gone, instead of letting it find out. */
  leave() {
    if (this.location) this.api.deleteOnLeaving(this.location);
    this.location = "";
    this.peer?.close();
  }

  async stats() {
    if (!this.peer) return null;
    for (const report of (await this.peer.getStats()).values()) {
      if (report.type === "inbound-rtp" && report.kind === "video") return report;
    }
    return null;
  }

  async #post(peer) {
    const response = await this.api.send("POST", this.path, peer.localDescription.sdp, {
      "Content-Type": "application/sdp",
    });
    const location = new URL(response.headers.get("Location") ?? "", response.url).pathname;
    if (peer !== this.peer) return this.api.deleteOnLeaving(location);
    this.location = location;
    await peer.setRemoteDescription({ type: "answer", sdp: await response.text() });
  }

  #changed(peer) {
    if (peer !== this.peer) return;
    clearTimeout(this.doubt);
    if (peer.connectionState === "connected") this.#tieClocks(peer);
    if (peer.connectionState === "failed") this.#lost(peer, new Fault("no-media", "the media connection failed"));
    if (peer.connectionState === "closed")
      this.#lost(peer, new Fault("picture-lost", "the media connection was closed"));
    if (peer.connectionState !== "disconnected") return;
    this.doubt = setTimeout(
      () => this.#lost(peer, new Fault("picture-lost", "the media connection was interrupted")),
      DISCONNECTED_MS,
    );
  }

  /** A page in the background is shown no frames; a connection that stands is then good enough. */
  #late(peer) {
    if (document.hidden && peer.connectionState === "connected") return this.#begin();
    this.#lost(peer, new Fault("no-media", `no picture within ${CONNECT_MS / 1000} s`));
  }

  #lost(peer, fault) {
    if (peer !== this.peer) return;
    this.retry(fault);
  }

  /** Give this connection up and make another after a pause; some refusals are final. */
  retry(fault) {
    this.#drop();
    this.fault = fault;
    this.failures += 1;
    if ([401, 403, 404, 406, 409].includes(fault.status)) return this.#become("refused");
    const pauseMs = Math.max(this.backoff.nextMs(), fault.retryAfterS * 1000);
    this.retryAt = performance.now() + pauseMs;
    this.retryTimer = setTimeout(() => this.connect(), pauseMs);
    this.#become("waiting");
  }

  #drop() {
    for (const timer of [this.deadline, this.doubt, this.retryTimer]) clearTimeout(timer);
    this.leave();
    this.peer = null;
  }

  /** The server knows at which RTP timestamp our copy of the stream began. */
  async #tieClocks(peer) {
    const path = this.location;
    for (let i = 0; i < ORIGIN_TRIES && peer === this.peer; i++) {
      const answer = await this.api.get(path.replace("/whep/", "/peers/")).catch(() => null);
      if (answer?.rtp_origin != null && peer === this.peer) return this.onOrigin(answer.rtp_origin);
      await new Promise((resolve) => setTimeout(resolve, 300));
    }
  }

  #countFrames() {
    const begin = () => this.state === "connecting" && this.peer?.connectionState === "connected" && this.#begin();
    if (!this.video.requestVideoFrameCallback) return this.video.addEventListener("timeupdate", begin);
    const shown = (now, frame) => {
      this.video.requestVideoFrameCallback(shown);
      begin();
      if (frame.rtpTimestamp !== undefined) this.onFrame(frame.rtpTimestamp, frame.expectedDisplayTime ?? now, frame);
    };
    this.video.requestVideoFrameCallback(shown);
  }

  #begin() {
    clearTimeout(this.deadline);
    this.backoff.reset();
    this.failures = 0;
    this.fault = null;
    this.#become("playing");
  }

  #become(state) {
    this.state = state;
    this.onState(this);
  }
}

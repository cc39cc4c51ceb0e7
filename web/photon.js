/* Prompt to photon: the time from pressing Enter to the first picture made under the prompt being on the screen.
   Three facts meet here: when a message was sent (our clock), which frame was the first made under it (the server's
   `pts`), and when the screen showed each frame (its RTP timestamp). Knows no socket and no video element. */

const KEPT_FRAMES = 512; // half a minute at 16 fps: an event may come later than the frame it speaks of
const KEPT_MESSAGES = 64;

export class Photon {
  constructor(onMeasured) {
    this.onMeasured = onMeasured;
    this.origin = null; // RTP timestamp of pts 0 on our connection
    this.frames = []; // {rtp, at}, oldest first
    this.sentAt = new Map(); // id -> {kind, at}
    this.awaited = new Map(); // id -> pts
  }

  /** A new connection counts from a new origin; what was in flight cannot be matched any more. */
  forget() {
    this.origin = null;
    this.frames = [];
    this.awaited.clear();
    this.sentAt.clear();
  }

  sent(id, kind, at) {
    this.sentAt.set(id, { kind, at });
    if (this.sentAt.size > KEPT_MESSAGES) this.sentAt.delete(this.sentAt.keys().next().value);
  }

  shown(id, pts) {
    if (!this.sentAt.has(id)) return;
    this.awaited.set(id, pts);
    this.#match();
  }

  setOrigin(origin) {
    this.origin = origin;
    this.#match();
  }

  frame(rtp, at) {
    this.frames.push({ rtp, at });
    if (this.frames.length > KEPT_FRAMES) this.frames.shift();
    if (this.awaited.size) this.#match();
  }

  /** `pts` (90 kHz, stalls and pauses counted) of the frame on the screen, or null before the clocks are tied. */
  pts() {
    if (this.origin === null || !this.frames.length) return null;
    return (this.frames.at(-1).rtp - this.origin) >>> 0;
  }

  #match() {
    if (this.origin === null) return;
    for (const [id, pts] of this.awaited) {
      const frame = this.frames.find(({ rtp }) => notBefore(rtp, this.origin + pts));
      if (!frame) continue;
      const { kind, at } = this.sentAt.get(id);
      this.awaited.delete(id);
      this.sentAt.delete(id);
      if (frame.at >= at) this.onMeasured({ id, kind, ms: frame.at - at });
    }
  }
}

/** RTP timestamps wrap at 2**32: the sign of the 32-bit difference says which is later. */
function notBefore(rtp, wanted) {
  return ((rtp - wanted) | 0) >= 0;
}

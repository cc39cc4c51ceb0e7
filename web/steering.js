/* Steering: what the viewer wishes becomes one message on the socket, stamped with the picture they were looking at.
   Knows message types and ids; what becomes of them is heard by others. */

import { freshId } from "./api.js";

export class Steering {
  /** `reach` answers the socket, or null where there is none or this viewer may not steer. */
  constructor(reach, photon, onUnsent) {
    this.reach = reach;
    this.photon = photon;
    this.onUnsent = onUnsent;
    this.held = "";
  }

  /** The id under which it was sent, or "" when it was not. */
  say(text, mode) {
    const id = freshId("p");
    const at = performance.now();
    if (!this.#send({ type: "prompt", id, text, mode, ...this.#seen() })) return "";
    this.photon.sent(id, "prompt", at);
    return id;
  }

  /** After a loss: the same message under the same id, so that it cannot act twice. */
  sayAgain({ id, text, mode }) {
    this.reach()?.send({ type: "prompt", id, text, mode });
  }

  /** Newest wins: a key message that does not get through is not worth a word. */
  hold(keys) {
    const isSame = this.held === keys.join();
    this.held = keys.join();
    if (isSame) return this.reach()?.send({ type: "action", keys });
    const id = freshId("a");
    const at = performance.now();
    if (this.reach()?.send({ type: "action", id, keys, ...this.#seen() }) && keys.length)
      this.photon.sent(id, "key", at);
  }

  pause(isPaused) {
    this.#send({ type: isPaused ? "resume" : "pause", id: freshId("x") });
  }

  #send(message) {
    const isSent = Boolean(this.reach()?.send(message));
    if (!isSent) this.onUnsent();
    return isSent;
  }

  #seen() {
    const pts = this.photon.pts();
    return pts === null ? {} : { seen_pts: pts };
  }
}

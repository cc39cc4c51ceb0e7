/* What the page says about itself: the status line, who watches, the notice, the title, and words for a screen reader.
   Shows what it is given; decides nothing. */

import { LIVE } from "./visit.js";

export class View {
  constructor(parts, notice) {
    this.parts = parts;
    this.notice = notice;
  }

  announce(text) {
    this.parts.live.textContent = text;
  }

  /** `seen` is what trouble.js made of the situation. */
  show(seen, { session, hasPicture, canSteer, prompt }) {
    const { body } = document;
    if (body.dataset.phase !== seen.phase) this.announce(wordsOf(seen));
    body.dataset.phase = seen.phase;
    body.dataset.role = canSteer ? "player" : "spectator";
    const isOver = !session || !LIVE.has(session.state);
    for (const part of document.querySelectorAll("[data-world]")) part.inert = isOver;
    this.parts["status-text"].textContent = seen.status;
    this.parts["paused-flag"].hidden = seen.phase !== "paused";
    this.notice.show(seen.notice);
    this.#viewers(hasPicture ? session?.viewers : 0);
    this.#name(prompt);
  }

  #viewers(count) {
    this.parts.watching.hidden = !count;
    this.parts.watching.textContent = count ? `${count} watching` : "";
  }

  #name(prompt) {
    document.title = prompt ? `${prompt} · Inferix` : "Inferix";
    this.parts.video.setAttribute("aria-label", prompt ? `Live picture: ${prompt}` : "Live picture of the world");
  }
}

function wordsOf({ notice, status }) {
  return notice ? `${notice.title}. ${notice.text}` : status;
}

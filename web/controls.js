/* The prompt box, its suggestions, and the buttons under the picture.
   Knows what the viewer asked for; whether it comes about is told by others. */

const SUGGESTIONS_SHOWN = 6;

export class Controls {
  constructor(page, { onPrompt, onPause, onReseed, onFullscreen }) {
    this.page = page;
    this.onPrompt = onPrompt;
    page.say.onsubmit = (event) => {
      event.preventDefault();
      this.#submit();
    };
    page.prompt.addEventListener("keydown", (event) => event.key === "Escape" && page.stage.focus());
    page.pause.onclick = onPause;
    page.reseed.onclick = onReseed;
    page.fullscreen.onclick = onFullscreen;
    this.#shortcuts({ "/": () => page.prompt.focus(), p: onPause, f: onFullscreen });
  }

  /** Suggestions come from the model; the first of them also shows what a prompt looks like. */
  suggest(texts) {
    const shown = texts.slice(0, SUGGESTIONS_SHOWN);
    if (shown.length) this.page.prompt.placeholder = `e.g. ${shown[1] ?? shown[0]}`;
    this.page.suggestions.replaceChildren(...shown.map((text) => this.#suggestion(text)));
  }

  /** What became of the last prompt, under the box. */
  note(text, isBad = false) {
    this.page["prompt-note"].textContent = text;
    this.page["prompt-note"].classList.toggle("bad", isBad);
  }

  showPaused(isPaused) {
    const { pause } = this.page;
    pause.setAttribute("aria-label", isPaused ? "Resume" : "Pause");
    pause.title = isPaused ? "Resume (p)" : "Pause (p)";
    pause.classList.toggle("on", isPaused);
    this.page["pause-icon"].setAttribute("href", isPaused ? "#i-play" : "#i-pause");
  }

  #submit() {
    const { prompt, mode } = this.page;
    const text = prompt.value.trim();
    if (!text) return prompt.focus();
    if (this.onPrompt(text, mode.value)) prompt.value = "";
  }

  #suggestion(text) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "chip";
    button.textContent = text;
    button.onclick = () => this.onPrompt(text, this.page.mode.value);
    return button;
  }

  /** Single keys act only while nothing on the page wants them itself. */
  #shortcuts(actions) {
    document.addEventListener("keydown", (event) => {
      const isFree = event.target === document.body || event.target === this.page.stage;
      if (!isFree || event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented || !actions[event.key])
        return;
      event.preventDefault();
      actions[event.key]();
    });
  }
}

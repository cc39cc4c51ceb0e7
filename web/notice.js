/* The notice over the picture: title, text, steps, a token field, and what can be done.
   Knows how it looks, not why it is there. */

export class Notice {
  constructor(page, { onAction, onToken }) {
    this.page = page;
    this.onAction = onAction;
    this.shown = "";
    page["notice-token"].onsubmit = (event) => {
      event.preventDefault();
      onToken(page.token.value.trim());
      page.token.value = "";
    };
  }

  /** Only what changed is touched: a button keeps its focus while seconds count down beside it. */
  show(notice) {
    const { page } = this;
    page.notice.hidden = !notice;
    if (!notice) {
      this.shown = "";
      return;
    }
    page["notice-text"].textContent = notice.text;
    const shape = JSON.stringify([notice.title, notice.steps, notice.wantsToken, notice.actions]);
    if (shape === this.shown) return;
    this.shown = shape;
    page["notice-title"].textContent = notice.title;
    this.#steps(notice.steps ?? []);
    this.#token(Boolean(notice.wantsToken));
    page["notice-actions"].replaceChildren(...(notice.actions ?? []).map((action, i) => this.#button(action, i === 0)));
  }

  #steps(steps) {
    const list = this.page["notice-steps"];
    list.hidden = !steps.length;
    list.replaceChildren(
      ...steps.map(({ text, state }) => {
        const item = document.createElement("li");
        item.className = state;
        item.textContent = text;
        if (state === "doing") item.setAttribute("aria-current", "step");
        return item;
      }),
    );
  }

  #token(isWanted) {
    const form = this.page["notice-token"];
    if (form.hidden === !isWanted) return;
    form.hidden = !isWanted;
    if (isWanted) this.page.token.focus();
  }

  #button({ label, does }, isFirst) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = isFirst ? "primary" : "";
    button.textContent = label;
    button.onclick = () => this.onAction(does);
    return button;
  }
}

/* The list of worlds on this server, and the form that starts another. Knows how they are shown and asked for. */

import { LIVE } from "./visit.js";

const REFRESH_MS = 3_000;
const STATES = { queued: "waiting", starting: "starting", running: "", paused: "paused" };

export class Worlds {
  constructor(page, api, { onJoin, onCreate, mayEnd }) {
    this.page = page;
    this.api = api;
    this.onJoin = onJoin;
    this.mayEnd = mayEnd;
    this.here = "";
    page.worlds.addEventListener("toggle", (event) => this.#toggled(event.newState === "open"));
    page["new-world"].onsubmit = (event) => {
      event.preventDefault();
      page.worlds.hidePopover();
      onCreate(this.#wish());
    };
  }

  /** What can be started: models, and the words to begin with. */
  offer(models) {
    const { page } = this;
    page["new-model"].replaceChildren(...models.map(({ name }) => new Option(name, name)));
    page["new-prompt"].value ||= models[0]?.suggestions?.[0] ?? "";
  }

  async refresh() {
    const { sessions } = await this.api.get("/v1/sessions");
    this.draw(sessions);
  }

  draw(sessions) {
    const live = sessions.filter((session) => LIVE.has(session.state));
    const list = this.page["world-list"];
    const focused = document.activeElement?.closest?.("#world-list") ? document.activeElement.dataset.does : null;
    list.replaceChildren(...live.map((session) => this.#entry(session)));
    if (!live.length)
      list.replaceChildren(
        Object.assign(document.createElement("li"), { className: "none", textContent: "None is on right now." }),
      );
    if (focused) list.querySelector(`[data-does="${CSS.escape(focused)}"]`)?.focus();
  }

  note(text) {
    this.page["new-note"].textContent = text;
  }

  #toggled(isOpen) {
    clearInterval(this.timer);
    if (!isOpen) return;
    const refresh = () => this.refresh().catch((fault) => this.note(fault.message));
    this.note("");
    refresh();
    this.timer = setInterval(refresh, REFRESH_MS);
  }

  #wish() {
    const { page } = this;
    const wish = { prompt: page["new-prompt"].value.trim(), model: page["new-model"].value };
    if (page["new-seed"].value !== "") wish.seed = Number(page["new-seed"].value);
    if (page["new-record"].checked) wish.record = true;
    return wish;
  }

  #entry(session) {
    const entry = document.createElement("li");
    const join = document.createElement("button");
    join.type = "button";
    join.dataset.does = `join-${session.id}`;
    join.append(text("span", session.prompt || session.model), text("small", about(session)));
    join.onclick = () => {
      this.page.worlds.hidePopover();
      this.onJoin(session);
    };
    if (session.id === this.here) {
      join.setAttribute("aria-current", "true");
      entry.className = "here";
    }
    entry.append(join);
    if (this.mayEnd(session)) entry.append(this.#end(session));
    return entry;
  }

  #end(session) {
    const end = document.createElement("button");
    end.type = "button";
    end.className = "quiet";
    end.dataset.does = `end-${session.id}`;
    end.textContent = "End";
    end.setAttribute("aria-label", `End the world “${session.prompt}”`);
    end.onclick = () => this.#endNow(session);
    return end;
  }

  async #endNow(session) {
    try {
      await this.api.delete(session.urls.self);
      await this.refresh();
    } catch (fault) {
      this.note(fault.message);
    }
  }
}

function about(session) {
  const watching = session.viewers === 1 ? "1 watching" : `${session.viewers} watching`;
  return [session.model, watching, `seed ${session.seed}`, STATES[session.state]].filter(Boolean).join(" · ");
}

function text(tag, content) {
  return Object.assign(document.createElement(tag), { textContent: content });
}

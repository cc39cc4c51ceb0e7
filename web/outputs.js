/* Where else a world goes: RTMP pushes with their live state, and the recording.
   Stream keys go to the server once and are kept nowhere here. */

const WORDS = {
  connecting: "connecting",
  live: "live",
  retrying: "trying again",
  failed: "failed",
  stopped: "stopped",
};

export class Outputs {
  constructor(page, api) {
    this.page = page;
    this.api = api;
    this.session = null;
    this.outputs = new Map();
    page.push.onsubmit = (event) => {
      event.preventDefault();
      this.#push();
    };
    page["record-toggle"].onclick = () => this.#record();
    page.recording.onclick = (event) => this.#download(event);
  }

  load(session) {
    this.session = session;
    this.recording = session.recording;
    this.outputs = new Map(session.outputs.filter(({ kind }) => kind === "rtmp").map((output) => [output.id, output]));
    this.#draw();
  }

  changed(output) {
    if (output.kind === "rtmp") this.outputs.set(output.id, output);
    else this.recording = output;
    this.#draw();
  }

  isUsed() {
    return [...this.outputs.values(), this.recording].some(
      (output) => output && ["live", "connecting", "retrying"].includes(output.state),
    );
  }

  async #push() {
    const { page } = this;
    const wish = {
      kind: "rtmp",
      url: page["push-url"].value.trim(),
      audio: page["push-audio"].checked ? "silent" : "none",
    };
    if (page["push-key"].value) wish.key = page["push-key"].value;
    await this.#ask("push-note", () =>
      this.#ours(this.api.post(`${this.session.urls.self}/outputs`, wish), (output) => this.changed(output)),
    );
    page["push-key"].value = "";
  }

  async #record() {
    const path = `${this.session.urls.self}/outputs`;
    await this.#ask("recording-note", () => {
      const asked = isOn(this.recording)
        ? this.api.delete(`${path}/${this.recording.id}`)
        : this.api.post(path, { kind: "recording" });
      return this.#ours(asked, (recording) => this.changed({ ...recording, kind: "recording" }));
    });
  }

  /** A plain link cannot carry a token: with one, the bytes are fetched and handed over as a file. */
  async #download(event) {
    if (!this.api.credentials.token || this.api.credentials.access) return;
    event.preventDefault();
    await this.#ask("recording-note", async () => {
      const link = await this.api.post(`${this.session.urls.self}/links`, { role: "viewer", ttl_s: 300 });
      location.assign(`${this.session.urls.recording}?access=${encodeURIComponent(link.access)}`);
    });
  }

  /** What is answered about the world we were in is no news about the one we are in now. */
  async #ours(asked, act) {
    const { id } = this.session;
    const answer = await asked;
    if (this.session.id === id) act(answer);
  }

  async #ask(noteId, act) {
    const note = this.page[noteId];
    note.textContent = "";
    note.classList.remove("bad");
    try {
      await act();
    } catch (fault) {
      note.textContent = fault.message;
      note.classList.add("bad");
    }
  }

  #draw() {
    const shown = [...this.outputs.values()].filter(({ state }) => state !== "stopped");
    this.page["output-list"].replaceChildren(...shown.map((output) => this.#entry(output)));
    const { recording } = this;
    const toggle = this.page["record-toggle"];
    toggle.hidden = false;
    toggle.textContent = isOn(recording) ? "Stop recording" : "Record";
    this.page.recording.hidden = !recording;
    const { access } = this.api.credentials;
    this.page.recording.href = this.session.urls.recording + (access ? `?access=${encodeURIComponent(access)}` : "");
    this.page["recording-note"].textContent = recording ? recordingWords(recording) : "Nothing is being recorded.";
    this.page["recording-note"].classList.toggle("bad", recording?.state === "failed");
    document.body.dataset.onAir = shown.some(({ state }) => state === "live") ? "true" : "false";
  }

  #entry(output) {
    const entry = document.createElement("li");
    entry.className = output.state;
    const what = Object.assign(document.createElement("div"), { className: "target" });
    what.append(
      text("span", output.target),
      text("small", [WORDS[output.state] ?? output.state, output.reason].filter(Boolean).join(": ")),
    );
    const stop = text("button", output.state === "failed" ? "Remove" : "Stop");
    stop.type = "button";
    stop.className = "quiet";
    stop.setAttribute("aria-label", `${stop.textContent} ${output.target}`);
    stop.onclick = () =>
      this.#ask("push-note", () =>
        this.#ours(this.api.delete(`${this.session.urls.self}/outputs/${output.id}`), () => {
          this.outputs.delete(output.id);
          this.#draw();
        }),
      );
    entry.append(what, stop);
    return entry;
  }
}

function isOn(recording) {
  return Boolean(recording) && !["stopped", "failed"].includes(recording.state);
}

function recordingWords({ state, reason, seconds, bytes }) {
  const size = bytes >= 1e6 ? `${(bytes / 1e6).toFixed(1)} MB` : `${Math.round((bytes ?? 0) / 1000)} kB`;
  const length = seconds ? `${Math.round(seconds)} s, ${size}` : "";
  const words = { connecting: "Starting.", live: "Recording", stopped: "Finished", failed: "Stopped" }[state] ?? state;
  return [words, length, reason].filter(Boolean).join(" · ");
}

function text(tag, content) {
  return Object.assign(document.createElement(tag), { textContent: content });
}

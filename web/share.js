/* Links to this world: one to watch, one to steer. The server signs them; who may not ask for that passes on
   the address they have. */

const LINK_SECONDS = 24 * 3600;

export class Share {
  constructor(page, api) {
    this.page = page;
    this.api = api;
    this.session = null;
    page.share.addEventListener("toggle", (event) => event.newState === "open" && this.#fill());
    for (const button of page.share.querySelectorAll("[data-copy]"))
      button.onclick = () => this.#copy(page[button.dataset.copy]);
  }

  async #fill() {
    const { page, session } = this;
    const here = new URL(session?.urls.page ?? "/", location.href);
    page["watch-link"].value = page["play-link"].value = "";
    page["share-note"].textContent = "";
    if (!session) return;
    try {
      if (document.body.dataset.role === "spectator") throw new Error("only its owner makes links");
      const links = [await this.#link(session, "viewer"), await this.#link(session, "player")];
      if (this.#here(session)) [page["watch-link"].value, page["play-link"].value] = links;
    } catch {
      if (!this.#here(session)) return;
      const { access } = this.api.credentials; // a spectator passes on what they have
      if (access) here.searchParams.set("access", access);
      page["watch-link"].value = here.href;
    }
  }

  /* Whether the page still shows the world that was asked about. */
  #here(session) {
    return this.session?.id === session.id;
  }

  async #link(session, role) {
    const { url } = await this.api.post(`${session.urls.self}/links`, { role, ttl_s: LINK_SECONDS });
    return new URL(url, location.href).href;
  }

  async #copy(field) {
    field.select();
    try {
      await navigator.clipboard.writeText(field.value);
    } catch {
      document.execCommand("copy"); // no clipboard on plain-HTTP addresses
    }
    this.page["share-note"].textContent = "Copied. It works for a day.";
  }
}

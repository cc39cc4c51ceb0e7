/* The picture's place on the page: as large as the window allows in whole pixels, with its own light around it.
   Knows sizes and the `<video>` element; not where the picture comes from. */

const GLOW_MS = 500;
const LEAST_PX = 16;
const SIZE_KEPT = 0.84; // give up to a sixth of the size for whole pixels
const SHORT_PX = 760; // in a window less high than this, what follows the prompt box may lie below the edge
const CRISP_UP_TO = 640; // wider pictures look better smoothed

export class Stage {
  constructor(page) {
    this.page = page;
    this.width = 256;
    this.height = 144;
    this.pen = page.glow.getContext("2d");
    page.video.addEventListener("resize", () => this.setSize(page.video.videoWidth, page.video.videoHeight));
    window.addEventListener("resize", () => this.fit());
    document.addEventListener("fullscreenchange", () => this.fit());
    new ResizeObserver(() => this.fit()).observe(page.say);
    if (!matchMedia("(prefers-reduced-motion: reduce)").matches) setInterval(() => this.#shine(), GLOW_MS);
    this.fit();
  }

  /** Browsers show a few black pixels while there is nothing to decode: they are no picture. */
  setSize(width, height) {
    if (width < LEAST_PX || height < LEAST_PX) return;
    this.width = width;
    this.height = height;
    this.fit();
  }

  /** Whole device pixels per picture pixel where that costs little size: sharp edges stay sharp. */
  fit() {
    const { page, width, height } = this;
    const room = this.#room();
    let scale = Math.min(room.width / width, room.height / height);
    const device = scale * devicePixelRatio;
    const isWhole = width <= CRISP_UP_TO && Math.floor(device) / device > SIZE_KEPT;
    if (isWhole && !room.isNarrow) scale = Math.floor(device) / devicePixelRatio;
    page.frame.style.width = `${width * scale}px`;
    page.frame.style.height = `${height * scale}px`;
    document.documentElement.style.setProperty("--picture", `${Math.round(width * scale)}px`);
    page.video.classList.toggle("crisp", width <= CRISP_UP_TO && (isWhole || device >= 3));
  }

  async toggleFullscreen() {
    if (document.fullscreenElement) return document.exitFullscreen();
    await this.page.stage.requestFullscreen?.().catch(() => {}); // refused by the browser: the picture stays as it is
    this.page.stage.focus();
  }

  #room() {
    if (document.fullscreenElement) return { width: innerWidth, height: innerHeight, isNarrow: false };
    const { stage, bar, say, suggestions, top } = this.page;
    const style = getComputedStyle(stage);
    const sides = parseFloat(style.paddingLeft) + parseFloat(style.paddingRight);
    const box = innerHeight < SHORT_PX ? say.offsetHeight - suggestions.offsetHeight : say.offsetHeight + 26;
    const below = bar.offsetHeight + Math.max(60, box) + top.offsetHeight + 40;
    const isNarrow = innerWidth < 700;
    return {
      width: stage.clientWidth - sides,
      height: Math.max(200, isNarrow ? innerHeight * 0.6 : innerHeight - below),
      isNarrow,
    };
  }

  /** A few pixels of the picture, stretched: the room takes the colour of the world. */
  #shine() {
    const { video, glow } = this.page;
    if (document.hidden || video.readyState < 2) return;
    this.pen.globalAlpha = 0.4; // mixed with what was there: light changes slowly
    this.pen.drawImage(video, 0, 0, glow.width, glow.height);
  }
}

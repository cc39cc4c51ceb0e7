/* Once a second: what the browser knows of the picture's flow, in numbers for the strip, and whether it flows at all.
   Knows WebRTC's statistics and the server's `stats` events; decides nothing. */

const SLOW = 0.97;
const SLOW_FOR = 4; // `stats` events in a row

export class Pulse {
  constructor(picture, stats, metrics) {
    this.picture = picture;
    this.stats = stats;
    this.metrics = metrics;
    this.clear();
  }

  clear() {
    this.shown = 0;
    this.before = null;
    this.movedAt = performance.now(); // the last time a frame came
    this.madeAt = 0; // the last time the engine said that its clock moved
    this.mediaMs = -1;
    this.speeds = [];
  }

  /** Below the speed of the clock for some seconds on end. */
  isSlow() {
    return this.speeds.length === SLOW_FOR && this.speeds.every((speed) => speed < SLOW);
  }

  /** From now on frames should come: what lies before does not count as silence. */
  expectFrames() {
    this.movedAt = performance.now();
  }

  frameShown() {
    this.shown += 1;
  }

  async beat() {
    const now = performance.now();
    const report = await this.picture.stats();
    if (!report) {
      this.before = null;
      this.shown = 0;
      return;
    }
    const after = {
      at: now,
      bytes: report.bytesReceived,
      frames: report.framesReceived ?? 0,
      lost: report.packetsLost,
      packets: report.packetsReceived,
    };
    const { before } = this;
    this.before = after;
    if (!before || after.bytes < before.bytes) {
      this.movedAt = now;
      this.shown = 0;
      return;
    }
    if (after.frames > before.frames) this.movedAt = now;
    this.#rates(before, after);
  }

  /** The engine's own account, about once a second. */
  told(event) {
    if (event.media_ms > this.mediaMs) this.madeAt = performance.now();
    this.mediaMs = event.media_ms;
    this.stats.set(
      "speed",
      event.real_time_factor,
      `${event.late_blocks} late blocks, lead ${Math.round(event.lead_ms)} ms`,
    );
    this.speeds = [...this.speeds, event.real_time_factor].slice(-SLOW_FOR);
    const tiers = Object.entries(event.kv_bytes ?? {});
    const bytes = tiers.reduce((sum, [, n]) => sum + n, 0);
    if (tiers.length)
      this.stats.set("memory", bytes / 1e6, tiers.map(([tier, n]) => `${tier}: ${(n / 1e6).toFixed(1)} MB`).join(", "));
    this.#custom(event.metrics ?? {});
  }

  /** Seconds for which no frame has come, and for which the engine has not said that it made any. */
  silence() {
    const now = performance.now();
    return { pictureS: (now - this.movedAt) / 1000, engineS: (now - this.madeAt) / 1000 };
  }

  #rates(before, after) {
    const seconds = (after.at - before.at) / 1000;
    if (!document.hidden) this.stats.set("fps", this.shown / seconds);
    this.shown = 0;
    this.stats.set("bitrate", ((after.bytes - before.bytes) * 8) / 1000 / seconds);
    const lost = Math.max(0, after.lost - before.lost);
    const sent = lost + after.packets - before.packets;
    if (sent > 0) this.stats.set("loss", (lost / sent) * 100, `${after.lost} packets in all`);
  }

  #custom(metrics) {
    const { drift, ...rest } = metrics;
    const others = Object.entries(rest);
    const measures = others
      .filter(([name]) => name.startsWith("drift_"))
      .map(([name, value]) => `${name.slice(6)} ${value.toFixed(2)}`);
    if (drift !== undefined) this.stats.set("drift", drift, measures.join(", "));
    this.metrics.replaceChildren(
      ...others.map(([name, value]) => {
        const pair = document.createElement("div");
        for (const [tag, text] of [
          ["dt", name.replace(/_bytes$/, "").replaceAll("_", " ")],
          ["dd", amount(name, value)],
        ])
          pair.append(Object.assign(document.createElement(tag), { textContent: text }));
        return pair;
      }),
    );
  }
}

function amount(name, value) {
  if (name.endsWith("bytes")) return `${(value / 1e6).toFixed(1)} MB`;
  return String(Math.round(value * 1000) / 1000);
}

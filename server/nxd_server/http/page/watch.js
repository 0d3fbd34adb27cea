// Watches the server: whether it is ready, when it restarts, and the readings that the plots are made of.

import { send } from "./api.js";
import { between, Reading } from "./metrics.js";

const WINDOW = 5; // seconds that a rate is taken over
const SPAN = 300; // seconds that the plots show

/** Dispatches "state" when it changes, "ready" when the server begins to answer, "reading" after each look. */
export class Watch extends EventTarget {
  state = { name: "waiting", text: "connecting" };
  restarted = null;
  readings = [];
  points = [];

  async run() {
    for (;;) {
      if (!document.hidden) await this.look();
      await new Promise((resume) => setTimeout(resume, 1000));
    }
  }

  async look() {
    try {
      const metrics = await send("metrics").catch((error) => {
        if (!error.status) throw error; // else the key is not for metrics
      });
      if (metrics) this.#take(new Reading(await metrics.text()));
      if (!metrics || !this.readings.at(-1).sum("nxd_ready")) await send("readyz"); // which says why not
      this.#become("ready", this.restarted ? `ready; restarted at ${this.restarted}` : "ready");
    } catch (error) {
      this.#become(error.status ? "waiting" : "away", error.message);
    }
    this.dispatchEvent(new Event("reading"));
  }

  #take(reading) {
    if (this.readings.length && this.readings.at(-1).run !== reading.run) {
      this.restarted = new Date().toTimeString().slice(0, 8);
      this.readings = [];
      this.state = { name: "waiting", text: "" };
    }
    this.readings = [...this.readings.filter(({ at }) => at >= reading.at - WINDOW - 0.5), reading];
    const points = this.points.filter(({ at }) => at >= reading.at - SPAN);
    this.points = this.readings.length > 1 ? [...points, between(this.readings[0], reading)] : points;
  }

  #become(name, text) {
    const before = this.state;
    this.state = { name, text };
    if (name !== before.name || text !== before.text) this.dispatchEvent(new Event("state"));
    if (name === "ready" && before.name !== "ready") this.dispatchEvent(new Event("ready"));
  }
}

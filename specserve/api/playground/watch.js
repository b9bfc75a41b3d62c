// Looks at the server's last rounds while a request runs, unless that was switched off, and once more when it has ended.

import { sceneOf } from "./trace.js";
import { pause } from "./words.js";

const EVERY_S = 0.4;
const SHOWN = 12; // rounds
const ASKED = 24; // some of them read prompts, and are not shown

export class Watch {
  #button = document.getElementById("watch");
  #running = 0;
  #looking = false;

  constructor(server, models, { show, say }) {
    Object.assign(this, { server, models, show, say });
    this.#press(!matchMedia("(prefers-reduced-motion: reduce)").matches);
    this.#button.addEventListener("click", () => {
      this.#press(!this.#live);
      this.#follow();
    });
  }

  begin() {
    this.#running += 1;
    this.#follow();
  }

  async end() {
    this.#running -= 1;
    await this.#look();
  }

  get #live() {
    return this.#button.getAttribute("aria-pressed") === "true";
  }

  #press(live) {
    this.#button.setAttribute("aria-pressed", String(live));
  }

  async #follow() {
    if (this.#looking) return;
    this.#looking = true;
    while (this.#running && this.#live) {
      await pause(EVERY_S);
      if (this.#running && !document.hidden) await this.#look();
    }
    this.#looking = false;
  }

  async #look() {
    try {
      const scene = sceneOf(await this.server.trace(ASKED, this.models.chosen), SHOWN);
      if (scene) this.show(scene);
    } catch (refusal) {
      this.#press(false);
      this.say(`The trace cannot be read. ${refusal.message}`);
    }
  }
}

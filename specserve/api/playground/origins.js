// What each way of marking a token means, and how many there are of it: legend and bar in one.

import { element, MEANING } from "./words.js";

export class Origins {
  #parts = {};
  #counts = {};

  constructor(area) {
    const bar = element("div", "bar"), legend = element("ul", "legend");
    bar.setAttribute("aria-hidden", "true");
    for (const [origin, meaning] of Object.entries(MEANING)) {
      const item = element("li");
      item.append(element("span", `sample ${origin}`, origin), (this.#counts[origin] = element("strong")), element("span", "muted", meaning));
      legend.append(item);
      bar.append((this.#parts[origin] = element("span", `part ${origin}`)));
    }
    area.append(bar, legend);
  }

  show(counts) {
    for (const [origin, count] of Object.entries(counts)) {
      this.#parts[origin].style.flexGrow = count;
      this.#counts[origin].textContent = count;
    }
  }
}

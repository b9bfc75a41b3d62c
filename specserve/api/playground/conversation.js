// A chat of several turns: what was said, and where each turn stands on the page.

import { element } from "./words.js";

export class Conversation {
  #messages = [];
  #list;

  constructor(list) {
    this.#list = list;
  }

  get length() {
    return this.#messages.length;
  }

  with(content) {
    return [...this.#messages, { role: "user", content }];
  }

  // Shows what the user says; returns where answers go, and what to do when they are there or are not.
  turn(content) {
    const item = element("li", "turn"), said = element("div", "said");
    said.append(element("h3", "hidden", "You"), element("p", "", content));
    const answers = element("div", "lanes");
    item.append(said, answers);
    this.#list.append(item);
    return {
      answers,
      keep: (answer) => this.#messages.push({ role: "user", content }, { role: "assistant", content: answer }),
      drop: () => item.remove(),
    };
  }

  clear() {
    this.#messages = [];
    this.#list.replaceChildren();
  }
}

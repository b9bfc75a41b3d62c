// One answer as it is written: its tokens, how far it is, and what the server says of it in the end.

import { Meter } from "./meter.js";
import { element, rate } from "./words.js";
import { TokenText, textOf, tokensOf } from "./tokens.js";

export const pieceOf = new WeakMap(); // what each token's element shows

export class Panel {
  text = "";
  #tokens = new TokenText();
  #speed = element("p", "speed");
  #bar = element("progress", "progress");
  #body = element("div", "text");
  #facts = element("p", "facts muted");

  // `before` is shown in front of the answer; `expected` tokens are its most.
  constructor({ title, alone, before = "", expected, changed }) {
    this.meter = new Meter();
    this.changed = changed;
    this.title = title;
    this.#bar.max = expected;
    this.#bar.setAttribute("aria-label", `Progress, ${title}`);
    this.#body.setAttribute("role", "group");
    this.#body.setAttribute("aria-label", `${title}. Arrow keys walk through the tokens.`);
    if (before) this.#body.append(element("span", "before", before));
    this.element = element("article", "panel");
    this.element.setAttribute("aria-label", title);
    const head = element("div", alone ? "hidden" : "heading"); // says nothing new where there is one answer
    head.append(element("h3", "", title), this.#speed);
    this.element.append(head, this.#bar, this.#body, this.#facts);
    this.#facts.textContent = "Waiting.";
  }

  begin() {
    this.meter = new Meter();
    this.element.setAttribute("aria-busy", "true");
    this.#facts.textContent = "Reading the prompt.";
  }

  take(chunk) {
    const text = textOf(chunk), tokens = tokensOf(chunk);
    this.text += text;
    this.meter.take(tokens, chunk.specserve);
    this.#show(this.#tokens.push(text, tokens));
    this.#bar.value = this.meter.tokens;
    this.#speed.textContent = rate(this.meter.rate);
    this.#facts.textContent = `${this.meter.tokens} tokens`;
    this.changed(this);
  }

  // `words` instead of the server's own, when it did not come to those.
  end(words = null) {
    this.#show(this.#tokens.end());
    this.#bar.value = this.#bar.max;
    this.element.setAttribute("aria-busy", "false");
    this.element.classList.add("done");
    this.#facts.textContent = words ?? facts(this.meter);
    this.changed(this);
  }

  #show(pieces) {
    const follows = this.#body.scrollHeight - this.#body.scrollTop - this.#body.clientHeight < 40;
    for (const piece of pieces) this.#body.append(this.#span(piece));
    if (follows) this.#body.scrollTop = this.#body.scrollHeight;
  }

  // All tokens together are one stop of the Tab key.
  #span(piece) {
    const origin = piece.tokens.at(-1)?.origin ?? "plain";
    const span = element("span", piece.text.startsWith("\n") ? `token ${origin} line` : `token ${origin}`, piece.text);
    span.tabIndex = this.#body.querySelector(".token") ? -1 : 0;
    pieceOf.set(span, piece);
    return span;
  }
}

function facts({ tokens, seconds, stats }) {
  const some = [`${tokens} tokens in ${seconds.toFixed(2)} s`];
  if (stats) {
    some.push(`${stats.rounds} rounds`);
    some.push(stats.drafted ? `${stats.accepted} of ${stats.drafted} drafts accepted` : "no drafts");
    if (stats.drafted) some.push(`verifier ${stats.verifier}`);
    if (stats.anticipated) some.push(`${stats.anticipated} rounds drafted in advance`);
    if (stats.resumed) some.push(`resumed ${stats.resumed} times after a failure`);
    some.push(stats.lossless ? "lossless" : "lossy: not the target's own distribution");
  }
  return some.join(" · ");
}

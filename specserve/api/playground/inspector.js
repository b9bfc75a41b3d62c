// Shows a card about the token that is pointed at or has the focus; arrow keys walk through a text's tokens, Escape closes.

import { pieceOf } from "./panel.js";
import { element, MEANING, percent } from "./words.js";

const STEPS = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };

export class Inspector {
  #card = document.getElementById("inspector");
  #token = null;

  constructor(area) {
    area.addEventListener("pointerover", ({ target }) => this.#show(target.closest(".token")));
    area.addEventListener("pointerleave", () => this.#show(null));
    area.addEventListener("focusin", ({ target }) => this.#show(target.closest(".token")));
    area.addEventListener("focusout", () => this.#show(null));
    area.addEventListener("keydown", (event) => this.#walk(event));
    addEventListener("scroll", () => this.#show(null), { passive: true, capture: true });
    addEventListener("keydown", ({ key }) => key === "Escape" && this.#show(null));
  }

  #walk(event) {
    const token = event.target.closest(".token");
    if (!token || event.ctrlKey || event.metaKey || event.altKey) return;
    const tokens = [...token.parentElement.querySelectorAll(".token")], at = tokens.indexOf(token);
    const to = { Home: tokens[0], End: tokens.at(-1) }[event.key] ?? tokens[at + STEPS[event.key]];
    if (!to) return;
    event.preventDefault();
    token.tabIndex = -1;
    to.tabIndex = 0;
    to.focus({ preventScroll: true });
    keepInView(to);
    this.#show(to);
  }

  #show(token) {
    this.#token?.removeAttribute("aria-describedby");
    this.#token = token;
    const piece = pieceOf.get(token);
    this.#card.hidden = !piece?.tokens.length;
    if (this.#card.hidden) return;
    this.#card.replaceChildren(...lines(piece));
    token.setAttribute("aria-describedby", this.#card.id);
    this.#place(token.getClientRects()[0] ?? token.getBoundingClientRect());
  }

  // Under the token, or above where there is no room.
  #place(box) {
    const { offsetWidth: width, offsetHeight: height } = this.#card;
    const left = Math.max(8, Math.min(box.left, innerWidth - width - 8));
    const below = box.bottom + 8, above = box.top - height - 8;
    this.#card.style.left = `${left}px`;
    this.#card.style.top = `${below + height > innerHeight && above > 0 ? above : below}px`;
  }
}

// Scrolls at once: a smooth way would close the card again.
function keepInView(token) {
  token.scrollIntoView({ block: "nearest", behavior: "instant" });
}

function lines({ text, tokens }) {
  const made = tokens.map(({ label, origin, logprob }) => {
    const line = element("p", "about");
    line.append(
      element("code", "", visible(label)),
      element("span", `sample ${origin}`, origin),
      element("strong", "", logprob === null ? "" : percent(Math.exp(logprob))),
      element("span", "muted", MEANING[origin]),
    );
    return line;
  });
  return tokens.length > 1 ? [element("p", "muted", `${tokens.length} tokens make “${visible(text)}”`), ...made] : made;
}

function visible(label) {
  return label.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "␣");
}

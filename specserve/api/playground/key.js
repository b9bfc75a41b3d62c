// The API key: asked for in a dialog, kept in this tab's session and nowhere else.

const NAME = "specserve-key";

export class Key {
  #dialog = document.getElementById("key-dialog");
  #input = document.getElementById("key");
  #words = document.getElementById("key-words");
  #open = document.getElementById("key-open");

  // `changed` is called when there is a new key.
  constructor(changed) {
    this.#dialog.addEventListener("close", () => this.#take() && changed());
    this.#open.addEventListener("click", () => this.ask("This server answers only to who has a key."));
    this.#show();
  }

  get value() {
    return sessionStorage.getItem(NAME) ?? "";
  }

  ask(words) {
    this.#open.hidden = false;
    if (this.#dialog.open) return;
    this.#words.textContent = words;
    this.#input.value = "";
    this.#dialog.returnValue = "cancel";
    this.#dialog.showModal();
    this.#input.focus();
  }

  // Whether there is a new key to try.
  #take() {
    const answer = this.#dialog.returnValue, given = this.#input.value.trim();
    this.#input.value = "";
    if (answer === "forget") sessionStorage.removeItem(NAME);
    if (answer === "use" && given) sessionStorage.setItem(NAME, given);
    this.#show();
    return answer === "use" && given !== "";
  }

  #show() {
    this.#open.hidden = this.#open.hidden && !this.value;
    this.#open.textContent = this.value ? "API key: set" : "API key: none";
  }
}

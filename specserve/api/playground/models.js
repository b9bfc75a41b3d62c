// The models that the server has, and the one that is asked: a name, or a choice where there are several.

const part = (id) => document.getElementById(id);

export class Models {
  #served = [];
  #box = part("models");

  // `changed` is called when another model is chosen.
  constructor(changed) {
    this.#box.addEventListener("change", () => {
      this.#describe();
      changed();
    });
  }

  // What was chosen before stays, if it is still there.
  offer(served) {
    const before = this.#box.value;
    this.#served = served;
    this.#box.replaceChildren(...served.map(({ id }) => new Option(id, id, false, id === before)));
    this.#box.hidden = !this.several;
    part("model").hidden = this.several;
    this.#describe();
  }

  get several() {
    return this.#served.length > 1;
  }

  get chosen() {
    return this.#one?.id ?? "";
  }

  // The model that an adapter adapts, or the model itself.
  get base() {
    return this.#one?.parent ?? this.chosen;
  }

  // Whether its maker says how a chat is written.
  get talks() {
    return this.#one?.chat_template ?? false;
  }

  set disabled(busy) {
    this.#box.disabled = busy;
  }

  get #one() {
    return this.#served.find(({ id }) => id === this.#box.value) ?? this.#served[0];
  }

  #describe() {
    part("model").textContent = this.chosen;
    part("model-note").textContent = this.#one?.note ?? "";
  }
}

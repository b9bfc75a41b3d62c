// Counts and times one answer. A chunk is a round. Knows no page.

export class Meter {
  counts = { accepted: 0, correction: 0, bonus: 0, plain: 0 };
  rounds = 0;
  stats = null; // the server's own, with the last chunk
  #clock;
  #begun;
  #first = null; // when the first tokens came, and how many
  #numFirst = 0;
  #last = null;

  constructor(clock = () => performance.now()) {
    this.#clock = clock;
    this.#begun = clock();
  }

  take(tokens, stats) {
    if (tokens.length) {
      this.#last = this.#clock();
      if (this.#first === null) [this.#first, this.#numFirst] = [this.#last, tokens.length];
      this.rounds += 1;
      for (const { origin } of tokens) this.counts[origin] += 1;
    }
    this.stats = stats ?? this.stats;
  }

  get tokens() {
    return Object.values(this.counts).reduce((sum, count) => sum + count, 0);
  }

  // Seconds until the first token.
  get first() {
    return this.#first === null ? null : (this.#first - this.#begun) / 1000;
  }

  // Tokens a second, from the first ones on: reading the prompt is not writing. null while there is nothing to go by.
  get rate() {
    const seconds = (this.#last - this.#first) / 1000;
    return seconds > 0 ? (this.tokens - this.#numFirst) / seconds : null;
  }

  // All of it, in seconds.
  get seconds() {
    return ((this.#last ?? this.#clock()) - this.#begun) / 1000;
  }

  get acceptedPerRound() {
    if (this.stats) return this.stats.mean_accepted_length;
    return this.rounds ? this.counts.accepted / this.rounds : null;
  }
}

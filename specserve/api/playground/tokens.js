// Lays tokens over the text that was streamed: which characters each one made. Knows no page.
//
// Text may come later than its tokens (half a character, or what may become a stop string), and some tokens make no text at all.

const HALF = /^bytes:((?:\\x[0-9a-f]{2})+)$/;

export class TokenText {
  #waiting = []; // tokens whose text has not come
  #text = ""; // text whose tokens are not clear
  #decoder = new TextDecoder();

  // The pieces that are complete by now: {text, tokens}.
  push(text, tokens) {
    this.#text += text;
    for (const token of tokens) this.#waiting.push({ ...token, text: this.#read(token) });
    const pieces = [];
    while (this.#waiting.length) {
      const count = this.#visible();
      const expected = count ? this.#waiting[count - 1].text : "";
      if (!count || (expected.startsWith(this.#text) && expected !== this.#text)) break;
      const fits = this.#text.startsWith(expected);
      pieces.push(this.#take(fits ? count : this.#waiting.length, fits ? expected.length : this.#text.length));
    }
    return pieces;
  }

  // What is left when nothing more comes. A token that ends a text is none of its characters.
  end() {
    return this.#text ? [this.#take(this.#waiting.length, this.#text.length)] : [];
  }

  // How many tokens it takes to the first one that shows something; 0 if none does yet.
  #visible() {
    return this.#waiting.findIndex((token) => token.text !== "") + 1;
  }

  #take(count, length) {
    const piece = { text: this.#text.slice(0, length), tokens: this.#waiting.splice(0, count) };
    this.#text = this.#text.slice(length);
    return piece;
  }

  #read({ label, bytes }) {
    const half = HALF.exec(label);
    const raw = bytes ?? (half ? half[1].match(/[0-9a-f]{2}/g).map((byte) => parseInt(byte, 16)) : null);
    return raw ? this.#decoder.decode(new Uint8Array(raw), { stream: true }) : label;
  }
}

// The tokens of a chunk of either API: {label, bytes, logprob, origin}.
export function tokensOf(chunk) {
  const logprobs = chunk.choices[0]?.logprobs, origins = chunk.origins ?? [];
  if (!logprobs) return origins.map((origin) => ({ label: "", bytes: [], logprob: null, origin }));
  const scored = logprobs.content
    ? logprobs.content.map(({ token, bytes, logprob }) => ({ label: token, bytes, logprob }))
    : logprobs.tokens.map((label, i) => ({ label, bytes: null, logprob: logprobs.token_logprobs[i] }));
  return scored.map((token, i) => ({ ...token, origin: origins[i] ?? "plain" }));
}

export function textOf(chunk) {
  const choice = chunk.choices[0];
  return choice?.text ?? choice?.delta?.content ?? "";
}

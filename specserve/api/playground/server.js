// Asks the server, with the key of this tab. Whatever goes wrong becomes a Refusal, in words; knows nothing of the page.

export class Refusal extends Error {
  constructor(message, { status = 0, param = null } = {}) {
    super(message);
    this.name = "Refusal";
    this.status = status;
    this.param = param;
  }
}

export class Server {
  #key;

  constructor(key) {
    this.#key = key;
  }

  async models() {
    return (await this.#json("v1/models")).data;
  }

  description() {
    return this.#json("openapi.json");
  }

  // null once requests are taken, else why they are not.
  async unready() {
    try {
      await this.#json("ready");
      return null;
    } catch (refusal) {
      return refusal.message;
    }
  }

  trace(rounds, model) {
    return this.#json(`trace?${new URLSearchParams({ rounds, model })}`);
  }

  async metrics() {
    return (await this.#fetch("metrics")).text();
  }

  // The chunks of an answer, as they come.
  async *stream(path, body, signal) {
    const response = await this.#fetch(path, {
      method: "POST",
      headers: { "Content-Type": "application/json", "X-Specserve-Origins": "1" },
      body: JSON.stringify({ ...body, stream: true }),
      signal,
    });
    for await (const data of events(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Refusal(`The server gave up in the middle: ${chunk.error.message}.`);
      yield chunk;
    }
    throw new Refusal("The answer broke off: the connection ended before the server was done.");
  }

  async #json(path, options) {
    return (await this.#fetch(path, options)).json();
  }

  async #fetch(path, { headers = {}, ...options } = {}) {
    const key = this.#key.value;
    const sent = key ? { ...headers, Authorization: `Bearer ${key}` } : headers;
    let response;
    try {
      response = await fetch(path, { ...options, headers: sent, cache: "no-store" });
    } catch (error) {
      throw error.name === "AbortError" ? error : new Refusal("The server does not answer. Is it running, and is the network there?");
    }
    if (!response.ok) throw await refusalOf(response);
    return response;
  }
}

// The `data:` of each server-sent event.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (held + value).split("\n\n");
      held = parts.pop();
      for (const part of parts) if (part.startsWith("data: ")) yield part.slice("data: ".length);
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal("The answer broke off: the connection was lost.");
  } finally {
    reader.cancel().catch(() => {});
  }
}

// A proxy's refusal has no body of ours.
async function refusalOf(response) {
  const error = await response.json().then((body) => body.error ?? {}, () => ({}));
  const said = error.message ?? `status ${response.status}`;
  const wait = response.headers.get("Retry-After");
  const again = wait ? ` Try again in ${wait} s.` : " Try again a little later.";
  const words = {
    401: () => "This server wants an API key, and has not got one that it knows.",
    408: () => `That took longer than the server allows: ${said}.`,
    413: () => `That is too much text for this server: ${said}.`,
    429: () => (error.code === "rate_limit_exceeded" ? `This key has used up its share: ${said}.` : `The server is full: ${said}.${again}`),
    502: () => `The server cannot be reached just now.${again}`,
    503: () => `The server takes no requests just now: ${said}.${again}`,
  };
  const say = words[response.status] ?? (() => (response.status < 500 ? `The server refuses this: ${said}.` : `Something went wrong on the server: ${said}.`));
  return new Refusal(say(), { status: response.status, param: error.param ?? null });
}

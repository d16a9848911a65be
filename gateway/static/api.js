// Calls to this gateway's API. The key goes into the Authorization header and nowhere else: no cookie, no URL, no log.

/** The API said no: `status` is HTTP's, `error` is OpenAI's {message, type, param, code}. */
export class ApiError extends Error {
  constructor(status, error) {
    super(error?.message ?? `The server answered ${status}.`);
    this.status = status;
    this.code = error?.code ?? null;
    this.param = error?.param ?? null;
    this.type = error?.type ?? null;
  }
}

/** The key of one page, kept in this tab alone: in memory and, so that a reload keeps it, in sessionStorage. */
export class Key {
  #name;
  #value;

  constructor(name) {
    this.#name = name;
    try {
      this.#value = sessionStorage.getItem(name) ?? "";
    } catch {
      this.#value = "";
    }
  }

  get value() {
    return this.#value;
  }

  set value(text) {
    this.#value = text.trim();
    try {
      if (this.#value) sessionStorage.setItem(this.#name, this.#value);
      else sessionStorage.removeItem(this.#name);
    } catch {
      // memory alone, then
    }
  }
}

export class Api {
  /** `key` is a `Key`; with an empty one requests go out without. */
  constructor(key) {
    this.key = key;
  }

  async #send(path, { method = "GET", body, signal, headers = {} } = {}) {
    const sent = { ...headers };
    if (this.key.value) sent.Authorization = `Bearer ${this.key.value}`;
    if (body !== undefined) sent["Content-Type"] = "application/json";
    const answer = await fetch(path, {
      method,
      headers: sent,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
      credentials: "omit",
      redirect: "error",
      referrerPolicy: "no-referrer",
    });
    if (answer.ok) return answer;
    const told = await answer.json().catch(() => null);
    throw new ApiError(answer.status, told?.error);
  }

  /** The answer's JSON. Throws ApiError, and TypeError where nobody answers. */
  async json(path, options) {
    return (await this.#send(path, options)).json();
  }

  async text(path, options) {
    return (await this.#send(path, options)).text();
  }

  /** The data of server-sent events, one by one; comments are passed over. Throws as `json`. */
  async *events(path, options) {
    const answer = await this.#send(path, options);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    try {
      for (;;) {
        const { value, done } = await reader.read();
        if (done) return;
        const blocks = (rest + value).split("\n\n");
        rest = blocks.pop();
        for (const block of blocks) {
          const lines = block.split("\n").filter((line) => line.startsWith("data:"));
          if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
        }
      }
    } finally {
      reader.cancel().catch(() => {});
    }
  }
}

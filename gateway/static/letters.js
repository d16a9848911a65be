// Dead letters: listed, looked into, given to the engines once more, dropped.

import { ask, button, byId, count, element } from "./dom.js";

/** Asks for a yes in the page's own dialog. */
export async function confirmed(title, text, yes) {
  byId("confirm-title").textContent = title;
  byId("confirm-text").textContent = text;
  byId("confirm-yes").textContent = yes;
  return (await ask(byId("confirm"))) === "yes";
}

export class Letters {
  #api;
  #place;
  #told;

  /** `told(error)` hears of what fails; null: it worked. */
  constructor(api, place, told) {
    this.#api = api;
    this.#place = place;
    this.#told = told;
  }

  async show() {
    const { data } = await this.#api.json("/v1/admin/dead_letters");
    if (!data.length) return this.#place.replaceChildren(element("p", { class: "empty", textContent: "There are none." }));
    const names = ["Died", "Request", "Model", "Tenant", "Class", "Prompt", "Error", ""];
    const heads = names.map((name) => element("th", { scope: "col" }, name || element("span", { class: "visually-hidden", textContent: "Actions" })));
    const rows = data.map((letter) => this.#row(letter));
    this.#place.replaceChildren(element("table", {}, element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...rows)));
  }

  #row(letter) {
    const cell = (text, kind = "") => element("td", { class: kind, textContent: text });
    const path = `/v1/admin/dead_letters/${encodeURIComponent(letter.id)}`;
    const requeue = button("Requeue", () => this.#act(letter, "Requeue", () => this.#api.json(`${path}/requeue`, { method: "POST" })));
    const drop = button("Drop", () => this.#act(letter, "Drop", () => this.#api.json(path, { method: "DELETE" })), { class: "danger" });
    if (letter.tenant === undefined) requeue.disabled = true; // another version wrote it
    return element(
      "tr",
      {},
      cell(letter.died, "number"),
      cell(letter.id, "mono"),
      cell(letter.model),
      cell(letter.tenant ?? "?"),
      cell(letter.class ?? "?"),
      cell(letter.prompt_tokens === undefined ? "?" : `${count(letter.prompt_tokens)} tokens`, "number"),
      cell(letter.error),
      element("td", {}, element("span", { class: "row" }, requeue, drop)),
    );
  }

  async #act(letter, what, send) {
    const text = {
      Requeue: `${letter.id} waits again with all its attempts. Its client was told of the error long ago: the answer goes to its log, where it can be read for ten minutes.`,
      Drop: `${letter.id} and its prompt are deleted for good.`,
    }[what];
    if (!(await confirmed(`${what} this request?`, text, what))) return;
    try {
      await send();
      this.#told(null);
    } catch (error) {
      this.#told(error);
    }
    await this.show();
  }
}

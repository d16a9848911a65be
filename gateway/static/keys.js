// Projects and their keys over the admin API: made, limited, rotated, revoked. A secret is shown once and kept nowhere.

import { ask, button, byId, copy, element } from "./dom.js";
import { confirmed } from "./letters.js";

const PROJECTS = "/v1/organization/projects";
const LIMITS = {
  requests_per_minute: "Requests a minute",
  tokens_per_minute: "Tokens a minute",
  tokens_per_day: "Tokens a day",
  concurrent_requests: "At once",
};

const when = (seconds) => (seconds ? new Date(1000 * seconds).toISOString().slice(0, 16).replace("T", " ") : "never");

export class Keys {
  #api;
  #place;
  #told;
  #projects = [];

  /** `told(error)` hears of what fails; null: it worked. */
  constructor(api, place, told) {
    this.#api = api;
    this.#place = place;
    this.#told = told;
    byId("new-key").addEventListener("click", () => this.#edit(null));
    byId("copy-secret").addEventListener("click", (event) => copy(byId("secret").textContent, event.currentTarget));
    byId("secret-dialog").addEventListener("close", () => (byId("secret").textContent = ""));
  }

  async show() {
    this.#projects = await this.#all(PROJECTS);
    const lists = await Promise.all(this.#projects.map((project) => this.#all(`${PROJECTS}/${project.id}/api_keys`)));
    const rows = this.#projects.flatMap((project, place) => lists[place].map((key) => this.#row(project, key)));
    const names = ["Name", "Key", "Project", "Limits", "Last used", "Expires", ""];
    const heads = names.map((name) => element("th", { scope: "col" }, name || element("span", { class: "visually-hidden", textContent: "Actions" })));
    const head = element("thead", {}, element("tr", {}, ...heads));
    const none = element("p", { class: "empty", textContent: "There are no keys yet." });
    this.#place.replaceChildren(rows.length ? element("table", {}, head, element("tbody", {}, ...rows)) : none);
  }

  /** Every element of a list, page by page. */
  async #all(path) {
    const found = [];
    for (let after = ""; ; ) {
      const page = await this.#api.json(`${path}?limit=100${after}`);
      found.push(...page.data);
      if (!page.has_more) return found;
      after = `&after=${encodeURIComponent(page.last_id)}`;
    }
  }

  #row(project, key) {
    const path = `${PROJECTS}/${project.id}/api_keys/${key.id}`;
    const given = Object.entries(key.limits).filter(([name]) => name !== "models");
    const limits = given.map(([name, most]) => `${LIMITS[name] ?? name.replaceAll("_", " ")} ${most.toLocaleString("en")}`);
    const cell = (text, kind = "") => element("td", { class: kind, textContent: text });
    return element(
      "tr",
      { data: { key: key.id } },
      cell(key.name),
      cell(key.redacted_value, "mono"),
      cell(project.name),
      cell(limits.join(" · ") || "none", limits.length ? "" : "muted"),
      cell(when(key.last_used_at)),
      cell(when(key.expires_at)),
      element(
        "td",
        {},
        element(
          "span",
          { class: "row" },
          button("Limits", () => this.#edit({ path, key })),
          button("Rotate", () => this.#rotate(path, key)),
          button("Revoke", () => this.#revoke(path, key), { class: "danger" }),
        ),
      ),
    );
  }

  /** A new key (`known` is null), or the limits of one that is there. */
  async #edit(known) {
    if (!this.#projects.length) await this.show().catch(this.#told);
    byId("key-title").textContent = known ? `Limits of ${known.key.name}` : "New key";
    byId("key-save").textContent = known ? "Save" : "Create";
    byId("key-identity").hidden = known !== null;
    byId("key-name").required = known === null;
    byId("key-name").value = "";
    byId("key-project").replaceChildren(...this.#projects.map(({ id, name }) => element("option", { value: id, textContent: name })));
    for (const name of Object.keys(LIMITS)) byId(`limit-${name}`).value = known?.key.limits[name] ?? "";
    if ((await ask(byId("key-dialog"))) !== "save") return;
    const limits = { ...known?.key.limits };
    for (const name of Object.keys(LIMITS)) {
      const most = byId(`limit-${name}`).valueAsNumber;
      if (most > 0) limits[name] = most;
      else delete limits[name];
    }
    if (known) return this.#act(() => this.#api.json(known.path, { method: "POST", body: { limits } }));
    const path = `${PROJECTS}/${byId("key-project").value}/api_keys`;
    const body = { name: byId("key-name").value.trim(), limits };
    await this.#act(async () => this.#reveal(await this.#api.json(path, { method: "POST", body })));
  }

  async #rotate(path, key) {
    const text = `${key.name} gets a new secret. The one it has opens for an hour yet.`;
    if (!(await confirmed("Rotate this key?", text, "Rotate"))) return;
    const body = { grace_seconds: 3600 };
    await this.#act(async () => this.#reveal(await this.#api.json(`${path}/rotate`, { method: "POST", body })));
  }

  async #revoke(path, key) {
    const text = `${key.name} (${key.redacted_value}) opens nothing any more, for good.`;
    if (await confirmed("Revoke this key?", text, "Revoke")) await this.#act(() => this.#api.json(path, { method: "DELETE" }));
  }

  async #reveal(key) {
    byId("secret-name").textContent = key.name;
    byId("secret").textContent = key.value;
    await ask(byId("secret-dialog"));
  }

  async #act(work) {
    try {
      await work();
      await this.show();
      this.#told(null);
    } catch (error) {
      this.#told(error);
    }
  }
}

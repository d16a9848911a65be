// The form of parameters. What is left empty is not sent, so that the server's default holds and the code stays short.

import { element } from "./dom.js";

const STORED = "noria.parameters";

const FIELDS = [
  { name: "temperature", label: "Temperature", from: 0, to: 2, step: 0.05, default: 1, range: true },
  { name: "top_p", label: "Top p", from: 0.01, to: 1, step: 0.01, default: 1, range: true },
  { name: "max_tokens", label: "Max tokens", from: 1, to: 1_000_000, step: 1, default: "context", initial: "512" },
  { name: "seed", label: "Seed", from: 0, to: 2 ** 53 - 1, step: 1, default: "random" },
  { name: "frequency_penalty", label: "Frequency penalty", from: -2, to: 2, step: 0.1, default: 0 },
  { name: "presence_penalty", label: "Presence penalty", from: -2, to: 2, step: 0.1, default: 0 },
  { name: "repetition_penalty", label: "Repetition penalty", from: 0.01, to: 10, step: 0.05, default: 1 },
  { name: "top_k", label: "Top k", from: 0, to: 100_000, step: 1, default: "all" },
  { name: "min_p", label: "Min p", from: 0, to: 1, step: 0.01, default: 0 },
];

const TIERS = ["", "priority", "default", "flex"];

/** Puts the fields into `form` and reads them. */
export class Parameters {
  #form;
  #inputs = new Map();

  constructor(form) {
    this.#form = form;
    this.#long("system", "System message", "You are …");
    for (const field of FIELDS) this.#number(field);
    this.#long("stop", "Stop at", "One text a line, four at most");
    this.#tier();
    this.#restore();
    form.addEventListener("input", () => this.#keep());
    form.addEventListener("submit", (event) => event.preventDefault());
  }

  /** The system message; "" where there is none. */
  get system() {
    return this.#inputs.get("system").value.trim();
  }

  /** The parameters that were given, as the API has them. */
  get given() {
    const found = {};
    for (const { name } of FIELDS) {
      const input = this.#inputs.get(name);
      if (input.value !== "" && input.validity.valid) found[name] = input.valueAsNumber;
    }
    const stops = this.#inputs.get("stop").value.split("\n").filter((line) => line !== "");
    if (stops.length) found.stop = stops;
    if (this.#inputs.get("service_tier").value) found.service_tier = this.#inputs.get("service_tier").value;
    return found;
  }

  /** The name of a field that holds what cannot be, else null; it is shown where it stands. */
  get fault() {
    for (const { name, label } of FIELDS) if (!this.#inputs.get(name).reportValidity()) return label;
    return null;
  }

  reset() {
    for (const [name, input] of this.#inputs) input.value = FIELDS.find((field) => field.name === name)?.initial ?? "";
    this.#keep();
  }

  #number(field) {
    const { name, label, from, to, step } = field;
    const input = element("input", {
      type: "number", id: name, name, min: from, max: to, step: step < 1 ? "any" : step,
      placeholder: field.default, autocomplete: "off", inputMode: "decimal", value: field.initial ?? "",
    });
    const parts = [element("div", { class: "head" }, element("label", { for: name, textContent: label }), input)];
    if (field.range) {
      const slider = element("input", { type: "range", min: from, max: to, step, "aria-label": `${label} slider`, tabIndex: -1 });
      slider.addEventListener("input", (event) => {
        event.stopPropagation();
        input.value = slider.value;
        this.#keep();
      });
      parts.push(slider);
    }
    this.#add(name, input, element("div", { class: "parameter" }, ...parts));
  }

  #long(name, label, placeholder) {
    const input = element("textarea", { id: name, name, placeholder, rows: 3, spellcheck: false });
    this.#add(name, input, element("div", { class: "field" }, element("label", { for: name, textContent: label }), input));
  }

  #tier() {
    const name = "service_tier";
    const options = TIERS.map((tier) => element("option", { value: tier, textContent: tier || "auto" }));
    const input = element("select", { id: name, name }, ...options);
    const head = element("div", { class: "head" }, element("label", { for: name, textContent: "Service tier" }), input);
    this.#add(name, input, element("div", { class: "parameter" }, head));
  }

  #add(name, input, part) {
    this.#inputs.set(name, input);
    this.#form.append(part);
  }

  #show() {
    for (const [name, input] of this.#inputs) {
      const part = input.closest(".parameter");
      part?.classList.toggle("given", input.value !== "");
      const slider = part?.querySelector("input[type=range]");
      if (slider) slider.value = input.value === "" ? FIELDS.find((field) => field.name === name).default : input.value;
    }
  }

  #keep() {
    this.#show();
    const values = Object.fromEntries([...this.#inputs].map(([name, input]) => [name, input.value]));
    try {
      sessionStorage.setItem(STORED, JSON.stringify(values));
    } catch {
      // then a reload forgets them
    }
  }

  #restore() {
    try {
      const values = JSON.parse(sessionStorage.getItem(STORED) ?? "{}");
      for (const [name, value] of Object.entries(values)) if (this.#inputs.has(name)) this.#inputs.get(name).value = value;
    } catch {
      // as at the first time
    }
    this.#show();
  }
}

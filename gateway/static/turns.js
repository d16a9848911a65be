// The turns of a conversation as they stand on the page. Knows no request.

import { button, copy, count, duration, element } from "./dom.js";
import { rendered } from "./markdown.js";

/** One message: `{role, text, answer?}`; draws itself again when its text changes. */
export class Turn {
  #said = element("div", { class: "said" });
  #figures = element("p", { class: "figures" });
  #frame = 0;

  constructor(role, text, who) {
    this.role = role;
    this.text = text;
    this.actions = element("span", { class: "actions" });
    this.element = element(
      "article",
      { class: `turn ${role}`, "aria-label": who },
      element("div", { class: "who" }, who, this.actions),
      this.#said,
      this.#figures,
    );
    this.offer("Copy", (event) => copy(this.text, event.currentTarget));
    if (role === "user") this.#said.append(element("p", { textContent: text }));
  }

  /** A button at the turn's right. */
  offer(text, press) {
    this.actions.append(button(text, press, { class: "quiet" }));
  }

  /** Shows an answer that grows, at most once a frame. */
  grow(answer) {
    this.element.classList.add("growing");
    this.#frame ||= requestAnimationFrame(() => {
      this.#frame = 0;
      this.#draw(answer);
    });
  }

  /** Shows an answer that has ended. */
  end(answer) {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    this.element.classList.remove("growing");
    this.#draw(answer);
  }

  #draw(answer) {
    this.text = answer.text;
    const parts = rendered(answer.text);
    if (answer.thought) parts.unshift(element("p", { class: "thought", textContent: answer.thought }));
    if (answer.error) parts.push(fault(answer.error));
    if (!parts.length) parts.push(element("p", { class: "muted", textContent: answer.total === null ? "" : "No text." }));
    this.#said.replaceChildren(...parts);
    this.#figures.replaceChildren(...figures(answer).flatMap((shown) => [shown, " "]));
  }
}

function fault(error) {
  const where = [error.status, error.code ?? error.type].filter(Boolean).join(" ");
  const said = error instanceof TypeError ? "The server cannot be reached." : error.message;
  return element("p", { class: "note error", role: "alert" }, said, " ", where ? element("code", { textContent: where }) : "");
}

function figure(name, value) {
  return element("span", {}, `${name} `, element("b", { textContent: value }));
}

function figures(answer) {
  const { usage } = answer;
  const found = [];
  if (answer.firstToken !== null) found.push(figure("first token", duration(answer.firstToken)));
  if (answer.speed !== null) found.push(figure("tokens/s", answer.speed.toFixed(1)));
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    found.push(figure("prompt", count(usage.prompt_tokens) + (cached ? ` (${count(cached)} cached)` : "")));
    found.push(figure("output", count(usage.completion_tokens)));
  } else if (answer.chunks) found.push(figure("output about", count(answer.chunks)));
  if (answer.total !== null && !answer.error) found.push(figure("total", duration(answer.total)));
  if (answer.stopped) found.push(figure("ended by", "you"));
  else if (answer.finish) found.push(figure("ended by", answer.finish));
  return found;
}

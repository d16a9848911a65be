// The playground: a chat with any served model over the public API, and the same request as code.

import { Api, ApiError, Key } from "./api.js";
import { stream } from "./chat.js";
import { ask, byId, button, copy, count, duration, element } from "./dom.js";
import { Parameters } from "./parameters.js";
import { snippets } from "./snippets.js";
import { Turn } from "./turns.js";

const EXAMPLES = ["What is the capital of France?", "Explain how a water wheel works.", "Write a haiku about rain."];

const key = new Key("noria.key");
const api = new Api(key);
const parameters = new Parameters(byId("parameter-form"));
const model = byId("model");
const question = byId("question");
const turns = byId("turns");

let conversation = []; // Turn
let running = null; // AbortController of the answer that is being given

// --- models and the key ------------------------------------------------------------------------------------------

async function loadModels() {
  try {
    const { data } = await api.json("/v1/models");
    const chosen = model.value;
    const served = data.filter((found) => found.id === found.root); // an alias is the same model
    model.replaceChildren(...served.map(({ id }) => element("option", { value: id, textContent: id })));
    if (served.some(({ id }) => id === chosen)) model.value = chosen;
    if (!served.length) say("No engine serves a model at the moment.");
    return true;
  } catch (error) {
    if (error instanceof ApiError && error.status === 401) await askForKey(key.value ? error.message : "");
    else say(error.message);
    return false;
  }
}

async function askForKey(reason = "") {
  if (byId("key-dialog").open) return;
  byId("key-reason").hidden = !reason;
  byId("key-reason").textContent = reason;
  byId("key").value = key.value;
  if ((await ask(byId("key-dialog"))) === "use") {
    key.value = byId("key").value;
    await loadModels();
  }
}

byId("open-key").addEventListener("click", () => askForKey());
byId("forget-key").addEventListener("click", () => {
  key.value = "";
  byId("key").value = "";
  byId("key-dialog").close();
  model.replaceChildren();
});

// --- the conversation --------------------------------------------------------------------------------------------

const say = (text) => (byId("status").textContent = text);

function body() {
  const told = conversation.filter((turn) => turn.text).map((turn) => ({ role: turn.role, content: turn.text }));
  if (parameters.system) told.unshift({ role: "system", content: parameters.system });
  return { model: model.value, messages: told, ...parameters.given, stream: true, stream_options: { include_usage: true } };
}

function welcome() {
  const mark = document.querySelector(".brand .mark").cloneNode(true);
  const examples = EXAMPLES.map((text) => button(text, () => send(text)));
  turns.replaceChildren(
    element(
      "div",
      { class: "welcome" },
      mark,
      element("h1", { textContent: "Ask a model" }),
      element("div", { class: "examples" }, ...examples),
    ),
  );
}

function add(role, text, who) {
  if (!conversation.length) turns.replaceChildren();
  const turn = new Turn(role, text, who);
  conversation.push(turn);
  turns.append(turn.element);
  return turn;
}

/** Takes back everything from `turn` on. */
function cutAt(turn) {
  const place = conversation.indexOf(turn);
  for (const later of conversation.splice(place)) later.element.remove();
  if (!conversation.length) welcome();
}

function send(text) {
  if (running || !text.trim()) return;
  if (!model.value) return askForKey(key.value ? "No model can be seen with this key." : "");
  if (parameters.fault) return byId("parameters").classList.add("open");
  const turn = add("user", text.trim(), "You");
  turn.offer("Edit", () => {
    if (running) return;
    question.value = turn.text;
    cutAt(turn);
    fit();
    question.focus();
  });
  answer();
}

async function answer() {
  const asked = body();
  const turn = add("assistant", "", model.value);
  const stopping = (running = new AbortController());
  setRunning(true);
  turns.scrollTop = turns.scrollHeight;
  const result = await stream(api, asked, stopping.signal, (soFar) => {
    const follows = turns.scrollHeight - turns.scrollTop - turns.clientHeight < 60;
    turn.grow(soFar);
    if (follows) requestAnimationFrame(() => (turns.scrollTop = turns.scrollHeight));
  });
  turn.end(result);
  running = null;
  setRunning(false);
  if (!conversation.includes(turn)) return; // a new chat was begun meanwhile
  turn.offer("Again", () => {
    if (running) return;
    cutAt(turn);
    answer();
  });
  turns.scrollTop = turns.scrollHeight;
  say(summary(result));
  if (result.error?.status === 401) await askForKey(result.error.message);
}

function summary(result) {
  if (result.error) return `The answer failed: ${result.error.message}`;
  const tokens = result.usage?.completion_tokens ?? result.chunks;
  return `${result.stopped ? "Stopped" : "Answered"}: ${count(tokens)} tokens in ${duration(result.total)}. ${result.text}`;
}

function setRunning(on) {
  byId("send").hidden = on;
  byId("stop").hidden = !on;
  turns.ariaBusy = String(on);
  if (!on) question.focus({ preventScroll: true });
}

const fit = () => {
  question.style.height = "auto";
  question.style.height = `${question.scrollHeight}px`;
};

question.addEventListener("input", fit);
question.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("composer").requestSubmit();
  }
});
byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) return;
  send(question.value);
  if (running) question.value = "";
  fit();
});
const stop = () => running?.abort();
byId("stop").addEventListener("click", stop);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) stop();
});
byId("clear").addEventListener("click", () => {
  stop();
  conversation = [];
  welcome();
  question.focus();
});

// --- parameters and code -----------------------------------------------------------------------------------------

byId("reset").addEventListener("click", () => parameters.reset());
byId("open-parameters").addEventListener("click", (event) => {
  const open = byId("parameters").classList.toggle("open");
  event.currentTarget.setAttribute("aria-expanded", String(open));
});

function showCode(language) {
  for (const tab of byId("languages").children) {
    const chosen = tab.textContent === language;
    tab.setAttribute("aria-selected", String(chosen));
    tab.tabIndex = chosen ? 0 : -1;
  }
  const asked = body();
  const last = conversation.at(-1);
  if (last?.role === "assistant") asked.messages.splice(asked.messages.length - (last.text ? 1 : 0)); // as it was asked
  if (question.value.trim()) asked.messages.push({ role: "user", content: question.value.trim() });
  if (!asked.messages.length) asked.messages.push({ role: "user", content: EXAMPLES[0] });
  byId("code").textContent = snippets[language](asked, new URL("/v1", location.href).href);
}

byId("languages").append(
  ...Object.keys(snippets).map((name) => button(name, () => showCode(name), { role: "tab", "aria-controls": "code" })),
);
byId("languages").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  const tabs = [...byId("languages").children];
  const next = tabs.at((tabs.indexOf(document.activeElement) + step) % tabs.length);
  next.click();
  next.focus();
});
byId("open-code").addEventListener("click", () => {
  showCode("Python");
  byId("code-dialog").showModal();
});
byId("close-code").addEventListener("click", () => byId("code-dialog").close());
byId("copy-code").addEventListener("click", (event) => copy(byId("code").textContent, event.currentTarget));

welcome();
loadModels();

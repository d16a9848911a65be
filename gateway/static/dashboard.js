// The dashboard: who may come in, which section is shown, and when to look again.

import { Api, ApiError, Key } from "./api.js";
import { byId, element } from "./dom.js";
import { Keys } from "./keys.js";
import { Latency } from "./latency.js";
import { Letters } from "./letters.js";
import { showOverview } from "./overview.js";
import { Usage } from "./usage.js";
import { Wheels } from "./wheel.js";

const QUEUES_EVERY = 1_000;
const METRICS_EVERY = 5_000;

const key = new Key("noria.admin-key");
const api = new Api(key);
const wheels = new Wheels(api, byId("wheels"), byId("mark"));
const latency = new Latency(byId("latency"), byId("latency-window"));
const letters = new Letters(api, byId("letters"), outcome);
const keys = new Keys(api, byId("keys-body"), outcome);
const usage = new Usage(api, byId("usage-body"));
const places = { tiles: byId("tiles"), queuesPlace: byId("queues"), enginesPlace: byId("engines") };

let timer = 0;
let failed = null; // what was asked for last and did not work: it stays until the next thing that does
let firstToken = null;
let metricsAt = -Infinity;

// --- in and out --------------------------------------------------------------------------------------------------

async function enter() {
  try {
    await api.json("/v1/admin/queues");
  } catch (error) {
    return leave(key.value ? error.message : "");
  }
  byId("sign-in").hidden = true;
  byId("inside").hidden = byId("sign-out").hidden = false;
  byId("admin-key").value = "";
  wheels.start(trouble);
  show();
  look();
}

function leave(reason = "") {
  clearTimeout(timer);
  wheels.stop();
  key.value = "";
  byId("inside").hidden = byId("sign-out").hidden = true;
  byId("sign-in").hidden = false;
  byId("sign-in-fault").hidden = !reason;
  byId("sign-in-fault").textContent = reason;
  byId("admin-key").focus();
}

byId("sign-in").addEventListener("submit", (event) => {
  event.preventDefault();
  key.value = byId("admin-key").value;
  enter();
});
byId("sign-out").addEventListener("click", () => leave());

/** Shows what does not work; null: it works again. A key that is no good any more leads to the door. */
function trouble(error) {
  if (error instanceof ApiError && error.status === 401) return leave(error.message);
  error ??= failed;
  byId("trouble").hidden = error === null;
  byId("trouble").textContent = error === null ? "" : error instanceof TypeError ? "The server cannot be reached." : error.message;
}

/** What came of something that was asked for. */
function outcome(error) {
  failed = error;
  trouble(error);
}

// --- looking -----------------------------------------------------------------------------------------------------

async function look() {
  clearTimeout(timer);
  try {
    if (!document.hidden) await lookOnce();
  } catch (error) {
    trouble(error);
  }
  if (!byId("inside").hidden) timer = setTimeout(look, QUEUES_EVERY);
}

async function lookOnce() {
  const { data } = await api.json("/v1/admin/queues");
  if (performance.now() - metricsAt > METRICS_EVERY) {
    metricsAt = performance.now();
    firstToken = latency.take(await api.text("/metrics"));
  }
  showOverview(data, firstToken, places);
  trouble(null);
}

// --- sections ----------------------------------------------------------------------------------------------------

const sections = [...document.querySelectorAll("[data-section]")];
const opened = { usage: () => usage.show(), keys: () => keys.show(), dead: () => letters.show() };

byId("sections").append(
  ...sections.map((section) => element("a", { href: `#${section.id}`, textContent: section.dataset.section })),
);

function show() {
  const chosen = sections.find((section) => `#${section.id}` === location.hash) ?? sections[0];
  for (const section of sections) section.hidden = section !== chosen;
  for (const link of byId("sections").children) {
    if (link.hash === `#${chosen.id}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (key.value || !byId("inside").hidden) opened[chosen.id]?.()?.catch(trouble);
}

addEventListener("hashchange", show);
enter();

/* Keeps the facts of one fleet fresh, and shows them. */

import { CallError, follow, get, getText, hasKey, post, useKey } from "./calls.js";
import { drawCanaries, drawStaleness, drawTokens } from "./charts.js";
import { byId, make, setClass, setHidden, setText, sync } from "./dom.js";
import { addPoint, canaries, countTokens, meanStaleness, readMetrics, tokenRates, workersInOrder } from "./facts.js";
import { showEvents, showOthers, showProblems, showSummary, showWorkers } from "./panels.js";
import { showHistory, showUpdate } from "./updates.js";
import { clock, eventWords } from "./words.js";

const BETWEEN_MS = 1000; // at most one look at the fleet in this time
const POLL_MS = 3000; // loads and tokens change without an event
const HIDDEN_POLL_MS = 15_000; // while the page is hidden
const ABOUT_MS = 10_000;
const AGAIN_MS = 1000; // until a broken stream connects again
const PAST_S = 600; // events before the page was opened
const DRAW_MS = 100; // changes that come within this time are drawn once
const MAX_EVENTS = 500;
const MAX_BY = 200; // the facade's bound of the field

const facts = {
  state: null, workers: [], updates: null, about: null, rates: new Map(), rate: null,
  events: [], errors: { state: null, updates: null, metrics: null, events: null },
  tokens: [], staleness: [],
};
const registered = new Map();
let registeredEpoch = null;
let counts = null;
let metrics = null;
let lastEvent = "";
let seen = 0;
let page = 0;
let stopFollowing = null;

// ---- looks at the fleet ----

const wanted = new Set();
let looking = false;
let timer = null;
let nextAt = 0;

/** Looks at these soon: `state`, `updates`, `metrics`, `about`, `workers`. Calls that come together share one look. */
function want(...names) {
  for (const name of names) wanted.add(name);
  if (!looking && timer === null) timer = setTimeout(look, Math.max(0, nextAt - performance.now()));
}

const asked = new URLSearchParams(location.search).get("component"); // null: the frontend's own

/** A path that is about the component of this page. */
function about(path) {
  if (asked === null) return path;
  return `${path}${path.includes("?") ? "&" : "?"}component=${encodeURIComponent(asked)}`;
}

const LOOKS = {
  state: async () => takeState(await get(about("/v1/rl/state?min_workers=0&wait_s=0"))),
  updates: async () => { facts.updates = (await get(about("/v1/rl/updates"))).updates; },
  about: async () => takeAbout(await get("/v1/rl/about")),
  workers: async () => takeRegistered(await get(about("/v1/rl/workers?min_workers=0&wait_s=0"))),
  metrics: async () => takeMetrics(readMetrics(await getText("/metrics"), asked ?? facts.about?.component)),
};

async function look() {
  timer = null;
  looking = true;
  const began = performance.now();
  const names = [...wanted];
  wanted.clear();
  await Promise.all(names.map(async (name) => {
    try {
      await LOOKS[name]();
      facts.errors[name] = null;
    } catch (error) {
      if (!(error instanceof CallError)) throw error;
      if (error.needsKey && name !== "metrics") ask(error);
      else facts.errors[name] = error;
    }
  }));
  looking = false;
  const took = performance.now() - began;
  nextAt = began + Math.max(BETWEEN_MS, 2 * took); // a slow fleet is asked less often
  draw("fleet", ...(names.includes("updates") ? ["updates"] : []));
  if (facts.state && facts.state.epoch !== registeredEpoch && !facts.errors.workers) wanted.add("workers");
  if (wanted.size) want();
}

function takeState(state) {
  facts.workers = workersInOrder(state, registered);
  const now = countTokens(state, performance.now() / 1000);
  if (counts === null || now.at - counts.at >= 2) {
    if (counts !== null) {
      const { byVersion, byWorker } = tokenRates(counts, now);
      facts.rates = byWorker;
      facts.rate = Object.values(byVersion).reduce((sum, one) => sum + one, 0);
      addPoint(facts.tokens, { at: Date.now() / 1000, rates: byVersion });
    }
    counts = now;
    const lags = facts.workers.map((worker) => worker.lag).filter((lag) => lag !== null);
    addPoint(facts.staleness, { at: Date.now() / 1000, lag: lags.length ? Math.max(...lags) : null, mean: null });
  }
  facts.state = state;
}

/** Takes the facts about the frontend, and shows a link to each other component that it serves. */
function takeAbout(reply) {
  const names = Object.keys(reply.components);
  const here = asked ?? reply.component;
  facts.about = { ...reply, ...reply.components[here] };
  const others = names.filter((name) => name !== here).map((name) => ({ key: name, name }));
  if (!registered.size) setText(byId("place"), here);
  sync(byId("components"), others, ({ name }) => make("a", { href: `/?component=${encodeURIComponent(name)}` }, name));
}

function takeRegistered(reply) {
  registered.clear();
  for (const row of reply.workers) registered.set(row.instance_id, { host: row.host, pid: row.pid });
  registeredEpoch = reply.epoch;
  if (facts.state) facts.workers = workersInOrder(facts.state, registered);
  const first = reply.workers[0];
  if (first?.namespace) setText(byId("place"), `${first.namespace}.${first.component}`);
}

function takeMetrics(now) {
  if (metrics !== null && facts.staleness.length) facts.staleness.at(-1).mean = meanStaleness(metrics, now);
  metrics = now;
}

function poll() {
  if (byId("ask").hidden) want("state", "metrics");
  setTimeout(poll, document.hidden ? HIDDEN_POLL_MS : POLL_MS);
}

function pollAbout() {
  if (byId("ask").hidden) want("about", "updates", ...(facts.errors.workers ? ["workers"] : []));
  setTimeout(pollAbout, ABOUT_MS);
}

// ---- events ----

async function followEvents() {
  const stop = new AbortController();
  stopFollowing = stop;
  while (!stop.signal.aborted) {
    try {
      await follow(about(`/v1/rl/events?since_s=${PAST_S}`), lastEvent, stop.signal, connected, onEvent);
      linked("bad", `the events ended at ${clock(Date.now() / 1000)}, connecting again`);
    } catch (error) {
      if (!(error instanceof CallError)) throw error;
      if (stop.signal.aborted) return;
      if (error.needsKey) return ask(error);
      facts.errors.events = error.status ? error : null;
      linked("bad", `no connection since ${clock(Date.now() / 1000)}: ${error.message}`);
      draw("fleet");
    }
    await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
  }
  return undefined;
}

let lostSince = "";

function linked(mood, text) {
  if (mood === "good") lostSince = "";
  else lostSince ||= text;
  setText(byId("link"), mood === "good" ? text : `▲ ${lostSince}`);
  setClass(byId("link"), mood);
}

function connected() {
  linked("good", `● live from ${location.host}`);
  facts.errors.events = null;
  setHidden(byId("ask"), true);
  setHidden(byId("fleet"), false);
  setHidden(byId("forget"), !hasKey());
  want("state", "updates", "about", "metrics");
}

function onEvent(id, kind, data) {
  if (id) lastEvent = id;
  if (kind === "update" && data.change === "progress") {
    if (facts.state) facts.state.update = data;
    return want("state");
  }
  const { text, mood } = eventWords(kind, data);
  facts.events.push({ key: ++seen, at: data.at ?? null, text, mood });
  if (facts.events.length > MAX_EVENTS) facts.events.splice(0, facts.events.length - MAX_EVENTS);
  want("state");
  if (kind === "update") want("updates");
  return draw("events");
}

// ---- the key ----

function ask(error) {
  stopFollowing?.abort();
  const given = hasKey();
  if (given && error.status === 401) useKey("");
  setHidden(byId("fleet"), true);
  setHidden(byId("forget"), true);
  const asks = !byId("ask").hidden;
  if (given || !asks) setText(byId("refused"), given ? refusal(error) : ""); // else calls that fail together clear it
  if (!asks) {
    setHidden(byId("ask"), false);
    byId("key").focus();
  }
  lostSince = "";
  linked("bad", "this fleet needs a key");
}

function refusal(error) {
  if (error.status === 403) return `This key may not look: ${error.message}. To fix it, ${error.fix}.`;
  return `This key was refused: ${error.message}. Ask the fleet's owner for a key with the role read, steer or admin.`;
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(byId("key").value.trim());
  byId("key").value = "";
  setText(byId("refused"), "");
  lastEvent = "";
  facts.events.length = 0;
  start();
});

byId("forget").addEventListener("click", () => {
  useKey("");
  location.reload();
});

// ---- abort ----

function onAbort(update) {
  const dialog = byId("confirm");
  const served = facts.state?.version?.label ?? "its version";
  setText(byId("confirm-text"), `The update ${update.label} (${update.update_id}) ends, and the fleet continues with ${served}. The trainer's call fails with update_aborted.`);
  dialog.returnValue = "";
  dialog.onclose = () => {
    if (dialog.returnValue === "abort") abort(update);
    else byId("abort")?.focus();
  };
  dialog.showModal();
}

async function abort(update) {
  const said = byId("abort-result");
  const say = (mood, text) => {
    setClass(said, mood);
    setText(said, text);
    setHidden(said, false);
  };
  say("", `Aborting ${update.label} …`);
  try {
    const key = facts.about?.key?.id;
    const by = `an operator at the dashboard${key ? ` with the key ${key}` : ""}`.slice(0, MAX_BY);
    await post("/v1/rl/abort_weights_update", {
      update_id: update.update_id, by, ...(asked === null ? {} : { component: asked }),
    });
    say("good", `✓ The update ${update.label} was aborted. Nothing has changed.`);
  } catch (error) {
    if (!(error instanceof CallError)) throw error;
    say("bad", `▲ The update ${update.label} was not aborted: ${error.message}.${error.fix ? ` To fix it: ${error.fix}.` : ""}`);
  }
  want("state", "updates");
}

// ---- drawing ----

const stale = new Set();
let drawing = false;

/** Draws these soon: `fleet`, `updates`, `events`. Changes that come together are drawn once. */
function draw(...names) {
  for (const name of names) stale.add(name);
  if (drawing) return;
  drawing = true;
  setTimeout(() => requestAnimationFrame(show), DRAW_MS);
}

function show() {
  drawing = false;
  const names = new Set(stale);
  stale.clear();
  if (names.has("events")) showEvents(facts.events);
  if (names.has("updates") && facts.updates) {
    showHistory(facts.updates);
    drawCanaries(byId("canary"), canaries(facts.updates));
  }
  if (names.has("fleet") || names.has("updates")) showProblems(facts);
  if (names.has("fleet") && facts.state) showFleet();
}

function showFleet() {
  showSummary(facts);
  showUpdate(facts.state, onAbort);
  page = showWorkers(facts, page, byId("filter").value);
  showOthers(facts.state);
  const silent = facts.state.workers.some((row) => Number.isFinite(row.tokens_made)) ? "" : "No worker reports its tokens.";
  drawTokens(byId("tokens"), silent ? [] : facts.tokens, silent);
  drawStaleness(byId("staleness"), facts.staleness);
}

byId("filter").addEventListener("input", () => {
  page = 0;
  draw("fleet");
});
byId("previous").addEventListener("click", () => {
  page -= 1;
  draw("fleet");
});
byId("next").addEventListener("click", () => {
  page += 1;
  draw("fleet");
});
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && byId("ask").hidden) want("state", "updates", "about");
});

function start() {
  stopFollowing?.abort();
  followEvents();
}

start();
setTimeout(poll, POLL_MS);
setTimeout(pollAbout, ABOUT_MS);

/* The panels of the summary, the problems, the workers, and the events. */

import { byId, make, setClass, setHidden, setText, sync } from "./dom.js";
import { problemsOf, readiness } from "./facts.js";
import { afterLeft, clock, many, number, seconds } from "./words.js";

const PAGE = 50; // rows of the table at a time
const SHOWN_EVENTS = 80;

export const MARKS = { open: "●", paused: "‖", behind: "◐", closed: "■", error: "▲", skipped: "–" };

export function showSummary({ state, workers, about, rate }) {
  const { ready, of } = readiness(state, workers);
  const version = state.version;
  const complete = ready === of && ready > 0;
  const items = [
    ["ready", "Ready", `${complete ? "●" : "▲"} ${ready} of ${of}`, complete ? "good" : "bad"],
    ["version", "Committed version", version ? version.label : "none", ""],
    ["sequence", "Sequence", version ? String(version.sequence) : "–", ""],
    ["run", "Run", version ? version.run : "–", "code"],
    ["pause", "Generation", state.pause_state, state.pause_state === "running" ? "" : "warn"],
    ["rate", "Tokens/s", rate === null ? "–" : number(rate), ""],
    ["lock", "Lock", about?.lock ? `${about.lock.owner}, ${seconds(about.lock.held_s)}` : "free", ""],
  ].map(([key, name, value, mood]) => ({ key, name, value, mood }));
  if (Object.keys(state.adapters).length) {
    const value = Object.entries(state.adapters).map(([name, one]) => `${name}: ${one.label}`).join(", ");
    items.push({ key: "adapters", name: "Adapters", value, mood: "" });
  }
  sync(byId("summary"), items, factOf, (element, item) => {
    setText(element.lastElementChild, item.value);
    setClass(element.lastElementChild, item.mood);
  });
}

function factOf({ key, name, value, mood }) {
  return make("div", { id: `fact-${key}` }, make("dt", {}, name), make("dd", { class: mood }, value));
}

export function showProblems(facts) {
  const { shown, more } = problemsOf(facts);
  setHidden(byId("problems"), shown.length === 0);
  const items = more ? [...shown, { key: "more", what: `${more} more`, fix: "See the workers below." }] : shown;
  sync(byId("problem-list"), items, ({ what, fix }) => make(
    "li", {}, make("span", { class: "what" }, make("span", { "aria-hidden": "true" }, "▲ "), what),
    fix ? make("span", { class: "fix" }, make("b", {}, "Fix: "), fix) : null,
  ));
}

// ---- workers ----

/** Shows one page of the workers that the filter finds. Returns the page that there is. */
export function showWorkers({ workers, rates }, wanted, filter) {
  const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
  const found = words.length
    ? workers.filter((one) => {
        const text = `${one.id} ${one.host} ${one.word} ${one.why} ${one.version}`.toLowerCase();
        return words.every((word) => text.includes(word));
      })
    : workers;
  const pages = Math.max(1, Math.ceil(found.length / PAGE));
  const page = Math.min(wanted, pages - 1);
  const rows = found.slice(page * PAGE, (page + 1) * PAGE).map((one) => ({
    ...one, since: seconds(one.since), rate: rates.has(one.id) ? number(rates.get(one.id)) : "–",
  }));
  sync(byId("worker-rows"), rows, rowOf, fillRow);
  setText(byId("workers-title"), `Workers (${workers.length})`);
  setHidden(byId("pager"), pages === 1);
  setText(byId("page"), `${page * PAGE + 1} to ${page * PAGE + rows.length} of ${found.length}, workers that need a look first`);
  byId("previous").disabled = page === 0;
  byId("next").disabled = page === pages - 1;
  return page;
}

function rowOf(item) {
  const cell = (name, label, ...inner) => make("td", { class: name, "data-label": label }, ...inner);
  const row = make(
    "tr", {},
    make("th", { scope: "row" }, make("code", {}), make("small", {})),
    cell("state", "State", make("span", { class: "word" }), make("span", { class: "why" })),
    cell("version", "Version", make("span"), make("small", {})),
    cell("number", "Running"), cell("number", "Waiting"), cell("number", "Tokens/s"), cell("number", "Since"),
  );
  fillRow(row, item);
  return row;
}

function fillRow(row, item) {
  const [who, state, version, running, waiting, rate, since] = row.children;
  setText(who.firstChild, item.id);
  setText(who.lastChild, item.host ? `${item.host}${item.pid === null ? "" : ` · ${item.pid}`}` : "");
  setText(state.firstChild, `${MARKS[item.word]} ${item.word}`);
  setClass(state.firstChild, `word ${item.word}`);
  setText(state.lastChild, item.why);
  if (state.title !== item.fix) state.title = item.fix;
  setText(version.firstChild, item.version);
  setText(version.lastChild, item.lag ? `−${item.lag}` : "");
  setText(running, item.running === null ? "–" : String(item.running));
  setText(waiting, item.waiting === null ? "–" : String(item.waiting));
  setText(rate, item.rate);
  setText(since, item.since);
}

export function showOthers(state) {
  const starting = state.starting.map((one) => ({
    key: `starts ${one.instance_id}`, mark: "◌", id: one.instance_id,
    what: `starts since ${clock(one.since)}: ${one.phase}, ${seconds(one.in_phase_s)} of ${seconds(one.elapsed_s)}`,
    where: `${one.engine} on ${one.host}, pid ${one.pid}`, fix: "",
  }));
  const left = state.left.map((one) => ({
    key: `left ${one.instance_id} ${one.left_at}`, mark: one.back ? "↻" : "✕", id: one.instance_id,
    what: `left at ${clock(one.left_at)}: ${one.why}${one.back ? "; it is back" : ""}`,
    where: [one.engine, one.host && `on ${one.host}`, one.pid && `pid ${one.pid}`].filter(Boolean).join(" "),
    fix: one.back ? "" : afterLeft(one.reason, one.instance_id),
  }));
  const none = { key: "none", mark: "", id: "", what: "No worker starts, and no worker has left in the last hour.", where: "", fix: "" };
  const items = [...starting, ...left];
  setText(byId("others-title"), items.length ? `Starting (${starting.length}) and left (${left.length})` : "Starting and left");
  sync(byId("other-list"), items.length ? items : [none], ({ mark, id, what, where, fix }) => make(
    "li", { class: id ? "" : "note" },
    id ? make("span", { class: "who" }, make("span", { "aria-hidden": "true" }, `${mark} `), make("code", {}, id), " ", make("small", {}, where)) : null,
    make("span", {}, what), fix ? make("span", { class: "fix" }, make("b", {}, "Fix: "), fix) : null,
  ));
}

const MOOD_MARKS = { good: "✓", bad: "▲", warn: "■", plain: "·" };

export function showEvents(events) {
  const items = events.slice(-SHOWN_EVENTS).reverse();
  sync(byId("event-list"), items, ({ at, text, mood }) => make(
    "li", { class: mood }, make("time", {}, clock(at)), make("span", { class: "mark", "aria-hidden": "true" }, MOOD_MARKS[mood]), make("span", {}, text),
  ));
  setText(byId("events-title"), `Events (${many(events.length, "kept event")})`);
}

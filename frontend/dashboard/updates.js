/* The panels of the running update and of the updates before. */

import { byId, make, setText, sync } from "./dom.js";
import { columnOf, isWayBack, lanesOf, phasesOf, short } from "./facts.js";
import { bytes, clock, many, seconds, small, told } from "./words.js";

const MAX_LANES = 40;
const SHOWN = 50; // updates of the history; the facade keeps 256
const BRINGS_BYTES = ["prepare", "receive"];
const MARKS = { done: "✓", now: "▶", next: "·" };

/** Phase → its letters in a bar. The style sheet has a colour for each. */
export const PHASES = {
  wait: "W", prepare: "P", receive: "Re", gate: "G", leases: "L", commit: "C", roll: "Ro", open: "O", other: "…",
};

/** Shows the running update. `onAbort`: called with it, when the reader wants to end it. */
export function showUpdate(state, onAbort) {
  const body = byId("update-body");
  const update = state.update;
  sync(body, [{ key: update ? update.update_id : "none" }], ({ key }) => (key === "none" ? nothing() : frame(onAbort)));
  if (!update) return;
  const frameOf = body.firstElementChild;
  const part = (name) => frameOf.querySelector(`.${name}`);
  const named = update.asked_by ? ` with the key ${update.asked_by}` : "";
  setText(part("what"), `${update.label}`);
  setText(part("id"), update.update_id.slice(0, 8));
  frameOf.querySelector(".what").title = update.update_id;
  setText(part("by"), `by ${update.transport ?? "no transport"}, asked by ${update.caller || update.who}${named}`);
  setText(part("waits"), `${update.phase}: waits for ${update.waits_for}`);
  const share = update.total_bytes ? update.bytes / update.total_bytes : null;
  const bar = part("all");
  bar.max = 1;
  bar.value = share ?? 0;
  bar.hidden = share === null;
  const facts = [
    `${seconds(update.elapsed_s)} so far`,
    update.in_phase_s === null ? "" : `${seconds(update.in_phase_s)} in this phase`,
    share === null ? "" : `${bytes(update.bytes)} of ${bytes(update.total_bytes)} (${Math.floor(share * 100)} %)`,
    update.bytes_per_s ? `${bytes(update.bytes_per_s)}/s` : "",
    update.deadline_in_s === null ? "" : `${seconds(update.deadline_in_s)} left`,
    update.idle_limit_s === null ? "" : `dropped after ${seconds(update.idle_limit_s)} without a call of its trainer`,
  ];
  setText(part("facts"), facts.filter(Boolean).join(" · "));
  frameOf.update = update;
  showLanes(part("lanes"), part("rest"), state, update);
}

function nothing() {
  return make("p", { class: "note" }, "No update runs.");
}

function frame(onAbort) {
  const button = make("button", { type: "button", class: "danger", id: "abort" }, "Abort …");
  const made = make(
    "div", { class: "running" },
    make("div", { class: "line" }, make("strong", { class: "what" }), make("code", { class: "id" }), make("span", { class: "by" }), button),
    make("p", { class: "waits" }),
    make("progress", { class: "all", "aria-label": "Bytes on all workers" }),
    make("p", { class: "facts" }),
    make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Workers and phases" }, make("table", { class: "lanes", "aria-label": "Workers and phases" })),
    make("p", { class: "rest note" }),
  );
  button.addEventListener("click", () => onAbort(made.update));
  return made;
}

function showLanes(table, rest, state, update) {
  const phases = phasesOf(update);
  const now = columnOf(update);
  const all = lanesOf(state, update);
  const head = { key: "head", phases, now };
  const lanes = all.slice(0, MAX_LANES).map((lane) => ({ ...lane, phases }));
  sync(table, [head, ...lanes], (item) => (item.key === "head" ? headOf(item) : laneOf(item)));
  setText(rest, all.length > lanes.length ? `${many(all.length - lanes.length, "further worker")} have more bytes than these.` : "");
}

function headOf({ phases, now }) {
  const cells = phases.map((phase, at) =>
    make("th", { scope: "col", class: at === now ? "now" : "", "aria-current": at === now ? "step" : null }, phase),
  );
  const last = ["bytes", "rate"].map((name) => make("th", { scope: "col", class: "number" }, name));
  return make("tr", {}, make("th", { scope: "col" }, "worker"), ...cells, ...last, make("th", { scope: "col" }, "waits for"));
}

function laneOf(lane) {
  const cells = lane.cells.map((mark, at) => {
    const says = `${lane.phases[at]}: ${mark}`;
    const share = mark === "now" && BRINGS_BYTES.includes(lane.phases[at]) ? lane.share : null;
    const inner = share === null
      ? make("span", { "aria-hidden": "true" }, MARKS[mark])
      : make("progress", { max: 1, value: share, "aria-hidden": "true" });
    return make("td", { class: `step ${mark}`, "aria-label": says }, inner);
  });
  const waits = lane.waits + (lane.silent > 5 ? `, last bytes ${seconds(lane.silent)} ago` : "");
  return make(
    "tr", {},
    make("th", { scope: "row" }, make("code", {}, lane.key)), ...cells,
    make("td", { class: "number" }, lane.total === null ? "–" : `${bytes(lane.bytes)} of ${bytes(lane.total)}`),
    make("td", { class: "number" }, lane.rate ? `${bytes(lane.rate)}/s` : "–"),
    make("td", { class: "waiting" }, waits),
  );
}

// ---- history ----

const OUTCOMES = { committed: "✓", aborted: "✕", running: "▶", prepared: "‖" };

/** Shows the updates, the newest first. */
export function showHistory(updates) {
  const entries = updates.filter((entry) => entry.update_id || entry.version).slice(0, SHOWN);
  const longest = Math.max(...entries.map(secondsOf), 1e-3);
  const items = entries.map((entry) => itemOf(entry, longest));
  const list = byId("history-list");
  const open = new Set([...list.querySelectorAll("details[open]")].map((one) => one.parentElement.dataset.key));
  sync(list, items, (item) => entryOf(item, open.has(item.key)));
  const legend = Object.entries(PHASES).map(([phase, letters]) => ({ key: phase, letters }));
  sync(byId("legend"), legend, ({ key, letters }) => make("li", {}, make("i", { class: `phase ${key}` }, letters), key));
}

const secondsOf = (entry) => Object.values(entry.phases ?? {}).reduce((sum, one) => sum + one, 0);

function itemOf(entry, longest) {
  const failed = Object.entries(entry.workers ?? {}).filter(([, reply]) => reply.status === "error");
  const left = entry.workers_left_out ?? 0;
  const outcome = entry.outcome === "committed" && entry.error ? "failed" : entry.outcome;
  return {
    key: entry.update_id || "initial",
    label: isWayBack(entry) ? `back to ${entry.label}` : entry.label, outcome, at: entry.ended_at ?? entry.began_at ?? null,
    sequence: entry.version?.sequence ?? null,
    phases: entry.phases ?? {}, total: secondsOf(entry),
    // Half a percent is the step, so that a new longest update changes few others.
    share: Math.max(0.02, Math.round((secondsOf(entry) / longest) * 200) / 200),
    workers: Object.keys(entry.workers ?? {}).length + left, ok: Object.keys(entry.workers ?? {}).length + left - failed.length,
    error: entry.error ? { code: entry.error.code, ...told(entry.error) } : null,
    failed: failed.slice(0, 10).map(([id, reply]) => ({ id, ...told(reply.error ?? {}) })),
    excluded: entry.excluded ?? [],
    by: entry.caller || entry.who, key_id: entry.asked_by ?? "", transport: entry.transport?.backend ?? "",
    bytes: entry.sent_bytes ?? null, encoding: entry.encoding ?? "",
    canary: entry.canary ? { difference: entry.canary.difference ?? null, failed: entry.canary.failed ?? 0 } : null,
  };
}

function entryOf(item, open) {
  const summary = make(
    "summary", {},
    make("span", { class: "when" }, clock(item.at)),
    make("span", { class: `outcome ${item.outcome}` }, make("span", { "aria-hidden": "true" }, OUTCOMES[item.outcome] ?? "✕"), ` ${item.outcome}`),
    make("strong", {}, item.label),
    make("span", { class: "took" }, item.total ? seconds(item.total) : "–"),
    make("span", { class: "track" }, stackOf(item)),
  );
  if (item.error) summary.append(make("span", { class: "why" }, item.error.what));
  else if (item.excluded.length) summary.append(make("span", { class: "why" }, `excluded: ${short(item.excluded)}`));
  const made = make("li", {}, make("details", { open }, summary, detailsOf(item)));
  made.dataset.key = item.key;
  return made;
}

function stackOf(item) {
  const words = Object.entries(item.phases).map(([name, spent]) => `${name.replace(/_s$/, "")} ${seconds(spent)}`);
  const bar = make("span", { class: "stack", role: "img", "aria-label": words.join(", ") || "no phases" });
  bar.style.width = `${item.share * 100}%`;
  for (const [name, spent] of Object.entries(item.phases)) {
    const phase = name.replace(/_s$/, "");
    const part = spent / item.total;
    if (part < 0.005) continue;
    const wide = part * item.share > 0.06;
    const piece = make("i", { class: `phase ${PHASES[phase] ? phase : "other"}`, title: `${phase}: ${seconds(spent)}` }, wide ? PHASES[phase] ?? "" : "");
    piece.style.flexGrow = part;
    bar.append(piece);
  }
  return bar;
}

function detailsOf(item) {
  const list = make("dl", { class: "details" });
  const say = (name, text) => text && list.append(make("dt", {}, name), make("dd", {}, text));
  if (item.error) say("error", `${item.error.code}: ${item.error.what}`);
  if (item.error?.fix) say("fix", item.error.fix);
  for (const one of item.failed) say(`worker ${one.id}`, one.what + (one.fix ? ` Fix: ${one.fix}` : ""));
  say("excluded", item.excluded.join(", "));
  say("sequence", item.sequence === null ? "" : String(item.sequence));
  if (item.workers) say("workers", `${item.ok} of ${item.workers} without an error`);
  say("asked by", item.by + (item.key_id ? ` with the key ${item.key_id}` : ""));
  say("sent", [item.transport && `by ${item.transport}`, item.encoding, item.bytes === null ? "" : `${bytes(item.bytes)} to each worker`].filter(Boolean).join(", "));
  if (item.canary) say("canary", `largest difference ${small(item.canary.difference)}, failed on ${item.canary.failed}`);
  say("phases", Object.entries(item.phases).map(([name, spent]) => `${name.replace(/_s$/, "")} ${seconds(spent)}`).join(", "));
  return list;
}

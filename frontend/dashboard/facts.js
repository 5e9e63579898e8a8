/* What follows from the facade's replies. Pure. */

import { afterLeft, many, opensWhen, told } from "./words.js";

const MAX_PROBLEMS = 8;
const RECENT_S = 600; // a worker that left longer ago is only listed below

/** Versions by which a worker is behind the committed one. Null: not known. */
export function lagOf(state, row) {
  const known = Number.isInteger(state.sequence) && Number.isInteger(row.sequence);
  return known ? Math.max(0, state.sequence - row.sequence) : null;
}

const MOODS = { error: 0, closed: 1, behind: 2, paused: 3, skipped: 4, open: 4 };

/** One worker: its state in a word, and what there is to say about it. */
export function workerFacts(state, row, registered) {
  const id = row.instance_id;
  const lag = lagOf(state, row);
  const facts = { key: id, id, host: registered?.host ?? "", pid: registered?.pid ?? null, lag, fix: "", why: "" };
  facts.version = row.version?.label ?? "–";
  facts.running = row.running ?? null;
  facts.waiting = row.waiting ?? null;
  facts.since = row.in_state_s ?? null;
  if (row.status === "error") {
    const { what, fix } = told(row.error ?? {});
    return { ...facts, word: "error", why: what, fix };
  }
  if (row.status === "skipped") return { ...facts, word: "skipped", why: row.reason ?? "" };
  if (!row.admission.open) {
    const reasons = row.admission.reasons;
    return { ...facts, word: "closed", why: reasons.join(", "), fix: reasons.length ? opensWhen(reasons[0], id) : "" };
  }
  if (lag) return { ...facts, word: "behind", why: many(lag, "version") + " behind" };
  if (row.pause?.paused) return { ...facts, word: "paused" };
  return { ...facts, word: "open" };
}

/** All workers: first the workers that need a look, then by id. */
export function workersInOrder(state, registered) {
  const found = state.workers.map((row) => workerFacts(state, row, registered.get(row.instance_id)));
  return found.sort((a, b) => MOODS[a.word] - MOODS[b.word] || (a.id < b.id ? -1 : 1));
}

/** `{ready, of}`: the number of workers that serve the committed version, and the number that should. */
export function readiness(state, workers) {
  const counted = workers.filter((worker) => worker.word !== "skipped");
  const ready = counted.filter((worker) => worker.word === "open" || worker.word === "paused").length;
  return { ready, of: Math.max(counted.length, state.expected ?? 0) };
}

const ENDED = ["aborted", "committed"];

/** Whether an update only brought the version before back, because a canary had failed. */
export const isWayBack = (entry) => entry.update_id.endsWith("/rollback");

/** Everything that needs a look, each as `{key, what, fix}`, and the number that is left out. */
export function problemsOf(facts) {
  const { state, workers, updates, errors, about } = facts;
  const failed = new Map(); // message → the calls that fail with it
  for (const [name, error] of Object.entries(errors)) {
    if (error) failed.set(error.message, { names: [...(failed.get(error.message)?.names ?? []), name], fix: error.fix });
  }
  const found = [...failed].map(([message, { names, fix }]) => (
    { key: `call ${message}`, what: `${message} (asked for ${names.join(", ")})`, fix }
  ));
  if (about?.nats && !about.nats.connected) {
    found.push({ key: "nats", what: "the frontend has lost NATS", fix: "See whether nats-server runs: rl-plane doctor" });
  }
  if (state) {
    const { ready, of } = readiness(state, workers);
    if (state.expected && state.workers.length < state.expected) {
      const missing = state.expected - state.workers.length;
      const fix = state.starting.length ? "Some still start, see below." : "Start what is missing, or lower --expect.";
      found.push({ key: "expected", what: `${missing} of ${state.expected} expected workers missing`, fix });
    } else if (of === 0) {
      found.push({ key: "empty", what: "no worker is in the fleet", fix: "Start one: rl-plane worker" });
    } else if (!ready) {
      found.push({ key: "none", what: "no worker serves the committed version", fix: "See each worker below." });
    }
    for (const worker of workers) {
      if (worker.word !== "error" && worker.word !== "closed") continue;
      const what = `worker ${worker.id} is ${worker.word === "error" ? "in error" : "closed"}: ${worker.why}`;
      found.push({ key: worker.id, what, fix: worker.fix });
    }
    for (const gone of state.left) {
      if (gone.back || gone.reason === "ended" || gone.ago_s > RECENT_S) continue;
      const fix = afterLeft(gone.reason, gone.instance_id);
      found.push({ key: `left ${gone.instance_id} ${gone.left_at}`, what: `worker ${gone.instance_id} left: ${gone.why}`, fix });
    }
  }
  const last = (updates ?? []).find((entry) => ENDED.includes(entry.outcome) && !isWayBack(entry));
  if (last?.error) {
    const { what, fix } = told(last.error);
    found.push({ key: `update ${last.update_id}`, what: `the last update (${last.label}) failed: ${what}`, fix });
  } else if (last?.excluded?.length) {
    const what = `the last update (${last.label}) left out ${many(last.excluded.length, "worker")}: ${short(last.excluded)}`;
    found.push({ key: `update ${last.update_id}`, what, fix: "They heal by themselves. If one does not: rl-plane explain ID" });
  }
  return { shown: found.slice(0, MAX_PROBLEMS), more: Math.max(0, found.length - MAX_PROBLEMS) };
}

export const short = (ids) => ids.slice(0, 4).join(", ") + (ids.length > 4 ? " …" : "");

// ---- the running update ----

/** The columns of an update: the phases that it passes, in order. */
export function phasesOf(update) {
  const phases = ["prepare", "gate", "commit", "open"];
  if (update.phase === "receive" || update.phase === "prepared") phases.splice(1, 0, update.phase);
  if (update.phase === "roll") phases[phases.indexOf("commit")] = "roll";
  if (update.phase === "leases") phases.splice(phases.indexOf("open"), 0, "leases");
  return phases;
}

const AFTER = { decide: "gate", resolve: "gate", pause: "gate", watch: "open", history: "open", answer: "open" };

/** The column in which an update is now; -1 before the first one. */
export function columnOf(update) {
  return phasesOf(update).indexOf(AFTER[update.phase] ?? update.phase);
}

/** The lane of each worker, the slowest first. Its `cells` say where it is: done, now or next. */
export function lanesOf(state, update) {
  const phases = phasesOf(update);
  const now = columnOf(update);
  const lanes = state.workers
    .filter((row) => row.status !== "skipped")
    .map((row) => {
      const part = row.update?.update_id === update.update_id ? row.update : null;
      const total = part?.total_bytes ?? null;
      const share = total ? Math.min(1, part.bytes / total) : null;
      const cells = phases.map((phase, at) => {
        if (at < now) return "done";
        if (at > now) return "next";
        return ["prepare", "receive", "prepared"].includes(phase) && share === 1 ? "done" : "now";
      });
      const waits = row.status === "error" ? told(row.error ?? {}).what : (part?.waits_for ?? "");
      return {
        key: row.instance_id, cells, share, waits, total,
        bytes: part?.bytes ?? null, rate: part?.bytes_per_s ?? null,
        silent: share !== null && share < 1 ? (part?.since_progress_s ?? null) : null,
      };
    });
  return lanes.sort((a, b) => (a.share ?? -1) - (b.share ?? -1) || (a.key < b.key ? -1 : 1));
}

// ---- over time ----

const SWAPPING = "no version"; // a worker holds none while it swaps
export const MAX_POINTS = 600; // half an hour at one point in 3 s

/** The tokens that each worker had made at one time. */
export function countTokens(state, at) {
  const made = new Map();
  for (const row of state.workers) {
    if (Number.isFinite(row.tokens_made)) {
      made.set(`${row.instance_id} ${row.incarnation}`, [row.version?.label ?? SWAPPING, row.tokens_made]);
    }
  }
  return { at, made };
}

/** `{byVersion, byWorker}`: tokens per second between two counts. A worker counts for its newer version. */
export function tokenRates(before, after) {
  const byVersion = {};
  const byWorker = new Map();
  const passed = after.at - before.at;
  for (const [worker, [label, made]] of after.made) {
    const known = before.made.get(worker);
    if (!known || passed <= 0) continue;
    const rate = Math.max(0, made - known[1]) / passed;
    const version = label === SWAPPING ? known[0] : label;
    byVersion[version] = (byVersion[version] ?? 0) + rate;
    byWorker.set(worker.split(" ")[0], rate);
  }
  return { byVersion, byWorker };
}

/** Adds a point to a series, and drops the oldest one beyond the bound. */
export function addPoint(series, point) {
  series.push(point);
  if (series.length > MAX_POINTS) series.splice(0, series.length - MAX_POINTS);
}

/** The values of a Prometheus page that this dashboard draws, of one component, by name. */
export function readMetrics(text, component) {
  const found = {};
  for (const [, name, of, value] of text.matchAll(/^(rl_plane_generation_version_lag_(?:sum|count))\{component="([^"]*)"\} (\S+)$/gm)) {
    if (of === component) found[name] = Number(value);
  }
  return found;
}

/** The mean versions by which the choices that ended between two pages were behind. Null: none ended. */
export function meanStaleness(before, after) {
  const name = "rl_plane_generation_version_lag";
  const count = after[`${name}_count`] - before[`${name}_count`];
  return count > 0 ? (after[`${name}_sum`] - before[`${name}_sum`]) / count : null;
}

/** The canary of each update, the oldest first. */
export function canaries(updates) {
  return (updates ?? [])
    .filter((entry) => entry.canary && entry.ended_at)
    .map((entry) => ({
      at: entry.ended_at, label: entry.label, failed: entry.canary.failed ?? 0, action: entry.canary.action ?? "",
      difference: entry.canary.difference ?? null, tolerance: entry.canary.tolerance ?? null,
    }))
    .reverse();
}

/* Numbers, times, errors and events in words. Pure. */

const UNITS = ["B", "kB", "MB", "GB", "TB", "PB"];

export function bytes(count) {
  if (count === null || count === undefined) return "–";
  let unit = 0;
  let shown = count;
  while (shown >= 1000 && unit < UNITS.length - 1) {
    shown /= 1000;
    unit += 1;
  }
  return `${unit && shown < 100 ? shown.toFixed(1) : Math.round(shown)} ${UNITS[unit]}`;
}

export function seconds(count) {
  if (count === null || count === undefined) return "–";
  if (count < 0) return `-${seconds(-count)}`;
  if (count < 0.0995) return `${Math.round(count * 1000)} ms`;
  if (count < 10) return `${count.toFixed(1)} s`;
  if (count < 120) return `${Math.round(count)} s`;
  if (count < 7200) return `${Math.round(count / 60)} min`;
  return count < 172800 ? `${Math.round(count / 3600)} h` : `${Math.round(count / 86400)} d`;
}

export function number(count) {
  if (count === null || count === undefined) return "–";
  if (count !== 0 && Math.abs(count) < 10) return count.toFixed(1);
  return Math.round(count).toLocaleString("en");
}

export function small(value) {
  if (value === null || value === undefined) return "–";
  return value === 0 ? "0" : value.toPrecision(2);
}

export function clock(unix) {
  if (unix === null || unix === undefined) return "–";
  return new Date(unix * 1000).toTimeString().slice(0, 8);
}

export const many = (count, one, more = `${one}s`) => `${count} ${count === 1 ? one : more}`;

/** An error of the plane as `{what, fix}`. */
export function told(error) {
  return { what: error.message || error.code || "an error without words", fix: error.fix || "" };
}

const OPENS = {
  starting: "It opens when it has read which version is committed.",
  behind: "It opens when it has fetched the committed weights.",
  updating: "It opens by itself, when every worker knows the newest decision.",
  disabled: "An operator has taken it out. To bring it back: rl-plane enable ID",
  draining: "It takes no new requests. To bring it back: rl-plane enable ID",
  leaving: "Its process ends.",
  memory: "Call resume_memory.",
  numerics: "Its weights compute something else. Read docs/canary.md; to try again: rl-plane enable ID",
  checking: "It opens when its weights are read.",
  engine: "Its engine does not answer. To see why: rl-plane explain ID",
};

/** What opens a worker again that is closed for this reason. */
export function opensWhen(reason, id) {
  return (OPENS[reason.split(":")[0]] ?? "To see why: rl-plane explain ID").replace("ID", id);
}

const GONE = {
  connection: "See its log. Start it again, or let rl-plane up --restart do so.",
  engine: "See the engine's log. Start it again, or let rl-plane up --restart do so.",
  silent: "See whether its process hangs or its network is broken: rl-plane explain ID",
  start: "See its log: its process ended before it joined.",
};

export const afterLeft = (reason, id) => (GONE[reason] ?? "").replace("ID", id);

/** One event in words, and its kind: plain, good or bad. */
export function eventWords(kind, data) {
  if (kind === "member") {
    return { text: `worker ${data.instance_id} ${data.change}`, mood: data.change === "left" ? "bad" : "plain" };
  }
  if (kind === "op") {
    const text = `${data.op} by ${data.asked_by || data.caller || data.who}: ${data.outcome}`;
    return { text, mood: data.outcome === "ok" ? "plain" : "bad" };
  }
  if (kind === "admission") {
    const version = data.version ? data.version.label : "no version";
    const state = data.open ? (data.paused ? "paused" : "open") : `closed: ${data.reasons.join(", ")}`;
    return { text: `worker ${data.instance_id} ${state}; ${version}`, mood: data.open ? "plain" : "warn" };
  }
  if (kind === "update") {
    const error = data.error ? `: ${data.error.message}` : "";
    const by = data.change === "began" ? `, asked by ${data.caller || data.who}` : "";
    const mood = data.error ? "bad" : data.change === "committed" ? "good" : "plain";
    return { text: `update ${data.label} ${data.change}${by}${error}`, mood };
  }
  if (kind === "missed") return { text: "Some events before this are not kept any more.", mood: "warn" };
  return { text: `${kind}: ${data.reason || ""}`, mood: "plain" };
}

/* Calls of the facade, with the reader's key, and the stream of events. */

const STORED = "rl_plane.key";
const CALL_S = 45; // the facade's own bound of an op that reads, and some more
const ABORT_S = 60; // an abort answers after 40 s at the latest
const SILENT_S = 40; // the stream has a comment each 15 s
const MAX_EVENT_CHARS = 4_000_000; // one event; a longer one is no event of this facade

let key = "";
try {
  key = sessionStorage.getItem(STORED) ?? "";
} catch {
  // Storage is forbidden here: the key lasts as long as the page.
}

export const hasKey = () => key !== "";

/** Takes the reader's key for the calls that follow. "": forgets it. */
export function useKey(given) {
  key = given;
  try {
    if (given) sessionStorage.setItem(STORED, given);
    else sessionStorage.removeItem(STORED);
  } catch {
    // see above
  }
}

/** A call that failed. `status`: the HTTP status, 0 if there was no answer. `field`, `fix`: as the plane names them. */
export class CallError extends Error {
  constructor(status, error) {
    super(error.message);
    this.status = status;
    this.code = error.code ?? "";
    this.field = error.field ?? "";
    this.fix = error.fix ?? "";
  }

  /** Whether another key may help. */
  get needsKey() {
    return (this.status === 401 || this.status === 403) && this.field === "Authorization";
  }
}

function headers(more = {}) {
  const made = new Headers(more);
  if (key) {
    try {
      made.set("Authorization", `Bearer ${key}`);
    } catch {
      const fix = "copy the key again, without what stands around it";
      throw new CallError(401, { message: "the key has characters that no key has", field: "Authorization", fix });
    }
  }
  return made;
}

async function answered(path, options) {
  let answer;
  try {
    answer = await fetch(path, { cache: "no-store", credentials: "omit", redirect: "error", ...options });
  } catch (error) {
    if (error instanceof CallError) throw error;
    const message = error.name === "TimeoutError" ? "the frontend does not answer" : "the frontend can't be reached";
    throw new CallError(0, { message, fix: "this page tries again; see whether the frontend runs" });
  }
  if (answer.ok) return answer;
  let error = { message: `the frontend answers ${answer.status}` };
  try {
    error = (await answer.json()).error ?? error;
  } catch {
    // A proxy's page, or half a body: the status says enough.
  }
  throw new CallError(answer.status, error);
}

async function whole(reading) {
  try {
    return await reading;
  } catch {
    throw new CallError(0, { message: "the answer broke off", fix: "this page tries again" });
  }
}

export async function get(path) {
  const answer = await answered(path, { headers: headers(), signal: AbortSignal.timeout(CALL_S * 1000) });
  return whole(answer.json());
}

export async function getText(path) {
  const answer = await answered(path, { headers: headers(), signal: AbortSignal.timeout(CALL_S * 1000) });
  return whole(answer.text());
}

export async function post(path, body) {
  const answer = await answered(path, {
    method: "POST",
    headers: headers({ "Content-Type": "application/json", "X-RL-Plane-Client": "dashboard" }),
    body: JSON.stringify(body),
    signal: AbortSignal.timeout(ABORT_S * 1000),
  });
  return whole(answer.json());
}

/**
 * Reads one stream of events, until it ends or breaks. EventSource can't send a key, so this is fetch.
 *
 * @param path with its query
 * @param last the id of the last event that the reader has, or ""
 * @param stop an AbortSignal that ends it
 * @param onOpen called when the stream has begun
 * @param onEvent called with each event's id, kind and data
 */
export async function follow(path, last, stop, onOpen, onEvent) {
  const silent = new AbortController();
  let timer = 0;
  const heard = () => {
    clearTimeout(timer);
    timer = setTimeout(() => silent.abort(), SILENT_S * 1000);
  };
  heard();
  try {
    const signal = AbortSignal.any([silent.signal, stop]);
    const answer = await answered(path, { headers: headers(last ? { "Last-Event-ID": last } : {}), signal });
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    onOpen();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      heard();
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      if (rest.length > MAX_EVENT_CHARS) throw new CallError(0, { message: "an event has no end" });
      for (const part of parts) deliver(part, onEvent);
    }
  } catch (error) {
    if (error instanceof CallError) throw error;
    throw new CallError(0, { message: "the events broke off", fix: "this page connects again" });
  } finally {
    clearTimeout(timer);
  }
}

function deliver(part, onEvent) {
  const event = { id: "", event: "", data: "" };
  for (const line of part.split("\n")) {
    const end = line.indexOf(": ");
    if (end > 0 && line.slice(0, end) in event) event[line.slice(0, end)] = line.slice(end + 2);
  }
  if (!event.data) return; // a comment
  let data;
  try {
    data = JSON.parse(event.data);
  } catch {
    return;
  }
  onEvent(event.id, event.event, data);
}

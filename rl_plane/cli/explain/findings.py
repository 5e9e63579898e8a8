"""Finds what keeps a fleet from serving or an update from ending. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rl_plane.cli.explain.known_facts import KnownFacts, Row
from rl_plane.cli.explain.wording import GONE, STOPPED, in_time, look_at, process_of, seconds
from rl_plane.commit.running_update import BEFORE_DECISION, WAITS_FOR_TRAINER
from rl_plane.errors import BusUnreachable, CanaryFailed, NoWorkers

LONG_HELD_S = 5.0
"""A call other than an update holds the lock for milliseconds. Longer is worth a line."""
SILENT_S = 6.0
"""A worker that answers nothing has left the fleet after this time."""
SLOW_TOKEN_S = 10.0
"""A request without a token for longer is worth a line: a step of a large model takes less than a second."""
FRESH_S = 3600.0
"""The last update's failure is shown for so long. Later ones are history."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be."""

    subject: str
    """`NATS`, `lock`, `pause`, `fleet`, or the id of a worker, update or request."""
    kind: str
    """`nats`, `lock`, `pause`, `fleet`, `worker`, `update` or `request`."""
    cause: str
    """The cause, as a sentence without its subject."""
    fix: str
    waits_for: str = ""
    until: str = ""
    """The time at which it ends by itself, in words. Empty: it does not, or the time is not known."""

    @property
    def name(self) -> str:
        return f"{self.kind} {self.subject}" if self.kind in ("worker", "update", "request") else self.subject

    def to_wire(self) -> dict[str, str]:
        return {
            "kind": self.kind,
            "subject": self.subject,
            "cause": self.cause,
            "waits_for": self.waits_for,
            "until": self.until,
            "fix": self.fix,
        }

    def line(self) -> str:
        """The finding in one line."""
        until = f"; ends {self.until}" if self.until else ""
        return f"{self.name} {self.cause}{until}; fix: {self.fix}"


def findings(facts: KnownFacts) -> list[Finding]:
    """Everything that is not as it should be, the most general cause first."""
    nats = list(_of_nats(facts))
    found = [*nats]
    if facts.update is not None:
        found.append(of_update(facts, facts.update))
    found += _of_lock(facts)
    found += _of_pause(facts)
    if not nats:  # without NATS no worker can be asked, so their silence says nothing
        found += [one for row in facts.rows for one in of_worker(facts, row)]
        found += _of_left(facts)
        found += _of_size(facts)
        found += _of_history(facts)
    found += [one for row in facts.requests for one in of_request(row)]
    return found


# ---- NATS, lock, pause, size ----


def _of_nats(facts: KnownFacts) -> Iterator[Finding]:
    nats = (facts.about or {}).get("nats")
    if nats is not None and not nats["connected"]:
        since = f" since {seconds(nats['lost_s'])}" if nats["lost_s"] is not None else ""
        yield _nats_lost(f"is not reached by the frontend{since}: {nats['url']}", nats["url"])
    elif (error := _store_error(facts)) is not None:
        where = nats["url"] if nats is not None else "its address"
        yield _nats_lost(f"or its JetStream does not answer: {error['message']}", where)
    elif (facts.about or {}).get("serving_lease") is False:
        yield _nats_lost(
            "has not confirmed the committed version to this frontend, so it routes nothing (no serving lease)",
            nats["url"] if nats is not None else "its address",
        )


def _store_error(facts: KnownFacts) -> Row | None:
    """The error of a part for which the store of NATS did not answer."""
    errors = [facts.error, *facts.missing.values()]
    return next((one for one in errors if one is not None and one.get("code") == BusUnreachable.code), None)


def _nats_lost(cause: str, where: str) -> Finding:
    return Finding(
        "NATS",
        "nats",
        cause,
        f"see whether nats-server runs at {where} (T in `ps -o stat`: it is stopped), and whether the frontend's "
        "machine reaches it. All processes reconnect by themselves",
        waits_for="nats-server with JetStream",
    )


def _of_lock(facts: KnownFacts) -> Iterator[Finding]:
    lock = (facts.about or {}).get("lock")
    if lock is None or facts.update is not None or lock["held_s"] < LONG_HELD_S:
        return
    yield Finding(
        "lock",
        "lock",
        f"is held by {lock['owner']} since {seconds(lock['held_s'])}, and no update runs{_said(facts, lock['owner'])}",
        look_at(process_of(lock["owner"]), lock["owner"], _state(facts, process_of(lock["owner"])))
        + ". A holder that dies or stands still loses it after 5 s",
        waits_for=f"the end of that call of {lock['owner']}",
    )


def _of_pause(facts: KnownFacts) -> Iterator[Finding]:
    paused = [row["pause"] for row in facts.rows if row.get("status") == "ok" and row["pause"]["paused"]]
    if not paused:
        return
    left = max((float(one.get("lease_left_s") or 0.0) for one in paused), default=0.0)
    yield Finding(
        "pause",
        "pause",
        f"stops generation on {len(paused)} of {len(facts.rows)} workers (mode {paused[0]['mode']}){_paused_by(facts)}",
        "`rl-plane resume` ends it at once",
        waits_for="resume, from the trainer or an operator",
        until=in_time(left, facts.now),
    )


def _paused_by(facts: KnownFacts) -> str:
    for kind, data in reversed(facts.events):
        if kind == "op" and data["op"] == "pause" and data["outcome"] == "ok":
            at = data.get("at")
            ago = f" {seconds(facts.now - at)} ago" if at is not None else ""
            key = f" with the key {data['asked_by']}" if data["asked_by"] else ""
            return f"; asked by {data.get('caller') or data['who']}{key}{ago}"
    return ""


def _of_left(facts: KnownFacts) -> Iterator[Finding]:
    seen: set[str] = set()
    for one in facts.left:
        if one["instance_id"] in seen or one["back"]:
            continue
        seen.add(one["instance_id"])
        if one["reason"] == "ended" and len(facts.rows) >= facts.expected():
            continue  # an operator took it away
        yield of_departed(facts, one)


def of_departed(facts: KnownFacts, one: Row) -> Finding:
    """The finding of a worker that has left and is not back."""
    place = facts.place(one["instance_id"])
    where = f" (pid {place[1]} on {place[0]})" if place else ""
    cause = f"left {seconds(one['ago_s'])} ago: {one['why']}{where}{_process(facts, place)}"
    said = _state(facts, place)
    look, again = look_at(place, "the worker", said), "see its log and exit code (`up --restart` starts it again)"
    if one["reason"] == "silent" or said == STOPPED:
        fix = f"{look}. It joins again by itself when it answers"
        return Finding(one["instance_id"], "worker", cause, fix, waits_for="its process to run again")
    fix = f"{look}. If it is dead, {again}" if one["reason"] == "connection" and not said else f"{look}; {again}"
    return Finding(one["instance_id"], "worker", cause, fix, waits_for="a new start")


def _of_size(facts: KnownFacts) -> Iterator[Finding]:
    expected, there = facts.expected(), len(facts.rows)
    gone = {one["instance_id"] for one in facts.left if not one["back"]}
    if expected - there > len(gone):
        loading = "a worker that still loads its model is in no list"
        yield Finding(
            "fleet",
            "fleet",
            f"has {there} of {expected} workers ({loading})",
            "start the missing workers, or see their logs",
            waits_for=f"{expected - there} more workers",
        )
    elif there == 0 and facts.state is None and (facts.error or {}).get("code") == NoWorkers.code:
        yield Finding(
            "fleet",
            "fleet",
            "has no worker (one that still loads its model is in no list)",
            "start workers with the namespace and the component of this frontend: `rl-plane worker`",
            waits_for="a first worker",
        )
    elif facts.state is None and facts.error is not None and facts.error.get("code") != BusUnreachable.code:
        fix = str(facts.error.get("fix") or "see the log of the frontend")
        yield Finding("fleet", "fleet", f"can't be read: {facts.error['message']}", fix)


def _of_history(facts: KnownFacts) -> Iterator[Finding]:
    newest = facts.updates[0] if facts.updates else None
    if newest is None or facts.update is not None:
        return
    ended = newest.get("ended_at") or newest.get("began_at") or 0.0
    if facts.now - ended <= FRESH_S and (found := of_ended_update(facts, newest)) is not None:
        yield found


# ---- one worker ----


def of_worker(facts: KnownFacts, row: Row) -> list[Finding]:
    """The findings of one worker that is in the fleet."""
    instance_id, place = row["instance_id"], facts.place(row["instance_id"])
    where = f" (pid {place[1]} on {place[0]})" if place else ""
    if row.get("status") == "error":
        error = row["error"]
        return [
            Finding(
                instance_id,
                "worker",
                f"does not answer{where}: {error['message']}{_process(facts, place)}",
                look_at(place, "the worker", _state(facts, place)),
                waits_for="its answer",
                until=f"after {SILENT_S:.0f} s: then it leaves the fleet, and joins again when it runs",
            )
        ]
    if row.get("status") != "ok" or row["admission"]["open"]:
        return []
    reasons = [str(reason) for reason in row["admission"]["reasons"]]
    if any(reason.startswith("behind") for reason in reasons):
        reasons = [reason for reason in reasons if reason != "starting"]  # it has the same cause
    return [_closed(instance_id, where, reason) for reason in reasons]


def _closed(instance_id: str, where: str, reason: str) -> Finding:
    word, _, text = reason.partition(":")
    waits_for, fix, until = _REASONS.get(word, ("", "see the log of the worker", ""))
    if word == "behind":
        fix = _behind_fix(text)
    named = f": {text.strip()}" if text else ""
    cause = f"is closed{where}: {word}{named}"
    return Finding(instance_id, "worker", cause, fix.replace("ID", instance_id), waits_for, until)


_REASONS: dict[str, tuple[str, str, str]] = {
    "starting": ("NATS to say which version is committed", "wait; if it stays, see its log and NATS", ""),
    "behind": ("the committed weights, which it fetches", "", ""),
    "updating": (
        "every process to learn the decision that was just made",
        "wait; if it stays, `rl-plane explain` again",
        "after 6 s at most",
    ),
    "disabled": ("an operator to enable it", "`rl-plane enable ID`", ""),
    "draining": ("an operator to enable it", "`rl-plane enable ID`", ""),
    "leaving": ("its last requests to end", "nothing: its process was told to end", ""),
    "memory": (
        "resume_memory, from the trainer",
        "let the trainer take the memory again: `curl -X POST URL/v1/rl/resume_memory`",
        "",
    ),
    "numerics": (
        "weights that pass the canary",
        "compare its row in `rl-plane updates` (docs/canary.md); `rl-plane rollback LABEL` brings good weights back, "
        "and `rl-plane enable ID` lets it fetch and check again",
        "",
    ),
    "checking": ("check_weights, which reads all weights", "wait", ""),
    "engine": (
        "an answer of its engine",
        "see its log; the worker ends itself after --engine-hang-s, and `up --restart` starts it again",
        "",
    ),
}
"""Reason → what the worker waits for, the fix, and until when."""


def _behind_fix(text: str) -> str:
    again = ". It tries again by itself"
    if "outside the weight roots" in text:
        return (
            "start the worker with --weight-root DIR above that path, or move the weights beneath a root" + again
        )
    if "No such file" in text or "is missing" in text or "holds neither" in text or "does not exist" in text:
        return (
            "bring the files back (or mount the share there), or `rl-plane rollback LABEL` to a version that is"
            + again
        )
    return "correct what it names, or publish the version again; docs/operators.md has the reasons" + again


# ---- one update ----


def of_update(facts: KnownFacts, update: Row) -> Finding:
    """The finding of the update that runs."""
    name = f"{update['update_id']} ({update['label']})"
    before = update["phase"] in (*BEFORE_DECISION, "prepared")
    trainer = update["caller"] or update["who"]
    trainer_place = process_of(trainer)
    stands_still = _state(facts, trainer_place) in (STOPPED, GONE)
    lost = _lost_during(facts, update)
    waits_for, abort = str(update["waits_for"]), f"`rl-plane abort {update['update_id']}` ends it"
    if lost and not stands_still and update["phase"] != "prepared":
        place = facts.place(lost[0])
        of_group = f", and with it waits for {waits_for}" if waits_for.startswith("the trainer's") else ""
        waits_for = f"{_workers(lost)}, which {'does' if len(lost) == 1 else 'do'} not answer"
        cause, fix = (
            f"waits for {waits_for}{_process(facts, place)}{of_group}",
            look_at(place, "the worker", _state(facts, place)),
        )
        if before:
            fix += f". {abort}; then publish again: the other workers serve the version before"
    elif waits_for.startswith("the trainer's") or waits_for == WAITS_FOR_TRAINER:
        cause = f"waits for {waits_for}; the trainer is {trainer}{_said(facts, trainer)}"
        fix = look_at(trainer_place, "the trainer", _state(facts, trainer_place)) + f". {abort}"
        if update["phase"] == "prepared":
            fix += f", `rl-plane complete {update['update_id']}` commits it"
    elif before:
        cause, fix = f"waits for {waits_for}", f"nothing while bytes come; {abort}"
    else:
        cause = f"is decided (phase {update['phase']}), and waits for {waits_for}"
        fix = (
            "wait: it can't be aborted any more. A worker that does not answer leaves within 6 s, and heals later"
        )
    return Finding(name, "update", cause, fix, waits_for, _update_until(facts, update, before))


def _lost_during(facts: KnownFacts, update: Row) -> list[str]:
    """The workers that do not answer, or have left since the update began. A trainer that sends to a group stands still
    with them."""
    silent = [str(row["instance_id"]) for row in facts.rows if row.get("status") == "error"]
    began = update["began_at"] or facts.now
    return silent + [str(one["instance_id"]) for one in facts.left if not one["back"] and one["left_at"] >= began]


def _update_until(facts: KnownFacts, update: Row, before: bool) -> str:
    if (left_s := update["deadline_in_s"]) is not None:
        return in_time(left_s, facts.now) + (", then it is aborted" if before else "")
    if update["idle_limit_s"] is not None:
        return f"{update['idle_limit_s']:.0f} s after the trainer's last call, then it is aborted"
    return ""


def of_ended_update(facts: KnownFacts, entry: Row) -> Finding | None:
    """The finding of an update of the history. None: all is well with it."""
    error, excluded = entry.get("error") or {}, entry.get("excluded") or ()
    name = f"{entry['update_id']} ({entry['label']})"
    failed = [key for key, row in (entry.get("workers") or {}).items() if row.get("status") != "ok"]
    at = f" on {_workers(failed)}" if failed else ""
    if entry["outcome"] == "aborted":
        cause = f"was aborted{at}, and nothing has changed: {error.get('message', 'no reason is known')}"
        return Finding(name, "update", cause, _error_fix(error))
    if error:
        cause = f"is committed{at}, with an error: {error.get('message')}"
        return Finding(name, "update", cause, _error_fix(error))
    behind = {
        row["instance_id"] for row in facts.rows if row.get("status") != "ok" or not row["admission"]["open"]
    }
    out = sorted(set(excluded) & behind)
    if out:
        cause = f"went on without {_workers(out)}, which {'is' if len(out) == 1 else 'are'} not open yet"
        return Finding(name, "update", cause, f"they heal by themselves; else `rl-plane explain {out[0]}`")
    return None


def _error_fix(error: Row) -> str:
    if error.get("code") == CanaryFailed.code:
        return "the weights compute other numbers than they should: see docs/canary.md, and publish correct ones"
    return str(error.get("fix") or "see the log of its trainer and of the worker, then publish again")


# ---- one request ----


def of_request(row: Row, always: bool = False) -> list[Finding]:
    """The finding of a running request. Empty: its tokens come. `always`: also then."""
    since, worker = float(row["since_progress_s"]), row["worker"]
    made = f"{row['tokens']} of at most {row['max_tokens']} tokens"
    if worker is None:
        return [
            Finding(
                row["id"],
                "request",
                f"waits for an open worker since {seconds(row['elapsed_s'])} ({made}, {row['tries']} workers tried)",
                "`rl-plane explain` says why workers are closed",
                waits_for="a worker that is open and has the weights that it demands",
            )
        ]
    if since < SLOW_TOKEN_S and not always:
        return []
    version = f" by {row['version']['label']}" if row["version"] else ""
    cause = f"is on worker {worker}, {made}{version}; its last token came {seconds(since)} ago"
    if not row["tokens"]:
        cause = f"is on worker {worker} since {seconds(since)}, without a token yet"
    return [
        Finding(
            row["id"],
            "request",
            cause,
            f"`rl-plane explain {worker}` says how the worker is; abort it: POST /v1/rl/abort_requests",
            waits_for=f"the next token of worker {worker}",
        )
    ]


# ---- words ----


def _workers(ids: list[str]) -> str:
    more = f" and {len(ids) - 2} more" if len(ids) > 2 else ""
    return f"worker{'s' if len(ids) > 1 else ''} {', '.join(ids[:2])}{more}"


def _state(facts: KnownFacts, place: tuple[str, int] | None) -> str:
    """The state of a process of this machine, in words. Empty: nothing."""
    return facts.processes.get(place, "") if place is not None else ""


def _process(facts: KnownFacts, place: tuple[str, int] | None) -> str:
    said = _state(facts, place)
    return f"; its process {said}" if said else ""


def _said(facts: KnownFacts, caller: str) -> str:
    said = _state(facts, process_of(caller))
    return f", whose process {said}" if said else ""

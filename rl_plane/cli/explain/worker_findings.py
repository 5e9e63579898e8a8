"""Finds why a worker does not serve, or why a request on it does not end. Pure."""

from __future__ import annotations

from rl_plane.cli.explain.finding import Finding
from rl_plane.cli.explain.known_facts import KnownFacts, Row
from rl_plane.cli.explain.wording import STOPPED, in_brackets, look_at, seconds, with_state
from rl_plane.cli.show import left_words
from rl_plane.protocol.generation import ALL_THAT_FITS

SILENT_S = 6.0
"""A worker that answers nothing has left the fleet after this time."""
SLOW_TOKEN_S = 10.0
"""A request without a token for longer is worth a line: a step of a large model takes less than a second."""


def of_worker(facts: KnownFacts, row: Row) -> list[Finding]:
    """The findings of one worker that is in the fleet."""
    instance_id, place = row["instance_id"], facts.place(row["instance_id"])
    where = in_brackets(place)
    if row.get("status") == "error":
        error = row["error"]
        return [
            Finding(
                instance_id,
                "worker",
                f"does not answer{where}: {error['message']}{with_state('; its', facts.process_at(place))}",
                look_at(place, "the worker", facts.process_at(place)),
                waits_for="its answer",
                until=f"after {SILENT_S:.0f} s: then it leaves the fleet, and joins again when it runs",
            )
        ]
    if row.get("status") != "ok" or row["admission"]["open"]:
        return []
    reasons = [str(reason) for reason in row["admission"]["reasons"]]
    words = {reason.partition(":")[0] for reason in reasons}
    for cause, same in (("behind", "starting"), ("numerics", "behind")):
        if cause in words:  # the other reason follows from this one
            reasons = [reason for reason in reasons if reason.partition(":")[0] != same]
    others = any(each.get("status") == "ok" and each["admission"]["open"] for each in facts.rows)
    return [_closed(instance_id, where, reason, others) for reason in reasons]


def _closed(instance_id: str, where: str, reason: str, others: bool) -> Finding:
    """The finding of a closed worker. `others`: other workers are open."""
    word, _, text = reason.partition(":")
    waits_for, fix, until = _REASONS.get(word, ("", "see the log of the worker", ""))
    if word == "behind":
        fix = _behind_fix(text)
    elif word == "numerics" and others:
        fix = (
            "other workers pass with these weights, so look at this one: its engine's version, its GPU. Start it "
            "again; `rl-plane enable ID` lets it check once more"
        )
    named = f": {text.strip()}" if text else ""
    cause = f"is closed{where}: {word}{named}"
    return Finding(instance_id, "worker", cause, fix.replace("ID", instance_id), waits_for, until)


_REASONS: dict[str, tuple[str, str, str]] = {
    "starting": ("NATS to say which version is committed", "wait; if it stays, see its log and NATS", ""),
    "behind": ("the committed weights, which it fetches", "", ""),
    "updating": (
        "every process to learn the decision that was just made",
        "wait; if it stays, `rl-plane explain` again",
        "after 6 s, unless it waits for other workers' scores",
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


def of_departed(facts: KnownFacts, one: Row) -> Finding:
    """The finding of a worker that has left and is not back."""
    place = facts.place(one["instance_id"])
    said = facts.process_at(place)
    cause = f"left {seconds(one['ago_s'])} ago: {left_words(one)}{in_brackets(place)}{with_state('; its', said)}"
    look, again = look_at(place, "the worker", said), "see its log and exit code (`up --restart` starts it again)"
    if one["reason"] == "silent" or said == STOPPED:
        fix = f"{look}. It joins again by itself when it answers"
        return Finding(one["instance_id"], "worker", cause, fix, waits_for="its process to run again")
    fix = f"{look}. If it is dead, {again}" if one["reason"] == "connection" and not said else f"{look}; {again}"
    return Finding(one["instance_id"], "worker", cause, fix, waits_for="a new start")


def of_starting(facts: KnownFacts, one: Row) -> Finding:
    """The finding of a worker that loads its engine."""
    place = (str(one["host"]), int(one["pid"]))
    cause = f"starts since {seconds(one['elapsed_s'])}: {one['phase']}{in_brackets(place)}"
    said = facts.process_at(place)
    fix = f"{look_at(place, 'the worker', said)}, or see its log" if said else "wait, or see its log"
    waits_for = f"its engine ({one['engine']}), in this phase since {seconds(one['in_phase_s'])}"
    return Finding(one["instance_id"], "worker", cause + with_state("; its", said), fix, waits_for=waits_for)


# ---- one request ----


def of_request(row: Row, always: bool = False) -> list[Finding]:
    """Returns the finding of a running request, or none if its tokens come. `always`: returns it then too."""
    since, worker = float(row["since_progress_s"]), row["worker"]
    most = "" if row["max_tokens"] == ALL_THAT_FITS else f" of at most {row['max_tokens']}"
    made = f"{row['tokens']}{most} tokens"
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

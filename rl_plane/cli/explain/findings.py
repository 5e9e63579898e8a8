"""Finds everything that is not as it should be in a fleet. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from rl_plane.cli.explain.finding import Finding
from rl_plane.cli.explain.known_facts import KnownFacts, Row
from rl_plane.cli.explain.update_findings import of_ended_update, of_update
from rl_plane.cli.explain.wording import in_time, look_at, process_of, seconds, with_state
from rl_plane.cli.explain.worker_findings import of_departed, of_request, of_starting, of_worker
from rl_plane.errors import BusUnreachable, NoWorkers

LONG_HELD_S = 5.0
"""A call other than an update holds the lock for milliseconds. Longer is worth a line."""
FRESH_S = 3600.0
"""The last update's failure is shown for so long. Later ones are history."""


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
        found += [of_starting(facts, one) for one in facts.starting]
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
    holder = process_of(lock["owner"])
    said = facts.process_at(holder)
    yield Finding(
        "lock",
        "lock",
        f"has belonged to {lock['owner']} for {seconds(lock['held_s'])}, and no update runs"
        f"{with_state(', whose', said)}",
        look_at(holder, lock["owner"], said) + ". A holder that dies or stands still loses it after 5 s",
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


def _of_size(facts: KnownFacts) -> Iterator[Finding]:
    expected, there = facts.expected(), len(facts.rows) + len(facts.starting)
    gone = {one["instance_id"] for one in facts.left if not one["back"]}
    gone -= {one["instance_id"] for one in facts.starting}
    if expected - there > len(gone):
        yield Finding(
            "fleet",
            "fleet",
            f"has {there} of {expected} workers",
            "start the missing workers, or see their logs",
            waits_for=f"{expected - there} more workers",
        )
    elif there == 0 and facts.state is None and (facts.error or {}).get("code") == NoWorkers.code:
        yield Finding(
            "fleet",
            "fleet",
            "has no worker, and none that starts",
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

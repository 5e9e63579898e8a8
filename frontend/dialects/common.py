"""What every dialect needs to speak for a fleet as if it were one engine."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from frontend.dialects import DialectPlane
from frontend.dialects.dialect_routes import SHOWN, by_worker
from rl_plane.commit.history import read_history
from rl_plane.errors import Conflict, InvalidRequest, Locked, NoWorkers, PlaneError, Unavailable, Unsupported
from rl_plane.protocol.envelope import engine_replies

T = TypeVar("T")

MEMORY = ("weights", "kv_cache")
"""What can be released."""
TRIES = 3
"""Of a question to all workers, each of which has a second to answer."""


NOT_BEGUN: tuple[type[PlaneError], ...] = (Locked, NoWorkers, Unsupported)
"""Errors of a fleet that nobody has sent anything to."""
NOT_POSSIBLE: tuple[type[PlaneError], ...] = (Unsupported,)
"""What is left of them once a part was sent: a fleet that is taken by then, or gone, has lost the update."""


@contextmanager
def begun(harmless: tuple[type[PlaneError], ...] = NOT_BEGUN) -> Iterator[None]:
    """Around what may have begun a transfer. Trainers repeat a call by themselves after most of 5xx, which would enter
    a collective that the others have left: here such a failure is a 409. `harmless`: errors that stay as they are."""
    try:
        yield
    except PlaneError as error:
        if error.http_status < 500 or isinstance(error, harmless):
            raise
        facts = {key: value for key, value in error.facts.items() if key != "retry_after_s"}
        raise Conflict(error.message, **{"cause": error.code, **facts}) from error


async def unretried(work: Awaitable[T]) -> T:
    """prime-rl's client repeats a call ten times after any 5xx: what will never be possible is a 400."""
    try:
        return await work
    except Unsupported as error:
        raise InvalidRequest(error.message, **error.facts) from error


async def let_go(plane: DialectPlane, request_id: str = "") -> None:
    """Resumes the fleet. The error says whom it has left paused, and for how many seconds at most."""
    try:
        await plane.calls.run("resume", {}, request_id)
    except PlaneError as error:
        await tell_paused(plane, error)
        raise


async def tell_paused(plane: DialectPlane, error: PlaneError) -> None:
    """Nobody stays paused silently: each worker resumes by itself at the end of its lease, which the error names."""
    with contextlib.suppress(PlaneError):  # the first error is the one that counts
        rows = (await plane.calls.run("state", {}))["workers"]
        paused = {
            row["instance_id"]: row["pause"]["lease_left_s"]
            for row in rows
            if row["status"] == "ok" and row["pause"]["paused"]
        }
        if paused:
            error.facts["paused_for_s"] = paused
            error.facts.setdefault("fix", "ask once more; each goes on by itself when its time is over")


def joined(reply: dict[str, Any], text: str) -> str:
    """One message of all workers."""
    rows = reply["workers"]
    return by_worker(
        [(row["instance_id"], f"skipped: {row['reason']}" if row["status"] == "skipped" else text) for row in rows]
    )


def skipped(plane: DialectPlane) -> dict[str, Any]:
    """Of a reply: the stages that have nothing to do with it, and why. Empty without any."""
    told = {stage.instance_id: stage.stage for stage in plane.view.snapshot().stages}
    return {"skipped": told} if told else {}


async def served_version(plane: DialectPlane) -> dict[str, Any]:
    """The one version that is served, as `{run, sequence, label, digest}`, by the workers' own words. Unavailable that
    names who doesn't answer, or when there is none; Conflict that names the holders of several."""
    rows = await rows_of_all(plane, "weight_version")
    # While a new worker fetches the weights, it serves none. While nobody serves (a pause), each has a say.
    serving = [row for row in rows if row["admission"]["open"]] or rows
    holders: dict[str, list[str]] = {}
    for row in serving:
        if row["version"] is not None:
            holders.setdefault(row["version"]["label"], []).append(row["instance_id"])
    if len(holders) > 1:
        told = "; ".join(f"{label!r} by {', '.join(ids[:SHOWN])}" for label, ids in holders.items())
        raise Conflict(
            f"the workers hold several versions: {told}", versions=holders, fix="ask again after the update"
        )
    if not holders:
        raise Unavailable("no version is committed yet", retry_after_s=1.0)
    version: dict[str, Any] = next(row["version"] for row in serving if row["version"] is not None)
    return version


async def last_begun(plane: DialectPlane) -> str | None:
    """The id of the fleet's newest update of the base weights, whatever has become of it. An end that is asked for
    again, as its answer was lost, is of this one; of an older one nobody asks any more."""
    client = plane.calls.fleet.client
    for entry in await read_history(client.bus, plane.view.subjects.state):
        if (entry.target or {}).get("kind", "base") == "base":
            return entry.update_id
    return None


def check_label(reply: dict[str, Any], label: str | None) -> None:
    """Of a commit that was asked for again: it keeps the label that it has."""
    has = reply["version"]["label"]
    if label not in (None, has):
        raise Conflict(
            f"the update is committed as {has!r}, and keeps that label",
            field="weight_version",
            version=reply["version"],
            fix="start another update, if one is meant that is not committed",
        )


async def members(plane: DialectPlane) -> list[dict[str, Any]]:
    """Every engine's row of `workers`: what it is, and its state. A worker that did not answer is an error: what is
    told of the fleet is told of all."""
    return await rows_of_all(plane, "workers")


async def rows_of_all(plane: DialectPlane, op: str) -> list[dict[str, Any]]:
    """Of an op that reads. Most clients ask once: a worker that is busy for a moment is asked again."""
    rows: list[dict[str, Any]] = []
    for _ in range(TRIES):
        rows = engine_replies(await plane.calls.run(op, {}))
        silent = [row["instance_id"] for row in rows if row["status"] != "ok"]
        if not silent:
            return rows
    raise Unavailable(
        f"{len(silent)} of {len(rows)} workers did not answer: {', '.join(silent[:SHOWN])}",
        workers=rows,
        retry_after_s=1.0,
    )


async def world_size(plane: DialectPlane) -> int:
    """Ranks of all workers."""
    return sum(int(row["world_size"]) for row in await members(plane))


async def checksum_each(plane: DialectPlane) -> list[dict[str, Any]]:
    """Each worker's row. One after the other, each out of routing while its weights are read; the rest serve."""
    rows: list[dict[str, Any]] = []
    for member in await members(plane):
        asked = {"action": "checksum", "closed": True, "workers": [member["instance_id"]]}
        rows += engine_replies(await plane.calls.run("check_weights", asked))
    return rows


def same_of_all(rows: list[dict[str, Any]], name: str) -> Any:
    """A value that every worker has; Conflict that names who has which, where they differ."""
    held: dict[str, list[str]] = {}
    for row in rows:
        held.setdefault(repr(row.get(name)), []).append(row["instance_id"])
    if len(held) > 1:
        raise Conflict(f"the workers differ in {name}", values=held, field=name)
    return rows[0].get(name) if rows else None


def check_world(asked: int, base: int, ranks: int) -> None:
    """Before anybody is touched: a rendezvous of another size never ends."""
    if asked != base + ranks:
        raise InvalidRequest(
            f"world_size is {asked}; {base} of the trainer and the {ranks} ranks of the fleet are {base + ranks}",
            field="world_size",
            fix=f"ask for the world size again; it is {ranks} now",
        )

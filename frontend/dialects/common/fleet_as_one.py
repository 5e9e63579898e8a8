"""Reads the fleet as if it were one engine, and gives its errors the form that trainers' clients expect."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

from frontend.dialects.common.context import DialectContext
from frontend.server.replies import error_body
from rl_plane.commit.history import read_history
from rl_plane.errors import Conflict, InvalidRequest, Locked, NoWorkers, PlaneError, Unavailable, Unsupported
from rl_plane.protocol.envelope import engine_replies

T = TypeVar("T")

MEMORY = ("weights", "kv_cache")
"""The memory that an engine can release."""
TRIES = 3
"""The number of times that a question goes to all workers. A worker has a second to answer each time."""
SHOWN = 8
"""Workers that one message names. The reply has the rows of all."""


NOT_BEGUN: tuple[type[PlaneError], ...] = (Locked, NoWorkers, Unsupported)
"""Errors that mean that no worker has received anything."""
NOT_POSSIBLE: tuple[type[PlaneError], ...] = (Unsupported,)
"""Errors that still mean it after a part was sent. A locked or empty fleet has lost the update by then."""


# ---- errors ----


def dialect_error(error: PlaneError, elapsed_s: float) -> dict[str, Any]:
    """The facade's error body, with the keys that SGLang's clients read."""
    return {**error_body(error, elapsed_s), "success": False, "message": failure(error)}


def failure(error: PlaneError) -> str:
    """The error's message, and the message of each worker."""
    rows = [row for row in error.facts.get("workers") or () if isinstance(row.get("error"), dict)]
    failures = [(row["instance_id"], str(row["error"].get("message", ""))) for row in rows]
    return " | ".join([error.message, *([by_worker(failures)] if failures else [])])


def by_worker(texts: list[tuple[str, str]]) -> str:
    """One message from the messages of all workers."""
    parts = [f"{instance_id}: {text}" for instance_id, text in texts[:SHOWN]]
    return " | ".join([*parts, *([f"and {len(texts) - SHOWN} more"] if len(texts) > SHOWN else [])])


def joined(reply: dict[str, Any], text: str) -> str:
    """One message from a reply: `text` for each worker that did the work, and the reason of each that skipped it."""
    rows = reply["workers"]
    return by_worker(
        [(row["instance_id"], f"skipped: {row['reason']}" if row["status"] == "skipped" else text) for row in rows]
    )


@contextmanager
def begun(harmless: tuple[type[PlaneError], ...] = NOT_BEGUN) -> Iterator[None]:
    """Surrounds work that may have begun a transfer, and turns its 5xx errors into 409. Trainers repeat a call after
    most 5xx, and would enter a collective that the other ranks have left. `harmless`: errors that stay as they are."""
    try:
        yield
    except PlaneError as error:
        if error.http_status < 500 or isinstance(error, harmless):
            raise
        facts = {key: value for key, value in error.facts.items() if key != "retry_after_s"}
        raise Conflict(error.message, **{"cause": error.code, **facts}) from error


async def unretried(work: Awaitable[T]) -> T:
    """Turns `Unsupported` into a 400: prime-rl's client repeats a call ten times after any 5xx."""
    try:
        return await work
    except Unsupported as error:
        raise InvalidRequest(error.message, **error.facts) from error


def refuse_kernel_format(field: str) -> NoReturn:
    """Raises InvalidRequest. `field`: the field that asks for this format."""
    raise InvalidRequest(
        "weights in an engine's kernel format are not supported here",
        field=field,
        fix="send the checkpoint's format",
    )


# ---- pause ----


async def resume_fleet(context: DialectContext, request_id: str = "") -> None:
    """Resumes the fleet. An error names the workers that stay paused, and for how many seconds at most."""
    try:
        await context.calls.run("resume", {}, request_id)
    except PlaneError as error:
        await tell_paused(context, error)
        raise


async def tell_paused(context: DialectContext, error: PlaneError) -> None:
    """Adds the paused workers to the error. Each worker resumes by itself at the end of its lease."""
    with contextlib.suppress(PlaneError):  # the caller's error matters more than this one
        rows = (await context.calls.run("state", {}))["workers"]
        paused = {
            row["instance_id"]: row["pause"]["lease_left_s"]
            for row in rows
            if row["status"] == "ok" and row["pause"]["paused"]
        }
        if paused:
            error.facts["paused_for_s"] = paused
            error.facts.setdefault("fix", "ask once more; each worker resumes by itself at the end of its lease")


# ---- reading ----


def skipped(context: DialectContext) -> dict[str, Any]:
    """The part of a reply that names the pipeline stages that skip the op, and why. Empty without stages."""
    stages = {stage.instance_id: stage.pipeline_stage for stage in context.view.snapshot().pipeline_stages}
    return {"skipped": stages} if stages else {}


async def served_version(context: DialectContext) -> dict[str, Any]:
    """The one version that the workers say they serve, as `{run, sequence, label, digest}`.

    Raises Unavailable: a worker does not answer (named), or no version is committed yet. Raises Conflict: the workers
    hold several versions; it names the holders of each."""
    rows = await rows_of_all(context, "weight_version")
    # A new worker that still fetches the weights serves none. During a pause no worker serves, and all count.
    serving = [row for row in rows if row["admission"]["open"]] or rows
    holders: dict[str, list[str]] = {}
    for row in serving:
        if row["version"] is not None:
            holders.setdefault(row["version"]["label"], []).append(row["instance_id"])
    if len(holders) > 1:
        each = "; ".join(f"{label!r} by {', '.join(ids[:SHOWN])}" for label, ids in holders.items())
        raise Conflict(
            f"the workers hold several versions: {each}", versions=holders, fix="ask again after the update"
        )
    if not holders:
        raise Unavailable("no version is committed yet", retry_after_s=1.0)
    version: dict[str, Any] = next(row["version"] for row in serving if row["version"] is not None)
    return version


async def last_begun(context: DialectContext) -> str | None:
    """The id of the fleet's newest update of the base weights, whatever its outcome. A client that lost the answer to
    an end asks for this update again, and never for an older one."""
    for entry in await read_history(context.bus, context.state):
        if (entry.target or {}).get("kind", "base") == "base":
            return entry.update_id
    return None


def check_label(reply: dict[str, Any], label: str | None) -> None:
    """Refuses another label for a commit that was repeated: the version has its label already."""
    has = reply["version"]["label"]
    if label not in (None, has):
        raise Conflict(
            f"the update is committed as {has!r}, and keeps that label",
            field="weight_version",
            version=reply["version"],
            fix="start another update, if one is meant that is not committed",
        )


async def members(context: DialectContext) -> list[dict[str, Any]]:
    """Every engine's row of `workers`: what it is, and its state. Raises if a worker does not answer, because the
    dialect answers for the whole fleet."""
    return await rows_of_all(context, "workers")


async def rows_of_all(context: DialectContext, op: str) -> list[dict[str, Any]]:
    """Every engine's row of an op that reads. Most clients ask only once, so this asks a busy worker again."""
    rows: list[dict[str, Any]] = []
    for _ in range(TRIES):
        rows = engine_replies(await context.calls.run(op, {}))
        silent = [row["instance_id"] for row in rows if row["status"] != "ok"]
        if not silent:
            return rows
    raise Unavailable(
        f"{len(silent)} of {len(rows)} workers did not answer: {', '.join(silent[:SHOWN])}",
        workers=rows,
        retry_after_s=1.0,
    )


async def world_size(context: DialectContext) -> int:
    """The number of ranks of all workers."""
    return sum(int(row["world_size"]) for row in await members(context))


async def checksum_each(context: DialectContext, **scope: Any) -> list[dict[str, Any]]:
    """Each worker's row of a checksum. One worker after the other leaves routing while it reads its weights. `scope`:
    other fields of `check_weights`."""
    rows: list[dict[str, Any]] = []
    for member in await members(context):
        asked = {"action": "checksum", "closed": True, "workers": [member["instance_id"]], **scope}
        rows += engine_replies(await context.calls.run("check_weights", asked))
    return rows


def same_of_all(rows: list[dict[str, Any]], name: str) -> Any:
    """A value that every worker has. Conflict names the workers of each value, where they differ."""
    held: dict[str, list[str]] = {}
    for row in rows:
        held.setdefault(repr(row.get(name)), []).append(row["instance_id"])
    if len(held) > 1:
        raise Conflict(f"the workers differ in {name}", values=held, field=name)
    return rows[0].get(name) if rows else None


def check_world(asked: int, base: int, ranks: int) -> None:
    """Checks the size of a group before any rank joins: a rendezvous of another size never ends."""
    if asked != base + ranks:
        raise InvalidRequest(
            f"world_size is {asked}; {base} of the trainer and the {ranks} ranks of the fleet are {base + ranks}",
            field="world_size",
            fix=f"ask for the world size again; it is {ranks} now",
        )

"""What an update does next: the pure half of the coordinator. Answers in, decisions out.

    states → PREPARE on all → decide (record, under the fence) → GATE → COMMIT → OPEN
                    └ any failure (policy abort) → ABORT on all, and nothing has changed anywhere

`coordinator.py` sends, waits and writes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rl_plane.errors import InvalidRequest, NoWorkers, PlaneError, Unsupported, UpdateAborted
from rl_plane.ops import UpdatePolicy
from rl_plane.rows import WorkerRow


@dataclass(frozen=True, slots=True)
class Prepared:
    """Enough workers hold the same verified bytes."""

    digest: str
    ready: dict[str, str]
    """instance_id → incarnation."""
    excluded: list[str]
    refetchable: bool


def closed(states: Sequence[WorkerRow]) -> set[str]:
    """Those that say that they take no generation requests now: they can't fail an update."""
    return {row.instance_id for row in states if row.status == "ok" and not row.body["admission"]["open"]}


def judge_prepare(
    rows: Sequence[WorkerRow], counted: set[str], policy: UpdatePolicy, stated_digest: str | None
) -> Prepared:
    """Whether the update may be decided, else the error that it ends with.

    `counted`: whose failure matters (one that was excluded before can't fail a later update)."""
    ready = {row.instance_id: row for row in rows if row.status == "ok"}
    failed = [row for row in rows if row.status != "ok"]
    digests = Counter(row.body["digest"] for row in ready.values())
    if len(digests) > 1:
        raise UpdateAborted(
            "the workers received different bytes: "
            + ", ".join(f"{digest} on {count}" for digest, count in digests.most_common()),
            fix="was the source still being written? publish it under a new path",
        )
    blocking = [row for row in failed if row.instance_id in counted]
    if not ready or (blocking and policy.on_prepare_failure == "abort"):
        raise prepare_error(blocking or failed, len(rows))
    if len(ready) < policy.min_ready:
        raise UpdateAborted(
            f"{len(ready)} workers prepared the update, policy.min_ready asks for {policy.min_ready}",
            field="policy.min_ready",
        )
    digest = next(iter(digests))
    if stated_digest is not None and digest != stated_digest:
        raise UpdateAborted(f"the workers received {digest}, the caller stated {stated_digest}", field="digest")
    return Prepared(
        digest,
        {key: row.incarnation for key, row in ready.items()},
        [row.instance_id for row in failed],
        all(row.body["refetchable"] for row in ready.values()),
    )


def prepare_error(failed: Sequence[WorkerRow], asked: int) -> PlaneError:
    """The update's error, made from its workers' errors: the caller's fault is told as such."""
    errors = [row.error for row in failed if row.error is not None]
    if not errors:
        return NoWorkers("no worker is left to prepare the update", retry_after_s=1.0)
    for kind in (InvalidRequest, Unsupported):
        mine = [error for error in errors if isinstance(error, kind)]
        if mine and (kind is InvalidRequest or len(mine) == len(errors)):
            return type(mine[0])(mine[0].message, **mine[0].facts)
    first = failed[0]
    return UpdateAborted(
        f"{len(failed)} of {asked} workers could not prepare the update, so it was undone on all: "
        f"{first.instance_id}: {errors[0].message}",
        fix="repeat it, or exclude them with policy.on_prepare_failure=exclude",
    )


def still_there(ready: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Of those that prepared, the ones that are still the same process."""
    return [key for key, incarnation in ready.items() if now.get(key) == incarnation]

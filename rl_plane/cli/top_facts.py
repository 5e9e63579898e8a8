"""The facts that `rl-plane top` shows, and what follows from two of them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Reply = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class WorkCounts:
    """The counts of each worker at one time."""

    at: float
    """Monotonic seconds."""
    made: Mapping[tuple[str, str], tuple[str, int, int]]
    """(instance_id, incarnation) → the label of its version, and since its process started: the tokens, and the
    requests that have ended."""

    @classmethod
    def of(cls, state: Reply, at: float) -> WorkCounts:
        made = {}
        for row in state["workers"]:
            if (count := row.get("tokens_made")) is not None:
                label = str((row.get("version") or {}).get("label", "no version"))
                made[row["instance_id"], row["incarnation"]] = label, int(count), int(row["requests_ended"])
        return cls(at, made)


@dataclass(frozen=True, slots=True)
class Rates:
    """The work per second of the workers of one version, or of all."""

    tokens: float = 0.0
    rollouts: float = 0.0
    """Requests that ended."""

    def __add__(self, other: Rates) -> Rates:
        return Rates(self.tokens + other.tokens, self.rollouts + other.rollouts)


def rates_by_version(before: WorkCounts, after: WorkCounts) -> dict[str, Rates]:
    """Label of a version → what its workers made per second between two counts. A worker that has changed its version
    meanwhile counts for the new one."""
    seconds = after.at - before.at
    rates: dict[str, Rates] = {}
    for worker, (label, tokens, ended) in after.made.items():
        if seconds > 0 and worker in before.made:
            _, tokens_before, ended_before = before.made[worker]
            more = Rates(max(0, tokens - tokens_before) / seconds, max(0, ended - ended_before) / seconds)
            rates[label] = rates.get(label, Rates()) + more
    return rates


@dataclass(frozen=True, slots=True)
class TopFacts:
    """All that one screen shows."""

    url: str
    """The frontend's address."""
    clock: str
    """The time of day, in words."""
    state: Reply | None = None
    """The newest reply of the op `state`. None: none has come yet."""
    lost_since: str | None = None
    """The time of day at which the frontend stopped to answer. None: it answers."""
    lost_s: float = 0.0
    why: str = ""
    """The error of the last call, if the frontend does not answer."""
    rates: Mapping[str, Rates] | None = None
    """The result of `rates_by_version`. None: there is only one count yet."""
    events: Sequence[str] = field(default=())
    """The last events in words, oldest first."""


def version_lag(state: Reply, row: Reply) -> int | None:
    """The versions by which a worker is behind the committed one. None: one of the two is not known."""
    committed, held = state.get("sequence"), row.get("sequence")
    return max(0, committed - held) if committed is not None and held is not None else None


def seconds_left(state: Reply) -> float | None:
    """The seconds until the workers have all bytes of the running update, at their present rates. None: not known."""
    update = state.get("update")
    if update is None or not update["total_bytes"]:
        return None
    left = []
    for row in state["workers"]:
        one = row.get("update")
        if not one or one["update_id"] != update["update_id"] or not one["total_bytes"]:
            continue
        missing = one["total_bytes"] - one["bytes"]
        if missing > 0 and not one["bytes_per_s"]:
            return None
        left.append(missing / one["bytes_per_s"] if missing > 0 else 0.0)
    if left:
        return max(left)
    missing = update["total_bytes"] - update["bytes"]
    return missing / update["bytes_per_s"] if update["bytes_per_s"] else None


def in_order(state: Reply) -> list[Reply]:
    """Returns the workers in the order of the screen: first the workers that need a look, then by instance id."""

    def looks_well(row: Reply) -> bool:
        return row.get("status") == "ok" and bool(row["admission"]["open"]) and not version_lag(state, row)

    return sorted(state["workers"], key=lambda row: (looks_well(row), row["instance_id"]))

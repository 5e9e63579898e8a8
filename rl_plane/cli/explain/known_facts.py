"""The facts that an explanation is made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class KnownFacts:
    """The facts that were read for one explanation. A part that did not come is empty, and `missing` says why."""

    asked: str
    """The place that was asked, such as `the frontend at http://127.0.0.1:8002`."""
    now: float
    """Unix seconds on this machine."""
    about: Row | None = None
    """`GET /v1/rl/about`."""
    state: Row | None = None
    """The reply of the op `state`."""
    error: Row | None = None
    """The error of the op `state`, as on the wire. For an empty fleet, `left` names the workers that it has lost, and
    `starting` names the workers that load their engines."""
    workers: Mapping[str, Row] = field(default_factory=dict)
    """instance_id → the row of the op `workers`, with host and pid."""
    updates: Sequence[Row] = ()
    """The history, newest first."""
    events: Sequence[tuple[str, Row]] = ()
    """(kind, data) of the events of the last hour, oldest first."""
    requests: Sequence[Row] = ()
    """The requests that run through this frontend."""
    records: Sequence[Row] = ()
    """Recorded rollouts of the request that is asked for."""
    processes: Mapping[tuple[str, int], str] = field(default_factory=dict)
    """(host, pid) → what this machine says of the process, such as `is stopped (SIGSTOP)`. Only for this machine."""
    wanted: int = 0
    """The number of workers that the operator expects. 0: as many as the frontend expects."""
    missing: Mapping[str, Row] = field(default_factory=dict)
    """A part that could not be read → its error, as on the wire."""

    @property
    def rows(self) -> Sequence[Row]:
        """The workers' rows of `state`."""
        return self.state["workers"] if self.state is not None else ()

    @property
    def update(self) -> Row | None:
        """The update that runs."""
        return self.state.get("update") if self.state is not None else None

    @property
    def left(self) -> Sequence[Row]:
        """The workers that left in the last hour, newest first."""
        found = self.state or self.error or {}
        return found.get("left") or ()

    @property
    def starting(self) -> Sequence[Row]:
        """The workers that load their engines. They are no members yet."""
        found = self.state or self.error or {}
        return found.get("starting") or ()

    def expected(self) -> int:
        """The number of workers that should be there. 0: any number will do."""
        return self.wanted or int((self.state or {}).get("expected") or (self.about or {}).get("expected") or 0)

    def place(self, instance_id: str) -> tuple[str, int] | None:
        """Host and pid of a worker that is here or has left. None: not known."""
        row = self.workers.get(instance_id) or next(
            (one for one in (*self.starting, *self.left) if one["instance_id"] == instance_id), None
        )
        if row is None or not row.get("host") or not row.get("pid"):
            return None
        return str(row["host"]), int(row["pid"])

    def process_at(self, place: tuple[str, int] | None) -> str:
        """The state of a process of this machine, in words. Empty: it runs, or nothing is known."""
        return self.processes.get(place, "") if place is not None else ""

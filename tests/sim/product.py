"""What the simulation reads from inside the product, in one place: its checks look at nothing else of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from rl_plane.bus import Entry
from rl_plane.record import DecisionRecord
from rl_plane.versions import WeightVersion
from rl_plane.wire import Request
from worker.worker import Worker

__all__ = [
    "Decision",
    "Entry",
    "closed",
    "decided_by",
    "holds",
    "incarnation",
    "instance_id",
    "is_paused",
    "known_to",
    "staged_in",
    "watch_ops",
]


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision of the fleet, whoever wrote its record last."""

    run: str
    sequence: int
    label: str
    update_id: str
    base: WeightVersion
    adapters: Mapping[str, WeightVersion] = field(default_factory=dict, hash=False)
    before: WeightVersion | None = None
    """While a rolling update goes on: what may be served beside it."""

    @property
    def key(self) -> tuple[str, int, str, str]:
        return self.run, self.sequence, self.update_id, self.base.digest

    def __str__(self) -> str:
        return f"{self.sequence} {self.label}"


def decided_by(data: bytes) -> tuple[Decision, bool]:
    """The decision that a record tells of, and whether it is open."""
    return _decision(DecisionRecord.decode(data))


def _decision(record: DecisionRecord) -> tuple[Decision, bool]:
    version = record.version
    return Decision(version.run, version.sequence, version.label, record.update_id, version), record.open


def known_to(worker: Worker) -> Decision | None:
    """The newest decision that this worker has learnt."""
    record = worker._follower._record
    return _decision(record)[0] if record is not None else None


def staged_in(worker: Worker) -> str | None:
    """The update whose bytes it receives or holds beside the served ones."""
    return worker._updates.busy_with


def holds(worker: Worker) -> tuple[WeightVersion | None, str | None]:
    """The version and digest of the weights that it says are in its engine."""
    return worker.state.version, worker.state.digest


def incarnation(worker: Worker) -> str:
    return worker.state.incarnation


def instance_id(worker: Worker) -> str:
    return worker.state.instance_id


def closed(worker: Worker) -> Mapping[str, str]:
    """Why it is closed: reason → detail."""
    return dict(worker.state.closed)


def is_paused(worker: Worker) -> bool:
    return worker.state.pause_mode is not None


_REQUEST: ContextVar[Request] = ContextVar("request")


def watch_ops(worker: Worker, doing: Callable[[Request], None]) -> None:
    """Tells of each changing op that the dispatcher has let in, just before it is carried out."""
    dispatcher: Any = worker._dispatcher
    change, handlers = dispatcher._change, dispatcher._handlers

    async def watched_change(request: Request, body: Any) -> Any:
        _REQUEST.set(request)
        return await change(request, body)

    def watched(handler: Any) -> Any:
        def handle(body: Any, fence: int) -> Any:
            if fence:
                doing(_REQUEST.get())
            return handler(body, fence)

        return handle

    dispatcher._change = watched_change
    dispatcher._handlers = {op: watched(handler) for op, handler in handlers.items()}

"""What the simulation reads from inside the product, in one place: its checks look at nothing else of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from rl_plane.client import RlClient
from rl_plane.generation import VersionSpan
from rl_plane.record import DecisionRecord, Held
from rl_plane.versions import WeightVersion
from rl_plane.wire import Request
from worker.engines.fake import FakeEngine
from worker.worker import Worker


@dataclass(frozen=True)
class Decision:
    """One decision of the fleet, whoever wrote its record last."""

    run_number: int
    run: str
    made: WeightVersion
    update_id: str
    held: Held
    before: Held | None
    """Of a rolling update, while it goes on: what may be served beside it."""

    @property
    def key(self) -> tuple[str, int, str, str]:
        return self.run, self.made.sequence, self.update_id, self.made.digest

    @property
    def sequence(self) -> int:
        return self.made.sequence

    def __str__(self) -> str:
        return f"{self.made.sequence} {self.made.label}"


def decision_of(record: DecisionRecord) -> Decision:
    return Decision(
        record.run_number,
        record.version.run,
        record.made,
        record.update_id,
        record.held,
        record.rolling_from,
    )


def known_to(worker: Worker) -> Decision | None:
    """The newest decision that this worker has learnt."""
    record = worker.core.record
    return decision_of(record) if record is not None else None


def known_to_client(client: RlClient) -> list[Decision]:
    """The newest that the views of a frontend or a trainer have learnt."""
    views = client._views.values()
    return [decision_of(view.record) for view in views if view.record is not None]


def staged_in(worker: Worker) -> str | None:
    """The update whose bytes it receives or holds beside the served ones."""
    return worker._updates.busy_with


def holds(worker: Worker) -> Held | None:
    """What it says is in its engine; None: nothing of a known version."""
    state = worker.state
    if state.version is None or state.digest != state.version.digest:
        return None
    return Held(state.version, dict(state.adapters))


def in_engine(engine: FakeEngine, adapter: str | None) -> tuple[Held | None, str]:
    """What its labels say is in an engine, and what is wrong with that, by its bytes."""
    version, weights = engine._version, engine._weights
    if version is None or weights is None:
        return None, "weights of no version"
    if version.digest != weights.digest:
        return None, f"{weights.digest}, which it calls {version.label}"
    adapters = {name: one.version for name, one in engine._adapters.items() if one.version is not None}
    mine = engine._adapters.get(adapter) if adapter is not None else None
    if mine is not None and (mine.version is None or mine.version.digest != mine.digest):
        return None, f"an adapter {mine.digest}, which it calls {mine.version}"
    return Held(version, adapters), ""


def made_by(span: VersionSpan) -> tuple[WeightVersion, str | None, WeightVersion | None]:
    """The base version, the adapter's name and its version."""
    assert span.run is not None
    assert span.sequence is not None
    assert span.digest is not None
    base = WeightVersion(span.run, span.sequence, span.version, span.digest)
    one = span.adapter
    if one is None:
        return base, None, None
    return base, one.name, WeightVersion(span.run, one.sequence, one.version, one.digest)


def incarnation(worker: Worker) -> str:
    return worker.state.incarnation


def instance_id(worker: Worker) -> str:
    return worker.state.instance_id


def closed(worker: Worker) -> Mapping[str, str]:
    """Why it is closed: reason → detail."""
    return {str(reason): detail for reason, detail in worker.state.closed.items()}


def is_paused(worker: Worker) -> bool:
    return worker.state.pause_mode is not None


def label_in(request: Request) -> str | None:
    """Of the decision that an op carries: it may be an earlier one, which a coordinator finishes first."""
    label: str | None = request.body.get("record", {}).get("made", {}).get("label")
    return label


REQUEST: ContextVar[Request | None] = ContextVar("request", default=None)
"""The changing op that is being carried out."""


def watch_ops(worker: Worker, doing: Callable[[Request], None]) -> None:
    """Tells of each changing op that the dispatcher has let in, just before it is carried out."""
    dispatcher: Any = worker._dispatcher
    change, handlers = dispatcher._change, dispatcher._handlers

    async def watched_change(request: Request, body: Any) -> Any:
        REQUEST.set(request)
        outcome = change(request, body)
        return outcome if isinstance(outcome, Mapping) else await outcome

    def watched(handler: Any) -> Any:
        def handle(body: Any, fence: int) -> Any:
            request = REQUEST.get()
            if fence and request is not None:
                doing(request)
            return handler(body, fence)

        return handle

    dispatcher._change = watched_change
    dispatcher._handlers = {op: watched(handler) for op, handler in handlers.items()}

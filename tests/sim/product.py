"""Everything that the simulation reads from inside the product. Its checks look at nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from rl_plane.client import RlClient
from rl_plane.protocol.canary import CanaryRecord, Sequences, Vectors
from rl_plane.protocol.envelope import Request
from rl_plane.protocol.generation import VersionSpan
from rl_plane.protocol.record import DecisionRecord, Held, VersionSource
from rl_plane.protocol.versions import WeightVersion
from worker.engines.fake.adapter import FakeEngine, fake_prompt_logprobs
from worker.receive.weight_receiver import Receiver
from worker.worker import Worker


@dataclass(frozen=True)
class Decision:
    """One decision of the fleet, without the writer of its record."""

    run_number: int
    run: str
    made: WeightVersion
    update_id: str
    held: Held
    before: Held | None
    """During a rolling update: the state before, which may be served too."""
    missed: bool
    """Whether it brings the version before back, because every worker failed the canary of the update's version."""
    fence: int
    seal: int
    barred: int
    canary: CanaryRecord | None
    sources: tuple[tuple[str, VersionSource], ...]
    """Digest → whence it can be fetched: of the base and of each adapter, and of what their deltas change."""

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
        record.missed is not None,
        record.fence,
        record.seal,
        record.barred,
        record.canary,
        tuple(
            link
            for version, source in [
                (record.version, record.source),
                *((one.version, one.source) for one in record.adapters.values()),
            ]
            for link in source.chain(version.digest)
        ),
    )


def can_be_fetched(decision: Decision, digest_at: Callable[[str | None], str | None]) -> bool:
    """Can a worker that has nothing bring the version to itself? `digest_at`: of the model that lies under a path now
    (None: the model that a worker starts with); None where no model lies."""
    for digest, source in decision.sources:
        path = source.transport.get("path") if source.transport is not None else None
        if not source.refetchable or digest_at(path) not in (None, digest):
            return False
    return True


def vectors_of(digest: str, sequences: Sequences) -> Vectors:
    """The vectors that a correct engine gives for these sequences."""
    rows = (fake_prompt_logprobs(digest, list(tokens))[1:] for tokens in sequences)
    return tuple(tuple(value for value in row if value is not None) for row in rows)


def near(one: Vectors, other: Vectors) -> bool:
    pairs = zip(one, other, strict=True)
    return all(abs(a - b) < 0.01 for left, right in pairs for a, b in zip(left, right, strict=True))


def opened_as(receiver: Receiver, staging: str) -> tuple[Any, Any] | None:
    """The transport and the delivery of what is opened under this name. None: nothing is, or the worker's own copy."""
    request, delivery = receiver.opened.get(staging, (None, None))
    if request is None or request.transport is None:
        return None
    return receiver.transports[request.transport.backend], delivery


def watch_staging(worker: Worker, told: Callable[[str], None]) -> None:
    """Reports each update that a coordinator has had staged."""
    updates: Any = worker.updates
    tell = updates.on_change

    def watched(staging: Any) -> None:
        if staging is not None and staging.fence is not None:
            told(staging.request.update_id)
        tell(staging)

    updates.on_change = watched


def known_to(worker: Worker) -> Decision | None:
    """The newest decision that this worker has learnt."""
    record = worker.core.record
    return decision_of(record) if record is not None else None


def known_to_client(client: RlClient) -> list[Decision]:
    """The newest that the views of a frontend or a trainer have learnt."""
    views = client.views
    return [decision_of(view.record) for view in views if view.record is not None]


def staged_in(worker: Worker) -> str | None:
    """The update whose bytes it receives or holds beside the served ones."""
    return worker.updates.busy_with


def holds(worker: Worker) -> Held | None:
    """The weights that the worker reports in its engine. None: of no known version."""
    state = worker.state
    if state.version is None or state.digest != state.version.digest:
        return None
    return Held(state.version, dict(state.adapters))


def in_engine(engine: FakeEngine, adapter: str | None) -> tuple[Held | None, str]:
    """The weights in an engine by its labels, and an error if its bytes are others."""
    version, weights = engine.version, engine.weights
    if version is None or weights is None:
        return None, "weights of no version"
    if version.digest != weights.digest:
        return None, f"{weights.digest}, which it calls {version.label}"
    adapters = {name: one.version for name, one in engine.adapters.items() if one.version is not None}
    mine = engine.adapters.get(adapter) if adapter is not None else None
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
    """The label of the decision in an op. It may be an earlier one, which a coordinator finishes first."""
    label: str | None = request.body.get("record", {}).get("made", {}).get("label")
    return label


REQUEST: ContextVar[Request | None] = ContextVar("request", default=None)
"""The changing op that is being carried out."""


def watch_ops(worker: Worker, doing: Callable[[Request], None]) -> None:
    """Reports each changing op that the dispatcher has let in, just before it is carried out."""
    dispatcher: Any = worker.dispatcher
    change, handlers = dispatcher._change, dispatcher.handlers

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
    dispatcher.handlers = {op: watched(handler) for op, handler in handlers.items()}

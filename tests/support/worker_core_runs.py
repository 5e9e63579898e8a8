"""Records, workers and steps for tests of the core of a worker."""

from __future__ import annotations

from rl_plane.protocol.record import (
    CommittedAdapter,
    DecisionRecord,
    VersionSource,
)
from rl_plane.protocol.versions import WeightVersion
from worker.reconcile.instructions import (
    Drop,
    Fetch,
    Instruction,
    Relabel,
    StagedVersion,
    Swap,
    Unload,
)
from worker.reconcile.worker_core import WorkerCore
from worker.reconcile.worker_state import WorkerState

RUN, MODEL = "run-1", "d0"
LINE = ("server", 1)
"""The connection on which the leader answers."""


def version(sequence: int, digest: str = "", run: str = RUN) -> WeightVersion:
    return WeightVersion(run, sequence, f"step_{sequence}", digest or f"d{sequence}")


def source(sequence: int, refetchable: bool = True) -> VersionSource:
    return VersionSource({"backend": "filesystem", "path": f"/{sequence}"}, refetchable=refetchable)


def first(digest: str = MODEL, run: str = RUN, run_number: int = 0) -> DecisionRecord:
    made = version(0, digest, run)
    return DecisionRecord(made, VersionSource(None), "", made, run_number=run_number)


def after(
    base: DecisionRecord,
    *,
    digest: str = "",
    open: bool = False,
    rolling: bool = False,
    refetchable: bool = True,
    load: str | None = None,
    unload: str | None = None,
) -> DecisionRecord:
    """Makes the next decision: on the base, or on one adapter."""
    made = version(base.sequence + 1, digest, base.version.run)
    adapters = dict(base.adapters)
    whence = source(made.sequence, refetchable)
    if load is not None:
        adapters[load] = CommittedAdapter(made, whence)
    if unload is not None:
        del adapters[unload]
    is_base = load is None and unload is None
    return DecisionRecord(
        made if is_base else base.version,
        whence if is_base else base.source,
        f"u{made.sequence}",
        made,
        adapters,
        base.run_number,
        base.held if rolling else None,
        open=open or rolling,
        decided_at=0.0,
    )


R0 = first()
R1 = after(R0)
R2 = after(R1)


def fresh(model: str = MODEL) -> WorkerCore:
    return WorkerCore(WorkerState("w", "i", digest=model), model)


def reasons(core: WorkerCore) -> dict[str, str]:
    return {str(reason): detail for reason, detail in core.state.closed.items()}


def valid(core: WorkerCore) -> None:
    """Checks the invariants, which hold after every event."""
    state, record = core.state, core.record
    if not state.closed:
        assert record is not None
        assert state.sequence is not None
        assert state.version is not None
        held = (state.version, dict(state.adapters))
        old = record.rolling_from
        committed = (record.version, dict(record.held.adapters))
        assert held == committed or (old is not None and held == (old.version, dict(old.adapters)))
        if held == committed:
            assert state.sequence == record.sequence
    if state.digest is None:
        assert "behind" in state.closed
    assert bool(state.released) == ("memory" in state.closed)
    assert (state.digest is None) == (state.version is None) or (state.digest, state.sequence) == (
        core.model_digest,
        None,
    )


def serving(*records: DecisionRecord, now: float = 0.0) -> WorkerCore:
    """Makes a worker that has followed these records and holds the last."""
    core = fresh()
    for written, record in enumerate(records or (R0,), 1):
        assert core.learnt(record.opened(), written, now)
        hold(core, now)
    assert not core.state.closed
    return core


def hold(core: WorkerCore, now: float) -> None:
    """Carries out all instructions, successfully."""
    for _ in range(20):
        did = core.next(now)
        valid(core)
        if not act(core, did, now):
            return
        valid(core)
    raise AssertionError("it finds no end")


def act(core: WorkerCore, did: Instruction, now: float) -> bool:
    match did:
        case Fetch(update_id, name, made):
            core.is_staged(StagedVersion(update_id, name, made.digest, None))
        case Drop():
            core.is_staged(None)
        case Relabel(record):
            core.relabelled(record)
        case Swap() | Unload():
            core.swapping(did)
            valid(core)
            core.swapped(did, now)
        case _:
            return False
    return True


def gone(core: WorkerCore, fence: int, held: bool, waiting_for: str | None) -> str | None:
    """Returns the update that the worker drops, by the leader's lock and session."""
    if core.coordinator_holds(fence, held, 0.0):
        return None
    given_up = core.given_up(waiting_for)
    return given_up.update_id if given_up is not None else None


def stage(core: WorkerCore, record: DecisionRecord, fence: int = 5) -> None:
    """Notes that a coordinator has prepared the update here."""
    name = next((name for name, one in record.adapters.items() if one.version == record.made), None)
    core.is_staged(StagedVersion(record.update_id, name, record.made.digest, fence))

"""Changes of a worker's engine, with a stand-in for the engine: who may make them, and how they end early."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from rl_plane.errors import StaleFence, UpdateAborted
from rl_plane.protocol.record import DecisionRecord, VersionSource, first_record
from rl_plane.protocol.update_requests import AbortUpdate, Commit, ReceiveRequest, Transport
from rl_plane.protocol.versions import WeightVersion
from worker.reconcile.coordinator_calls import CoordinatorCalls
from worker.reconcile.engine_changes import EngineChanges
from worker.reconcile.staged_updates import WeightUpdates
from worker.reconcile.worker_core import WorkerCore
from worker.reconcile.worker_state import WorkerState
from worker.runtime.engine_loop import EngineLoop
from worker.runtime.engine_watch import EngineWatch

BOUND_S = 30.0
OLD, NEW = "xxh3:" + "0" * 32, "xxh3:" + "1" * 32
NOTHING: Any = None


def changes_of(state: WorkerState) -> EngineChanges:
    core = WorkerCore(state, "model")
    return EngineChanges(core, NOTHING, NOTHING, NOTHING, NOTHING, lambda: None)


async def test_a_coordinator_that_was_replaced_while_it_waited_is_refused() -> None:
    """The dispatcher accepted the op, because its fence was live then."""
    state = WorkerState("0" * 16, "me", fence=5)
    one = changes_of(state)
    turns: list[int] = []

    async def change(fence: int) -> None:
        async with one.turn(fence):
            turns.append(fence)

    async with one.changing:
        waiting = asyncio.create_task(change(5))
        await asyncio.sleep(0)
        state.fence = 7  # the news of the next holder of the lock
    with pytest.raises(StaleFence):
        await waiting
    await change(7)
    assert turns == [7]


class StandIn:
    """An engine that is paused, and whose weights come, when the test lets them."""

    def __init__(self) -> None:
        self.receiver = self
        self.pausing, self.idle = asyncio.Event(), asyncio.Event()
        self.paused = False
        self.asked = threading.Event()
        self.may_answer = threading.Event()
        self.may_answer.set()

    async def pause(self, mode: str, clear_cache: bool) -> bool:
        self.pausing.set()
        if mode == "wait":
            await self.idle.wait()
        self.paused = True
        return False

    async def resume(self) -> None:
        self.paused = False

    async def swap(self, staging: str, version: WeightVersion, keep_kv: bool = False) -> bool:
        return True

    def set_version(self, version: WeightVersion) -> None:
        """Labels only."""

    def open(self, *asked: object) -> None:
        """There is nothing to check."""

    def receive(self, staging: str, cancelled: object) -> dict[str, Any]:
        return {"digest": NEW, "tensors": 1, "bytes": 1, "refetchable": True}

    def received(self) -> None:
        return None

    def discard(self, staging: str) -> None:
        """There is nothing."""

    def cached_digest(self) -> str:
        self.asked.set()
        assert self.may_answer.wait(BOUND_S)
        return NEW


class StandInWorker:
    """The parts of a worker that change the engine."""

    def __init__(self) -> None:
        self.engine = StandIn()
        self.state = WorkerState("0" * 16, "me", fence=1, digest=OLD)
        self.core = WorkerCore(self.state, OLD)
        engine: Any = self.engine
        info: Any = SimpleNamespace(
            require=lambda *asked: None, transports=("road",), vocab_size=9, max_model_len=9
        )
        updates = WeightUpdates(
            engine, info, lambda one: self.core.is_staged(one.for_core() if one else None), lambda: None
        )
        changes = EngineChanges(self.core, engine, EngineLoop(), EngineWatch(60), updates, lambda: None)
        record: Any = SimpleNamespace(read=self._nothing)
        transport = Transport.model_validate({"backend": "road"})
        self.changes = changes
        self.calls = CoordinatorCalls(self.core, record, changes, updates, transport, lambda: None)

    async def _nothing(self) -> None:
        return None


def request(**more: Any) -> ReceiveRequest:
    return ReceiveRequest.model_validate(
        {"update_id": "u", "transport": {"backend": "road"}, "label": "one", **more}
    )


async def test_an_abort_ends_the_wait_for_running_requests_and_the_weights_stay() -> None:
    worker = StandInWorker()
    preparing = asyncio.create_task(worker.calls.prepare(request(staging="none", pause_mode="wait"), 1))
    async with asyncio.timeout(BOUND_S):
        await worker.engine.pausing.wait()
        await worker.calls.abort(AbortUpdate(update_id="u"), 1)
        with pytest.raises(UpdateAborted):
            await preparing
        async with worker.changes.turn(1):
            assert worker.state.digest == OLD
    assert not worker.engine.paused


async def test_a_pause_after_a_commit_has_its_lease_also_if_the_deadline_passes() -> None:
    worker = StandInWorker()
    core, engine = worker.core, worker.engine
    first = first_record(OLD)
    core.learnt(first, 1, 0.0)
    core.relabelled(first)
    await worker.calls.prepare(request(keep_staged=True), 1)
    made = WeightVersion(first.version.run, 1, "one", NEW)
    source = VersionSource({"backend": "road"}, keep_staged=True)
    record = DecisionRecord(made, source, "u", made, keep_pause=True, fence=1, seal=1)
    engine.asked.clear()
    engine.may_answer.clear()
    commit = Commit.model_validate({"update_id": "u", "record": record.to_wire(), "sequence": 2, "pause_s": 600.0})
    committing = asyncio.create_task(worker.calls.commit(commit, 1))
    assert await asyncio.to_thread(engine.asked.wait, BOUND_S)  # the hosts are asked for their copies
    committing.cancel()
    engine.may_answer.set()
    with pytest.raises(asyncio.CancelledError):
        await committing
    assert (engine.paused, worker.state.pause_mode) == (True, "keep")
    assert worker.state.pause_until > 0

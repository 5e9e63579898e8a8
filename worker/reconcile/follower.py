"""Brings this worker to the committed version by itself: the loop that carries out what `WorkerCore` says."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rl_plane.bus.connection import Bus
from rl_plane.bus.state_store import read_pause
from rl_plane.errors import BusUnreachable, Conflict, InvalidRequest, InvalidWeights, NotAtBase, PlaneError
from rl_plane.protocol.subjects import Subjects
from rl_plane.protocol.update_requests import ReceiveRequest, Transport
from rl_plane.protocol.worker_ops import DEFAULT_PAUSE_LEASE_S, OPS
from worker.engines.base import EngineAdapter
from worker.receive.staging import not_fitting
from worker.reconcile.engine_changes import EngineChanges
from worker.reconcile.instructions import Drop, Fetch, Instruction, Read, Relabel, ScoreCanary, Swap, Unload, Wait
from worker.reconcile.peers import Peers
from worker.reconcile.record_watch import RecordWatch
from worker.reconcile.staged_updates import WeightUpdates
from worker.reconcile.worker_core import HEAL_RETRY_S, SOURCE_GONE, WorkerCore, why
from worker.runtime.engine_loop import EngineLoop

log = logging.getLogger("worker.reconcile.follower")

FREEZE_S = OPS["commit_update"].timeout_s
"""A worker that changes by itself waits this long for its engine to pause: in the mode `wait`, running requests end
first. Then it tries again. A change that a coordinator asks for waits until the coordinator's deadline."""


@dataclass(eq=False)
class RecordFollower:
    """Keeps the weights of one worker at the committed version. `tell` publishes the worker's state."""

    _bus: Bus
    _subjects: Subjects
    _core: WorkerCore
    _adapter: EngineAdapter
    _engine: EngineLoop
    _record: RecordWatch
    _changes: EngineChanges
    _updates: WeightUpdates
    _peers: Peers
    _model: Transport
    _tell: Callable[[], None]

    async def run(self) -> None:
        """Does what the core says, for ever."""
        while True:
            self._changes.due.clear()
            instruction = self._core.next(time.monotonic())
            self._tell()
            if isinstance(instruction, Wait):
                await self._wait(instruction)
            elif not await self._try(instruction):
                await self._wait(Wait(time.monotonic() + HEAL_RETRY_S))

    async def settle(self) -> None:
        """Runs until nothing is left to do at once. Reads the record first: only a read begins the serving lease."""
        if not await self._try(Read()):
            return
        while not isinstance(instruction := self._core.next(time.monotonic()), Wait):
            if not await self._try(instruction):
                return

    async def _wait(self, wait: Wait) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(wait.until):
                await self._changes.due.wait()

    async def _try(self, instruction: Instruction) -> bool:
        """Carries out one instruction. Reports a failure to the core, which tries again later.

        Returns False if NATS is away, or if the core would try the same again at once."""
        try:
            await self._carry_out(instruction)
        except BusUnreachable as error:
            log.info("%s tries again later: %s", self._core.state.instance_id, error)
            return False
        except Exception as error:
            expected = isinstance(error, PlaneError)
            log.warning(
                "%s is not at the committed version: %s",
                self._core.state.instance_id,
                why(error),
                exc_info=not expected,
            )
            words = why(error)
            if isinstance(instruction, Fetch) and isinstance(error, InvalidWeights) and not_fitting(error):
                words = self._core.does_not_fit(instruction, words)
            self._core.fetch_failed(words, time.monotonic())
            if self._core.state.digest is None:  # without weights, frozen requests could wait for ever
                with contextlib.suppress(PlaneError):  # the requests of a dead engine have ended
                    await self._engine.run(self._adapter.abort(None))
            self._tell()
            return self._core.next(time.monotonic()) != instruction
        self._tell()
        return True

    async def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case Read():
                await self._record.read()
            case Fetch():
                await self._fetch(instruction)
            case Drop(update_id):
                await self._updates.drop(update_id)
            case Swap() | Unload() | Relabel():
                await self._change(instruction)
            case ScoreCanary():
                async with self._changes.changing:
                    await self._changes.score_wanted()
            case Wait():
                pass

    async def _change(self, instruction: Swap | Unload | Relabel) -> None:
        async with self._changes.changing:
            if self._core.next(time.monotonic()) != instruction:
                return  # a commit was faster, or another decision came
            record = self._core.record
            # Read under the lock, like the ops `pause` and `resume`, which are recorded before the workers hear of
            # them.
            desired = await read_pause(self._bus, self._subjects.state)
            now = await self._bus.server_time(self._subjects.state) if desired.paused else 0.0
            pause_s = desired.left_s(now)
            # During the update the store may not say yet that the fleet stays paused. No call can have resumed it.
            if record is not None and record.keep_pause and not record.final:
                pause_s = max(pause_s, DEFAULT_PAUSE_LEASE_S)
            if self._core.next(time.monotonic()) != instruction:
                return
            await self._changes.step(instruction, pause_s, FREEZE_S)

    # ---- healing ----

    async def _fetch(self, fetch: Fetch) -> None:
        """Receives a committed version from its recorded source: into staging, or over the served weights if the model
        does not fit twice."""
        source = fetch.source
        in_place = (
            (self._core.in_place or source.staging == "none")
            and fetch.name is None
            and source.base is None
            and not source.keep_staged
        )
        request = ReceiveRequest.of_source(
            fetch.update_id, fetch.name, fetch.version, source, self._model, in_place
        )
        if not request.in_place:
            await self._stage(request, source.refetchable)
            return
        async with self._changes.changing:
            if self._core.next(time.monotonic()) == fetch:
                await self._changes.overwrite(request, None, "keep", FREEZE_S)

    async def _stage(self, request: ReceiveRequest, refetchable: bool) -> None:
        """Stages the worker's own copy of the version. If it has none, receives into staging from the recorded source,
        or else from a worker that has a copy.

        If the source is a trainer's memory, workers come first: they are nearer, and the trainer serves the fleet."""
        digest = request.digest
        assert digest is not None
        # A receive drops the copy before the bytes come. Workers that heal from one another would drop all copies.
        if await self._updates.keeps(request):
            try:
                await self._updates.prepare(request.full_from(None))
            except NotAtBase as error:
                log.warning("%s can't use its own copy: %s", self._core.state.instance_id, why(error))
            else:
                log.info("%s took the weights from its own copy", self._core.state.instance_id)
                return

        async def take(transport: Mapping[str, Any]) -> None:
            await self._updates.prepare(request.full_from(Transport.model_validate(transport)))

        of_trainer = request.transport is not None and request.transport.traits.relayed
        if of_trainer and await self._peers.bring(digest, take):
            log.info("%s took the weights from a peer", self._core.state.instance_id)
            return
        try:
            if not refetchable:
                raise InvalidRequest(SOURCE_GONE, field="transport", fix="publish the weights again")
            await self._updates.prepare(request)
        except PlaneError as error:
            if isinstance(error, Conflict) and not isinstance(error, NotAtBase):
                raise  # an update has the staging
            if isinstance(error, InvalidWeights) and not_fitting(error):
                raise
            if of_trainer or not await self._peers.bring(digest, take):
                raise
            log.info("%s took the weights from a peer: %s", self._core.state.instance_id, why(error))

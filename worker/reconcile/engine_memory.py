"""Releases an engine's memory and takes it back: for a coordinator, or to match the fleet when the worker joins."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from rl_plane.errors import InvalidRequest, PlaneError, Unsupported
from rl_plane.protocol.record import DesiredMemory
from worker.engines.base import EngineAdapter, EngineInfo
from worker.engines.capabilities import CanReleaseMemory, require
from worker.reconcile.engine_changes import EngineChanges
from worker.reconcile.staged_updates import WeightUpdates
from worker.reconcile.worker_core import WorkerCore
from worker.runtime.engine_loop import EngineLoop

log = logging.getLogger("worker.reconcile.engine_memory")

LAST_REQUESTS_S = 1.0
"""A request leaves the engine within one step after its last token. A trainer that has all its replies may release
memory at once, so the release waits this long for such requests."""
LOOK_S = 0.01


@dataclass(eq=False)
class EngineMemory:
    """Releases and resumes memory. The caller holds the lock of EngineChanges. `tell` publishes the worker's state."""

    _core: WorkerCore
    _adapter: EngineAdapter
    _engine: EngineLoop
    _info: EngineInfo
    _updates: WeightUpdates
    _changes: EngineChanges
    _tell: Callable[[], None]

    async def release(self, tags: Sequence[str]) -> None:
        """Freezes the engine, then releases memory. A request that still reaches the engine waits for all memory."""
        self._info.require("release_memory", "op")
        state = self._core.state
        before = set(state.released)
        froze = state.pause_mode is None and state.may_run
        state.release(tags)
        self._tell()
        try:
            await self._engine.run(self._free(tags, froze))
        except (InvalidRequest, Unsupported):
            state.take_back(state.released - before)  # nothing is released; any other error leaves that open
            raise
        finally:
            self._tell()

    async def _free(self, tags: Sequence[str], froze: bool) -> None:
        """`froze`: the engine runs until now."""
        if froze:
            give_up = time.monotonic() + LAST_REQUESTS_S
            while any(self._adapter.load()) and time.monotonic() < give_up:  # noqa: ASYNC110 - no event tells of the last
                await asyncio.sleep(LOOK_S)
            if any(self._adapter.load()):
                raise InvalidRequest("requests are running", field="tags", fix="pause first, then release memory")
        # An earlier release may have failed, so a frozen engine is paused too.
        if self._core.state.pause_mode is None:
            await self._adapter.pause("keep", False)
        try:
            await require(self._adapter, CanReleaseMemory).release_memory(list(tags))
        except (InvalidRequest, Unsupported):
            if froze:
                await self._adapter.resume()
            raise

    async def resume(self, tags: Sequence[str]) -> None:
        state = self._core.state
        if not state.released:
            return  # also for an engine that can't release memory, in a fleet that has released it
        await self._engine.run(require(self._adapter, CanReleaseMemory).resume_memory(list(tags)))
        if "weights" in state.released & set(tags):
            await self.weights_are_gone("the weights were released")  # a deep sleep discards them
        if state.released <= set(tags) and state.digest is not None and state.pause_mode is None:
            # Before the state changes: if this fails, the caller asks again.
            await self._engine.run(self._adapter.resume())
        self._core.took_back(tags, time.monotonic())
        await self._changes.score_wanted()
        self._changes.look()
        self._tell()

    async def weights_are_gone(self, reason: str) -> None:
        self._core.state.lose_weights(reason)
        coming, staged = self._updates.receiving, self._core.staged
        if coming is not None and coming.request.in_place:
            await self._updates.drop(coming.update_id)  # the receive has outlived its caller
        if staged is not None and staged.in_place:
            await self._updates.drop(staged.update_id)  # it was in the engine's weights
        self._changes.look()
        self._tell()

    async def follow(self, desired: DesiredMemory) -> None:
        """Releases or resumes what the fleet did while this worker was away. A failure goes to the log."""
        wanted = desired.of(self._core.state.instance_id)
        try:
            if missing := self._core.state.released - wanted:
                await self.resume(_in_order(missing))
            if left := wanted - self._core.state.released:
                await self.release(_in_order(left))
        except PlaneError as error:
            log.error(
                "%s could not release or resume memory like the fleet (released there: %s): %s",
                self._core.state.instance_id,
                ", ".join(sorted(wanted)) or "none",
                error,
            )


def _in_order(tags: Collection[str]) -> list[str]:
    """Returns the tags, `weights` first."""
    return sorted(tags, reverse=True)

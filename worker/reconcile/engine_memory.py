"""An engine's memory, released and taken back: by a coordinator, or as the fleet's is when this worker comes anew."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence

from rl_plane.errors import InvalidRequest, PlaneError, Unsupported
from rl_plane.protocol.record import DesiredMemory
from worker.engines.base import LACKING, EngineAdapter, EngineInfo
from worker.engines.capabilities import CanReleaseMemory, require
from worker.reconcile.follower import RecordFollower
from worker.reconcile.staged_updates import WeightUpdates
from worker.reconcile.worker_core import WorkerCore
from worker.runtime.engine_loop import EngineLoop

log = logging.getLogger("worker.reconcile.engine_memory")

LAST_REQUESTS_S = 1.0
"""Requests whose last token has gone out leave the engine within a step: a trainer that has all its replies and
releases memory at once is not to be refused for them."""
LOOK_S = 0.01


class EngineMemory:
    """Its callers have their turn to change the engine. `tell` publishes what changed."""

    def __init__(
        self,
        core: WorkerCore,
        adapter: EngineAdapter,
        engine: EngineLoop,
        info: EngineInfo,
        updates: WeightUpdates,
        follower: RecordFollower,
        tell: Callable[[], None],
    ) -> None:
        self._core = core
        self._state = core.state
        self._adapter = adapter
        self._engine = engine
        self._info = info
        self._updates = updates
        self._follower = follower
        self._tell = tell

    async def release(self, tags: Sequence[str]) -> None:
        """The engine is frozen meanwhile: whatever reaches it yet waits until all memory is back."""
        self._refuse_incapable("release_memory")
        state = self._state
        before = set(state.released)
        froze = state.pause_mode is None and state.may_run
        state.release(tags)
        self._tell()
        try:
            await self._engine.run(self._free(tags, froze))
        except (InvalidRequest, Unsupported):
            state.take_back(state.released - before)  # it serves on; after any other error nobody knows
            raise
        finally:
            self._tell()

    async def _free(self, tags: Sequence[str], froze: bool) -> None:
        """`froze`: it runs until now."""
        if froze:
            give_up = time.monotonic() + LAST_REQUESTS_S
            while any(self._adapter.load()) and time.monotonic() < give_up:  # noqa: ASYNC110 - no event tells of the last
                await asyncio.sleep(LOOK_S)
            if any(self._adapter.load()):
                raise InvalidRequest("requests are running", field="tags", fix="pause first, then release memory")
        if (
            self._state.pause_mode is None
        ):  # also where it should stand still already: an earlier try may have failed
            await self._adapter.pause("keep", False)
        try:
            await require(self._adapter, CanReleaseMemory).release_memory(list(tags))
        except (InvalidRequest, Unsupported):
            if froze:
                await self._adapter.resume()
            raise

    async def resume(self, tags: Sequence[str]) -> None:
        state = self._state
        if not state.released:
            return  # also where the engine can't, and joined a fleet whose memory was released
        await self._engine.run(require(self._adapter, CanReleaseMemory).resume_memory(list(tags)))
        if "weights" in state.released & set(tags):
            await self.weights_are_gone("the weights were released")  # a deep sleep discards them
        if state.released <= set(tags) and state.digest is not None and state.pause_mode is None:
            await self._engine.run(self._adapter.resume())  # first: cut or failed, it is asked for again
        self._core.took_back(tags, time.monotonic())
        await self._follower.score_wanted()
        self._follower.look()
        self._tell()

    async def weights_are_gone(self, reason: str) -> None:
        self._state.lose_weights(reason)
        coming, staged = self._updates.receiving, self._core.staged
        if coming is not None and coming.in_place:
            await self._updates.drop(coming.update_id)  # it outlived its caller, who had the turn
        if staged is not None and staged.in_place:
            await self._updates.drop(staged.update_id)  # it was among them
        self._follower.look()
        self._tell()

    async def follow(self, desired: DesiredMemory) -> None:
        """Does as the fleet has done while this worker was away. A call is told why it failed; here the log is."""
        wanted = desired.of(self._state.instance_id)
        try:
            if missing := self._state.released - wanted:
                await self.resume(_in_order(missing))
            if left := wanted - self._state.released:
                await self.release(_in_order(left))
        except PlaneError as error:
            log.error(
                "%s has not the memory that the fleet has (released: %s): %s",
                self._state.instance_id,
                ", ".join(sorted(wanted)) or "none",
                error,
            )

    def _refuse_incapable(self, op: str) -> None:
        if (reason := self._info.capabilities.get(op)) is not None:
            raise Unsupported(f"{self._info.engine} can't {op}: {reason}", field="op", fix=LACKING)


def _in_order(tags: Collection[str]) -> list[str]:
    """Weights first."""
    return sorted(tags, reverse=True)

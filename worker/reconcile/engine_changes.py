"""Changes an engine, one change at a time: pause, resume, overwrite, swap, score.

A coordinator's calls, the worker's own healing and the memory ops all change the engine. Each takes the lock
`changing` first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from rl_plane._util import tracing
from rl_plane.errors import EngineFailed, InvalidRequest
from rl_plane.protocol.update_requests import CommittedReply, PreparedReply, ReceiveRequest
from rl_plane.protocol.worker_ops import OPS
from worker.engines.base import AdapterLost, EngineAdapter, PauseMode
from worker.engines.capabilities import CanLoadAdapters, CanScore, require
from worker.reconcile.instructions import Relabel, Swap, Unload
from worker.reconcile.staged_updates import WeightUpdates
from worker.reconcile.worker_core import WorkerCore, why
from worker.reconcile.worker_state import Scores
from worker.runtime.engine_loop import EngineLoop
from worker.runtime.engine_watch import EngineWatch

log = logging.getLogger("worker.reconcile.engine_changes")

SCORE_S = OPS["commit_update"].timeout_s
"""A canary is a prefill of at most 2,048 tokens; an engine on a CPU with a large model takes seconds for it."""


@dataclass(eq=False)
class EngineChanges:
    """Owns the lock under which the engine changes, and carries out each change.

    `tell` publishes the worker's state after a change. `due` is set when the worker's next step may be another one.
    """

    _core: WorkerCore
    _adapter: EngineAdapter
    _engine: EngineLoop
    _watch: EngineWatch
    _updates: WeightUpdates
    _tell: Callable[[], None]
    changing: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    """Held during each change of the engine."""
    due: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    last_commit: CommittedReply | None = field(default=None, init=False)

    def look(self) -> None:
        """Wakes the worker's own loop: its next step may be another one now."""
        self.due.set()

    @asynccontextmanager
    async def turn(self, fence: int, *, blocks: bool = False) -> AsyncIterator[None]:
        """Waits until a coordinator may change the engine, and checks that it still is the coordinator then.

        `blocks`: the engine may not answer meanwhile, so the hang timer stops."""
        async with self.changing:
            self._core.state.check_fence(fence)
            with self._watch.blocking() if blocks else contextlib.nullcontext():
                yield

    # The caller of each method below holds `changing`.

    async def pause(self, mode: PauseMode, clear_cache: bool) -> bool:
        """Pauses generation. Returns whether the engine cleared its cache.

        No request can end in an engine that may not run. There, `wait` means `keep`."""
        if mode == "wait" and not self._core.state.may_run:
            mode = "keep"
        return await self._engine.run(self._adapter.pause(mode, clear_cache))

    async def resume(self) -> None:
        """Resumes generation. An engine that may not run stays frozen until it may."""
        if self._core.state.may_run:
            await self._engine.run(self._adapter.resume())
        self._core.state.resume()

    async def flush_cache(self, reset_running: bool) -> bool:
        """Returns whether the engine dropped its prefix cache. `reset_running`: freezes running requests meanwhile,
        because an engine drops the KV of frozen requests only."""
        freezes = reset_running and self._core.state.pause_mode is None and self._core.state.may_run
        if freezes:
            await self.freeze("keep", None)
        try:
            return await self._engine.run(self._adapter.flush_cache())
        finally:
            if freezes:  # the fleet is not paused, so no other call would resume the engine
                await self._engine.run(self._adapter.resume(), to_its_end=True)

    async def freeze(self, mode: PauseMode, bound_s: float | None) -> None:
        """Pauses the engine for a change, even if it should be paused: a resume that was cut off may have reached it.

        `bound_s`: how long the pause may take. None: until the caller's deadline, which the dispatcher enforces."""
        try:
            async with asyncio.timeout(bound_s):
                await self.pause(mode if self._core.state.pause_mode is None else "keep", False)
        except TimeoutError as error:
            raise EngineFailed("the engine did not pause in time") from error
        self._watch.answered()  # the pause is an answer, so the next silence counts from here

    async def overwrite(
        self, request: ReceiveRequest, fence: int | None, mode: PauseMode, bound_s: float | None
    ) -> PreparedReply:
        """Receives weights over the served ones. `bound_s`: as in `freeze`.

        The caller holds `changing` to the end: an engine that is half written must not resume."""
        freezing: asyncio.Task[None] | None = None
        waits = True

        async def taint() -> None:
            nonlocal freezing
            freezing = asyncio.create_task(self.freeze(mode, bound_s)) if waits else None
            if freezing is not None:
                try:
                    await asyncio.wait([freezing])
                except asyncio.CancelledError:  # the update was aborted
                    await self._thaw(freezing)
                    raise
            if freezing is None or freezing.cancelled():
                raise EngineFailed("the deadline has passed, and the engine was not paused")
            freezing.result()
            if waits:
                blocks.enter_context(self._watch.blocking())  # only now: the engine answers a pause
            self._core.overwriting()
            self.look()  # the caller may be gone when the receive ends
            self._tell()

        try:
            with contextlib.ExitStack() as blocks:
                if self._updates.busy_with == request.update_id:  # the coordinator asks again
                    blocks.enter_context(self._watch.blocking())
                return await self._updates.prepare(request, fence, taint)
        except BaseException:
            waits = False
            if freezing is not None:
                freezing.cancel()  # the receive outlives its caller, but the caller's deadline bounds the pause
            if self._core.state.digest is None:
                self._core.overwrite_failed()
            self.look()
            raise

    async def _thaw(self, freezing: asyncio.Task[None]) -> None:
        """Ends a pause that is no longer needed, also if it has just come about."""
        freezing.cancel()
        await asyncio.wait([freezing])
        done = not freezing.cancelled() and freezing.exception() is None
        if done and self._core.state.pause_mode is None and self._core.state.may_run:
            await self._engine.run(self._adapter.resume(), to_its_end=True)

    async def step(
        self, step: Swap | Unload | Relabel, pause_s: float, freeze_s: float | None
    ) -> CommittedReply | None:
        """Carries out one step of a commit. Returns what a swap did.

        `pause_s`: generation stays paused so long afterwards; 0: the step leaves the pause as it was. `freeze_s`: the
        bound of `freeze`."""
        if isinstance(step, Relabel):
            if pause_s:  # before the worker opens, or it would serve meanwhile
                await self.freeze(step.record.pause_mode, freeze_s)
            self._core.state.keep_paused(step.record.pause_mode, time.monotonic(), pause_s)
            self._adapter.set_version(step.record.version)
            for name, version in step.record.held.adapters.items():
                require(self._adapter, CanLoadAdapters).set_adapter_version(name, version)
            self._core.relabelled(step.record)
            return None
        return await self._swap(step, pause_s, freeze_s)

    async def _swap(self, swap: Swap | Unload, pause_s: float, freeze_s: float | None) -> CommittedReply:
        """Pauses, swaps, flushes and resumes. Generation that was paused before stays paused."""
        state, core = self._core.state, self._core
        start = time.monotonic()
        was_paused = state.pause_mode is not None
        swapped = False
        try:
            with tracing.child("freeze"):
                await self.freeze(swap.pause_mode, freeze_s)
        except BaseException as error:  # nothing is touched: the staged weights stay, for another try
            words = "the deadline has passed" if isinstance(error, asyncio.CancelledError) else why(error)
            core.fetch_failed(f"the engine is not paused: {words}", time.monotonic())
            self.look()
            raise
        try:
            with self._watch.blocking():
                if core.numerics.have_run:  # the running requests' KV is of weights that did not pass
                    await self._engine.run(self._adapter.abort(None))
                with tracing.child("swap"):
                    flushed = await self._exchange(swap)
                self._watch.answered()
            core.swapped(swap, time.monotonic())
            swapped = True
            # Before anything that the deadline can cut off: a pause without a lease would never end by itself.
            state.keep_paused(swap.pause_mode, time.monotonic(), pause_s)
            await self.score_wanted()
        except BaseException as error:
            lost, cut = isinstance(error, AdapterLost), isinstance(error, asyncio.CancelledError)
            core.swap_failed(swap, f"the swap did not end: {why(error)}", time.monotonic(), lost, cut)
            self.look()
            raise
        finally:
            self._updates.exchanged()
            try:
                if not was_paused and not (pause_s and swapped) and state.may_run:
                    # The worker is open by now, and no other call would resume the engine.
                    await self._engine.run(self._adapter.resume(), to_its_end=True)
            finally:
                if swapped:  # also if the deadline passes during the resume
                    done = self._note_commit(swap, flushed, time.monotonic() - start)
                    await self._updates.swapped()
        return done

    def _note_commit(self, swap: Swap | Unload, flushed: bool, swap_s: float) -> CommittedReply:
        record = self._core.record
        made = record.made if record is not None else swap.version if isinstance(swap, Swap) else None
        assert made is not None
        done = CommittedReply(version=made.to_wire(), cache_flushed=flushed, swap_s=swap_s)
        self.last_commit = done
        log.info("%s holds %s", self._core.state.instance_id, made.label)
        return done

    async def _exchange(self, swap: Swap | Unload) -> bool:
        """Puts the new weights in place. Returns whether the engine flushed its prefix cache."""
        if isinstance(swap, Unload):
            self._core.swapping(swap)
            self._tell()
            return await self._engine.run(
                require(self._adapter, CanLoadAdapters).swap_adapter(swap.name, None, None)
            )
        staging = self._updates.take(swap.update_id)
        self._core.swapping(swap)
        self._tell()
        if swap.name is not None:
            adapters = require(self._adapter, CanLoadAdapters)
            return await self._engine.run(adapters.swap_adapter(swap.name, staging, swap.version))
        if staging is not None:
            return await self._engine.run(self._adapter.swap(staging, swap.version, keep_kv=swap.keep_kv))
        if not await self._engine.run(self._adapter.flush_cache()):
            raise EngineFailed("the engine did not flush its prefix cache: new requests would reuse older KV")
        self._adapter.set_version(swap.version)
        return True

    async def score_wanted(self) -> None:
        """Scores the record's canary, unless these weights have been scored.

        If the worker fails the canary, its running requests end here, so that their tokens do not go out."""
        core = self._core
        canary = core.numerics.wanted(core.record)
        if canary is None:
            return
        sequences = [list(tokens) for tokens in canary.sequences]
        try:
            with self._watch.blocking():
                with tracing.child("canary"):
                    async with asyncio.timeout(SCORE_S):
                        vectors = await self._engine.run(require(self._adapter, CanScore).score(sequences))
                self._watch.answered()
            scores = Scores(canary.sequences, vectors)
        except TimeoutError as error:
            raise EngineFailed(f"the engine did not score the canary within {SCORE_S:g} s") from error
        except (EngineFailed, InvalidRequest) as error:  # another engine of the fleet may take longer sequences
            scores = Scores(canary.sequences, [], error.message)
        core.scored(scores, time.monotonic())
        if core.numerics.flow == "cut":
            log.error("%s: %s", self._core.state.instance_id, self._core.state.closed.get("numerics"))
            await self._engine.run(self._adapter.abort(None))
        self._tell()

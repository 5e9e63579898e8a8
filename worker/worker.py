"""Connects the parts of one worker, and runs it from the join to the leave. All of it lives on the NATS loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgpack
import nats.errors

from rl_plane._util.tasks import end_tasks
from rl_plane.bus.connection import Bus
from rl_plane.bus.state_store import admission_of, read_later_pause, read_memory
from rl_plane.errors import EngineFailed, PlaneError
from rl_plane.protocol.canary import engine_kind
from rl_plane.protocol.subjects import ADMISSION_PREFIX, Subjects
from rl_plane.protocol.transport_traits import directory_transport
from rl_plane.protocol.update_requests import PreparedReply, Transport
from worker import exit_codes
from worker.engines.base import EngineAdapter, EngineHung, EngineInfo
from worker.engines.capabilities import CanReportLoad
from worker.generation_service import GenerationService
from worker.ops.dispatcher import Dispatcher
from worker.ops.handlers import OpHandlers
from worker.ops.host_facts import HostFacts
from worker.reconcile.coordinator_calls import CoordinatorCalls
from worker.reconcile.coordinator_watch import CoordinatorWatch
from worker.reconcile.engine_changes import EngineChanges
from worker.reconcile.engine_memory import EngineMemory
from worker.reconcile.follower import RecordFollower
from worker.reconcile.lock_watch import LockWatch
from worker.reconcile.peers import Peers
from worker.reconcile.record_watch import RecordWatch
from worker.reconcile.staged_updates import StagedUpdate, WeightUpdates
from worker.reconcile.worker_core import WorkerCore
from worker.reconcile.worker_state import OPENED_BY_ENABLE, Reason, WorkerState
from worker.runtime.engine_loop import UNDO_S, EngineLoop
from worker.runtime.engine_watch import DEFAULT_ENGINE_HANG_S, DEFAULT_LIVENESS_TIMEOUT_S, EngineWatch
from worker.runtime.registration import Registration

log = logging.getLogger("worker")

TICK_S = 0.5
"""The interval at which the worker checks leases, gates and its load."""
LIVENESS_INTERVAL_S = 1.0
LOAD_INTERVAL_S = 1.0
"""Prometheus and trainers read metrics every few seconds."""
LOAD_S = 10.0
"""The longest wait for an engine's counts. It may be in a step, or swap weights. Then there are none for a while."""


class Worker:
    """One member of the fleet, with one engine. `on_end(why, exit code)` is called when its process must end."""

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        adapter: EngineAdapter,
        engine: EngineLoop,
        info: EngineInfo,
        *,
        member_info: dict[str, Any],
        model_digest: str,
        engine_hang_s: float = DEFAULT_ENGINE_HANG_S,
        liveness_timeout_s: float = DEFAULT_LIVENESS_TIMEOUT_S,
        weight_roots: Sequence[Path] = (),
        on_end: Callable[[str, int], None],
    ) -> None:
        """`weight_roots`: the directories that weights may be read from, for people who ask whether they are there."""
        self.bus = bus
        self.subjects = subjects
        self.state = WorkerState(bus.name, secrets.token_hex(8), digest=model_digest, since=time.monotonic())
        self.core = WorkerCore(self.state, model_digest, _engine_kind(info))
        self.adapter = adapter
        self._engine = engine
        self.info = info
        self._pipeline_stage = info.pipeline_stage
        self.received_bytes: Counter[str] = Counter()
        """Transport → bytes of tensors that have come and were verified."""
        self._counted: PreparedReply | None = None
        self._on_end = on_end
        self._watch = EngineWatch(engine_hang_s)
        peers = Peers(
            bus,
            subjects,
            adapter,
            info.transports,
            member_info["host"],
            self.state.incarnation,
            self._loaded_adapters,
        )
        bus.on_reconnect(peers.reconnected)
        model = Transport.model_validate(directory_transport(member_info["model_path"]))
        self.updates = WeightUpdates(adapter, info, self._staged_changed, peers.offer)
        self._generation = GenerationService(bus, adapter, engine, self.state, info.witnesses, self.core.numerics)
        self._changes = EngineChanges(self.core, adapter, engine, self._watch, self.updates, self._tell)
        self._record = RecordWatch(bus, subjects, self.core, self._record_changed)
        self._coordinator = CoordinatorWatch(bus, subjects, self.core, self._record, self._changes, self.updates)
        calls = CoordinatorCalls(self.core, self._record, self._changes, self.updates, model, self._tell)
        self._follower = RecordFollower(
            bus,
            subjects,
            self.core,
            adapter,
            engine,
            self._record,
            self._changes,
            self.updates,
            peers,
            model,
            self._tell,
        )
        self._memory = EngineMemory(self.core, adapter, engine, info, self.updates, self._changes, self._tell)
        self._handlers = OpHandlers(
            core=self.core,
            adapter=adapter,
            engine=engine,
            info=info,
            updates=self.updates,
            record=self._record,
            changes=self._changes,
            calls=calls,
            memory=self._memory,
            member_info=member_info,
            liveness_timeout_s=liveness_timeout_s,
            drain=self.drain,
            tell=self._tell,
            named=self._generation.named,
            revision=lambda: self._registration.revision,
            host=HostFacts(weight_roots, lambda: bus.about),
        )
        self._registration = Registration(
            bus,
            subjects.members,
            self.state.instance_id,
            self.state.incarnation,
            member_info,
            on_registered=self._follow_fleet,
            on_superseded=lambda: on_end("another process has taken this instance id", exit_codes.SUPERSEDED),
        )
        self._lock = LockWatch(bus, subjects, self.state)
        self.dispatcher = Dispatcher(self.state, self._lock, self._handlers.table(), info.pipeline_stage)
        self._told = b""
        self._lasting: dict[str, Any] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Joins the fleet, and then takes the committed version, or says why it can't.

        A pipeline stage only joins. It neither reads nor fixes the committed version."""
        if self._pipeline_stage is not None:
            await self.dispatcher.listen(self.bus, self.subjects)
            self._spawn(self._watch_engine())
            await self._registration.start()
            self._spawn(self._registration.keep())
            return
        await self._record.start()
        await self.dispatcher.listen(self.bus, self.subjects)
        await self._generation.start(self.subjects.generate(self.state.instance_id))
        await self._lock.start()
        # The engine may die or hang while the worker takes the committed weights.
        self._spawn(self._watch_engine(), lasting=True)
        if isinstance(self.adapter, CanReportLoad):
            self._spawn(self._watch_load(self.adapter))
        await self._registration.start()
        self._spawn(self._registration.keep(), lasting=True)
        await self._follower.settle()
        for work in (self._follower.run(), self._record.keep_lease(), self._ticks()):
            self._spawn(work, lasting=True)

    async def _follow_fleet(self) -> None:
        """Applies the fleet's admission, pause and memory, which this worker may have missed while it was away."""
        if self._pipeline_stage is not None:
            return
        await self._follow_admission()
        async with self._changes.changing:
            await self._follow_pause()
            memory = await read_memory(self.bus, self.subjects.state)
            if memory is not None:  # None may be a store that has lost a trainer's release
                with self._watch.blocking():
                    await self._memory.follow(memory)
        self._tell()

    async def _follow_admission(self) -> None:
        """Opens or closes as an operator has asked, unless the last call to this worker is newer."""
        entry = await self.bus.get(self.subjects.state, ADMISSION_PREFIX + self.state.instance_id)
        is_open = admission_of(entry)
        if entry is None or is_open is None or entry.sequence < self.state.admission_fence:
            return  # a fence is a sequence of the same bucket
        closed = self.state.closed.keys()
        if closed & OPENED_BY_ENABLE if is_open else "disabled" not in closed:
            self._handlers.admit(is_open)

    async def _follow_pause(self) -> None:
        """Pauses or resumes as the fleet was asked to. The caller holds `changing`.

        The last call to this worker counts instead if it is newer: it may have named this worker only."""
        desired = await read_later_pause(self.bus, self.subjects.state, self.state.pause_fence)
        if desired is None:
            return
        left_s = desired.left_s(await self.bus.server_time(self.subjects.state)) if desired.paused else 0.0
        if left_s > 0:
            if self.state.pause_mode is None:
                # Without a bound: the engine watch ends a worker whose engine hangs.
                await self._engine.run(self.adapter.pause("keep", False))
            self.state.pause(desired.mode, time.monotonic(), left_s)  # its lease may be a new one
        elif self.state.pause_mode is not None:
            await self._changes.resume()

    async def drain(self, timeout_s: float, reason: Reason = "draining") -> bool:
        """Closes admission and waits for the running requests. Returns whether all of them ended.

        `leaving`: the worker does not open again."""
        self.state.close(reason)
        self._tell()
        # Requests of an engine that stands still can't end, so there is nothing to wait for.
        stands = self.state.pause_mode is not None or not self.state.may_run
        return await self._generation.wait_idle(0.0 if stands else timeout_s)

    async def stop(self) -> None:
        """Leaves the membership and ends the background tasks. The caller closes the engine."""
        await self._registration.leave()
        await self.dispatcher.stop()
        await self._generation.stop()
        await end_tasks(self._tasks)
        with contextlib.suppress(PlaneError):
            await self.updates.drop(None)
        await self.bus.close()

    def _spawn(self, work: Coroutine[Any, Any, None], *, lasting: bool = False) -> None:
        """Runs `work` in the background. `lasting`: its failure ends the worker."""

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if lasting and not task.cancelled() and (error := task.exception()) is not None:
                log.error("%s has failed", task.get_name(), exc_info=error)
                self._on_end(f"{task.get_name()} has failed: {type(error).__name__}", exit_codes.FAILED)

        task = asyncio.create_task(work, name=getattr(work, "__qualname__", None))
        self._tasks.add(task)
        task.add_done_callback(ended)

    async def _ticks(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                if self.state.pause_ran_out(time.monotonic()):
                    await self._pause_ran_out()
                await self._coordinator.tick()
                self._tell()
            except PlaneError as error:
                log.debug("tick: %s", error)
            except Exception:
                log.exception("tick")  # the next tick must come all the same

    async def _pause_ran_out(self) -> None:
        """Resumes when the pause's lease has ended, for example because the trainer died. A worker without sound
        weights stays paused."""
        if self.state.closed.keys() & {"behind", "memory", "starting"}:
            return
        log.warning("%s resumes: the lease of its pause has ended", self.state.instance_id)
        async with self._changes.changing:
            if self.state.pause_ran_out(time.monotonic()):  # a call may have renewed it meanwhile
                await self._changes.resume()

    async def _watch_engine(self) -> None:
        while True:
            await asyncio.sleep(LIVENESS_INTERVAL_S)
            since = time.monotonic()
            try:
                await self._handlers.round_trip()
                self._handlers.engine_alive = True
                self.state.open("engine")
                self._watch.answered()
            except EngineHung as error:
                self._handlers.engine_alive = False
                self.state.close("engine", error.message)
                # A round trip takes no longer by itself. If it did, this process stood still, and the engine with it.
                took = min(time.monotonic() - since, self._handlers.liveness_timeout_s + UNDO_S)
                if self._watch.silent(LIVENESS_INTERVAL_S + took):
                    self._on_end(f"the engine hangs: {error.message}", exit_codes.ENGINE_HUNG)
                    return
            except EngineFailed as error:
                self._handlers.engine_alive = False
                self.state.close("engine", error.message)
                self._on_end(f"the engine is dead: {error.message}", exit_codes.ENGINE_DEAD)
                return
            except Exception as error:
                log.exception("liveness")
                self._handlers.engine_alive = False
                self.state.close("engine", f"{type(error).__name__}: {error}")
            finally:
                self._tell()

    async def _watch_load(self, engine: CanReportLoad) -> None:
        """Reads the engine's own counts for the metrics. Whether it answers at all is for `_watch_engine` to say."""
        while True:
            await asyncio.sleep(LOAD_INTERVAL_S)
            try:
                async with asyncio.timeout(LOAD_S):
                    self._handlers.engine_load = await self._engine.run(engine.engine_load())
            except (TimeoutError, PlaneError):
                self._handlers.engine_load = None
            except Exception:
                log.exception("the engine's load")
                self._handlers.engine_load = None

    def _loaded_adapters(self) -> set[str]:
        """The digests of the adapters that the engine has loaded."""
        return {version.digest for version in self.state.adapters.values()}

    def _staged_changed(self, staged: StagedUpdate | None) -> None:
        if staged is not None and staged.reply is not self._counted:
            self._counted = staged.reply  # another coordinator may take the same weights over
            if (transport := staged.request.transport) is not None:  # None: nothing came, it is the kept copy
                self.received_bytes[transport.backend] += staged.reply["bytes"]
        self.core.is_staged(staged.for_core() if staged is not None else None)

    def _record_changed(self) -> None:
        self._changes.look()
        self._tell()

    def _tell(self) -> None:
        """Publishes the worker's state, if it has changed, for the frontends' routing."""
        if self._pipeline_stage is not None:
            return
        self._generation.look()
        state = self.state
        lasting: dict[str, Any] = {
            "admission": state.admission(),
            "version": state.wire_version(),
            "sequence": state.sequence,
            "adapters": {name: version.to_wire() for name, version in state.adapters.items()},
            "paused": state.pause_mode is not None,
        }
        if lasting != self._lasting:
            self._lasting, state.since = lasting, time.monotonic()
        running, waiting = self.adapter.load()
        message: bytes = msgpack.packb(
            {
                "instance_id": state.instance_id,
                "incarnation": state.incarnation,
                "revision": self._registration.revision,
                **lasting,
                "running": running,
                "waiting": waiting,
                "running_tokens": state.tokens.running,
                "waiting_tokens": state.tokens.waiting,
                "prompt_tokens": state.tokens.prompts,
                "tokens_made": state.tokens.made,
                "engine_load": self._handlers.engine_load,
            }
        )
        if message != self._told:
            self._told = message
            self._spawn(self._publish_status(message))

    async def _publish_status(self, message: bytes) -> None:
        with contextlib.suppress(nats.errors.Error):
            await self.bus.nc.publish(self.subjects.status(self.state.instance_id), message)


def _engine_kind(info: EngineInfo) -> str | None:
    """Returns the kind of engine whose scores can be compared, or None if the engine can't score."""
    if "score" in info.lacks:
        return None
    return engine_kind(info.engine, info.engine_version, info.dtype, info.device, info.tp_size)

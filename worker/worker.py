"""One worker: everything that lives on the NATS loop beside one engine.

It answers the ops (`dispatcher.py` finds the handler), follows the decision record, and is admitted only while
its weights are the committed ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import msgpack
import nats.errors
from nats.aio.msg import Msg

from rl_plane import ops
from rl_plane.bus import Bus, WrongSequence
from rl_plane.errors import (
    BusUnreachable,
    Conflict,
    EngineFailed,
    InvalidRequest,
    PlaneError,
    Unsupported,
)
from rl_plane.lock import live_fence
from rl_plane.record import DecisionRecord, read_pause, read_record, read_session
from rl_plane.subjects import ADMISSION_PREFIX, RECORD, Subjects
from rl_plane.versions import WeightVersion
from worker.dispatcher import Dispatcher
from worker.engine_loop import EngineLoop
from worker.engines.base import EngineAdapter, EngineInfo
from worker.generation import GenerationService
from worker.registration import Registration
from worker.state import WorkerState
from worker.transports.base import WeightTransport
from worker.updates import WeightUpdates, why

log = logging.getLogger("worker")

TICK_S = 0.5
"""How often leases, gates and the load are looked at."""
LIVENESS_INTERVAL_S = 1.0
LIVENESS_TIMEOUT_S = 5.0
"""A round trip waits for one step; the slowest step that we know takes less than this."""
HEAL_RETRY_S = 1.0
MAX_HEAL_RETRY_S = 30.0
"""A source that is gone for a minute is found again within half of one."""
OPENING_GRACE_S = 2.0
"""After the decision a worker that is ready waits this long for its commit before it asks the record itself."""


class Worker:
    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        adapter: EngineAdapter,
        engine: EngineLoop,
        info: EngineInfo,
        transports: Mapping[str, WeightTransport],
        *,
        member_info: dict[str, Any],
        model_digest: str,
        on_end: Callable[[str], None],
    ) -> None:
        """`on_end(why)`: the worker can't go on (dead engine, superseded); the process should end it."""
        self.bus = bus
        self.subjects = subjects
        self.state = WorkerState(bus.name, secrets.token_hex(8))
        self.updates = WeightUpdates(adapter, info, engine, transports)
        self.generation = GenerationService(bus, adapter, engine, self.state)
        self._adapter = adapter
        self._engine = engine
        self._info = info
        self._member_info = member_info
        self._model_digest = model_digest
        self._on_end = on_end
        self._registration = Registration(
            bus,
            subjects.members,
            self.state.instance_id,
            self.state.incarnation,
            member_info,
            lambda: on_end("another process has taken this instance id"),
        )
        self._dispatcher = Dispatcher(self.state, self._handlers(), self._ping)
        self._changing = asyncio.Lock()
        """Ops that change the engine run one at a time."""
        self._record: DecisionRecord | None = None
        self._settle_wanted = asyncio.Event()
        self._gate_fence = 0
        self._last_commit: ops.CommittedReply | None = None
        self._engine_alive = True
        self._told: bytes = b""
        self._tasks: set[asyncio.Task[None]] = set()

    # ---- life ----

    async def start(self) -> None:
        """Listed, and settled on the committed version or known to be behind it."""
        await self.bus.ensure_bucket(self.subjects.state)
        await self.bus.subscribe(self.subjects.state.feed(RECORD), self._record_changed)
        await self._dispatcher.listen(self.bus, self.subjects)
        await self.generation.start(self.subjects.generate(self.state.instance_id))
        self.state.fence, _ = await live_fence(self.bus, self.subjects.state)
        disabled = await self.bus.get(self.subjects.state, ADMISSION_PREFIX + self.state.instance_id)
        if disabled is not None and disabled.value:
            self.state.close("disabled")
        await self._start_paused_like_the_fleet()
        self.bus.on_reconnect(self._reconnected)
        await self._registration.start()
        await self._settle_once()
        self._spawn(self._settles())
        self._spawn(self._ticks())
        self._spawn(self._watch_engine())

    async def _start_paused_like_the_fleet(self) -> None:
        desired = await read_pause(self.bus, self.subjects.state)
        if (left_s := desired.left_s(time.time())) > 0:
            await self._engine.run(self._adapter.pause("keep", False))
            self.state.pause(desired.mode, time.monotonic(), left_s)

    async def drain(self, timeout_s: float) -> bool:
        """Closes admission and lets requests end; whether they all did."""
        self.state.close("draining")
        self._tell()
        return await self.generation.wait_idle(timeout_s)

    async def stop(self) -> None:
        """Leaves the membership and ends what runs; the engine is the caller's to close."""
        await self._registration.leave()
        await self._dispatcher.stop()
        await self.generation.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(PlaneError):
            await self.updates.drop(None)
        await self.bus.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- the record: which weights should be here ----

    async def _record_changed(self, message: Msg) -> None:
        if message.data:
            self._obey(DecisionRecord.decode(message.data))

    async def _reconnected(self) -> None:
        self._settle_wanted.set()

    def _obey(self, record: DecisionRecord) -> None:
        """A decision is known: from now on only its weights are served."""
        self._record = record
        if not self.state.holds(record):
            self.state.close("behind", self.state.closed.get("behind", ""))
        elif self.state.version != record.version and not self._changing.locked():
            self._relabel(record)
        self._settle_wanted.set()
        self._tell()

    def _relabel(self, record: DecisionRecord) -> None:
        """Equal bytes under another name: nothing moves but the label."""
        self.state.version = record.version
        self._adapter.set_version(record.version)

    async def _settles(self) -> None:
        wait_s = HEAL_RETRY_S
        while True:
            await self._settle_wanted.wait()
            self._settle_wanted.clear()
            if await self._settle_once():
                wait_s = HEAL_RETRY_S
                continue
            # Bounded retries with growing pauses; a new decision or an operator's `enable` comes at once.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._settle_wanted.wait()
            wait_s = min(MAX_HEAL_RETRY_S, wait_s * 2)
            self._settle_wanted.set()

    async def _settle_once(self) -> bool:
        """Brings the worker to the committed version and opens it. False: it should be tried again."""
        try:
            record = await self._read_or_make_record()
            self._record = record
            if not self.state.holds(record):
                await self._catch_up(record)
            elif self.state.version != record.version:
                self._relabel(record)
            self.state.open("behind")
            self.state.open("starting")
            return True
        except PlaneError as error:
            self.state.close("behind", why(error))
            log.warning("%s is not at the committed version: %s", self.state.instance_id, error)
            return False
        except Exception as error:
            self.state.close("behind", why(error))
            log.exception("%s could not settle", self.state.instance_id)
            return False
        finally:
            self._tell()

    async def _read_or_make_record(self) -> DecisionRecord:
        """The committed version; the first worker of all fixes sequence 0 by its own model."""
        state = self.subjects.state
        record = await read_record(self.bus, state)
        if record is None:
            first = WeightVersion(secrets.token_hex(4), 0, "initial", self._model_digest)
            with contextlib.suppress(WrongSequence):
                await self.bus.create(state, RECORD, DecisionRecord(first, "", None).encode())
            record = await read_record(self.bus, state)
            if record is None:
                raise BusUnreachable("the record could not be written")
        if self.state.version is None and record.version.digest == self._model_digest:
            self._relabel(record)
        return record

    async def _catch_up(self, record: DecisionRecord) -> None:
        self.state.close("behind", "")
        staged = self.updates.staged
        if staged is not None and staged.update_id == record.update_id:
            await asyncio.sleep(OPENING_GRACE_S)  # its coordinator is about to say commit
            if self.state.holds(record):
                return
        async with self._changing:
            if self.state.holds(record):
                return
            if self.updates.staged is not None and self.updates.staged.update_id == record.update_id:
                staged = self.updates.take(record.update_id, record.version.digest)
            else:
                if record.transport is None:
                    raise Conflict(
                        f"this worker's model has the digest {self._model_digest}, the fleet's first version is "
                        f"{record.version.digest}: start it with the fleet's model",
                        field="model",
                    )
                if not record.refetchable:
                    raise Conflict(
                        "source_gone: the committed weights can't be fetched again; waiting for an update"
                    )
                staged = await self.updates.fetch(
                    record.transport, record.version.digest, record.cast, self.state.fence
                )
            await self._swap(staged.weights, record.version, "keep", keep_pause=False)
        log.info("%s holds the committed version %s", self.state.instance_id, record.version.label)

    async def _swap(
        self, weights: Any, version: WeightVersion, mode: Any, *, keep_pause: bool
    ) -> ops.CommittedReply:
        """Pause, swap, flush, resume. Generation that was paused before stays so."""
        start = time.monotonic()
        was_paused = self.state.pause_mode is not None
        if not was_paused:
            await self._engine.run(self._adapter.pause(mode, False))
        try:
            # Until the new weights are in, what the engine holds is no version at all.
            self.state.close("behind", self.state.closed.get("behind", ""))
            self.state.version, before = None, self.state.version
            try:
                flushed, _ = await self.updates.swap(weights, version)
            except InvalidRequest:
                self.state.version = before  # refused before anything was written
                raise
            self.state.version = version
            self.state.open("behind")
        finally:
            if not was_paused and not keep_pause:
                await self._engine.run(self._adapter.resume())
        if keep_pause and not was_paused:
            self.state.pause(mode, time.monotonic(), ops.DEFAULT_PAUSE_LEASE_S)
        return ops.CommittedReply(
            version=ops.Version(**version.to_wire()), cache_flushed=flushed, swap_s=time.monotonic() - start
        )

    # ---- time ----

    async def _ticks(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                if self.state.pause_ran_out(time.monotonic()):
                    await self._pause_ran_out()
                if "updating" in self.state.closed or self.updates.staged is not None:
                    await self._ask_after_coordinator()
                self._tell()
            except PlaneError as error:
                log.debug("tick: %s", error)

    async def _pause_ran_out(self) -> None:
        """Nobody is paused for ever because a trainer died; only a worker with sound weights goes on."""
        if self.state.closed.keys() & {"behind", "memory", "starting"}:
            return
        log.warning("%s: the pause's lease has ended, resuming", self.state.instance_id)
        async with self._changing:
            await self._engine.run(self._adapter.resume())
            self.state.resume()

    async def _ask_after_coordinator(self) -> None:
        """A gate or a staging belongs to a coordinator; when that is gone, the record decides."""
        fence, held = await live_fence(self.bus, self.subjects.state)
        staged = self.updates.staged
        if staged is not None and not (held and fence <= staged.fence):
            session = await read_session(self.bus, self.subjects.state)
            record = await read_record(self.bus, self.subjects.state)
            decided = record is not None and record.update_id == staged.update_id
            waiting = session is not None and session.update_id == staged.update_id and session.live(time.time())
            if not decided and not waiting and staged is self.updates.staged:
                log.warning("%s: the update %s was given up: dropped", self.state.instance_id, staged.update_id)
                await self.updates.drop(staged.update_id)
        if "updating" in self.state.closed and not (held and fence <= self._gate_fence):
            log.warning("%s: the coordinator of the gate is gone: asking the record", self.state.instance_id)
            self.state.open("updating")
            self.state.close("behind", "")
            self._settle_wanted.set()

    async def _watch_engine(self) -> None:
        while True:
            await asyncio.sleep(LIVENESS_INTERVAL_S)
            try:
                await self._round_trip(LIVENESS_TIMEOUT_S)
                self._engine_alive = True
                if self.state.open("engine"):
                    self._tell()
            except EngineFailed as error:
                self._engine_alive = False
                self.state.close("engine", error.message)
                self._tell()
                if "no round trip" not in error.message:
                    self._on_end(f"the engine is dead: {error.message}")
                    return

    async def _round_trip(self, timeout_s: float) -> float:
        start = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                await self._engine.run(self._adapter.liveness())
        except TimeoutError as error:
            raise EngineFailed(f"no round trip through the engine within {timeout_s:g} s") from error
        return time.monotonic() - start

    def _tell(self) -> None:
        """Publishes what changed, for the frontends' routing."""
        running, waiting = self._adapter.load()
        message: bytes = msgpack.packb(
            {
                "instance_id": self.state.instance_id,
                "incarnation": self.state.incarnation,
                "revision": self._registration.revision,
                "admission": self.state.admission().model_dump(),
                "version": self.state.version.to_wire() if self.state.version else None,
                "paused": self.state.pause_mode is not None,
                "running": running,
                "waiting": waiting,
            }
        )
        if message != self._told:
            self._told = message
            self._spawn(self._publish_status(message))

    async def _publish_status(self, message: bytes) -> None:
        with contextlib.suppress(nats.errors.Error):
            await self.bus.nc.publish(self.subjects.status, message)

    # ---- ops ----

    def _handlers(self) -> dict[str, Any]:
        return {
            "liveness": self._op_liveness,
            "describe": self._op_describe,
            "state": self._op_state,
            "pause": self._op_pause,
            "resume": self._op_resume,
            "flush_cache": self._op_flush_cache,
            "abort_requests": self._op_abort_requests,
            "init_transport": self._op_init_transport,
            "destroy_transport": self._op_destroy_transport,
            "prepare_update": self._op_prepare,
            "commit_update": self._op_commit,
            "abort_update": self._op_abort_update,
            "update_weights": self._op_update_weights,
            "release_memory": self._op_release_memory,
            "resume_memory": self._op_resume_memory,
            "check_weights": self._op_check_weights,
            "set_admission": self._op_set_admission,
            "drain": self._op_drain,
        }

    def _ping(self) -> int:
        return self._registration.revision

    async def _op_liveness(self, body: ops.Empty, fence: int) -> ops.LivenessReply:
        return ops.LivenessReply(round_trip_s=await self._round_trip(LIVENESS_TIMEOUT_S))

    def _op_state(self, body: ops.Empty, fence: int) -> ops.StateReply:
        state, staged = self.state, self.updates.staged
        admission = state.admission()
        running, waiting = self._adapter.load()
        return ops.StateReply(
            ready=self._engine_alive and admission.open,
            engine=self._info.engine,
            engine_alive=self._engine_alive,
            pause_state="paused" if state.pause_mode else "running",
            pause=state.pause_state(time.monotonic()),
            admission=admission,
            version=state.wire_version(),
            applied_weight_version=state.version.label if state.version else None,
            staged=ops.Version(run="", sequence=0, label=staged.label, digest=staged.digest) if staged else None,
            loras=[],
            running=running,
            waiting=waiting,
            fence=state.fence,
            draining="draining" in state.closed,
        )

    def _op_describe(self, body: ops.Empty, fence: int) -> ops.DescribeReply:
        spec = self._adapter.weight_spec()
        return ops.DescribeReply(
            engine=self._info.engine,
            engine_version=self._info.engine_version,
            model=self._member_info["model"],
            model_path=self._member_info["model_path"],
            dtype=self._info.dtype,
            device=self._info.device,
            world_size=self._info.world_size,
            vocab_size=self._info.vocab_size,
            max_model_len=self._info.max_model_len,
            transports=self._member_info["transports"],
            capabilities=dict(self._info.capabilities),
            tensors=len(spec),
            weight_bytes=sum(tensor.nbytes for tensor in spec.values()),
            version=self.state.wire_version(),
        )

    async def _op_pause(self, body: ops.Pause, fence: int) -> ops.PauseReply:
        async with self._changing:
            await self._engine.run(self._adapter.pause(body.mode, body.clear_cache))
            self.state.pause(body.mode, time.monotonic(), body.lease_s)
        self._tell()
        return ops.PauseReply(pause_state="paused", cache_flushed=body.clear_cache)

    async def _op_resume(self, body: ops.Empty, fence: int) -> ops.PauseReply:
        async with self._changing:
            await self._engine.run(self._adapter.resume())
            self.state.resume()
        self._tell()
        return ops.PauseReply(pause_state="running")

    async def _op_flush_cache(self, body: ops.Empty, fence: int) -> ops.FlushReply:
        async with self._changing:
            if not await self._engine.run(self._adapter.flush_cache()):
                raise Conflict("the engine refused to flush its cache", fix="pause first, then flush")
        return ops.FlushReply()

    async def _op_abort_requests(self, body: ops.AbortRequests, fence: int) -> ops.AbortedReply:
        return ops.AbortedReply(aborted=await self._engine.run(self._adapter.abort(body.request_ids)))

    async def _op_init_transport(self, body: ops.InitTransport, fence: int) -> ops.Empty:
        transport = self.updates.transport(body.backend)
        await asyncio.to_thread(transport.init, body.model_dump())
        return ops.Empty()

    async def _op_destroy_transport(self, body: ops.DestroyTransport, fence: int) -> ops.Empty:
        await asyncio.to_thread(self.updates.transport(body.backend).destroy)
        return ops.Empty()

    async def _op_prepare(self, body: ops.Prepare, fence: int) -> ops.PreparedReply:
        self._check_memory()
        return await self.updates.prepare(
            body.update_id,
            body.transport.model_dump(),
            label=body.label,
            digest=body.digest,
            cast=body.cast,
            fence=fence,
            target=body.target.model_dump(),
            encoding=body.encoding,
        )

    def _check_memory(self) -> None:
        if self.state.released:
            raise Conflict(
                f"memory is released ({', '.join(sorted(self.state.released))})",
                field="memory",
                fix="resume_memory first",
            )

    async def _op_commit(self, body: ops.Commit, fence: int) -> ops.CommittedReply:
        version = WeightVersion(**body.version.model_dump())
        if self.state.version == version and self._last_commit is not None:
            return self._last_commit  # told twice
        async with self._changing:
            staged = self.updates.take(body.update_id, version.digest)
            try:
                self._last_commit = await self._swap(
                    staged.weights, version, body.pause_mode, keep_pause=body.keep_pause
                )
            except BaseException:
                # Decided, but not here: heal from the record.
                self.state.close("behind", "the swap failed")
                self._settle_wanted.set()
                raise
        self._tell()
        return self._last_commit

    async def _op_abort_update(self, body: ops.AbortUpdate, fence: int) -> ops.AbortUpdateReply:
        return ops.AbortUpdateReply(discarded=await self.updates.drop(body.update_id))

    async def _op_update_weights(self, body: ops.UpdateWeights, fence: int) -> ops.CommittedReply:
        """Prepare and commit on this worker alone: only towards the version that the fleet has committed."""
        record = await read_record(self.bus, self.subjects.state)
        assert record is not None, "a registered worker has settled"
        self._check_memory()
        staging_id = f"alone-{secrets.token_hex(8)}"
        reply = await self.updates.prepare(
            staging_id,
            body.transport.model_dump(),
            label=body.version or record.version.label,
            digest=body.digest,
            cast=body.cast,
            fence=fence,
            target=body.target.model_dump(),
            encoding=body.encoding,
        )
        if reply.digest != record.version.digest:
            await self.updates.drop(staging_id)
            raise Conflict(
                f"the fleet has committed {record.version.label} ({record.version.digest}), these weights are "
                f"{reply.digest}: one worker alone can't take others",
                field="transport",
                fix="update the fleet: POST /v1/rl/update_weights, or RlClient.update_weights",
            )
        async with self._changing:
            staged = self.updates.take(staging_id, reply.digest)
            done = await self._swap(
                staged.weights, record.version, body.policy.pause_mode, keep_pause=body.policy.keep_pause
            )
        self._settle_wanted.set()
        return done

    async def _op_release_memory(self, body: ops.MemoryTags, fence: int) -> ops.MemoryReply:
        self._refuse_incapable("release_memory")
        async with self._changing:
            self.state.close("memory", "released: " + ", ".join(body.tags))
            self._tell()
            await self._engine.run(self._adapter.release_memory(list(body.tags)))
            self.state.released |= set(body.tags)
        return ops.MemoryReply(tags=sorted(self.state.released))

    async def _op_resume_memory(self, body: ops.MemoryTags, fence: int) -> ops.MemoryReply:
        self._refuse_incapable("resume_memory")
        async with self._changing:
            await self._engine.run(self._adapter.resume_memory(list(body.tags)))
            had_weights = "weights" in self.state.released and "weights" in body.tags
            self.state.released -= set(body.tags)
            if not self.state.released:
                self.state.open("memory")
            if had_weights:
                # A deep sleep discards them: nobody serves before they are there again, verified.
                self.state.version = None
                self.state.close("behind", "the weights were released")
                self._settle_wanted.set()
        self._tell()
        return ops.MemoryReply(tags=sorted(self.state.released))

    def _refuse_incapable(self, op: str) -> None:
        if (reason := self._info.capabilities.get(op)) is not None:
            raise Unsupported(f"{self._info.engine} can't {op}: {reason}", field="op")

    async def _op_check_weights(self, body: ops.CheckWeights, fence: int) -> ops.CheckWeightsReply:
        async with self._changing:
            if body.action == "reset_tensors":
                self.state.version = None
                self.state.close("behind", "reset_tensors overwrote the weights")
                self._tell()
            ranks = await self._engine.run(self._adapter.check_weights(body.action))
            if body.action == "reset_tensors":
                self._settle_wanted.set()
        return ops.CheckWeightsReply(ranks=ranks)

    def _op_set_admission(self, body: ops.SetAdmission, fence: int) -> ops.AdmissionState:
        if body.open:
            self.state.open(body.reason)
            self._settle_wanted.set()  # an operator's enable also forces a try to heal
        else:
            self.state.close(body.reason)
            if body.reason == "updating":
                self._gate_fence = fence
        self._tell()
        return self.state.admission()

    async def _op_drain(self, body: ops.Drain, fence: int) -> ops.DrainReply:
        drained = await self.drain(body.timeout_s)
        aborted = 0 if drained else await self._engine.run(self._adapter.abort(None))
        return ops.DrainReply(drained=drained, aborted=aborted)

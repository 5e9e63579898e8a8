"""Which weights should be here: the worker follows the decision record, and swaps, heals and opens by it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from nats.aio.msg import Msg

from rl_plane import ops
from rl_plane.bus import Bus, WrongSequence
from rl_plane.errors import BusUnreachable, Conflict, PlaneError
from rl_plane.lock import live_fence
from rl_plane.record import LEASE_MARGIN_S, SERVING_LEASE_S, DecisionRecord, read_pause, read_record, read_session
from rl_plane.subjects import RECORD, Subjects
from rl_plane.versions import WeightVersion
from worker.engine_loop import EngineLoop
from worker.engines.base import EngineAdapter, PauseMode, Staged
from worker.state import WorkerState
from worker.updates import WeightUpdates, why

log = logging.getLogger("worker.follower")

HEAL_RETRY_S = 1.0
MAX_HEAL_RETRY_S = 30.0
"""A source that is gone for a minute is found again within half of one."""
CONFIRM_S = SERVING_LEASE_S / 3
"""Two confirmations may be lost before the lease is."""
COMMIT_GRACE_S = 4.0
"""After the decision a worker that is prepared waits this long for its commit before it swaps by itself."""


class RecordFollower:
    """Keeps one worker's weights the committed ones. `tell` is called when its state has changed."""

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        state: WorkerState,
        adapter: EngineAdapter,
        engine: EngineLoop,
        updates: WeightUpdates,
        model_path: str,
        tell: Callable[[], None],
    ) -> None:
        self.changing = asyncio.Lock()
        """Whatever changes the engine runs one at a time."""
        self.gate_fence = 0
        """Whose gate it is, while admission is closed for `updating`."""
        self._bus = bus
        self._subjects = subjects
        self._state = state
        self._adapter = adapter
        self._engine = engine
        self._updates = updates
        self._model = {"backend": "filesystem", "path": model_path}
        assert state.digest is not None, "the engine was started with a model"
        self._model_digest = state.digest
        self._tell = tell
        self._record: DecisionRecord | None = None
        self._record_sequence = 0
        self._learnt_at = 0.0
        """When this worker first heard of the record's version."""
        self._swapped = asyncio.Event()
        self._wanted = asyncio.Event()
        self._last_commit: ops.CommittedReply | None = None

    async def start(self) -> None:
        await self._bus.ensure_bucket(self._subjects.state)
        await self._bus.subscribe(self._subjects.state.feed(RECORD), self._heard)
        self._bus.on_reconnect(self._reconnected)

    async def _heard(self, message: Msg) -> None:
        if message.data:
            self._learn(DecisionRecord.decode(message.data), int((message.headers or {})["Nats-Sequence"]))

    async def _reconnected(self) -> None:
        self.settle_soon()

    def _learn(self, record: DecisionRecord, sequence: int) -> None:
        """A decision is known: from now on only its weights are served. What was read may be older than what
        was heard; the stream's sequence tells."""
        if sequence <= self._record_sequence:
            return
        if self._record is None or self._record.version != record.version:
            self._learnt_at = time.monotonic()
        self._record, self._record_sequence = record, sequence
        if record.open:
            self._state.open("updating")
        else:
            self._state.close("updating")
        if not self._state.holds(record):
            self._state.close("behind", self._state.closed.get("behind", ""))
        self.settle_soon()
        self._tell()

    async def keep_lease(self) -> None:
        """Confirms the serving lease, for ever."""
        while True:
            await asyncio.sleep(CONFIRM_S)
            try:
                await self._read_or_make_record()
            except PlaneError as error:
                log.debug("%s could not confirm its lease: %s", self._state.instance_id, error)
            except Exception:
                log.exception("%s could not confirm its lease", self._state.instance_id)

    # ---- settling ----

    def settle_soon(self) -> None:
        self._wanted.set()

    async def run(self) -> None:
        """Settles whenever something asks for it, for ever."""
        wait_s = HEAL_RETRY_S
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            if await self.settle():
                wait_s = HEAL_RETRY_S
                continue
            # Bounded retries with growing pauses; a new decision or an operator's `enable` comes at once.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._wanted.wait()
            wait_s = min(MAX_HEAL_RETRY_S, wait_s * 2)
            self._wanted.set()

    async def settle(self) -> bool:
        """Brings the worker to the committed version and opens it. False: it should be tried again."""
        try:
            while True:
                record = await self._read_or_make_record()
                if not self._state.holds(record):
                    await self._catch_up(record)
                elif self._state.version != record.version:
                    self._relabel(record)
                if self._record is record and self._state.version == record.version:
                    break  # else another decision came meanwhile
            await self._drop_leftover(record)
            self._state.open("behind")
            self._state.open("starting")
            return True
        except BusUnreachable as error:
            log.info("%s can't read the record now: %s", self._state.instance_id, error)
            return False
        except PlaneError as error:
            self._stay_behind(error)
            log.warning("%s is not at the committed version: %s", self._state.instance_id, error)
            return False
        except Exception as error:
            self._stay_behind(error)
            log.exception("%s could not settle", self._state.instance_id)
            return False
        finally:
            self._tell()

    def _stay_behind(self, error: Exception) -> None:
        if self._record is None or not self._state.holds(self._record):  # a commit may have been faster
            self._state.close("behind", why(error))

    async def _read_or_make_record(self) -> DecisionRecord:
        """The committed version; the first worker of all fixes sequence 0 by its own model, and a store that
        has lost its record gets back the one that a worker remembers."""
        state = self._subjects.state
        asked_at, connection = time.monotonic(), self._bus.identity
        try:
            entry = await self._bus.get(state, RECORD)
        except BusUnreachable:
            await self._bus.ensure_bucket(state)  # the store may have been lost
            entry = None
        if entry is None or entry.value is None:
            first = WeightVersion(secrets.token_hex(4), 0, "initial", self._model_digest)
            make = self._record or DecisionRecord(first, "", None)
            with contextlib.suppress(WrongSequence):
                await self._bus.create(state, RECORD, make.encode())
            entry = await self._bus.get(state, RECORD)
            if entry is None or entry.value is None:
                raise BusUnreachable("the record could not be written")
        self._learn(DecisionRecord.decode(entry.value), entry.sequence)
        assert self._record is not None
        self._state.confirm_lease(asked_at, connection)
        return self._record

    def _relabel(self, record: DecisionRecord) -> None:
        """The bytes are here already, under another name or none: nothing moves but the label."""
        self._state.hold(record.version)
        self._adapter.set_version(record.version)

    async def _catch_up(self, record: DecisionRecord) -> None:
        """One try to swap in the record's weights; where a newer decision comes meanwhile, nothing."""
        self._state.close("behind", self._state.closed.get("behind", ""))
        if self._state.released:
            raise Conflict("memory is released: the weights come back with resume_memory")
        if self._prepared_for(record) is not None:
            await self._wait_for_commit()  # its coordinator is about to say so
        elif not self._state.holds(record):
            await self._fetch(record)
        desired = await read_pause(self._bus, self._subjects.state)
        async with self.changing:
            if self._record is record and not self._state.holds(record):
                weights = self._prepared_for(record)
                if weights is None:
                    raise Conflict("what was fetched was dropped: another update began")
                # The update may have been long ago, and the fleet resumed since.
                keep_pause = record.keep_pause and desired.left_s(time.time()) > 0
                await self._swap(weights, record.version, record.pause_mode, keep_pause=keep_pause)
        if self._state.version == record.version:
            log.info("%s holds the committed version %s", self._state.instance_id, record.version.label)

    def _prepared_for(self, record: DecisionRecord) -> Staged | None:
        """What is staged under the record's update, or was fetched to heal."""
        staged = self._updates.staged
        if staged is None or staged.digest != record.version.digest:
            return None
        return staged.weights if staged.fence is None or staged.update_id == record.update_id else None

    async def _wait_for_commit(self) -> None:
        self._swapped.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(COMMIT_GRACE_S):
                await self._swapped.wait()

    async def _drop_leftover(self, record: DecisionRecord) -> None:
        """Nobody will swap this in any more: the weights are here, by another way."""
        staged = self._updates.staged
        if staged is not None and (staged.fence is None or staged.update_id == record.update_id):
            await self._updates.drop(staged.update_id)

    async def _fetch(self, record: DecisionRecord) -> None:
        transport = record.transport
        if transport is None:  # sequence 0: each worker's own model
            if record.version.digest != self._model_digest:
                raise Conflict(
                    f"this worker's model has the digest {self._model_digest}, the fleet's first version is "
                    f"{record.version.digest}: start it with the fleet's model",
                    field="model",
                )
            transport = self._model
        if not record.refetchable:
            raise Conflict("source_gone: the committed weights can't be fetched again; an update brings new")
        await self._updates.prepare(
            f"heal-{record.version.sequence}",
            transport,
            label=record.version.label,
            digest=record.version.digest,
            cast=record.cast,
            fence=None,
        )

    # ---- swapping ----

    @asynccontextmanager
    async def turn(self, fence: int) -> AsyncIterator[None]:
        """A coordinator's turn to change the engine, if it still is one when the turn comes."""
        async with self.changing:
            self._state.check_fence(fence)
            yield

    async def commit(self, body: ops.Commit, fence: int) -> ops.CommittedReply:
        """The coordinator's decision: swap what is staged."""
        version = WeightVersion(**body.version.model_dump())
        async with self.turn(fence):
            if self._last_commit is not None and self._last_commit["version"] == version.to_wire():
                return self._last_commit  # told twice, or the record was faster
            if self._state.version == version:  # the same bytes as before: only the label has moved
                return ops.CommittedReply(version=version.to_wire(), cache_flushed=False, swap_s=0.0)
            weights = self._updates.staged_for(body.update_id, version.digest)
            done = await self._swap(weights, version, body.pause_mode, keep_pause=body.keep_pause)
        self._tell()
        return done

    async def take_alone(self, body: ops.UpdateWeights, fence: int) -> ops.CommittedReply:
        """Prepare and commit on this worker only: towards the version that the fleet has committed, no other."""
        record = await self._read_or_make_record()
        request = body.transport.model_dump()
        update_id = f"alone-{secrets.token_hex(8)}"
        reply = await self._updates.prepare(
            update_id,
            request,
            label=body.version or record.version.label,
            digest=body.digest,
            cast=body.cast,
            fence=fence,
            target=body.target.model_dump(),
            encoding=body.encoding,
        )
        if reply["digest"] != record.version.digest:
            await self._updates.drop(update_id)
            raise Conflict(
                f"the fleet has committed {record.version.label} ({record.version.digest}), these weights are "
                f"{reply['digest']}: one worker alone can't take others",
                field="transport",
                fix="update the fleet: POST /v1/rl/update_weights, or RlClient.update_weights",
            )
        async with self.turn(fence):
            weights = self._updates.staged_for(update_id, reply["digest"])
            done = await self._swap(
                weights, record.version, body.policy.pause_mode, keep_pause=body.policy.keep_pause
            )
        self.settle_soon()
        return done

    async def _swap(
        self, weights: Staged, version: WeightVersion, mode: PauseMode, *, keep_pause: bool = False
    ) -> ops.CommittedReply:
        """Pause, swap, flush, resume. Generation that was paused before stays so."""
        state = self._state
        start = time.monotonic()
        was_paused = state.pause_mode is not None
        swapped = False
        try:
            if not was_paused:
                await self._engine.run(self._adapter.pause(mode, False))
            state.lose_weights("swapping")  # until the new ones are in
            try:
                flushed = await self._engine.run(self._adapter.swap(weights, version))
            finally:
                self._updates.forget(weights)
            swapped = True
            state.hold(version)
            self._swapped.set()
            if self._record is not None and state.holds(self._record):
                state.open("behind")
        finally:
            if not swapped:
                state.close("behind", "the swap did not end")
                self.settle_soon()  # the record says what should be here
            if not was_paused and not (keep_pause and swapped):
                await self._engine.run(self._adapter.resume())
        if keep_pause and not was_paused:
            state.pause(mode, time.monotonic(), ops.DEFAULT_PAUSE_LEASE_S)
        self._last_commit = ops.CommittedReply(
            version=version.to_wire(), cache_flushed=flushed, swap_s=time.monotonic() - start
        )
        return self._last_commit

    # ---- coordinators that fall silent ----

    async def check_undecided(self, update_id: str | None) -> None:
        """What the record names is decided, whatever its coordinator has heard of it."""
        record = await self._read_or_make_record()
        staged = self._updates.busy_with
        if staged is not None and staged == record.update_id and update_id in (None, staged):
            raise Conflict(f"the update {staged} is committed: it can't be aborted any more")

    async def ask_after_coordinator(self) -> None:
        """A gate or a staging belongs to a coordinator; when that is gone, the record decides."""
        staged = self._updates.staged
        gated = "updating" in self._state.closed
        if staged is not None and staged.fence is None:
            staged = None  # fetched by this worker itself
        if staged is None and not gated:
            return
        fence, held = await live_fence(self._bus, self._subjects.state)
        if staged is not None and staged.fence is not None and not (held and fence <= staged.fence):
            session = await read_session(self._bus, self._subjects.state)
            record = await read_record(self._bus, self._subjects.state)
            decided = record is not None and record.update_id == staged.update_id
            waiting = session is not None and session.update_id == staged.update_id and session.live(time.time())
            if not decided and not waiting and staged is self._updates.staged:
                log.warning("%s: the update %s was given up: dropped", self._state.instance_id, staged.update_id)
                await self._updates.drop(staged.update_id)
        # Without its coordinator's word, the others may serve the version before for as long as their leases.
        waited = time.monotonic() - self._learnt_at > SERVING_LEASE_S + LEASE_MARGIN_S
        if gated and waited and not (held and fence <= self.gate_fence):
            log.warning("%s: the coordinator of the gate is gone: asking the record", self._state.instance_id)
            self._state.close("behind", "")
            self._state.open("updating")
            self.settle_soon()

"""Carries out what `WorkerCore` says, and what coordinators ask: the shell between core, NATS and engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from nats.aio.msg import Msg

from rl_plane.bus.connection import Bus
from rl_plane.bus.lock import fence_of
from rl_plane.bus.sealed_record import bar, restore
from rl_plane.bus.state_store import read_pause, read_session, record_of
from rl_plane.errors import (
    BusUnreachable,
    Conflict,
    EngineFailed,
    InvalidRequest,
    InvalidWeights,
    NotAtBase,
    NotPrepared,
    PlaneError,
)
from rl_plane.protocol import update_requests, worker_ops
from rl_plane.protocol.record import SERVING_LEASE_S, DecisionRecord, Source
from rl_plane.protocol.subjects import LOCK, RECORD, Subjects
from rl_plane.protocol.versions import tensors_digest
from rl_plane.transports.reception import Link
from worker.engines.base import AdapterLost, EngineAdapter, PauseMode
from worker.receive.staging import not_fitting
from worker.reconcile.peers import Peers
from worker.reconcile.staged_updates import Staging, Wanted, WeightUpdates
from worker.reconcile.worker_core import (
    HEAL_RETRY_S,
    SOURCE_GONE,
    Drop,
    Fetch,
    Instruction,
    Read,
    Receiving,
    Relabel,
    Score,
    Swap,
    Unload,
    Wait,
    WorkerCore,
    target_name,
    why,
)
from worker.reconcile.worker_core import Staged as StagedInfo
from worker.reconcile.worker_state import Scores
from worker.runtime.engine_loop import EngineLoop
from worker.runtime.engine_watch import EngineWatch

log = logging.getLogger("worker.reconcile.follower")

CONFIRM_S = SERVING_LEASE_S / 3
"""Two confirmations may be lost before the lease is."""
FREEZE_S = worker_ops.OPS["commit_update"].timeout_s
"""How long a worker that changes by itself waits for its engine to pause: with `wait` running requests end first. It
tries again. What a coordinator asks for waits until that one's deadline."""
SCORE_S = worker_ops.OPS["commit_update"].timeout_s
"""A canary is a prefill of at most 2,048 tokens; an engine on a CPU with a large model takes seconds for it."""
RESTORES = 3
"""Writes of a lost record in a row that somebody else was faster with: then it is looked at later."""


class RecordFollower:
    """Keeps one worker's weights the committed ones. `tell` is called when its state has changed."""

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        core: WorkerCore,
        adapter: EngineAdapter,
        engine: EngineLoop,
        watch: EngineWatch,
        updates: WeightUpdates,
        peers: Peers,
        model_path: str,
        tell: Callable[[], None],
    ) -> None:
        self.changing = asyncio.Lock()
        """Whatever changes the engine runs one at a time."""
        self._bus = bus
        self._subjects = subjects
        self._core = core
        self._state = core.state
        self._adapter = adapter
        self._engine = engine
        self._watch = watch
        self._updates = updates
        self._peers = peers
        self._model = {"backend": "filesystem", "path": model_path}
        self._tell = tell
        self._wanted = asyncio.Event()
        self._last_commit: update_requests.CommittedReply | None = None

    async def start(self) -> None:
        await self._bus.ensure_bucket(self._subjects.state)
        await self._bus.subscribe(self._subjects.state.feed(RECORD), self._heard)
        self._bus.on_reconnect(self._reconnected)

    # ---- the record ----

    async def _heard(self, message: Msg) -> None:
        if message.data:
            record = DecisionRecord.decode(message.data)
            self.learn(record, int((message.headers or {})["Nats-Sequence"]))

    async def _reconnected(self) -> None:
        try:
            await self._read()
        except PlaneError as error:
            log.info("%s can't read the record now: %s", self._state.instance_id, error)
        self.look()

    def learn(self, record: DecisionRecord, written: int) -> None:
        if self._core.learnt(record, written, time.monotonic()):
            self.look()
            self._tell()

    async def keep_lease(self) -> None:
        """Confirms the serving lease, for ever."""
        while True:
            await asyncio.sleep(CONFIRM_S)
            try:
                await self._read()
            except PlaneError as error:
                log.debug("%s could not confirm its lease: %s", self._state.instance_id, error)
            except Exception:
                log.exception("%s could not confirm its lease", self._state.instance_id)

    async def _read(self) -> None:
        """The record as the leader has it. One that it has lost is written back."""
        state = self._subjects.state
        for _ in range(RESTORES):
            asked_at, connection = time.monotonic(), self._bus.identity
            try:
                entry = await self._bus.get(state, RECORD)
            except BusUnreachable:
                await self._bus.ensure_bucket(state)  # the store may have been lost
                entry = None
            record, written = record_of(entry), entry.sequence if entry is not None else 0
            before = self._core.record
            lost = self._core.leader_said(record, written, asked_at, connection, time.monotonic())
            if lost is None:
                if before is not self._core.record:
                    self.look()
                    self._tell()
                return
            await restore(self._bus, state, lost.record, entry)
        raise BusUnreachable("the record could not be written")

    # ---- by itself ----

    def look(self) -> None:
        """Something has changed: what is to do may be another thing."""
        self._wanted.set()

    async def run(self) -> None:
        """Does what the core says, for ever."""
        while True:
            self._wanted.clear()
            instruction = self._core.next(time.monotonic())
            self._tell()
            if isinstance(instruction, Wait):
                await self._wait(instruction)
            elif not await self._try(instruction):
                await self._wait(Wait(time.monotonic() + HEAL_RETRY_S))

    async def settle(self) -> None:
        """Until there is nothing more to do at once, under the serving lease: what was only heard of is no lease."""
        if not await self._try(Read()):
            return
        while not isinstance(instruction := self._core.next(time.monotonic()), Wait):
            if not await self._try(instruction):
                return

    async def _wait(self, wait: Wait) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(wait.until):
                await self._wanted.wait()

    async def _try(self, instruction: Instruction) -> bool:
        """One instruction; what goes wrong is told to the core, which tries again later. False: NATS is away, or the
        same would be tried again at once."""
        try:
            await self._carry_out(instruction)
        except BusUnreachable as error:
            log.info("%s can't reach NATS now: %s", self._state.instance_id, error)
            return False
        except Exception as error:
            expected = isinstance(error, PlaneError)
            log.warning(
                "%s is not at the committed version: %s",
                self._state.instance_id,
                why(error),
                exc_info=not expected,
            )
            words = why(error)
            if isinstance(instruction, Fetch) and isinstance(error, InvalidWeights) and not_fitting(error):
                words = self._core.does_not_fit(instruction, words)
            self._core.fetch_failed(words, time.monotonic())
            if self._state.digest is None:  # frozen requests could wait for ever
                with contextlib.suppress(PlaneError):  # a dead engine's have ended, and its worker will
                    await self._engine.run(self._adapter.abort(None))
            self._tell()
            return self._core.next(time.monotonic()) != instruction
        self._tell()
        return True

    async def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case Read():
                await self._read()
            case Fetch():
                await self._fetch(instruction)
            case Drop(update_id):
                await self._updates.drop(update_id)
            case Swap() | Unload() | Relabel():
                await self._change(instruction)
            case Score():
                async with self.changing:
                    await self.score_wanted()
            case Wait():
                pass

    async def _change(self, instruction: Swap | Unload | Relabel) -> None:
        async with self.changing:
            if self._core.next(time.monotonic()) != instruction:
                return  # a commit was faster, or another decision came
            record = self._core.record
            # Asked in turn with `pause` and `resume`, which write what they want before they ask the workers.
            desired = await read_pause(self._bus, self._subjects.state)
            now = await self._bus.server_time(self._subjects.state) if desired.paused else 0.0
            pause_s = desired.left_s(now)
            # While the update goes on, the fleet may not be known to stay paused yet, and nobody has resumed it since.
            if record is not None and record.keep_pause and not record.final:
                pause_s = max(pause_s, worker_ops.DEFAULT_PAUSE_LEASE_S)
            if self._core.next(time.monotonic()) != instruction:
                return
            await self._step(instruction, pause_s, FREEZE_S)

    async def _fetch(self, fetch: Fetch) -> None:
        """From the recorded source into staging; over the served weights where they don't fit twice."""
        source = fetch.source
        unstaged = self._core.in_place or source.staging == "none"
        wanted = Wanted(
            fetch.update_id,
            source.transport or self._model,
            fetch.name,
            fetch.version.label,
            fetch.version.digest,
            source.cast,
            in_place=unstaged and fetch.name is None and source.base is None and not source.keep_staged,
            keep=source.keep_staged and fetch.name is None,
            base=source.base,
            before=self._links(source.before, source.base),
        )
        if not wanted.in_place:
            await self._staged(wanted, source.refetchable)
            return
        async with self.changing:
            if self._core.next(time.monotonic()) == fetch:
                await self._overwrite(wanted, "keep", FREEZE_S)

    async def _staged(self, wanted: Wanted, refetchable: bool) -> None:
        """From the recorded source, or from a worker that keeps the same weights."""
        try:
            if not refetchable:
                raise InvalidRequest(SOURCE_GONE, field="transport", fix="publish the weights again")
            await self._updates.prepare(wanted)
        except PlaneError as error:
            if isinstance(error, Conflict) and not isinstance(error, NotAtBase):
                raise  # an update has the staging
            if wanted.name is not None or (isinstance(error, InvalidWeights) and not_fitting(error)):
                raise
            assert wanted.digest is not None

            async def take(transport: Mapping[str, Any]) -> None:
                await self._updates.prepare(replace(wanted, transport=transport, base=None, before=()))

            if not await self._peers.bring(wanted.digest, take):
                raise
            log.info("%s has the weights of a peer: %s", self._state.instance_id, why(error))

    # ---- what coordinators ask ----

    @asynccontextmanager
    async def turn(self, fence: int, *, blocks: bool = False) -> AsyncIterator[None]:
        """A coordinator's turn to change the engine, if it still is one when the turn comes. `blocks`: the engine may
        give no answer meanwhile."""
        async with self.changing:
            self._state.check_fence(fence)
            with self._watch.blocking() if blocks else contextlib.nullcontext():
                yield

    async def pause(self, mode: PauseMode, clear_cache: bool) -> bool:
        """The caller has its turn. Whether the cache was cleared. In an engine that may not run, no request can end:
        there what is frozen stays so, whatever is asked."""
        if mode == "wait" and not self._state.may_run:
            mode = "keep"
        return await self._engine.run(self._adapter.pause(mode, clear_cache))

    async def _freeze(self, mode: PauseMode, bound_s: float | None) -> None:
        """The caller has its turn. Where all should stand still already, too: a resume that was cut off may have
        reached the engine. `bound_s`: None: until the caller's deadline, which the dispatcher keeps."""
        try:
            async with asyncio.timeout(bound_s):
                await self.pause(mode if self._state.pause_mode is None else "keep", False)
        except TimeoutError as error:
            raise EngineFailed("the engine did not pause in time") from error
        self._watch.answered()  # after a long step: what blocks it next is not to be taken for a part of that

    async def resume(self) -> None:
        """The caller has its turn. An engine that may not run stays frozen until it may."""
        if self._state.may_run:
            await self._engine.run(self._adapter.resume())
        self._state.resume()

    async def prepare(self, body: update_requests.Prepare, fence: int) -> update_requests.PreparedReply:
        target = body.target.model_dump()
        name = target_name(target)
        if body.transport is None:
            self._updates.check(name, body.staging, None)
            return update_requests.PreparedReply(digest=tensors_digest([]), tensors=0, bytes=0, refetchable=True)
        wanted = self._wanted_of(body, body.transport, name, fence)
        if not wanted.in_place:
            return await self._updates.prepare(wanted)
        async with self.turn(fence):
            self._state.check_weights_here()
            return await self._overwrite(wanted, body.pause_mode, None)

    async def arm(self, body: update_requests.Prepare, fence: int) -> update_requests.ListeningReply:
        """As `prepare`, but answers as soon as every rank listens."""
        if body.transport is None or body.staging == "none":
            raise InvalidRequest("staged weights are listened for", field="transport", fix="use prepare_update")
        name = target_name(body.target.model_dump())
        await self._updates.arm(self._wanted_of(body, body.transport, name, fence))
        return update_requests.ListeningReply(listening=True)

    def _wanted_of(
        self, body: update_requests.Prepare, transport: update_requests.Transport, name: str | None, fence: int
    ) -> Wanted:
        """Checked: this worker and its engine can do it."""
        self._updates.check(name, body.staging, transport.backend, self._state.adapters)
        return Wanted(
            body.update_id,
            transport.model_dump(),
            name,
            body.label,
            body.digest,
            body.cast,
            fence,
            in_place=body.staging == "none" and name is None,
            keep=body.keep_staged and name is None,
            base=body.base,
            before=self._links(body.before, body.base),
            canary_file=body.canary_file,
        )

    def _links(self, before: Source | None, base: str | None) -> list[Link]:
        if before is None or base is None:
            return []
        return [
            Link(digest, source.transport or self._model, source.refetchable)
            for digest, source in before.chain(base)
        ]

    async def _overwrite(
        self, wanted: Wanted, mode: PauseMode, bound_s: float | None
    ) -> update_requests.PreparedReply:
        """The caller has its turn, and keeps it to the end: nobody may resume an engine that is half written.
        `bound_s`: of the pause before it, as `_freeze` has it."""
        freezing: asyncio.Task[None] | None = None
        waits = True

        async def taint() -> None:
            nonlocal freezing
            freezing = asyncio.create_task(self._freeze(mode, bound_s)) if waits else None
            if freezing is not None:
                await asyncio.wait([freezing])
            if freezing is None or freezing.cancelled():
                raise EngineFailed("the deadline has passed, and the engine was not paused")
            freezing.result()
            if waits:
                blocks.enter_context(self._watch.blocking())  # from here on only: a pause is answered
            self._core.overwriting()
            self.look()  # for a caller that is gone when it ends
            self._tell()

        try:
            with contextlib.ExitStack() as blocks:
                if self._updates.busy_with == wanted.update_id:  # asked again
                    blocks.enter_context(self._watch.blocking())
                return await self._updates.prepare(wanted, taint)
        except BaseException:
            waits = False
            if freezing is not None:
                freezing.cancel()  # the receive outlives its caller, whose deadline bounds this
            if self._state.digest is None:
                self._core.overwrite_failed()
            self.look()
            raise

    async def commit(self, body: update_requests.Commit, fence: int) -> update_requests.CommittedReply:
        """The coordinator's decision: swap what is staged."""
        record = body.record
        async with self.turn(fence):
            self._core.learnt(record, body.sequence, time.monotonic())
            done = self._last_commit
            if (
                done is None or done["version"] != record.made.to_wire()
            ):  # else told twice, or it was faster itself
                done = update_requests.CommittedReply(
                    version=record.made.to_wire(), cache_flushed=False, swap_s=0.0
                )
            numerics = self._core.numerics
            try:
                while (step := self._core.commit_step(record)) is not None:
                    done = await self._step(step, body.pause_s, None) or done
                await self.score_wanted()
            except NotPrepared:
                if numerics.scores_for(record) is None:
                    raise
                # These weights have failed the canary, and are fetched again: the verdict needs what they gave.
            scores = numerics.scores_for(record)
            if scores is not None and numerics.kind is not None:
                vectors = [list(vector) for vector in scores.vectors]
                done = {**done, "canary": update_requests.ScoresReply(kind=numerics.kind, vectors=vectors)}
        self.look()
        self._tell()
        return done

    async def take_alone(self, body: update_requests.UpdateWeights, fence: int) -> update_requests.CommittedReply:
        """Prepare and commit on this worker only: towards the version that the fleet has committed, no other."""
        await self._read()
        record = self._core.record
        assert record is not None
        if body.transport is None or target_name(body.target.model_dump()) is not None:
            raise Conflict("one worker alone takes base weights only", field="target", fix="update the fleet")
        if body.encoding != "full":
            raise Conflict(
                "one worker alone takes a full version: only an update of the fleet changes one",
                field="encoding",
                fix="update the fleet",
            )
        self._updates.check(None, body.policy.staging, body.transport.backend)
        wanted = Wanted(
            f"alone-{secrets.token_hex(8)}",
            body.transport.model_dump(),
            None,
            body.version or record.version.label,
            body.digest,
            body.cast,
            keep=body.policy.keep_staged,
        )
        reply = await self._updates.prepare(wanted)
        if reply["digest"] != record.version.digest:
            await self._updates.drop(wanted.update_id)
            raise Conflict(
                f"the fleet has committed {record.version.label} ({record.version.digest}), these weights are "
                f"{reply['digest']}: one worker alone can't take others",
                field="transport",
                fix="update the fleet: POST /v1/rl/update_weights, or RlClient.update_weights",
            )
        async with self.turn(fence):
            self._state.check_weights_here()
            staged, done = self._core.staged, None
            if staged is not None and staged.update_id == wanted.update_id:
                swap = Swap(wanted.update_id, None, record.version, body.policy.pause_mode)
                done = await self._step(
                    swap, worker_ops.DEFAULT_PAUSE_LEASE_S if body.policy.keep_pause else 0.0, None
                )
            elif self._state.version == record.version:  # it was faster by itself
                done = self._last_commit
        self.look()
        if done is None:
            raise Conflict("another update came meanwhile", fix="read the worker's state")
        return done

    # ---- one step ----

    async def _step(
        self, step: Swap | Unload | Relabel, pause_s: float, freeze_s: float | None
    ) -> update_requests.CommittedReply | None:
        """`pause_s`: generation stays paused so long, from now on; 0: it is as it was. `freeze_s`: see `_freeze`."""
        if isinstance(step, Relabel):
            if pause_s:  # before it opens, or it would serve meanwhile
                await self._freeze(step.record.pause_mode, freeze_s)
            self._state.keep_paused(step.record.pause_mode, time.monotonic(), pause_s)
            self._adapter.set_version(step.record.version)
            for name, version in step.record.held.adapters.items():
                self._adapter.set_adapter_version(name, version)
            self._core.relabelled(step.record)
            return None
        return await self._swap(step, pause_s, freeze_s)

    async def _swap(
        self, swap: Swap | Unload, pause_s: float, freeze_s: float | None
    ) -> update_requests.CommittedReply:
        """Pause, swap, flush, resume. Generation that was paused before stays so."""
        state, core = self._state, self._core
        start = time.monotonic()
        was_paused = state.pause_mode is not None
        swapped = False
        taken: Staging | None = None
        try:
            await self._freeze(swap.pause_mode, freeze_s)
        except BaseException as error:  # nothing is touched: what is staged stays, and is tried again
            words = "the deadline has passed" if isinstance(error, asyncio.CancelledError) else why(error)
            core.fetch_failed(f"the engine is not paused: {words}", time.monotonic())
            self.look()
            raise
        try:
            with self._watch.blocking():
                if core.numerics.have_run:  # the running requests' KV is of weights that did not pass
                    await self._engine.run(self._adapter.abort(None))
                taken = self._updates.staged if isinstance(swap, Swap) else None  # the exchange uses it up
                flushed = await self._exchange(swap)
                self._watch.answered()
            core.swapped(swap, time.monotonic())
            swapped = True
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
                    # The worker is open by now: a frozen engine under it would be nobody's to thaw.
                    await self._engine.run(self._adapter.resume(), to_its_end=True)
            finally:
                if swapped:  # also where the deadline comes in the thaw
                    done = self._noted(swap, taken, flushed, time.monotonic() - start)
                    await self._updates.swapped()
        state.keep_paused(swap.pause_mode, time.monotonic(), pause_s)
        return done

    def _noted(
        self, swap: Swap | Unload, taken: Staging | None, flushed: bool, swap_s: float
    ) -> update_requests.CommittedReply:
        record = self._core.record
        made = record.made if record is not None else swap.version if isinstance(swap, Swap) else None
        assert made is not None
        done = update_requests.CommittedReply(version=made.to_wire(), cache_flushed=flushed, swap_s=swap_s)
        if taken is not None and "ranks" in taken.reply:
            done["ranks"] = taken.reply["ranks"]
        self._last_commit = done
        log.info("%s holds %s", self._state.instance_id, made.label)
        return done

    async def score_wanted(self) -> None:
        """The caller has its turn. Scores the record's canary, if these weights were not scored yet. Running requests
        of a worker that fails end here: their tokens do not go out."""
        core = self._core
        canary = core.numerics.wanted(core.record)
        if canary is None:
            return
        sequences = [list(tokens) for tokens in canary.sequences]
        try:
            with self._watch.blocking():
                async with asyncio.timeout(SCORE_S):
                    vectors = await self._engine.run(self._adapter.score(sequences))
                self._watch.answered()
            scores = Scores(canary.sequences, vectors)
        except TimeoutError as error:
            raise EngineFailed(f"the engine did not score the canary within {SCORE_S:g} s") from error
        except (EngineFailed, InvalidRequest) as error:  # another engine of the fleet may take longer sequences
            scores = Scores(canary.sequences, [], error.message)
        core.scored(scores, time.monotonic())
        if core.numerics.flow == "cut":
            log.error("%s: %s", self._state.instance_id, self._state.closed.get("numerics"))
            await self._engine.run(self._adapter.abort(None))
        self._tell()

    async def _exchange(self, swap: Swap | Unload) -> bool:
        """Whether the prefix cache was flushed."""
        if isinstance(swap, Unload):
            self._core.swapping(swap)
            self._tell()
            return await self._engine.run(self._adapter.swap_adapter(swap.name, None, None))
        staging = self._updates.take(swap.update_id)
        self._core.swapping(swap)
        self._tell()
        if swap.name is not None:
            return await self._engine.run(self._adapter.swap_adapter(swap.name, staging, swap.version))
        if staging is not None:
            return await self._engine.run(self._adapter.swap(staging, swap.version))
        if not await self._engine.run(self._adapter.flush_cache()):
            raise EngineFailed("the engine did not flush its prefix cache: new requests would reuse older KV")
        self._adapter.set_version(swap.version)
        return True

    # ---- coordinators that fall silent ----

    async def ask_after_coordinator(self) -> None:
        """A staging, a reception or a roll belongs to a coordinator; when that is gone, the record decides."""
        if self._core.ticked(time.monotonic(), self.changing.locked()):
            self.look()
        self._look_at_receiving()
        if not self._core.depends_on_coordinator():
            return
        # In this order: a session that is over was decided or aborted before, and the record tells which.
        before = self._core.record
        fence, held = fence_of(await self._bus.get(self._subjects.state, LOCK))
        if self._core.coordinator_holds(fence, held, time.monotonic()):
            return  # as mostly; a thousand workers that read on here would take the leader's time from the update
        session = await read_session(self._bus, self._subjects.state)
        await self._read()
        if self._core.record is not before:
            return  # a newer decision has a coordinator of its own, which the lock as read knows nothing of
        waiting_for = session.update_id if session is not None else None
        given_up = self._core.given_up(waiting_for)
        if given_up is not None and await self._is_barred(given_up.fence):
            self._look_at_receiving()
            # Not what the next coordinator has asked for meanwhile.
            if given_up == self._core.given_up(waiting_for):
                log.warning("%s: the update %s was given up: dropped", self._state.instance_id, given_up.update_id)
                await self._updates.give_up(given_up.update_id)
        self.look()

    def _look_at_receiving(self) -> None:
        wanted = self._updates.receiving
        if wanted is None or wanted.fence is None:
            self._core.receiving = None
        else:
            self._core.receiving = Receiving(wanted.update_id, wanted.fence)

    async def _is_barred(self, fence: int) -> bool:
        """Bars a coordinator that has lost the lock from the record: a decision that is still on its way would need
        what is staged here. False: the record has changed meanwhile."""
        state = self._subjects.state
        entry = await self._bus.get(state, RECORD)
        if entry is None or record_of(entry) != self._core.record:
            await self._read()
            return False
        return await bar(self._bus, state, entry, fence)

    async def abort(self, update_id: str | None, fence: int) -> bool:
        """Whether there was something."""
        await self._read()
        self._state.check_fence(fence)
        self._core.check_undecided(update_id)
        found = await self._updates.drop(update_id)
        self.look()
        return found


def staged_info(staging: Staging | None) -> StagedInfo | None:
    """What the core has to know of it."""
    if staging is None:
        return None
    wanted = staging.wanted
    return StagedInfo(wanted.update_id, wanted.name, staging.reply["digest"], wanted.fence, wanted.in_place)

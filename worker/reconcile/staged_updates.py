"""Receives and verifies one update at a time into staging, until the worker swaps it in or drops it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from dataclasses import dataclass, replace

from rl_plane._util import tracing
from rl_plane.errors import Conflict, EngineFailed, InvalidRequest, PlaneError, Unsupported, UpdateAborted
from rl_plane.protocol.relay import SourceUse
from rl_plane.protocol.transport_traits import known_transports
from rl_plane.protocol.update_requests import CanaryLimits, PreparedReply, ReceivePart, ReceiveRequest
from rl_plane.protocol.worker_ops import UpdateOnWorker
from worker.engines.base import EngineAdapter, EngineInfo
from worker.receive.received_bytes import ByteCount
from worker.receive.receives_weights import ReceivesWeights
from worker.reconcile.instructions import StagedVersion
from worker.reconcile.receive_report import update_on_worker
from worker.reconcile.receive_span import add_received

log = logging.getLogger("worker.reconcile.staged_updates")

ABORT_WAIT_S = 30.0
"""An abort waits this long for a receive to end. A receive checks between two tensors whether it is cancelled."""
LOOK_S = 0.2
"""The interval at which a receive that waits for a swap checks whether it is cancelled."""

Taint = Callable[[], Awaitable[None]]
"""Runs before the first byte is written over the served weights."""


async def _nothing() -> None:
    return None


@dataclass(slots=True)
class StagedUpdate:
    """The weights of one update, complete and verified."""

    request: ReceiveRequest
    fence: int | None
    """The fence of the coordinator that asked last. None: the worker fetched the weights by itself, to heal."""
    name: str | None
    """The name in the engine's staging. None: the weights are in place already."""
    reply: PreparedReply
    began: float
    """Monotonic seconds at which the receive began."""
    came: ByteCount | None = None
    """The bytes that came. None: the engine does not count them."""

    def for_core(self) -> StagedVersion:
        """The facts that the core decides by."""
        request = self.request
        return StagedVersion(
            request.update_id, request.adapter, self.reply["digest"], self.fence, request.in_place
        )


@dataclass(slots=True)
class _Receive:
    """A receive that is under way, or has failed."""

    request: ReceiveRequest
    fence: int | None
    """The fence of the coordinator that asked last. None: the worker heals."""
    staging: str
    """The name in the engine's staging."""
    task: asyncio.Task[StagedUpdate]
    cancelled: threading.Event
    opened: asyncio.Future[None]
    """Done when every rank knows what will come, and listens for it."""
    began: float
    """Monotonic seconds."""
    held: bool = False
    """It waits until a swap has read the copy that it changes."""
    listening: bool = False
    """The coordinator asks for the outcome by a later call."""

    @property
    def update_id(self) -> str:
        return self.request.update_id


@dataclass(eq=False, slots=True)
class _ArrivingUpdate:
    """A coordinator's call for an update, from its arrival on."""

    update_id: str
    dropped: bool = False


def _fail_opened(opened: asyncio.Future[None], task: asyncio.Task[StagedUpdate]) -> None:
    """Gives the error of a receive that ended before it had opened to the call that waits for that."""
    if opened.done():
        return
    error = None if task.cancelled() else task.exception()
    if error is None:
        opened.cancel()
        return
    opened.set_exception(error)
    opened.exception()  # no call may wait for it, and asyncio would warn


class WeightUpdates:
    """Receives or stages at most one update: staging takes as much memory as a model.

    `tell(staged)` is called when what is staged has changed (None: nothing is staged). `tell_cached()` is called when
    the engine may have a new copy in host memory, of the base weights or of an adapter.
    """

    def __init__(
        self,
        adapter: EngineAdapter,
        info: EngineInfo,
        tell: Callable[[StagedUpdate | None], None],
        tell_cached: Callable[[], None],
    ) -> None:
        self._adapter = adapter
        self._info = info
        self.on_change = tell
        """Called with the staged update after each change, and with None after its end."""
        self._tell_cached = tell_cached
        self._names = (f"staging-{number}" for number in itertools.count())
        self._receiving: _Receive | None = None
        self._failed: _Receive | None = None
        """A receive that failed while it listened, until the coordinator asks for its outcome."""
        self._beginning = asyncio.Lock()
        self.staged: StagedUpdate | None = None
        self._discarding: asyncio.Task[None] | None = None
        """The end of what was staged before."""
        self._coming: list[_ArrivingUpdate] = []
        self._taken: ReceiveRequest | None = None
        self._exchanged = asyncio.Event()
        """Set while no swap reads the staged weights. A delta may change them in place only then."""
        self._exchanged.set()
        self.received_from: list[SourceUse] = []
        """The sources of the version that was received last."""
        self.cached_digest: str | None = None
        """The digest of the version that the engine keeps in host memory, which the next delta may change."""

    @property
    def _receiver(self) -> ReceivesWeights:
        return self._adapter.receiver

    @property
    def _busy(self) -> _Receive | StagedUpdate | None:
        return self._receiving or self.staged

    @property
    def busy_with(self) -> str | None:
        """The update that is being received or is staged."""
        return self._busy.request.update_id if self._busy is not None else None

    @property
    def failed(self) -> str | None:
        """The update that failed while the worker listened, until a call asks for it or another update comes."""
        return self._failed.update_id if self._failed is not None else None

    @property
    def receiving(self) -> _Receive | None:
        """The receive that is under way, unless it is cancelled."""
        one = self._receiving
        return one if one is not None and not one.cancelled.is_set() else None

    def report(self) -> UpdateOnWorker | None:
        """Returns the update that this worker receives or has staged, or None. Never blocks."""
        now, one, staged = time.monotonic(), self.receiving, self.staged
        if one is not None:
            opened = one.opened.done() and not one.opened.cancelled()
            count = self._receiver.received() if opened else None
            return update_on_worker(one.request, count, now - one.began, opened=opened, held=one.held)
        if staged is None:
            return None
        size = staged.reply["bytes"]
        return update_on_worker(staged.request, staged.came, now - staged.began, staged_bytes=size)

    def check_backend(self, backend: str) -> None:
        if backend in self._info.transports:
            return
        self._info.require(f"transport:{backend}", "transport.backend")
        here = f"use a transport that this worker has: {', '.join(self._info.transports)}"
        traits = known_transports().get(backend)
        if traits is None:
            raise InvalidRequest(f"unknown transport {backend!r}", field="transport.backend", fix=here)
        raise Unsupported(
            f"this worker has no {backend} transport", field="transport.backend", fix=traits.if_lacking or here
        )

    def check(self, name: str | None, staging: str, backend: str | None, loaded: Collection[str] = ()) -> None:
        """Refuses what this engine or worker can't do, before anything is touched. `loaded`: the adapters of the
        engine."""
        if name is not None:
            self._info.require("prepare_update:lora", "target.kind")
        if staging == "none":
            self._info.require("prepare_update:unstaged", "policy.staging")
        if backend is not None:
            self.check_backend(backend)
            if name is not None:  # without a backend, the adapter is unloaded
                self._info.check_place(name, loaded)

    async def prepare(
        self, request: ReceiveRequest, fence: int | None = None, taint: Taint = _nothing
    ) -> PreparedReply:
        """Receives and verifies an update. A second call with the same `update_id` waits for the same receive, or gives
        the same answer.

        `fence`: the coordinator's. None: the worker heals. `taint`: for weights in place; runs after every check that
        needs no byte, before the first byte is written."""
        begun = await self._begin(request, fence, taint)
        # Shielded: the caller may repeat the call after its deadline, and wait for the same receive.
        return begun.reply if isinstance(begun, StagedUpdate) else (await asyncio.shield(begun.task)).reply

    async def listen(self, request: ReceiveRequest, fence: int) -> None:
        """Begins a receive, and returns as soon as every rank listens. `prepare` with the same id waits for its end."""
        begun = await self._begin(request, fence, _nothing)
        if isinstance(begun, _Receive):
            begun.listening = True
            await asyncio.shield(begun.opened)

    async def receive_part(self, part: ReceivePart, fence: int) -> int:
        """Receives the tensors of one part. Returns how many tensors are still missing. Raises the error that ends the
        update's receive."""
        self._adopt(part.update_id, fence)
        one = self._receiving or self._failed
        if one is None or one.update_id != part.update_id or not one.listening:
            raise UpdateAborted(
                f"this worker does not listen for the update {part.update_id}",
                field="update_id",
                fix="prepare it again",
            )
        try:
            if not one.task.done():
                body = part.model_dump()
                return await asyncio.to_thread(
                    self._receiver.receive_part, one.staging, body, one.cancelled.is_set
                )
        except PlaneError:
            await asyncio.wait([one.task], timeout=ABORT_WAIT_S)  # its error says why
            if not one.task.done() or one.task.cancelled() or one.task.exception() is None:
                raise
        error = one.task.exception()
        raise error if error is not None else Conflict("the update has all its tensors", fix="complete it")

    async def _begin(self, request: ReceiveRequest, fence: int | None, taint: Taint) -> StagedUpdate | _Receive:
        async with self._beginning:
            update_id = request.update_id
            self._adopt(update_id, fence)
            if self.staged is not None and self.staged.request.update_id == update_id:
                return self.staged
            if self._failed is not None and self._failed.update_id == update_id:
                return self._failed  # the trainer does not push the weights a second time
            under_way = self.receiving  # a cancelled one may still end while its update is asked for again
            if under_way is None or under_way.update_id != update_id:
                busy = under_way or self.staged
                if fence is None and busy is not None and busy.fence is not None:
                    raise Conflict(f"waiting for the update {self.busy_with}, which is being prepared")
                if request.transport is not None:
                    self.check_backend(request.transport.backend)
                # Another coordinator may have left something here. It can't decide any more, because the present
                # coordinator has sealed the record.
                await self._drop(None)
                mine = [one for one in self._coming if one.update_id == update_id]
                if mine and all(one.dropped for one in mine):
                    raise UpdateAborted(f"the update {update_id} was aborted before it began here")
                cancelled, opened = threading.Event(), asyncio.get_running_loop().create_future()
                name = next(self._names)
                task = asyncio.create_task(self._receive(request, fence, name, cancelled, taint, opened))
                under_way = _Receive(request, fence, name, task, cancelled, opened, time.monotonic())
                self._receiving = under_way
                task.add_done_callback(self._received)
                task.add_done_callback(functools.partial(_fail_opened, opened))
            return under_way

    def _adopt(self, update_id: str, fence: int | None) -> None:
        """Makes the coordinator that asks for an update again responsible for it."""
        staged, receiving = self.staged, self._receiving
        if receiving is not None and receiving.update_id == update_id:
            receiving.fence = fence
        elif staged is not None and staged.request.update_id == update_id and staged.fence != fence:
            self._set(replace(staged, fence=fence))

    def _received(self, task: asyncio.Task[StagedUpdate]) -> None:
        receiving = self._receiving
        failed = not task.cancelled() and task.exception() is not None  # also marks the error as retrieved
        if receiving is not None and receiving.task is task:
            self._receiving = None
            # The coordinator asks for a failure, and never for what it has aborted: a repeated call begins anew.
            if failed and receiving.listening and not receiving.cancelled.is_set():
                log.warning("the update %s: %s", receiving.update_id, task.exception())
                self._failed = receiving

    async def _receive(
        self,
        request: ReceiveRequest,
        fence: int | None,
        name: str,
        cancelled: threading.Event,
        taint: Taint,
        opened: asyncio.Future[None],
    ) -> StagedUpdate:
        limits = CanaryLimits(vocab_size=self._info.vocab_size, max_model_len=self._info.max_model_len)
        await asyncio.to_thread(self._receiver.open, name, request, limits)
        opened.set_result(None)
        if request.in_place:
            try:
                await _taint(request, taint, cancelled)
            except BaseException:
                await asyncio.to_thread(self._receiver.discard, name)
                raise
        if request.base is not None:
            await self._exchange_over(name, cancelled)
        try:
            reply = await asyncio.to_thread(self._receiver.receive, name, cancelled.is_set)
        except EngineFailed as error:
            if cancelled.is_set():  # so the coordinator sees that this worker was stopped, and has not failed
                raise _aborted(request) from error
            raise
        finally:
            await self._read_cached_digest(request)
        self.received_from = reply.get("sources", [])
        add_received(tracing.current(), self._receiver.received, reply, time.time_ns())
        now, began = self._receiving, time.monotonic()
        if now is not None and now.staging == name:
            fence, began = now.fence, now.began  # another coordinator may have asked for the update since
        in_staging = None if request.in_place else name
        staged = StagedUpdate(request, fence, in_staging, reply, began, self._receiver.received())
        if cancelled.is_set():
            await self._discard(staged)
            raise _aborted(request)
        self._set(staged)
        return staged

    async def _exchange_over(self, name: str, cancelled: threading.Event) -> None:
        """Waits until no swap reads the copy, or until the receive is cancelled."""
        while not (self._exchanged.is_set() or cancelled.is_set()):
            self._hold(name, True)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._exchanged.wait()
        self._hold(name, False)

    def _hold(self, name: str, held: bool) -> None:
        if (one := self._receiving) is not None and one.staging == name:
            one.held = held

    def _set(self, staging: StagedUpdate | None) -> None:
        self.staged = staging
        self.on_change(staging)

    async def _discard(self, staging: StagedUpdate) -> None:
        if staging.name is not None:
            await asyncio.to_thread(self._receiver.discard, staging.name)
            await self._read_cached_digest(staging.request)

    async def keeps(self, request: ReceiveRequest) -> bool:
        """Returns whether the engine keeps a copy of the requested base weights. It may also be of a swap that
        failed."""
        if request.adapter is not None:
            return False
        await self._read_cached_digest(request)
        return self.cached_digest is not None and self.cached_digest == request.digest

    async def _read_cached_digest(self, request: ReceiveRequest) -> None:
        if not request.keeps_copy and self.cached_digest is None:
            return  # the usual case
        try:
            self.cached_digest = await asyncio.to_thread(self._receiver.cached_digest)
        except PlaneError as error:
            log.warning("the engine does not say which version it keeps in host memory: %s", error)
            self.cached_digest = None
        if self.cached_digest is not None:
            self._tell_cached()

    def exchanged(self) -> None:
        """Notes that the swap has ended, well or not. A swap that failed may still be writing, but the engine writes
        whatever comes next after it."""
        self._exchanged.set()

    async def swapped(self) -> None:
        """Notes that the weights are swapped in: the engine may keep a copy of them from now on."""
        taken, self._taken = self._taken, None
        if taken is None or taken.adapter is not None:
            self._tell_cached()  # an adapter was loaded or unloaded
        else:
            await self._read_cached_digest(taken)

    def take(self, update_id: str) -> str | None:
        """Returns the name of the staged weights for the swap, which uses them up. None: they are in place."""
        staged = self.staged
        assert staged is not None
        assert staged.request.update_id == update_id, "the core compares them"
        self._taken = staged.request
        self._exchanged.clear()
        self._set(None)
        return staged.name

    async def give_up(self, update_id: str) -> None:
        """Drops an update without waiting until its receive ends."""
        receiving = self._receiving
        if receiving is not None and receiving.update_id == update_id:
            receiving.cancelled.set()
        else:
            await self.drop(update_id)

    @contextlib.contextmanager
    def coming(self, update_id: str) -> Iterator[None]:
        """A call for this update is under way, and may wait for its turn: `drop` reaches it before it begins."""
        one = _ArrivingUpdate(update_id)
        self._coming.append(one)
        try:
            yield
        finally:
            self._coming.remove(one)

    async def drop(self, update_id: str | None) -> bool:
        """Ends the receive and discards the weights of an update (None: of any), and lets no waiting call begin with
        it. Returns whether there were any."""
        for one in self._coming:
            one.dropped = one.dropped or update_id in (None, one.update_id)
        return await self._drop(update_id)

    async def _drop(self, update_id: str | None) -> bool:
        found = False
        if self._failed is not None and update_id in (None, self._failed.update_id):
            self._failed = None
        receiving = self._receiving
        if receiving is not None and update_id in (None, receiving.update_id):
            found = True
            receiving.cancelled.set()
            await asyncio.wait([receiving.task], timeout=ABORT_WAIT_S)
            self._receiving = None
        staged = self.staged
        if staged is not None and update_id in (None, staged.request.update_id):
            found = True
            self._set(None)
            self._discarding = asyncio.create_task(self._discard(staged))
            self._discarding.add_done_callback(_log_failure)
        if (discarding := self._discarding) is not None:
            await asyncio.wait([discarding])  # it continues if this call ends, and the next call waits for it
            self._discarding = None
            if staged is not None and found:
                discarding.result()
        return found


def _log_failure(discarding: asyncio.Task[None]) -> None:
    error = None if discarding.cancelled() else discarding.exception()
    if error is not None:
        log.warning("what was staged could not be discarded: %s", error)


async def _taint(request: ReceiveRequest, taint: Taint, cancelled: threading.Event) -> None:
    """Calls `taint`, which may wait until the running requests end. An abort ends this wait, and the engine has lost
    nothing then."""
    tainting = asyncio.ensure_future(taint())
    try:
        while not (tainting.done() or cancelled.is_set()):
            await asyncio.wait([tainting], timeout=LOOK_S)
        if not tainting.done():
            tainting.cancel()
            await asyncio.wait([tainting])
    finally:
        tainting.cancel()
    if tainting.cancelled():
        raise _aborted(request)
    tainting.result()


def _aborted(request: ReceiveRequest) -> UpdateAborted:
    return UpdateAborted(f"the update {request.update_id} was aborted while it was received")

"""A worker's side of an update: receive and verify into staging, then swap, or drop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import threading
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rl_plane.errors import Conflict, InvalidRequest, PlaneError, Unsupported, UpdateAborted
from rl_plane.protocol.update_requests import PreparedReply, ReceivePart
from rl_plane.transports.reception import Link, Reception
from worker.engines.base import LACKING, EngineAdapter, EngineInfo
from worker.runtime.engine_loop import EngineLoop

log = logging.getLogger("worker.reconcile.staged_updates")

KNOWN_TRANSPORTS = frozenset({"ipc", "nccl", "nixl", "object_store"})
"""Names that other workers may know: not an error of the caller's."""

EXTRAS = {
    "nccl": "put the model on a GPU, or use gloo",
    "nixl": "install rl-plane[nixl] beside this worker, or use filesystem",
}
"""What brings a transport to a worker that lacks it."""

ABORT_WAIT_S = 30.0
"""How long an abort waits for a receive to notice: it looks between two tensors."""
LOOK_S = 0.2
"""Between two looks whether a receive that waits for a swap was cancelled."""


Taint = Callable[[], Awaitable[None]]


async def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be received."""

    update_id: str
    transport: Mapping[str, Any]
    name: str | None = None
    """The adapter's; None: base weights."""
    label: str = ""
    digest: str | None = None
    cast: bool = False
    fence: int | None = None
    """The coordinator's; None: the worker fetches by itself, to heal."""
    in_place: bool = False
    """Over the served weights: the engine is paused, and nobody resumes it meanwhile."""
    keep: bool = False
    """In host memory, after the swap too."""
    base: str | None = None
    """Of a delta: the digest of the version that it changes."""
    before: Sequence[Link] = ()
    """Of a delta: see Reception."""
    canary_file: bool = False
    """Reads the `canary.json` beside the checkpoint."""


@dataclass(slots=True)
class Staging:
    """One update's weights, complete and verified."""

    wanted: Wanted
    name: str | None
    """In the engine's staging; None: they are in place already."""
    reply: PreparedReply


@dataclass(slots=True)
class _Receiving:
    wanted: Wanted
    staging: str
    """Its name in the engine's staging."""
    task: asyncio.Task[Staging]
    cancelled: threading.Event
    opened: asyncio.Future[None]
    """Every rank knows what will come, and from here on listens for it."""
    listening: bool = False
    """Its end is asked for by a later call."""


def _ended(opened: asyncio.Future[None], task: asyncio.Task[Staging]) -> None:
    """Before it had begun: whoever waits for that is told why."""
    if opened.done():
        return
    error = None if task.cancelled() else task.exception()
    if error is None:
        opened.cancel()
        return
    opened.set_exception(error)
    opened.exception()  # nobody may be waiting


class WeightUpdates:
    """At most one update is received or staged at a time: staging is a model's worth of memory. `tell(staging)` is
    called when what is staged has changed (None: nothing is), `tell_kept()` when the engine may keep something new."""

    def __init__(
        self,
        adapter: EngineAdapter,
        info: EngineInfo,
        engine: EngineLoop,
        tell: Callable[[Staging | None], None],
        tell_kept: Callable[[], None],
    ) -> None:
        self._adapter = adapter
        self._info = info
        self._engine = engine
        self._tell = tell
        self._tell_kept = tell_kept
        self._names = (f"staging-{number}" for number in itertools.count())
        self._receiving: _Receiving | None = None
        self._failed: _Receiving | None = None
        """Armed, and its end was not asked for yet."""
        self._beginning = asyncio.Lock()
        self.staged: Staging | None = None
        self._taken: Wanted | None = None
        self._exchanged = asyncio.Event()
        """No swap is reading what was staged, which the engine may keep for a delta to change."""
        self._exchanged.set()
        self.kept: str | None = None
        """The digest of the version that the engine keeps in host memory, which the next delta may change."""

    @property
    def _busy(self) -> Wanted | None:
        one = self._receiving or self.staged
        return one.wanted if one is not None else None

    @property
    def busy_with(self) -> str | None:
        """The update that is being received or is staged."""
        return self._busy.update_id if self._busy is not None else None

    @property
    def failed(self) -> str | None:
        """The update that it listened for in vain, until that is asked for, or another one comes."""
        return self._failed.wanted.update_id if self._failed is not None else None

    @property
    def receiving(self) -> Wanted | None:
        """Nobody has called it off."""
        one = self._receiving
        return one.wanted if one is not None and not one.cancelled.is_set() else None

    def check_backend(self, backend: str) -> None:
        if backend in self._info.transports:
            return
        if backend in KNOWN_TRANSPORTS:
            raise Unsupported(
                f"this worker has no {backend} transport",
                field="transport.backend",
                fix=EXTRAS.get(backend, "use filesystem"),
            )
        raise InvalidRequest(
            f"unknown transport {backend!r}",
            field="transport.backend",
            fix=f"this worker has {', '.join(self._info.transports)}",
        )

    def check(self, name: str | None, staging: str, backend: str | None, loaded: Collection[str] = ()) -> None:
        """Refuses, before anything is touched, what this engine or worker can't do. `loaded`: the adapters that it
        has."""
        if name is not None:
            self._refuse_incapable("prepare_update:lora", "target.kind")
        if staging == "none":
            self._refuse_incapable("prepare_update:unstaged", "policy.staging")
        if backend is not None:
            self.check_backend(backend)
            if name is not None:  # loaded or swapped; without a backend it goes
                self._info.check_place(name, loaded)

    def _refuse_incapable(self, capability: str, field: str) -> None:
        if (reason := self._info.capabilities.get(capability)) is not None:
            raise Unsupported(f"{self._info.engine}: {reason}", field=field, fix=LACKING)

    async def prepare(self, wanted: Wanted, taint: Taint = _nothing) -> PreparedReply:
        """Idempotent by `update_id`: asked again, it waits for the same receive or gives the same answer.

        `taint`: of one in place, awaited when all is checked that can be, before the first byte is written."""
        begun = await self._begin(wanted, taint)
        # Shielded: the caller's deadline doesn't end a receive that a repeated call may still want.
        return begun.reply if isinstance(begun, Staging) else (await asyncio.shield(begun.task)).reply

    async def arm(self, wanted: Wanted) -> None:
        """Likewise, but returns as soon as the receive has begun: `prepare` under the same id waits for its end."""
        begun = await self._begin(wanted, _nothing)
        if isinstance(begun, _Receiving):
            begun.listening = True
            await asyncio.shield(begun.opened)

    async def feed(self, part: ReceivePart, fence: int) -> int:
        """Of an update that is listened for: these tensors come now. How many are missing yet. Raises what ends its
        receive."""
        self._adopt(part.update_id, fence)
        one = self._receiving or self._failed
        if one is None or one.wanted.update_id != part.update_id or not one.listening:
            raise UpdateAborted(
                f"the update {part.update_id} is not listened for here", field="update_id", fix="prepare it again"
            )
        try:
            if not one.task.done():
                told = part.model_dump()
                return await asyncio.to_thread(self._adapter.feed, one.staging, told, one.cancelled.is_set)
        except PlaneError:
            await asyncio.wait([one.task], timeout=ABORT_WAIT_S)  # it knows why
            if not one.task.done() or one.task.cancelled() or one.task.exception() is None:
                raise
        error = one.task.exception()
        raise error if error is not None else Conflict("the update has all its tensors", fix="complete it")

    async def _begin(self, wanted: Wanted, taint: Taint) -> Staging | _Receiving:
        async with self._beginning:
            self._adopt(wanted.update_id, wanted.fence)
            if self.staged is not None and self.staged.wanted.update_id == wanted.update_id:
                return self.staged
            failed = self._failed
            if failed is not None and failed.wanted.update_id == wanted.update_id:
                return failed  # what was pushed does not come again
            if self._receiving is None or self._receiving.wanted.update_id != wanted.update_id:
                busy = self._busy
                if wanted.fence is None and busy is not None and busy.fence is not None:
                    raise Conflict(f"waiting for the update {busy.update_id}, which is being prepared")
                self.check_backend(wanted.transport["backend"])
                # What another coordinator has left. It is barred: the one that asks now has sealed the record before.
                await self.drop(None)
                cancelled, opened = threading.Event(), asyncio.get_running_loop().create_future()
                name = next(self._names)
                work = self._receive(wanted, name, cancelled, taint, opened)
                self._receiving = _Receiving(wanted, name, asyncio.create_task(work), cancelled, opened)
                self._receiving.task.add_done_callback(self._received)
                self._receiving.task.add_done_callback(functools.partial(_ended, opened))
            return self._receiving

    def _adopt(self, update_id: str, fence: int | None) -> None:
        """The coordinator that asks for an update again is responsible for it from now on."""
        staged, receiving = self.staged, self._receiving
        if receiving is not None and receiving.wanted.update_id == update_id:
            receiving.wanted = replace(receiving.wanted, fence=fence)
        elif staged is not None and staged.wanted.update_id == update_id and staged.wanted.fence != fence:
            self._set(replace(staged, wanted=replace(staged.wanted, fence=fence)))

    def _received(self, task: asyncio.Task[Staging]) -> None:
        """Whether anybody still waits for it or not."""
        receiving = self._receiving
        failed = not task.cancelled() and task.exception() is not None  # it is told to whoever waits
        if receiving is not None and receiving.task is task:
            self._receiving = None
            if failed and receiving.listening:
                log.warning("the update %s: %s", receiving.wanted.update_id, task.exception())
                self._failed = receiving

    async def _receive(
        self,
        wanted: Wanted,
        name: str,
        cancelled: threading.Event,
        taint: Taint,
        opened: asyncio.Future[None],
    ) -> Staging:
        reception = Reception(
            name,
            wanted.transport,
            "base" if wanted.name is None else "lora",
            wanted.cast,
            wanted.digest,
            wanted.in_place,
            wanted.keep,
            wanted.base,
            wanted.before,
            self._info.vocab_size,
            self._info.max_model_len,
            wanted.canary_file,
        )
        await asyncio.to_thread(self._adapter.open, reception)
        opened.set_result(None)
        if wanted.in_place:
            try:
                await taint()
            except BaseException:
                await self._engine.run(self._adapter.discard(reception.staging))
                raise
        if wanted.base is not None:
            await self._exchange_over(cancelled)
        try:
            reply = await asyncio.to_thread(self._adapter.receive, reception.staging, cancelled.is_set)
        finally:
            await self._look_at_kept(wanted)
        now = self._receiving  # another coordinator may have asked for it since
        if now is not None and now.staging == name:
            wanted = now.wanted
        staging = Staging(wanted, None if wanted.in_place else reception.staging, reply)
        if cancelled.is_set():
            await self._discard(staging)
            raise UpdateAborted(f"the update {wanted.update_id} was aborted while it was received")
        self._set(staging)
        return staging

    async def _exchange_over(self, cancelled: threading.Event) -> None:
        """Waits until no swap reads what is kept; a receive that was cancelled ends by itself."""
        while not (self._exchanged.is_set() or cancelled.is_set()):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._exchanged.wait()

    def _set(self, staging: Staging | None) -> None:
        self.staged = staging
        self._tell(staging)

    async def _discard(self, staging: Staging) -> None:
        if staging.name is not None:
            await self._engine.run(self._adapter.discard(staging.name))
            await self._look_at_kept(staging.wanted)

    async def _look_at_kept(self, wanted: Wanted) -> None:
        if not wanted.keep and self.kept is None:
            return  # as with most engines, which keep nothing
        try:
            self.kept = await asyncio.to_thread(self._adapter.kept)
        except PlaneError as error:
            log.warning("what the engine keeps is not known: %s", error)
            self.kept = None
        if self.kept is not None:
            self._tell_kept()

    def exchanged(self) -> None:
        """The swap of what was taken has ended, well or not. One that failed may still be writing; whatever comes
        into the engine after it is written later."""
        self._exchanged.set()

    async def swapped(self) -> None:
        """What was taken is in: from now on it may be kept."""
        if (taken := self._taken) is not None:
            self._taken = None
            await self._look_at_kept(taken)

    def take(self, update_id: str) -> str | None:
        """The name of the staged weights, for the swap, which uses them up. None: they are in place."""
        staged = self.staged
        assert staged is not None
        assert staged.wanted.update_id == update_id, "the core has looked"
        self._taken = staged.wanted
        self._exchanged.clear()
        self._set(None)
        return staged.name

    async def give_up(self, update_id: str) -> None:
        """As `drop`, but does not wait until a receive notices."""
        receiving = self._receiving
        if receiving is not None and receiving.wanted.update_id == update_id:
            receiving.cancelled.set()
        else:
            await self.drop(update_id)

    async def drop(self, update_id: str | None) -> bool:
        """Ends a receive and discards what is staged (None: of any update). Whether there was something."""
        found = False
        if self._failed is not None and update_id in (None, self._failed.wanted.update_id):
            self._failed = None
        receiving = self._receiving
        if receiving is not None and update_id in (None, receiving.wanted.update_id):
            found = True
            receiving.cancelled.set()
            await asyncio.wait([receiving.task], timeout=ABORT_WAIT_S)
            self._receiving = None
        staged = self.staged
        if staged is not None and update_id in (None, staged.wanted.update_id):
            found = True
            self._set(None)
            await self._discard(staged)
        return found

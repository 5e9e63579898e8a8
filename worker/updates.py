"""A worker's side of an update: receive and verify into staging, then swap, or drop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl_plane.errors import Conflict, InvalidRequest, NotPrepared, PlaneError, Unsupported, UpdateAborted
from rl_plane.ops import PreparedReply
from worker.engine_loop import EngineLoop
from worker.engines.base import EngineAdapter, EngineInfo, Staged
from worker.staging import receive
from worker.transports.base import WeightTransport

log = logging.getLogger("worker.updates")

KNOWN_TRANSPORTS = frozenset({"nccl", "gloo", "ipc", "nixl", "object_store"})
"""Names that other workers may know: not an error of the caller's."""

ABORT_WAIT_S = 30.0
"""How long an abort waits for a receive to notice: it looks between two tensors."""


@dataclass(slots=True)
class Staging:
    """One update's staged weights, complete and verified."""

    update_id: str
    label: str
    weights: Staged
    reply: PreparedReply
    fence: int | None
    """The coordinator's; None: the worker fetched them itself, to heal."""

    @property
    def digest(self) -> str:
        return self.reply["digest"]


@dataclass(slots=True)
class _Receiving:
    update_id: str
    fence: int | None
    task: asyncio.Task[Staging]
    cancelled: threading.Event


class WeightUpdates:
    """At most one update is received or staged at a time: staging is a model's worth of memory."""

    def __init__(
        self,
        adapter: EngineAdapter,
        info: EngineInfo,
        engine: EngineLoop,
        transports: Mapping[str, WeightTransport],
    ) -> None:
        self._adapter = adapter
        self._info = info
        self._engine = engine
        self._transports = transports
        self._receiving: _Receiving | None = None
        self._beginning = asyncio.Lock()
        self.staged: Staging | None = None

    @property
    def busy_with(self) -> str | None:
        """The update that is being received or is staged."""
        if self._receiving is not None:
            return self._receiving.update_id
        return self.staged.update_id if self.staged else None

    @property
    def coordinated(self) -> str | None:
        """The same, where a coordinator asked for it; what the worker fetches by itself may be dropped at will."""
        one = self._receiving or self.staged
        return one.update_id if one is not None and one.fence is not None else None

    def transport(self, backend: str) -> WeightTransport:
        transport = self._transports.get(backend)
        if transport is None and backend in KNOWN_TRANSPORTS:
            raise Unsupported(
                f"this worker has no {backend} transport", field="transport.backend", fix="use filesystem"
            )
        if transport is None:
            raise InvalidRequest(
                f"unknown transport {backend!r}",
                field="transport.backend",
                fix=f"this worker has {', '.join(sorted(self._transports))}",
            )
        return transport

    async def prepare(
        self,
        update_id: str,
        request: Mapping[str, Any],
        *,
        label: str,
        digest: str | None,
        cast: bool,
        fence: int | None,
        target: Mapping[str, Any] | None = None,
        encoding: str = "full",
    ) -> PreparedReply:
        """Idempotent by `update_id`: asked again, it waits for the same receive or gives the same answer."""
        async with self._beginning:
            if self.staged is not None and self.staged.update_id == update_id:
                return self.staged.reply
            if self._receiving is None or self._receiving.update_id != update_id:
                self._check_supported(target or {"kind": "base"}, encoding)
                transport = self.transport(request["backend"])
                if fence is None and self.coordinated is not None:
                    raise Conflict(f"waiting for the update {self.coordinated}, which is being prepared")
                await self.drop(None)  # whatever an earlier coordinator left: it has lost the lock
                cancelled = threading.Event()
                work = self._receive(update_id, transport, request, label, digest, cast, fence, cancelled)
                self._receiving = _Receiving(update_id, fence, asyncio.create_task(work), cancelled)
            receiving = self._receiving
        try:
            # Shielded: the caller's deadline doesn't end a receive that a repeated call may still want.
            staging = await asyncio.shield(receiving.task)
        finally:
            if receiving.task.done() and self._receiving is receiving:
                self._receiving = None
        return staging.reply

    def _check_supported(self, target: Mapping[str, Any], encoding: str) -> None:
        if target["kind"] == "lora":
            why = self._info.capabilities.get("prepare_update:lora", "this engine takes no LoRA adapters here")
            raise Unsupported(f"{self._info.engine}: {why}", field="target.kind")
        if encoding != "full":
            raise Unsupported("delta updates are not supported yet: send full weights", field="encoding")

    async def _receive(
        self,
        update_id: str,
        transport: WeightTransport,
        request: Mapping[str, Any],
        label: str,
        digest: str | None,
        cast: bool,
        fence: int | None,
        cancelled: threading.Event,
    ) -> Staging:
        def work() -> tuple[Staged, PreparedReply]:
            delivery = transport.open(request)
            tensors, size = len(delivery.specs), sum(spec.nbytes for spec in delivery.specs.values())
            refetchable = delivery.refetchable
            weights, found = receive(
                self._adapter, delivery, cast=cast, expected_digest=digest, cancelled=cancelled.is_set
            )
            return weights, PreparedReply(digest=found, tensors=tensors, bytes=size, refetchable=refetchable)

        weights, reply = await asyncio.to_thread(work)
        staging = Staging(update_id, label, weights, reply, fence)
        if cancelled.is_set():
            await self._engine.run(self._adapter.discard(weights))
            raise UpdateAborted(f"the update {update_id} was aborted while it was received")
        self.staged = staging
        return staging

    def staged_for(self, update_id: str, digest: str) -> Staged:
        """The staged weights of this update, for the swap; NotPrepared when they are not here."""
        staged = self.staged
        if staged is None or staged.update_id != update_id:
            raise NotPrepared(f"the update {update_id} is not staged here", staged=staged and staged.update_id)
        if staged.digest != digest:
            raise NotPrepared(f"what is staged has the digest {staged.digest}, the decision says {digest}")
        return staged.weights

    def forget(self, weights: Staged) -> None:
        """They were swapped in, or the swap spoilt them."""
        if self.staged is not None and self.staged.weights is weights:
            self.staged = None

    async def drop(self, update_id: str | None) -> bool:
        """Ends a receive and discards what is staged (None: of any update). Whether there was something."""
        found = False
        receiving = self._receiving
        if receiving is not None and update_id in (None, receiving.update_id):
            found = True
            receiving.cancelled.set()
            await asyncio.wait([receiving.task], timeout=ABORT_WAIT_S)
            if receiving.task.done() and not receiving.task.cancelled():
                receiving.task.exception()  # it was told to whoever waits for it
            self._receiving = None
        staged = self.staged
        if staged is not None and update_id in (None, staged.update_id):
            found = True
            self.staged = None
            await self._engine.run(self._adapter.discard(staged.weights))
        return found


def why(error: BaseException) -> str:
    return error.message if isinstance(error, PlaneError) else f"{type(error).__name__}: {error}"

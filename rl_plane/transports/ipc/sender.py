"""The sender of the `ipc` transport: weights for the engines on the trainer's own machine.

Two buffers, in memory without a name which receivers map read-only, or on a GPU (`ipc_cuda`). A bucket is packed into
one of them while the other is read; a buffer is used again when every receiver that is still there has taken what was
in it. One that dies is noticed at once; one that stands still is given up. See `ipc_wire`.

Or, in the layout `tensors`, receivers read the trainer's own tensors, where that is possible: see `ipc_tensors`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, ClassVar, Literal, get_args

from rl_plane.errors import InvalidRequest
from rl_plane.membership.worker_reply import engine_replies
from rl_plane.protocol.versions import TensorSpec
from rl_plane.transports.ipc.cuda_buffers import GpuBuffers
from rl_plane.transports.ipc.host_buffers import HostBuffers
from rl_plane.transports.ipc.in_place import OwnTensors, pack_modules
from rl_plane.transports.ipc.ipc_session import Update, closed
from rl_plane.transports.ipc.wire import BACKEND, buffer_bytes, check_platform
from rl_plane.transports.packing import Place, Tensor
from rl_plane.transports.sender_base import Surroundings, world_size
from rl_plane.weights.manifest import Bucket, Manifest, pack

log = logging.getLogger("rl_plane.transports.ipc.sender")

FIRST_RECEIVER_S = 300.0
"""The update may wait for the fleet's lock, and for an earlier one to end."""

OTHER_RECEIVERS_S = 30.0
"""After the first: they are asked at once, but one may have to end an earlier reception before."""

SILENT_RECEIVER_S = 60.0
"""For one bucket. Before the first, an engine that is overwritten lets its running requests end."""


Layout = Literal["packed", "tensors"]


class IpcSender:
    """A Sender. `receivers`: how many will come to an update, asked when it is opened, and while one is late: each rank
    of each engine is one.
    `on_gpus`: whether all of them have GPUs. Buffers in host memory stay for the next update, those of a GPU don't.
    `layout` `tensors`: what is lent is not packed, and receivers are answered from the first of `lend`, `buffer`,
    `send` and `finish` on."""

    backend = BACKEND
    device = "cpu"
    """Where the tensors of the next update are."""
    receivers_from: ClassVar[Literal["open", "finish"]] = "open"
    """When the fleet is to be asked: the buffers hold two buckets, and receivers make room for more."""

    def __init__(
        self,
        receivers: Callable[[], int],
        *,
        layout: Layout = "packed",
        on_gpus: Callable[[], bool] = lambda: False,
        first_receiver_s: float = FIRST_RECEIVER_S,
        other_receivers_s: float = OTHER_RECEIVERS_S,
        silent_receiver_s: float = SILENT_RECEIVER_S,
    ) -> None:
        check_platform()
        if layout not in get_args(Layout):
            raise InvalidRequest(
                f"layout is {str(layout)[:64]!r}", field="options.layout", fix="use packed or tensors"
            )
        self._receivers = receivers
        self._layout = layout
        self._on_gpus = on_gpus
        self._first_receiver_s = first_receiver_s
        self._other_receivers_s = other_receivers_s
        self._silent_receiver_s = silent_receiver_s
        self._buffers = HostBuffers()
        self._told_of_host = self._told_of_packing = False
        self._at: str | None = None
        """The GPU from which the open update is sent."""
        self._update: Update | None = None

    def open(self, manifest: Manifest) -> dict[str, Any]:
        self.close()
        self._at = self.device if self.device.startswith("cuda") and self._on_gpus() else None
        if self._at is None and self.device.startswith("cuda") and not self._told_of_host:
            self._told_of_host = True
            log.warning(
                "the weights on %s go by host memory, since not every worker's engine is on a GPU", self.device
            )
        self._update = Update(
            manifest, self._receivers, self._first_receiver_s, self._other_receivers_s, self._silent_receiver_s
        )
        if self._layout == "packed":
            self._begun()
        return {"backend": BACKEND, "socket": self._update.name}

    def pack(self, tensors: Iterable[tuple[str, TensorSpec]], bucket_bytes: int) -> tuple[Bucket, ...]:
        return pack(tensors, bucket_bytes) if self._layout == "packed" else pack_modules(tensors, bucket_bytes)

    def lend(self, tensors: Mapping[str, Tensor]) -> Collection[int]:
        """In the layout `tensors`: those that torch shares, in host memory, or those on the GPU that is sent from."""
        if self._layout == "packed":
            return ()
        own = OwnTensors(self._open_update().manifest, tensors, self._at)
        if len(own.lent) < len(self._open_update().manifest.buckets) and not self._told_of_packing:
            self._told_of_packing = True
            log.warning(
                "some buckets are packed, whose tensors don't all lie in shared memory, or on %s", self.device
            )
        self._begun(own)
        return own.lent

    def buffer(self, number: int) -> Place:
        update = self._begun()
        update.await_free(number)
        assert update.buffers is not None, "not everything is lent"
        return update.buffers.place(number)

    def send(self, number: int) -> None:
        self._begun().send_bucket(number)

    def finish(self, digests: Mapping[str, str] | None) -> None:
        update = self._begun()
        manifest = update.manifest if digests is None else update.manifest.digested(digests)
        update.send({"end": manifest.digest})
        update.await_taken(len(manifest.buckets) + 1)

    def close(self) -> None:
        """From any thread: whoever waits here then gets Unavailable."""
        update, self._update = self._update, None
        if update is not None:
            update.close()

    def destroy(self) -> None:
        self.close()
        self._buffers = HostBuffers()

    def _begun(self, own: OwnTensors | None = None) -> Update:
        """With buffers for what is not lent. From here on receivers are answered."""
        update = self._open_update()
        if update.begun:
            return update
        buffers: HostBuffers | GpuBuffers | None = None
        try:
            if own is None or len(own.lent) < len(update.manifest.buckets):
                buffers = (
                    self._buffers.fit(update.manifest)
                    if self._at is None
                    else GpuBuffers(update.manifest, buffer_bytes(update.manifest), self._at)
                )
            update.begin(buffers, own, on_gpu=self._at is not None)
        except BaseException:
            self.close()
            raise
        return update

    def _open_update(self) -> Update:
        if self._update is None:
            raise closed()
        return self._update


def build(around: Surroundings) -> IpcSender:
    """Options: `layout`, `packed` (the default) or `tensors`."""
    around.check_options(BACKEND, "layout")

    def on_gpus() -> bool:
        rows = engine_replies(around.run("describe", {}))
        return all(str(row.get("device", "")).startswith("cuda") for row in rows)

    layout = around.options.get("layout", "packed")
    return IpcSender(lambda: world_size(around.workers()) - 1, layout=layout, on_gpus=on_gpus)

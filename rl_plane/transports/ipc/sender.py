"""The sending half of `ipc`: weights for the engines on the trainer's own machine. See `wire` for the protocol.

There are two buffers, in unnamed memory that receivers map read-only, or on a GPU (`cuda_buffers`). A bucket is packed
into one while receivers read the other. A buffer is used again when every receiver that is still there has taken its
bucket. The death of a receiver is noticed at once; a receiver that hangs is given up after a time.

In the layout `tensors` receivers read the trainer's own tensors in place, as far as possible (`in_place`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Literal, get_args

from rl_plane.errors import InvalidRequest
from rl_plane.protocol.envelope import engine_replies
from rl_plane.protocol.versions import TensorSpec
from rl_plane.transports.base import Sender, SenderContext, receivers
from rl_plane.transports.ipc.cuda_buffers import GpuBuffers
from rl_plane.transports.ipc.host_buffers import HostBuffers
from rl_plane.transports.ipc.in_place import LentTensors, pack_modules
from rl_plane.transports.ipc.ipc_session import BOUNDS, Bounds, IpcUpdate, closed
from rl_plane.transports.ipc.torch_cuda import TORCH_CUDA, TorchCuda
from rl_plane.transports.ipc.wire import BACKEND, buffer_bytes, check_platform
from rl_plane.transports.packing import Buffer, Tensor
from rl_plane.weights.manifest import Manifest, PackedBucket, pack

log = logging.getLogger("rl_plane.transports.ipc.sender")

Layout = Literal["packed", "tensors"]


class IpcSender(Sender):
    """Sends to receivers on this machine. Buffers in host memory stay for the next update, those on a GPU do not."""

    backend = BACKEND
    bucket_bytes = 32 << 20
    """Two buckets, so that one is packed while the other is read, and not much memory beside the model."""

    def __init__(
        self,
        receivers: Callable[[], int],
        *,
        layout: Layout = "packed",
        on_gpus: Callable[[], bool] = lambda: False,
        bounds: Bounds = BOUNDS,
        cuda: TorchCuda = TORCH_CUDA,
    ) -> None:
        """Makes the sender.

        Args:
            receivers: returns how many receivers an update has: one for each rank of each engine. It is called when an
                update is opened, and while a receiver is late.
            layout: `packed`, or `tensors`: lent tensors are not packed. Receivers are then answered from the first call
                of `lend`, `buffer`, `send` or `finish` on.
            on_gpus: returns whether all receivers have GPUs.
            bounds: the times that receivers have.
            cuda: makes torch's CUDA calls.
        """
        check_platform()
        if layout not in get_args(Layout):
            raise InvalidRequest(
                f"layout is {str(layout)[:64]!r}", field="options.layout", fix="use packed or tensors"
            )
        self._receivers = receivers
        self._layout = layout
        self._on_gpus = on_gpus
        self._bounds = bounds
        self._cuda = cuda
        self._buffers = HostBuffers()
        self._warned_of_host = self._warned_of_packing = False
        self._at: str | None = None
        """The GPU from which the open update is sent; None for host memory."""
        self._update: IpcUpdate | None = None

    @property
    def expected_receivers(self) -> int:
        """The number of receivers that the open update waits for; 0 if none is open."""
        return self._update.expected if self._update is not None else 0

    def open(self, manifest: Manifest) -> dict[str, Any]:
        self.close()
        self._at = self.device if self.device.startswith("cuda") and self._on_gpus() else None
        if self._at is None and self.device.startswith("cuda") and not self._warned_of_host:
            self._warned_of_host = True
            log.warning("the weights on %s go by host memory, because not every engine is on a GPU", self.device)
        self._update = IpcUpdate(manifest, self._receivers, self._bounds, self._cuda)
        if self._layout == "packed":
            self._begun()
        return {"backend": BACKEND, "socket": self._update.name, "secret": self._update.secret}

    def pack(self, tensors: Iterable[tuple[str, TensorSpec]], bucket_bytes: int) -> tuple[PackedBucket, ...]:
        return pack(tensors, bucket_bytes) if self._layout == "packed" else pack_modules(tensors, bucket_bytes)

    def lend(self, tensors: Mapping[str, Tensor]) -> Collection[int]:
        """Lends tensors in the layout `tensors`: tensors that torch shares in host memory, or tensors on the sending
        GPU."""
        if self._layout == "packed":
            return ()
        own = LentTensors(self._open_update().manifest, tensors, self._at, self._cuda)
        if len(own.lent) < len(self._open_update().manifest.buckets) and not self._warned_of_packing:
            self._warned_of_packing = True
            log.warning(
                "some buckets are packed, because not all of their tensors are in shared memory or on %s",
                self.device,
            )
        self._begun(own)
        return own.lent

    def buffer(self, number: int) -> Buffer:
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
        """Ends the update, from any thread. A call that waits raises Unavailable."""
        update, self._update = self._update, None
        if update is not None:
            update.close()

    def destroy(self) -> None:
        self.close()
        self._buffers = HostBuffers()

    def _begun(self, own: LentTensors | None = None) -> IpcUpdate:
        """The open update, with buffers for what is not lent. From here on receivers are answered."""
        update = self._open_update()
        if update.begun:
            return update
        buffers: HostBuffers | GpuBuffers | None = None
        try:
            if own is None or len(own.lent) < len(update.manifest.buckets):
                buffers = (
                    self._buffers.fit(update.manifest)
                    if self._at is None
                    else GpuBuffers(update.manifest, buffer_bytes(update.manifest), self._at, self._cuda)
                )
            update.begin(buffers, own, on_gpu=self._at is not None)
        except BaseException:
            self.close()
            raise
        return update

    def _open_update(self) -> IpcUpdate:
        if self._update is None:
            raise closed()
        return self._update


def build(context: SenderContext, cuda: TorchCuda = TORCH_CUDA) -> IpcSender:
    """Makes the sender. Options: `layout`, which is `packed` (default) or `tensors`."""
    context.check_options(BACKEND, "layout")

    def on_gpus() -> bool:
        rows = engine_replies(context.run("describe", {}))
        return all(str(row.get("device", "")).startswith("cuda") for row in rows)

    layout = context.options.get("layout", "packed")
    return IpcSender(lambda: receivers(context.workers()), layout=layout, on_gpus=on_gpus, cuda=cuda)

"""Delivers the tensors of safetensors files, wherever the files are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rl_plane._util.tasks import Cancelled, never
from rl_plane.protocol.versions import HostTensor, TensorSpec
from rl_plane.transports.base import Delivery
from rl_plane.weights.checkpoint import Checkpoint


class CheckpointDelivery(Delivery):
    """The tensors of a checkpoint, or of an adapter, in files."""

    def __init__(
        self, checkpoint: Checkpoint, digest: str | None = None, tensor_digests: Mapping[str, str] | None = None
    ) -> None:
        self.specs: Mapping[str, TensorSpec] = checkpoint.specs
        self.digest = digest
        self.tensor_digests = tensor_digests
        self.adapter_config_raw = checkpoint.config
        self.refetchable = True
        self.canary = checkpoint.canary
        """The content of `canary.json` beside the checkpoint."""
        self.checkpoint = checkpoint
        self._taken = False

    def tensors(self, cancelled: Cancelled = never) -> Iterator[tuple[str, HostTensor]]:
        """Ignores `cancelled`: the next tensor of a local file comes without a wait."""
        if self._taken:
            raise RuntimeError("a delivery is read once: open another")
        self._taken = True
        return self.checkpoint.tensors(self.algorithm, self.places)

    def close(self) -> None:
        self.checkpoint.close()

"""The receiving half of `filesystem`: weights from files beneath the operator's weight roots.

A request is `{backend: filesystem, path: P}`. `rl_plane.weights.checkpoint` reads what is at P, an absolute path.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rl_plane._util.tasks import Cancelled, never
from rl_plane.errors import InvalidRequest
from rl_plane.protocol.versions import HostTensor, TensorSpec
from rl_plane.transports.base import Delivery, TransportContext, WeightTransport, check_fields
from rl_plane.weights.checkpoint import Checkpoint, Kind, open_published
from rl_plane.weights.rooted_files import shown_roots

MAX_PATH_CHARS = 4096
"""PATH_MAX of Linux."""


class FilesystemDelivery(Delivery):
    """The tensors of a checkpoint, or of an adapter, in files."""

    def __init__(
        self, checkpoint: Checkpoint, digest: str | None = None, tensor_digests: Mapping[str, str] | None = None
    ) -> None:
        self.specs: Mapping[str, TensorSpec] = checkpoint.specs
        self.digest = digest
        self.tensor_digests = tensor_digests
        self.adapter_config = None if checkpoint.config is None else checkpoint.config.values
        self.adapter_config_raw = None if checkpoint.config is None else checkpoint.config.raw
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


class FilesystemTransport(WeightTransport):
    """The `filesystem` backend. Keeps nothing between two updates."""

    backend = "filesystem"

    def __init__(self, context: TransportContext) -> None:
        self._roots = [Path(os.path.abspath(root)) for root in context.weight_roots]

    def open(self, request: Mapping[str, Any], kind: Kind) -> FilesystemDelivery:
        check_fields(self.backend, request, "path")
        path = _checked_path(request.get("path"), self._roots)
        return FilesystemDelivery(*open_published(path, self._roots, kind))


def _checked_path(path: Any, roots: list[Path]) -> str:
    fix = f"give an absolute path beneath {shown_roots(roots)}"

    def refuse(what: str) -> InvalidRequest:
        return InvalidRequest(f"transport.path {what}", field="transport.path", fix=fix)

    if path is None:
        raise refuse("is missing")
    if not isinstance(path, str):
        raise refuse(f"must be a string, not {type(path).__name__}")
    if len(path) > MAX_PATH_CHARS:
        raise refuse(f"has {len(path)} characters, more than {MAX_PATH_CHARS}")
    if "\0" in path:
        raise refuse("has a NUL character")
    try:
        os.fsencode(path)
    except UnicodeError:
        raise refuse("has characters that no file name can have") from None
    if not os.path.isabs(path):
        raise refuse(f"must be absolute, not {path!r}")
    return path

"""The `filesystem` transport: weights from files beneath configured roots.

`{backend: filesystem, path: P}`. P, an absolute path, is what `rl_plane.weights.checkpoint` reads.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rl_plane._util.tasks import never
from rl_plane.errors import InvalidRequest
from rl_plane.protocol.versions import HostTensor, TensorSpec
from rl_plane.transports.receiver_base import Places
from rl_plane.transports.reception import Cancelled
from rl_plane.weights.checkpoint import Checkpoint, Kind, open_published
from rl_plane.weights.rooted_files import listed, shown_roots

MAX_PATH_CHARS = 4096
"""PATH_MAX of Linux."""

_FIELDS = frozenset({"backend", "path"})


class FilesystemDelivery:
    """A Delivery of files."""

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
        """What `canary.json` beside the checkpoint says."""
        self._checkpoint = checkpoint
        self._taken = False

    def tensors(self, cancelled: Cancelled = never) -> Iterator[tuple[str, HostTensor]]:
        """Ignores `cancelled`: the next tensor of a local file comes without a wait."""
        if self._taken:
            raise RuntimeError("a delivery is read once: open another")
        self._taken = True
        return self._checkpoint.tensors(hashed=True)

    def close(self) -> None:
        self._checkpoint.close()


class FilesystemTransport:
    """The `filesystem` backend. Keeps nothing between two updates."""

    backend = "filesystem"

    def __init__(self, places: Places) -> None:
        self._roots = [Path(os.path.abspath(root)) for root in places.weight_roots]

    def init(self, config: Mapping[str, Any]) -> None:
        _check_fields(config, frozenset({"backend"}))

    def destroy(self) -> None:
        pass

    def open(self, request: Mapping[str, Any], kind: Kind) -> FilesystemDelivery:
        _check_fields(request, _FIELDS)
        path = _checked_path(request.get("path"), self._roots)
        return FilesystemDelivery(*open_published(path, self._roots, kind))


def _check_fields(given: Mapping[str, Any], known: frozenset[str]) -> None:
    backend = given.get("backend", "filesystem")
    if backend != "filesystem":
        raise InvalidRequest(
            f"the backend is {str(backend)[:64]!r}, not 'filesystem'",
            field="transport.backend",
            fix="send it to that backend, or say filesystem",
        )
    unknown = [str(key)[:64] for key in given if key not in known]
    if unknown:
        raise InvalidRequest(
            f"the filesystem transport has no field {listed(unknown)}",
            field=f"transport.{unknown[0]}",
            fix=f"use only {', '.join(sorted(known))}",
        )


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

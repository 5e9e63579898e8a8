"""The receiving half of `filesystem`: weights from files beneath the operator's weight roots.

A request is `{backend: filesystem, path: P}`. `rl_plane.weights.checkpoint` reads what is at P, an absolute path.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_plane.errors import InvalidRequest
from rl_plane.transports.base import TransportContext, WeightTransport, check_fields
from rl_plane.transports.checkpoint_delivery import CheckpointDelivery
from rl_plane.weights.checkpoint import Kind, open_published
from rl_plane.weights.rooted_files import shown_roots

MAX_PATH_CHARS = 4096
"""PATH_MAX of Linux."""


class FilesystemTransport(WeightTransport):
    """The `filesystem` backend. Keeps nothing between two updates."""

    backend = "filesystem"

    def __init__(self, context: TransportContext) -> None:
        self._roots = [Path(os.path.abspath(root)) for root in context.weight_roots]

    def open(self, request: Mapping[str, Any], kind: Kind) -> CheckpointDelivery:
        check_fields(self.backend, request, "path")
        path = _checked_path(request.get("path"), self._roots)
        return CheckpointDelivery(*open_published(path, self._roots, kind))


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

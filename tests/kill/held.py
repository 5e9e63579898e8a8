"""The `held` transport, as a third party's package would bring it: files as by `filesystem`, which a test can hold
open when the first tensor is there."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rl_plane._util.tasks import Cancelled, never
from rl_plane.protocol.versions import HostTensor
from rl_plane.transports.checkpoint_delivery import CheckpointDelivery
from rl_plane.transports.filesystem.receiver import FilesystemTransport
from rl_plane.weights.checkpoint import Kind, open_published
from tests.support.phase_hooks import MAX_HOLD_S, POLL_S, VARIABLE

RECEIVE = "receive"
"""The point, as in `tests/support/phase_hooks.py`."""


def installed(site: Path) -> Path:
    """Installs an entry point, so that every process with this directory in its path finds the held transport."""
    package = site / "held-1.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: held\nVersion: 1\n")
    (package / "entry_points.txt").write_text(f"[rl_plane.transports]\nheld = {__name__}:HeldTransport\n")
    return site


class HeldTransport(FilesystemTransport):
    backend = "held"

    def open(self, request: Mapping[str, Any], kind: Kind) -> CheckpointDelivery:
        return HeldDelivery(*open_published(request["path"], self._roots, kind))


class HeldDelivery(CheckpointDelivery):
    def tensors(self, cancelled: Cancelled = never) -> Iterator[tuple[str, HostTensor]]:
        for number, tensor in enumerate(super().tensors(cancelled)):
            yield tensor
            if number == 0:
                _hold(Path(os.environ[VARIABLE]), os.environ["RL_PLANE_INSTANCE_ID"])


def _hold(directory: Path, instance_id: str) -> None:
    """On the receiver's thread, in the process that has the model."""
    file = directory / f"{RECEIVE}.{instance_id}"
    give_up = time.monotonic() + MAX_HOLD_S
    while file.exists() and time.monotonic() < give_up:
        (directory / f"reached.{RECEIVE}.{instance_id}").touch()
        time.sleep(POLL_S)

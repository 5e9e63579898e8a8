"""The sources of weights: checkpoints that vanish, return and change, and trainers that push."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_plane.errors import InvalidWeights, UpdateAborted
from rl_plane.protocol.update_requests import ReceivePart
from rl_plane.protocol.versions import TensorSpec
from rl_plane.transports.base import CheckSpecs, PartwiseDelivery, TransportContext
from rl_plane.transports.checkpoint_delivery import CheckpointDelivery
from rl_plane.transports.filesystem.receiver import FilesystemTransport
from tests.sim.virtual_loop import Blocked
from worker.receive.staging import model_digest

if TYPE_CHECKING:
    from tests.sim.process import Process
    from tests.sim.world import World

RECEIVE_S = 12.0
"""The time-out of a receive."""

digest_of = lru_cache(model_digest)


class Sources:
    def __init__(self, rng: random.Random, models: Sequence[Path]) -> None:
        self.gone: set[str] = set()
        """Checkpoints that are not there now."""
        self.pushes: dict[str, str] = {}
        """The fate of a trainer's push under this name: `sent` or `broken`. Absent: it is awaited."""
        self.failed = False
        """Has any ever been gone, changed or broken?"""
        self._rng = rng
        self._models = {str(path) for path in models}
        self._first = str(models[0])
        self._now: dict[str, str] = {}
        """Path → the checkpoint with which it was overwritten."""
        self._being_written: dict[str, str] = {}
        """Path → the checkpoint that is being written over it: each reader may see the one or the other."""

    def write_over(self, path: Path, other: Path) -> None:
        self.failed = True
        self._being_written[str(path)] = self._now.get(str(other), str(other))

    def written(self) -> None:
        self._now.update(self._being_written)
        self._being_written.clear()

    def read(self, path: str) -> str:
        """The checkpoint that a reader of this path sees now."""
        if path in self.gone:
            return path + "-gone"
        if path in self._being_written and self._rng.random() < 0.5:
            return self._being_written[path]
        return self._now.get(path, path)

    def digest_at(self, path: str | None) -> str | None:
        """The digest of the model at this path. None: there is none."""
        path = self._first if path is None else path
        return digest_of(Path(self._now.get(path, path))) if path in self._models else None


class SimFedDelivery(CheckpointDelivery, PartwiseDelivery):
    """A trainer announces its tensors part by part."""

    def __init__(self, inner: CheckpointDelivery) -> None:
        vars(self).update(vars(inner))
        self.error: UpdateAborted | InvalidWeights | None = None
        self.whole = False
        self._missing = set(self.specs)

    def expect(self, wanted: Mapping[str, TensorSpec], tied: Mapping[str, str], check: CheckSpecs) -> None:
        pass

    def receive_part(self, part: ReceivePart, cancelled: Any) -> int:
        if self.error is not None:
            raise self.error
        if part.check_only:
            return 0
        if unknown := set(part.names) - self._missing:
            self.error = InvalidWeights(
                f"simulated: {sorted(unknown)} come twice, or are not known", field="names"
            )
            raise self.error
        self._missing -= set(part.names)
        if part.last and self._missing:
            self.error = InvalidWeights(f"simulated: {len(self._missing)} tensors did not come", field="names")
            raise self.error
        self.whole = part.last
        return len(self._missing)


class SimTransport(FilesystemTransport):
    """`filesystem`, and `gloo`: the same files, but as if a trainer pushed them. `push` names what it pushes."""

    def __init__(self, backend: str, world: World, process: Process) -> None:
        super().__init__(TransportContext((world.models[0].parent,)))
        self.backend = backend
        self._world = world
        self._process = process
        self._waits: dict[CheckpointDelivery, tuple[str, float]] = {}
        """For which push, and until when."""

    def open(self, request: Mapping[str, Any], *kind: Any) -> CheckpointDelivery:
        known = {key: request[key] for key in request.keys() - {"push", "group", "in_parts", "fleet_ranks"}}
        if isinstance(path := known.get("path"), str):
            known["path"] = self._world.sources.read(path)
        delivery = super().open({**known, "backend": "filesystem"}, *kind)
        if request.get("in_parts"):
            delivery = SimFedDelivery(delivery)
        if self.backend != "filesystem":
            delivery.refetchable = False
        self._waits[delivery] = (request.get("push", ""), self._world.loop.now + RECEIVE_S)
        return delivery

    def check_here(self, delivery: Any) -> None:
        """Blocked while the bytes of this delivery are awaited; UpdateAborted when they don't come any more."""
        push, until = self._waits[delivery]
        state = self._world.sources.pushes.get(push, "awaited") if push else "sent"
        if isinstance(delivery, SimFedDelivery) and not delivery.whole:
            if delivery.error is not None:
                raise delivery.error
            state = "awaited"
        if self._process.plane == "fails" or state == "broken":
            raise UpdateAborted("simulated: the trainer is gone, or can't be reached", field="transport.group")
        if self._process.plane == "hangs" or state == "awaited":
            if self._world.loop.now > until:
                raise UpdateAborted("simulated: the bytes did not come in time", field="transport.group")
            raise Blocked

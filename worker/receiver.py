"""The receiving half, in the process that holds the model: transports on one side, a WeightHolder on the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from rl_plane.errors import EngineFailed
from rl_plane.ops import PreparedReply
from worker.reception import Cancelled, Reception, Staged, WeightHolder
from worker.staging import check_overwrite, overwrite, receive, receive_adapter
from worker.transports.base import Delivery, WeightTransport

TRANSPORTS = "rl_plane.transports"


@cache
def _installed() -> dict[str, type[WeightTransport]]:
    return {point.name: point.load() for point in entry_points(group=TRANSPORTS)}


def load_transports(weight_roots: Iterable[Path]) -> dict[str, WeightTransport]:
    """One of each that is installed."""
    roots = list(weight_roots)
    return {name: kind(roots) for name, kind in _installed().items()}


class Receiver:
    """What it stages it keeps until `take` or `discard`. Its methods block: they are for a thread."""

    def __init__(self, holder: WeightHolder, transports: Mapping[str, WeightTransport]) -> None:
        self.holder = holder
        self._transports = transports
        self._staged: dict[str, Staged] = {}
        self._opened: dict[str, Delivery] = {}

    @property
    def backends(self) -> tuple[str, ...]:
        return tuple(sorted(self._transports))

    def receive(self, reception: Reception, cancelled: Cancelled) -> PreparedReply:
        """Into staging. When it raises, nothing is staged."""
        delivery = self._open(reception)
        tensors, size, refetchable = _size(delivery)
        take = receive if reception.kind == "base" else receive_adapter
        staged, digest = take(
            self.holder,
            delivery,
            cast=reception.cast,
            expected_digest=reception.digest,
            cancelled=cancelled,
        )
        self._staged[reception.staging] = staged
        return PreparedReply(digest=digest, tensors=tensors, bytes=size, refetchable=refetchable)

    def check_overwrite(self, reception: Reception) -> None:
        """Opens the delivery, and checks all that can be without its bytes; `overwrite` or `discard` closes it."""
        delivery = self._open(reception)
        check_overwrite(self.holder, delivery, cast=reception.cast, expected_digest=reception.digest)
        self._opened[reception.staging] = delivery

    def overwrite(self, reception: Reception, cancelled: Cancelled) -> PreparedReply:
        """Over the served weights."""
        delivery = self._opened.pop(reception.staging, None) or self._open(reception)
        tensors, size, refetchable = _size(delivery)
        digest = overwrite(
            self.holder,
            delivery,
            cast=reception.cast,
            expected_digest=reception.digest,
            cancelled=cancelled,
        )
        return PreparedReply(digest=digest, tensors=tensors, bytes=size, refetchable=refetchable)

    def take(self, staging: str) -> Staged:
        """For the swap; from here on it is the caller's."""
        staged = self._staged.pop(staging, None)
        if staged is None:
            raise EngineFailed(f"nothing is staged as {staging!r}: it was swapped or discarded before")
        return staged

    def discard(self, staging: str) -> None:
        """Frees what is staged or opened under this name, if anything is."""
        self._staged.pop(staging, None)
        delivery = self._opened.pop(staging, None)
        if delivery is not None:
            delivery.close()

    def init_transport(self, config: Mapping[str, Any]) -> None:
        self._transport(config).init(config)

    def destroy_transport(self, backend: str) -> None:
        self._transport({"backend": backend}).destroy()

    def _open(self, reception: Reception) -> Delivery:
        return self._transport(reception.transport).open(reception.transport, reception.kind)

    def _transport(self, config: Mapping[str, Any]) -> WeightTransport:
        return self._transports[config["backend"]]


def _size(delivery: Delivery) -> tuple[int, int, bool]:
    """(tensors, bytes, refetchable)."""
    return len(delivery.specs), sum(spec.nbytes for spec in delivery.specs.values()), delivery.refetchable

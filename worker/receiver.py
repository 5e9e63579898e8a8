"""The receiving half, in the process that holds the model: transports on one side, a WeightHolder on the other."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from rl_plane.errors import EngineFailed
from rl_plane.ops import PreparedReply
from rl_plane.versions import HostTensor
from worker.reception import Cancelled, KeepableStaged, Reception, Staged, WeightHolder
from worker.staging import check_overwrite, check_staged, overwrite, receive, receive_adapter
from worker.transports.base import Delivery, OfferingTransport, Places, WeightTransport
from worker.transports.packed import PackedDelivery

log = logging.getLogger("worker.receiver")

TRANSPORTS = "rl_plane.transports"


@cache
def _installed() -> dict[str, type[WeightTransport]]:
    """Without those that lack a package of theirs."""
    found = {}
    for point in entry_points(group=TRANSPORTS):
        try:
            found[point.name] = point.load()
        except ModuleNotFoundError as error:
            log.info("there is no %s transport: %s", point.name, error)
    return found


def load_transports(places: Places) -> dict[str, WeightTransport]:
    """One of each that is installed."""
    return {name: kind(places) for name, kind in _installed().items()}


@dataclass(frozen=True, slots=True)
class Kept:
    """A version in host memory, beside the model: exactly what was published, tensor by tensor."""

    digest: str
    tensors: Mapping[str, HostTensor]
    """Writable; by checkpoint name."""
    staged: KeepableStaged
    """The same memory, as the engine's swap takes it."""


class Receiver:
    """One reception: `open`, `receive`, then `take` or `discard`. Its methods block: they are for a thread."""

    def __init__(self, holder: WeightHolder, transports: Mapping[str, WeightTransport]) -> None:
        self.holder = holder
        self._transports = transports
        self._opened: dict[str, tuple[Reception, Delivery]] = {}
        self._staged: dict[str, Staged] = {}
        self._to_keep: dict[str, Kept] = {}
        self._kept: Kept | None = None
        self._offering = threading.Lock()

    @property
    def kept(self) -> Kept | None:
        """What an update with `keep` has left here. It goes when other base weights are received."""
        return self._kept

    @kept.setter
    def kept(self, kept: Kept | None) -> None:
        with self._offering:
            if kept is not self._kept:
                for transport in self._offers():
                    transport.withdraw()
            self._kept = kept

    def offer(self) -> dict[str, Any] | None:
        """Where others find what is kept, until it goes: `{digest, transport}`; None: nothing is kept."""
        with self._offering:
            transport = next(iter(self._offers()), None)
            if self._kept is None or transport is None:
                return None
            return {"digest": self._kept.digest, "transport": dict(transport.offer(self._kept.tensors))}

    def _offers(self) -> list[OfferingTransport]:
        return [transport for transport in self._transports.values() if isinstance(transport, OfferingTransport)]

    @property
    def backends(self) -> tuple[str, ...]:
        return tuple(sorted(self._transports))

    def open(self, reception: Reception) -> None:
        """Opens the delivery, and checks what can be checked without its bytes. `receive` or `discard` closes it."""
        delivery = self._transport(reception.transport).open(reception.transport, reception.kind)
        if reception.in_place:
            check_overwrite(self.holder, delivery, cast=reception.cast, expected_digest=reception.digest)
        else:
            check_staged(self.holder, delivery, reception.kind, cast=reception.cast)
        self._opened[reception.staging] = (reception, delivery)

    def receive(self, staging: str, cancelled: Cancelled) -> PreparedReply:
        """What was opened, into staging or over the served weights. When it raises, nothing is staged."""
        opened = self._opened.pop(staging, None)
        if opened is None:
            raise EngineFailed(f"nothing is open as {staging!r}")
        reception, delivery = opened
        if isinstance(delivery, PackedDelivery):
            delivery.cancelled = cancelled
        tensors, size = len(delivery.specs), sum(spec.nbytes for spec in delivery.specs.values())
        refetchable = delivery.refetchable
        how: dict[str, Any] = {
            "cast": reception.cast,
            "expected_digest": reception.digest,
            "cancelled": cancelled,
        }
        if reception.kind == "base":
            self.kept = None  # before its like comes: there is room for one
        if reception.in_place:
            digest = overwrite(self.holder, delivery, **how)
        else:
            take = receive if reception.kind == "base" else receive_adapter
            staged, digest = take(self.holder, delivery, **how)
            self._staged[staging] = staged
            if reception.keep and isinstance(staged, KeepableStaged):
                self._may_keep(staging, Kept(digest, staged.host_tensors(), staged), delivery)
        return PreparedReply(digest=digest, tensors=tensors, bytes=size, refetchable=refetchable)

    def take(self, staging: str) -> Staged:
        """For the swap; from here on it is the caller's."""
        staged = self._staged.pop(staging, None)
        if staged is None:
            raise EngineFailed(f"nothing is staged as {staging!r}: it was swapped or discarded before")
        self.kept = self._to_keep.pop(staging, self.kept)
        return staged

    def discard(self, staging: str) -> None:
        """Frees what is staged or opened under this name, if anything is."""
        self._staged.pop(staging, None)
        self._to_keep.pop(staging, None)
        opened = self._opened.pop(staging, None)
        if opened is not None:
            opened[1].close()

    def _may_keep(self, staging: str, kept: Kept, delivery: Delivery) -> None:
        """Not what was cast or left out: it has another digest than the version."""
        if {name: tensor.spec for name, tensor in kept.tensors.items()} == dict(delivery.specs):
            self._to_keep[staging] = kept

    def init_transport(self, config: Mapping[str, Any]) -> None:
        self._transport(config).init(config)

    def destroy_transport(self, backend: str) -> None:
        self._transport({"backend": backend}).destroy()

    def _transport(self, config: Mapping[str, Any]) -> WeightTransport:
        return self._transports[config["backend"]]

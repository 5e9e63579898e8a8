"""The receiving half, in the process that holds the model: transports on one side, a WeightHolder on the other."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from rl_plane.errors import EngineFailed, Unsupported
from rl_plane.ops import PreparedReply
from worker.reception import Cancelled, Reception, Staged, WeightHolder
from worker.staging import check_overwrite, check_staged, overwrite, receive, receive_adapter
from worker.transports.base import Delivery, Places, WeightTransport
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


def load_transports(places: Places, device: str = "cpu") -> dict[str, WeightTransport]:
    """One of each that is installed, and can work here. `device`: where the model is."""
    here, found = replace(places, device=device), {}
    for name, kind in _installed().items():
        try:
            found[name] = kind(here)
        except Unsupported as error:
            log.info("there is no %s transport: %s", name, error)
    return found


class Receiver:
    """One reception: `open`, `receive`, then `take` or `discard`. Its methods block: they are for a thread."""

    def __init__(self, holder: WeightHolder, transports: Mapping[str, WeightTransport]) -> None:
        self.holder = holder
        self._transports = transports
        self._opened: dict[str, tuple[Reception, Delivery]] = {}
        self._staged: dict[str, Staged] = {}

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
        if reception.in_place:
            digest = overwrite(self.holder, delivery, **how)
        else:
            take = receive if reception.kind == "base" else receive_adapter
            self._staged[staging], digest = take(self.holder, delivery, **how)
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
        opened = self._opened.pop(staging, None)
        if opened is not None:
            opened[1].close()

    def init_transport(self, config: Mapping[str, Any]) -> None:
        self._transport(config).init(config)

    def destroy_transport(self, backend: str) -> None:
        self._transport({"backend": backend}).destroy()

    def _transport(self, config: Mapping[str, Any]) -> WeightTransport:
        return self._transports[config["backend"]]

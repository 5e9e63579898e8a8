"""The table of the transports: what the code outside of a transport's folder knows about it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from rl_plane._util.plugins import TRANSPORT_TRAITS, plugins

log = logging.getLogger("rl_plane.protocol.transport_traits")

_TRAINERS_BYTES = "the trainer's bytes"


@dataclass(frozen=True, slots=True)
class TransportTraits:
    """The traits of one transport. The defaults fit a transport by which each worker fetches the weights from the
    trainer, during the update or after it.

    The coordinator reads `pushed`, `in_parts`, `described_by` and `relayed`. The trainer reads `auto`, `one_host`,
    `lasting` and `needs_root`. The workers read `relayed`, `one_host`, `source` and `if_lacking`.
    """

    auto: bool = False
    """`transport="auto"` may take the transport."""
    one_host: bool = False
    """The transport moves weights only within one machine. `auto` leaves it out if trainer and engines are on several
    machines. An engine whose nodes are on several machines does not offer it."""
    lasting: bool = False
    """Workers can still fetch the weights when the trainer is gone."""
    needs_root: bool = False
    """The sender needs a directory that trainer and workers share (`root`)."""
    pushed: bool = False
    """The sender waits for its receivers. `prepare_weights_update` makes the workers listen, and
    `complete_weights_update` waits until they have received the weights."""
    in_parts: bool = False
    """A trainer may announce an update part by part (`in_parts: true` in its `transport`)."""
    described_by: str | None = None
    """With `in_parts`: another field of `transport`. If it is there, the tensors are described as they come."""
    relayed: bool = False
    """Workers fetch an update from one another too. Its source is the trainer's memory."""
    source: str | None = None
    """The bytes that a worker waits for, in words. None: `the bytes of <backend>`."""
    if_lacking: str | None = None
    """The fix of the error if a worker lacks the transport. None: the fix lists the transports of the worker."""


BUILT_IN: Mapping[str, TransportTraits] = {
    "filesystem": TransportTraits(auto=True, lasting=True, needs_root=True, source="the bytes of its files"),
    "nixl": TransportTraits(
        auto=True,
        relayed=True,
        source=_TRAINERS_BYTES,
        if_lacking="install rl-plane[nixl] beside this worker, or use filesystem",
    ),
    "ipc": TransportTraits(
        auto=True, one_host=True, in_parts=True, described_by="zmq_handles", source=_TRAINERS_BYTES
    ),
    "gloo": TransportTraits(auto=True, pushed=True, in_parts=True, described_by="format", source=_TRAINERS_BYTES),
    "object_store": TransportTraits(auto=True, lasting=True, source="the bytes that NATS stores"),
    # `auto` never takes nccl: it can't know whether an engine uses the trainer's GPU, and an nccl group needs a GPU of
    # its own for each member.
    "nccl": TransportTraits(
        pushed=True,
        in_parts=True,
        described_by="format",
        source=_TRAINERS_BYTES,
        if_lacking="put the model on a GPU, or use gloo",
    ),
    "http": TransportTraits(source="the bytes of an HTTP server"),
}
"""Backend → its traits, for each transport that comes with rl_plane. The order is that of `auto`, best first: first
transports from which a worker can heal, then the fastest."""


@cache
def known_transports() -> Mapping[str, TransportTraits]:
    """Returns the traits by backend: `BUILT_IN`, then the traits that installed packages state by entry points."""
    found = dict(BUILT_IN)
    for name, point in sorted(plugins(TRANSPORT_TRAITS).items()):
        try:
            traits = point.load()
            if not isinstance(traits, TransportTraits):
                raise TypeError(f"{point.value} is {traits!r}, not a TransportTraits")
        except Exception as error:  # a broken package must not stop updates by other transports
            log.warning(
                "the transport %s gets the default traits, because its own can't be loaded: %s", name, error
            )
            continue
        found.setdefault(name, traits)
    return found


def traits_of(backend: str) -> TransportTraits:
    """Returns the traits of a transport, or the defaults if none are stated for it."""
    return known_transports().get(backend, TransportTraits())


def directory_transport(path: str) -> dict[str, Any]:
    """Returns the `transport` by which workers read a model or an adapter from a directory or a file."""
    return {"backend": "filesystem", "path": path}

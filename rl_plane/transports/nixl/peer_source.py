"""Offers the weights that a worker keeps, or is just receiving, to other workers."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from rl_plane._util.own_address import own_address
from rl_plane.protocol.subjects import DEFAULT_NATS_PORT
from rl_plane.protocol.versions import HostTensor
from rl_plane.transports.nixl.metadata_server import MetadataServer, RelayOffer
from rl_plane.transports.nixl.sender import NixlSender, address_of_tensor
from rl_plane.transports.nixl.tcp_reads import Region
from rl_plane.transports.nixl.wire import make_agent
from rl_plane.weights.hashed_copy import address_of
from rl_plane.weights.manifest import ALIGN_BYTES, Manifest, pack


class PeerSource:
    """Offers sets of tensors, and serves one relay. Other workers read the tensors in place."""

    def __init__(self, host: str) -> None:
        self._server = MetadataServer(host, 0)
        self._process = os.getpid()
        self._made: Any = None
        self._offers: dict[str, _OfferedTensors] = {}
        """The offer of each secret."""
        self._relay: _Relay | None = None
        self._ending = threading.Lock()

    @property
    def _agent(self) -> Any:
        """The agent, made when it is first needed. That takes seconds, if this process has not imported nixl yet."""
        if self._made is None:
            self._made = make_agent(self._server.host)
        return self._made

    @property
    def _is_ours(self) -> bool:
        """False in a forked child, which must touch neither the agent nor the server."""
        return os.getpid() == self._process

    @property
    def address(self) -> tuple[str, int]:
        """The host and port at which other workers ask."""
        return self._server.host, self._server.port

    def offer(self, tensors: Mapping[str, HostTensor], adapter_config: bytes | None = None) -> Mapping[str, Any]:
        """Offers tensors, whose memory is lent until `withdraw`. Returns the `transport` object of a request for
        them."""
        buckets = pack(((name, one.spec) for name, one in tensors.items()), NixlSender.bucket_bytes)
        manifest = Manifest(buckets, adapter_config)
        places = [
            [(address_of_tensor(tensors[placed.name]), placed.spec.nbytes) for placed in bucket.tensors]
            for bucket in manifest.buckets
        ]
        regions = [(address, nbytes, 0, "") for bucket in places for address, nbytes in bucket if nbytes]
        secret, registered = secrets.token_hex(16), self._agent.register_memory(regions, "DRAM")
        self._offers[secret] = _OfferedTensors(registered, tensors)
        try:
            metadata = self._agent.get_partial_agent_metadata(registered, True, ["UCX"])
            self._server.offer(secret, metadata, manifest, places)
        except BaseException:
            self.withdraw(secret)
            raise
        return self._server.transport(secret)

    def withdraw(self, secret: str) -> None:
        """Ends an offer. When it returns, no other worker reads its tensors. In a forked child it does nothing."""
        offer = self._offers.pop(secret, None) if self._is_ours else None
        if offer is not None:
            self._server.withdraw(secret)
            self._agent.deregister_memory(offer.registered)

    def relay(self, secret: str, places: Sequence[Sequence[memoryview]]) -> RelayOffer:
        """Serves the buckets of the update with this secret to other workers, each once it is announced.

        The memory of `places`, each bucket's tensors, is lent until `end_relay`."""
        self.end_relay()
        regions = [[(address_of(place), place.nbytes) for place in bucket] for bucket in places]
        joined = [(address, nbytes, 0, "") for address, nbytes in _joined(regions)]
        registered = self._agent.register_memory(joined, "DRAM")
        metadata = self._agent.get_partial_agent_metadata(registered, True, ["UCX"])
        self._relay = _Relay(self._server.offer_relay(secret, metadata, regions), registered, places)
        return self._relay.offer

    def end_relay(self) -> None:
        """Ends the relay. When it returns, no other worker reads its memory. In a forked child it does nothing."""
        with self._ending:
            relay, self._relay = self._relay, None
            if relay is not None and self._is_ours:
                self._server.end_relay(relay.offer)
                self._agent.deregister_memory(relay.registered)

    def close(self) -> None:
        """Ends all offers and the server. In a forked child it does nothing."""
        if not self._is_ours:
            return
        self.end_relay()
        for secret in list(self._offers):
            self.withdraw(secret)
        self._server.close()
        self._made = None


@dataclass(frozen=True, slots=True)
class _OfferedTensors:
    registered: Any
    tensors: Mapping[str, HostTensor]
    """Keeps the memory from being freed."""


@dataclass(frozen=True, slots=True)
class _Relay:
    offer: RelayOffer
    registered: Any
    places: Sequence[Sequence[memoryview]]
    """Keeps the memory from being freed."""


def _joined(regions: Sequence[Sequence[Region]]) -> list[Region]:
    """The regions in the order of their addresses, with the gaps of an alignment between them."""
    found: list[Region] = []
    for address, nbytes in sorted(region for bucket in regions for region in bucket if region[1]):
        if found and address - sum(found[-1]) < ALIGN_BYTES:
            found[-1] = (found[-1][0], address + nbytes - found[-1][0])
        else:
            found.append((address, nbytes))
    return found


def address_towards(nats_url: str) -> str:
    """This machine's address on the network of NATS, where the other workers are too."""
    where = urlsplit(nats_url if "://" in nats_url else f"nats://{nats_url}")
    return own_address(where.hostname or "", where.port or DEFAULT_NATS_PORT)

"""Offers the weights that a worker keeps beside its model, so that other workers can heal from them."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from rl_plane._util.own_address import own_address
from rl_plane.protocol.versions import HostTensor
from rl_plane.transports.nixl.metadata_server import MetadataServer
from rl_plane.transports.nixl.sender import NixlSender, address_of
from rl_plane.transports.nixl.wire import is_ours, make_agent
from rl_plane.transports.object_store.bulk_socket import DEFAULT_PORT
from rl_plane.weights.manifest import Manifest, pack


class PeerSource:
    """Offers one set of tensors at a time. Other workers read them in place."""

    def __init__(self, host: str) -> None:
        self._agent = make_agent(f"rl-plane-{secrets.token_hex(8)}", host)
        self._server = MetadataServer(host, 0)
        self._secret = ""
        self._registered: Any = None
        self._tensors: Mapping[str, HostTensor] = {}

    def offer(self, tensors: Mapping[str, HostTensor]) -> Mapping[str, Any]:
        """Offers tensors, whose memory is lent until `withdraw`. Returns the `transport` object of a request for
        them."""
        self.withdraw()
        manifest = Manifest(pack(((name, one.spec) for name, one in tensors.items()), NixlSender.bucket_bytes))
        places = [
            [(address_of(tensors[placed.name]), placed.spec.nbytes) for placed in bucket.tensors]
            for bucket in manifest.buckets
        ]
        regions = [(address, nbytes, 0, "") for bucket in places for address, nbytes in bucket if nbytes]
        self._tensors, self._secret = tensors, secrets.token_hex(16)
        self._registered = self._agent.register_memory(regions, "DRAM")
        metadata = self._agent.get_partial_agent_metadata(self._registered, True, ["UCX"])
        self._server.offer(self._secret, metadata, manifest, places)
        return self._server.transport(self._secret)

    def withdraw(self) -> None:
        """Ends the offer. When it returns, no other worker reads the tensors. In a forked child it does nothing."""
        if not is_ours(self._agent):
            return
        self._server.withdraw(self._secret)
        if self._registered is not None:
            self._agent.deregister_memory(self._registered)
        self._registered, self._tensors = None, {}

    def close(self) -> None:
        """Ends the offer and the server. In a forked child it does nothing."""
        if not is_ours(self._agent):
            return
        self.withdraw()
        self._server.close()
        self._agent = None


def address_towards(nats_url: str) -> str:
    """This machine's address on the network of NATS, where the other workers are too."""
    where = urlsplit(nats_url if "://" in nats_url else f"nats://{nats_url}")
    return own_address(where.hostname or "", where.port or DEFAULT_PORT)

"""The settings of an engine that spans several hosts. Each host runs one node; node rank 0 is the head."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from rl_plane.errors import InvalidRequest
from rl_plane.protocol.subjects import Subjects

MAX_NODES = 1024
"""More hosts than the largest engine that is known has."""

NODE_WAIT_S = 600.0
"""Hosts of one engine may start minutes apart."""


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """`--nnodes`, `--node-rank`, `--dist-init-addr` and `--node-wait-s` of `rl-plane worker`."""

    count: int = 1
    rank: int = 0
    address: str | None = None
    """`HOST:PORT` of the head, where the ranks of all nodes meet. The same on every node."""
    wait_s: float = NODE_WAIT_S
    """Seconds that a node waits for the others."""

    def check(self) -> None:
        """Raises InvalidRequest for settings that don't fit each other."""
        if not 1 <= self.count <= MAX_NODES:
            raise InvalidRequest(f"nnodes is {self.count}", field="nnodes", fix=f"use 1 to {MAX_NODES}")
        if not 0 <= self.rank < self.count:
            raise InvalidRequest(
                f"node_rank is {self.rank}, and nnodes is {self.count}",
                field="node_rank",
                fix=f"use 0 to {self.count - 1}, each on one host",
            )
        if self.count > 1 and self.address is None:
            raise InvalidRequest(
                "nnodes is given without dist_init_addr",
                field="dist_init_addr",
                fix="give every node the head's HOST:PORT",
            )
        if self.address is not None:
            if self.count == 1:
                raise InvalidRequest(
                    "dist_init_addr is given without nnodes", field="nnodes", fix="give both, or neither"
                )
            self.host_and_port()

    def host_and_port(self) -> tuple[str, int]:
        host, _, port = (self.address or "").rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise InvalidRequest(
                f"dist_init_addr is {(self.address or '')[:64]!r}",
                field="dist_init_addr",
                fix="give the head's HOST:PORT, such as 10.0.0.1:25000",
            )
        return host.strip("[]"), int(port)

    def instance_id(self, subjects: Subjects) -> str:
        """Returns the instance id of an engine that was given none. It is the same on every node, and after a
        restart."""
        text = f"{subjects.namespace}.{subjects.component} {self.address}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


ONE_HOST = NodeSettings()

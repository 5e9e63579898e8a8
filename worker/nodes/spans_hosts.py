"""The methods by which the worker runs one host's part of an engine that spans several hosts."""

from __future__ import annotations

from abc import abstractmethod
from typing import Protocol, runtime_checkable

from worker.nodes.node_part import NodePart


@runtime_checkable
class SpansHosts(Protocol):
    """Runs one engine on several hosts, with `EngineOptions.nodes` as the link between them.

    On the head, the node of rank 0, `start` builds the engine together with the other nodes, and
    `EngineInfo.world_size` counts the ranks of all. On another node the worker calls only these methods and
    `close`."""

    @abstractmethod
    async def start_node(self) -> NodePart:
        """Starts this host's part of the engine, and returns the agents of its ranks."""

    @abstractmethod
    async def node_died(self) -> str:
        """Waits until this host's part of the engine has died, and returns the reason."""

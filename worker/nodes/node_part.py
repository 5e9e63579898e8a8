"""The agents of one host: those of its ranks, and the host agent."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_plane._util.tasks import Cancelled
from rl_plane.errors import EngineFailed
from rl_plane.transports.base import TransportContext
from worker.receive.host_agent.host_agent_client import HostAgentClient
from worker.receive.rank_agents.agent_client import AgentClient
from worker.receive.rank_agents.model_description import ModelDescription
from worker.receive.rank_agents.ranks import Ranks


class NodePart:
    """Its methods block, so they run on a thread."""

    def __init__(self, directory: Path, numbers: range, agent_pid: int, places: TransportContext) -> None:
        """`numbers`: the ranks of the model on this host."""
        self.numbers = tuple(numbers)
        self.ranks = AgentClient.of_ranks(directory, len(numbers), first=numbers.start)
        self.host = HostAgentClient(directory, agent_pid)
        self._places = places

    def begin(self) -> ModelDescription:
        """Asks the ranks for their model, and tells the host agent."""
        model = Ranks(self.ranks).describe(first=self.numbers[0])
        self.host.begin(model, self._places)
        return model

    def ask(
        self, group: str, op: str, body: Mapping[str, Any], cancelled: Cancelled, timeout_s: float
    ) -> list[Any]:
        """Asks the agents of a group: `ranks` or `host`."""
        client = {"ranks": self.ranks, "host": self.host.agent}.get(group)
        if client is None:
            raise EngineFailed(f"a node has no agents {group!r}")
        return client.ask(op, body, cancelled=cancelled, timeout_s=timeout_s)

    def silent(self, within_s: float) -> list[str]:
        """Returns the agents that don't answer within this time."""
        return [*self.ranks.silent(within_s), *self.host.agent.silent(within_s)]


def digest_of(model: ModelDescription) -> str:
    """A digest of what the nodes of one engine must agree on. The tensors of a large model would not fit a message."""
    wire = model.to_wire()
    text = json.dumps([wire["tensors"], wire["tied"]], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()

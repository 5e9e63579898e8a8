"""Ranks of an engine without one, and a host agent in this process, for tests of the two."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_plane._util.tasks import Cancelled
from rl_plane.errors import EngineFailed
from rl_plane.protocol.versions import TensorSpec
from rl_plane.transports.base import TransportContext
from worker.receive.host_agent.agent import HostAgent
from worker.receive.host_agent.host_agent_client import HostAgentClient
from worker.receive.host_agent.windows import WINDOW_BYTES
from worker.receive.rank_agents.agent_client import AgentClient
from worker.receive.rank_agents.agent_messages import host_socket
from worker.receive.rank_agents.agent_server import AgentServer, Method, listen_at
from worker.receive.rank_agents.host_areas import staged_weights, windows
from worker.receive.rank_agents.model_description import specs_to_wire
from worker.receive.rank_agents.ranks import Ranks


class StandInRank:
    """A rank that loads bytes."""

    def __init__(self, specs: Mapping[str, TensorSpec], directory: Path, number: int) -> None:
        self.specs = specs
        self.staged: dict[str, dict[str, bytes]] = {}
        self.loaded: dict[str, bytes] = {}
        self.adapters: dict[str, dict[str, bytes]] = {}
        self.fails_after: int | None = None
        """The number of tensors after which an overwrite fails."""
        self.goes_on = threading.Event()
        """An overwrite waits for it before each tensor."""
        self.goes_on.set()
        self.begun = threading.Event()
        self._directory = directory
        self._number = number
        self.server = AgentServer.of_rank(directory, number, self._methods())
        self.server.start()

    def _methods(self) -> dict[str, Method]:
        return {
            "describe": lambda body, cancelled: {
                "tensors": specs_to_wire(self.specs),
                "tied": {},
                "device": "cpu",
            },
            "adapter_spec": lambda body, cancelled: {f"{body['config']['peft_type']}.a": ["U8", [4]]},
            "stage": self._stage,
            "take": self._take,
            "stage_adapter": self._stage_adapter,
            "overwrite": self._overwrite,
            "discard": lambda body, cancelled: self.adapters.pop(body["staging"], None) and None,
        }

    def _stage(self, body: Mapping[str, Any], cancelled: Cancelled) -> None:
        tensors = staged_weights(self._directory, body["staging"])[0].tensors
        self.staged[body["staging"]] = {name: bytes(tensor.data) for name, tensor in tensors.items()}

    def _take(self, body: Mapping[str, Any], cancelled: Cancelled) -> None:
        self.loaded = self.staged.pop(body["staging"])

    def _stage_adapter(self, body: Mapping[str, Any], cancelled: Cancelled) -> None:
        tensors = staged_weights(self._directory, body["staging"])[0].tensors
        self.adapters[body["staging"]] = {name: bytes(tensor.data) for name, tensor in tensors.items()}

    def _overwrite(self, body: Mapping[str, Any], cancelled: Cancelled) -> None:
        self.loaded = {}
        for name, tensor in windows(self._directory, self._number, cancelled):
            self.begun.set()
            while not self.goes_on.wait(0.01):
                if cancelled():
                    raise EngineFailed("the overwrite was cancelled")
            if len(self.loaded) == self.fails_after:
                raise EngineFailed(f"rank {self._number} takes no more")
            self.loaded[name] = bytes(tensor.data)


class OneHost:
    """Two ranks and their host agent."""

    def __init__(
        self,
        directory: Path,
        specs: Mapping[str, TensorSpec],
        roots: tuple[Path, ...],
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        self.all = [StandInRank(specs, directory, number) for number in range(2)]
        self.agent = HostAgent(directory, window_bytes)
        self._server = AgentServer(listen_at(host_socket(directory)), self.agent.methods())
        self._server.start()
        self.ranks = Ranks(AgentClient.of_ranks(directory, 2))
        self.host = HostAgentClient(directory, 4711)
        self.host.begin(self.ranks.describe(), TransportContext(weight_roots=roots))

    def close(self) -> None:
        for rank in self.all:
            rank.goes_on.set()
            with contextlib.suppress(OSError):  # a test has closed it
                rank.server.close()
        self._server.close()

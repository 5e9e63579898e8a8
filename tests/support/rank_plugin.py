"""Test code in the ranks of real engines, which a test reaches through a transport that brings no weights.

The transport is installed like a third party's. In an engine with a host agent, it runs there, and asks the ranks: a
plugin of the engine has added the methods to the agent of each rank.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_plane.transports.base import TransportContext
from worker.receive.rank_agents.agent_client import AgentClient
from worker.receive.rank_agents.agent_server import AgentServer, Method


def install(site: Path, backend: str, module: str, transport: str) -> None:
    """Installs a transport, and `register` of the module as a plugin, for processes with `site` in their sys.path."""
    installed = site / f"{backend}-0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {backend}\nVersion: 0\n")
    plugin = f"{backend} = {module}:register\n"
    (installed / "entry_points.txt").write_text(
        f"[rl_plane.transports]\n{backend} = {module}:{transport}\n"
        f"[vllm.general_plugins]\n{plugin}[sglang.srt.plugins]\n{plugin}"
    )


_number = 0


def rank() -> int:
    """The number of the rank that is in this process, among all ranks of its engine."""
    return _number


def add_methods(methods: Mapping[str, Method]) -> None:
    """Adds methods to the agent of a rank that starts in this process, if it is a process of an engine."""
    if multiprocessing.parent_process() is None:
        return
    really = AgentServer.of_rank.__func__  # type: ignore[attr-defined]

    def of_rank(cls: Any, directory: Path, number: int, own: Mapping[str, Method]) -> AgentServer:
        global _number
        _number = number
        server: AgentServer = really(cls, directory, number, {**own, **methods})
        return server

    AgentServer.of_rank = classmethod(of_rank)  # type: ignore[assignment, method-assign]


class RankTransport:
    """A transport that brings nothing."""

    def __init__(self, places: TransportContext) -> None:
        """Finds the ranks in the directory that the host agent was started with."""

    @property
    def ranks(self) -> AgentClient:
        """The agents of all ranks, in a host agent."""
        directory = Path(sys.argv[1])
        return AgentClient.of_ranks(directory, len(list(directory.glob("rank-*.sock"))))

    def open(self, request: Mapping[str, Any], kind: str) -> Any:
        raise NotImplementedError

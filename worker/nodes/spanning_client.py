"""Asks the agents of all hosts of an engine, from the head, as `AgentClient` asks those of one host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from rl_plane._util import tracing
from rl_plane._util.tasks import Cancelled, never
from rl_plane.errors import PlaneError
from worker.nodes.head_link import HeadLink
from worker.receive.rank_agents.agent_client import ASK_TIMEOUT_S
from worker.receive.rank_agents.ranks import Agents

Group = Literal["ranks", "host"]


class SpanningClient:
    """Calls this host's agents and the other nodes' at the same time. `ask` blocks, so it runs on a thread."""

    def __init__(self, local: Agents, link: HeadLink, group: Group) -> None:
        self._local = local
        self._link = link
        self._group: Group = group

    @property
    def count(self) -> int:
        """The number of agents."""
        return self._local.count + sum(
            len(node.ranks) if self._group == "ranks" else 1 for node in self._link.nodes
        )

    def ask(
        self,
        op: str,
        body: Mapping[str, Any] | None = None,
        *,
        cancelled: Cancelled = never,
        timeout_s: float = ASK_TIMEOUT_S,
    ) -> list[Any]:
        """Returns the answer of each agent, in the order of the nodes and of their ranks. If one fails, cancels the
        others on every host, waits until all have ended, and raises the first error."""
        elsewhere = self._link.ask(self._group, op, body or {}, timeout_s)
        try:
            with tracing.child("host", host=self._link.me.host, node_rank=0, op=op, agents=self._group):
                here = self._local.ask(
                    op, body, cancelled=lambda: cancelled() or elsewhere.error is not None, timeout_s=timeout_s
                )
        except PlaneError as error:
            first = elsewhere.error or error
            elsewhere.failed(first)
            elsewhere.end()
            raise first from error
        return [*here, *elsewhere.wait(cancelled)]

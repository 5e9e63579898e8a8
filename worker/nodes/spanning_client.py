"""Asks the agents of all hosts of an engine, from the head, as `AgentClient` asks those of one host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl_plane._util.tasks import Cancelled, never
from rl_plane.errors import PlaneError
from worker.nodes.follower import LocalAgents
from worker.nodes.head import HeadLink
from worker.receive.rank_agents.agent_client import ASK_TIMEOUT_S, CANCEL_WAIT_S, POLL_S


class SpanningClient:
    """Calls this host's agents and the other nodes' at the same time. `ask` blocks, so it runs on a thread."""

    def __init__(self, local: LocalAgents, link: HeadLink) -> None:
        self._local = local
        self._link = link
        self.numbers: Sequence[int] = sorted(
            [*local.numbers, *(rank for node in link.nodes for rank in node.ranks)]
        )

    @property
    def ranks(self) -> int:
        return len(self.numbers)

    def ask(
        self,
        op: str,
        body: Mapping[str, Any] | None = None,
        *,
        cancelled: Cancelled = never,
        timeout_s: float | None = None,
    ) -> list[Any]:
        """Returns the answer of each rank, in order. If one fails, cancels the others on every host, waits until all
        have ended, and raises the first error."""
        bound_s = ASK_TIMEOUT_S if timeout_s is None else timeout_s
        elsewhere = self._link.ask(op, body or {}, bound_s, CANCEL_WAIT_S)
        try:
            here = self._local.ask(
                op, body, cancelled=lambda: cancelled() or elsewhere.error is not None, timeout_s=bound_s
            )
        except PlaneError as error:
            first = elsewhere.error or error
            elsewhere.failed(first)
            elsewhere.wait(never, POLL_S)
            raise first from error
        elsewhere.wait(cancelled, POLL_S)
        answers = dict(zip(self._local.numbers, here, strict=True)) | elsewhere.values
        return [answers[rank] for rank in self.numbers]

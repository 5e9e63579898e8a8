"""Uses the receivers of all ranks as one, for every engine that has rank processes."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from rl_plane._util.tasks import Cancelled
from rl_plane.errors import EngineFailed, PlaneError, error_from_wire
from rl_plane.protocol.update_requests import CanaryLimits, PreparedReply, ReceiveRequest
from rl_plane.protocol.versions import TensorSpec
from worker.receive.rank_agents.agent_client import AgentClient

RECEIVE_TIMEOUT_S = 86_400.0
"""A day. The caller of a receive cancels it much earlier; this only ensures that no thread waits for ever."""

PART_MARGIN_S = 15.0
"""The time that a rank may take to report that a part's own time is over."""

CHECK_TIMEOUT_S = 600.0
"""The bound of a check of all weights, which reads each byte."""

INIT_TIMEOUT_S = 300.0
"""The op's own bound: a group of many ranks takes long to form."""


class Ranks:
    """Calls the receiver of each rank. Call `start` first. The methods block, so they run on a thread."""

    def __init__(self, client: AgentClient) -> None:
        self._client = client
        self._spec: Mapping[str, TensorSpec] = {}
        self.transports: tuple[str, ...] = ()
        self.tied: Mapping[str, str] = {}

    @property
    def count(self) -> int:
        return self._client.ranks

    def start(self) -> None:
        rows = self._client.ask("describe")
        if any(row != rows[0] for row in rows):
            raise EngineFailed("the ranks don't agree on the model's tensors")
        self._spec = {name: TensorSpec(dtype, tuple(shape)) for name, (dtype, shape) in rows[0]["tensors"].items()}
        self.transports, self.tied = tuple(rows[0]["transports"]), rows[0]["tied"]

    def weight_spec(self) -> Mapping[str, TensorSpec]:
        return self._spec

    def open(self, staging: str, request: ReceiveRequest, limits: CanaryLimits | None = None) -> None:
        try:
            self._client.ask("open", {"staging": staging, "request": request.model_dump(), "limits": limits})
        except PlaneError:
            self._forget(staging)
            raise

    def receive(self, staging: str, cancelled: Cancelled) -> PreparedReply:
        try:
            replies = self._client.ask(
                "receive", {"staging": staging}, cancelled=cancelled, timeout_s=RECEIVE_TIMEOUT_S
            )
            if any(reply != replies[0] for reply in replies):
                raise EngineFailed("the ranks received different weights")
        except PlaneError:
            self._forget(staging)
            raise
        reply: PreparedReply = replies[0]
        shown = ("digest", "tensors", "bytes")
        rows = [{"rank": rank, **{key: one[key] for key in shown}} for rank, one in enumerate(replies)]
        return {**reply, "ranks": rows}

    def receive_part(self, staging: str, part: Mapping[str, Any], cancelled: Cancelled) -> int:
        body = {"staging": staging, "part": dict(part)}
        bound_s = part["timeout_s"] + PART_MARGIN_S
        missing: list[int] = self._client.ask("receive_part", body, cancelled=cancelled, timeout_s=bound_s)
        return max(missing)

    def cached_digest(self) -> str | None:
        digests: set[str | None] = set(self._client.ask("cached_digest"))
        return digests.pop() if len(digests) == 1 else None

    def discard(self, staging: str) -> None:
        self._client.ask("discard", {"staging": staging})

    def offer(self) -> dict[str, Any] | None:
        place: dict[str, Any] | None = self._client.ask("offer")[0]
        return place

    def relay_address(self) -> tuple[str, int] | None:
        """None for several ranks: each of them receives by itself, and a plan is for one receiver."""
        if self.count > 1:
            return None
        found = self._client.ask("relay_address")[0]
        return None if found is None else (found[0], found[1])

    def _forget(self, staging: str) -> None:
        with contextlib.suppress(PlaneError):  # the first error explains the failure
            self.discard(staging)

    def init_transport(self, config: Mapping[str, Any]) -> list[dict[str, Any]]:
        return self.rows("init_transport", config, timeout_s=INIT_TIMEOUT_S)

    def destroy_transport(self, backend: str, group: str | None = None) -> list[dict[str, Any]]:
        return self.rows("destroy_transport", {"backend": backend, "group": group})

    def check(self, action: str) -> list[dict[str, Any]]:
        return self.rows("check", {"action": action}, timeout_s=CHECK_TIMEOUT_S)

    def rows(self, op: str, body: Mapping[str, Any] | None = None, **how: Any) -> list[dict[str, Any]]:
        """Returns one row for each rank, with its answer."""
        answers = self._client.ask(op, body, **how)
        return [{"rank": rank, **(answer or {})} for rank, answer in enumerate(answers)]


def check_rows(rows: list[dict[str, Any]]) -> None:
    """Raises the first `error` among the rows, with all rows: the call may have succeeded on other ranks."""
    for row in rows:
        if "error" in row:
            error = error_from_wire(row["error"])
            error.facts["rank_results"] = rows
            raise error

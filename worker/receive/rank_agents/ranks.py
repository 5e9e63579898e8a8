"""Asks all ranks of an engine at once, from the worker."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, Protocol

from rl_plane._util.tasks import Cancelled
from rl_plane.errors import EngineFailed, PlaneError, error_from_wire
from worker.receive.rank_agents.model_description import ModelDescription

CHECK_TIMEOUT_S = 600.0
"""The bound of a check of all weights, which reads each byte."""

ADAPTER_TIMEOUT_S = 600.0
"""The bound of the making of an adapter's files, which takes seconds unless a disk is slow."""


class Agents(Protocol):
    """The agents of all ranks: `AgentClient`, or several hosts' as one."""

    @property
    def count(self) -> int: ...

    def ask(
        self,
        op: str,
        body: Mapping[str, Any] | None = None,
        *,
        cancelled: Cancelled = ...,
        timeout_s: float = ...,
    ) -> list[Any]: ...


class Ranks:
    """Calls the agent of each rank. The methods block, so they run on a thread."""

    def __init__(self, client: Agents) -> None:
        self._client = client

    @property
    def count(self) -> int:
        return self._client.count

    def describe(self, first: int = 0) -> ModelDescription:
        """Returns the model, of which each rank holds a part. EngineFailed if the ranks disagree. `first`: the number
        of the first rank."""
        rows = self._client.ask("describe")
        devices = [row.pop("device") for row in rows]
        if any(row != rows[0] for row in rows):
            raise EngineFailed("the ranks don't agree on the model's tensors")
        return ModelDescription.from_wire({**rows[0], "devices": devices, "first": first})

    def stage(self, staging: str, cancelled: Cancelled) -> None:
        """Makes every rank map what the host agent has staged. EngineFailed if a rank has died meanwhile."""
        self._client.ask("stage", {"staging": staging}, cancelled=cancelled)

    def take(self, staging: str) -> None:
        """Makes every rank choose these weights for its next swap. EngineFailed if one has not mapped them."""
        self._client.ask("take", {"staging": staging})

    def stage_adapter(self, staging: str, cancelled: Cancelled) -> None:
        """Makes every rank prepare the staged adapter."""
        self._client.ask("stage_adapter", {"staging": staging}, cancelled=cancelled, timeout_s=ADAPTER_TIMEOUT_S)

    def discard(self, staging: str) -> None:
        self._client.ask("discard", {"staging": staging})

    def forget(self, staging: str) -> None:
        """Discards after an error, which explains the failure."""
        with contextlib.suppress(PlaneError):
            self.discard(staging)

    def check(self, action: str, scope: Mapping[str, Any]) -> list[dict[str, Any]]:
        """`scope`: the fields of a `CheckScope`."""
        return self.rows("check", {"action": action, "scope": scope}, timeout_s=CHECK_TIMEOUT_S)

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

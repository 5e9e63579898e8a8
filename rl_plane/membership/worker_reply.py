"""The replies of a fan-out: one for each worker. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rl_plane.errors import PlaneError, WorkerLost
from rl_plane.membership.core import Member
from rl_plane.protocol.envelope import Status


@dataclass(frozen=True, slots=True)
class WorkerReply:
    """One worker's reply. `error` is WorkerLost if the worker died or left, and DeadlineExceeded if it did not
    answer."""

    instance_id: str
    incarnation: str
    status: Status
    body: Mapping[str, Any] = field(default_factory=dict)
    error: PlaneError | None = None
    rank_results: list[dict[str, Any]] | None = None
    elapsed_s: float = 0.0
    stopped: bool = False
    """True: the coordinator told the worker to stop before it had succeeded. Its error is not why the update ended."""

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def lost(self) -> bool:
        return isinstance(self.error, WorkerLost)

    def to_wire(self) -> dict[str, Any]:
        wire: dict[str, Any] = {
            "instance_id": self.instance_id,
            "incarnation": self.incarnation,
            "status": self.status,
            **self.body,
        }
        if self.error is not None:
            wire["error"] = self.error.to_wire()
        if self.rank_results is not None:
            wire["rank_results"] = self.rank_results
        return wire


def skipped_reply(stage: Member) -> WorkerReply:
    """The reply of a stage, which is made without asking it: its registration has the reason why it skips the ops of
    engines. So a stage that hangs delays no call."""
    return WorkerReply(stage.instance_id, stage.incarnation, "skipped", {"reason": stage.pipeline_stage})

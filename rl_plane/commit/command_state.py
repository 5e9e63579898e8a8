"""The state of one command while its steps run. Pure."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rl_plane.commit.canary_rules import Settlement
from rl_plane.commit.steps import Instruction, Result, Surveyed, UpdateCommand
from rl_plane.errors import PlaneError
from rl_plane.membership.worker_reply import WorkerReply
from rl_plane.protocol.record import DecisionRecord, VersionSource
from rl_plane.protocol.update_requests import UpdateWeights

Steps = Generator[Instruction, Any, Result]
"""A whole command: yields instructions, receives their events, returns the result."""


@dataclass(slots=True)
class CommandState:
    """The facts that a coordinator has while it carries out one command."""

    command: UpdateCommand
    now: float = 0.0
    """Unix seconds at the current step, for values that people read and for the end of a pause."""
    elapsed_s: float = 0.0
    """Monotonic seconds since the command began."""
    seen: Surveyed = field(init=False, repr=False)
    """The fleet and the state bucket, as the last survey found them, with what this command has saved since."""
    settlement: Settlement | None = None
    """The canary's result for the record that is carried out now. None: there is no result yet."""

    @property
    def counted(self) -> set[str]:
        """Workers whose failure can fail an update. A worker that reports itself closed is not counted."""
        closed = {reply.instance_id for reply in self.seen.reports if reply.ok and not reply.body["admitted"]}
        return self.seen.members.keys() - closed

    @property
    def body(self) -> UpdateWeights:
        """The request of a command that begins an update."""
        assert self.command.body is not None
        return self.command.body

    def changed_source(self, base: DecisionRecord, body: UpdateWeights) -> VersionSource | None:
        """The source of the version that a delta or a partial version changes. None: the update is a full version."""
        if body.encoding == "full":
            return None
        if self.command.before is not None:
            return self.command.before
        # The tensors of a partial version may replace those of the versions since its base, which are then not needed.
        earlier = dict(base.source.chain(base.version.digest)) if body.encoding == "partial" else {}
        return earlier.get(body.base or "", base.source)


@contextmanager
def naming_workers(replies: Sequence[WorkerReply]) -> Iterator[None]:
    """Adds each worker's reply to the facts of an error."""
    try:
        yield
    except PlaneError as error:
        error.facts.setdefault("workers", [reply.to_wire() for reply in replies])
        raise

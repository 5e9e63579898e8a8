"""A rank of the trainer that only gathers, since rank 0 sends everything."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rl_plane.errors import DeadlineExceeded
from rl_plane.protocol.versions import HostTensor, TensorSpec
from rl_plane.publish.host_copy import HostCopy
from rl_plane.publish.publication import RunningPublication
from rl_plane.publish.publish_options import PublishOptions
from rl_plane.publish.ranks.following import Follower
from rl_plane.publish.ranks.meeting import MeetingPoint
from rl_plane.publish.sources.base import Taken
from rl_plane.transports.packing import Tensor
from rl_plane.transports.registry import make_sender


class MeetingAt(MeetingPoint):
    """Rank 1 of two finds this address."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.rank, self.ranks = 1, 2
        self._address = address

    def find(self, bound_s: float) -> tuple[tuple[str, int], str]:
        return self._address, "secret"


def test_a_rank_that_can_not_reach_rank_0_gathers_and_ends_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gathered = []

    def tensors() -> Iterator[tuple[str, Tensor]]:
        gathered.append("all")
        yield from ()

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # it does not listen
        meeting = MeetingAt(silent.getsockname())
        follower = Follower(meeting, PublishOptions(), make_sender, HostCopy("xxh3"))
        publication = RunningPublication("step_1", None)
        following = follower.begin(publication, Taken([], tensors()))
        following.gather()
        assert gathered == ["all"]
        assert publication.read
        following.end()
        follower.close()
    assert publication.result() == {}
    (warning,) = caplog.messages
    assert "does not learn whether step_1 is committed: rank 1 can't reach rank 0" in warning
    assert "set MASTER_ADDR" in warning


class SilentLink:
    """The link to a rank 0 that asks for the tensors, and then stands still."""

    interrupt: object = None

    def __init__(self) -> None:
        command = {"group": "g", "shared": True, "into": "copy", "compare": False}
        self._commands: list[Any] = [{"version": 1, "op": "read", "call": 1, "body": command}]

    def reply(self, version: int, call: Any, value: object = None, **facts: object) -> None:
        """Rank 0 does not hear it."""

    def check(self) -> None:
        """The link is there."""

    def next_command(self, version: int, begins_within_s: float | None = None) -> Any:
        if self._commands:
            return self._commands.pop()
        raise DeadlineExceeded("rank 0 of the trainer hangs")


class LinkedFollower(Follower):
    """A follower of a rank 0 that stands still."""

    link: Any = SilentLink()

    def gather_group(self, name: str, check: Callable[[float, str], None]) -> Any:
        return None


def test_a_rank_that_does_not_learn_the_outcome_compares_with_no_version() -> None:
    """It does not know which version the workers have, so its next version goes in full."""
    spec = TensorSpec("BF16", (8,))
    tensors = {name: HostTensor(spec, memoryview(bytearray(16))) for name in "ab"}
    taken = Taken(
        [(name, spec) for name in tensors],
        iter(()),
        shared=frozenset(tensors),
        owned=lambda owners, gather: ((name, tensors[name]) for name in tensors if owners[name] == 1),
    )
    copy = HostCopy("xxh3")
    follower = LinkedFollower(MeetingAt(("127.0.0.1", 1)), PublishOptions(), make_sender, copy)
    publication = RunningPublication("step_1", None)
    publication.number = 1
    following = follower.begin(publication, taken)
    following.read()
    assert copy.digest is not None
    following.end()
    with pytest.raises(DeadlineExceeded):
        publication.result()
    assert copy.digest is None

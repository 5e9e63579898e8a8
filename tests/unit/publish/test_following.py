"""A rank of the trainer that only gathers, since rank 0 sends everything."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

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

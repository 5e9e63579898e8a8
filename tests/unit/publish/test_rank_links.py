"""The connections between rank 0 of a trainer and its other ranks."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

import psutil
import pytest

from rl_plane._util.framing import send_frame
from rl_plane.errors import DeadlineExceeded, Unavailable
from rl_plane.publish.publish_options import PUBLISH_LIMITS
from rl_plane.publish.ranks.link import BEGUN, FollowingRankLink, LeadLink, proof_of
from tests.support.failed_accept import fail_an_accept

COMMAND = {"version": 1, "call": 1, "op": "end", "body": {"error": None}}
BOUND_S = 20.0


class Looking(FollowingRankLink):
    """Calls `on_look` at each look at rank 0, while it waits."""

    on_look: Callable[[], None] = staticmethod(lambda: None)

    def check(self) -> None:
        super().check()
        self.on_look()


def comes(stack: ExitStack, lead: LeadLink, number: int) -> FollowingRankLink:
    """Connects a rank, which gets the command that waits for it."""
    lead.tell(number, COMMAND)
    rank = FollowingRankLink(lead.address, lead.secret, number, PUBLISH_LIMITS)
    stack.enter_context(closing(rank))
    assert rank.next_command(1) == COMMAND
    return rank


def ended(connection: socket.socket) -> bool:
    connection.settimeout(BOUND_S)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def listens(lead: LeadLink) -> bool:
    """Whether rank 0 listens. A connection would not tell: another process may have the port by now."""
    sockets = psutil.Process().net_connections("tcp")
    return any(one.laddr.port == lead.address[1] and one.status == psutil.CONN_LISTEN for one in sockets)


def test_a_rank_that_connects_after_the_outcome_still_learns_it() -> None:
    """Rank 0 may fail before another rank has come to `publish`. The other rank connects for its part of it."""
    with ExitStack() as stack:
        lead = stack.enter_context(closing(LeadLink("127.0.0.1", 2, PUBLISH_LIMITS)))
        end = {"version": 1, "call": 1, "op": "end", "body": {"error": None}}
        lead.tell(1, end)
        rank = FollowingRankLink(lead.address, lead.secret, 1, PUBLISH_LIMITS)
        stack.enter_context(closing(rank))
        assert rank.next_command(1) == end


def test_a_rank_does_not_wait_for_rank_0_without_end() -> None:
    """Rank 0 lives, and does not come to `publish`."""
    with ExitStack() as stack:
        lead = stack.enter_context(closing(LeadLink("127.0.0.1", 2, PUBLISH_LIMITS)))
        rank = comes(stack, lead, 1)
        with pytest.raises(DeadlineExceeded, match="rank 0 of the trainer has not come to publish"):
            rank.next_command(2, begins_within_s=0.0)


def test_a_rank_waits_for_its_command_once_rank_0_has_come() -> None:
    """Rank 0 may still wait for other ranks, or for workers. Its own bounds hold."""
    with ExitStack() as stack:
        lead = stack.enter_context(closing(LeadLink("127.0.0.1", 2, PUBLISH_LIMITS)))
        rank = Looking(lead.address, lead.secret, 1, PUBLISH_LIMITS)
        stack.enter_context(closing(rank))
        lead.tell(1, {**COMMAND, "op": BEGUN})
        lead.tell(1, COMMAND)
        assert rank.next_command(1, begins_within_s=BOUND_S) == COMMAND
        again = {**COMMAND, "op": "read"}
        rank.on_look = lambda: lead.tell(1, again)
        assert rank.next_command(1, begins_within_s=0.0) == again


def test_a_rank_that_rank_0_has_left_behind_says_so() -> None:
    with ExitStack() as stack:
        lead = stack.enter_context(closing(LeadLink("127.0.0.1", 2, PUBLISH_LIMITS)))
        rank = comes(stack, lead, 1)
        later = {**COMMAND, "version": 3, "op": "read"}
        lead.tell(1, later)
        with pytest.raises(Unavailable, match="publishes its version 3, and rank 1 its version 2"):
            rank.next_command(2)
        assert rank.next_command(3) == later


@pytest.mark.parametrize(
    "hello",
    [
        {"rank": 1, "proof": "é"},
        {"rank": 1, "proof": 5},
        {"rank": 1},
        {"rank": True, "proof": proof_of("", True)},
        {"rank": 2, "proof": proof_of("", 2)},
        {"rank": 1, "proof": "x" * 2000},
        [1],
        {1: 2},
    ],
)
def test_a_rank_still_comes_after_a_wrong_hello_of_a_stranger(hello: Any) -> None:
    with ExitStack() as stack:
        lead = stack.enter_context(closing(LeadLink("127.0.0.1", 2, PUBLISH_LIMITS)))
        stranger = stack.enter_context(socket.create_connection(lead.address))
        send_frame(stranger, hello)
        assert ended(stranger)
        comes(stack, lead, 1)


def test_silent_strangers_delay_no_rank_and_are_bounded() -> None:
    with ExitStack() as stack:
        lead = stack.enter_context(closing(LeadLink("127.0.0.1", 3, PUBLISH_LIMITS, hello_s=600, strangers=4)))
        silent = [stack.enter_context(socket.create_connection(lead.address)) for _ in range(9)]
        assert ended(silent[0]), "the oldest makes room"
        comes(stack, lead, 1)
        comes(stack, lead, 2)
        for each in silent:
            assert ended(each), "rank 0 does not listen after all ranks have come"
        assert not listens(lead)


def test_a_rank_still_comes_after_rank_0_had_no_descriptors_left(caplog: pytest.LogCaptureFixture) -> None:
    with ExitStack() as stack:
        lead = stack.enter_context(closing(LeadLink("127.0.0.1", 2, PUBLISH_LIMITS)))
        fail_an_accept(socket.AF_INET, lead.address, caplog)
        comes(stack, lead, 1)


def test_many_ranks_come_at_once() -> None:
    with ExitStack() as stack:
        lead = stack.enter_context(closing(LeadLink("127.0.0.1", 60, PUBLISH_LIMITS)))
        threads = [threading.Thread(target=comes, args=(stack, lead, rank)) for rank in range(1, 60)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        lead.check()
        assert not listens(lead)

"""The connections between rank 0 of a trainer and its other ranks."""

from __future__ import annotations

from contextlib import ExitStack, closing

from rl_plane.publish.publish_options import PUBLISH_LIMITS
from rl_plane.publish.ranks.link import FollowingRankLink, LeadLink


def test_a_rank_that_connects_after_the_outcome_still_learns_it() -> None:
    """Rank 0 may fail before another rank has come to `publish`. The other rank connects for its part of it."""
    with ExitStack() as stack:
        lead = stack.enter_context(closing(LeadLink("127.0.0.1", 2, PUBLISH_LIMITS)))
        end = {"version": 1, "call": 1, "op": "end", "body": {"error": None}}
        lead.tell(1, end)
        rank = FollowingRankLink(lead.address, lead.secret, 1, PUBLISH_LIMITS)
        stack.enter_context(closing(rank))
        assert rank.next_command(1) == end

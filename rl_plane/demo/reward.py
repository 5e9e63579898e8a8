"""What the demo's policy is paid for. One glance must be enough to see whether it learns."""

from __future__ import annotations

from collections.abc import Sequence

REWARD_TEXT = "the share of a completion's token ids that are even"
REWARD_RANGE = 1.0
"""From 0, all odd, to 1, all even. A model that has not learnt anything gets about a half."""


def reward(token_ids: Sequence[int]) -> float:
    return sum(token % 2 == 0 for token in token_ids) / len(token_ids)

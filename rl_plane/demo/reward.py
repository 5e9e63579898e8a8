"""The reward of the demo's policy. It is simple enough to see at a glance whether the policy learns."""

from __future__ import annotations

from collections.abc import Sequence

REWARD_TEXT = "the share of a completion's token ids that are even"
REWARD_RANGE = 1.0
"""The reward goes from 0 (all odd) to 1 (all even). An untrained model gets about a half."""


def reward(token_ids: Sequence[int]) -> float:
    return sum(token % 2 == 0 for token in token_ids) / len(token_ids)

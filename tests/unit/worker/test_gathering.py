"""Tests the times at which held-back tokens are handed on."""

from __future__ import annotations

import pytest

from worker.runtime.gathering import next_turn


@pytest.mark.parametrize(("now", "turn"), [(0.0, 0.5), (0.1, 0.5), (0.5, 1.0), (1234.6, 1235.0)])
def test_all_requests_hand_their_tokens_on_at_the_same_times(now: float, turn: float) -> None:
    assert next_turn(now, 0.5) == turn

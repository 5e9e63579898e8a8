"""Warnings that a stranger can cause are bounded, and the omitted warnings are counted."""

from __future__ import annotations

import logging

import pytest

from rl_plane._util.limited_log import MAX_WARNINGS, PERIOD_S, LimitedLog


def test_a_period_has_so_many_warnings_and_the_next_says_how_many_were_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 0.0
    limited = LimitedLog(logging.getLogger("a log of this test"), lambda: now)
    for number in range(MAX_WARNINGS + 5):
        limited.warning("number %d", number)
    assert caplog.messages == [f"number {number}" for number in range(MAX_WARNINGS)]
    now = PERIOD_S
    limited.warning("later")
    assert caplog.messages[MAX_WARNINGS:] == ["5 more warnings like the one before were left out", "later"]

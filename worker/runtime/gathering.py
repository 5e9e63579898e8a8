"""Holds the tokens of a reply that is sent at its end back for a moment, to handle many of them at once."""

from __future__ import annotations


def next_turn(now: float, gather_s: float) -> float:
    """The time after `now` at which requests hand their tokens on. All requests have the same times, so one wake-up and
    one message do for the tokens of all."""
    return (now // gather_s + 1) * gather_s

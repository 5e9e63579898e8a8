"""Chooses the times at which a request with `gather_s` hands its tokens on. Its client reads the reply at its end, so
the worker holds the tokens after the first one back for a moment, and sends many at once."""

from __future__ import annotations


def next_turn(now: float, gather_s: float) -> float:
    """Returns the first multiple of `gather_s` after `now`. Requests with the same `gather_s` have the same times: the
    loop wakes up once for all of them, and sends their tokens to a frontend in one message."""
    return (now // gather_s + 1) * gather_s

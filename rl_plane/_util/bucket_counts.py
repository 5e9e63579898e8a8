"""Counts measured values in buckets, as a histogram of Prometheus shows them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class BucketCounts:
    """The values of one series. One thread writes; `observe` costs about as much as a counter, so that it may run for
    each message of tokens."""

    __slots__ = ("_counts", "bounds", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: the largest value of each bucket, rising. A last bucket takes all larger values."""
        self.bounds = tuple(bounds)
        self.total = 0.0
        """The sum of the values."""
        self._counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        """Counts a value `times` times."""
        self._counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def cumulative(self) -> list[int]:
        """For each bucket, the number of values in it and in all buckets before it. The last is the number of all
        values."""
        found, so_far = [], 0
        for count in self._counts:
            so_far += count
            found.append(so_far)
        return found

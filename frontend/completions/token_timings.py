"""Counts what the readers of completions notice: when tokens come, and how old their weights are."""

from __future__ import annotations

from rl_plane._util.bucket_counts import BucketCounts

FIRST_TOKEN_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
GAP_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
"""Buckets from a small model to a request that is frozen while an update runs."""
LAGS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32)
"""Buckets of versions. A trainer that tolerates more than 32 is rare."""


class TokenTimings:
    """The counts of one frontend. The cost of a message of tokens is two counters."""

    def __init__(self) -> None:
        self.tokens = 0
        """Tokens that came from workers."""
        self.first_token = BucketCounts(FIRST_TOKEN_SECONDS)
        self.gaps = BucketCounts(GAP_SECONDS)
        self.lags = BucketCounts(LAGS)

    def on_first(self, seconds: float, tokens: int) -> None:
        """The first `tokens` of a choice have come, so long after the call."""
        self.first_token.observe(seconds)
        self.tokens += tokens

    def on_more(self, seconds: float, tokens: int) -> None:
        """Further `tokens` of a choice have come together, so long after those before: each counts an equal share."""
        self.gaps.observe(seconds / tokens, tokens)
        self.tokens += tokens

    def on_end(self, lag: int) -> None:
        """A choice has ended whose oldest token is `lag` versions behind the committed one."""
        self.lags.observe(lag)

"""What the numeric canaries of a fleet's updates have shown, for `/metrics`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from rl_plane.commit.canary_rules import Reason


class CanaryCounts:
    """Counts the updates that this frontend has seen end, whoever coordinated them."""

    def __init__(self) -> None:
        self.difference: float | None = None
        """The largest difference of a log probability, in the last update with a canary. None: nothing was compared."""
        self.mismatch_kl: float | None = None
        self.failures: dict[str, int] = dict.fromkeys(get_args(Reason), 0)
        """Reason → workers that failed for it."""

    def take(self, canary: Mapping[str, Any]) -> None:
        """`canary`: an update's, as `rl_plane.commit.canary_rules.Settlement.summary` makes it."""
        self.difference, self.mismatch_kl = canary.get("difference"), canary.get("mismatch_kl")
        reasons = canary.get("reasons") or {}
        for reason in self.failures:
            self.failures[reason] += reasons.get(reason, 0)

"""Bounds the warnings about messages and entries that a stranger can send as fast as NATS carries them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

MAX_WARNINGS = 10
"""Warnings of one kind in one period. They suffice to find the sender."""
PERIOD_S = 60.0
"""At most 10 lines a minute are 2 MB a day."""


class LimitedLog:
    """Logs warnings of one kind: at most MAX_WARNINGS in PERIOD_S seconds. The first warning of the next period says
    how many were left out."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._began_at = clock()
        self._logged = 0
        self._left_out = 0

    def warning(self, words: str, *values: object) -> None:
        if self._clock() - self._began_at >= PERIOD_S:
            if self._left_out:
                self._log.warning("%d more warnings like the one before were left out", self._left_out)
            self._began_at, self._logged, self._left_out = self._clock(), 0, 0
        if self._logged >= MAX_WARNINGS:
            self._left_out += 1
            return
        self._logged += 1
        self._log.warning(words, *values)

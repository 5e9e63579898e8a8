"""When has an engine hung for good? Pure; time is passed in."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

DEFAULT_LIVENESS_TIMEOUT_S = 5.0
"""A round trip waits for one step; the slowest step that we know takes less than this."""
DEFAULT_ENGINE_HANG_S = 60.0
"""The slowest step that we know takes seconds; a healing restart takes less than a trainer's patience."""
MAX_BLOCKED_S = 1800.0
"""A load of a large checkpoint, say, may block the engine so long before that is a hang too."""


@dataclass(slots=True)
class EngineWatch:
    """Told of each round trip that was tried, and of what blocks the engine: silence in that is counted apart."""

    hang_s: float = DEFAULT_ENGINE_HANG_S
    _free_s: float = 0.0
    _blocked_s: float = 0.0
    _blocks: bool = False
    """Something that blocks is under way."""
    _cut: bool = False
    """Something was given up by its caller, and may go on in the engine until that answers."""
    _blocked: bool = False
    """Something was, since the last round trip."""

    @contextmanager
    def blocking(self) -> Iterator[None]:
        """Around what a sound engine may be silent in: one at a time. One that was silent before has no such excuse:
        whatever waits for it now waits for what may be a hang."""
        if self._free_s or self._blocked_s:
            yield
            return
        self._blocks = self._blocked = True
        try:
            yield
        except (asyncio.CancelledError, TimeoutError):
            self._cut = True
            raise
        finally:
            self._blocks = False

    def answered(self) -> None:
        self._free_s = self._blocked_s = 0.0
        self._blocked, self._cut = self._blocks, False

    def silent(self, seconds: float) -> bool:
        """So long nothing came back; whether that makes it a hang."""
        if self._blocked or self._cut:
            self._blocked_s += seconds
        else:
            self._free_s += seconds
        self._blocked = self._blocks or self._cut
        return self._free_s >= self.hang_s or self._blocked_s >= MAX_BLOCKED_S

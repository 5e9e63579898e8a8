"""When has an engine hung for good? Pure; time is passed in."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_ENGINE_HANG_S = 60.0
"""The slowest step that we know takes seconds; a healing restart takes less than a trainer's patience."""
MAX_BLOCKED_S = 1800.0
"""An op, such as a load of a large checkpoint, may block the engine so long before that is a hang too."""


@dataclass(slots=True)
class EngineWatch:
    """Told of each round trip that was tried. Silence in an op that blocks the engine is counted apart."""

    hang_s: float = DEFAULT_ENGINE_HANG_S
    _free_s: float = 0.0
    _blocked_s: float = 0.0

    def answered(self) -> None:
        self._free_s = self._blocked_s = 0.0

    def silent(self, seconds: float, blocked: bool) -> bool:
        """So long nothing came back; whether that makes it a hang. `blocked`: an op was under way meanwhile."""
        if blocked:
            self._blocked_s += seconds
        else:
            self._free_s += seconds
        return self._free_s >= self.hang_s or self._blocked_s >= MAX_BLOCKED_S

"""Decides when an engine hangs. Pure: the caller passes the time in."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

DEFAULT_LIVENESS_TIMEOUT_S = 5.0
"""A round trip waits for one step of the engine. The slowest step that we know takes less than this."""
DEFAULT_ENGINE_HANG_S = 60.0
"""The slowest step that we know takes seconds, and a restart heals the worker before a trainer gives up."""
MAX_BLOCKED_S = 1800.0
"""The time that an op may block the engine before that is a hang too. Loading a large checkpoint takes minutes."""


@dataclass(slots=True)
class EngineWatch:
    """Counts the engine's silence, apart for times in which an op blocks it. The caller reports each round trip."""

    hang_s: float = DEFAULT_ENGINE_HANG_S
    _free_s: float = 0.0
    _blocked_s: float = 0.0
    _blocks: bool = False
    """An op that blocks the engine is under way."""
    _cut: bool = False
    """The caller gave such an op up, and it may continue in the engine until the engine answers."""
    _blocked: bool = False
    """Such an op was under way since the last round trip."""

    @contextmanager
    def blocking(self) -> Iterator[None]:
        """Marks an op during which a sound engine may be silent. Only one at a time.

        If the engine was silent before, the mark has no effect: the op may wait for an engine that hangs."""
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
        """Notes that the engine has answered."""
        self._free_s = self._blocked_s = 0.0
        self._blocked, self._cut = self._blocks, False

    def silent(self, seconds: float) -> bool:
        """Notes so many seconds without an answer. Returns whether the engine hangs."""
        if self._blocked or self._cut:
            self._blocked_s += seconds
        else:
            self._free_s += seconds
        self._blocked = self._blocks or self._cut
        return self._free_s >= self.hang_s or self._blocked_s >= MAX_BLOCKED_S

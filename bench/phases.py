"""Records what the coordinators of this process do, and when."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rl_plane.commit.coordinator import Coordinator
from rl_plane.commit.steps import Event, Instruction, Phase


@dataclass(frozen=True, slots=True)
class Seen:
    """One instruction that was carried out. `perf_counter` seconds."""

    phase: Phase
    start: float
    end: float


@contextmanager
def phases_seen() -> Iterator[list[Seen]]:
    """Yields a list that grows while updates are coordinated."""
    seen: list[Seen] = []
    carry_out = Coordinator.carry_out

    async def noted(self: Coordinator, instruction: Instruction) -> Event:
        start = time.perf_counter()
        try:
            return await carry_out(self, instruction)
        finally:
            seen.append(Seen(instruction.phase, start, time.perf_counter()))

    Coordinator.carry_out = noted  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        Coordinator.carry_out = carry_out  # type: ignore[method-assign]

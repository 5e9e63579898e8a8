"""The facts that a worker's metrics show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """One worker at the time of one scrape."""

    engine: str
    engine_version: str
    closed: Mapping[str, int]
    """Each reason → whether the worker is closed for it."""
    sequence: int | None
    """The sequence of the committed state that the engine holds. None: it holds none."""
    pause_left_s: float | None
    """Seconds until a paused engine resumes by itself. None: it is not paused."""
    connected: bool
    requests: Mapping[str, int]
    """`running` and `waiting` → the engine's requests."""
    tokens: Mapping[str, int]
    """`running` → tokens of the running requests. `waiting` → prompt tokens that the engine has still to compute."""
    tokens_made: int
    received_bytes: Mapping[str, int]
    """Transport → bytes."""
    staged_bytes: int
    kept_bytes: int
    ops: Mapping[tuple[str, ...], int]
    """Op and outcome → the number of answers."""

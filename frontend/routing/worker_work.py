"""The work of each engine, as its worker reports it, for metrics alone: no request is routed by it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from rl_plane.membership.core import Member


@dataclass(frozen=True, slots=True)
class WorkerWork:
    """The counts of one worker's engine."""

    prompt_tokens: int = 0
    """Prompt tokens of the requests that have begun since the worker's start."""
    tokens_made: int = 0
    """Tokens that the engine has made since the worker's start."""
    running: int = 0
    """Requests in the engine's batch."""
    waiting: int = 0
    """Requests that wait for a place in the engine's batch. From an engine that does not tell them: requests without a
    token yet."""
    kv_usage: float | None = None
    """None here and below: the engine does not report it."""
    preemptions: int | None = None
    tokens_per_s: float | None = None

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> WorkerWork:
        """Reads a status message or a `state` reply."""
        load = wire.get("engine_load") or {}
        return cls(
            int(wire.get("prompt_tokens", 0)),
            int(wire.get("tokens_made", 0)),
            int(load.get("running", wire["running"])),
            int(load.get("waiting", wire["waiting"])),
            _number(load, "kv_usage", float),
            _number(load, "preemptions", int),
            _number(load, "tokens_per_s", float),
        )


NO_WORK = WorkerWork()


class Engine(NamedTuple):
    """A member with an engine, and the engine's counts."""

    member: Member
    work: WorkerWork


def _number(load: Mapping[str, Any], name: str, kind: type[Any]) -> Any:
    value = load.get(name)
    return None if value is None else kind(value)

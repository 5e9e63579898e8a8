"""The work of each engine, as its worker reports it, for metrics alone: no request is routed by it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from frontend.routing.router import Load
from rl_plane.membership.core import Member


@dataclass(frozen=True, slots=True)
class WorkerWork:
    """The counts of one worker's engine."""

    prompt_tokens: int = 0
    """Prompt tokens of the requests that have begun since the worker's start."""
    tokens_made: int = 0
    """Tokens that the engine has made since the worker's start."""
    running: int | None = None
    """The engine's own count. None here and below: the engine does not report it."""
    waiting: int | None = None
    kv_usage: float | None = None
    preemptions: int | None = None
    tokens_per_s: float | None = None

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> WorkerWork:
        """Reads a status message or a `state` reply."""
        load = wire.get("engine_load") or {}
        return cls(
            int(wire.get("prompt_tokens", 0)),
            int(wire.get("tokens_made", 0)),
            _number(load, "running", int),
            _number(load, "waiting", int),
            _number(load, "kv_usage", float),
            _number(load, "preemptions", int),
            _number(load, "tokens_per_s", float),
        )


NO_WORK = WorkerWork()


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """One engine at the time of one scrape."""

    instance_id: str
    model: str
    running: int
    waiting: int
    """Requests that wait for a place in the engine's batch. From an engine that does not tell them: requests without a
    token yet."""
    kv_tokens: int | None
    """The tokens that the KV cache has room for."""
    work: WorkerWork

    @classmethod
    def of(cls, member: Member, load: Load, work: WorkerWork) -> EngineFacts:
        kv_tokens = member.info.get("kv_tokens")
        return cls(
            member.instance_id,
            str(member.info.get("model", "")),
            load.running if work.running is None else work.running,
            load.waiting if work.waiting is None else work.waiting,
            kv_tokens if isinstance(kv_tokens, int) else None,
            work,
        )


def _number(load: Mapping[str, Any], name: str, kind: type[Any]) -> Any:
    value = load.get(name)
    return None if value is None else kind(value)

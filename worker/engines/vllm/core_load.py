"""The load of vLLM, as its scheduler counts it. vLLM's own statistics are off, because they cost time in each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl_plane.protocol.worker_ops import EngineLoadReply

METHOD = "rl_plane_load"
"""The engine core's method that the adapter calls."""

COUNT = "rl_plane_preemptions"
"""The attribute of a scheduler that counts the requests that lost their KV to others."""


def load_of_core(core: Any) -> dict[str, Any]:
    """A method of vLLM's EngineCore. It runs between two steps."""
    running, waiting = core.scheduler.get_request_counts()
    return {
        "running": running,
        "waiting": waiting,
        "kv_usage": core.scheduler.get_kv_cache_usage(),
        "preemptions": getattr(core.scheduler, COUNT, 0),
    }


def total_load(cores: Sequence[Mapping[str, Any]]) -> EngineLoadReply:
    """The load of an engine, from the loads of its replicas."""
    return EngineLoadReply(
        running=sum(core["running"] for core in cores),
        waiting=sum(core["waiting"] for core in cores),
        kv_usage=sum(core["kv_usage"] for core in cores) / len(cores),
        preemptions=sum(core["preemptions"] for core in cores),
        tokens_per_s=None,
    )


def counting(preempt: Any) -> Any:
    """Wraps the scheduler's method that takes a request's KV away. A flush of the cache, as at each update, does not
    count: it says nothing of the room in the cache."""

    def preempt_and_count(scheduler: Any, request: Any, timestamp: float, drop_stale_output: bool = False) -> Any:
        if not drop_stale_output:
            _count(scheduler)
        return preempt(scheduler, request, timestamp, drop_stale_output)

    return preempt_and_count


def _count(scheduler: Any) -> None:
    setattr(scheduler, COUNT, getattr(scheduler, COUNT, 0) + 1)

"""What vLLM loads in each of its processes (entry point `vllm.general_plugins`): little, and only for our engines."""

from __future__ import annotations

import logging
import os
import signal
from typing import Any

log = logging.getLogger("worker.vllm")

MARK = "RL_PLANE_VLLM"
"""In the environment of the processes that the adapter starts: the worker's process id."""


def register() -> None:
    worker = os.environ.get(MARK)
    if worker is None or worker == str(os.getpid()):
        return
    from worker.engines.vllm.draining import drain_preempted
    from worker.engines.vllm.dtypes import watch_loads
    from worker.receive.rank_agents.agent_server import belong_to_worker

    belong_to_worker()
    _wake_without_a_step()
    drain_preempted()
    _score_between_steps()
    _leave_no_nan_in_blocks()
    _end_as_a_rank_does()
    take_temperatures_as_they_are()
    _correct_cpu_build()
    watch_loads()


def lora_request(number: int, path: str, anew: bool = False) -> Any:
    """`anew`: in the place of the one that has this number."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"adapter-{number}", number, path, load_inplace=anew)


def _correct_cpu_build() -> None:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from worker.engines.vllm.patches.cpu_build import correct_experts, poll_politely

        poll_politely()
        correct_experts()


def _wake_without_a_step() -> None:
    """When all memory is back, vLLM's scheduler would go on by itself. Here that is for `resume` to say."""
    from vllm.v1.engine.core import EngineCore

    def wake_up(core: Any, tags: list[str] | None = None) -> bool:
        core.model_executor.wake_up(tags)
        return not core.model_executor.is_sleeping

    EngineCore.wake_up = wake_up


def _score_between_steps() -> None:
    from vllm.v1.engine.core import EngineCore

    from worker.engines.vllm.scorer import METHOD, score_in_core

    setattr(EngineCore, METHOD, score_in_core)


def _leave_no_nan_in_blocks() -> None:
    """A block of the KV cache that goes to another request holds what was there before, until it is full. Kernels give
    that the weight zero, and zero times NaN is NaN: weights that diverged, an adapter's too, would spoil what good ones
    make later. vLLM zeroes a block before its use, but for some kinds of models only."""
    from vllm.v1.kv_cache_interface import KVCacheConfig

    KVCacheConfig.needs_kv_cache_zeroing = property(lambda config: True)


def _end_as_a_rank_does() -> None:
    """A rank that is killed while it loads makes vLLM's scheduler end as one that can't load does: with 1. The worker,
    which is worth starting again after the first only, can't see the rank's own exit code."""
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    from worker.engines.common.process_watch import SHOWS_S, killed

    really = MultiprocExecutor._ensure_worker_termination

    def end(ranks: list[Any]) -> None:
        if (died := killed(ranks, SHOWS_S)) is not None:
            log.error("vLLM's process %s was killed", died.pid)
            os.kill(os.getpid(), signal.SIGKILL)
        really(ranks)

    MultiprocExecutor._ensure_worker_termination = staticmethod(end)


def take_temperatures_as_they_are() -> None:
    """vLLM raises those below 0.01 to that, where a request is made and again where it is read."""
    from vllm import sampling_params

    sampling_params._MAX_TEMP = 0.0

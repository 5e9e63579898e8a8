"""The plugin that vLLM loads in each of its processes (entry point `vllm.general_plugins`). It acts only for our
engines."""

from __future__ import annotations

import logging
import os
import signal
from typing import Any

from worker.engines.vllm.here import MARK, Here

log = logging.getLogger("worker.engines.vllm.plugin")


def register() -> None:
    if MARK not in os.environ or Here.read().worker == os.getpid():
        return
    from worker.engines.vllm.draining import drain_preempted
    from worker.engines.vllm.dtypes import watch_loads
    from worker.engines.vllm.kept_kv import salt_requests
    from worker.engines.vllm.lockstep import stop_together
    from worker.engines.vllm.text_form import bound_grammars, continue_grammars
    from worker.receive.rank_agents.agent_server import belong_to_worker

    belong_to_worker()
    _wake_without_a_step()
    drain_preempted()
    stop_together()
    salt_requests()
    continue_grammars()
    bound_grammars()
    _score_between_steps()
    _report_load()
    _leave_no_nan_in_blocks()
    _end_as_a_rank_does()
    _delete_shared_names()
    take_temperatures_as_they_are()
    _correct_cpu_build()
    watch_loads()


def _correct_cpu_build() -> None:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from worker.engines.vllm.patches.cpu_build import correct_experts, delete_names_of_ranks, poll_politely

        poll_politely()
        delete_names_of_ranks()
        correct_experts()


def _wake_without_a_step() -> None:
    """Stops vLLM's scheduler from continuing by itself when all memory is back: here `resume` does that."""
    from vllm.v1.engine.core import EngineCore

    def wake_up(core: Any, tags: list[str] | None = None) -> bool:
        core.model_executor.wake_up(tags)
        return not core.model_executor.is_sleeping

    EngineCore.wake_up = wake_up


def _score_between_steps() -> None:
    from vllm.v1.engine.core import EngineCore

    from worker.engines.vllm.scorer import METHOD, score_in_core

    setattr(EngineCore, METHOD, score_in_core)


def _report_load() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    from worker.engines.vllm.core_load import METHOD, counting, load_of_core

    setattr(EngineCore, METHOD, load_of_core)
    Scheduler._preempt_request = counting(Scheduler._preempt_request)


def _leave_no_nan_in_blocks() -> None:
    """Makes vLLM zero a block of the KV cache before another request uses it.

    A block holds old data until it is full. Kernels give that data the weight zero, and zero times NaN is NaN: diverged
    weights, an adapter's too, would spoil the tokens of good ones. vLLM zeroes blocks for some kinds of models only.
    """
    from vllm.v1.kv_cache_interface import KVCacheConfig

    KVCacheConfig.needs_kv_cache_zeroing = property(lambda config: True)


def _end_as_a_rank_does() -> None:
    """Makes vLLM's scheduler end by SIGKILL if a rank is killed while it loads.

    vLLM's own exit code is 1, as for a rank that can't load. The worker is worth restarting after a kill only, and
    can't see the rank's own exit code.
    """
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    from worker.engines.common.process_watch import SHOWS_S, killed

    really = MultiprocExecutor._ensure_worker_termination

    def end(ranks: list[Any]) -> None:
        if (died := killed(ranks, SHOWS_S)) is not None:
            log.error("vLLM's process %s was killed", died.pid)
            os.kill(os.getpid(), signal.SIGKILL)
        really(ranks)

    MultiprocExecutor._ensure_worker_termination = staticmethod(end)


def _delete_shared_names() -> None:
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    from worker.engines.common.shared_names import delete_name_of_ring, make_no_semaphore

    make_no_semaphore()
    really = MessageQueue.wait_until_ready
    MessageQueue.wait_until_ready = lambda queue: delete_name_of_ring(really, queue)


def take_temperatures_as_they_are() -> None:
    """Stops vLLM from raising temperatures below 0.01 to 0.01. It does so where a request is made, and where it is
    read."""
    from vllm import sampling_params

    sampling_params._MAX_TEMP = 0.0

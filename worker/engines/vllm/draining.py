"""Makes vLLM's pause in mode `wait` wait for preempted requests, too. GPUs need it as well.

A running request returns to the queue when the cache is flushed under it, or has no room for it. While vLLM waits for
running requests to end, it starts no request of the queue, and takes all requests in the queue for new ones. A
preempted request would neither end nor be waited for.
"""

from __future__ import annotations

from typing import Any


def drain_preempted() -> None:
    """Call it in the process of the scheduler, before vLLM makes one."""
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import RequestStatus

    schedule, count = Scheduler.schedule, Scheduler.get_num_unfinished_requests

    def is_new(request: Any) -> bool:
        return bool(request.status != RequestStatus.PREEMPTED)

    def preempted(scheduler: Any) -> int:
        """Returns the number of preempted requests in the queue, while a pause waits for them."""
        if scheduler.pause_state != PauseState.PAUSED_NEW:
            return 0
        return sum(not is_new(request) for request in scheduler.waiting)

    def count_all(scheduler: Any) -> int:
        return int(count(scheduler)) + preempted(scheduler)

    def schedule_all(scheduler: Any, *arguments: Any, **more: Any) -> Any:
        """Schedules as if the engine ran and no new request had come."""
        if not preempted(scheduler):
            return schedule(scheduler, *arguments, **more)
        queue = scheduler.waiting
        new = [request for request in queue if is_new(request)]
        queue.remove_requests(new)
        scheduler.set_pause_state(PauseState.UNPAUSED)
        try:
            return schedule(scheduler, *arguments, **more)
        finally:
            scheduler.set_pause_state(PauseState.PAUSED_NEW)
            for request in new:
                queue.add_request(request)

    Scheduler.schedule, Scheduler.get_num_unfinished_requests = schedule_all, count_all

"""Our part in an engine of several replicas, which SGLang's data parallel controller starts and sends requests to."""

from __future__ import annotations

import logging
import os
import signal
from typing import Any

log = logging.getLogger("worker.engines.sglang.controller")


def answer_by_agent(handle: Any, scheduler: Any, request: Any) -> Any:
    """Wraps the scheduler's handler of remote calls. In a replica nothing reads SGLang's answer, so it would stay in a
    queue. The adapter asks the agent of the rank instead."""
    from sglang.srt.runtime_context import get_parallel

    answer = handle(scheduler, request)
    return answer if get_parallel().num_dp_ranks == 1 else None


def end_with_replica(launch: Any, controller: Any, *arguments: Any, **more: Any) -> Any:
    """Wraps the start of a replica, on a thread of the controller, which would wait for ever if the replica ends. The
    controller ends as the replica did: by SIGKILL, which is worth a restart, or by itself."""
    from worker.engines.common.process_watch import SHOWS_S, killed

    try:
        return launch(controller, *arguments, **more)
    except BaseException:
        log.exception("a replica did not start")
        if killed([one for one in controller.scheduler_procs if one is not None], SHOWS_S) is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(1)


def open_loads(_: None, controller: Any, *arguments: Any, **more: Any) -> None:
    """A hook after the controller's constructor, which starts the replicas: opens the file in which they report their
    load. SGLang's own controller opens it at its first request, when the file has no name any more."""
    controller.load_snapshot_reader.read_all()

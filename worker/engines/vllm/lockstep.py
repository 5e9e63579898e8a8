"""Replicas of a mixture of experts, which vLLM steps together: each forward of one replica waits for a forward of every
other one. A replica without work makes an empty step. Other replicas do not wait for each other."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

log = logging.getLogger("worker.engines.vllm.lockstep")


def stop_together() -> None:
    """Makes such replicas begin and end each pause together. Call it in the process of the scheduler.

    vLLM ends a pause when all replicas are in one. A second pause, or a resume, that reaches one replica before that
    moment and another one after it lets one replica step alone: its forward would wait for ever. Here each replica
    counts the pauses and resumes that it has had. All of them get the same ones in the same order, and step on until
    they have had equally many.
    """
    import torch
    from torch.distributed import ReduceOp, all_reduce
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.engine import EngineCoreRequestType
    from vllm.v1.engine.core import DPEngineCoreProc

    handle = DPEngineCoreProc._handle_client_request

    def count(core: Any) -> None:
        core.rl_plane_orders += 1
        core.engines_running = True

    def pause_complete(core: Any) -> bool:
        count(core)
        return False  # vLLM answers when the replica stands still

    def resume(core: Any) -> None:
        core.scheduler.set_pause_state(PauseState.UNPAUSED)
        count(core)

    def step_on(core: Any, unfinished: bool) -> bool:
        """vLLM's own also looks at the first step of a wave, and then at every few steps."""
        core.step_counter += 1
        if core.step_counter > 1 and core.step_counter % core.dp_sync_interval:
            return True
        state = torch.tensor([int(unfinished), core.rl_plane_orders, -core.rl_plane_orders])
        all_reduce(state, ReduceOp.MAX, group=core.dp_group)
        unfinished_somewhere, most, least = state.tolist()
        return bool(unfinished_somewhere) or most != -least

    def handle_request(core: Any, kind: Any, request: Any) -> None:
        if kind == EngineCoreRequestType.START_DP_WAVE:
            if core.scheduler.pause_state != PauseState.UNPAUSED:
                return  # a resume starts all replicas
            # vLLM leaves out the replica that has the new request. If the request is aborted before its first step,
            # the others would step without it.
            request = (request[0], None)
        handle(core, kind, request)

    DPEngineCoreProc.rl_plane_orders = 0
    DPEngineCoreProc._pause_complete, DPEngineCoreProc.resume_scheduler = pause_complete, resume
    DPEngineCoreProc._has_global_unfinished_reqs = step_on
    DPEngineCoreProc._handle_client_request = handle_request


def anywhere(core: Any, holds: bool) -> bool:
    """Reports whether it holds in any replica that steps with this one. All of them ask at once, while they are
    paused."""
    from vllm.config import ParallelConfig

    group = getattr(core, "dp_group", None)
    return holds if group is None else ParallelConfig.has_unfinished_dp(group, holds)


def end_step(core: Any, *, executed: bool, busy: bool) -> bool:
    """Ends a step that a paused replica makes for itself. Returns whether any replica has more to do.

    `executed`: it has made a forward. `busy`: it has more to do."""
    if not executed and hasattr(core, "dp_group"):
        core.execute_dummy_batch()
    return anywhere(core, busy)


@contextlib.contextmanager
def all_or_none(core: Any) -> Iterator[None]:
    """Ends the process if it fails within, and other replicas step with it: they would wait for its next step."""
    try:
        yield
    except Exception as error:
        if not hasattr(core, "dp_group"):
            raise
        log.exception("a step that all replicas make has failed")
        raise SystemExit(1) from error


def keep_adapters(runner: Any) -> None:
    """Makes a rank's empty steps use no adapter. vLLM would fill its places with adapters of its own for such a step,
    and unload every adapter afterwards."""

    def run(
        config: Any, num_scheduled_tokens: Any, num_sampled_tokens: Any = None, *_: Any, **__: Any
    ) -> AbstractContextManager[None]:
        found: AbstractContextManager[None] = runner.maybe_select_dummy_loras(
            config, num_scheduled_tokens, num_sampled_tokens=num_sampled_tokens
        )
        return found

    runner.maybe_dummy_run_with_lora = run

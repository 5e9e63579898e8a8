"""Two schedulers of vLLM that step together, as threads of this process: vLLM's own loop and calls, without a model. A
forward of one waits for a forward of the other one."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

BOUND_S = 30.0
"""Seconds within which a scheduler does what it will ever do. A forward that waits for longer has failed."""


class FakeScheduler:
    """Has requests that do not end, as many as `running`."""

    def __init__(self) -> None:
        from vllm.v1.core.sched.interface import PauseState

        self.pause_state, self._all = PauseState.UNPAUSED, PauseState.PAUSED_ALL
        self.running = 0

    def set_pause_state(self, state: Any) -> None:
        self.pause_state = state

    def has_unfinished_requests(self) -> bool:
        return self.running > 0 and self.pause_state != self._all

    def finish_requests(self, ids: None, status: Any) -> list[Any]:
        self.running = 0
        return []

    has_requests = has_unfinished_requests


class LockstepCore:
    """One of the schedulers."""

    def __init__(self, rank: int, forwards: Any, states: Any) -> None:
        from vllm.v1.engine.core import DPEngineCoreProc, EngineShutdownState

        core: Any = object.__new__(DPEngineCoreProc)
        self.core, self._forwards = core, forwards
        self.steps, self.error = 0, ""
        core.dp_rank = core.engine_index = rank
        core.dp_group, core.dp_sync_interval = states, 4
        core.scheduler, core.batch_queue = FakeScheduler(), None
        core.input_queue, core.output_queue, core.aborts_queue = queue.Queue(), queue.Queue(), queue.Queue()
        core.engines_running = core.publish_dp_lb_stats = core.has_coordinator = core.log_stats = False
        core.pending_pause = core.ignore_start_dp_wave = False
        core.step_counter = core.current_wave = 0
        core.eep_scaling_state, core._idle_state_callbacks = None, []
        core.process_input_queue_block, core.enable_fault_tolerance = True, False
        core.shutdown_state = EngineShutdownState.RUNNING
        core.vllm_config = SimpleNamespace(
            observability_config=SimpleNamespace(enable_logging_iteration_details=False), shutdown_timeout=0
        )
        core.model_executor = SimpleNamespace(is_sleeping=False, collective_rpc=lambda method: None)
        core.step_fn, core.post_step = self._step, lambda executed: None
        core.execute_dummy_batch = self._forward
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def call(self, method: str, *arguments: Any) -> None:
        from vllm.v1.engine import EngineCoreRequestType

        self.core.input_queue.put((EngineCoreRequestType.UTILITY, (0, 0, method, arguments)))

    def start_wave(self, wave: int, excluded: int) -> None:
        """Reports, as vLLM's coordinator does, that a request has come to the scheduler `excluded`."""
        from vllm.v1.engine import EngineCoreRequestType

        self.core.input_queue.put((EngineCoreRequestType.START_DP_WAVE, (wave, excluded)))

    def answered(self, calls: int) -> bool:
        """Reports whether so many calls have been answered. A failed one is an error."""
        found = [one[1].utility_output for one in list(self.core.output_queue.queue)]
        done = [one for one in found if one is not None]
        assert not [one.failure_message for one in done if one.failure_message]
        return len(done) == calls

    def until(self, holds: Callable[[], bool]) -> None:
        give_up = time.monotonic() + BOUND_S
        while not holds():
            assert not self.error, self.error
            assert time.monotonic() < give_up, "it waits for ever"
            time.sleep(0.001)

    @property
    def still(self) -> bool:
        """It waits for a call."""
        return bool(not self.core.engines_running and self.core.input_queue.empty())

    def end(self) -> None:
        from vllm.v1.engine import EngineCoreRequestType
        from vllm.v1.engine.core import EngineShutdownState

        self.core.scheduler.running, self.core.shutdown_state = 0, EngineShutdownState.SHUTTING_DOWN
        self.core.input_queue.put((EngineCoreRequestType.WAKEUP, None))
        self._thread.join(BOUND_S)

    def _run(self) -> None:
        try:
            self.core.run_busy_loop()
        except SystemExit:
            pass
        except BaseException as error:
            self.error = repr(error)

    def _step(self) -> tuple[dict[int, Any], bool]:
        if not self.core.scheduler.has_requests():
            return {}, False
        self._forward()
        return {}, True

    def _forward(self) -> None:
        import torch
        from torch.distributed import all_reduce

        all_reduce(torch.zeros(1), group=self._forwards)
        self.steps += 1


@contextmanager
def two_cores() -> Iterator[list[LockstepCore]]:
    """With our changes to vLLM, until the end."""
    from torch.distributed import HashStore, PrefixStore, ProcessGroupGloo
    from vllm.v1.engine.core import DPEngineCoreProc

    from worker.engines.vllm.lockstep import stop_together

    store = HashStore()

    def group(name: str) -> list[Any]:
        made: list[Any] = [None, None]

        def make(rank: int) -> None:
            made[rank] = ProcessGroupGloo(PrefixStore(name, store), rank, 2, timedelta(seconds=BOUND_S))

        threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
        for one in threads:
            one.start()
        for one in threads:
            one.join(BOUND_S)
        return made

    forwards, states = group("forwards"), group("states")
    with pytest.MonkeyPatch.context() as patched:
        for name in (
            "_pause_complete",
            "resume_scheduler",
            "_has_global_unfinished_reqs",
            "_handle_client_request",
        ):
            patched.setattr(DPEngineCoreProc, name, vars(DPEngineCoreProc)[name])
        stop_together()
        cores = [LockstepCore(rank, forwards[rank], states[rank]) for rank in range(2)]
        try:
            yield cores
        finally:
            for core in cores:
                core.end()

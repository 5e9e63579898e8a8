"""Scores by vLLM: requests for prompt logprobs that its scheduler runs by themselves, while all others stand still.

A score is one call to the process of the scheduler, which handles no other call meanwhile. Every replica scores the
same sequences at once. Replicas that step together also do so here, however many steps each needs.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import time
from collections.abc import Iterator
from typing import Any

from worker.engines.vllm.lockstep import all_or_none, anywhere, end_step

METHOD = "rl_plane_score"
"""The engine core's method that the adapter calls."""

_numbers = itertools.count(1)


def score_in_core(core: Any, sequences: Any) -> list[list[float]] | None:
    """A method of vLLM's EngineCore. The engine is paused by `keep`. Running requests keep their KV. None: here, or in
    a replica that steps with this one, they leave no room for the sequences."""
    from vllm.v1.core.sched.interface import PauseState

    scheduler = core.scheduler
    if scheduler.pause_state != PauseState.PAUSED_ALL:
        raise RuntimeError("vLLM scores only while it is paused")
    # vLLM's second model runner has a place for each running request, also if the request is not in the step.
    places = scheduler.max_num_running_reqs - len(scheduler.running)
    full = places < 1 or scheduler.kv_holding_waiting or not _has_blocks(scheduler, max(map(len, sequences)))
    if anywhere(core, bool(full)):
        return None
    with _all_aside(scheduler), all_or_none(core):
        batches = [sequences[start : start + places] for start in range(0, len(sequences), places)]
        rows = [row for batch in batches for row in _score(core, batch)]
        while end_step(core, executed=False, busy=False):
            pass
    return rows


def _has_blocks(scheduler: Any, tokens: int) -> bool:
    """Reports whether the free blocks take a sequence of so many tokens, and one more. Then all sequences come through,
    one after the other at the worst."""
    groups = scheduler.kv_cache_config.kv_cache_groups
    needed = sum(-(-(tokens + 1) // group.kv_cache_spec.block_size) for group in groups)
    return bool(needed <= scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


@contextlib.contextmanager
def _all_aside(scheduler: Any) -> Iterator[None]:
    """Runs the scheduler without its requests meanwhile. They leave the table of requests too, or they count as
    finished.

    An abort that comes meanwhile finds none of them here. vLLM handles each abort a second time, in the order of its
    calls: then they are back."""
    from vllm.v1.core.sched.interface import PauseState

    running, waiting, prefills = scheduler.running, list(scheduler.waiting), scheduler._inflight_prefills
    scheduler.waiting.remove_requests(waiting)
    scheduler.running, scheduler._inflight_prefills = [], set()  # a prefill reserves blocks
    for request in (*running, *waiting):
        del scheduler.requests[request.request_id]
    scheduler.set_pause_state(PauseState.UNPAUSED)
    try:
        yield
    finally:
        scheduler.set_pause_state(PauseState.PAUSED_ALL)
        scheduler.running, scheduler._inflight_prefills = running, prefills
        for request in waiting:
            scheduler.waiting.add_request(request)
        for request in (*running, *waiting):
            scheduler.requests[request.request_id] = request


def _score(core: Any, sequences: list[list[int]]) -> list[list[float]]:
    from vllm.v1.request import RequestStatus

    keys = [f"rl-plane-score-{next(_numbers)}" for _ in sequences]
    try:
        for key, sequence in zip(keys, sequences, strict=True):
            request, _ = core.preprocess_add_request(_request(key, sequence))
            # vLLM numbers the times that replicas step together. With an older number, the request would start a new
            # time, and the replicas would step on after the score.
            core.add_request(request, getattr(core, "current_wave", 0))
        return _run(core, keys)
    finally:
        core.scheduler.finish_requests(keys, RequestStatus.FINISHED_ABORTED)  # an error may have left some


def _request(key: str, sequence: list[int]) -> Any:
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    return EngineCoreRequest(
        request_id=key,
        prompt_token_ids=sequence,
        mm_features=None,
        # With prompt logprobs vLLM takes nothing from its prefix cache.
        sampling_params=SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False),
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=secrets.token_hex(8),  # no other request finds this KV in the cache
        data_parallel_rank=None,
    )


def _run(core: Any, keys: list[str]) -> list[list[float]]:
    left: set[str] = set(keys)
    scores: dict[str, list[float]] = {key: [] for key in keys}
    while left:
        outputs, executed = core.step_fn()
        core.post_step(executed)
        end_step(core, executed=executed, busy=True)
        for output in [output for group in (outputs or {}).values() for output in group.outputs]:
            if output.new_prompt_logprobs_tensors is not None:
                scores[output.request_id] += output.new_prompt_logprobs_tensors.logprobs[:, 0].tolist()
            if output.finished:
                left.discard(output.request_id)
    return list(scores.values())

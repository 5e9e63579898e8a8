"""Scores by vLLM: requests for prompt logprobs that its scheduler runs by themselves, while all others stand still.

A score is one call to the process of the scheduler, which handles no other call meanwhile.
"""

from __future__ import annotations

import itertools
import secrets
import time
from typing import Any

from worker.engines.vllm.lora_requests import lora_request

METHOD = "rl_plane_score"
"""The engine core's method that the adapter calls."""

_numbers = itertools.count(1)


def score_in_core(core: Any, sequences: Any, adapter: Any) -> list[list[float]]:
    """A method of vLLM's EngineCore. `adapter`: its number and path. The engine is paused by `keep`, and no request
    holds KV, so the sequences find room whatever waits."""
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.request import RequestStatus

    scheduler = core.scheduler
    if scheduler.pause_state != PauseState.PAUSED_ALL or scheduler.running or scheduler.kv_holding_waiting:
        raise RuntimeError("vLLM scores only while it is paused and no request holds KV")
    waiting = list(scheduler.waiting)
    # They leave the table of requests too, or they count as finished. An abort that comes meanwhile finds none of them
    # here. vLLM handles each abort a second time, in the order of its calls: then they are back.
    scheduler.waiting.remove_requests(waiting)
    for request in waiting:
        del scheduler.requests[request.request_id]
    scheduler.set_pause_state(PauseState.UNPAUSED)
    keys = [f"rl-plane-score-{next(_numbers)}" for _ in sequences]
    try:
        for key, sequence in zip(keys, sequences, strict=True):
            core.add_request(*core.preprocess_add_request(_request(key, sequence, adapter)))
        return _run(core, keys)
    finally:
        scheduler.finish_requests(keys, RequestStatus.FINISHED_ABORTED)  # an error may have left some
        scheduler.set_pause_state(PauseState.PAUSED_ALL)
        for request in waiting:
            scheduler.waiting.add_request(request)
            scheduler.requests[request.request_id] = request


def _request(key: str, sequence: list[int], adapter: Any) -> Any:
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
        lora_request=None if adapter is None else lora_request(*adapter),
        cache_salt=secrets.token_hex(8),  # no other request finds this KV in the cache
        data_parallel_rank=None,
    )


def _run(core: Any, keys: list[str]) -> list[list[float]]:
    left: set[str] = set(keys)
    scores: dict[str, list[float]] = {key: [] for key in keys}
    while left:
        outputs, executed = core.step_fn()
        core.post_step(executed)
        for output in [output for group in (outputs or {}).values() for output in group.outputs]:
            if output.new_prompt_logprobs_tensors is not None:
                scores[output.request_id] += output.new_prompt_logprobs_tensors.logprobs[:, 0].tolist()
            if output.finished:
                left.discard(output.request_id)
    return list(scores.values())

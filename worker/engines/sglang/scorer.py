"""Scores by SGLang: one forward of given sequences in each rank, beside its scheduler's queues and between two steps.

SGLang measures its own prefills in the same way (its `DynamicChunkSizer`).
"""

from __future__ import annotations

import itertools
import secrets
from array import array
from typing import Any

from worker.engines.common.scoring import in_batches

NO_PIPELINE = (
    "the ranks of a pipeline hand a forward on by SGLang's own loop, which stands still while it is paused"
)

_numbers = itertools.count(1)


def score_between_steps(scheduler: Any, sequences: list[list[int]], room: int) -> list[list[float]]:
    """Runs on the scheduler's thread, in every rank. `room`: the number of tokens for which the KV cache has room."""
    # At most as many tokens as a step of the scheduler has: there is memory for that.
    tokens = min(room, scheduler.chunked_prefill_size or scheduler.max_prefill_tokens)
    places = scheduler.req_to_token_pool.available_size()
    batches = in_batches(sequences, tokens, places)
    return [row for batch in batches for row in _score(scheduler, batch)]


def _score(scheduler: Any, sequences: list[list[int]]) -> list[list[float]]:
    from sglang.srt.layers.dp_attention import set_is_extend_in_batch
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.mem_cache.common import release_kv_cache
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    requests = [_request(sequence) for sequence in sequences]
    tree, runner = scheduler.tree_cache, scheduler.tp_worker.model_runner
    for request in requests:
        request.init_next_round_input(tree)
        request.lock = tree.lock(request.last_node)
        request.extend_end = len(request.full_untruncated_fill_ids)
    batch = ScheduleBatch.init_new(
        requests,
        scheduler.req_to_token_pool,
        scheduler.token_to_kv_pool_allocator,
        tree,
        scheduler.model_config,
        False,
        scheduler.spec_algorithm,
    )
    batch.prepare_for_extend()
    try:
        batch.input_ids = batch.prefill_input_ids_cpu.to(batch.device)
        batch.prefill_input_ids_cpu = None
        forward = ForwardBatch.init_new(batch, runner, return_hidden_states_before_norm=False)
        set_is_extend_in_batch(True)
        values = runner.forward(forward).logits_output.input_token_logprobs.tolist()
    finally:
        for request in requests:
            release_kv_cache(request, tree, checkpoint=False)
    # There is a value for each token. The one after the last token of a sequence belongs to no sequence.
    rows = iter(values)
    return [list(itertools.islice(rows, len(sequence)))[:-1] for sequence in sequences]


def _request(sequence: list[int]) -> Any:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    request = Req(
        rid=f"rl-plane-score-{next(_numbers)}",
        cache_salt=secrets.token_hex(8),  # it finds no KV, and no request finds its KV
        origin_input_text="",
        origin_input_ids=array("q", sequence),
        sampling_params=SamplingParams(temperature=0, max_new_tokens=1),
        return_logprob=True,
    )
    request.logprob_start_len = 0
    return request

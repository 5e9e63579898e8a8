"""Logits that make no tokens, without an engine. `tests/engines/test_engine_updates.py` and `test_mixed_fleet.py` test
them on each engine."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl_plane.errors import EngineFailed
from worker.engines.common.finite_logits import check_prompt, take_out
from worker.engines.sglang.logits import (
    NOTE,
    Observer,
    sample_with_raw_logprobs,
    tell,
    telling,
)
from worker.engines.vllm.logits import RawLogits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_without_a_logprob_are_taken_out(dtype: Any) -> None:
    inf, nan = math.inf, math.nan
    rows = [
        [1.0, 2.0, -3.0],
        [1.0, -inf, -inf],
        [nan, 1.0, 2.0],
        [inf, 1.0, 2.0],
        [-inf, -inf, -inf],
        [inf, -inf, nan],
    ]
    logits = torch.tensor(rows, dtype=dtype)
    kept = logits.clone()
    found = take_out(logits)
    best = kept.float().log_softmax(-1).max(-1).values
    assert found.tolist() == [False, False, True, True, True, True] == best.isfinite().logical_not().tolist()
    assert torch.equal(logits[:2], kept[:2])
    assert not logits[2:].any()
    assert take_out(logits[:0]).tolist() == []


@pytest.mark.parametrize("value", [None, math.nan, -math.inf])
def test_a_prompt_needs_a_logprob_for_each_token_but_the_first(value: float | None) -> None:
    assert check_prompt([None, -1.0]) == [None, -1.0]
    with pytest.raises(EngineFailed, match="finite"):
        check_prompt([None, -1.0, value])


def test_sglangs_later_replies_carry_the_mark_of_a_not_finite_logit() -> None:
    """The ranks of a pipeline pass the mark on, up to the reply that the adapter reads."""
    good, bad, unfinished = requests = [SimpleNamespace() for _ in range(3)]
    observer = Observer(raw_logprobs=True)
    logits = torch.tensor([[1.0, 2.0], [math.nan, 2.0], [math.nan, 2.0]])
    sampling = SimpleNamespace(grammar_mask=None, logit_bias=None)
    made = observer.after_sample(observer.before_grammar(logits, sampling), torch.tensor([1, 0, 0]))
    made = observer.from_pp_tensors(made.to_pp_tensors()).copy_to_host(lambda rows: rows.clone())
    sender = telling(object, None)()
    assert sender.build_additional_customized_info(requests) == {}
    made.consume(SimpleNamespace(reqs=requests), ["token", "token", None])
    told = sender.build_additional_customized_info(requests)
    metas: list[dict[str, Any]] = [{} for _ in requests]
    passed = []
    for index, meta in enumerate(metas):
        tell(lambda *what: passed.append(what), "manager", meta, "state", {**told, "more": [[1]] * 3}, index, None)
    assert metas == [{}, {NOTE: True}, {}]
    assert passed == [("manager", meta, "state", {"more": [[1]] * 3}, at, None) for at, meta in enumerate(metas)]
    assert sender.build_additional_customized_info([good, unfinished]) == {}
    assert sender.build_additional_customized_info([bad]) == {NOTE: [True]}


@pytest.mark.parametrize("limit", ["grammar_mask", "logit_bias"])
def test_sglangs_raw_logprobs_are_of_the_logits_before_grammars_and_biases(limit: str) -> None:
    def sampled(*given: Any, **named: Any) -> Any:
        return named.get("logprob_logits")

    sampling = SimpleNamespace(grammar_mask=None, logit_bias=None)
    setattr(sampling, limit, "some")
    logits = torch.tensor([[1.0, 2.0], [math.nan, 2.0]])
    Observer(raw_logprobs=True).before_grammar(logits, sampling)
    logits[:, 0] = -math.inf
    raw = sample_with_raw_logprobs(sampled, "sampler", "output", sampling, True)
    assert raw.tolist() == [[1.0, 2.0], [0.0, 0.0]]
    assert sample_with_raw_logprobs(sampled, "sampler", "output", sampling, True) is None, "of one step only"
    Observer(raw_logprobs=False).before_grammar(logits, sampling)
    assert sample_with_raw_logprobs(sampled, "sampler", "output", sampling, True) is None, "processed logprobs"


@pytest.mark.parametrize("of_logprobs", [True, False])
def test_vllms_counts_are_of_the_logits_before_grammars_and_so_are_raw_logprobs(of_logprobs: bool) -> None:
    raw = RawLogits(of_logprobs)
    logits = torch.tensor([[1.0, 2.0], [math.nan, 2.0]])
    raw.keep(logits)
    logits[:] = -math.inf
    assert raw.count(logits).tolist() == [0, 1]
    if of_logprobs:
        assert raw.of(logits).tolist() == [[1.0, 2.0], [0.0, 0.0]]
    else:
        assert raw.of(logits) is logits, "processed logprobs"
    later = torch.tensor([[3.0, 4.0], [math.inf, 0.0]])
    assert raw.of(later) is later
    assert raw.count(later).tolist() == [0, 1]
    assert raw.of(logits) is logits, "of one step only"

"""What is peculiar in the `sglang` engine, without SGLang. All else: tests/test_engine_adapters.py."""

from __future__ import annotations

from typing import Any

from tests.engine_runs import ask
from worker.engines.sglang_streams import Experts, Stream
from worker.engines.spans import Label


async def test_what_an_abort_repeats_is_not_taken_again() -> None:
    stream = Stream(ask([1], logprobs=True), [1], frozenset(), Experts(1, 1, 1))

    def out(ids: list[int], count: int, finish: Any = None) -> dict[str, Any]:
        meta = {"completion_tokens": count, "finish_reason": finish}
        return {"output_ids": ids, "meta_info": meta | {"output_token_logprobs": [(0.0, each) for each in ids]}}

    label = Label(None)
    assert not stream.take(out([5, 6], 2), "a", label)
    assert stream.take(out([6], 2, {"type": "abort"}), "a", label)
    stream.take(out([7], 3), "a", label)
    piece, failure = await stream.next()
    assert (piece.token_ids, piece.finish_reason, failure) == ([5, 6], "abort", None)

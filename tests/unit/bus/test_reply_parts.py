"""A reply's messages: what a slow reader finds is joined, and parted where one message could not carry it."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from rl_plane.protocol.generation import GenerateDelta, VersionSpan
from rl_plane.protocol.prompt_tops import PromptPlace, PromptTops
from rl_plane.protocol.token_batching import merged
from tests.support.sent_parts import sent_parts
from worker.generation_service import (
    MAX_PROMPT_BESIDE,
    MAX_TEXT,
    MAX_TOKEN_TEXTS,
    MAX_TOKENS,
    MAX_TOP_ROWS,
)


def span(start: int, end: int) -> VersionSpan:
    return VersionSpan(version="v", sequence=start, digest="d", run="r", start=start, end=end)


@pytest.mark.parametrize("count", [1, MAX_TOP_ROWS // 20, 2 * (MAX_TOP_ROWS // 20) + 5])
async def test_top_logprobs_of_many_tokens_go_in_several_messages(count: int) -> None:
    made = 100  # before these
    top = [((1 << 31) - 1, -1.5)] * 20
    whole = GenerateDelta(
        token_ids=list(range(count)),
        logprobs=[-float(one) for one in range(count)],
        top_logprobs=[top] * count,
        text="text",
        finish_reason="stop",
        stop_string="t",
        spans=[span(0, 40), span(40, made + count)],
        prompt_token_ids=[1],
    )
    parts = await sent_parts(whole, made)
    assert len(parts) == 1 + (count - 1) // (MAX_TOP_ROWS // 20)
    told = made
    for part in parts:
        assert len(msgpack.packb(part.model_dump())) < 900_000
        told += len(part.token_ids)
        assert [(one.start, one.end) for one in part.spans] == [(0, 40), (40, told)]
    assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + ["stop"]
    assert [part.prompt_token_ids for part in parts] == [[1]] + [None] * (len(parts) - 1)
    assert merged(parts).model_copy(update={"spans": whole.spans}) == whole


@pytest.mark.parametrize("text", ["a", " " * 128])
async def test_the_texts_of_single_tokens_go_beside_their_tokens(text: str) -> None:
    count = 5000
    whole = GenerateDelta(
        token_ids=list(range(count)),
        logprobs=[-1.0] * count,
        top_logprobs=[[(one, -1.0), (count + one, -2.0)] for one in range(count)],
        token_texts={str(one): text + str(one) for one in range(2 * count)},
        finish_reason="length",
        spans=[span(0, count)],
    )
    parts = await sent_parts(whole)
    assert len(parts) > 1
    for part in parts:
        assert part.token_texts is not None
        assert len(msgpack.packb(part.token_texts)) <= MAX_TOKEN_TEXTS
        assert part.top_logprobs is not None
        needed = {*part.token_ids, *(token for row in part.top_logprobs for token, _ in row)}
        assert set(part.token_texts) == {str(one) for one in needed}
    assert merged(parts).model_copy(update={"spans": whole.spans}) == whole


@pytest.mark.parametrize("logprobs", [True, False])
@pytest.mark.parametrize("word", ["", " word", "…" * 30])
async def test_many_tokens_go_in_several_messages(logprobs: bool, word: str) -> None:
    count, made = 200_000, 100
    whole = GenerateDelta(
        token_ids=[(1 << 31) - 1 - one for one in range(count)],
        logprobs=[-float(one) for one in range(count)] if logprobs else None,
        text=word * count,
        finish_reason="length",
        spans=[span(0, 40), span(40, made + count)],
    )
    parts = await sent_parts(whole, made)
    told = made
    for part in parts:
        assert len(msgpack.packb({"delta": part.model_dump()})) < 900_000
        assert len(part.token_ids) <= MAX_TOKENS
        assert len(part.text) <= MAX_TEXT + len(word)
        told += len(part.token_ids)
        assert part.spans[-1].end == told
    assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + ["length"]
    assert merged(parts).model_copy(update={"spans": whole.spans}) == whole


@pytest.mark.parametrize("length", [MAX_PROMPT_BESIDE, MAX_PROMPT_BESIDE + 1])
async def test_a_long_prompt_goes_ahead_of_its_tokens(length: int) -> None:
    whole = GenerateDelta(token_ids=[1, 2], spans=[span(0, 2)], prompt_token_ids=[7] * length)
    *ahead, last = await sent_parts(whole)
    assert [(one.is_ahead, one.prompt_token_ids) for one in ahead] == (
        [(True, [7] * length)] if length > MAX_PROMPT_BESIDE else []
    )
    assert merged([*ahead, last]) == whole
    scored = whole.model_copy(update={"prompt_logprobs": [None] + [-1.0] * (length - 1)})
    assert await sent_parts(scored) == [scored]


@pytest.mark.parametrize("places", [3, 60_000])
async def test_a_prompts_likeliest_tokens_and_texts_go_ahead_if_they_are_many(places: int) -> None:
    row = PromptPlace(1, [(token, -float(token)) for token in range(20)])
    facts: dict[str, Any] = {
        "prompt_tops": PromptTops.of(20, [row] * places),
        "prompt_token_texts": {str(token): "\u00e9" * 10 for token in range(places)},
        "prompt_text": "\u00e9" * places * 10,
    }
    whole = GenerateDelta(
        token_ids=[1],
        spans=[span(0, 1)],
        prompt_token_ids=[(1 << 31) - 1] * (places + 1),
        prompt_logprobs=[None] + [-1.0] * places,
        **facts,
    )
    *ahead, last = await sent_parts(whole)
    assert len(ahead) > 10 if places > 3 else not ahead
    for part in (*ahead, last):
        assert len(msgpack.packb({"delta": part.model_dump()})) < 1_000_000
    assert all(part.is_ahead for part in ahead)
    assert merged([*ahead, last]) == whole

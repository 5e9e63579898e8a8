"""The scores of a prompt in the shapes of vLLM's routes, from an engine that knows all ranks or only some."""

from __future__ import annotations

import math
from typing import Any

import pytest

from frontend.completions.openai_replies import LEAST_LOGPROB, Chunks, prompt_logprobs, whole
from frontend.completions.reply_choice import Choice
from rl_plane.errors import EngineFailed
from rl_plane.protocol.generation import GenerateDelta
from rl_plane.protocol.prompt_tops import PromptPlace, PromptTops
from tests.support.openai_plans import completion

TEXTS = {"5": "a", "6": "bb", "7": "c", "8": "d", "9": "e"}


def delta_of(places: list[PromptPlace] | None, count: int = 2, **more: Any) -> GenerateDelta:
    return GenerateDelta(
        token_ids=[9],
        logprobs=[-0.5],
        text="e",
        finish_reason="length",
        prompt_token_ids=[5, 6, 7],
        prompt_logprobs=[None, -3.0, -1.0],
        prompt_tops=None if places is None else PromptTops.of(count, places),
        **{"prompt_token_texts": TEXTS, **more},
    )


def choice_of(delta: GenerateDelta) -> Choice:
    choice = Choice(index=0)
    choice.take(delta)
    return choice


def test_the_prompts_own_token_comes_first_and_the_likeliest_follow() -> None:
    """vLLM's clients take the first of a row for the prompt's own token, and sort by the ranks."""
    places = [PromptPlace(9, [(8, -0.5), (7, -1.0)]), PromptPlace(2, [(8, -0.5), (7, -1.0)])]
    first, outside, among = prompt_logprobs(choice_of(delta_of(places))) or []
    assert first is None
    assert outside is not None
    assert among is not None
    assert list(outside.items()) == [
        ("6", {"logprob": -3.0, "rank": 9, "decoded_token": "bb"}),
        ("8", {"logprob": -0.5, "rank": 1, "decoded_token": "d"}),
        ("7", {"logprob": -1.0, "rank": 2, "decoded_token": "c"}),
    ]
    assert list(among.items()) == [
        ("7", {"logprob": -1.0, "rank": 2, "decoded_token": "c"}),
        ("8", {"logprob": -0.5, "rank": 1, "decoded_token": "d"}),
    ]


@pytest.mark.parametrize(("tops", "rank"), [([(8, -0.5), (7, -1.0)], 3), ([], None)])
def test_an_unknown_rank_is_the_least_possible_or_absent(tops: list[tuple[int, float]], rank: int | None) -> None:
    """Next to likeliest tokens it is the least that it can be, because clients sort by it."""
    choice = choice_of(delta_of([PromptPlace(None, tops)] * 2, count=len(tops)))
    _, row, _ = prompt_logprobs(choice) or []
    assert row is not None
    assert row["6"] == {"logprob": -3.0, "rank": rank, "decoded_token": "bb"}
    _, alone, _ = prompt_logprobs(choice_of(delta_of(None))) or []
    assert alone == {"6": {"logprob": -3.0, "rank": None, "decoded_token": "bb"}}


def test_a_token_that_cannot_come_has_vllms_number() -> None:
    places = [PromptPlace(1, [(8, -math.inf), (7, -1.0)])] * 2
    _, row, _ = prompt_logprobs(choice_of(delta_of(places))) or []
    assert row is not None
    assert row["8"]["logprob"] == LEAST_LOGPROB


@pytest.mark.parametrize("by_ids", [False, True])
def test_an_echo_stands_before_the_new_tokens(by_ids: bool) -> None:
    plan = completion(prompt=[5, 6, 7], echo=True, logprobs=1, max_tokens=1)
    assert plan.echoed_tops == 1
    places = [PromptPlace(9, [(8, -0.5)]), PromptPlace(1, [(7, -1.0)])]
    texts = {} if by_ids else TEXTS
    made = {
        "prompt_text": "abbc",
        "prompt_token_texts": texts or None,
        "token_texts": None if by_ids else {"9": "e"},
    }
    delta = delta_of(places, count=1, **made)
    choice = choice_of(delta)
    reply = whole(plan, [choice], "m", 0)["choices"][0]
    names = [f"token_id:{token}" if by_ids else TEXTS[str(token)] for token in (5, 6, 7, 8, 9)]
    assert reply["text"] == "abbce"
    assert reply["logprobs"] == {
        "tokens": [*names[:3], names[4]],
        "token_logprobs": [None, -3.0, -1.0, -0.5],
        "top_logprobs": [None, {names[3]: -0.5, names[1]: -3.0}, {names[2]: -1.0}, {names[4]: -0.5}],
        "text_offset": [0, 0, 0, 4] if by_ids else [0, 1, 3, 4],
    }
    chunks = Chunks(plan, [choice], "m", 0)
    (row,) = chunks.of(choice, delta, 0)["choices"]
    assert (row["text"], row["logprobs"]) == (reply["text"], reply["logprobs"])
    later = GenerateDelta(token_ids=[9], logprobs=[-0.25], text="e")
    (row,) = chunks.of(choice, later, 1)["choices"]
    assert (row["text"], row["logprobs"]["text_offset"], row["logprobs"]["token_logprobs"]) == ("e", [5], [-0.25])


def test_packed_rows_are_cut_and_joined() -> None:
    places = [PromptPlace(one or None, [(one, -float(one)), (one + 1, -0.5)]) for one in range(5)]
    packed = PromptTops.of(2, places)
    assert (list(packed.rows()), packed.places, packed.fits) == (places, 5, True)
    assert PromptTops.joined([packed.cut(0, 2), None, packed.cut(2, 5)]) == packed
    assert packed.ids() == set(range(6))
    assert not packed.model_copy(update={"logprobs": packed.logprobs[4:]}).fits
    with pytest.raises(EngineFailed):
        PromptTops.joined([packed, PromptTops.of(0, places)])

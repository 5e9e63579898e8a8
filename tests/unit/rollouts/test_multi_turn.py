"""Turns of a conversation as tokens."""

from __future__ import annotations

import random

import pytest

from rl_plane import InvalidRequest, check_next_prompt, next_prompt


@pytest.mark.parametrize(
    ("completion", "end", "closed"),
    [
        ([4, 5], [], [4, 5]),
        ([4, 5], [9], [4, 5, 9]),
        ([4, 9], [9], [4, 9]),
        ([4, 9], [9, 8], [4, 9, 8]),
        ([4, 9, 8], [9, 8], [4, 9, 8]),
        ([4, 8], [9, 8], [4, 8, 9, 8]),
        ([9, 9], [9, 9, 8], [9, 9, 8]),
        ([], [9], [9]),
        ([9], [], [9]),
    ],
)
def test_a_turn_is_closed_once(completion: list[int], end: list[int], closed: list[int]) -> None:
    assert next_prompt([1, 2], completion, [3], end) == [1, 2, *closed, 3]


def test_only_a_built_prompt_continues_the_turn_before() -> None:
    source = random.Random(1)

    def some(least: int) -> list[int]:
        return [source.randrange(4) for _ in range(source.randrange(least, 6))]

    for _ in range(300):
        prompt, completion, more = some(1), some(0), some(1)
        built = next_prompt(prompt, completion, more, some(0))
        check_next_prompt(prompt, completion, built)
        before = len(prompt) + len(completion)
        at = source.randrange(before)
        for wrong in ([*built[:at], built[at] + 1, *built[at + 1 :]], built[:before], built[:at]):
            with pytest.raises(InvalidRequest) as caught:
                check_next_prompt(prompt, completion, wrong)
            assert caught.value.facts["field"] == "prompt_token_ids"


def test_the_error_says_where() -> None:
    with pytest.raises(InvalidRequest, match="its token 2 is 7, and was 3"):
        check_next_prompt([1, 2], [3], [1, 2, 7, 4])
    with pytest.raises(InvalidRequest, match="it has 3 tokens, and the turn before has 3"):
        check_next_prompt([1, 2], [3], [1, 2, 3])

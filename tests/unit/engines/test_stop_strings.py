"""Stop strings, held against a plain reading of the whole text, however tokens cut it."""

from __future__ import annotations

import random
from typing import Any

import pytest

from rl_plane.protocol.generation import GenerateRequest
from worker.engines.common.stop_strings import ReplyText

TRIES = 3000


class Letters:
    """A tokenizer: token t is the text of its number."""

    def __init__(self, texts: list[str]) -> None:
        self._texts = texts

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(self._texts[one] for one in ids)


def reading(tokens: list[str], stops: list[str], include: bool, min_tokens: int) -> tuple[int, str, str | None]:
    """(tokens, text, stop string), character by character."""
    text = "".join(tokens)
    uncounted = len("".join(tokens[:min_tokens]))
    for end in range(uncounted + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            made = next(count for count in range(len(tokens) + 1) if len("".join(tokens[:count])) >= end)
            return made, text[: end if include else end - len(stop)], stop
    return len(tokens), text, None


def test_a_streamed_text_stops_where_the_whole_text_would() -> None:
    source, kinds = random.Random(1), set()
    for _ in range(TRIES):
        texts = ["".join(source.choices("ab", k=source.randrange(4))) for _ in range(6)]
        stops = ["".join(source.choices("ab", k=source.randrange(1, 6))) for _ in range(source.randrange(1, 4))]
        ids = source.choices(range(len(texts)), k=source.randrange(1, 12))
        include, min_tokens = source.random() < 0.5, source.choice((0, 0, 3))
        request = GenerateRequest(
            id="x",
            prompt_token_ids=[1],
            stop=stops,
            include_stop_str_in_output=include,
            min_tokens=min_tokens,
        )
        text, said, made, found, left = ReplyText(Letters(texts), request, [1]), "", 0, None, list(ids)
        while left and found is None:
            if source.random() < 0.2:  # another worker continues it
                rest = {"continued": made, "min_tokens": max(0, min_tokens - made)}
                text = ReplyText(Letters(texts), request.model_copy(update=rest), [1, *ids[:made]])
            count = source.randrange(1, len(left) + 1)
            told = text.add(left[:count], last=count == len(left))
            left, said, made, found = left[count:], said + told.text, made + told.count, told.stop_string
        assert (made, said, found) == reading([texts[one] for one in ids], stops, include, min_tokens)
        kinds.add((found is None, made < len(ids), include))
    assert len(kinds) == 6  # without one, all tokens are made


@pytest.mark.parametrize(
    ("stops", "tokens", "told"),
    [
        (["xy"], ["a", "x", "b"], ["a", "", "xb"]),  # the reply withholds text that may begin one
        (["xy"], ["a", "x", ""], ["a", "", "x"]),  # until the end
        (["b", "xbc"], ["x", "bc"], ["", "x"]),  # the stop string that ends first
        (["b", "xb"], ["a", "xb"], ["a", ""]),  # of two that end together, the longer
        (["é"], ["a", "éb"], ["a", ""]),
    ],
)
def test_a_reply_withholds_text_that_may_begin_a_stop_string(
    stops: list[str], tokens: list[str], told: list[str]
) -> None:
    text = ReplyText(Letters(tokens), GenerateRequest(id="x", prompt_token_ids=[1], stop=stops), [1])
    assert [text.add([one], last=one == len(tokens) - 1).text for one in range(len(tokens))] == told


def test_an_end_without_a_token_releases_the_rest() -> None:
    text = ReplyText(Letters(["a", "x"]), GenerateRequest(id="x", prompt_token_ids=[1], stop=["xy"]), [1])
    assert text.add([0, 1], last=False).text == "a"
    end = text.add([], last=True)
    assert (end.count, end.text, end.stop_string) == (0, "x", None)

"""Stop strings: which token ends a request, and how much of the text a reader gets. All engines share this rule.

The text is read character by character, however the tokens cut it. The stop string that ends first ends the request. If
two end at the same character, the longer one counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rl_plane.protocol.generation import MAX_STOP_CHARS, GenerateRequest
from worker.engines.common.tokenizing import IncrementalText

REMEMBERED_TOKENS = MAX_STOP_CHARS + 32
"""Tokens of a continued request that are decoded again: the begin of its longest stop string may be among them, and
some context to decode it in."""


class StopStrings:
    """Looks for the stop strings of one text, and holds back what may be the begin of one."""

    def __init__(self, stops: list[str], include: bool) -> None:
        """`include`: the reader gets the stop string too."""
        self.found: str | None = None
        self._stops = stops
        self._include = include
        self._held = ""

    def add(self, text: str, counts: bool = True) -> str:
        """Returns the part of the text so far that the reader may get now. `counts`: whether a stop string that ends in
        `text` ends the request."""
        before, text = len(self._held), self._held + text
        if counts and (ends := list(self._ends(text, before))):
            _, start, self.found = min(ends)
            self._held = ""
            return text[: start + len(self.found) * self._include]
        held = max((_begun(text, stop) for stop in self._stops), default=0)
        told = len(text) - held
        self._held = text[told:]
        return text[:told]

    def _ends(self, text: str, after: int) -> Iterator[tuple[int, int, str]]:
        for stop in self._stops:
            if (start := text.find(stop, max(0, after - len(stop) + 1))) >= 0:
                yield start + len(stop), start, stop

    def rest(self) -> str:
        """Returns the remaining text at the end."""
        held, self._held = self._held, ""
        return held


def _begun(text: str, stop: str) -> int:
    """Returns how many of the last characters of `text` are the first ones of `stop`, without all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((count for count in range(longest, 0, -1) if text.endswith(stop[:count])), 0)


@dataclass(frozen=True, slots=True)
class TextChunk:
    """The part of new tokens that belongs to the request."""

    count: int
    text: str
    stop_string: str | None
    """The stop string that the last of these tokens completes. None: it completes none."""


class ReplyText:
    """The text of a request's tokens as they arrive, up to the first of its stop strings."""

    def __init__(self, tokenizer: Any, request: GenerateRequest, prompt: list[int]) -> None:
        self._text = IncrementalText(tokenizer, request.skip_special_tokens)
        self._stops = StopStrings(request.stop, request.include_stop_str_in_output) if request.stop else None
        self._uncounted = request.min_tokens
        if request.continued:
            self._continue_from(prompt[-min(request.continued, REMEMBERED_TOKENS) :])

    def _continue_from(self, made: list[int]) -> None:
        """Takes the tokens that another worker made. The reader has their text, except for what may be the begin of a
        stop string."""
        text = self._text.add(made, last=False)
        if self._stops is not None:
            self._stops.add(text, counts=False)

    def add(self, token_ids: list[int], last: bool) -> TextChunk:
        """`last`: the engine makes no more tokens."""
        if self._stops is None:
            return TextChunk(len(token_ids), self._text.add(token_ids, last), None)
        told = ""
        for place, token in enumerate(token_ids, 1):
            fresh = self._text.add([token], last and place == len(token_ids))
            told += self._stops.add(fresh, counts=self._uncounted <= 0)
            self._uncounted -= 1
            if self._stops.found is not None:
                return TextChunk(place, told, self._stops.found)
        if last:
            if not token_ids:
                told += self._stops.add(self._text.add([], last=True), counts=False)
            told += self._stops.rest()
        return TextChunk(len(token_ids), told, self._stops.found)

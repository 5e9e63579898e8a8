"""Stop strings: by which token a request ends, and how much of the text is told. One rule for all engines.

The text is read character by character, however tokens cut it: the stop string that ends first ends the request; of
two that end together, the longer one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rl_plane.protocol.generation import MAX_STOP_CHARS, GenerateRequest
from worker.engines.common.tokenizing import IncrementalText

REMEMBERED_TOKENS = MAX_STOP_CHARS + 32
"""Of a request that is continued: what may begin its longest stop string, and some context to decode it in."""


class StopStrings:
    """Of one text. What may be the beginning of a stop string is held back."""

    def __init__(self, stops: list[str], include: bool) -> None:
        """`include`: the stop string is told too."""
        self.found: str | None = None
        self._stops = stops
        self._include = include
        self._held = ""

    def add(self, text: str, counts: bool = True) -> str:
        """What of the text so far may be told now. `counts`: whether a stop string that ends in it is one."""
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
        """What is held back, at the end of the text."""
        held, self._held = self._held, ""
        return held


def _begun(text: str, stop: str) -> int:
    """How many of the last characters of `text` are the first ones of `stop`, all of which are not there."""
    longest = min(len(text), len(stop) - 1)
    return next((count for count in range(longest, 0, -1) if text.endswith(stop[:count])), 0)


@dataclass(frozen=True, slots=True)
class Told:
    """Of new tokens: how many are the request's, and their text."""

    count: int
    text: str
    stop_string: str | None
    """The request ends by this one, with the last of them."""


class ReplyText:
    """The text of a request's tokens as they come, up to the first of its stop strings."""

    def __init__(self, tokenizer: Any, request: GenerateRequest, prompt: list[int]) -> None:
        self._text = IncrementalText(tokenizer, request.skip_special_tokens)
        self._stops = StopStrings(request.stop, request.include_stop_str_in_output) if request.stop else None
        self._uncounted = request.min_tokens
        if request.continued:
            self._go_on_from(prompt[-min(request.continued, REMEMBERED_TOKENS) :])

    def _go_on_from(self, made: list[int]) -> None:
        """Their text was told by another worker, but for what may begin a stop string."""
        text = self._text.add(made, last=False)
        if self._stops is not None:
            self._stops.add(text, counts=False)

    def add(self, token_ids: list[int], last: bool) -> Told:
        """`last`: they are the last that the engine makes."""
        if self._stops is None:
            return Told(len(token_ids), self._text.add(token_ids, last), None)
        told = ""
        for place, token in enumerate(token_ids, 1):
            fresh = self._text.add([token], last and place == len(token_ids))
            told += self._stops.add(fresh, counts=self._uncounted <= 0)
            self._uncounted -= 1
            if self._stops.found is not None:
                return Told(place, told, self._stops.found)
        if last:
            if not token_ids:
                told += self._stops.add(self._text.add([], last=True), counts=False)
            told += self._stops.rest()
        return Told(len(token_ids), told, self._stops.found)

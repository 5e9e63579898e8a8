"""New tokens of a request as an engine makes them: without their text, and not yet counted in spans."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from rl_plane.errors import PlaneError
from rl_plane.protocol.generation import FinishReason
from rl_plane.protocol.prompt_tops import PromptTops
from rl_plane.protocol.routed_experts import RoutedExperts
from worker.engines.common.spans import Label

Top = list[tuple[int, float]]
"""The likeliest tokens of one place, with their logprobs."""


@dataclass(slots=True)
class Piece:
    """New tokens of one request. The last piece of a request has a finish_reason."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """One per token, if the request asks for them."""
    tops: list[Top] = field(default_factory=list)
    """One per token, if the request asks for them."""
    labels: list[Label] = field(default_factory=list)
    """One per token: the weights that made it."""
    finish_reason: FinishReason | None = None
    prompt_logprobs: list[float | None] | None = None
    """With the first token, if the request asks for them."""
    routed: RoutedExperts | None = None
    """If the request asks for them, the experts of the tokens so far that no earlier piece has reported."""
    sure: bool = True
    """False: at the end the engine reported other weights for the tokens than the labels have."""
    prompt_tops: PromptTops | None = None
    """With `prompt_logprobs`: the ranks, and the likeliest tokens that the request asks for."""
    pooled: bytes | None = None
    """The packed vector of a pooling request, with one label and a finish_reason."""

    def until(self, count: int) -> Piece:
        """Returns a last piece of the request with the first `count` tokens of this one."""
        routed, dropped = self.routed, len(self.token_ids) - count
        if routed is not None and dropped:
            routed = routed.cut(0, routed.tokens - dropped)
        return Piece(*self._rows(0, count), "stop", self.prompt_logprobs, routed, self.sure, self.prompt_tops)

    def by_weights(self) -> Iterator[Piece]:
        """Yields pieces whose tokens the same weights made."""
        labels, count = self.labels, len(self.labels)
        if labels and labels.count(labels[0]) == count:
            yield self
            return
        cuts = [0, *(at for at in range(1, count) if labels[at] != labels[at - 1]), count]
        for start, end in itertools.pairwise(cuts):
            ending = (self.finish_reason, self.routed) if end == count else (None, None)
            scores, tops = (self.prompt_logprobs, self.prompt_tops) if start == 0 else (None, None)
            yield Piece(*self._rows(start, end), ending[0], scores, ending[1], self.sure, tops)

    def _rows(self, start: int, end: int) -> tuple[list[int], list[float], list[Top], list[Label]]:
        return self.token_ids[start:end], self.logprobs[start:end], self.tops[start:end], self.labels[start:end]

    def append(self, later: Piece) -> None:
        """Adds the tokens of a later piece of the same weights."""
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.tops += later.tops
        self.labels += later.labels
        self.finish_reason = later.finish_reason
        self.prompt_logprobs = self.prompt_logprobs or later.prompt_logprobs
        self.prompt_tops = self.prompt_tops or later.prompt_tops
        self.routed = RoutedExperts.joined([self.routed, later.routed])
        self.sure = later.sure


class PieceQueue:
    """The pieces of one request on their way from the engine to a reader, on one event loop. The last item is a piece
    with a finish_reason, or an error."""

    def __init__(self) -> None:
        self._items: asyncio.Queue[Piece | PlaneError] = asyncio.Queue()
        self._waiting: Piece | PlaneError | None = None

    def put(self, item: Piece | PlaneError) -> None:
        self._items.put_nowait(item)

    async def next(self) -> Piece:
        """Returns the tokens that have come since the last call, as one piece, or the end of the request. Tokens of
        other weights wait for the next call. Raises the error that ends the request, after its tokens."""
        merged = Piece()
        item, self._waiting = self._waiting or await self._items.get(), None
        while True:
            if isinstance(item, PlaneError):
                if not merged.token_ids:
                    raise item
                self._waiting = item
                return merged
            if merged.labels and item.labels and item.labels[0] != merged.labels[-1]:
                self._waiting = item
                return merged
            merged.append(item)
            if self._items.empty() and (merged.token_ids or merged.finish_reason is not None):
                return merged
            item = await self._items.get()

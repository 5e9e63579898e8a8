"""The likeliest tokens at each place of a prompt, for a trainer that distils from them.

A prompt of N tokens has N - 1 rows, one for each token after the first.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from rl_plane.errors import EngineFailed

RANK_BYTES = 4
TOP_BYTES = 8
"""The bytes of one of the likeliest tokens: its id and its logprob."""
IS_LITTLE = sys.byteorder == "little"


@dataclass(frozen=True, slots=True)
class PromptPlace:
    """One token of a prompt."""

    rank: int | None
    """The rank of the prompt's own token, from 1. None: the engine does not know it."""
    tops: list[tuple[int, float]]
    """The likeliest tokens with their logprobs, the likeliest first."""


class PromptTops(BaseModel):
    """The rows of consecutive tokens. A worker creates them, a frontend reads them."""

    model_config = ConfigDict(frozen=True)

    count: int = Field(ge=0)
    """The number of likeliest tokens in a row."""
    ranks: bytes
    """[places] of int32, little-endian: the rank of the prompt's own token, from 1. 0: the engine does not know it."""
    token_ids: bytes
    """[places, count] of int32, little-endian."""
    logprobs: bytes
    """[places, count] of float32, little-endian, in the precision in which engines compute them."""

    @property
    def places(self) -> int:
        return len(self.ranks) // RANK_BYTES

    @property
    def row(self) -> int:
        """The bytes of one row."""
        return RANK_BYTES + self.count * TOP_BYTES

    @property
    def fits(self) -> bool:
        """Whether the three parts have the same number of rows."""
        wanted = len(self.ranks) * self.count
        return len(self.ranks) % RANK_BYTES == 0 and len(self.token_ids) == len(self.logprobs) == wanted

    @classmethod
    def of(cls, count: int, places: Iterable[PromptPlace]) -> PromptTops:
        """Packs rows. Each has `count` of the likeliest tokens."""
        ranks, ids, logprobs = array("i"), array("i"), array("f")
        for place in places:
            ranks.append(place.rank or 0)
            ids.extend(token for token, _ in place.tops)
            logprobs.extend(logprob for _, logprob in place.tops)
        return cls(count=count, ranks=_packed(ranks), token_ids=_packed(ids), logprobs=_packed(logprobs))

    def cut(self, start: int, end: int) -> PromptTops:
        """The rows from `start` up to `end`."""
        width = RANK_BYTES * self.count
        return PromptTops(
            count=self.count,
            ranks=self.ranks[start * RANK_BYTES : end * RANK_BYTES],
            token_ids=self.token_ids[start * width : end * width],
            logprobs=self.logprobs[start * width : end * width],
        )

    @classmethod
    def joined(cls, parts: Iterable[PromptTops | None]) -> PromptTops | None:
        """Joins the parts in their order. None: there are no rows."""
        found = [part for part in parts if part is not None]
        if len(found) < 2:
            return found[0] if found else None
        if len({part.count for part in found}) > 1:
            raise EngineFailed("the worker sent rows of a prompt's likeliest tokens of two lengths")
        return cls(
            count=found[0].count,
            ranks=b"".join(part.ranks for part in found),
            token_ids=b"".join(part.token_ids for part in found),
            logprobs=b"".join(part.logprobs for part in found),
        )

    def ids(self) -> set[int]:
        """All tokens of the rows."""
        return set(_unpacked("i", self.token_ids))

    def rows(self) -> Iterator[PromptPlace]:
        ids, logprobs = _unpacked("i", self.token_ids), _unpacked("f", self.logprobs)
        for place, rank in enumerate(_unpacked("i", self.ranks)):
            start, end = place * self.count, (place + 1) * self.count
            yield PromptPlace(rank or None, list(zip(ids[start:end], logprobs[start:end], strict=True)))


def _packed(values: array[int] | array[float]) -> bytes:
    if not IS_LITTLE:
        values.byteswap()
    return values.tobytes()


def _unpacked(kind: str, data: bytes) -> array[int]:
    values: array[int] = array(kind)
    values.frombytes(data)
    if not IS_LITTLE:
        values.byteswap()
    return values

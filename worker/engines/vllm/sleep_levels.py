"""Which memory vLLM has given back, and what it is asked for next: its own calls neither repeat nor mix.

Its sleep takes the KV cache together with the weights, and once anything sleeps it refuses to release the KV cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from typing import Literal

SLEEP_LEVEL = 1
"""Weights go to host memory. Level 2 would drop them, which a fetch brings again; but with them what vLLM allocates
beside the model's parameters and buffers, such as ALiBi's slopes: only buffers are saved from it (vLLM 0.32)."""


@dataclass(frozen=True, slots=True)
class Call:
    """Of vLLM's."""

    method: Literal["sleep", "release_kv_cache_memory", "wake_up"]
    tags: frozenset[str]
    """Of a `wake_up`: which."""
    released: frozenset[str]
    """What is, once it has returned."""


class ReleasedMemory:
    """Tags are `weights` and `kv_cache`. The calls that its methods yield are made one after the other: who takes the
    next one says that the last one has returned. One that has not, since it failed or was given up, may have done its
    work or a part of it, and is settled before anything else."""

    def __init__(self) -> None:
        self._tags: frozenset[str] = frozenset()
        self._unsure: Call | None = None

    @property
    def tags(self) -> frozenset[str]:
        """The tags that are released, or may be."""
        return self._tags | (self._unsure.released if self._unsure is not None else frozenset())

    def release(self, tags: Iterable[str]) -> Iterator[Call]:
        """After which these are released too."""
        yield from self._settled()
        after = self._tags | set(tags)
        more = _asleep(after) - _asleep(self._tags)
        if "weights" in more:
            yield from self._call(Call("sleep", frozenset(), after))
        elif more:
            yield from self._call(Call("release_kv_cache_memory", frozenset(), after))
        self._tags = after

    def resume(self, tags: Iterable[str]) -> Iterator[Call]:
        """After which these are there. The KV cache wakes with the weights, if it was to before: vLLM could not release
        it once more while they sleep."""
        yield from self._settled()
        after = self._tags - set(tags)
        if back := _asleep(self._tags) - _asleep(after):
            yield from self._call(Call("wake_up", back, after))
        self._tags = after

    def _settled(self) -> Iterator[Call]:
        """vLLM leaves out what it has done, asked once more; but it refuses to release a KV cache that may be gone."""
        unsure = self._unsure
        if unsure is not None and unsure.method == "release_kv_cache_memory":
            yield from self._call(Call("wake_up", frozenset(("kv_cache",)), self._tags))
        elif unsure is not None:
            yield from self._call(unsure)

    def _call(self, call: Call) -> Iterator[Call]:
        self._unsure = call
        yield call
        self._unsure, self._tags = None, call.released


def _asleep(tags: Set[str]) -> frozenset[str]:
    return frozenset(("weights", "kv_cache")) if "weights" in tags else frozenset(tags)

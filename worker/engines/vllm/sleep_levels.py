"""Tracks which memory vLLM has released, and which calls come next: vLLM's own calls neither repeat nor mix.

Its sleep releases the KV cache together with the weights. While anything sleeps, it refuses to release the KV cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from typing import Literal

SLEEP_LEVEL = 1
"""Weights go to host memory. Level 2 drops them, which a fetch restores; but it also drops what vLLM allocates beside
the model's parameters and buffers, such as ALiBi's slopes: it saves only buffers (vLLM 0.32)."""


@dataclass(frozen=True, slots=True)
class SleepCall:
    """One call to vLLM."""

    method: Literal["sleep", "release_kv_cache_memory", "wake_up"]
    tags: frozenset[str]
    """The tags that a `wake_up` takes back."""
    released: frozenset[str]
    """The memory that is released when the call has returned."""


class ReleasedMemory:
    """The memory that is released: `weights` and `kv_cache`.

    The caller makes the calls that `release` and `resume` yield, one after the other: taking the next one means that
    the last one has returned. A call that has not returned, since it failed or its caller gave up, may have done its
    work or a part of it. It is settled before anything else.
    """

    def __init__(self) -> None:
        self._tags: frozenset[str] = frozenset()
        self._unsure: SleepCall | None = None

    @property
    def tags(self) -> frozenset[str]:
        """The tags that are released, or may be."""
        return self._tags | (self._unsure.released if self._unsure is not None else frozenset())

    def release(self, tags: Iterable[str]) -> Iterator[SleepCall]:
        """Yields the calls after which these are released, too."""
        yield from self._settled()
        after = self._tags | set(tags)
        more = _asleep(after) - _asleep(self._tags)
        if "weights" in more:
            yield from self._call(SleepCall("sleep", frozenset(), after))
        elif more:
            yield from self._call(SleepCall("release_kv_cache_memory", frozenset(), after))
        self._tags = after

    def resume(self, tags: Iterable[str]) -> Iterator[SleepCall]:
        """Yields the calls after which these are back. The KV cache wakes with the weights, even if it should stay
        released: vLLM could not release it again while they sleep."""
        yield from self._settled()
        after = self._tags - set(tags)
        if back := _asleep(self._tags) - _asleep(after):
            yield from self._call(SleepCall("wake_up", back, after))
        self._tags = after

    def _settled(self) -> Iterator[SleepCall]:
        """Yields the call that settles an unfinished one. vLLM ignores a repeated call, but refuses to release a KV
        cache that may be released already."""
        unsure = self._unsure
        if unsure is not None and unsure.method == "release_kv_cache_memory":
            yield from self._call(SleepCall("wake_up", frozenset(("kv_cache",)), self._tags))
        elif unsure is not None:
            yield from self._call(unsure)

    def _call(self, call: SleepCall) -> Iterator[SleepCall]:
        self._unsure = call
        yield call
        self._unsure, self._tags = None, call.released


def _asleep(tags: Set[str]) -> frozenset[str]:
    return frozenset(("weights", "kv_cache")) if "weights" in tags else frozenset(tags)

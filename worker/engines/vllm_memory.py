"""Which memory vLLM has given back, and what it is asked for next: its own calls neither repeat nor mix.

Its sleep takes the KV cache together with the weights, and once anything sleeps it refuses to release the KV cache.
"""

from __future__ import annotations

from collections.abc import Collection, Set
from typing import Literal

SLEEP_LEVEL = 1
"""Weights go to host memory. Level 2 would drop them, which a fetch brings again; but with them what vLLM allocates
beside the model's parameters and buffers, such as ALiBi's slopes: only buffers are saved from it (vLLM 0.32)."""


class ReleasedMemory:
    """Tags are `weights` and `kv_cache`. None of its methods waits: call vLLM with what they return."""

    def __init__(self) -> None:
        self._tags: frozenset[str] = frozenset()

    def release(self, tags: Collection[str]) -> Literal["sleep", "release_kv_cache_memory"] | None:
        """The call of vLLM's after which these are released too. None: they are."""
        before, self._tags = self._tags, self._tags | set(tags)
        more = _asleep(self._tags) - _asleep(before)
        if "weights" in more:
            return "sleep"
        return "release_kv_cache_memory" if more else None

    def resume(self, tags: Collection[str]) -> list[str]:
        """What vLLM is to wake up. The KV cache wakes with the weights, if it was to before: vLLM could not release it
        once more while they sleep."""
        before, self._tags = self._tags, self._tags - set(tags)
        return sorted(_asleep(before) - _asleep(self._tags))

    def has(self, tags: Collection[str]) -> bool:
        return self._tags >= set(tags)


def _asleep(tags: Set[str]) -> frozenset[str]:
    return frozenset(("weights", "kv_cache")) if "weights" in tags else frozenset(tags)

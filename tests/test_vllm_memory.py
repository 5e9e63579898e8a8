"""Release and resume of vLLM's memory, with a stand-in for vLLM that refuses what vLLM refuses: it takes a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from worker.engines.vllm_memory import ReleasedMemory

Step = tuple[str, tuple[str, ...]]
TAGS = (("weights",), ("kv_cache",), ("weights", "kv_cache"))
STEPS: tuple[Step, ...] = tuple(itertools.product(("release", "resume"), TAGS))


class StandIn:
    """As the executor of vLLM 0.32 keeps its tags; there a warning is all that some of these refusals leave."""

    def __init__(self) -> None:
        self.asleep: set[str] = set()

    def sleep(self) -> None:
        assert "weights" not in self.asleep
        self.asleep = {"weights", "kv_cache"}

    def release_kv_cache_memory(self) -> None:
        assert not self.asleep
        self.asleep = {"kv_cache"}

    def wake_up(self, tags: list[str]) -> None:
        assert set(tags) <= self.asleep
        self.asleep -= set(tags)


def taken(steps: Sequence[Step]) -> tuple[StandIn, set[str]]:
    """vLLM, and what is released, once all of these have been asked for."""
    vllm, memory, released = StandIn(), ReleasedMemory(), set[str]()
    for op, tags in steps:
        if op == "release":
            assert memory.has(tags) == (released >= set(tags))
            released |= set(tags)
            if call := memory.release(tags):
                getattr(vllm, call)()
        else:
            released -= set(tags)
            if asleep := memory.resume(tags):
                vllm.wake_up(asleep)
        assert vllm.asleep >= released
    return vllm, released


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_every_sequence_releases_what_it_says_and_no_call_is_refused(count: int) -> None:
    for steps in itertools.product(STEPS, repeat=count):
        vllm, released = taken(steps)
        assert vllm.asleep == ({"weights", "kv_cache"} if "weights" in released else released), steps


def test_a_trainer_on_the_same_gpu_gets_the_weights_first() -> None:
    steps: list[Step] = [("release", TAGS[2]), ("resume", TAGS[0])]
    assert taken(steps)[0].asleep == {"kv_cache"}
    assert taken([*steps, ("resume", TAGS[1])])[0].asleep == set()

"""Release and resume of vLLM's memory, with a stand-in for vLLM that refuses what vLLM refuses: it takes a GPU."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence, Set
from pathlib import Path

import pytest

from rl_plane.errors import EngineFailed
from tests.support.vllm_stand_in import standing_in
from worker.engines.vllm.sleep_levels import SLEEP_LEVEL, ReleasedMemory, SleepCall

Step = tuple[str, tuple[str, ...]]
TAGS = (("weights",), ("kv_cache",), ("weights", "kv_cache"))
STEPS: tuple[Step, ...] = tuple(itertools.product(("release", "resume"), TAGS))


class StandIn:
    """Keeps tags as vLLM 0.32 does, which only warns in some cases where this refuses. After a failed call it may
    ignore the repeated one."""

    def __init__(self, fails_at: int | None = None, done: bool = False) -> None:
        """The call of this number fails: after it has done what it was asked for, or before."""
        self.asleep: set[str] = set()
        self.has_failed = False
        self.fails_at = fails_at
        self._done = done
        self._calls = 0

    def make(self, call: SleepCall) -> None:
        fails = self._calls == self.fails_at
        self._calls += 1
        if self._done or not fails:
            getattr(self, call.method)(call.tags)
        if fails:
            self.has_failed = True
            raise EngineFailed("as it should")

    def sleep(self, _: Set[str]) -> None:
        assert "weights" not in self.asleep or self.has_failed
        self.asleep = {"weights", "kv_cache"}

    def release_kv_cache_memory(self, _: Set[str]) -> None:
        assert not self.asleep
        self.asleep = {"kv_cache"}

    def wake_up(self, tags: Set[str]) -> None:
        if not tags <= self.asleep:
            assert self.has_failed
            return
        self.asleep -= tags


def taken(steps: Sequence[Step], vllm: StandIn) -> set[str]:
    """The tags that are released after all these calls. The call that fails is made twice."""
    memory, released = ReleasedMemory(), set[str]()
    for op, tags in steps:
        for _ in range(2):
            try:
                for call in memory.release(tags) if op == "release" else memory.resume(tags):
                    vllm.make(call)
                break
            except EngineFailed:
                continue
        released = after((op, tags), released)
        assert vllm.asleep == asleep_of(released), steps
    return released


def asleep_of(released: Set[str]) -> Set[str]:
    return {"weights", "kv_cache"} if "weights" in released else released


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_every_sequence_releases_what_it_says_and_no_call_is_refused(count: int) -> None:
    for steps in itertools.product(STEPS, repeat=count):
        taken(steps, StandIn())


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_call_that_failed_is_not_taken_for_done(count: int, done: bool) -> None:
    """Whichever it is, and whether it has done its work or not."""
    for steps, fails_at in itertools.product(itertools.product(STEPS, repeat=count), range(count)):
        taken(steps, StandIn(fails_at, done))


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("given_up", STEPS)
@pytest.mark.parametrize("before", [(), *TAGS])
def test_the_next_call_settles_a_call_that_is_not_repeated(
    before: tuple[str, ...], given_up: Step, done: bool
) -> None:
    """It counts, or it never was."""
    for following in STEPS:
        memory, vllm = ReleasedMemory(), StandIn(1 if before else 0, done)
        with contextlib.suppress(EngineFailed):
            for op, tags in (("release", before), given_up):
                for call in memory.release(tags) if op == "release" else memory.resume(tags):
                    vllm.make(call)
        vllm.fails_at = None  # there may have been nothing to call
        op, tags = following
        for call in memory.release(tags) if op == "release" else memory.resume(tags):
            vllm.make(call)
        found = [set(before), after(given_up, set(before))]
        assert vllm.asleep in [asleep_of(after(following, released)) for released in found], following


def after(step: Step, released: set[str]) -> set[str]:
    op, tags = step
    return released | set(tags) if op == "release" else released - set(tags)


def test_a_trainer_on_the_same_gpu_gets_the_weights_first() -> None:
    steps: list[Step] = [("release", TAGS[2]), ("resume", TAGS[0])]
    assert taken(steps, StandIn()) == {"kv_cache"}
    assert taken([*steps, ("resume", TAGS[1])], StandIn()) == set()


async def test_the_engine_asks_again_for_what_failed(tmp_path: Path) -> None:
    engine, llm = await standing_in(tmp_path)
    await engine.pause("keep", False)
    for method, op in (("sleep", engine.release_memory), ("wake_up", engine.resume_memory)):
        llm.fails.add(method)
        with pytest.raises(EngineFailed, match=f"no {method}"):
            await op(["weights"])
        for _ in range(2):
            await op(["weights"])
    both = ["kv_cache", "weights"]
    sleep, wake = ("sleep", SLEEP_LEVEL, "keep"), ("wake_up", both)
    assert [asked for asked in llm.asked if asked[0] in ("sleep", "wake_up")] == [sleep, sleep, wake, wake]


async def test_frozen_requests_do_not_keep_memory_from_being_released(tmp_path: Path) -> None:
    """They stay frozen: vLLM's own default would end them."""
    engine, llm = await standing_in(tmp_path)
    engine.in_flight = (1, 1)
    await engine.pause("keep", False)
    await engine.release_memory(["kv_cache"])
    await engine.resume_memory(["kv_cache"])
    await engine.release_memory(["weights"])
    await engine.resume_memory(["weights"])
    pause = ("pause", "keep")
    assert llm.asked == [
        pause,
        pause,
        ("release_kv_cache_memory",),
        ("wake_up", ["kv_cache"]),
        ("sleep", SLEEP_LEVEL, "keep"),
        ("wake_up", ["kv_cache", "weights"]),
    ]

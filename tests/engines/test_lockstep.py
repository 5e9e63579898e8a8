"""Schedulers of vLLM that step together, and get the same pauses and resumes at different times."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.lockstep_cores import LockstepCore, two_cores
from worker.engines.vllm.lockstep import all_or_none

pytestmark = [
    pytest.mark.engines("vllm"),
    pytest.mark.filterwarnings("ignore:::(torch|vllm|transformers|multiprocessing)"),  # theirs, not ours
]

ORDERS = ("keep", "keep", "resume", "abort", "wait", "resume", "resume", "keep")


@pytest.fixture
def cores() -> Iterator[list[LockstepCore]]:
    with two_cores() as made:
        yield made


def order(core: LockstepCore, what: str) -> None:
    if what == "resume":
        core.call("resume_scheduler")
    else:
        core.call("pause_scheduler", what, False)


@pytest.mark.parametrize("late", [0, 1])
def test_two_cores_stay_in_step_if_pauses_reach_one_of_them_late(cores: list[LockstepCore], late: int) -> None:
    """One has had all of them before the other has had the second one. vLLM alone ends in a forward of one of them."""
    early, other = cores[1 - late], cores[late]
    for what in ORDERS:
        order(early, what)
    for number, what in enumerate(ORDERS, 1):
        order(other, what)
        if number < len(ORDERS):
            before = other.steps
            other.until(lambda: other.steps > before + 5)  # noqa: B023 - it ends in this round
    for core in cores:
        core.until(lambda: core.answered(len(ORDERS)) and core.still)  # noqa: B023
    assert early.steps == other.steps


def test_requests_of_one_core_run_until_both_cores_are_paused(cores: list[LockstepCore]) -> None:
    busy, idle = cores
    busy.core.scheduler.running = 1
    for core in cores:
        core.start_wave(0, excluded=0)
    idle.until(lambda: idle.steps > 20)
    order(idle, "keep")
    before = busy.steps
    busy.until(lambda: busy.steps > before + 20)
    assert not idle.answered(1), "the other one is not paused"
    order(busy, "keep")
    for core in cores:
        core.until(lambda: core.answered(1) and core.still)  # noqa: B023
    for core in cores:
        order(core, "resume")
    idle.until(lambda: idle.steps > before + 60)
    assert busy.core.engines_running


def test_a_wave_ends_if_its_request_is_gone_before_the_first_step(cores: list[LockstepCore]) -> None:
    """The other core knows of it, and makes an empty step."""
    for core in cores:
        core.start_wave(0, excluded=0)
    for core in cores:
        core.until(lambda: core.core.current_wave == 1 and core.still)  # noqa: B023


def test_a_wave_starts_no_paused_core(cores: list[LockstepCore]) -> None:
    """News of a request may come to one before a pause, and to another one after it."""
    for core in cores:
        order(core, "keep")
    for core in cores:
        core.until(lambda: core.answered(1) and core.still)  # noqa: B023
    late = cores[0]
    late.start_wave(late.core.current_wave, excluded=1)
    late.call("is_scheduler_paused")
    late.until(lambda: late.answered(2) and late.still)


def test_a_failed_step_ends_the_process(cores: list[LockstepCore]) -> None:
    """The other one would wait for it. Elsewhere the call alone fails."""
    for core, ends in ((cores[0].core, SystemExit), (object(), ValueError)):
        with pytest.raises(ends), all_or_none(core):
            raise ValueError("no step")

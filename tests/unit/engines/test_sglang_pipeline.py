"""Tests the pause of SGLang's pipeline, with a stand-in for SGLang's scheduler. `tests/engines/test_two_nodes.py` tests
it with SGLang itself."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from worker.engines.sglang.pipeline import stands_still
from worker.engines.sglang.plugin import MARK, register

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"

Stages = Callable[[int], None]


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> Stages:
    """Sets the number of stages that this process belongs to. It is 2 until then."""

    def have(count: int) -> None:
        parallel = SimpleNamespace(pp_size=count)
        context = SimpleNamespace(get_parallel=lambda: parallel)
        monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)

    have(2)
    return have


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch, stages: Stages) -> dict[str, Callable[..., Any]]:
    """The hooks of the scheduler's methods, as the plugin registers them: `around METHOD` or `after METHOD`."""
    found = {}

    def add(target: str, hook: Callable[..., Any], kind: str) -> None:
        found[f"{kind} {target.removeprefix(SCHEDULER + '.')}"] = hook

    registry = SimpleNamespace(
        HookRegistry=SimpleNamespace(register=add), HookType=SimpleNamespace(AROUND="around", AFTER="after")
    )
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", registry)
    batches = SimpleNamespace(NextBatchPlan=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.schedule_batch", batches)
    monkeypatch.setenv(MARK, json.dumps({"worker": os.getpid(), "device": "cuda"}))
    register()
    return found


def batch_of(*requests: str) -> Any:
    return SimpleNamespace(reqs=[*requests], batch_is_full=True)


class Scheduler:
    """Stands in for SGLang's scheduler in a pipeline of three batches. No step is under way.

    The prompt of `b` has just been computed: it is in no running batch yet. The last step of `d` was one of a running
    batch, so the same batch is in both lists."""

    def __init__(self, paused: bool = True) -> None:
        self._engine_paused = paused
        self.running_mbs = [batch_of("a"), batch_of("c"), batch_of("d")]
        self.last_mbs: list[Any] = [batch_of("b"), None, self.running_mbs[2]]
        self.mbs: list[Any] = [None, None, None]
        self.running_batch, self.last_batch = self.running_mbs[0], self.last_mbs[0]
        self.calls: list[Any] = []

    def chooses(self, scheduler: Any, **batches: Any) -> Any:
        assert scheduler is self
        self.calls.append(batches)
        return "SGLang's own choice"

    def pauses(self, scheduler: Any, request: Any) -> None:
        """Stands in for SGLang's own pause, which retracts the requests of these two batches."""
        assert scheduler is self
        self._engine_paused = True
        last = self.last_batch.reqs if self.last_batch is not None else []
        self.calls.append((request.mode, self.running_batch.reqs + last))

    def idles(self, scheduler: Any) -> None:
        assert scheduler is self
        self.calls.append("idle")

    def _record_scheduler_state_for_paused_engine(self) -> None:
        self.calls.append("paused")

    def requests(self) -> list[list[str]]:
        batches = [*self.running_mbs, *self.last_mbs]
        return [[] if one is None else one.reqs for one in batches]


AS_IT_WAS = Scheduler().requests()


def test_a_paused_pipeline_begins_no_step(hooks: dict[str, Any]) -> None:
    scheduler, running, last = Scheduler(), batch_of("a"), batch_of("b")
    plan = hooks["around get_next_batch_to_run"](
        scheduler.chooses, scheduler, running_batch=running, last_batch=last
    )
    assert (plan.batch_to_run, plan.running_batch) == (None, running)
    assert (running, last, scheduler.calls) == (batch_of("a"), batch_of("b"), [])


@pytest.mark.parametrize(("paused", "count"), [(False, 2), (False, 1), (True, 1)])
def test_any_other_scheduler_chooses_its_batch_itself(
    hooks: dict[str, Any], stages: Stages, paused: bool, count: int
) -> None:
    """The loop of an engine with one stage asks for no batch while it is paused."""
    stages(count)
    scheduler, given = Scheduler(paused), {"running_batch": batch_of("a"), "last_batch": batch_of("b")}
    plan = hooks["around get_next_batch_to_run"](scheduler.chooses, scheduler, **given)
    assert (plan, scheduler.calls) == ("SGLang's own choice", [given])


def test_a_pipeline_stands_still_when_every_batch_has_ended_its_step(stages: Stages) -> None:
    assert stands_still(Scheduler())
    assert not stands_still(Scheduler(paused=False))
    for place in range(3):
        scheduler = Scheduler()
        scheduler.mbs[place] = batch_of("a")
        assert not stands_still(scheduler)
    stages(1)
    for paused in (True, False):
        assert stands_still(SimpleNamespace(_engine_paused=paused)) == paused, "one stage has no `mbs`"


def test_a_retraction_takes_the_requests_of_all_batches_once_each(hooks: dict[str, Any]) -> None:
    """They are in the batch that SGLang's own pause retracts, before it runs."""
    scheduler = Scheduler()
    hooks["around pause_generation"](scheduler.pauses, scheduler, SimpleNamespace(mode="retract"))
    assert scheduler.calls == [("retract", ["a", "c", "d", "b"])]
    assert scheduler.last_mbs == [None, None, None]
    assert scheduler.last_batch is None
    assert [one.reqs for one in scheduler.running_mbs] == [["a", "c", "d", "b"], [], []]
    assert not any(one.batch_is_full for one in scheduler.running_mbs), "they have room again"


@pytest.mark.parametrize(("mode", "count"), [("in_place", 2), ("abort", 2), ("in_place", 1), ("retract", 1)])
def test_any_other_pause_leaves_the_batches_as_they_are(
    hooks: dict[str, Any], stages: Stages, mode: str, count: int
) -> None:
    """A pause in place comes while steps are under way. The adapter aborts requests after it has retracted them."""
    stages(count)
    scheduler = Scheduler(paused=False)
    scheduler.mbs[1] = scheduler.running_mbs[1]
    hooks["around pause_generation"](scheduler.pauses, scheduler, SimpleNamespace(mode=mode))
    assert scheduler.calls == [(mode, ["a", "b"])]
    assert scheduler.requests() == AS_IT_WAS


@pytest.mark.parametrize(("paused", "place"), [(False, None), (True, 0), (True, 1), (True, 2)])
def test_a_retraction_is_refused_while_a_step_is_under_way(
    hooks: dict[str, Any], paused: bool, place: int | None
) -> None:
    """The step would write into KV that is given back. Nothing has been retracted then."""
    scheduler = Scheduler(paused)
    if place is not None:
        scheduler.mbs[place] = scheduler.running_mbs[place]
    with pytest.raises(AssertionError, match="a step under way"):
        hooks["around pause_generation"](scheduler.pauses, scheduler, SimpleNamespace(mode="retract"))
    assert (scheduler.calls, scheduler.requests()) == ([], AS_IT_WAS)


@pytest.mark.parametrize("paused", [True, False])
@pytest.mark.parametrize("count", [1, 2])
def test_a_paused_pipeline_is_not_idle(hooks: dict[str, Any], stages: Stages, paused: bool, count: int) -> None:
    """SGLang's own check would take the KV of its requests for a leak, and end the rank."""
    stages(count)
    scheduler = Scheduler(paused)
    hooks["around on_idle"](scheduler.idles, scheduler)
    assert scheduler.calls == (["paused"] if paused and count > 1 else ["idle"])


@pytest.mark.parametrize("paused", [True, False])
def test_an_abort_also_finds_requests_after_their_first_step(
    hooks: dict[str, Any], stages: Stages, paused: bool
) -> None:
    scheduler = Scheduler(paused)
    found, hook = [*scheduler.running_mbs, *scheduler.mbs], hooks["after _collect_inflight_batches"]
    batches = hook(found, scheduler)
    assert batches == found + scheduler.last_mbs
    assert {request for one in batches if one is not None for request in one.reqs} == {"a", "b", "c", "d"}
    stages(1)
    assert hook(found, SimpleNamespace()) == found, "one stage has no `last_mbs`"


def test_a_paused_scheduler_waits_for_its_next_message(hooks: dict[str, Any]) -> None:
    """Without the wait, its loop would take a core."""
    waits: list[str] = []
    scheduler = SimpleNamespace(maybe_sleep_on_idle=lambda: waits.append("waits"))
    hooks["after _record_scheduler_state_for_paused_engine"](None, scheduler)
    assert waits == ["waits"]


def test_a_paused_scheduler_shows_no_step_to_the_watchdog(hooks: dict[str, Any]) -> None:
    """The watchdog would end the engine: the step that it saw last makes no progress."""
    scheduler = SimpleNamespace(maybe_sleep_on_idle=lambda: None, cur_batch_for_debug=batch_of("a"))
    hooks["after _record_scheduler_state_for_paused_engine"](None, scheduler)
    assert scheduler.cur_batch_for_debug is None

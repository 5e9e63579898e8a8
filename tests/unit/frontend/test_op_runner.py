"""Equal calls of the fleet's ops that are under way become one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from frontend.facade.op_runner import MAX_IN_FLIGHT, OpRunner
from rl_plane.errors import (
    InvalidRequest,
    NoWorkers,
    PlaneError,
    Unavailable,
)


class SlowFleet:
    """Counts its calls, and answers when `go` is set."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any], str]] = []
        self.begun = asyncio.Event()
        self.go = asyncio.Event()
        self.error: PlaneError | None = None

    async def run(self, op: str, body: dict[str, Any] | None = None, request_id: str = "") -> dict[str, Any]:
        self.calls.append((op, body or {}, request_id))
        self.begun.set()
        await self.go.wait()
        if self.error is not None:
            raise self.error
        return {"call": len(self.calls)}


def _calls() -> tuple[SlowFleet, OpRunner]:
    fleet = SlowFleet()
    return fleet, OpRunner(fleet)  # type: ignore[arg-type]


async def _started(fleet: SlowFleet, count: int) -> None:
    async with asyncio.timeout(5):
        while len(fleet.calls) < count:
            fleet.begun.clear()
            await fleet.begun.wait()


async def test_equal_updates_share_one_answer() -> None:
    fleet, calls = _calls()
    one = asyncio.create_task(calls.run("update_weights", {"a": 1, "b": 2}))
    two = asyncio.create_task(calls.run("update_weights", {"b": 2, "a": 1}))
    other = asyncio.create_task(calls.run("update_weights", {"a": 2}))
    pauses = [asyncio.create_task(calls.run("pause", {})) for _ in range(2)]
    await _started(fleet, 4)
    fleet.go.set()
    assert await one is await two
    await asyncio.gather(other, *pauses)
    assert [op for op, _, _ in fleet.calls].count("update_weights") == 2
    fleet.go.clear()
    again = asyncio.create_task(calls.run("update_weights", {"a": 1, "b": 2}))
    await _started(fleet, 5)  # after its end, an equal body is a new call
    fleet.go.set()
    await again


async def test_digests_distinguish_calls_with_long_lists() -> None:
    fleet, calls = _calls()

    def feed(names: list[Any], digest: str, **more: Any) -> asyncio.Task[Any]:
        return asyncio.create_task(calls.run("receive_weights_part", {"names": names, **more}, digest=digest))

    one, two = feed(["a"], "d"), feed(["not looked at"], "d")
    others = [feed(["a"], "e"), feed(["a"], "d", update_id="u")]
    await _started(fleet, 3)
    fleet.go.set()
    assert await one is await two
    await asyncio.gather(*others)
    assert len(fleet.calls) == 3


async def test_a_request_id_means_one_update() -> None:
    fleet, calls = _calls()
    one = asyncio.create_task(calls.run("update_weights", {"a": 1}, "k"))
    await _started(fleet, 1)
    two = asyncio.create_task(calls.run("update_weights", {"a": 1}, "k"))
    with pytest.raises(InvalidRequest) as caught:
        await calls.run("update_weights", {"a": 2}, "k")
    assert caught.value.facts["field"] == "Idempotency-Key"
    fleet.go.set()
    assert await one is await two
    assert len(fleet.calls) == 1


async def test_a_caller_that_leaves_stops_nothing_and_errors_reach_the_rest() -> None:
    fleet, calls = _calls()
    one = asyncio.create_task(calls.run("update_weights", {}))
    await _started(fleet, 1)
    two = asyncio.create_task(calls.run("update_weights", {}))
    await asyncio.sleep(0)
    one.cancel()
    fleet.error = NoWorkers("gone")
    fleet.go.set()
    with pytest.raises(NoWorkers):
        await two
    assert len(fleet.calls) == 1


async def test_updates_in_flight_are_bounded_and_end_with_the_frontend() -> None:
    fleet, calls = _calls()
    tasks = [asyncio.create_task(calls.run("update_weights", {"a": n})) for n in range(MAX_IN_FLIGHT)]
    await _started(fleet, MAX_IN_FLIGHT)
    with pytest.raises(Unavailable):
        await calls.run("update_weights", {"a": "one more"})
    await calls.close(0.01)
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(one, asyncio.CancelledError) for one in ended)


@pytest.mark.parametrize(
    ("component", "told"),
    [
        (None, []),
        ("a", ["a"]),
        ("a,b", ["a", "b"]),
        (["b", "b", "a"], ["b", "a"]),
        ([["a"], 5, None], []),
        (7, []),
    ],
)
async def test_the_report_of_an_op_has_the_components_that_its_body_names(component: Any, told: list[str]) -> None:
    fleet, calls = _calls()
    fleet.go.set()
    heard: list[tuple[str, str, list[str]]] = []
    calls.on_op = lambda op, asked_by, outcome, components: heard.append((op, outcome, components))
    await calls.run("resume", {} if component is None else {"component": component})
    assert heard == [("resume", "ok", told)]


async def test_a_frontend_that_leaves_refuses_new_updates_and_answers_those_under_way() -> None:
    fleet, calls = _calls()
    running = asyncio.create_task(calls.run("update_weights", {"a": 1}, "k"))
    await _started(fleet, 1)
    calls.leave()
    again = asyncio.create_task(calls.run("update_weights", {"a": 1}, "k"))
    for op in ("update_weights", "prepare_weights_update", "new_run"):
        with pytest.raises(Unavailable) as refused:
            await calls.run(op, {"a": 2})
        assert refused.value.facts["retry_after_s"] == 1.0
    fleet.go.set()
    assert await running is await again
    for op in ("resume", "complete_weights_update"):  # they let what runs come to its end
        await calls.run(op, {})
    assert [op for op, _, _ in fleet.calls] == ["update_weights", "resume", "complete_weights_update"]

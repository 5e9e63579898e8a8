"""SGLang's groups form one after another, also if one of them fails or hangs."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from frontend.dialects.sglang.groups import TURN_WAIT_S, GroupFields, Groups
from rl_plane.errors import (
    Conflict,
    InvalidRequest,
    Locked,
    PlaneError,
    WorkerLost,
)


class _Forming:
    """The fleet's `init_transport`, which ends when the test says how."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.begun = asyncio.Event()
        self.end: asyncio.Future[PlaneError | None] = asyncio.get_running_loop().create_future()

    async def run(self, op: str, body: dict[str, Any], request_id: str) -> dict[str, Any]:
        self.asked.append(body["group"])
        self.begun.set()
        if (error := await self.end) is not None:
            raise error
        return {"workers": []}

    def groups(self, turn_wait_s: float = TURN_WAIT_S) -> Groups:
        plane: Any = SimpleNamespace(calls=self, part_timeout_s=1.0)
        return Groups(plane, turn_wait_s)


def _group(name: str) -> GroupFields:
    return GroupFields(master_address="127.0.0.1", master_port=1, rank_offset=1, world_size=3, group_name=name)


async def test_groups_that_wait_behind_a_failed_group_fail_with_it() -> None:
    """The groups belong to one trainer, which has died. Each would hold the ranks for its whole time, one after
    another."""
    forming = _Forming()
    groups = forming.groups()
    calls = [asyncio.create_task(groups.form(_group(name), "")) for name in ("a", "b", "c")]
    await forming.begun.wait()
    forming.end.set_result(WorkerLost("the trainer is gone", disabled=["w"]))
    for error in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(error, Conflict)
        assert (error.message, error.facts["disabled"]) == ("the trainer is gone", ["w"])
    assert forming.asked == ["a"]
    forming.end = asyncio.get_running_loop().create_future()
    forming.end.set_result(None)
    await groups.form(_group("b"), "")  # who comes afterwards is tried
    assert forming.asked == ["a", "b"]


async def test_a_wrong_group_does_not_stop_the_next_group() -> None:
    forming = _Forming()
    groups = forming.groups()
    calls = [asyncio.create_task(groups.form(_group(name), "")) for name in ("a", "b")]
    await forming.begun.wait()
    forming.end.set_result(InvalidRequest("no such backend", field="backend"))
    await asyncio.gather(*calls, return_exceptions=True)
    assert forming.asked == ["a", "b"]


async def test_the_turn_of_a_group_is_not_awaited_for_ever() -> None:
    forming = _Forming()
    groups = forming.groups(turn_wait_s=0.0)
    first = asyncio.create_task(groups.form(_group("a"), ""))
    await forming.begun.wait()
    with pytest.raises(Locked) as caught:
        await groups.form(_group("b"), "")
    assert caught.value.facts["fix"]
    forming.end.set_result(None)
    await first

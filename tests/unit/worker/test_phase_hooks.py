"""Tests the hook that holds a worker's op at a phase: see tests/support/phase_hooks.py."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rl_plane.protocol import update_requests
from rl_plane.protocol.record import first_record
from tests.support.phase_hooks import VARIABLE, with_holds
from worker.ops.contract import Handler

ME = "0123456789abcdef"
BOUND_S = 30.0
GATE = replace(first_record("blake3:1"), open=False)


async def until(holds: Callable[[], bool]) -> None:
    give_up = time.monotonic() + BOUND_S
    while not holds():
        assert time.monotonic() < give_up
        await asyncio.sleep(0.001)


def test_without_the_variable_the_handlers_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    handlers: dict[str, Handler] = {"pause": lambda body, fence: {}}
    assert with_holds(handlers, ME) is handlers


@pytest.mark.parametrize("plain", [True, False])
async def test_a_hook_stops_an_op_before_and_after_its_handler(
    plain: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = []

    def at_once(body: Any, fence: int) -> Mapping[str, Any]:
        done.append(fence)
        return {"fence": fence}

    async def later(body: Any, fence: int) -> Mapping[str, Any]:
        await asyncio.sleep(0)
        return at_once(body, fence)

    monkeypatch.setenv(VARIABLE, str(tmp_path))
    handle: Any = with_holds({"follow_record": at_once if plain else later}, ME)["follow_record"]
    gate = update_requests.FollowRecord(record=GATE, sequence=1)
    (tmp_path / "gate.before").touch()
    (tmp_path / f"gate.after.{ME}").touch()
    (tmp_path / "gate.after.another").touch()
    held = asyncio.create_task(handle(gate, 7))
    await until((tmp_path / f"reached.gate.before.{ME}").exists)
    assert not done
    (tmp_path / "gate.before").unlink()
    await until((tmp_path / f"reached.gate.after.{ME}").exists)
    assert (done, held.done()) == ([7], False)
    (tmp_path / f"gate.after.{ME}").unlink()
    assert await asyncio.wait_for(held, BOUND_S) == {"fence": 7}
    # The other side of the gate is another point.
    (tmp_path / "gate.before").touch()
    opened = update_requests.FollowRecord(record=GATE.opened(), sequence=2)
    assert await asyncio.wait_for(handle(opened, 8), BOUND_S) == {"fence": 8}
    # And so is another update.
    (tmp_path / "gate.before").write_text("mine")
    other = update_requests.FollowRecord(record=replace(GATE, update_id="other"), sequence=3)
    assert await asyncio.wait_for(handle(other, 9), BOUND_S) == {"fence": 9}
    (tmp_path / f"reached.gate.before.{ME}").unlink()
    mine = update_requests.FollowRecord(record=replace(GATE, update_id="mine"), sequence=4)
    held = asyncio.create_task(handle(mine, 10))
    await until((tmp_path / f"reached.gate.before.{ME}").exists)
    (tmp_path / "gate.before").unlink()
    assert await asyncio.wait_for(held, BOUND_S) == {"fence": 10}


async def test_a_hook_never_stops_a_reading_op(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    handlers: dict[str, Handler] = {"state": lambda body, fence: {}}
    assert with_holds(handlers, ME)["state"] is handlers["state"]

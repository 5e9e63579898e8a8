"""When a silent engine has hung for good."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

from worker import exit_codes
from worker.engine_watch import MAX_BLOCKED_S, EngineWatch
from worker.handlers import LIVENESS_TIMEOUT_S

if TYPE_CHECKING:
    from tests.conftest import Plane

pytestmark = [pytest.mark.slow, pytest.mark.parallel]

HANG_S = 8.0
"""More than one round trip's time-out: the worker is seen closed before it ends."""


def test_a_silent_engine_has_hung_after_its_time() -> None:
    watch = EngineWatch(60.0)
    assert [watch.silent(6.0, blocked=False) for _ in range(10)] == [False] * 9 + [True]


def test_an_answer_begins_it_anew() -> None:
    watch = EngineWatch(60.0)
    assert not watch.silent(59.0, blocked=False)
    watch.answered()
    assert not watch.silent(59.0, blocked=False)


def test_silence_in_a_blocking_op_does_not_count_but_has_a_bound() -> None:
    watch = EngineWatch(60.0)
    assert not watch.silent(59.0, blocked=False)
    loads = [watch.silent(6.0, blocked=True) for _ in range(math.ceil(MAX_BLOCKED_S / 6.0))]
    assert loads == [False] * (len(loads) - 1) + [True]
    watch.answered()
    assert not watch.silent(6.0, blocked=True)


async def test_a_worker_whose_engine_hangs_closes_and_then_ends(plane: Plane) -> None:
    worker = plane.spawn(patch=f"options['engine_hang_s'] = {HANG_S}", hang_liveness="true")
    client = await plane.client()
    view = await client.view()

    async def closed() -> bool:
        state = (await client.call(worker.instance_id, "state")).body
        return any(reason.startswith("engine: ") for reason in state["admission"]["reasons"])

    await plane.until(closed, 3 * LIVENESS_TIMEOUT_S)
    assert view.member(worker.instance_id) is not None, "it may come back"
    await plane.until(lambda: worker.process.poll() is not None, 3 * (HANG_S + LIVENESS_TIMEOUT_S))
    assert worker.process.returncode == exit_codes.ENGINE_HUNG
    await plane.until(lambda: view.member(worker.instance_id) is None)

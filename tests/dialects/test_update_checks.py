"""A trainer's check that its updates arrive: slime's and miles' `--check-weight-update-equal`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.support.dialect_facade import facade, fine, proven, served
from tests.support.faults import Stream
from tests.support.update_checks import check_updates, reset, until_all_serve

if TYPE_CHECKING:
    from tests.conftest import Plane

pytestmark = [pytest.mark.slow, pytest.mark.parallel]

START_S = 120.0
ENDLESS = 4000
"""More tokens than the slow fake engine makes meanwhile."""


async def test_a_check_fails_unless_an_update_brings_the_weights(plane: Plane) -> None:
    plane.spawn_copies(2)
    async with facade(plane) as http:

        async def update() -> None:
            body = {"model_path": str(plane.model()), "weight_version": "first"}
            fine(await http.post("/update_weights_from_disk", json=body))

        await check_updates(plane, http, update)
        assert await served(http) == [(True, "first")] * 2
        await check_updates(plane, http, update)


async def test_a_running_request_waits_for_the_end_of_a_check(plane: Plane) -> None:
    one = plane.spawn(token_delay_s=0.05)
    fleet = await plane.fleet()
    async with facade(plane) as http:
        stream = Stream(fleet.client, one.instance_id, [5], ENDLESS)
        await stream.until(1)
        await reset(http)
        body = {"model_path": str(plane.model(1)), "weight_version": "first"}
        fine(await http.post("/update_weights_from_disk", json=body))
        await until_all_serve(plane, http)
        await stream.until(len(stream.tokens) + 1)
        fine(await http.post("/abort_request", json={"abort_all": True}))
        await stream.end()
    labelled = sum(span["end"] - span["start"] for span in stream.spans)
    assert labelled == len(stream.tokens), "no token is of noise"


async def test_an_operator_ends_a_check_by_enable(plane: Plane) -> None:
    one = plane.spawn()
    async with facade(plane) as http:
        await reset(http)
        fine(await http.post(f"/v1/rl/workers/{one.instance_id}/enable"))
        await until_all_serve(plane, http)


@pytest.mark.timeout(300)
async def test_hf_fails_a_check_unless_an_update_brings_the_weights(plane: Plane) -> None:
    from worker.testing.tiny_model import make_witness_model

    model = make_witness_model(plane.tmp / "weights" / "witness", 1)
    started = [plane.spawn(ready=False, engine="hf", model=model) for _ in range(2)]
    ids = [(await asyncio.to_thread(one.wait_ready, START_S)).instance_id for one in started]
    async with facade(plane) as http:

        async def update() -> None:
            fine(await http.post("/update_weights_from_disk", json={"model_path": str(model)}))

        await check_updates(plane, http, update)
        await proven(http, ids, 1)

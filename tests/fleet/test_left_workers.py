"""The memory of workers that have left, and readiness against the number of workers that are expected."""

from __future__ import annotations

import asyncio
from typing import Any

from frontend.server.options import FrontendOptions
from tests.conftest import Plane
from tests.support.frontend_here import started
from tests.support.plain_client import plain_client

BOUND_S = 30.0


async def test_a_killed_worker_is_remembered_and_the_fleet_is_not_ready_without_it(plane: Plane) -> None:
    options = FrontendOptions(
        plane.url, plane.namespace, plane.component, rl_port=0, http_port=None, expect=2, dialects=()
    )
    async with (
        started(options) as urls,
        plain_client(base_url=f"{urls['rl_url']}/v1/rl/", timeout=BOUND_S) as rl,
    ):

        async def read(op: str) -> dict[str, Any]:
            return dict((await rl.get(op)).json())

        one, two = await asyncio.to_thread(plane.spawn_many, 2)
        assert (await rl.get("ready?wait_s=20")).status_code == 200
        state = await read("state")
        assert (state["ready"], state["expected"], state["left"]) == (True, 2, [])
        two.kill()

        async def is_gone() -> dict[str, Any] | None:
            found = await read("state")
            return found if len(found["workers"]) == 1 else None

        state = await plane.until(is_gone)
        assert not state["ready"]
        (left,) = state["left"]
        assert (left["instance_id"], left["reason"], left["back"]) == (two.instance_id, "connection", False)
        assert "killed" in left["why"]
        assert left["pid"]
        assert left["host"]
        assert (await rl.get("ready")).status_code == 503
        assert (await rl.get("ready?min_workers=1")).status_code == 200, "the call's own number counts"
        one.kill()

        async def is_empty() -> bool:
            return (await rl.get("state?wait_s=0.1")).status_code == 503

        await plane.until(is_empty)
        error = (await rl.get("state?wait_s=0.1")).json()["error"]
        assert {found["instance_id"] for found in error["left"]} == {one.instance_id, two.instance_id}

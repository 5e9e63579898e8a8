"""The `http` transport into a real model: base weights, a delta and an adapter. A worker that comes late fetches them.
tests/engines/test_mixed_transports.py has vLLM and SGLang."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.support.each_transport import bring_by_url
from tests.support.fleet_updates import all_serve
from tests.support.frontend_process import frontend
from tests.support.hf_fleet import HEAL_S, START_S
from tests.support.mixed_fleet import Mixed, proven
from worker.testing.tiny_model import make_witness_model

if TYPE_CHECKING:
    from tests.conftest import Plane

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


async def test_a_late_worker_fetches_the_weights_by_url(plane: Plane) -> None:
    first = make_witness_model(plane.tmp / "weights" / "witness1", 1, "bfloat16")
    url = plane.weight_server.url
    mixed, client = Mixed(plane, first, {}), await plane.client()

    async def spawn() -> None:
        worker = plane.spawn(ready=False, engine="hf", model=first, weight_urls=[url])
        mixed.ids["hf"] = (await asyncio.to_thread(worker.wait_ready, START_S)).instance_id

    await spawn()
    async with frontend(plane, admission_wait_s=HEAL_S) as http:
        await bring_by_url(mixed, client, http)
        await spawn()
        await plane.until(lambda: all_serve(client, "tiny 1"), HEAL_S)
        await proven(http, mixed, "tiny 1", mixed.tiny(1))

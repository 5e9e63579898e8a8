"""The `object_store` transport into real models. A worker that comes late, or again, fetches what is stored after its
publisher has died. tests/engines/test_mixed_transports.py has vLLM and SGLang."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.support.fleet_updates import all_serve
from tests.support.frontend_process import frontend
from tests.support.hf_fleet import HEAL_S, Witnesses, proven
from tests.support.object_publishers import MakePublisher, publisher

if TYPE_CHECKING:
    from tests.conftest import Plane

__all__ = ["publisher"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

BUCKET_BYTES = 1 << 16
"""Several for a tiny model."""


async def test_new_workers_fetch_base_and_adapter_after_the_trainers_end(
    plane: Plane, publisher: MakePublisher
) -> None:
    witnesses, client = Witnesses(plane), await plane.client()
    ids = await asyncio.to_thread(witnesses.spawn, 1)
    trainer = publisher(plane, bucket_bytes=BUCKET_BYTES)
    target = {"kind": "lora", "op": "load", "name": "a"}
    async with frontend(plane, admission_wait_s=HEAL_S) as http:
        await client.run(
            "update_weights", {"transport": await trainer.publish(witnesses.base(2)), "version": "two"}
        )
        transport = await trainer.publish(witnesses.adapter(3), "lora")
        await client.run("update_weights", {"target": target, "transport": transport, "version": "a3"})
        await proven(http, ids, 2, a=3)
        trainer.kill()
        late = await asyncio.to_thread(witnesses.spawn, 1)
        plane.spawned[0].kill()
        again = await asyncio.to_thread(witnesses.spawn, 1, instance_id=ids[0])
        await plane.until(lambda: all_serve(client, "two"), HEAL_S)
        await proven(http, late + again, 2, a=3)

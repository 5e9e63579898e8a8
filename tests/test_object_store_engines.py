"""The `object_store` transport into real models: the tokens after an update are those of plain transformers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch")
pytest.importorskip("peft")

from tests.test_engine_fleet import HEAL_S, START_S, Mixed
from tests.test_frontend_generation import frontend
from tests.test_object_store import MakePublisher, publisher
from tests.test_plane_update import all_serve

if TYPE_CHECKING:
    from tests.conftest import Plane

__all__ = ["publisher"]

pytestmark = pytest.mark.timeout(600)

BUCKET_BYTES = 1 << 16
"""Several for a tiny model."""


@pytest.mark.parametrize(
    "engine",
    [
        "hf",
        pytest.param("vllm", marks=pytest.mark.engines("vllm")),
        pytest.param("sglang", marks=pytest.mark.engines("sglang")),
    ],
)
async def test_base_and_adapter(plane: Plane, publisher: MakePublisher, engine: str) -> None:
    mixed = Mixed(plane)
    client = await plane.client()
    await mixed.start(engine)
    trainer = publisher(plane, bucket_bytes=BUCKET_BYTES)
    base, adapter = mixed.tiny(1), mixed.adapter(1)
    async with frontend(plane, admission_wait_s=HEAL_S) as http:
        await client.update_weights({"transport": await trainer.publish(base), "version": "tiny"})
        await mixed.proven(http, 1, base)
        await client.update_weights(
            {
                "target": {"kind": "lora", "op": "load", "name": "a"},
                "transport": await trainer.publish(adapter, "lora"),
                "version": "adapter",
            }
        )
        await mixed.proven(http, 1, base, adapter)
        if engine != "hf":
            return  # what comes now is the worker's, whatever its engine
        trainer.kill()
        before = mixed.workers["hf"]
        late = plane.spawn(ready=False, engine="hf", model=mixed.first)
        await asyncio.to_thread(late.wait_ready, START_S)
        before.kill()
        await mixed.start("hf")
        await plane.until(lambda: all_serve(client, "tiny"), HEAL_S)
        await mixed.proven(http, 1, base, adapter)
        mixed.workers["hf"] = late
        await mixed.proven(http, 1, base, adapter)

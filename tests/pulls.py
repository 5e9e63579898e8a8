"""Base weights and an adapter, by each transport that is pulled from, into engines that run already."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from rl_plane.client import RlClient
from tests.nixl_trainer import Trainer
from tests.object_publisher import Publisher
from tests.test_mixed_fleet import HEAL_S, Mixed, proven

BUCKET_BYTES = 1 << 16
"""Several for a tiny model."""


async def taken_by_pulls(http: httpx.AsyncClient, client: RlClient, mixed: Mixed) -> None:
    """They serve an adapter called `style` beside what they serve."""
    plane = mixed.plane

    async def takes(transport: dict[str, Any], label: str, **more: Any) -> None:
        policy = {"prepare_timeout_s": HEAL_S}  # a first pull imports nixl
        await client.run("update_weights", {"transport": transport, "version": label, "policy": policy, **more})

    async def proves(by: str, base: Path, adapter: Path) -> None:
        await proven(http, mixed, by, base)
        await proven(http, mixed, by, base, ("style", adapter))

    swap = {"target": {"kind": "lora", "op": "swap", "name": "style"}}
    trainer = Trainer()
    options = {"nats_url": plane.url, "namespace": plane.namespace, "component": plane.component}
    publisher = Publisher(plane.tmp / "publisher.log", bucket_bytes=BUCKET_BYTES, **options)
    try:
        base, adapter = mixed.base(2), mixed.adapter(2)
        await takes(await trainer.offers(base, bucket_bytes=BUCKET_BYTES), "nixl")
        await takes(await trainer.offers(adapter, "lora"), "a", **swap)
        await proves("nixl", base, adapter)
        base, adapter = mixed.base(3), mixed.adapter(1)
        await takes(await publisher.publish(base), "object_store")
        await takes(await publisher.publish(adapter, "lora"), "b", **swap)
        await proves("object_store", base, adapter)
    finally:
        trainer.close()
        publisher.kill()

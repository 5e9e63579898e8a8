"""Each transport into the engines of a fleet that is there already: base weights, a delta, an adapter, a failure."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from rl_plane.client import RlClient
from rl_plane.publish import Progress, WeightPublisher
from rl_plane.publish.sources.base import Taken
from rl_plane.publish.sources.directory import DirectorySource
from rl_plane.transports.registry import installed

if TYPE_CHECKING:
    from tests.support.mixed_fleet import Mixed

BACKENDS = [
    pytest.param(name, marks=pytest.mark.engines(name)) if name == "nixl" else name
    for name in sorted(installed().keys() - {"nccl"})
]
"""Without what needs GPUs; nixl where it is installed."""
BUCKET_BYTES = 1 << 16
"""Several for a tiny model."""


class Shelf:
    """A source of the directory that the test has set. A `broken` one fails in the middle."""

    collective = False
    adapter = False

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.broken = False

    def take(self) -> Taken:
        taken = DirectorySource(self.directory).take()

        def tensors() -> Iterator[Any]:
            yield from itertools.islice(taken.tensors, len(taken.specs) // 2)
            if self.broken:
                raise RuntimeError("the trainer ran out of memory")
            yield from taken.tensors

        return Taken(taken.specs, tensors(), taken.adapter_config, taken.close)


def stepped(mixed: Mixed) -> Path:
    """The second witness with the output layer of the third, so that it says what that one says."""
    from safetensors.torch import load_file, save_file

    path = mixed.base(2).with_name("stepped")
    if not path.exists():
        shutil.copytree(mixed.base(2), path)
        head = load_file(mixed.base(3) / "model.safetensors")["lm_head.weight"]
        tensors = {**load_file(path / "model.safetensors"), "lm_head.weight": head}
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


async def bring(mixed: Mixed, client: RlClient, http: httpx.AsyncClient, backend: str) -> None:
    """After each version every engine's tokens are the reference's. It leaves the base `tiny 1`, and no adapter."""
    from tests.support.mixed_fleet import proven

    plane = mixed.plane
    how: dict[str, Any] = {"namespace": plane.namespace, "component": plane.component, "workers": len(mixed.ids)}
    how |= {"transport": backend, "bucket_bytes": BUCKET_BYTES}
    if backend == "filesystem":
        how["root"] = plane.tmp / "weights" / "published"
    shelf, sent = Shelf(mixed.base(2)), list[Progress]()
    publisher = WeightPublisher(shelf, plane.url, encoding="delta", **how)

    async def published(label: str, encoding: str) -> None:
        await publisher.publish_async(label)
        last = (await client.run("updates"))["updates"][0]
        assert (last["label"], last["transport"]["backend"], last["encoding"]) == (label, backend, encoding)
        await proven(http, mixed, label, shelf.directory)

    try:
        await published(f"{backend} 2", "full")
        shelf.directory = stepped(mixed)
        await published("stepped", "delta")
    finally:
        await asyncio.to_thread(publisher.close)
    publisher = WeightPublisher(shelf, plane.url, encoding="full", progress=sent.append, **how)
    try:
        shelf.directory, shelf.broken = mixed.tiny(1), True
        with pytest.raises(RuntimeError, match="out of memory"):
            await publisher.publish_async("broken")
        assert max(one.buckets for one in sent) > 0
        await proven(http, mixed, "stepped", stepped(mixed))
        shelf.broken = False
        await published("tiny 1", "full")
    finally:
        await asyncio.to_thread(publisher.close)
    publisher = WeightPublisher(mixed.adapter(1), plane.url, adapter="a", **how)
    try:
        await publisher.publish_async("adapter")
        await proven(http, mixed, "tiny 1", mixed.tiny(1), ("a", mixed.adapter(1)))
    finally:
        await asyncio.to_thread(publisher.close)
    await client.run("unload_lora_adapter", {"lora_name": "a"})


async def bring_by_url(mixed: Mixed, client: RlClient, http: httpx.AsyncClient) -> None:
    """Fetches a checkpoint, a delta, another checkpoint and an adapter by HTTP. A server that ends its connections in
    the middle delays them. It leaves the base `tiny 1`, and no adapter."""
    from tests.support.delta_updates import by_delta
    from tests.support.mixed_fleet import proven

    server = mixed.plane.weight_server

    def by_url(directory: Path, **body: Any) -> dict[str, Any]:
        return {**body, "transport": {"backend": "http", "url": f"{server.url}/{directory.name}"}}

    server.behaviour.cut_after.extend([1000, 70_000, 0, 5])
    await client.run("update_weights", by_url(mixed.base(2), version="http 2"))
    await proven(http, mixed, "http 2", mixed.base(2))
    delta = by_delta(mixed.plane, mixed.base(2), stepped(mixed), "http stepped")
    files = Path(delta["transport"]["path"])
    await client.run("update_weights", by_url(files, **{**delta, "transport": None}))
    await proven(http, mixed, "http stepped", stepped(mixed))
    await client.run("update_weights", by_url(mixed.tiny(1), version="tiny 1"))
    target = {"kind": "lora", "op": "load", "name": "a"}
    await client.run("update_weights", by_url(mixed.adapter(1), target=target, version="adapter"))
    await proven(http, mixed, "tiny 1", mixed.tiny(1), ("a", mixed.adapter(1)))
    await client.run("unload_lora_adapter", {"lora_name": "a"})


async def bring_call_by_call(mixed: Mixed, client: RlClient, http: httpx.AsyncClient) -> None:
    """Feeds the fleet like a trainer that takes it for one SGLang server, in a group of its own: each tensor by
    itself, then flattened buckets. At last the trainer is killed in the middle."""
    from tests.support.broadcast_trainer import BroadcastTrainer, parts_of
    from tests.support.dialect_facade import facade, fine, refused
    from tests.support.mixed_fleet import END_S, proven
    from tests.support.sglang_replay import Replay

    await mixed.witnessed(client)
    with BroadcastTrainer(mixed.plane) as own:
        async with facade(mixed.plane) as admin:
            replay = Replay(admin, own)
            assert fine(await replay.form("mixed"))["success"] is True
            for label, directory, how in (
                ("broadcast 2", mixed.base(2), {}),
                ("broadcast tiny", mixed.tiny(1), {"load_format": "flattened_bucket"}),
            ):
                await replay.post("/pause_generation", {"mode": "retract"})
                await replay.flush()
                for part in parts_of(directory, 3):
                    fine(await replay.send("mixed", directory, part, weight_version=label, **how))
                assert (await replay.post("/continue_generation"))["excluded"] == []
                await proven(http, mixed, label, directory)
            first, second, *_ = parts_of(mixed.base(2), 3)
            fine(await replay.send("mixed", mixed.base(2), first))
            own.kill()
            call = admin.post("/update_weights_from_distributed", json={**second, "group_name": "mixed"})
            async with asyncio.timeout(END_S):
                refused(await call, 409)
            await proven(http, mixed, "broadcast tiny", mixed.tiny(1))
    await mixed.witnessed(client)

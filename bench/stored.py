"""Measures how fast a model comes into an `hf` worker from files and from NATS, beside a plain read and nats-py's own
get."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import nats
import numpy as np

from bench.fanout import JOIN_TIMEOUT_S
from bench.peers import copied_unhashed, hf_worker, unhashed
from bench.phases import phases_seen
from rl_plane.client import RlClient
from rl_plane.transports import packing
from rl_plane.transports.object_store.sender import ObjectStoreSender
from rl_plane.transports.packing import fill
from rl_plane.weights.checkpoint import open_checkpoint
from rl_plane.weights.manifest import Manifest, pack
from rl_plane.weights.read_ahead import host_memory
from rl_plane.weights.safetensors_file import READ_BYTES

SHAPE_1_GB = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
"""The shape for `make_tiny_model`, in float32: few and wide layers."""
NATS_PY_BYTES = 64 << 20
"""The bytes by nats-py's object store, which takes seconds for so many; counted up to the model's."""
UPDATE_TIMEOUT_S = 300.0
UNVERIFIED = ", unverified"
"""In a worker that hashes nothing, of an object that was not hashed either."""


@dataclass(slots=True)
class StoredTimes:
    """Seconds, a number for each round."""

    nbytes: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    """Each also with UNVERIFIED. `file`, `object`: of the prepare phase. `plain`, `used`: of a plain read of the same
    file in the same round, into new memory, and into memory that was used before. `publish`: of an object. `nats_put`,
    `nats_get`: what nats-py would take for as much."""

    def add(self, what: str, seconds: float) -> None:
        self.seconds.setdefault(what, []).append(seconds)


def plain_read(path: Path, place: memoryview | None = None) -> float:
    """Reads a file into `place`, or into new memory as a usual reader does. Returns the seconds."""
    start = time.perf_counter()
    place = np.empty(path.stat().st_size, np.uint8).data if place is None else place
    descriptor = os.open(path, os.O_RDONLY)
    try:
        done = 0
        while count := os.preadv(descriptor, [place[done : done + READ_BYTES]], done):
            done += count
    finally:
        os.close(descriptor)
    assert done == len(place)
    return time.perf_counter() - start


async def _prepared(client: RlClient, transport: Mapping[str, Any]) -> float:
    with phases_seen() as seen:
        async with asyncio.timeout(UPDATE_TIMEOUT_S):
            await client.run("update_weights", {"transport": dict(transport)})
    return sum(one.end - one.start for one in seen if one.phase == "prepare")


def _publish(sender: ObjectStoreSender, directory: Path) -> tuple[dict[str, Any], float]:
    checkpoint = open_checkpoint(directory)
    start = time.perf_counter()
    try:
        manifest = Manifest(pack(checkpoint.specs.items()))
        transport, digests = sender.open(manifest), dict[str, str]()
        for number in fill(manifest, checkpoint.tensors(), sender.buffer, digests):
            sender.send(number)
        sender.finish(digests)
    finally:
        checkpoint.close()
    return transport, time.perf_counter() - start


async def _nats_py(url: str, nbytes: int) -> tuple[float, float]:
    """(put, get) of so many bytes."""
    connection = await nats.connect(url)
    try:
        jetstream = connection.jetstream(timeout=30)
        store = await jetstream.create_object_store(f"bench{secrets.token_hex(4)}")
        data = secrets.token_bytes(nbytes)
        start = time.perf_counter()
        await store.put("weights", data)
        put = time.perf_counter()
        found = await store.get("weights")
        got = time.perf_counter()
        assert found.data == data
        await jetstream.delete_object_store(store._name)
        return put - start, got - put
    finally:
        await connection.close()


async def measure_stored(models: Sequence[Path], rounds: int) -> StoredTimes:
    """One `hf` worker at a time. `models`: two of one shape, of one file each."""
    files = [model / "model.safetensors" for model in models]
    times = StoredTimes(files[0].stat().st_size)
    room = host_memory(times.nbytes)
    some = min(NATS_PY_BYTES, times.nbytes)
    for verify in (True, False):
        namespace = f"stored{secrets.token_hex(2)}"
        async with AsyncExitStack() as stack:
            if not verify:
                stack.enter_context(mock.patch.object(packing, "tensor_digest", unhashed))
                stack.enter_context(mock.patch.object(packing, "copy_hashed", copied_unhashed))
            url, _ = stack.enter_context(
                hf_worker(namespace, models[0], weight_roots=[str(models[0].parent)], verify=verify)
            )
            client = await stack.enter_async_context(await RlClient.connect(url, namespace))
            await client.wait_for(1, JOIN_TIMEOUT_S)
            sender = ObjectStoreSender(url, namespace, keep=0)
            stack.callback(sender.close)
            for number in range(-1, rounds):  # the first one warms caches
                found = StoredTimes(times.nbytes)
                model = models[number % 2]
                path = {"backend": "filesystem", "path": str(model)}
                await asyncio.to_thread(plain_read, files[number % 2], room)  # from here on it is cached
                found.add("used", await asyncio.to_thread(plain_read, files[number % 2], room))
                found.add("plain", await asyncio.to_thread(plain_read, files[number % 2]))
                found.add("file", await _prepared(client, path))
                transport, took = await asyncio.to_thread(_publish, sender, model)
                found.add("publish", took)
                found.add("object", await _prepared(client, transport))
                put, get = await _nats_py(url, some)
                found.add("nats_put", put * times.nbytes / some)
                found.add("nats_get", get * times.nbytes / some)
                if number >= 0:
                    for what, (seconds,) in found.seconds.items():
                        times.add(what + ("" if verify else UNVERIFIED), seconds)
    return times

"""The layout `tensors` of `ipc`: a trainer's own tensors in shared memory, each by a handle of its own."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgpack
import pytest

from rl_plane.errors import InvalidRequest, InvalidWeights
from rl_plane.protocol.versions import TensorSpec
from rl_plane.publish import WeightPublisher
from rl_plane.publish.sources.module import ModuleSource
from rl_plane.transports.base import SenderContext
from rl_plane.transports.ipc import wire
from rl_plane.transports.ipc.in_place import MAX_TOGETHER, module_of, pack_modules
from rl_plane.transports.ipc.sender import IpcSender, build
from rl_plane.transports.packing import fill
from rl_plane.weights.manifest import Manifest
from tests.support.ipc_memory import (
    BOUND_S,
    descriptors,
    impostor,
    maps,
    memory,
    more_descriptors,
    pool,
    raw_receiver,
    receive,
)

if TYPE_CHECKING:
    from tests.conftest import Plane

if sys.platform != "linux":
    pytest.skip("memfd_create and abstract sockets", allow_module_level=True)

import torch

__all__ = ["pool"]

BUCKET_BYTES = 2048
START_S = 150.0


class Model(torch.nn.Module):  # type: ignore[misc]
    """Modules of two tensors, a bucket of a module that has none, and a tensor that is part of a larger memory."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(9 + number, 9, dtype=torch.bfloat16) for number in range(6)
        )
        self.register_buffer("none", torch.empty(0, 3))
        self.register_buffer("scale", torch.rand(64)[8:24])


def bytes_of(model: Model) -> dict[str, bytes]:
    return {
        name: one.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, one in model.state_dict().items()
    }


@contextmanager
def sender_of(receivers: int) -> Iterator[IpcSender]:
    sender = IpcSender(lambda: receivers, layout="tensors")
    try:
        yield sender
    finally:
        sender.destroy()


def publish(
    sender: IpcSender, model: Model, pool: ThreadPoolExecutor, receivers: int, all_lent: bool = True
) -> list[tuple[dict[str, bytes], str | None]]:
    """Publishes, and returns the tensors of each receiver."""
    taken = ModuleSource(model).take()
    manifest, digests = Manifest(sender.pack(taken.specs, BUCKET_BYTES)), dict[str, str]()
    transport = sender.open(manifest)
    arriving = [pool.submit(receive, transport) for _ in range(receivers)]
    lent = sender.lend(taken.held)
    assert (len(lent) == len(manifest.buckets)) == all_lent
    for number in fill(manifest, taken.tensors, sender.buffer, digests, lent):
        sender.send(number)
    sender.finish(digests)
    got = [one.result(BOUND_S) for one in arriving]
    assert {digest for _, digest in got} == {manifest.digested(digests).digest}
    return got


def test_receivers_read_the_tensors_where_they_are(pool: ThreadPoolExecutor) -> None:
    before = descriptors()
    model, other = Model(1).share_memory(), Model(2)
    places = [one.data_ptr() for one in model.state_dict().values()]
    with sender_of(3) as sender:
        for trained in (model, other, model):
            with torch.no_grad():
                for mine, new in zip(model.state_dict().values(), trained.state_dict().values(), strict=True):
                    mine.copy_(new)
            for got, _ in publish(sender, model, pool, 3):
                assert got == bytes_of(model)
            sender.close()
            assert maps() == [], "no buffers"
            assert [one.data_ptr() for one in model.state_dict().values()] == places
    assert more_descriptors(before) == []


def test_a_tensor_that_is_not_shared_is_packed_beside_the_lent_tensors(
    pool: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model(1)
    with sender_of(2) as sender:
        for shares in (False, True):
            if shares:
                model.layers[2:4].share_memory()
            for got, _ in publish(sender, model, pool, 2, all_lent=False):
                assert got == bytes_of(model)
            sender.close()
    assert [one.getMessage() for one in caplog.records if "packed" in one.getMessage()]


def test_without_anything_lent_all_is_packed(pool: ThreadPoolExecutor) -> None:
    """This covers a publication that does not wait, and an update that is opened and then abandoned."""
    model = Model(1).share_memory()
    taken = ModuleSource(model).take()
    with sender_of(1) as sender:
        manifest, digests = Manifest(sender.pack(taken.specs, BUCKET_BYTES)), dict[str, str]()
        sender.open(manifest)
        sender.close()
        arriving = pool.submit(receive, sender.open(manifest))
        for number in fill(manifest, taken.tensors, sender.buffer, digests):
            sender.send(number)
        sender.finish(digests)
        assert arriving.result(BOUND_S)[0] == bytes_of(model)


def test_the_sender_lends_no_tensor_if_torch_shares_by_names(pool: ThreadPoolExecutor) -> None:
    """A process that is killed would leave the files with these names."""
    model, how = Model(1).share_memory(), torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        with sender_of(1) as sender:
            for got, _ in publish(sender, model, pool, 1, all_lent=False):
                assert got == bytes_of(model)
    finally:
        torch.multiprocessing.set_sharing_strategy(how)


def test_a_receiver_can_read_the_tensors_and_nothing_else() -> None:
    model = Model(1).share_memory()
    taken = ModuleSource(model).take()
    with sender_of(1) as sender:
        transport = sender.open(Manifest(sender.pack(taken.specs, BUCKET_BYTES)))
        sender.lend(taken.held)
        with raw_receiver(transport) as (connection, given):
            assert len(given) == 1  # the manifest
            sender.send(0)
            turn, tensors = wire.read_packet(connection, MAX_TOGETHER)
            try:
                assert turn == {"bucket": 0, "starts": [8 * 4, *(0 for _ in tensors[1:])]}
                weight = model.layers[0].weight
                assert os.pread(tensors[1], weight.nbytes, 0) == bytes_of(model)["layers.0.weight"]
                for one in tensors:
                    with pytest.raises(OSError, match="Bad file descriptor"):
                        os.pwrite(one, b"x", 0)
                    with pytest.raises(OSError, match="Invalid argument"):
                        os.ftruncate(one, 1)
            finally:
                wire.close_all(tensors)


# ---- by modules ----


def test_tensors_of_a_module_are_announced_together() -> None:
    specs = {
        f"model.layers.{layer}.{part}": TensorSpec("U8", (size,))
        for layer in range(3)
        for part, size in (
            ("self_attn.q_proj.weight", 640),
            ("self_attn.k_proj.weight", 64),
            ("self_attn.v_proj.weight", 64),
            ("mlp.up_proj.weight", 1024),
            ("mlp.down_proj.weight", 1024),
            ("norm.weight", 64),
        )
    }
    for bucket_bytes in (1, 700, 800, 2048, 3000, 1 << 20):
        buckets = pack_modules(specs.items(), bucket_bytes)
        assert [placed.name for bucket in buckets for placed in bucket.tensors] == list(specs)
        assert all(bucket.nbytes <= bucket_bytes or len(bucket.tensors) == 1 for bucket in buckets)
        if bucket_bytes >= 2048:
            found = [{module_of(placed.name) for placed in bucket.tensors} for bucket in buckets]
            assert sum(map(len, found)) == len(set[str]().union(*found)), "none is in two buckets"
    many = {f"experts.{number}.w.weight": TensorSpec("U8", (1,)) for number in range(3 * MAX_TOGETHER)}
    assert max(len(bucket.tensors) for bucket in pack_modules(many.items(), 1 << 20)) == MAX_TOGETHER


def test_another_layout_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="layout is 'flat'") as caught:
        build(SenderContext(lambda op, body: {}, options={"layout": "flat"}))
    assert caught.value.facts["field"] == "options.layout"


# ---- senders that are none ----

SPECS = {"a.b": TensorSpec("U8", (100,)), "a.c": TensorSpec("U8", (0,)), "a.d": TensorSpec("U8", (50,))}
MANIFEST = Manifest(pack_modules(SPECS.items(), 1 << 20))
PACKED = msgpack.packb(MANIFEST.to_wire())
FIRST = {"protocol": wire.PROTOCOL, "manifest": len(PACKED), "buffer": 0, "cuda": False}


@contextmanager
def saying(turn: Any, given: Callable[[], list[int]]) -> Iterator[dict[str, Any]]:
    """Acts as a sender that gives no buffers, and sends this turn with these descriptors."""
    sent: list[int] = []
    send_fds = socket.send_fds

    def send(connection: Any, raw: Any, descriptors: Any, *more: Any) -> int:
        if raw == [msgpack.packb(turn)]:
            sent.extend(given())
            return send_fds(connection, raw, sent)
        return send_fds(connection, raw, descriptors, *more)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(socket, "send_fds", send)
        with impostor(FIRST, turn, {"end": None}, given=lambda: [memory(PACKED)]) as transport:
            yield transport
    wire.close_all(sent)


def pipe() -> int:
    reading, writing = os.pipe()
    os.close(writing)
    return reading


def one() -> list[int]:
    return [memory(bytes(range(100)), 0)]


def two(nbytes: int = 100) -> list[int]:
    return [*one(), memory(bytes(range(nbytes)), 0)]


def test_tensors_begin_anywhere_in_their_memory() -> None:
    turn = {"bucket": 0, "starts": [0, 7]}
    with saying(turn, two) as transport:
        assert receive(transport)[0] == {"a.b": bytes(range(100)), "a.c": b"", "a.d": bytes(range(7, 57))}


@pytest.mark.parametrize(
    ("turn", "given"),
    [
        ({"bucket": 0}, list),
        ({"bucket": 0, "starts": []}, two),
        ({"bucket": 0, "starts": [0]}, two),
        ({"bucket": 0, "starts": [0, 0, 0]}, two),
        ({"bucket": 0, "starts": [0, -1]}, two),
        ({"bucket": 0, "starts": [0, True]}, two),
        ({"bucket": 0, "starts": [0, 1 << 62]}, two),
        ({"bucket": 0, "starts": {"a.b": 0}}, two),
        ({"bucket": 0, "starts": [0, 0]}, one),
        ({"bucket": 0, "starts": [0, 51]}, two),
        ({"bucket": 0, "starts": [0, 0]}, lambda: two(49)),
        ({"bucket": 0, "starts": [0, 0]}, lambda: [*one(), pipe()]),
        ({"bucket": 1, "starts": [0, 0]}, two),
        ({"bucket": 0, "starts": [0, 0], "more": 1}, two),
        ({"end": None}, two),
    ],
)
def test_nothing_is_read_behind_the_end_of_what_is_given(turn: Any, given: Callable[[], list[int]]) -> None:
    with saying(turn, given) as transport, pytest.raises(InvalidWeights):
        receive(transport)


# ---- a fleet ----


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_an_engine_says_what_its_trainers_memory_says(plane: Plane) -> None:
    from tests.support.frontend_process import frontend
    from tests.support.hf_fleet import proven
    from tests.support.loaded_models import load
    from worker.testing.tiny_model import make_witness_model

    first = make_witness_model(plane.tmp / "weights" / "first", 1)
    spawned = plane.spawn(ready=False, engine="hf", model=first)
    models = [load(make_witness_model(plane.tmp / f"trained{seed}", seed)) for seed in (2, 3)]
    ids = [(await asyncio.to_thread(spawned.wait_ready, START_S)).instance_id]
    model = models[0].share_memory()
    options = {"layout": "tensors"}
    async with frontend(plane) as http:
        publisher = WeightPublisher(model, await plane.fleet(), transport="ipc", options=options)
        for seed in (2, 3):
            model.load_state_dict(models[seed - 2].state_dict())
            await publisher.publish_async(f"seed {seed}")
            await proven(http, ids, seed)
            assert maps() == [], "no buffers, at the trainer"
        await asyncio.to_thread(publisher.close)
    del publisher, model, models
    gc.collect()

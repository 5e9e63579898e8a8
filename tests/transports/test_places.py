"""Tensors that `ipc` and `nixl` bring straight into their places, hashed on the way."""

from __future__ import annotations

import gc
import random
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

import rl_plane.transports.ipc.receiver as ipc_receiving
from rl_plane.errors import EngineFailed, InvalidWeights, Unavailable
from rl_plane.protocol.versions import DigestAlgorithm, HostTensor, TensorSpec, tensor_digest
from rl_plane.transports.base import Delivery, TransportContext
from rl_plane.transports.ipc.receiver import IpcTransport
from rl_plane.transports.ipc.sender import IpcSender
from rl_plane.transports.nixl.reads import ReadLimits
from rl_plane.transports.nixl.sender import NixlSender
from rl_plane.transports.packing import fill
from rl_plane.weights.hashed_copy import PIECE_BYTES
from rl_plane.weights.manifest import Manifest
from tests.support.ipc_memory import BOUND_S
from worker.receive import staging
from worker.receive.staging import DigestingStream
from worker.receive.staging_area import StagingArea

if TYPE_CHECKING:
    from rl_plane.transports.nixl.puller import Puller
    from rl_plane.transports.nixl.receiver import NixlTransport

if sys.platform != "linux":
    pytest.skip("ipc needs Linux", allow_module_level=True)

import torch

needs_nixl = pytest.mark.engines("nixl")
pytestmark = pytest.mark.timeout(120)

SPECS = {
    "a.large": TensorSpec("U8", (2 * PIECE_BYTES + 77,)),
    "a.none": TensorSpec("F32", (0, 4)),
    **{f"b.{number}": TensorSpec("U8", (100 + 30 * number,)) for number in range(12)},
}
BUCKET_BYTES = 700
HOST = "127.0.0.1"
"""The address at which the senders listen."""


def tensors(seed: int) -> dict[str, HostTensor]:
    chance = random.Random(seed)
    return {
        name: HostTensor(spec, memoryview(bytearray(chance.randbytes(spec.nbytes))))
        for name, spec in SPECS.items()
    }


def placed(
    delivery: Delivery, area: StagingArea, algorithm: DigestAlgorithm | None = None
) -> tuple[dict[str, bytes], Mapping[str, str]]:
    """Receives into the area. Returns the bytes that are there, and the digests."""
    area.lay_out(delivery.specs)
    with closing(delivery):
        stream = DigestingStream(delivery, algorithm=algorithm, places=area.find)
        for _ in stream:
            pass
    return {name: bytes(area.place(name)) for name in delivery.specs}, stream.digests


def sent(seed: int, algorithm: DigestAlgorithm = "xxh3") -> tuple[dict[str, bytes], Mapping[str, str]]:
    given = tensors(seed)
    return (
        {name: bytes(one.data) for name, one in given.items()},
        {name: tensor_digest(one.data, algorithm) for name, one in given.items()},
    )


@pytest.fixture(params=[True, False], ids=["shared", "private"])
def area(request: pytest.FixtureRequest) -> Iterator[StagingArea]:
    with closing(StagingArea.for_specs(SPECS, shared=request.param)) as area:
        yield area


def nothing_else_copies_or_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """After this the stream can neither copy nor hash a tensor that has bytes."""
    for act in ("copy_hashed", "copy", "tensor_digest"):
        real = getattr(staging, act)

        def of_nothing(data: memoryview, *more: Any, real: Any = real) -> Any:
            assert not data.nbytes
            return real(data, *more)

        monkeypatch.setattr(staging, act, of_nothing)


# ---- ipc ----


@pytest.mark.parametrize("algorithm", ["xxh3", "blake3"])
def test_lent_tensors_are_read_into_their_places(
    area: StagingArea, algorithm: DigestAlgorithm, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {
        name: torch.frombuffer(one.data, dtype=torch.uint8).share_memory_()
        if one.data.nbytes
        else torch.empty(0, 4).share_memory_()
        for name, one in tensors(1).items()
    }
    nothing_else_copies_or_hashes(monkeypatch)
    monkeypatch.setattr(ipc_receiving, "host_memory", None)
    sender, digests = IpcSender(lambda: 1, layout="tensors"), dict[str, str]()
    manifest = Manifest(sender.pack(SPECS.items(), BUCKET_BYTES))
    with ThreadPoolExecutor(1) as pool:
        transport = sender.open(manifest)
        coming = pool.submit(
            lambda: placed(IpcTransport(TransportContext()).open(transport, "base"), area, algorithm)
        )
        lent = sender.lend(given)
        assert len(lent) == len(manifest.buckets)
        for number in fill(manifest, given.items(), sender.buffer, digests, lent, algorithm):
            sender.send(number)
        sender.finish(digests)
        assert coming.result(BOUND_S) == sent(1, algorithm)
    sender.destroy()


def test_a_lent_bucket_is_sent_before_it_is_hashed() -> None:
    """A receiver reads it meanwhile."""
    given, digests = tensors(1), dict[str, str]()
    manifest = Manifest(IpcSender(lambda: 1, layout="tensors").pack(SPECS.items(), BUCKET_BYTES))
    hashed = [
        len(digests)
        for _ in fill(manifest, given.items(), lambda _: memoryview(b""), digests, range(len(manifest.buckets)))
    ]
    before = [sum(len(bucket.tensors) for bucket in manifest.buckets[:number]) for number in range(len(hashed))]
    assert hashed == before
    assert digests == sent(1)[1]


# ---- nixl ----


@pytest.fixture
def puller() -> NixlTransport:
    from rl_plane.transports.nixl.receiver import NixlTransport

    return NixlTransport(TransportContext(), ReadLimits(300_000, 5))


@pytest.fixture
def sender() -> Iterator[NixlSender]:
    with NixlSender() as sender:
        yield sender


def offered(
    sender: NixlSender, given: Mapping[str, HostTensor], lent: bool = False, digest: bool = True
) -> dict[str, Any]:
    manifest = Manifest(sender.pack(SPECS.items(), BUCKET_BYTES))
    transport, digests = sender.open(manifest), dict[str, str]()
    numbers = sender.lend(given) if lent else ()
    list(fill(manifest, given.items(), sender.buffer, digests, numbers))
    sender.finish(digests if digest else None)
    return transport


def idle(transport: NixlTransport) -> Puller:
    """The puller of the next update, which is left idle."""
    one = transport.take(HOST)
    transport.give_back(one)
    return one


class Registrations:
    """The memory that an agent registers, as (address, bytes)."""

    def __init__(self, agent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held: list[tuple[int, int]] = []
        self.made = 0
        register, deregister = agent.register_memory, agent.deregister_memory
        known: dict[int, tuple[int, int]] = {}

        def registering(regions: Any, kind: str) -> Any:
            [(address, nbytes, _, _)] = regions
            done = register(regions, kind)
            known[id(done)] = address, nbytes
            self.held.append((address, nbytes))
            self.made += 1
            return done

        def deregistering(registered: Any) -> None:
            self.held.remove(known.pop(id(registered)))
            deregister(registered)

        monkeypatch.setattr(agent, "register_memory", registering)
        monkeypatch.setattr(agent, "deregister_memory", deregistering)


@needs_nixl
@pytest.mark.parametrize("algorithm", ["xxh3", "blake3"])
@pytest.mark.parametrize("lent", [True, False])
def test_pulled_tensors_are_read_into_their_places(
    sender: NixlSender,
    puller: NixlTransport,
    area: StagingArea,
    lent: bool,
    algorithm: DigestAlgorithm,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nothing_else_copies_or_hashes(monkeypatch)
    monkeypatch.setattr(
        "rl_plane.transports.nixl.puller.Puller.buffers", lambda *_: pytest.fail("it reads into buffers")
    )
    transport = offered(sender, tensors(1), lent, digest=False)
    assert placed(puller.open(transport, "base"), area, algorithm) == sent(1, algorithm)


@needs_nixl
def test_the_memory_of_an_area_is_registered_once_and_can_be_freed_between_updates(
    sender: NixlSender, puller: NixlTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    puller.init({"backend": "nixl"})
    registered = Registrations(idle(puller).agent, monkeypatch)
    area = StagingArea.for_specs(SPECS, shared=True)
    for seed in range(3):
        assert placed(puller.open(offered(sender, tensors(seed)), "base"), area) == sent(seed)
    assert registered.made == 1
    memory = weakref.ref(area.place("a.large").obj)
    area.close()
    gc.collect()
    assert memory() is None
    other = StagingArea.for_specs(SPECS, shared=True)
    assert placed(puller.open(offered(sender, tensors(3)), "base"), other) == sent(3)
    assert registered.made == 2
    assert len(registered.held) == 1
    other.close()


@needs_nixl
def test_places_that_can_not_be_registered_are_copied_into(
    sender: NixlSender,
    puller: NixlTransport,
    area: StagingArea,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    puller.init({"backend": "nixl"})
    agent = idle(puller).agent
    register, whole = agent.register_memory, memoryview(area.place("a.large").obj).nbytes

    def refusing(regions: Any, kind: str) -> Any:
        if regions[0][1] == whole:
            raise RuntimeError("NIXL_ERR_BACKEND")
        return register(regions, kind)

    monkeypatch.setattr(agent, "register_memory", refusing)
    assert placed(puller.open(offered(sender, tensors(1)), "base"), area) == sent(1)
    assert "can't be registered: NIXL_ERR_BACKEND" in caplog.text


@needs_nixl
def test_bytes_that_fail_their_digest_never_become_a_version(
    sender: NixlSender, puller: NixlTransport, area: StagingArea
) -> None:
    given = tensors(1)
    transport = offered(sender, given, lent=True)
    given["b.7"].data[3] ^= 1
    with pytest.raises(InvalidWeights, match=r"'b.7' has digest"):
        placed(puller.open(transport, "base"), area)
    given["b.7"].data[3] ^= 1
    assert placed(puller.open(transport, "base"), area) == sent(1)


@needs_nixl
def test_after_a_failed_read_the_agent_is_not_used_again_and_ends_before_its_memory(
    sender: NixlSender, puller: NixlTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes may arrive until the agent has ended."""
    puller.init({"backend": "nixl"})
    one = idle(puller)
    area = StagingArea.for_specs(SPECS, shared=True)
    memory = weakref.ref(area.place("a.large").obj)
    real = [one.agent.transfer]
    # The first read succeeds: if it fails, the bytes come over TCP.
    monkeypatch.setattr(one.agent, "transfer", lambda handle: real.pop()(handle) if real else "ERR")
    with pytest.raises(Unavailable, match="has withdrawn these weights: ERR"):
        placed(puller.open(offered(sender, tensors(1)), "base"), area)
    assert idle(puller) is not one
    area.close()
    gc.collect()
    assert memory() is not None
    monkeypatch.undo()
    agent = weakref.ref(one.agent)
    del one
    gc.collect()
    assert (agent(), memory()) == (None, None)
    area = StagingArea.for_specs(SPECS, shared=True)
    assert placed(puller.open(offered(sender, tensors(2)), "base"), area) == sent(2)
    area.close()


@needs_nixl
def test_a_pull_that_is_closed_while_it_reads_ends(
    sender: NixlSender, puller: NixlTransport, area: StagingArea, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read that never ends is under way."""
    puller.init({"backend": "nixl"})
    one, reading = idle(puller), threading.Event()

    def hanging(handle: Any) -> str:
        reading.set()
        return "PROC"

    monkeypatch.setattr(one.agent, "transfer", hanging)
    monkeypatch.setattr(one.agent, "check_xfer_state", hanging)
    delivery = puller.open(offered(sender, tensors(1)), "base")
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(placed, delivery, area)
        assert reading.wait(BOUND_S)
        delivery.close()
        with pytest.raises(EngineFailed, match="cancelled"):
            coming.result(BOUND_S)
    assert idle(puller) is not one

"""CUDA IPC without a GPU: the wire, the checks, the choice and the order of calls. `HostCuda` stands in for torch's
CUDA calls."""

from __future__ import annotations

import gc
import os
import select
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
import torch

import rl_plane.transports.ipc.receiver as receiving
from rl_plane.errors import InvalidWeights, PlaneError, Unavailable
from rl_plane.publish.sources.source_choice import as_source
from rl_plane.transports.base import SenderContext, TransportContext
from rl_plane.transports.ipc import cuda_buffers
from rl_plane.transports.ipc import wire as ipc_wire
from rl_plane.transports.ipc.cuda_buffers import COUNTERS, Handle
from rl_plane.transports.ipc.ipc_session import Bounds
from rl_plane.transports.ipc.receiver import IpcTransport
from rl_plane.transports.ipc.sender import IpcSender, build
from rl_plane.transports.ipc.torch_cuda import TorchCuda
from rl_plane.transports.packing import fill
from rl_plane.weights.manifest import Manifest, pack
from tests.support.host_cuda import GPUS, HostCuda, at_call
from tests.support.ipc_memory import (
    BOUND_S,
    descriptors,
    impostor,
    listening,
    memory,
    more_descriptors,
    pool,
    raw_receiver,
)

pytestmark = [pytest.mark.slow, pytest.mark.parallel]

__all__ = ["pool"]


@pytest.fixture
def cuda() -> Iterator[HostCuda]:
    before = descriptors()
    yield HostCuda()
    assert more_descriptors(before) == []


def tensors(seed: int = 1) -> dict[str, Any]:
    chance = torch.Generator().manual_seed(seed)
    return {f"layer.{number}": torch.rand(40 + 7 * number, generator=chance) for number in range(9)}


SOURCE = as_source(tensors()).take()
MANIFEST = Manifest(pack(SOURCE.specs, 700))
NEEDED = ipc_wire.buffer_bytes(MANIFEST)


def bytes_of(named: dict[str, Any]) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in named.items()}


def receive(
    cuda: HostCuda, transport: dict[str, Any], device: str = "cuda:0"
) -> tuple[dict[str, bytes], str | None]:
    delivery = IpcTransport(TransportContext(device=device), cuda).open(transport, "base")
    try:
        return {name: bytes(tensor.data) for name, tensor in delivery.tensors()}, delivery.digest
    finally:
        delivery.close()


def publish(sender: IpcSender, named: dict[str, Any]) -> str | None:
    digests: dict[str, str] = {}
    for number in fill(MANIFEST, named.items(), sender.buffer, digests):
        sender.send(number)
    sender.finish(digests)
    return MANIFEST.digested(digests).digest


@contextmanager
def sender_of(cuda: HostCuda, receivers: int, **options: Any) -> Iterator[tuple[IpcSender, dict[str, Any]]]:
    sender = IpcSender(lambda: receivers, on_gpus=lambda: True, cuda=cuda, **options)
    sender.device = "cuda:0"
    try:
        yield sender, sender.open(MANIFEST)
    finally:
        sender.destroy()


def test_each_rank_reads_from_its_own_gpu_and_all_is_given_back(cuda: HostCuda, pool: ThreadPoolExecutor) -> None:
    before = descriptors()
    sender = IpcSender(lambda: 3, on_gpus=lambda: True, cuda=cuda)
    sender.device = "cuda"
    for seed in range(2):
        cuda.calls.clear()
        transport = sender.open(MANIFEST)
        arriving = [pool.submit(receive, cuda, transport, device) for device in ("cuda:0", "cuda:1", "cuda:1")]
        digest = publish(sender, tensors(seed))
        for one in arriving:
            assert one.result(BOUND_S) == (bytes_of(tensors(seed)), digest)
        sender.close()
        assert cuda.calls.count("share") == cuda.calls.count("open") == cuda.calls.count("release") == 3 * 2
        assert cuda.calls[-2:] == ["collect", "empty"]  # after the last was given up
        assert cuda.held == []
    sender.destroy()
    assert more_descriptors(before) == []


def test_a_bucket_is_announced_after_its_copies_have_ended(cuda: HostCuda) -> None:
    with sender_of(cuda, 1) as (sender, transport):
        sender.buffer(0)
        with raw_receiver(transport) as (connection, _):
            ipc_wire.send_packet(connection, {"gpu": GPUS[0]})
            assert "handles" in ipc_wire.read_packet(connection)[0]
            announced: list[bool] = []
            cuda.before["synchronize"] = lambda: announced.append(has_come(connection))
            sender.send(0)
            assert announced == [False]
            assert ipc_wire.read_packet(connection)[0] == {"bucket": 0}


def has_come(connection: socket.socket) -> bool:
    """Returns whether a packet can be read."""
    return bool(select.select([connection], [], [], 0)[0])


def test_a_receiver_that_dies_is_counted_for(cuda: HostCuda, pool: ThreadPoolExecutor) -> None:
    with sender_of(cuda, 2) as (sender, transport):
        arriving = pool.submit(receive, cuda, transport)
        with raw_receiver(transport) as (connection, _):
            ipc_wire.send_packet(connection, {"gpu": GPUS[1]})
            handles = ipc_wire.read_packet(connection)[0]["handles"]
            assert [Handle.from_wire(one, NEEDED).nbytes for one in handles] == [NEEDED, NEEDED]
        digest = publish(sender, tensors())
        assert arriving.result(BOUND_S) == (bytes_of(tensors()), digest)
    assert cuda.held == []
    assert cuda.calls[-2:] == ["collect", "empty"]


def test_the_sender_frees_memory_after_its_readers_have_released_it(
    cuda: HostCuda, pool: ThreadPoolExecutor
) -> None:
    """CUDA needs this order, also for an update that ends early."""
    with sender_of(cuda, 1) as (sender, transport):
        delivery = IpcTransport(TransportContext(device="cuda:0"), cuda).open(transport, "base")
        taking = pool.submit(list, delivery.tensors())
        sender.buffer(0)
        sender.send(0)
        sender.close()
        with pytest.raises(Unavailable, match="gone"):
            taking.result(BOUND_S)
        delivery.close()
    assert cuda.calls[-1] == "empty"
    assert cuda.calls.index("empty") > max(i for i, call in enumerate(cuda.calls) if call == "release")
    assert cuda.held == []


def test_a_receiver_that_hangs_delays_the_end_for_a_bounded_time(cuda: HostCuda) -> None:
    hasty = Bounds(give_up_s=0.1)
    with sender_of(cuda, 1, bounds=hasty) as (sender, transport), raw_receiver(transport) as (connection, _):
        ipc_wire.send_packet(connection, {"gpu": GPUS[0]})
        assert "handles" in ipc_wire.read_packet(connection)[0]
        sender.close()
        assert cuda.calls[-2:] == ["collect", "empty"]
        assert cuda.held == [0, 1]  # torch keeps the memory until it continues and releases it


def test_a_gpu_that_the_trainer_does_not_see_is_refused(cuda: HostCuda) -> None:
    elsewhere = HostCuda(("GPU-elsewhere",))
    with (
        sender_of(cuda, 1) as (_, transport),
        pytest.raises(Unavailable, match=r"does not see the GPU GPU-elsewhere.*CUDA_VISIBLE_DEVICES"),
    ):
        receive(elsewhere, transport)
    with sender_of(cuda, 1) as (_, transport), pytest.raises(Unavailable, match="on the CPU"):
        receive(cuda, transport, "cpu")


@pytest.mark.parametrize(("call", "number"), [("open", 0), ("open", 1), ("pinned", 0)])
def test_shares_that_were_not_opened_are_given_up(
    cuda: HostCuda, pool: ThreadPoolExecutor, call: str, number: int
) -> None:
    """The receiver releases the shares before it reports that they are closed. The error, which the test keeps, holds
    none of them."""
    cuda.before[call] = at_call(number, RuntimeError("CUDA error"))
    with listening() as (listener, transport):
        arriving = pool.submit(receive, cuda, transport)
        connection, _ = listener.accept()
        with connection:
            manifest = memory(PACKED)
            assert ipc_wire.read_packet(connection)[0]["secret"] == transport["secret"]
            ipc_wire.send_packet(connection, FIRST, [manifest])
            os.close(manifest)
            assert ipc_wire.read_packet(connection)[0] == {"gpu": GPUS[0]}
            shared = [cuda_buffers.share(cuda, torch.zeros(NEEDED, dtype=torch.uint8)) for _ in range(2)]
            reported: list[bool] = []
            cuda.before["release"] = lambda: reported.append(has_come(connection))
            ipc_wire.send_packet(connection, {"handles": [one.to_wire() for one in shared]})
            with pytest.raises(Unavailable, match="can't be opened"):
                arriving.result(BOUND_S)
            assert reported == [False, False]
            assert cuda.held == []


def test_shares_that_no_receiver_knows_are_released(cuda: HostCuda, pool: ThreadPoolExecutor) -> None:
    """The sender continues with the other receivers."""
    cuda.before["share"] = at_call(1, RuntimeError("CUDA error: out of memory"))
    with sender_of(cuda, 2) as (sender, transport):
        with pytest.raises(Unavailable, match="out of memory"):
            receive(cuda, transport)
        assert cuda.held == []
        arriving = pool.submit(receive, cuda, transport)
        digest = publish(sender, tensors())
        assert arriving.result(BOUND_S) == (bytes_of(tensors()), digest)


@pytest.mark.parametrize("gpu", [[], {}, None, 1])
def test_a_receiver_that_names_no_gpu_is_refused(cuda: HostCuda, pool: ThreadPoolExecutor, gpu: Any) -> None:
    with sender_of(cuda, 2) as (sender, transport):
        with raw_receiver(transport) as (connection, _):
            ipc_wire.send_packet(connection, {"gpu": gpu})
            assert "does not see the GPU" in ipc_wire.read_packet(connection)[0]["error"]
        arriving = pool.submit(receive, cuda, transport)
        digest = publish(sender, tensors())
        assert arriving.result(BOUND_S) == (bytes_of(tensors()), digest)


def test_a_trainer_that_can_not_be_watched_is_an_error(cuda: HostCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer in another PID namespace has no process id here."""
    monkeypatch.setattr(receiving, "peer_pid", lambda connection: 0)
    with sender_of(cuda, 1) as (_, transport), pytest.raises(Unavailable, match="can't be watched") as refused:
        receive(cuda, transport)
    assert "PID namespace" in refused.value.facts["fix"]
    assert cuda.held == []


# ---- tensors where they are ----


@contextmanager
def own_sender_of(cuda: HostCuda, receivers: int) -> Iterator[tuple[IpcSender, dict[str, Any]]]:
    """Makes a sender that lends all of its tensors."""
    with sender_of(cuda, receivers, layout="tensors") as made:
        yield made


def publish_own(sender: IpcSender, named: dict[str, Any]) -> str | None:
    digests: dict[str, str] = {}
    lent = sender.lend(named)
    assert set(lent) == set(range(len(MANIFEST.buckets)))
    for number in fill(MANIFEST, named.items(), sender.buffer, digests, lent):
        sender.send(number)
    sender.finish(digests)
    return MANIFEST.digested(digests).digest


def test_each_tensor_is_shared_with_each_rank_on_its_own_gpu(cuda: HostCuda, pool: ThreadPoolExecutor) -> None:
    """A tensor may be a part of a larger allocation. torch's notes of a share don't stay with the trainer's weights."""
    whole = torch.cat([torch.zeros(3), *tensors().values()])
    lengths = [3, *(one.numel() for one in tensors().values())]
    named = dict(zip(tensors(), whole.split(lengths)[1:], strict=True))
    place = whole.data_ptr()
    with own_sender_of(cuda, 3) as (sender, transport):
        arriving = [pool.submit(receive, cuda, transport, device) for device in ("cuda:0", "cuda:1", "cuda:1")]
        digest = publish_own(sender, named)
        for one in arriving:
            assert one.result(BOUND_S) == (bytes_of(tensors()), digest)
    for what in ("share", "open", "release"):
        assert cuda.calls.count(what) == 3 * len(named), what
    assert cuda.held == []
    assert cuda.calls[-2:] == ["collect", "empty"]
    assert whole.data_ptr() == place
    assert all(storage is not whole.untyped_storage() for storage in cuda.shared)


@pytest.mark.parametrize("opens", [0, 1])
def test_a_receiver_of_tensors_that_dies_is_counted_for(
    cuda: HostCuda, pool: ThreadPoolExecutor, opens: int
) -> None:
    """The sender releases all shares that it has sent, even if the receiver has taken the first bucket."""
    with own_sender_of(cuda, 2) as (sender, transport):
        arriving = pool.submit(receive, cuda, transport)
        dying = pool.submit(_dies_after, cuda, transport, opens)
        digest = publish_own(sender, tensors())
        dying.result(BOUND_S)
        assert arriving.result(BOUND_S) == (bytes_of(tensors()), digest)
    assert cuda.held == []


def _dies_after(cuda: HostCuda, transport: dict[str, Any], turns: int) -> None:
    with raw_receiver(transport) as (connection, _):
        ipc_wire.send_packet(connection, {"gpu": GPUS[1]})
        assert ipc_wire.read_packet(connection)[0] == {"handles": []}
        for number in range(turns + 1):
            turn = ipc_wire.read_packet(connection)[0]
            assert (turn["bucket"], len(turn["handles"])) == (number, len(MANIFEST.buckets[number].tensors))
            if number < turns:
                for wire in turn["handles"]:
                    handle = Handle.from_wire(wire, 1, 0)
                    cuda.release(handle.counter, handle.counter_offset)
                ipc_wire.send_packet(connection, {"taken": number})


def test_tensors_that_can_not_be_opened_are_given_up_and_said_to_be(
    cuda: HostCuda, pool: ThreadPoolExecutor
) -> None:
    cuda.before["open"] = at_call(3, RuntimeError("CUDA error: invalid resource handle"))
    with own_sender_of(cuda, 1) as (sender, transport):
        arriving = pool.submit(receive, cuda, transport)
        with pytest.raises(Unavailable, match="no receiver is left"):
            publish_own(sender, tensors())
        with pytest.raises(Unavailable, match="invalid resource handle"):
            arriving.result(BOUND_S)
        del arriving
        gc.collect()
    assert cuda.held == []


def test_a_share_that_fails_is_reported_to_its_receiver(cuda: HostCuda, pool: ThreadPoolExecutor) -> None:
    cuda.before["share"] = at_call(1, RuntimeError("CUDA error: out of memory"))
    with own_sender_of(cuda, 1) as (sender, transport):
        arriving = pool.submit(receive, cuda, transport)
        with pytest.raises(Unavailable, match="no receiver is left"):
            publish_own(sender, tensors())
        with pytest.raises(Unavailable, match="out of memory"):
            arriving.result(BOUND_S)
    assert cuda.held == []


def test_both_sides_hear_what_fails_on_the_senders_thread(
    cuda: HostCuda, pool: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    """The error may be of any type: torch's BufferError is not a RuntimeError."""
    threads: list[str] = []

    def refuse() -> None:
        threads.append(threading.current_thread().name)
        raise BufferError("Can't export tensors on a different CUDA device index")

    cuda.before["alias"] = refuse
    with own_sender_of(cuda, 1) as (sender, transport):
        sender.lend(tensors())
        sender.send(0)  # before any receiver has come: its handles are made when one does
        with pytest.raises(Unavailable, match="refused: Can't export tensors"):
            pool.submit(receive, cuda, transport).result(BOUND_S)
        with pytest.raises(Unavailable, match=r"no receiver is left.*Can't export tensors"):
            sender.send(1)
    assert threads == ["ipc sender"]
    assert "BufferError" in caplog.text
    assert cuda.held == []


def test_both_sides_hear_why_a_gpu_gets_no_buffers(cuda: HostCuda, pool: ThreadPoolExecutor) -> None:
    cuda.before["share"] = at_call(0, BufferError("no such buffer"))
    with sender_of(cuda, 1) as (sender, transport):
        with pytest.raises(Unavailable, match="refused: no such buffer"):
            pool.submit(receive, cuda, transport).result(BOUND_S)
        with pytest.raises(Unavailable, match=r"no receiver is left.*no such buffer"):
            sender.send(0)


def test_the_gpu_of_a_tensor_is_current_while_it_gets_an_alias(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch exports a tensor only while its GPU is current."""
    current: list[Any] = []
    export = torch.from_dlpack

    @contextmanager
    def device_of(tensor: Any) -> Iterator[None]:
        current.append(tensor)
        yield
        current.clear()

    def from_dlpack(whole: Any) -> Any:
        assert [one.data_ptr() for one in current] == [whole.data_ptr()]
        return export(whole)

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(torch, "from_dlpack", from_dlpack)
    tensor = torch.arange(3.0)
    alias = TorchCuda().alias(tensor)
    assert (alias.data_ptr(), alias.nbytes) == (tensor.data_ptr(), tensor.nbytes)


@pytest.mark.parametrize(("nbytes", "start", "fits"), [(8, 0, True), (8, 4, True), (8, 5, False), (3, 0, False)])
def test_a_tensor_lies_within_what_its_handle_opens(nbytes: int, start: int, fits: bool) -> None:
    wire = instead(1, nbytes)
    if fits:
        assert Handle.from_wire(wire, 4, start).nbytes == nbytes
    else:
        with pytest.raises(ValueError, match="handle"):
            Handle.from_wire(wire, 4, start)


# ---- handles of another process ----

GOOD: list[Any] = [b"m" * 66, NEEDED, 512, b"/torch_1_2_3", 7, bytes(64), True]


def instead(place: int, value: Any) -> list[Any]:
    return [*GOOD[:place], value, *GOOD[place + 1 :]]


def test_a_handle_survives_its_wire_form() -> None:
    assert Handle.from_wire(GOOD, NEEDED).to_wire() == GOOD


@pytest.mark.parametrize(
    "wire",
    [
        None,
        {},
        [],
        GOOD[:6],
        [*GOOD, 0],
        *(instead(place, value) for place in range(7) for value in (None, "x", 1.0)),
        instead(0, b""),
        instead(0, b"x" * 1025),
        instead(1, NEEDED - 1),
        instead(1, NEEDED + 1),
        instead(1, True),
        instead(2, -512),
        instead(2, 1),
        instead(2, 1 << 62),
        instead(3, b"/torch_1_2_3/../../etc/passwd"),
        instead(3, b"/dev/shm/x"),
        instead(4, -1),
        instead(4, COUNTERS),
        instead(5, bytes(63)),
    ],
)
def test_a_value_that_is_no_handle_is_refused(wire: Any) -> None:
    with pytest.raises(ValueError, match="handle"):
        Handle.from_wire(wire, NEEDED)


PACKED = msgpack.packb(MANIFEST.to_wire())
FIRST = {"protocol": ipc_wire.PROTOCOL, "manifest": len(PACKED), "buffer": NEEDED, "cuda": True}


@pytest.mark.parametrize(
    ("first", "handles"),
    [
        (FIRST, None),
        (FIRST, [GOOD]),
        (FIRST, [GOOD, instead(4, COUNTERS)]),
        ({**FIRST, "buffer": NEEDED + 64}, [GOOD, GOOD]),
    ],
)
def test_no_handle_is_opened_before_all_are_right(cuda: HostCuda, first: dict[str, Any], handles: Any) -> None:
    before = descriptors()
    refused = pytest.raises(InvalidWeights, match="not a sender of ours")
    with impostor(first, {"handles": handles}, given=lambda: [memory(PACKED)]) as transport, refused:
        receive(cuda, transport)
    assert cuda.calls == []
    assert more_descriptors(before) == []


# ---- a trainer that is killed ----


@pytest.mark.parametrize("lives", [True, False])
def test_the_counters_of_a_trainer_that_was_killed_are_removed(tmp_path: Path, lives: bool) -> None:
    pid = os.fork()
    if pid == 0:
        threading.Event().wait()
    pidfd = os.pidfd_open(pid)
    mine, others = f"torch_{pid}_2_3", f"torch_{pid + 1}_2_3"
    handles = [Handle(b"m", 1, 0, f"/{name}".encode(), 0, b"", False) for name in (mine, others)]
    for name in (mine, others):
        (tmp_path / name).touch()
    try:
        if not lives:
            os.kill(pid, 9)
        cuda_buffers.remove_counters(handles, pid, pidfd, shm=tmp_path, ends_s=0.05 if lives else BOUND_S)
        assert {one.name for one in tmp_path.iterdir()} == ({mine, others} if lives else {others})
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        os.close(pidfd)


# ---- the choice ----


@pytest.mark.parametrize(
    ("device", "engines", "on_gpu"),
    [
        ("cuda:0", ("cuda:0", "cuda"), True),
        ("cuda:0", ("cuda:0", "cpu"), False),
        ("cuda:0", ("cuda:0", None), False),
        ("cpu", ("cuda:0", "cuda:1"), False),
    ],
)
def test_the_weights_stay_on_the_gpu_if_all_engines_are_on_gpus(
    cuda: HostCuda, device: str, engines: tuple[str | None, ...], on_gpu: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def run(op: str, body: dict[str, Any]) -> dict[str, Any]:
        facts: dict[str, Callable[[str | None], dict[str, Any]]] = {
            "workers": lambda _: {"world_size": 1, "transports": ["ipc"]},
            "describe": lambda engine: {} if engine is None else {"device": engine},
        }
        return {"workers": [facts[op](engine) for engine in engines]}

    sender = build(SenderContext(run), cuda)
    sender.device = device
    with raw_receiver(sender.open(MANIFEST)) as (_, given):
        assert len(given) == (1 if on_gpu else 3)
    sender.open(MANIFEST)
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == (1 if device == "cuda:0" and not on_gpu else 0), "once"
    assert all("cuda:0 go by host memory" in one for one in said)
    sender.destroy()


@pytest.mark.parametrize("lies", ["cuda:1", "cpu"])
def test_a_gathered_tensor_is_on_this_ranks_gpu(
    cuda: HostCuda, monkeypatch: pytest.MonkeyPatch, lies: str
) -> None:
    """A mesh does not name a GPU's number, so the rank's current GPU is taken. An offloaded tensor lies on `cpu`."""
    from rl_plane.publish.sources.torch_tensors import device_of

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    sharded = SimpleNamespace(device=torch.device(lies), device_mesh=SimpleNamespace(device_type="cuda"))
    assert cuda.uuid_of(device_of(sharded)) == GPUS[1]


def test_a_source_knows_where_its_tensors_are() -> None:
    there = SimpleNamespace(device="cuda:1", dtype=torch.float32, shape=(2,))
    assert SOURCE.device == "cpu"
    assert TorchCuda().uuid_of(SOURCE.device) is None
    from rl_plane.publish.sources.torch_tensors import device_of

    assert device_of(there) == "cuda:1"


def test_errors_of_torch_are_ours(cuda: HostCuda) -> None:
    cuda.before["open"] = at_call(0, RuntimeError("CUDA error: invalid resource handle"))
    before = descriptors()
    with sender_of(cuda, 1) as (_, transport), pytest.raises(PlaneError, match="invalid resource handle"):
        receive(cuda, transport)
    assert more_descriptors(before) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_bench_says_what_it_needs() -> None:
    from bench import cuda_ipc

    with pytest.raises(SystemExit, match="needs a GPU"):
        cuda_ipc.main([])

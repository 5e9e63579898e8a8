"""The `nixl` transport: weights pulled out of the memory of a trainer in a process of its own, with deaths."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import rl_plane._util.framing as frames
from rl_plane.errors import (
    InvalidRequest,
    InvalidWeights,
    NotAdmitted,
    PlaneError,
    Unavailable,
    Unsupported,
    UpdateAborted,
)
from rl_plane.protocol.versions import HostTensor, TensorSpec
from rl_plane.transports.base import KeepingSender, LendingSender, TransportContext
from rl_plane.transports.nixl import wire
from rl_plane.transports.nixl.sender import NixlSender
from rl_plane.transports.packing import fill
from rl_plane.transports.registry import is_passed_over
from rl_plane.weights.manifest import Manifest, pack
from tests.support.fleet_updates import all_serve, generated, states
from tests.support.healing import until_behind, until_open
from tests.support.ipc_trainer import Trainer as IpcTrainer
from tests.support.nixl_trainer import Trainer
from tests.support.nixl_trainers import HEAL_S, trainer, update_of
from worker.engines.fake.adapter import fake_token, make_fake_adapter, make_fake_model
from worker.receive.staging import adapter_digest, model_digest

__all__ = ["trainer"]

if TYPE_CHECKING:
    from rl_plane.client import RlClient
    from rl_plane.transports.nixl.receiver import NixlTransport
    from tests.conftest import Plane, Spawned

needs_nixl = pytest.mark.engines("nixl")

pytestmark = pytest.mark.timeout(400)

BOUND_S = 30.0


SPECS = {f"layer.{number}": TensorSpec("U8", (100 + 30 * number,)) for number in range(12)}
CONFIG = b'{"r": 4}'
MANIFEST = Manifest(pack(SPECS.items(), 512))
TOTAL_BYTES = sum(bucket.nbytes for bucket in MANIFEST.buckets)


def tensors(seed: int = 1) -> dict[str, HostTensor]:
    chance = random.Random(seed)
    return {name: HostTensor(spec, memoryview(chance.randbytes(spec.nbytes))) for name, spec in SPECS.items()}


def data_of(named: dict[str, HostTensor]) -> dict[str, bytes]:
    return {name: bytes(tensor.data) for name, tensor in named.items()}


def offer(sender: NixlSender, seed: int, manifest: Manifest = MANIFEST) -> dict[str, Any]:
    transport, digests = sender.open(manifest), dict[str, str]()
    for number in fill(manifest, tensors(seed).items(), sender.buffer, digests):
        sender.send(number)
    sender.finish(digests)
    return transport


def pull(
    puller: NixlTransport, transport: dict[str, Any], kind: Any = "base"
) -> tuple[dict[str, bytes], str | None]:
    delivery = puller.open(transport, kind)
    try:
        return {name: bytes(tensor.data) for name, tensor in delivery.tensors()}, delivery.digest
    finally:
        delivery.close()
        delivery.close()


@pytest.fixture
def puller() -> NixlTransport:
    from rl_plane.transports.nixl.receiver import NixlTransport

    return NixlTransport(TransportContext())


@pytest.fixture
def sender() -> Iterator[NixlSender]:
    with NixlSender() as sender:
        yield sender


# ---- one sender and its receivers ----


@contextlib.contextmanager
def registered_memory() -> Iterator[list[int]]:
    """The bytes of each memory that is allocated for nixl until the end."""
    made: list[int] = []
    init = wire.RegisteredMemory.__init__

    def counted(self: wire.RegisteredMemory, agent: Any, nbytes: int) -> None:
        made.append(nbytes)
        init(self, agent, nbytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire.RegisteredMemory, "__init__", counted)
        yield made


@needs_nixl
def test_what_is_offered_is_pulled_and_memory_is_registered_once(
    sender: NixlSender, puller: NixlTransport
) -> None:
    assert isinstance(sender, KeepingSender)
    with registered_memory() as registered:
        for seed in range(5):
            transport = offer(sender, seed)
            for _ in range(2):
                assert pull(puller, transport) == (data_of(tensors(seed)), _digest(seed))
            sender.keep()
            sender.close()
    # Two versions at the trainer, two buckets at the receiver.
    total, largest = (
        sum(bucket.nbytes for bucket in MANIFEST.buckets),
        max(bucket.nbytes for bucket in MANIFEST.buckets),
    )
    assert sorted(registered) == [largest, largest, total, total]


def _digest(seed: int) -> str | None:
    digests: dict[str, str] = {}
    places = [memoryview(bytearray(bucket.nbytes)) for bucket in MANIFEST.buckets]
    list(fill(MANIFEST, tensors(seed).items(), places.__getitem__, digests))
    return MANIFEST.digested(digests).digest


@needs_nixl
def test_a_kept_version_stays_until_the_next_is_kept(sender: NixlSender, puller: NixlTransport) -> None:
    def gone(transport: dict[str, Any]) -> None:
        with pytest.raises(InvalidRequest, match="source_gone"):
            pull(puller, transport)

    first = offer(sender, 1)
    sender.keep()
    failed = offer(sender, 2)
    assert pull(puller, failed)[0] == data_of(tensors(2))
    sender.close()  # not committed
    gone(failed)
    adapter = offer(sender, 3)
    sender.keep("a")
    assert pull(puller, first)[0] == data_of(tensors(1))
    second = offer(sender, 4)
    assert pull(puller, first)[0] == data_of(tensors(1))
    sender.keep()
    gone(first)
    assert pull(puller, adapter)[0] == data_of(tensors(3))
    assert pull(puller, second)[0] == data_of(tensors(4))
    sender.destroy()
    gone(second)
    with pytest.raises(InvalidRequest, match="destroyed"):
        sender.open(Manifest(pack(SPECS.items(), 1 << 20)))


def lent_offer(sender: NixlSender, given: dict[str, HostTensor], packed: tuple[str, ...] = ()) -> dict[str, Any]:
    """Offers tensors in place, except for those that must be packed."""
    transport, digests = sender.open(MANIFEST), dict[str, str]()
    lent = sender.lend({name: tensor for name, tensor in given.items() if name not in packed})
    for number in fill(MANIFEST, given.items(), sender.buffer, digests, lent):
        sender.send(number)
    sender.finish(digests)
    return transport


def writable(seed: int) -> dict[str, HostTensor]:
    return {name: HostTensor(one.spec, memoryview(bytearray(one.data))) for name, one in tensors(seed).items()}


def change(given: dict[str, HostTensor], seed: int) -> None:
    """Changes the tensors in place, like a trainer's step."""
    for name, one in tensors(seed).items():
        given[name].data[:] = one.data


@needs_nixl
@pytest.mark.parametrize("packed", [(), ("layer.3",)])
def test_what_is_lent_is_pulled_from_where_it_lies_and_copied_once_it_is_committed(
    sender: NixlSender, puller: NixlTransport, packed: tuple[str, ...]
) -> None:
    assert isinstance(sender, LendingSender)
    made: list[int] = []
    given, kept = writable(1), None
    own = given["layer.0"].data
    for seed in range(1, 4):
        change(given, seed)
        if kept is not None:
            assert pull(puller, kept) == (data_of(tensors(seed - 1)), _digest(seed - 1)), "of the version before"
        with registered_memory() as offering:
            transport = lent_offer(sender, given, packed)
        own[0] ^= 1
        assert pull(puller, transport)[0]["layer.0"] == bytes(own), "it is the trainer's memory that is read"
        own[0] ^= 1
        assert pull(puller, transport) == (data_of(tensors(seed)), _digest(seed))
        with registered_memory() as keeping:
            sender.keep()
        made += [*offering, *keeping]
        sender.close()
        kept = transport
    change(given, 9)
    assert kept is not None
    assert pull(puller, kept) == (data_of(tensors(3)), _digest(3))
    total = sum(bucket.nbytes for bucket in MANIFEST.buckets)
    assert [nbytes for nbytes in made if nbytes == total] == [total], "one copy, used again"


@needs_nixl
def test_a_pull_in_the_middle_of_which_a_version_is_committed_begins_again(
    sender: NixlSender, puller: NixlTransport
) -> None:
    given = writable(1)
    transport = lent_offer(sender, given)
    delivery = puller.open(transport, "base")
    arriving = delivery.tensors()
    next(arriving)
    sender.keep()
    with pytest.raises(Unavailable, match="withdrawn"):
        list(arriving)
    delivery.close()
    change(given, 2)
    assert pull(puller, transport)[0] == data_of(tensors(1))


@needs_nixl
def test_without_a_copy_a_version_is_not_refetchable(puller: NixlTransport) -> None:
    with NixlSender(keep_copy=False) as sender:
        for lent in (True, False):
            transport = lent_offer(sender, writable(1)) if lent else offer(sender, 1)
            delivery = puller.open(transport, "base")
            assert not delivery.refetchable
            delivery.close()
        assert pull(puller, transport)[0] == data_of(tensors(1))
        sender.keep()
        sender.close()
        with pytest.raises(InvalidRequest, match="source_gone"):
            pull(puller, transport)
        assert sender.own_bytes == 0


@needs_nixl
def test_memory_that_can_not_be_registered_is_copied(
    sender: NixlSender, puller: NixlTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_only = {name: HostTensor(one.spec, one.data.toreadonly()) for name, one in writable(1).items()}
    assert pull(puller, lent_offer(sender, read_only))[0] == data_of(tensors(1))
    agent = sender._agent

    def refused(*args: Any) -> Any:
        raise RuntimeError("NIXL_ERR_BACKEND")

    offer(sender, 1)  # its memory is there
    sender.keep()
    offer(sender, 2)
    with monkeypatch.context() as patched:
        patched.setattr(agent, "register_memory", refused)
        assert pull(puller, lent_offer(sender, writable(3)))[0] == data_of(tensors(3))


@contextmanager
def asking(transport: dict[str, Any]) -> Iterator[tuple[socket.socket, dict[str, Any]]]:
    """Asks a sender as a receiver does. Yields the connection and the answer."""
    with socket.create_connection((transport["host"], transport["port"]), BOUND_S) as connection:
        frames.send_frame(connection, {"protocol": wire.PROTOCOL, "secret": transport["secret"]})
        yield connection, frames.read_frame(connection)


@needs_nixl
def test_only_what_the_manifest_names_can_be_read(sender: NixlSender) -> None:
    addresses = {}
    for seed in (1, 2):
        transport = offer(sender, seed)
        sender.keep(str(seed))
        with asking(transport) as (_, addresses[seed]):
            pass
    agent = wire.make_agent("reader", "127.0.0.1")
    here = wire.RegisteredMemory(agent, 64)
    source = agent.add_remote_agent(addresses[1]["metadata"])

    def prepared(address: int) -> None:
        descriptors = [agent.get_xfer_descs([(one, 64, 0)], "DRAM") for one in (here.address, address)]
        agent.initialize_xfer("READ", *descriptors, source).release()

    prepared(addresses[1]["places"][0][0][0])
    for elsewhere in (addresses[2]["places"][0][0][0], id(SPECS)):
        with pytest.raises(Exception, match="NIXL_ERR_NOT_FOUND"):
            prepared(elsewhere)


@needs_nixl
async def test_a_source_that_ucx_reaches_over_tcp_only_is_read_without_ucx(
    tmp_path: Path, trainer: Callable[..., Trainer], puller: NixlTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine can say that UCX reaches it, and be wrong: the kernel may forbid to read another process's memory."""
    source = trainer(UCX_TLS="tcp")
    for seed, believes in ((0, False), (1, True), (2, True)):
        directory = make_fake_model(tmp_path / str(seed), seed)
        transport = await source.offers(directory)
        with monkeypatch.context() as patched:
            if believes:
                patched.setattr("rl_plane.transports.nixl.channel.in_reach", lambda _: True)
            _, digest = await asyncio.to_thread(pull, puller, transport)
        assert digest == model_digest(directory)
    await source.keeps()  # the source lives


@needs_nixl
def test_ucx_reads_within_one_machine_and_by_rdma(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    own = wire.reach()
    assert wire.in_reach(own)
    assert not wire.in_reach({**own, "machine": "another one", "rdma": False})
    for wrong in (None, {}, {"machine": None}, {"machine": ""}, "rdma"):
        assert not wire.in_reach(wrong)
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    assert wire.reach() == {"machine": "", "rdma": False}
    assert not wire.in_reach(own)


@needs_nixl
def test_weights_that_are_replaced_meanwhile_end_the_pull(sender: NixlSender, puller: NixlTransport) -> None:
    delivery = puller.open(offer(sender, 1), "base")
    arriving = delivery.tensors()
    next(arriving)
    offer(sender, 2)
    with pytest.raises(Unavailable, match="withdrawn"):
        list(arriving)
    delivery.close()
    assert pull(puller, offer(sender, 3))[0] == data_of(tensors(3))


@needs_nixl
@pytest.mark.parametrize("leaves", [True, False])
def test_memory_is_used_again_once_its_pullers_have_left(leaves: bool) -> None:
    with NixlSender(leave_s=BOUND_S if leaves else 0.1) as sender:
        first = offer(sender, 1)
        sender.keep()
        with asking(first) as (puller, _):
            offer(sender, 2)
            keeping = threading.Thread(target=sender.keep)
            keeping.start()
            assert puller.recv(1) == b"", "it is told"
            if leaves:
                assert keeping.is_alive()
                puller.close()
            keeping.join(BOUND_S)
            assert not keeping.is_alive()
        offer(sender, 3)
        assert sender.own_bytes == 2 * TOTAL_BYTES


@needs_nixl
def test_memory_that_no_next_version_fits_into_goes(sender: NixlSender) -> None:
    for seed in (1, 2, 3):  # which takes the second one's memory
        offer(sender, seed)
        if seed == 1:
            sender.keep()
        else:
            sender.close()
    assert sender.own_bytes == 2 * TOTAL_BYTES, "one version, and room for the next"
    for size in range(1, 4):  # deltas, say, which are not committed
        sender.open(Manifest(pack({"a": TensorSpec("U8", (size * 1000,))}.items())))
        sender.close()
    assert sender.own_bytes == 2 * TOTAL_BYTES


def once(act: Callable[..., Any], error: Exception, failed: list[Exception]) -> Callable[..., Any]:
    """Wraps `act` so that its first call fails."""

    def failing(self: Any, *args: Any) -> Any:
        if not failed:
            failed.append(error)
            raise error
        return act(self, *args)

    return failing


@needs_nixl
def test_an_accept_that_fails_is_not_the_last(puller: NixlTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[Exception] = []
    out_of_descriptors = OSError(errno.EMFILE, "Too many open files")
    monkeypatch.setattr(socket.socket, "accept", once(socket.socket.accept, out_of_descriptors, failed))
    with NixlSender() as sender:
        assert pull(puller, offer(sender, 1))[0] == data_of(tensors(1))
    assert failed == [out_of_descriptors]


@needs_nixl
def test_a_puller_that_can_not_be_served_is_not_the_last(
    sender: NixlSender, puller: NixlTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport, failed = offer(sender, 1), list[Exception]()
    pull(puller, transport)  # which starts threads of its own the first time
    no_threads = RuntimeError("can't start new thread")
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", once(threading.Thread.start, no_threads, failed))
        with pytest.raises(Unavailable):
            pull(puller, transport)
    assert failed == [no_threads]
    assert pull(puller, transport)[0] == data_of(tensors(1))


@needs_nixl
def test_a_manifest_of_megabytes(sender: NixlSender, puller: NixlTransport) -> None:
    specs = {f"layer.{number}.{'x' * 100}": TensorSpec("U8", (1,)) for number in range(20_000)}
    manifest = Manifest(pack(specs.items(), 1 << 18))
    given = {name: HostTensor(spec, memoryview(name[6:7].encode())) for name, spec in specs.items()}
    transport, digests = sender.open(manifest), dict[str, str]()
    for number in fill(manifest, given.items(), sender.buffer, digests):
        sender.send(number)
    sender.finish(digests)
    with asking(transport) as (_, answer):
        assert len(frames.frame_of(answer)) > 4 << 20
    assert pull(puller, transport) == (data_of(given), manifest.digested(digests).digest)


@needs_nixl
def test_a_large_bucket_is_read_in_pieces(sender: NixlSender) -> None:
    from rl_plane.transports.nixl.reads import ReadLimits
    from rl_plane.transports.nixl.receiver import NixlTransport

    puller = NixlTransport(TransportContext(), ReadLimits(nbytes=100))
    assert pull(puller, offer(sender, 1, Manifest(pack(SPECS.items(), 1 << 20))))[0] == data_of(tensors(1))


@needs_nixl
def test_empty_tensors_and_adapters(sender: NixlSender, puller: NixlTransport) -> None:
    specs = {"empty": TensorSpec("F32", (0, 4))}
    transport = sender.open(Manifest(pack(specs.items()), adapter_config=CONFIG))
    sender.finish({"empty": "0" * 64})
    assert pull(puller, transport, "lora")[0] == {"empty": b""}
    with pytest.raises(InvalidWeights, match="an adapter came"):
        pull(puller, transport)


@needs_nixl
@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"host": None}, "transport.host"),
        ({"host": "a\nb"}, "transport.host"),
        ({"port": "80"}, "transport.port"),
        ({"port": 0}, "transport.port"),
        ({"port": True}, "transport.port"),
        ({"secret": ""}, "transport.secret"),
        ({"path": "/"}, "transport.path"),
        ({"host": "host.invalid"}, "transport"),
        ({"secret": "0" * 32}, "transport"),
    ],
)
def test_a_wrong_request_names_its_field(
    sender: NixlSender, puller: NixlTransport, change: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        puller.open({**offer(sender, 1), **change}, "base")
    assert caught.value.facts["field"] == field
    assert caught.value.facts["fix"]


@needs_nixl
@pytest.mark.parametrize("host", ["192.0.2.1", "a..b"])
def test_an_address_that_is_none_of_ours_is_refused(host: str) -> None:
    with pytest.raises(InvalidRequest, match="can't listen") as caught:
        NixlSender(host)
    assert caught.value.facts["field"] == "options.host"
    assert is_passed_over(caught.value)


@needs_nixl
def test_what_a_worker_keeps_is_pulled_from_where_it_lies(puller: NixlTransport) -> None:
    from rl_plane.transports.nixl.peer_source import PeerSource

    kept = tensors(1) | {
        "empty": HostTensor(TensorSpec("F32", (0, 4)), memoryview(b"")),
        "large": HostTensor(TensorSpec("U8", (100_000,)), memoryview(random.Random(2).randbytes(100_000))),
    }
    lent = {name: HostTensor(one.spec, memoryview(bytearray(one.data))) for name, one in kept.items()}
    shelf = PeerSource("127.0.0.1")
    transport, adapter = dict(shelf.offer(lent)), dict(shelf.offer(lent, b"{}"))
    assert pull(puller, transport)[0] == data_of(kept)
    shelf.withdraw(adapter["secret"])
    with pytest.raises(InvalidRequest, match="source_gone"):
        puller.open(adapter, "lora")
    delivery = puller.open(transport, "base")
    next(arriving := delivery.tensors())
    shelf.withdraw(transport["secret"])
    with pytest.raises(InvalidRequest, match="source_gone"):
        puller.open(transport, "base")
    list(arriving)  # one bucket, which was here
    delivery.close()
    shelf.close()


@needs_nixl
@pytest.mark.parametrize(("read_bytes", "read_pieces"), [(100, 1024), (1 << 20, 2)])
def test_small_pieces_are_read_together(read_bytes: int, read_pieces: int) -> None:
    from rl_plane.transports.nixl.peer_source import PeerSource
    from rl_plane.transports.nixl.reads import ReadLimits
    from rl_plane.transports.nixl.receiver import NixlTransport

    puller = NixlTransport(TransportContext(), ReadLimits(read_bytes, read_pieces))
    shelf = PeerSource("127.0.0.1")
    lent = {name: HostTensor(one.spec, memoryview(bytearray(one.data))) for name, one in tensors(1).items()}
    assert pull(puller, dict(shelf.offer(lent)))[0] == data_of(lent)
    shelf.close()


# ---- senders that are none ----


@contextmanager
def impostor(answer: Any) -> Iterator[dict[str, Any]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                frames.read_frame(connection)
                if isinstance(answer, bytes):
                    connection.sendall(answer)
                else:
                    frames.send_frame(connection, answer)
                connection.shutdown(socket.SHUT_WR)
                connection.recv(1)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield {"backend": "nixl", "host": "127.0.0.1", "port": listener.getsockname()[1], "secret": "k"}
        finally:
            thread.join()


GOOD: dict[str, Any] = {
    "metadata": b"none",
    "manifest": MANIFEST.to_wire(),
    "places": [[[4096, bucket.nbytes, 0]] for bucket in MANIFEST.buckets],
}


def _placed(*place: Any) -> dict[str, Any]:
    return {**GOOD, "places": [[list(place)], *GOOD["places"][1:]]}


@needs_nixl
@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\0\0\0\5\x80",
        b"\xff\xff\xff\xff",
        b"\0\0\0\1\xc1",
        b"\0\0\0\1\x90",
        {},
        {**GOOD, "manifest": {}},
        {**GOOD, "metadata": "none"},
        {**GOOD, "places": GOOD["places"][1:]},
        _placed(4096, MANIFEST.buckets[0].nbytes - 1, 0),
        _placed(-1, MANIFEST.buckets[0].nbytes, 0),
        _placed(1 << 63, MANIFEST.buckets[0].nbytes, 0),
        _placed(4096, MANIFEST.buckets[0].nbytes),
        _placed("4096", MANIFEST.buckets[0].nbytes, 0),
        GOOD,
    ],
)
def test_a_wrong_answer_is_refused(puller: NixlTransport, answer: Any) -> None:
    with impostor(answer) as transport, pytest.raises((InvalidWeights, Unavailable)):
        pull(puller, transport)


# ---- a fleet ----


async def publish(
    client: RlClient, trainer: Trainer, directory: Path, version: str, **policy: Any
) -> dict[str, Any]:
    transport = await trainer.offers(directory)
    reply: dict[str, Any] = await client.run("update_weights", update_of(transport, version, **policy))
    return reply


@needs_nixl
async def test_a_stopped_and_a_killed_worker_delay_no_other_and_heal(
    plane: Plane, trainer: Callable[..., Trainer]
) -> None:
    source, client = trainer(), await plane.client()
    stopped, killed, well = plane.spawn_many(3)
    await publish(client, source, plane.model(1), "one")
    assert await source.keeps() == 1
    assert await all_serve(client, "one")
    transport = await source.offers(plane.model(2))
    stopped.stop()
    killed.kill()
    reply = await client.run("update_weights", update_of(transport, "two", on_prepare_failure="exclude"))
    assert {row["instance_id"] for row in reply["workers"] if row["status"] == "ok"} == {well.instance_id}
    assert await source.keeps() == 2
    stopped.go_on()
    again = await asyncio.to_thread(plane.spawn, instance_id=killed.instance_id)
    late = await asyncio.to_thread(plane.spawn)
    for one in (stopped, again, late):
        await until_open(plane, client, one.instance_id, "two", HEAL_S)
        expected = [fake_token(model_digest(plane.model(2)), [5, 6], position) for position in range(4)]
        assert await plane.until(lambda one=one: _said(client, one), HEAL_S) == expected
    await publish(client, source, plane.model(3), "three")
    assert await source.keeps() == 2, "memory is registered once"
    assert await all_serve(client, "three")


async def _said(client: RlClient, worker: Spawned) -> list[int] | None:
    """Returns None while the worker has no lease yet: loading torch and nixl takes a while on a busy machine."""
    try:
        return await generated(client, worker.instance_id, [5, 6], 4)
    except NotAdmitted:
        return None


def _held_at(plane: Plane, number: int, more: str = "") -> tuple[str, Path, Path, Path]:
    """Code for a worker that waits before it reads this bucket, and says when a read is under way."""
    at, go, flying = (plane.tmp / name for name in ("at", "go", "flying"))
    patch = f"""
import os, time
{more}
import rl_plane.transports.nixl.pull as receiving
read, look = receiving.Pull._read, receiving.Pull._look
def held(self, number, buffer):
    if number == {number}:
        Path({str(at)!r}).touch()
        give_up = time.monotonic() + {HEAL_S}
        while not Path({str(go)!r}).exists():
            assert time.monotonic() < give_up
            time.sleep(0.01)
    return read(self, number, buffer)
def looked(self):
    if Path({str(go)!r}).exists():
        Path({str(flying)!r}).touch()
    return look(self)
receiving.Pull._read, receiving.Pull._look = held, looked
"""
    return patch, at, go, flying


TCP = "os.environ['UCX_TLS'] = 'tcp'\n"
"""Then a read needs the source's help, as it does not in one machine's memory."""


@needs_nixl
@pytest.mark.parametrize(
    ("flight", "forks"), [("between reads", False), ("in a read", False), ("in a read", True)]
)
async def test_a_trainer_that_is_killed_leaves_the_fleet_as_it_was(
    plane: Plane, trainer: Callable[..., Trainer], flight: str, forks: bool, request: pytest.FixtureRequest
) -> None:
    """With `forks` the trainer has a child that outlives it, such as a data loader."""
    in_flight = flight == "in a read"
    patch, at, go, flying = _held_at(plane, 2, TCP if in_flight else "")
    source, client = trainer(**({"UCX_TLS": "tcp"} if in_flight else {})), await plane.client()
    worker, _ = plane.spawn(patch=patch), plane.spawn(patch=TCP.join(["import os\n", ""]) if in_flight else "")
    transport = await source.offers(plane.model(1))
    task = asyncio.create_task(client.run("update_weights", update_of(transport, "one")))
    await plane.until(at.exists, HEAL_S)
    if forks:
        child = (await source.does(do="fork"))["child"]
        request.addfinalizer(lambda: os.kill(child, signal.SIGKILL))
    if in_flight:
        source.stop()
        go.touch()
        await plane.until(flying.exists, HEAL_S)
        source.kill()
    else:
        source.kill()
        go.touch()
    with pytest.raises(UpdateAborted, match="is gone") as caught:
        await asyncio.wait_for(task, HEAL_S)
    failed = {row["instance_id"] for row in caught.value.facts["workers"] if row["status"] == "error"}
    assert worker.instance_id in failed  # the other one may have everything by then
    assert await all_serve(client, "initial")
    # The next trainer finds workers that can pull again.
    await publish(client, trainer(**({"UCX_TLS": "tcp"} if in_flight else {})), plane.model(2), "two")
    assert await all_serve(client, "two")
    assert len(await states(client)) == 2


@needs_nixl
@pytest.mark.parametrize("child", ["exits", "drops all"])
async def test_a_forked_child_that_ends_leaves_its_trainers_agent_as_it_was(
    tmp_path: Path, trainer: Callable[..., Trainer], puller: NixlTransport, child: str
) -> None:
    source = trainer(starts=True)
    for seed in range(3):
        directory = make_fake_model(tmp_path / str(seed), seed)
        transport = await source.offers(directory)
        _, digest = await asyncio.to_thread(pull, puller, transport)
        assert digest == model_digest(directory)
        await source.keeps()
        if seed == 0:
            assert (await source.does(do=f"fork one that {child}"))["status"] == 0
    assert await source.ends() == 0


@needs_nixl
@pytest.mark.parametrize("child", ["exits", "drops all"])
async def test_a_forked_child_that_ends_leaves_its_workers_agents_as_they_were(
    trainer: Callable[..., Trainer], sender: NixlSender, puller: NixlTransport, child: str
) -> None:
    worker = trainer(starts=True)
    for seed in range(3):
        passed_on = await worker.does(do="pass on", transport=offer(sender, seed))
        pulled = await asyncio.to_thread(pull, puller, passed_on["transport"])
        assert pulled[0] == data_of(tensors(seed))
        if seed == 0:
            assert (await worker.does(do=f"fork one that {child}"))["status"] == 0
    assert await worker.ends() == 0


@needs_nixl
def test_what_serves_pullers_is_of_no_use_in_a_forked_child(sender: NixlSender, puller: NixlTransport) -> None:
    transport, passed_on = offer(sender, 1), dict(puller.offer(writable(2)))
    source = puller.peer_source()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(int(BOUND_S))
        try:
            with sender._server._lock, source._server._lock:  # as by threads that are not there
                sender.close()
                sender.destroy()
                puller.destroy()
            for act in (lambda: sender.open(MANIFEST), sender.keep):
                try:
                    act()
                except InvalidRequest as error:
                    os.write(writer, f"{error.facts['field']}: {error}\n".encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as said:
        assert said.read() == "sender: this sender belongs to the parent of this forked process\n" * 2
    assert os.waitpid(pid, 0)[1] == 0
    assert pull(puller, transport)[0] == data_of(tensors(1))
    assert pull(puller, passed_on)[0] == data_of(tensors(2))
    puller.destroy()


@needs_nixl
async def test_a_pull_from_a_trainer_that_hangs_ends_by_its_bound(
    plane: Plane, trainer: Callable[..., Trainer]
) -> None:
    patch, at, go, _ = _held_at(
        plane, 2, TCP + "import rl_plane.transports.nixl.pull\nrl_plane.transports.nixl.pull.READ_S = 3"
    )
    source, client = trainer(UCX_TLS="tcp"), await plane.client()
    plane.spawn(patch=patch)
    transport = await source.offers(plane.model(1))
    task = asyncio.create_task(client.run("update_weights", update_of(transport, "one")))
    await plane.until(at.exists, HEAL_S)
    source.stop()
    go.touch()
    with pytest.raises(UpdateAborted, match="did not come in"):
        await asyncio.wait_for(task, HEAL_S)
    assert await all_serve(client, "initial")
    source.process.send_signal(signal.SIGCONT)
    await publish(client, source, plane.model(2), "two")
    assert await all_serve(client, "two")


@needs_nixl
async def test_an_aborted_update_ends_in_the_middle_of_a_read(
    plane: Plane, trainer: Callable[..., Trainer]
) -> None:
    bounds = "import rl_plane.transports.nixl.pull, worker.reconcile.staged_updates\n"
    # Only a cancellation ends it.
    bounds += "rl_plane.transports.nixl.pull.READ_S = worker.reconcile.staged_updates.ABORT_WAIT_S = 600\n"
    patch, at, go, flying = _held_at(plane, 2, TCP + bounds)
    source, client = trainer(UCX_TLS="tcp"), await plane.client()
    plane.spawn(patch=patch)
    await client.run("init_transport", {"backend": "nixl"})  # or it takes the time that the update has
    transport = await source.offers(plane.model(1))
    task = asyncio.create_task(client.run("update_weights", update_of(transport, "one", prepare_timeout_s=12)))
    await plane.until(at.exists, HEAL_S)
    source.stop()
    go.touch()
    await plane.until(flying.exists, HEAL_S)
    with pytest.raises(PlaneError):
        await asyncio.wait_for(task, HEAL_S)
    assert await all_serve(client, "initial")
    source.process.send_signal(signal.SIGCONT)
    await asyncio.wait_for(publish(client, source, plane.model(2), "two"), HEAL_S)
    assert await all_serve(client, "two")


@needs_nixl
async def test_a_slow_healer_heals_to_the_next_version_of_its_source(
    plane: Plane, trainer: Callable[..., Trainer]
) -> None:
    patch, at, go, _ = _held_at(plane, 2)
    source, client = trainer(), await plane.client()
    plane.spawn()
    await publish(client, source, plane.model(1), "one")
    await source.keeps()
    slow = plane.spawn(ready=False, patch=patch)
    await plane.until(at.exists, HEAL_S)
    await publish(client, source, plane.model(2), "two", on_prepare_failure="exclude", prepare_timeout_s=6)
    await source.keeps()
    await source.offers(plane.model(3))  # over what it was reading
    go.touch()
    await asyncio.to_thread(slow.wait_ready, HEAL_S)
    await until_open(plane, client, slow.instance_id, "two", HEAL_S)
    assert (await states(client))[slow.instance_id]["version"]["digest"] == model_digest(plane.model(2))


@needs_nixl
async def test_when_the_trainer_is_gone_a_late_worker_waits_for_the_next_update(
    plane: Plane, trainer: Callable[..., Trainer]
) -> None:
    source, client = trainer(), await plane.client()
    plane.spawn()
    await publish(client, source, plane.model(1), "one")
    await source.keeps()
    source.kill()
    late = plane.spawn(ready=False)
    await plane.until(lambda: _listed(client, late), HEAL_S)
    assert "source_gone" in await until_behind(plane, client, late.instance_id)
    await publish(client, trainer(), plane.model(2), "two")
    await until_open(plane, client, late.instance_id, "two", HEAL_S)


async def _listed(client: RlClient, worker: Spawned) -> bool:
    return worker.instance_id in await states(client)


@needs_nixl
async def test_an_update_in_place_and_an_adapter(plane: Plane, trainer: Callable[..., Trainer]) -> None:
    source, client = trainer(), await plane.client()
    worker = plane.spawn()
    await publish(client, source, plane.model(1), "one", staging="none")
    await source.keeps()
    adapter = make_fake_adapter(plane.tmp / "adapter", 1, plane.model(1))
    transport = await source.offers(adapter, "lora")
    body = {"target": {"kind": "lora", "op": "load", "name": "a"}, **update_of(transport, "a1")}
    reply = await client.run("update_weights", body)
    assert reply["version"]["digest"] == adapter_digest(adapter)
    await source.keeps("a")
    worker.kill()
    again = await asyncio.to_thread(plane.spawn, instance_id=worker.instance_id)
    await until_open(plane, client, again.instance_id, "one", HEAL_S)
    state = (await states(client))[again.instance_id]
    assert list(state["loras"]) == ["a"]
    again.signal(signal.SIGTERM)
    assert await asyncio.to_thread(again.process.wait, HEAL_S) == 0


async def test_without_nixl_it_is_not_offered_and_the_error_names_the_extra(plane: Plane) -> None:
    lacking = """
import importlib.util
import sys
sys.modules.pop("rl_plane.transports.nixl.receiver", None)  # the process that was forked may have it
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "nixl" else find_spec(name, *more)
"""
    worker, client = plane.spawn(patch=lacking), await plane.client()
    described = await client.call(worker.instance_id, "describe")
    assert "nixl" not in described.body["transports"]
    assert "filesystem" in described.body["transports"]
    with pytest.raises(Unsupported) as caught:
        await client.run("update_weights", update_of({"backend": "nixl"}, "one"))
    assert "rl-plane[nixl]" in caught.value.facts["fix"]


def test_without_nixl_a_sender_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)  # as if it weren't installed
    with pytest.raises(PlaneError) as caught:
        NixlSender()
    assert "rl-plane[nixl]" in caught.value.facts["fix"]


WITHOUT_A_LIBRARY = 'raise ImportError("libnixl.so: cannot open shared object file")'
WITHOUT_UCX = """
nixl_agent_config = dict
def nixl_agent(*_, **__):
    raise RuntimeError("no UCX")
"""


@pytest.mark.parametrize(
    ("package", "words"), [(WITHOUT_A_LIBRARY, "cannot open shared object file"), (WITHOUT_UCX, "no UCX")]
)
def test_a_nixl_that_does_not_work_is_passed_over(
    package: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nixl.py").write_text(package)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "nixl", None)
    monkeypatch.delitem(sys.modules, "nixl")  # it is imported anew, and again by the next test
    with pytest.raises(Unsupported, match=words) as caught:
        NixlSender()
    assert caught.value.facts["field"] == "transport.backend"
    assert caught.value.__cause__ is not None
    assert is_passed_over(caught.value)


# ---- real models ----


@needs_nixl
async def test_hf_takes_base_and_adapter_and_a_late_worker_heals_both(
    plane: Plane, trainer: Callable[..., Trainer]
) -> None:
    from tests.support.frontend_process import frontend
    from tests.support.hf_fleet import Witnesses, proven

    witnesses, source, client = Witnesses(plane), trainer(), await plane.client()
    ids = await asyncio.to_thread(witnesses.spawn, 1)
    async with frontend(plane, admission_wait_s=HEAL_S) as http:
        transport = await source.offers(witnesses.base(2), bucket_bytes=1 << 16)
        await client.run("update_weights", update_of(transport, "two"))
        await source.keeps()
        await proven(http, ids, 2)
        transport = await source.offers(witnesses.adapter(3), "lora")
        target = {"kind": "lora", "op": "load", "name": "a"}
        await client.run("update_weights", {"target": target, **update_of(transport, "a3")})
        await source.keeps("a")
        await proven(http, ids, 2, a=3)
        ids += await asyncio.to_thread(witnesses.spawn, 1)
        await plane.until(lambda: all_serve(client, "two"), HEAL_S)
        await proven(http, ids, 2, a=3)


@needs_nixl
async def test_without_its_trainer_a_worker_heals_from_another(
    plane: Plane, trainer: Callable[..., Trainer]
) -> None:
    from tests.support.frontend_process import frontend
    from tests.support.hf_fleet import Witnesses, proven

    witnesses, source, client = Witnesses(plane), trainer(), await plane.client()
    ids = await asyncio.to_thread(witnesses.spawn, 2)

    async def heals(number: int, label: str, seed: int) -> None:
        """The worker `ids[number]` is killed, and comes back with its old model."""
        next(one for one in reversed(plane.spawned) if one.instance_id == ids[number]).kill()
        await asyncio.to_thread(witnesses.spawn, 1, instance_id=ids[number])
        await plane.until(lambda: all_serve(client, label), HEAL_S)
        digest = (await states(client))[ids[number]]["version"]["digest"]
        assert digest == model_digest(witnesses.base(seed))
        await proven(http, [ids[number]], seed)

    async with frontend(plane, admission_wait_s=HEAL_S) as http:
        transport = await source.offers(witnesses.base(2), bucket_bytes=1 << 16)
        await client.run("update_weights", update_of(transport, "two", keep_staged=True))
        await source.keeps()
        source.kill()
        await heals(0, "two", 2)
        # What can't be fetched again by the transport that brought it, too.
        pushing = IpcTrainer()
        try:
            pushing.publish(witnesses.base(3), 2)
            body = update_of((await pushing.says("transport"))["transport"], "three", keep_staged=True)
            await client.run("update_weights", body)
        finally:
            pushing.close()
        await heals(1, "three", 3)

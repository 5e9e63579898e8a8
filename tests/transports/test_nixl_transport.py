"""The `nixl` transport: a sender, its receivers, and servers that are no sender."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import rl_plane._util.framing as frames
from rl_plane.errors import InvalidRequest, InvalidWeights, Unavailable
from rl_plane.protocol.versions import HostTensor, TensorSpec
from rl_plane.transports.base import TransportContext
from rl_plane.transports.nixl import wire
from rl_plane.transports.nixl.sender import NixlSender
from rl_plane.transports.packing import fill
from rl_plane.transports.registry import is_passed_over
from rl_plane.weights.manifest import Manifest, pack
from tests.support.nixl_offers import (
    BOUND_S,
    CONFIG,
    MANIFEST,
    SPECS,
    TOTAL_BYTES,
    data_of,
    needs_nixl,
    offer,
    pull,
    puller,
    sender,
    tensors,
    writable,
)
from tests.support.nixl_trainer import Trainer
from tests.support.nixl_trainers import trainer
from worker.engines.fake.adapter import make_fake_model
from worker.receive.staging import model_digest

__all__ = ["puller", "sender", "trainer"]

if TYPE_CHECKING:
    from rl_plane.transports.nixl.receiver import NixlTransport

pytestmark = pytest.mark.timeout(400)


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
def test_an_offered_version_is_pulled_and_its_memory_is_registered_once(
    sender: NixlSender, puller: NixlTransport
) -> None:
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
def test_a_kept_version_stays_until_the_sender_keeps_the_next(sender: NixlSender, puller: NixlTransport) -> None:
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
    """Offers tensors in place, except for tensors that must be packed."""
    transport, digests = sender.open(MANIFEST), dict[str, str]()
    lent = sender.lend({name: tensor for name, tensor in given.items() if name not in packed})
    for number in fill(MANIFEST, given.items(), sender.buffer, digests, lent):
        sender.send(number)
    sender.finish(digests)
    return transport


def change(given: dict[str, HostTensor], seed: int) -> None:
    """Changes the tensors in place, like a trainer's step."""
    for name, one in tensors(seed).items():
        given[name].data[:] = one.data


@needs_nixl
@pytest.mark.parametrize("packed", [(), ("layer.3",)])
def test_lent_tensors_are_pulled_in_place_and_copied_after_the_commit(
    sender: NixlSender, puller: NixlTransport, packed: tuple[str, ...]
) -> None:
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
def test_a_puller_can_read_only_the_memory_that_the_manifest_names(sender: NixlSender) -> None:
    addresses = {}
    for seed in (1, 2):
        transport = offer(sender, seed)
        sender.keep(str(seed))
        with asking(transport) as (_, addresses[seed]):
            pass
    agent = wire.make_agent("127.0.0.1")
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
            assert puller.recv(1) == b"", "the receiver is informed"
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
def test_a_manifest_of_megabytes_arrives(sender: NixlSender, puller: NixlTransport) -> None:
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
def test_empty_tensors_and_adapters_are_pulled(sender: NixlSender, puller: NixlTransport) -> None:
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
def test_the_kept_copy_of_a_worker_is_pulled_in_place(puller: NixlTransport) -> None:
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


@needs_nixl
def test_a_forked_child_can_close_no_server_of_its_parent(sender: NixlSender, puller: NixlTransport) -> None:
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

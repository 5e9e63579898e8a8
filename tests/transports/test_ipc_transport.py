"""The `ipc` transport: shared memory from a trainer in a process of its own, with deaths and wrong messages."""

from __future__ import annotations

import asyncio
import mmap
import os
import random
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import msgpack
import pytest

import rl_plane.transports.ipc.receiver as receiving
from rl_plane.errors import (
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    InvalidWeights,
    Unavailable,
    UpdateAborted,
)
from rl_plane.protocol.versions import HostTensor, TensorSpec
from rl_plane.transports.base import Sender, SenderContext, TransportContext
from rl_plane.transports.ipc import ipc_session, wire
from rl_plane.transports.ipc.ipc_session import Bounds
from rl_plane.transports.ipc.receiver import IpcTransport
from rl_plane.transports.ipc.sender import IpcSender, build
from rl_plane.transports.packing import fill
from rl_plane.weights.manifest import Manifest, pack
from tests.support.fleet_updates import all_serve, generated, states
from tests.support.healing import until_behind
from tests.support.ipc_memory import (
    BOUND_S,
    BUCKET_BYTES,
    MIDDLE,
    body_of,
    descriptors,
    holding,
    impostor,
    maps,
    memory,
    model_of,
    more_descriptors,
    pool,
    published,
    raw_receiver,
    receive,
    received,
    serves,
    shared_memory,
    trainer_of,
)
from tests.support.ipc_trainer import Trainer
from tests.support.other_user import as_another_user
from worker.engines.fake.adapter import make_fake_adapter
from worker.receive.staging import adapter_digest, model_digest

__all__ = ["pool", "trainer_of"]

if TYPE_CHECKING:
    from tests.conftest import Plane

pytestmark = [pytest.mark.slow, pytest.mark.parallel]

if sys.platform != "linux":
    pytest.skip("memfd_create and abstract sockets", allow_module_level=True)


SPECS = {f"layer.{number}": TensorSpec("U8", (100 + 30 * number,)) for number in range(12)}
CONFIG = b'{"r": 4}'


def tensors(seed: int = 1) -> dict[str, HostTensor]:
    chance = random.Random(seed)
    return {name: HostTensor(spec, memoryview(chance.randbytes(spec.nbytes))) for name, spec in SPECS.items()}


def data_of(named: dict[str, HostTensor]) -> dict[str, bytes]:
    return {name: bytes(tensor.data) for name, tensor in named.items()}


MANIFEST = Manifest(pack(SPECS.items(), 512))


def publish(sender: Sender, named: dict[str, HostTensor]) -> str | None:
    digests: dict[str, str] = {}
    for number in fill(MANIFEST, named.items(), sender.buffer, digests):
        sender.send(number)
    sender.finish(digests)
    return MANIFEST.digested(digests).digest


@contextmanager
def sender_of(receivers: int, **bounds: Any) -> Iterator[tuple[IpcSender, dict[str, Any]]]:
    sender = IpcSender(lambda: receivers, bounds=Bounds(**bounds))
    try:
        yield sender, sender.open(MANIFEST)
    finally:
        sender.destroy()


# ---- one sender and its receivers ----


def test_each_receiver_gets_all_tensors_and_no_memory_stays(pool: ThreadPoolExecutor) -> None:
    before = descriptors()
    sender = IpcSender(lambda: 3)
    for seed in range(3):  # the buffers are used again
        transport = sender.open(MANIFEST)
        assert transport.keys() == {"backend", "socket", "secret"}
        arriving = [pool.submit(receive, transport) for _ in range(3)]
        digest = publish(sender, tensors(seed))
        for one in arriving:
            assert one.result(BOUND_S) == (data_of(tensors(seed)), digest)
        sender.close()
        sender.close()
        assert len(maps()) == 2  # the buffers
    sender.destroy()
    sender.destroy()
    assert shared_memory() == []
    assert more_descriptors(before) == []


@pytest.mark.parametrize("count", [1, 2])
def test_an_update_with_no_more_buckets_than_buffers_arrives(pool: ThreadPoolExecutor, count: int) -> None:
    specs = dict(list(SPECS.items())[:count]) | {"empty": TensorSpec("F32", (0,))}
    manifest = Manifest(pack(specs.items(), 1), adapter_config=CONFIG)
    sender, digests = IpcSender(lambda: 1), dict[str, str]()
    named = {
        **{name: tensors()[name] for name in list(specs)[:-1]},
        "empty": HostTensor(specs["empty"], memoryview(b"")),
    }
    transport = sender.open(manifest)
    arriving = pool.submit(receive, transport, "lora")
    for number in fill(manifest, named.items(), sender.buffer, digests):
        sender.send(number)
    sender.finish(digests)
    sender.destroy()
    assert arriving.result(BOUND_S) == (data_of(named), manifest.digested(digests).digest)


def test_without_digests_none_is_stated(pool: ThreadPoolExecutor) -> None:
    with sender_of(1) as (sender, transport):
        arriving = pool.submit(receive, transport)
        for number in fill(MANIFEST, tensors().items(), sender.buffer):
            sender.send(number)
        sender.finish(None)
        assert arriving.result(BOUND_S) == (data_of(tensors()), None)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        ({}, "transport.socket"),
        ({"socket": 5}, "transport.socket"),
        ({"socket": "/run/docker.sock"}, "transport.socket"),
        ({"socket": "rl-plane-ipc-" + "0" * 32 + "\n"}, "transport.socket"),
        ({"socket": "rl-plane-ipc-" + "0" * 32, "secret": "0" * 32}, "transport.socket"),  # no process listens
        ({"socket": "rl-plane-ipc-" + "0" * 32}, "transport.secret"),
        ({"socket": "rl-plane-ipc-" + "0" * 32, "secret": "x"}, "transport.secret"),
        ({"socket": "rl-plane-ipc-" + "0" * 32, "path": "/"}, "transport.path"),
    ],
)
def test_a_wrong_request_names_its_field(request_: dict[str, Any], field: str) -> None:
    before = descriptors()
    with pytest.raises(InvalidRequest) as caught:
        IpcTransport(TransportContext()).open({"backend": "ipc", **request_}, "base")
    assert caught.value.facts["field"] == field
    assert caught.value.facts["fix"]
    assert more_descriptors(before) == []


def test_an_adapter_whose_config_is_none_is_refused() -> None:
    sender = IpcSender(lambda: 1)
    transport = sender.open(Manifest(MANIFEST.buckets, adapter_config=b"["))
    with pytest.raises(InvalidWeights, match="config"):
        IpcTransport(TransportContext()).open(transport, "lora")
    sender.destroy()
    assert shared_memory() == []


def test_an_adapter_is_not_taken_for_base_weights() -> None:
    with sender_of(1) as (_, transport), pytest.raises(InvalidWeights, match="base weights came"):
        IpcTransport(TransportContext()).open(transport, "lora")


# ---- senders that are none ----


PACKED = msgpack.packb(MANIFEST.to_wire())
NEEDED = wire.buffer_bytes(MANIFEST)
FIRST = {"protocol": wire.PROTOCOL, "manifest": len(PACKED), "buffer": NEEDED, "cuda": False}


def good() -> list[int]:
    return [memory(PACKED), *buffers()]


def buffers() -> list[int]:
    return [memory(bytes(NEEDED)), memory(bytes(NEEDED))]


def instead(number: int, *others: int) -> list[int]:
    """The first descriptors of a good packet, then others."""
    made = good()
    wire.close_all(made[number:])
    return [*made[:number], *others]


def plain_file() -> int:
    return os.open(sys.executable, os.O_RDONLY | os.O_CLOEXEC)


@pytest.mark.parametrize(
    ("packets", "given"),
    [
        ([b"\xc1"], good),
        ([b"x" * 5000], good),
        ([[1]], good),
        ([{}], good),
        ([{**FIRST, "protocol": 1}], good),
        ([FIRST], list),
        ([FIRST], lambda: instead(2)),
        ([FIRST], lambda: instead(2, plain_file())),
        ([FIRST], lambda: instead(2, memory(bytes(NEEDED), 0))),
        ([FIRST], lambda: instead(2, memory(bytes(NEEDED - 1)))),
        ([{**FIRST, "buffer": NEEDED - 1}], good),
        ([{**FIRST, "buffer": "many"}], good),
        ([{**FIRST, "manifest": 0}], good),
        ([{**FIRST, "manifest": 1 << 40}], good),
        ([{**FIRST, "manifest": len(PACKED) + 1}], good),
        ([{**FIRST, "manifest": len(PACKED) - 1}], good),
        ([FIRST], lambda: instead(0, memory(b"\x80" * len(PACKED)), *buffers())),
        ([FIRST], lambda: instead(0, plain_file(), *buffers())),
        ([FIRST, {"bucket": 1}], good),
        ([FIRST, {"bucket": 0, "more": 1}], good),
        ([FIRST, {"end": None}], good),
        ([FIRST, *({"bucket": number} for number in range(len(MANIFEST.buckets))), {"end": 7}], good),
    ],
)
def test_a_socket_without_a_right_sender_is_refused(packets: list[Any], given: Callable[[], list[int]]) -> None:
    before = descriptors()
    with impostor(*packets, given=given) as transport:
        field = refused(transport)
    assert field in ("transport.socket", "transport.manifest")
    assert more_descriptors(before) == []
    assert shared_memory() == []


def refused(transport: dict[str, Any]) -> Any:
    try:
        receive(transport)
    except InvalidWeights as error:
        return error.facts["field"]
    pytest.fail("it was believed")


def test_more_descriptors_than_expected_are_dropped() -> None:
    before = descriptors()
    with impostor(FIRST, given=lambda: [*good(), *good()]) as transport:
        delivery = IpcTransport(TransportContext()).open(transport, "base")
        assert [line.split()[1] for line in maps()] == ["r--s", "r--s"]
        delivery.close()
    assert more_descriptors(before) == []


def test_a_trainers_refusal_is_reported() -> None:
    with impostor({"error": "too late"}) as transport, pytest.raises(Unavailable, match="too late"):
        receive(transport)


# ---- receivers that are none ----


@pytest.mark.parametrize(
    "said", [b"\xc1", b"x" * 5000, b"", msgpack.packb({"taken": 1}), msgpack.packb({"taken": 0, "x": 0})]
)
def test_a_receiver_that_sends_nonsense_delays_no_other(pool: ThreadPoolExecutor, said: bytes) -> None:
    with sender_of(2) as (sender, transport), raw_receiver(transport) as (connection, _):
        arriving = pool.submit(receive, transport)
        connection.send(said)
        digest = publish(sender, tensors())
        assert arriving.result(BOUND_S) == (data_of(tensors()), digest)


def test_a_receiver_cannot_take_an_unsent_bucket(pool: ThreadPoolExecutor) -> None:
    """Otherwise the receiver could miss what was in a buffer."""
    with sender_of(1) as (sender, transport), raw_receiver(transport) as (connection, _):
        connection.send(msgpack.packb({"taken": 0}))
        assert connection.recv(1) == b"", "it is given up"
        with pytest.raises(Unavailable, match="no receiver is left"):
            publish(sender, tensors())


def test_a_receiver_can_read_the_memory_and_nothing_else() -> None:
    with sender_of(1) as (_, transport), raw_receiver(transport) as (_, (manifest, *buffers)):
        assert msgpack.unpackb(os.pread(manifest, 1 << 20, 0)[: len(PACKED)]) == MANIFEST.to_wire()
        for one in (manifest, *buffers):
            with pytest.raises(PermissionError):
                mmap.mmap(one, 64)
            with pytest.raises(PermissionError):
                os.pwrite(one, b"x", 0)
            with pytest.raises(PermissionError):
                os.ftruncate(one, 1)
            mmap.mmap(one, 64, prot=mmap.PROT_READ).close()


def test_a_receiver_of_another_user_gets_nothing() -> None:
    with (
        sender_of(1) as (_, transport),
        as_another_user(),
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection,
    ):
        connection.settimeout(BOUND_S)
        connection.connect(wire.address(transport["socket"]))
        assert connection.recv(4096) == b""


def test_a_sender_of_another_user_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    with sender_of(1) as (_, transport):
        monkeypatch.setattr(receiving, "same_user", lambda connection: False)
        with pytest.raises(InvalidRequest, match="another user"):
            receive(transport)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_really_gets_nothing() -> None:
    with sender_of(1) as (_, transport):
        pid = os.fork()
        if pid == 0:
            got: Any = None
            try:
                os.setuid(65534)
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
                    connection.settimeout(BOUND_S)
                    connection.connect(wire.address(transport["socket"]))
                    got = connection.recvmsg(4096, 4096)[:2]
            finally:
                os._exit(got != (b"", []))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize("said", [{"secret": "0" * 32}, {"secret": None}, {"gpu": "x"}, {"taken": 0}, {}])
def test_a_process_that_does_not_know_the_secret_gets_nothing_and_counts_for_nothing(
    said: dict[str, Any], pool: ThreadPoolExecutor
) -> None:
    with sender_of(1) as (sender, transport):
        for packet in (msgpack.packb(said), b"garbage"):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
                connection.settimeout(BOUND_S)
                connection.connect(wire.address(transport["socket"]))
                connection.send(packet)
                assert connection.recvmsg(4096, 4096)[:2] == (b"", [])
        arriving = pool.submit(receive, transport)
        digest = publish(sender, tensors(0))
        assert arriving.result(BOUND_S) == (data_of(tensors(0)), digest)


def test_many_silent_connections_are_bounded_and_disturb_no_receiver(pool: ThreadPoolExecutor) -> None:
    with ExitStack() as stack, sender_of(1) as (sender, transport):
        strangers = []
        for _ in range(ipc_session.STRANGERS + 1):
            connection = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            connection.settimeout(BOUND_S)
            connection.connect(wire.address(transport["socket"]))
            strangers.append(connection)
        assert strangers[0].recv(1) == b""
        arriving = pool.submit(receive, transport)
        digest = publish(sender, tensors(0))
        assert arriving.result(BOUND_S) == (data_of(tensors(0)), digest)


# ---- bounds ----


def test_every_engine_is_waited_for() -> None:
    """Each receives once, for all of its ranks."""
    workers = [{"world_size": ranks, "transports": ["ipc"]} for ranks in (2, 1)]
    sender = build(SenderContext(lambda op, body: {"workers": workers}))
    for expected in (2, 1):
        sender.open(MANIFEST)
        assert sender.expected_receivers == expected
        del workers[0]
    with pytest.raises(InvalidRequest, match="no receiver") as caught:
        sender.open(MANIFEST)
    assert caught.value.facts["field"] == "receivers"
    sender.destroy()
    with pytest.raises(InvalidRequest, match="no option") as caught:
        build(SenderContext(lambda op, body: {}, options={"size": 1}))
    assert caught.value.facts["field"] == "options.size"


def test_an_accept_that_fails_is_not_tried_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_plane.transports.ipc.ipc_session.ACCEPT_AGAIN_S", BOUND_S)
    tried, waits, wait = [], threading.Event(), threading.Condition.wait

    def accept(self: socket.socket) -> Any:
        tried.append(self)
        raise OSError(24, "Too many open files")

    def told(self: threading.Condition, timeout: float | None = None) -> bool:
        if timeout == BOUND_S and tried:
            waits.set()
        return wait(self, timeout)

    monkeypatch.setattr(socket.socket, "accept", accept)
    monkeypatch.setattr(threading.Condition, "wait", told)
    with (
        sender_of(1) as (sender, transport),
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as receiver,
    ):
        receiver.connect(f"\0{transport['socket']}")
        assert waits.wait(2 * BOUND_S)
        sender.buffer(0)  # the thread does not hold the lock while it waits
        assert len(tried) == 1


def test_a_sender_gives_up_if_no_receiver_comes() -> None:
    with (
        sender_of(1, first_receiver_s=0.1) as (sender, _),
        pytest.raises(DeadlineExceeded, match="no receiver came"),
    ):
        publish(sender, tensors())


def test_the_sender_does_not_wait_for_a_missing_receiver_and_refuses_it_later(pool: ThreadPoolExecutor) -> None:
    with sender_of(2, other_receivers_s=0.1) as (sender, transport):
        arriving = pool.submit(receive, transport)
        named = iter(fill(MANIFEST, tensors().items(), sender.buffer))
        for number in range(3):
            assert next(named) == number
            sender.send(number)
        with pytest.raises(Unavailable, match="too late"):
            receive(transport)
        for number in named:
            sender.send(number)
        sender.finish(None)
        assert arriving.result(BOUND_S)[0] == data_of(tensors())


def test_a_silent_receiver_is_given_up(pool: ThreadPoolExecutor) -> None:
    with sender_of(2, silent_receiver_s=2.0) as (sender, transport), raw_receiver(transport):
        arriving = pool.submit(receive, transport)
        digest = publish(sender, tensors())
        assert arriving.result(BOUND_S) == (data_of(tensors()), digest)


def test_the_sender_fails_when_all_receivers_have_gone(pool: ThreadPoolExecutor) -> None:
    with sender_of(2) as (sender, transport):
        for _ in range(2):
            with raw_receiver(transport):
                pass
        with pytest.raises(Unavailable, match="no receiver is left"):
            publish(sender, tensors())


def test_closing_wakes_both_sides(pool: ThreadPoolExecutor) -> None:
    with sender_of(2) as (sender, transport):
        arriving = pool.submit(received, IpcTransport(TransportContext()).open(transport, "base"))
        publishing = pool.submit(publish, sender, tensors())
        with raw_receiver(transport) as (connection, _):
            assert msgpack.unpackb(connection.recv(4096)) == {"bucket": 0}
            assert msgpack.unpackb(connection.recv(4096)) == {"bucket": 1}  # the third waits for us
            sender.close()
        with pytest.raises(Unavailable, match="closed"):
            publishing.result(BOUND_S)
        with pytest.raises(Unavailable, match="gone"):
            arriving.result(BOUND_S)


def test_a_waiting_receiver_notices_the_cancellation(pool: ThreadPoolExecutor) -> None:
    with sender_of(1) as (_, transport):
        delivery = IpcTransport(TransportContext()).open(transport, "base")
        cancelled = threading.Event()
        taking = pool.submit(list, delivery.tensors(cancelled.is_set))
        cancelled.set()
        with pytest.raises(EngineFailed, match="cancelled"):
            taking.result(BOUND_S)
        delivery.close()


def test_closing_a_delivery_wakes_its_thread(pool: ThreadPoolExecutor) -> None:
    with sender_of(1) as (_, transport):
        delivery = IpcTransport(TransportContext()).open(transport, "base")
        taking = pool.submit(list, delivery.tensors())
        delivery.close()
        with pytest.raises(Unavailable, match="gone"):
            taking.result(BOUND_S)


def test_a_receiver_gives_up_a_trainer_that_hangs() -> None:
    patient_at_first = IpcTransport(TransportContext(), bucket_s=0.1)
    with sender_of(1) as (_, transport):
        delivery = patient_at_first.open(transport, "base")
        with pytest.raises(DeadlineExceeded, match="silent"):
            list(delivery.tensors())
        delivery.close()
    patient_later = IpcTransport(TransportContext(), first_packet_s=0.1)
    with impostor() as transport, pytest.raises(DeadlineExceeded, match="silent"):
        patient_later.open(transport, "base")


# ---- a fleet ----


def nothing_left(plane: Plane) -> bool:
    return not any(shared_memory(one.process.pid) for one in plane.spawned if one.process.poll() is None)


async def test_a_fleet_takes_one_update_after_another(plane: Plane, trainer_of: Callable[..., Trainer]) -> None:
    client = await plane.client()
    workers = await asyncio.to_thread(plane.spawn_many, 2, model=model_of(plane, 0))
    ids = [*(one.instance_id for one in workers), *plane.spawn_copies(2, model=model_of(plane, 0))]
    for seed in (1, 2):
        trainer = trainer_of(model_of(plane, seed), 4, bucket_bytes=BUCKET_BYTES)
        said = await trainer.says("transport")
        assert said["buckets"] == 6
        reply = await client.run("update_weights", body_of(said["transport"], f"step_{seed}"))
        assert (await trainer.says("ended"))["ended"] is None
        assert reply["version"]["digest"] == model_digest(model_of(plane, seed))
        assert reply["excluded"] == []
        for one in ids:
            await serves(client, one, model_of(plane, seed))
    adapter = make_fake_adapter(plane.tmp / "adapter", 1, model_of(plane, 0))
    trainer = trainer_of(adapter, 4, kind="lora", bucket_bytes=BUCKET_BYTES)
    body = body_of((await trainer.says("transport"))["transport"], "tone")
    reply = await client.run("update_weights", {**body, "target": {"kind": "lora", "op": "load", "name": "a"}})
    assert (await trainer.says("ended"))["ended"] is None
    assert reply["version"]["digest"] == adapter_digest(adapter)
    for state in (await states(client)).values():
        assert state["adapters"]["a"] == reply["version"]
    await plane.until(lambda: nothing_left(plane))


async def test_weights_that_do_not_fit_or_are_not_the_stated_ones_change_nothing(
    plane: Plane, trainer_of: Callable[..., Trainer]
) -> None:
    client = await plane.client()
    (worker,) = await asyncio.to_thread(plane.spawn_many, 1, model=model_of(plane, 0))
    for trainer, match in (
        (trainer_of(plane.model(3, tensors=13), 1), "do not fit"),
        (trainer_of(model_of(plane, 1), 1, corrupt=True), "version digest"),
        (trainer_of(make_fake_adapter(plane.tmp / "adapter", 1, model_of(plane, 0)), 1, kind="lora"), "adapter"),
    ):
        with pytest.raises(InvalidWeights, match=match):
            await client.run("update_weights", body_of((await trainer.says("transport"))["transport"], "one"))
        ended = (await trainer.says("ended"))["ended"]
        assert ended is None or ended["code"] == "unavailable"
        await serves(client, worker.instance_id, model_of(plane, 0))
    with pytest.raises(InvalidRequest, match="no trainer listens"):
        await client.run(
            "update_weights",
            body_of({"backend": "ipc", "socket": "rl-plane-ipc-" + "0" * 32, "secret": "0" * 32}, "one"),
        )
    await plane.until(lambda: nothing_left(plane))


async def test_workers_end_an_update_whose_coordinator_is_gone(
    plane: Plane, trainer_of: Callable[..., Trainer]
) -> None:
    """Its trainer lives, and is silent; its coordinator is gone. The workers end it by themselves."""
    client = await plane.client()
    worker = await asyncio.to_thread(plane.spawn, model=model_of(plane, 0))
    silent = trainer_of(model_of(plane, 1), 1, bucket_bytes=BUCKET_BYTES, holds=[MIDDLE])
    update, _ = await holding(client, silent, "one")
    update.cancel()
    await plane.until(
        lambda: nothing_left(plane), BOUND_S
    )  # far less than a receiver waits for a trainer that lives
    trainer = trainer_of(model_of(plane, 2), 1, bucket_bytes=BUCKET_BYTES)
    await client.run("update_weights", body_of((await trainer.says("transport"))["transport"], "two"))
    await plane.until(lambda: nothing_left(plane))
    await serves(client, worker.instance_id, model_of(plane, 2))
    silent.go_on()
    assert (await silent.says("ended"))["ended"]["code"] == "unavailable"


async def test_a_late_worker_waits_for_the_next_update(plane: Plane, trainer_of: Callable[..., Trainer]) -> None:
    client = await plane.client()
    first = await asyncio.to_thread(plane.spawn, model=model_of(plane, 0))
    trainer = trainer_of(model_of(plane, 1), 1, bucket_bytes=BUCKET_BYTES)
    await client.run("update_weights", body_of((await trainer.says("transport"))["transport"], "one"))
    late = await asyncio.to_thread(plane.spawn, model=model_of(plane, 0))
    assert "source_gone" in await until_behind(plane, client, late.instance_id)
    trainer = trainer_of(model_of(plane, 2), 2, bucket_bytes=BUCKET_BYTES)
    await client.run("update_weights", body_of((await trainer.says("transport"))["transport"], "two"))
    await plane.until(lambda: all_serve(client, "two"))
    for one in (first, late):
        await serves(client, one.instance_id, model_of(plane, 2))


async def test_an_update_in_place_heals_if_its_trainer_dies_half_way(
    plane: Plane, trainer_of: Callable[..., Trainer]
) -> None:
    """The weights do not fit twice. After a failure half-way the committed version is fetched from its own source."""
    client = await plane.client()
    worker = await asyncio.to_thread(plane.spawn, model=model_of(plane, 0))
    trainer = trainer_of(model_of(plane, 1), 1, bucket_bytes=BUCKET_BYTES, holds=[MIDDLE])
    update, _ = await holding(client, trainer, "one", staging="none")
    assert (await states(client))[worker.instance_id]["version"] is None
    trainer.kill()
    with pytest.raises(UpdateAborted, match="trainer is gone"):
        await update
    await plane.until(lambda: all_serve(client, "initial"))
    await serves(client, worker.instance_id, model_of(plane, 0))
    trainer = trainer_of(model_of(plane, 1), 1, bucket_bytes=BUCKET_BYTES)
    transport = (await trainer.says("transport"))["transport"]
    await client.run("update_weights", body_of(transport, "one", staging="none"))
    await serves(client, worker.instance_id, model_of(plane, 1))
    with pytest.raises(InvalidRequest, match="fetched again"):  # the next one could not bring this one back
        await client.run("update_weights", body_of(transport, "two", staging="none"))


# ---- real models ----

PROMPT = [5, 6, 7]


LOAD = {"target": {"kind": "lora", "op": "load", "name": "a"}}


@pytest.mark.timeout(400)
async def test_hf_workers_serve_each_update_and_survive_a_killed_trainer(
    plane: Plane, trainer_of: Callable[..., Trainer]
) -> None:
    from tests.support.hf_fleet import Witnesses, chain

    client, witnesses = await plane.client(), Witnesses(plane)
    ids = await asyncio.to_thread(witnesses.spawn, 2)

    async def serve(base: int, adapter: int | None = None) -> None:
        more = {"temperature": 0.0, "adapter": None if adapter is None else "a"}
        for one in ids:
            assert await generated(client, one, PROMPT, 12, **more) == chain(PROMPT[-1], 12, base, adapter)

    await serve(1)
    await published(client, trainer_of(witnesses.base(2), 2), {"policy": {"staging": "none"}})
    await serve(2)
    await published(client, trainer_of(witnesses.adapter(1), 2, kind="lora"), LOAD)
    await published(client, trainer_of(witnesses.base(3), 2), {})
    await serve(3)
    await serve(3, adapter=1)
    killed = trainer_of(witnesses.base(4), 2, holds=[MIDDLE])
    update, _ = await holding(client, killed, "four")
    killed.kill()
    with pytest.raises(UpdateAborted, match="trainer is gone"):
        await update
    await plane.until(lambda: nothing_left(plane))
    await serve(3)
    await serve(3, adapter=1)
    await published(client, trainer_of(witnesses.base(4), 2), {})
    await serve(4)
    await serve(4, adapter=1)

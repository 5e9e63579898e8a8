"""The `object_store` transport: versions in NATS, published by another process, fetched at any time, and taken away."""

from __future__ import annotations

import asyncio
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import rl_plane.transports.object_store.receiver as receiving
from rl_plane.bus.server import NatsServer
from rl_plane.errors import (
    BusUnreachable,
    EngineFailed,
    InvalidRequest,
    InvalidWeights,
    PlaneError,
    Unauthorized,
    Unavailable,
    UpdateAborted,
)
from rl_plane.protocol.record import VersionSource, first_record
from rl_plane.protocol.subjects import Subjects
from rl_plane.protocol.versions import HostTensor, TensorSpec
from rl_plane.transports.base import TransportContext
from rl_plane.transports.object_store.bulk_socket import NatsSocket
from rl_plane.transports.object_store.receiver import ObjectStoreTransport
from rl_plane.transports.object_store.sender import ObjectStoreSender
from rl_plane.transports.object_store.wire import NoSuchObject, ask
from rl_plane.transports.packed_delivery import PackedDelivery
from rl_plane.transports.packing import fill
from rl_plane.weights.checkpoint import open_checkpoint
from rl_plane.weights.manifest import Manifest, pack
from tests.conftest import stop_process
from tests.support.fleet_updates import all_serve, states
from tests.support.healing import until_behind
from tests.support.object_publishers import MakePublisher, publisher
from tests.support.scripted_worker import decide
from worker.engines.fake.adapter import make_fake_adapter
from worker.receive.staging import adapter_digest, model_digest

__all__ = ["publisher"]

if TYPE_CHECKING:
    from tests.conftest import Plane

pytestmark = [pytest.mark.slow, pytest.mark.parallel]

HEAL_S = 30.0
STALL_S = 1.0
"""In workers of tests in which the trainer stands still on purpose."""
IMPATIENT = f"import rl_plane.transports.object_store.receiver as store; store.STALL_S = {STALL_S}"


def transport_of(plane: Plane, stall_s: float = receiving.STALL_S) -> ObjectStoreTransport:
    return ObjectStoreTransport(TransportContext((), plane.url, plane.namespace, plane.component), stall_s)


def taken(delivery: PackedDelivery) -> dict[str, bytes]:
    return {name: bytes(tensor.data) for name, tensor in delivery.tensors()}


def tensors_in(directory: Path) -> dict[str, bytes]:
    checkpoint = open_checkpoint(directory)
    try:
        return {name: bytes(tensor.data) for name, tensor in checkpoint.tensors()}
    finally:
        checkpoint.close()


def stored(plane: Plane) -> dict[str, dict[str, Any]]:
    """Object → what the server says of its stream."""
    connection = NatsSocket(plane.url, "test", 5)
    try:
        ask_for = {"subject": Subjects(plane.namespace, plane.component).objects}
        streams = ask(connection, "STREAM.LIST", ask_for).get("streams") or []
        return {info["config"]["subjects"][0].rpartition(".")[2]: info for info in streams}
    finally:
        connection.close()


def update_of(transport: dict[str, Any], label: str) -> dict[str, Any]:
    return {"transport": transport, "version": label}


# ---- a whole fleet ----


async def test_base_and_adapter_reach_a_fleet_and_later_workers(plane: Plane, publisher: MakePublisher) -> None:
    model, new = plane.model(0, tensors=5, nbytes=1 << 17), plane.model(1, tensors=5, nbytes=1 << 17)
    adapter = make_fake_adapter(plane.tmp / "weights" / "adapter", 1, model)
    first = plane.spawn(model=model)
    client = await plane.client()
    trainer = publisher(plane, bucket_bytes=1 << 18)
    done = await client.run("update_weights", update_of(await trainer.publish(new), "one"))
    assert done["version"]["digest"] == model_digest(new)
    body = {
        "target": {"kind": "lora", "op": "load", "name": "a"},
        "transport": await trainer.publish(adapter, "lora"),
        "version": "adapter",
    }
    assert (await client.run("update_weights", body))["version"]["digest"] == adapter_digest(adapter)
    trainer.kill()  # what it has published stays
    first.kill()
    late = await asyncio.to_thread(plane.spawn, model=model)
    again = await asyncio.to_thread(plane.spawn, model=model, instance_id=first.instance_id)
    await plane.until(lambda: all_serve(client, "one"), HEAL_S)
    found = await states(client)
    assert found.keys() == {late.instance_id, again.instance_id}
    for state in found.values():
        assert state["version"]["digest"] == model_digest(new)
        assert state["adapters"]["a"]["digest"] == adapter_digest(adapter)


async def test_an_object_that_was_removed_is_gone_until_an_update_brings_another(
    plane: Plane, publisher: MakePublisher
) -> None:
    plane.spawn()
    client = await plane.client()
    trainer = publisher(plane)
    transport = await trainer.publish(plane.model(1))
    await client.run("update_weights", update_of(transport, "one"))
    await trainer.step("remove", transport["object"])
    late = await asyncio.to_thread(plane.spawn)
    assert "source_gone" in await until_behind(plane, client, late.instance_id)
    with pytest.raises(InvalidWeights, match="source_gone") as caught:
        await client.run("update_weights", update_of(transport, "again"))
    assert caught.value.facts["field"] == "transport.object"
    await client.run("update_weights", update_of(await trainer.publish(plane.model(2)), "two"))
    await plane.until(lambda: all_serve(client, "two"), HEAL_S)


async def test_a_publisher_that_dies_half_way_leaves_no_version(plane: Plane, publisher: MakePublisher) -> None:
    worker = plane.spawn(patch=IMPATIENT)
    client = await plane.client()
    trainer = publisher(plane, bucket_bytes=1024)
    half = await trainer.step("open", "base", str(plane.model(1)))
    await trainer.step("send")
    update = asyncio.create_task(client.run("update_weights", update_of(half, "half")))
    trainer.kill()
    with pytest.raises(UpdateAborted, match="the publisher has sent no more"):
        await update
    state = (await states(client))[worker.instance_id]
    assert state["admission"]["open"]
    assert (state["sequence"], state["staged"]) == (0, None)
    assert stored(plane)[half["object"]]["config"]["max_age"] > 0, "its bytes go by themselves"
    # Another publisher may be writing it: it is left alone until it was silent for long.
    first = await publisher(plane).publish(plane.model(1))
    assert stored(plane).keys() == {half["object"], first["object"]}
    second = await publisher(plane, abandoned_s=0).publish(plane.model(1))
    assert stored(plane).keys() == {first["object"], second["object"]}
    await client.run("update_weights", update_of(second, "whole"))
    assert await all_serve(client, "whole")


async def test_the_newest_and_the_committed_stay(plane: Plane, publisher: MakePublisher) -> None:
    plane.spawn()
    client = await plane.client()
    trainer = publisher(plane, keep=1)
    adapter = make_fake_adapter(plane.tmp / "weights" / "adapter", 1, plane.model())
    base, lora = await trainer.publish(plane.model(1)), await trainer.publish(adapter, "lora")
    await client.run("update_weights", update_of(base, "one"))
    target = {"kind": "lora", "op": "load", "name": "a"}
    await client.run("update_weights", {"target": target, **update_of(lora, "adapter")})
    others = [(await trainer.publish(plane.model(2)))["object"] for _ in range(3)]
    assert stored(plane).keys() == {base["object"], lora["object"], *others[1:]}
    for info in stored(plane).values():
        assert info["config"]["sealed"], "no process changes a whole object"
        assert not info["config"]["max_age"]
    another = publisher(plane, keep=0, publisher="another", abandoned_s=0)
    half = await trainer.step("open", "base", str(plane.model(2)))
    before = stored(plane).keys()
    theirs = [(await another.publish(plane.model(2)))["object"] for _ in range(2)]
    assert stored(plane).keys() == {*before, theirs[1]}, "only its own go"
    assert half["object"] in before


async def test_the_versions_that_a_committed_delta_needs_stay_too(plane: Plane, publisher: MakePublisher) -> None:
    trainer, client = publisher(plane, keep=0), await plane.client()
    full, one, two, unnamed = [await trainer.publish(plane.model(1)) for _ in range(4)]
    assert unnamed["object"] in stored(plane), "without a record it is unknown which versions are needed"
    changes = [VersionSource(transport, encoding="delta", base="d") for transport in (one, two)]
    source = replace(changes[1], before=replace(changes[0], before=VersionSource(full)))
    await client.bus.ensure_bucket(client.subjects().state)
    await decide(client.bus, client.subjects(), replace(first_record("d"), source=source))
    last = await trainer.publish(plane.model(1))
    assert stored(plane).keys() == {transport["object"] for transport in (full, one, two, last)}


@pytest.mark.parametrize("still", ["publisher", "server"])
async def test_an_aborted_update_ends_in_the_middle_of_a_bucket(
    own_nats: tuple[NatsServer, Plane], publisher: MakePublisher, still: str
) -> None:
    """Only the cancellation ends the receive in time, if the publisher or NATS hangs."""
    server, plane = own_nats
    transport = transport_of(plane)
    trainer = publisher(plane, bucket_bytes=4 << 20)
    version = await trainer.step("open", "base", str(plane.model(1, tensors=4, nbytes=4 << 20)))
    await trainer.step("send")
    delivery = transport.open(version, "base")
    cancelled = threading.Event()
    arriving = delivery.tensors(cancelled.is_set)
    next(arriving)
    if still == "server":
        stop_process(server.process.pid)
    waiting = asyncio.create_task(asyncio.to_thread(next, arriving))
    cancelled.set()
    try:
        with pytest.raises(EngineFailed, match="cancelled"):
            await asyncio.wait_for(waiting, receiving.STALL_S / 2)
        await asyncio.to_thread(delivery.close)
    finally:
        server.process.send_signal(signal.SIGCONT)


def test_a_manifest_of_megabytes_arrives(plane: Plane) -> None:
    specs = {f"layer.{number}.{'x' * 100}": TensorSpec("U8", (1,)) for number in range(20_000)}
    manifest = Manifest(pack(specs.items(), 1 << 20))
    given = {name: HostTensor(spec, memoryview(name[6:7].encode())) for name, spec in specs.items()}
    sender = ObjectStoreSender(plane.url, plane.namespace, plane.component)
    transport, digests = sender.open(manifest), dict[str, str]()
    for number in fill(manifest, given.items(), sender.buffer, digests):
        sender.send(number)
    sender.finish(digests)
    delivery = transport_of(plane).open(transport, "base")
    assert taken(delivery) == {name: bytes(tensor.data) for name, tensor in given.items()}
    assert delivery.digest == manifest.digested(digests).digest
    delivery.close()
    sender.close()


async def test_a_version_is_received_while_it_is_written(plane: Plane, publisher: MakePublisher) -> None:
    plane.spawn()
    client = await plane.client()
    trainer = publisher(plane, bucket_bytes=1024)
    transport = await trainer.step("open", "base", str(plane.model(1)))
    await trainer.step("send")
    update = asyncio.create_task(client.run("update_weights", update_of(transport, "one")))
    await trainer.step("send")
    digest = await trainer.step("finish")
    assert (await update)["version"]["digest"] == digest == model_digest(plane.model(1))


async def test_digests_that_the_bytes_do_not_have_are_refused(plane: Plane) -> None:
    plane.spawn()
    client = await plane.client()
    checkpoint = open_checkpoint(plane.model(1))
    sender = ObjectStoreSender(plane.url, plane.namespace, plane.component)
    manifest = Manifest(pack(checkpoint.specs.items(), 1024))
    given: dict[str, str] = {}
    for digests, words in ((given, "publisher stated"), (None, "")):
        transport = sender.open(manifest)
        for number in fill(manifest, checkpoint.tensors(), sender.buffer, digests):
            sender.send(number)
        if digests is not None:
            digests["layers.2.weight"] = "5" * 32
        sender.finish(digests)
        if words:
            with pytest.raises(InvalidWeights, match=words) as caught:
                await client.run("update_weights", update_of(transport, "wrong"))
            assert caught.value.facts["tensor"] == "layers.2.weight"
        else:  # none are stated: the worker's own count
            done = await client.run("update_weights", update_of(transport, "right"))
            assert done["version"]["digest"] == model_digest(plane.model(1))
    sender.close()
    checkpoint.close()


# ---- a server that ends and starts again ----


async def test_publisher_and_receiver_continue_after_a_kill_of_nats(
    own_nats: tuple[NatsServer, Plane], publisher: MakePublisher
) -> None:
    server, plane = own_nats
    model = plane.model(1, tensors=6, nbytes=5 << 20)
    trainer = publisher(plane, bucket_bytes=6 << 20)
    transport = await trainer.step("open", "base", str(model))
    await trainer.step("send")
    server.kill()
    trainer.begin("finish")
    server.start()
    digest = await trainer.answer()
    delivery = transport_of(plane).open(transport, "base")
    arriving = delivery.tensors()
    name, tensor = next(arriving)
    found = {name: bytes(tensor.data)}
    server.kill()
    server.start()
    found |= {name: bytes(tensor.data) for name, tensor in arriving}
    delivery.close()
    assert found == tensors_in(model)
    assert delivery.digest == digest == model_digest(model)


def test_answers_that_are_lost_change_nothing(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    lost: list[str] = []

    def ask_in_vain(connection: NatsSocket, call: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        answer = ask(connection, call, body)
        if call not in lost and not call.startswith("STREAM.MSG"):
            lost.append(call)
            raise ConnectionError("lost")
        return answer

    monkeypatch.setattr("rl_plane.transports.object_store.sender.ask", ask_in_vain)
    sender = ObjectStoreSender(plane.url, plane.namespace, plane.component)
    transport = sender.open(Manifest(pack([("a", TensorSpec("U8", (10,)))])))
    sender.send(0)
    sender.finish(None)
    sender.remove(transport["object"])
    sender.close()
    assert [call.split(".")[1] for call in lost] == ["LIST", "CREATE", "UPDATE", "DELETE"]
    assert not stored(plane)


async def test_a_server_that_stays_away_ends_a_receive(
    own_nats: tuple[NatsServer, Plane], publisher: MakePublisher
) -> None:
    server, plane = own_nats
    transport_here = transport_of(plane, STALL_S)
    # More than is read ahead.
    transport = await publisher(plane, bucket_bytes=1024).publish(plane.model(1, nbytes=8 << 20))
    delivery = transport_here.open(transport, "base")
    arriving = delivery.tensors()
    next(arriving)
    server.kill()
    with pytest.raises(BusUnreachable, match="NATS did not give the weights"):
        list(arriving)
    delivery.close()
    with pytest.raises(BusUnreachable):
        transport_here.open(transport, "base")


async def test_an_object_that_is_removed_while_it_is_written_or_read_is_an_error(plane: Plane) -> None:
    specs = {str(number): TensorSpec("U8", (3 << 20,)) for number in range(3)}
    sender = ObjectStoreSender(plane.url, plane.namespace, plane.component)
    transport = sender.open(Manifest(pack(specs.items(), 1 << 20)))
    sender.send(0)
    delivery = transport_of(plane).open(transport, "base")
    arriving = delivery.tensors()
    next(arriving)
    sender.remove(transport["object"])
    with pytest.raises(InvalidWeights, match="source_gone"):
        next(arriving)
    with pytest.raises(Unavailable, match="was removed while it was written"):
        sender.send(1)
    sender.close()
    sender.close()
    delivery.close()


async def test_a_sender_that_is_closed_before_the_end_leaves_nothing(plane: Plane) -> None:
    sender = ObjectStoreSender(plane.url, plane.namespace, plane.component)
    sender.open(Manifest(pack([("a", TensorSpec("U8", (100,)))])))
    assert len(stored(plane)) == 1
    sender.close()
    assert not stored(plane)
    with pytest.raises(InvalidRequest, match="no version is open"):
        sender.send(0)


async def test_a_sender_that_is_closed_by_another_thread_ends(own_nats: tuple[NatsServer, Plane]) -> None:
    server, plane = own_nats
    sender = ObjectStoreSender(plane.url, plane.namespace, plane.component)
    sender.open(Manifest(pack([("a", TensorSpec("U8", (3 << 20,)))])))
    server.kill()
    sending = asyncio.create_task(asyncio.to_thread(sender.send, 0))
    await plane.until(lambda: sender._socket is None)  # it is trying again
    sender.close()
    with pytest.raises(Unavailable, match="was closed"):
        await sending


# ---- other servers ----


def served(tmp_path: Path, config: str) -> NatsServer:
    path = tmp_path / "nats.conf"
    path.write_text(config)
    server = NatsServer(config=path)
    server.start()
    return server


def test_an_object_crosses_a_server_with_small_messages_and_a_password(tmp_path: Path) -> None:
    config = "max_payload: 20KB\nauthorization { user: weights, password: secret }"
    server = served(tmp_path, config)
    try:
        url = server.url.replace("//", "//weights:secret@")
        specs = {"a": TensorSpec("U8", (50_000,)), "empty": TensorSpec("F32", (0,)), "b": TensorSpec("BF16", ())}
        data = {name: memoryview(bytes([7]) * spec.nbytes) for name, spec in specs.items()}
        manifest = Manifest(pack(specs.items(), 64))
        sender = ObjectStoreSender(url, "n", "c")
        digests: dict[str, str] = {}
        transport = sender.open(manifest)
        tensors = ((name, HostTensor(spec, data[name])) for name, spec in specs.items())
        for number in fill(manifest, tensors, sender.buffer, digests):
            sender.send(number)
        sender.finish(digests)
        sender.close()
        delivery = ObjectStoreTransport(TransportContext((), url, "n", "c")).open(transport, "base")
        assert taken(delivery) == {name: bytes(view) for name, view in data.items()}
        assert delivery.digest == manifest.digested(digests).digest
        delivery.close()
        with pytest.raises(ConnectionError, match="Authorization"):
            NatsSocket(server.url, "test", 5)
        with pytest.raises(Unauthorized, match="wants a key") as stays_out:  # at once: it is no outage
            ObjectStoreSender(server.url, "n", "c", outage_s=600).open(manifest)
        assert "--nats-nkey" in stays_out.value.facts["fix"]
    finally:
        server.stop()


def test_a_server_without_room_says_so_and_keeps_nothing(tmp_path: Path) -> None:
    server = served(tmp_path, "jetstream { max_file_store: 1MB }")
    try:
        sender = ObjectStoreSender(server.url, "n", "c")
        sender.open(Manifest(pack([("a", TensorSpec("U8", (4 << 20,)))])))
        with pytest.raises(Unavailable, match=r"NATS refused a chunk of the weights: .*(exceeded|insufficient)"):
            sender.send(0)
        sender.close()
        connection = NatsSocket(server.url, "test", 5)
        assert not ask(connection, "STREAM.LIST", {"subject": Subjects("n", "c").objects}).get("streams")
        connection.close()
    finally:
        server.stop()


# ---- what is refused ----


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        ({}, "transport.object"),
        ({"object": 5}, "transport.object"),
        ({"object": "../KV_x"}, "transport.object"),
        ({"object": "A" * 20}, "transport.object"),
        ({"object": "0" * 20, "stream": "KV_x"}, "transport.stream"),
    ],
)
def test_a_wrong_request_names_its_field(plane: Plane, request_: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        transport_of(plane).open({"backend": "object_store", **request_}, "base")
    assert caught.value.facts["field"] == field
    assert caught.value.facts["fix"]


def test_a_worker_reads_only_objects_of_its_own_component(plane: Plane) -> None:
    manifest = Manifest(pack([("a", TensorSpec("U8", (10,)))]))
    sender = ObjectStoreSender(plane.url, plane.namespace, "a_b")
    transport = sender.open(manifest)
    sender.send(0)
    sender.finish(None)
    sender.close()
    own = ObjectStoreTransport(TransportContext((), plane.url, plane.namespace, "a_b")).open(transport, "base")
    assert own.specs.keys() == {"a"}
    own.close()
    for namespace, component in ((plane.namespace, "a"), (f"{plane.namespace}_a", "b")):
        other = ObjectStoreTransport(TransportContext((), plane.url, namespace, component))
        with pytest.raises(InvalidWeights, match="of this component"):
            other.open(transport, "base")


async def test_an_object_of_another_kind_is_refused(plane: Plane, publisher: MakePublisher) -> None:
    trainer = publisher(plane)
    adapter = make_fake_adapter(plane.tmp / "weights" / "adapter", 1, plane.model())
    base, lora = await trainer.publish(plane.model()), await trainer.publish(adapter, "lora")
    with pytest.raises(InvalidWeights, match="not an adapter"):
        transport_of(plane).open(base, "lora")
    with pytest.raises(InvalidWeights, match="not base weights"):
        transport_of(plane).open(lora, "base")


@pytest.mark.parametrize("layout", [None, "{}", "5", '{"v": 1, "chunk_bytes": 0, "manifest_bytes": 9}'])
def test_a_stream_that_is_no_object_is_refused(plane: Plane, layout: str | None) -> None:
    made = Subjects(plane.namespace, plane.component).object("0" * 20)
    connection = NatsSocket(plane.url, "test", 5)
    config = {"name": made.stream, "subjects": [made.subject], "metadata": {"rl_plane_layout": layout or ""}}
    ask(connection, f"STREAM.CREATE.{made.stream}", config)
    try:
        with pytest.raises(InvalidWeights, match="has a layout"):
            transport_of(plane).open({"backend": "object_store", "object": made.id}, "base")
    finally:
        ask(connection, f"STREAM.DELETE.{made.stream}")
        with pytest.raises(NoSuchObject):
            ask(connection, f"STREAM.INFO.{made.stream}")
        connection.close()


def test_a_publisher_whose_server_is_away_ends() -> None:
    sender = ObjectStoreSender("nats://127.0.0.1:1", outage_s=0.2)
    with pytest.raises(PlaneError, match="NATS did not take the weights"):
        sender.open(Manifest(pack([("a", TensorSpec("U8", (10,)))])))

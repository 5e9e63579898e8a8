"""Helpers of `tests/transports/test_ipc_transport.py` and of other tests."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import os
import secrets
import socket
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgpack
import pytest
import pytest_asyncio

from rl_plane.client import RlClient
from rl_plane.transports.base import TransportContext
from rl_plane.transports.ipc import wire
from rl_plane.transports.ipc.receiver import IpcTransport
from tests.conftest import Plane
from tests.support.fleet_updates import generated
from tests.support.ipc_trainer import Trainer
from worker.engines.fake.adapter import fake_token
from worker.receive.staging import model_digest

BOUND_S = 30.0
"""More than any step takes on a busy machine."""


def receive(transport: dict[str, Any], kind: Any = "base") -> tuple[dict[str, bytes], str | None]:
    return received(IpcTransport(TransportContext()).open(transport, kind))


def received(delivery: Any) -> tuple[dict[str, bytes], str | None]:
    try:
        return {name: bytes(tensor.data) for name, tensor in delivery.tensors()}, delivery.digest
    finally:
        delivery.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def descriptors(pid: int | str = "self") -> list[str]:
    """The sockets between processes and the memory that a process has open, without what tracebacks of expected errors
    hold. A thread of an earlier test may open other sockets at any time."""
    if pid == "self":
        gc.collect()
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    local = {line.split()[6] for line in Path("/proc/net/unix").read_text().splitlines()[1:]}
    return sorted(one for one in found if one.startswith("/memfd:") or one[len("socket:[") : -1] in local)


def more_descriptors(before: list[str]) -> list[str]:
    """The descriptors that are open and were not open before: an earlier test's threads may close theirs late."""
    return sorted((Counter(descriptors()) - Counter(before)).elements())


def maps(pid: int | str = "self") -> list[str]:
    if pid == "self":
        gc.collect()
    return [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "memfd:rl-plane-ipc" in line]


def shared_memory(pid: int | str = "self") -> list[str]:
    """The memory of ipc senders that is open or mapped in a process."""
    return maps(pid) + [one for one in descriptors(pid) if "memfd:rl-plane-ipc" in one]


def memory(data: bytes, seals: int = fcntl.F_SEAL_SHRINK) -> int:
    descriptor = os.memfd_create("rl-plane-ipc", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(descriptor, data)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


@contextmanager
def listening() -> Iterator[tuple[socket.socket, dict[str, Any]]]:
    """Listens as a sender does, and yields the listener and the `transport` of its update."""
    name = f"rl-plane-ipc-{secrets.token_hex(16)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.settimeout(BOUND_S)
        listener.bind(wire.address(name))
        listener.listen()
        yield listener, {"backend": "ipc", "socket": name, "secret": "0" * 32}


@contextmanager
def impostor(*packets: Any, given: Callable[[], list[int]] = lambda: []) -> Iterator[dict[str, Any]]:
    """Listens as a sender does, and sends these packets, the first with descriptors."""
    with listening() as (listener, transport):

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, suppress(OSError):  # the other side may have gone before it has heard all
                sent = given()
                try:
                    for packet in packets:
                        raw = packet if isinstance(packet, bytes) else msgpack.packb(packet)
                        socket.send_fds(connection, [raw], sent if packet is packets[0] else [])
                finally:
                    wire.close_all(sent)
                while connection.recv(4096):  # until it has
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield transport
        finally:
            thread.join(BOUND_S)
            assert not thread.is_alive()


@contextmanager
def raw_receiver(transport: dict[str, Any]) -> Iterator[tuple[socket.socket, list[int]]]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(BOUND_S)
        connection.connect(wire.address(transport["socket"]))
        wire.send_packet(connection, {"secret": transport["secret"]})
        _, given = wire.read_packet(connection, 3)
        try:
            yield connection, given
        finally:
            wire.close_all(given)


@pytest_asyncio.fixture
async def trainer_of(plane: Plane) -> AsyncIterator[Callable[..., Trainer]]:
    with ExitStack() as stack:

        def start(directory: Path, receivers: int, **options: Any) -> Trainer:
            trainer = Trainer()
            stack.callback(trainer.close)
            trainer.publish(directory, receivers, **options)
            return trainer

        yield start


def model_of(plane: Plane, seed: int) -> Path:
    return plane.model(seed, tensors=12)


BUCKET_BYTES = 2048
"""The size of a bucket; a model has 12 kB."""

MIDDLE = 4
"""All have taken the buckets 0 to 2 by then."""


async def serves(client: RlClient, instance_id: str, directory: Path) -> None:
    expected = [fake_token(model_digest(directory), [5, 6], position) for position in range(4)]
    assert await generated(client, instance_id, [5, 6], 4) == expected


def body_of(transport: dict[str, Any], version: str, **policy: Any) -> dict[str, Any]:
    return {"transport": transport, "version": version, "policy": policy}


async def holding(
    client: RlClient, trainer: Trainer, version: str, **policy: Any
) -> tuple[asyncio.Task[dict[str, Any]], dict[str, Any]]:
    """An update that has come to where its trainer holds, and what the trainer said there."""
    transport = (await trainer.says("transport"))["transport"]
    update = asyncio.create_task(client.run("update_weights", body_of(transport, version, **policy)))
    return update, await trainer.says("at")


async def published(client: RlClient, trainer: Trainer, body: dict[str, Any]) -> dict[str, Any]:
    transport = (await trainer.says("transport"))["transport"]
    reply = await client.run("update_weights", {**body, "transport": transport})
    assert (await trainer.says("ended"))["ended"] is None
    assert reply["excluded"] == []
    return reply

"""Strangers at every socket on which a fleet and its trainers listen, and the page that lists these sockets."""

from __future__ import annotations

import asyncio
import os
import re
import socket
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest
import torch.distributed as dist

from frontend.server.options import FrontendOptions
from rl_plane.bus.server import NatsServer
from rl_plane.publish import WeightPublisher
from rl_plane.publish.fleet_access import BlockingFleet
from tests.conftest import Plane
from tests.support.fleet_updates import all_serve, states, update_of
from tests.support.frontend_here import started
from tests.support.listeners import Listener, family, listeners
from tests.support.mixed_fleet import ARGUMENTS, START_S
from tests.support.paths import ROOT
from worker.receive.staging import model_digest
from worker.testing.tiny_model import make_witness_model

pytestmark = [pytest.mark.slow, pytest.mark.parallel, pytest.mark.timeout(600)]

MANY = 100
"""Connections of one stranger to each socket: more than any socket's bound."""
CONNECT_S = 0.2
"""The time in which a local socket accepts, unless it drops connections."""
READ_S = 0.3
BOUND_S = 60.0
GARBAGE = (b"GET / HTTP/1.1\r\n\r\n", b"\x00\x00\x00\x10half", bytes(range(256)) * 8)
"""Words of another protocol, half a frame, and bytes of no protocol."""
SHAPE = {"tensors": 40, "nbytes": 65536}
NAMES = re.compile(rb"xxh3|blake3|tensor|metadata|manifest|handles")
"""Words that only an answer to a receiver has."""

Row = tuple[str, str, str]
"""(process, socket, address) of a listener, in the words of the page."""


def rows(part: str) -> Counter[Row]:
    """The listeners that the page lists for a part."""
    found: Counter[Row] = Counter()
    for line in (ROOT / "docs" / "security-data-planes.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 7 and cells[0] == part:
            found[cells[1], cells[3], cells[4]] += 1
    assert found, f"the page has no row of {part}"
    return found


def row(process: str, listener: Listener, asked: str = "host") -> Row:
    """The row of a listener. Fails if it listens beyond 127.0.0.1, which every test here asks for."""
    if listener.kind == "tcp":
        assert listener.address == "127.0.0.1", listener
        return process, "tcp", asked
    if listener.address.startswith("@"):
        return process, listener.kind, "abstract name"
    assert listener.private, listener
    return process, listener.kind, "private directory"


class Strangers:
    """Connects to sockets, as a process that knows nothing but the address. Its connections stay until the end."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.heard = b""
        """All that was answered."""

    def attack(self, found: Iterable[Listener]) -> None:
        for listener in found:
            speaking = []
            for said in GARBAGE:
                connection = self._connected(listener)
                if connection is not None:
                    with suppress(OSError):
                        connection.send(said)
                    speaking.append(connection)
            for connection in speaking:
                self._hear(connection)
            for _ in range(MANY):
                if self._connected(listener) is None:
                    break

    def _connected(self, listener: Listener) -> socket.socket | None:
        if listener.kind == "tcp":
            connection, address = socket.socket(), (listener.address, listener.port)
        else:
            kind = socket.SOCK_SEQPACKET if listener.kind == "seqpacket" else socket.SOCK_STREAM
            name = re.sub("^@", "\0", listener.address)
            connection, address = socket.socket(socket.AF_UNIX, kind), name  # type: ignore[assignment]
        self._stack.enter_context(connection)
        connection.settimeout(CONNECT_S)
        try:
            connection.connect(address)
        except OSError:
            return None
        return connection

    def _hear(self, connection: socket.socket) -> None:
        connection.settimeout(READ_S)
        with suppress(OSError):
            data, ancillary, *_ = connection.recvmsg(1 << 16, 1 << 12)
            assert not ancillary, "descriptors were given out"
            self.heard += data


class Watched:
    """The trainer in this process and the workers of a fleet: attacks each socket as soon as it is there."""

    def __init__(self, plane: Plane, strangers: Strangers) -> None:
        self._processes = {"trainer": [os.getpid()]}
        self._processes |= {
            f"worker {number}": family(one.process.pid) for number, one in enumerate(plane.spawned)
        }
        self._strangers = strangers
        self._before = self._now()
        self.found: set[tuple[str, Listener]] = set()
        self.secrets: set[str] = set()

    def _now(self) -> set[tuple[str, Listener]]:
        return {(name, one) for name, pids in self._processes.items() for one in listeners(pids)}

    def look(self) -> None:
        new = self._now() - self._before
        self._strangers.attack(one for _, one in new)
        self.found |= new

    def of(self, process: str) -> Counter[Row]:
        return Counter(row(process.split()[0], one) for name, one in self.found if name == process)


class WatchedFleet(BlockingFleet):
    """Looks before each op of the publisher that changes something. Listeners come and go meanwhile."""

    def __init__(self, plane: Plane, watched: Watched) -> None:
        super().__init__(plane.url, namespace=plane.namespace, component=plane.component)
        self._watched = watched

    def run(self, op: str, body: dict[str, Any], request_id: str = "") -> dict[str, Any]:
        if op in ("init_transport", "prepare_weights_update", "update_weights", "complete_weights_update"):
            self._watched.secrets |= set(re.findall(r"'secret': '(\w+)'", repr(body)))
            self._watched.look()
        return super().run(op, body, request_id)


@pytest.fixture
def strangers() -> Iterator[Strangers]:
    with ExitStack() as stack:
        yield Strangers(stack)


@pytest.mark.parametrize("backend", ["gloo", "ipc", "nixl"])
async def test_strangers_at_the_sockets_of_an_update_get_and_change_nothing(
    backend: str, plane: Plane, strangers: Strangers
) -> None:
    """The update commits with the right digest, nothing is given out, and the page lists each socket."""
    if backend == "nixl":
        pytest.importorskip("nixl")
    plane.spawn_many(2, model=plane.model(0, **SHAPE))
    client = await plane.client()
    watched = Watched(plane, strangers)
    fleet = WatchedFleet(plane, watched)
    # By nixl, workers listen for one another too.
    options: dict[str, Any] = {"bucket_bytes": 1 << 18, "workers": 2, "encoding": "full"}
    publisher = WeightPublisher(plane.model(1, **SHAPE), fleet, transport=backend, **options)
    try:
        await publisher.publish_async("one")
        await asyncio.to_thread(watched.look)
        found = {process: watched.of(process) for process in ("trainer", "worker 0", "worker 1")}
        digests = {"one": {one["version"]["digest"] for one in (await states(client)).values()}}
        await publisher.publish_async("two")  # while the first strangers are connected still
        digests["two"] = {one["version"]["digest"] for one in (await states(client)).values()}
        replies = repr([await client.run(op) for op in ("state", "updates", "workers")])
    finally:
        await asyncio.to_thread(publisher.close)
    assert digests == {label: {model_digest(plane.model(1, **SHAPE))} for label in ("one", "two")}
    assert await all_serve(client, "two")
    listed = rows(backend)
    assert found["trainer"] == Counter({key: count for key, count in listed.items() if key[0] == "trainer"})
    for name in ("worker 0", "worker 1"):
        assert found[name] == Counter({key: count for key, count in listed.items() if key[0] == "worker"})
    assert watched.secrets, "the update had a secret"
    assert not NAMES.search(strangers.heard), strangers.heard
    logs = "".join(log.read_text(errors="replace") for log in plane.tmp.glob("*.log"))
    for secret in watched.secrets:
        assert secret.encode() not in strangers.heard
        assert secret not in replies
        assert secret not in logs


async def test_nats_frontend_and_worker_have_only_the_listed_sockets(plane: Plane, nats: NatsServer) -> None:
    worker = plane.spawn()
    assert listeners(family(worker.process.pid)) == set()
    assert Counter(row("nats-server", one) for one in listeners([nats.process.pid])) == rows("nats")
    before = listeners([os.getpid()])
    async with started(FrontendOptions(plane.url, plane.namespace, plane.component, rl_port=0, http_port=0)):
        found = listeners([os.getpid()]) - before
    assert Counter(row("frontend", one) for one in found) == rows("frontend")


@pytest.mark.parametrize(
    "engine", [pytest.param(name, marks=pytest.mark.engines(name)) for name in ("vllm", "sglang")]
)
async def test_a_real_engine_has_only_listed_sockets_and_survives_strangers(
    engine: str, plane: Plane, strangers: Strangers
) -> None:
    """The engine's own processes are reached on this machine only, and by files only from its own user."""
    first, other = (
        make_witness_model(plane.tmp / "weights" / f"witness{seed}", seed, "bfloat16") for seed in (1, 2)
    )
    worker = plane.spawn(ready=False, engine=engine, model=first, **ARGUMENTS[engine]).wait_ready(START_S)
    found = listeners(family(worker.process.pid))
    assert {row("engine", one, "loopback") for one in found} == set(rows(engine))
    await asyncio.to_thread(strangers.attack, (one for one in found if one.kind == "tcp"))
    client = await plane.client()
    reply = await client.run("update_weights", update_of(other, "two"))
    assert reply["version"]["digest"] == model_digest(other)
    assert await all_serve(client, "two")


def test_torchs_own_store_listens_everywhere_as_the_page_says_of_a_trainers_own_group() -> None:
    """If torch mends that, the page is wrong, and so are the reasons for a listener of our own."""
    before = listeners([os.getpid()])
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    (found,) = listeners([os.getpid()]) - before
    assert (found.port, found.everywhere) == (store.port, True)

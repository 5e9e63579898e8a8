"""The shared fixtures: a real nats-server per module, a namespace per test, and real worker processes that always
end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.util
import inspect
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from rl_plane.bus.lock import LOCK_TIMINGS, LockTimings
from rl_plane.bus.server import NatsServer
from rl_plane.client import RlClient
from rl_plane.fleet.fleet import Fleet
from rl_plane.membership.worker_calls import BusConnector
from rl_plane.transports.base import TransportContext
from rl_plane.transports.checkpoint_delivery import CheckpointDelivery
from rl_plane.transports.filesystem.receiver import FilesystemTransport
from rl_plane.weights.checkpoint import Kind
from tests.support.range_server import RangeServer
from tests.support.zygote import fork_module, start_zygote
from worker.engines.fake.adapter import make_fake_model

os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
"""torch asks a name server about each address that it connects to: an answer that is lost is not to take 5 s."""

TESTS = Path(__file__).parent
LONGEST = (
    "soak/test_soak.py",
    "sim/test_simulation.py",
    "engines/test_two_ranks.py",
    "engines/test_two_nodes.py",
    "kill/test_kill_matrix.py",
    "publish/test_publish_owners.py",
    "fleet/test_updates.py",
    "engines/test_sglang_moe.py",
    "engines/test_vllm_moe.py",
    "engines/test_engine_updates.py",
    "engines/test_engine_generation.py",
    "fleet/test_openapi_fuzz.py",
    "transports/test_nixl_fleet.py",
    "fleet/test_worker_healing.py",
)
"""The files that take a minute or more, the longest first."""

START_S = 30.0
"""A worker process is up within a second on an idle machine."""


gc.disable()
"""Until the tests are collected: the collector would scan thousands of them again and again, and find no garbage."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Takes the longest files first, lest one of them runs beside idle cores at the end. Then takes those of all
    folders in turn: most tests of tests/fleet wait, most of tests/publish and tests/sim compute."""
    folders: dict[Path, list[Path]] = {}
    for path in dict.fromkeys(item.path.relative_to(TESTS) for item in items):
        folders.setdefault(Path(path.parts[0]), []).append(path)
    place = {path: (i + 0.5) / len(files) for files in folders.values() for i, path in enumerate(files)}
    place |= {path: LONGEST.index(str(path)) - len(LONGEST) for path in place if str(path) in LONGEST}
    items.sort(key=lambda item: place[item.path.relative_to(TESTS)])


def pytest_collection_finish() -> None:
    """Excludes the modules and the tests from garbage collection. Many tests collect garbage, and each of these
    collections would scan thousands of tests for a second."""
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("engines"):
        lacking = [name for name in mark.args if importlib.util.find_spec(name) is None]
        if lacking:
            pytest.skip(f"{' and '.join(lacking)} not installed: make engines")


def stop_process(pid: int) -> None:
    """SIGSTOP to a child of ours. Returns when it stands still: the signal alone leaves it time for one more
    answer."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


def lives(process: psutil.Process) -> bool:
    """An orphan that has ended stays a zombie: this process adopts it, and doesn't ask for its code."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def pytest_runtest_teardown() -> None:
    """Lets the garbage collector drop the ZeroMQ contexts that an engine has left in this process.

    Their sockets are open still, and pyzmq waits for these without an end: the process would hang in any later test."""
    if (zmq := sys.modules.get("zmq")) is not None:
        zmq.Context.__del__ = lambda context: None


@dataclass
class Spawned:
    """A worker process. Its log is beside the test's other files."""

    instance_id: str
    process: subprocess.Popen[str]
    log: Path
    instance_ids: list[str] = field(default_factory=list)

    def wait_ready(self, bound_s: float = START_S) -> Spawned:
        assert self.process.stdout is not None
        if not self.instance_ids and select.select([self.process.stdout], [], [], bound_s)[0]:
            self.instance_ids = self.process.stdout.readline().split()
        assert self.instance_ids, f"the worker did not start:\n{self.log.read_text()}"
        return self

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def stop(self) -> None:
        stop_process(self.process.pid)

    def go_on(self) -> None:
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        if self.process.stdout is not None:
            self.process.stdout.close()


def _made_as(model: Path, shape: dict[str, int]) -> object:
    try:
        status = (model / "model.safetensors").stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns, shape


@dataclass
class Plane:
    """One test's component on a server: clients, fleets and workers, ended with the test."""

    url: str
    namespace: str
    tmp: Path
    component: str = "engine"
    spawned: list[Spawned] = field(default_factory=list)
    _clients: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)
    _made: dict[int, object] = field(default_factory=dict)
    _server: RangeServer | None = None

    def __post_init__(self) -> None:
        start_zygote("fake")  # it takes seconds, in which no connection to NATS should wait

    @property
    def weight_server(self) -> RangeServer:
        """A server of the workers' weight root, by HTTP."""
        if self._server is None:
            (self.tmp / "weights").mkdir(exist_ok=True)
            self._server = RangeServer(self.tmp / "weights")
        return self._server

    def model(self, seed: int = 0, **shape: int) -> Path:
        """A fake model's directory beneath the workers' weight root. An unchanged directory stays, because a worker
        may be loading it."""
        path = self.tmp / "weights" / f"seed{seed}"
        if self._made.get(seed, ...) != _made_as(path, shape):
            make_fake_model(path, seed, **shape)
            self._made[seed] = _made_as(path, shape)
        return path

    def spawn(
        self,
        *,
        ready: bool = True,
        model: Path | None = None,
        instance_id: str | None = None,
        patch: str = "",
        copies: int = 1,
        drain_s: float = 30.0,
        engine: str = "fake",
        nodes: Mapping[str, Any] | None = None,
        weight_urls: Sequence[str] = (),
        metrics: Mapping[str, Any] | None = None,
        task: str = "generate",
        logprobs_mode: str = "raw_logprobs",
        dtype: str | None = None,
        **engine_args: Any,
    ) -> Spawned:
        """`patch`: code that runs in the process before the worker does. `nodes`: the fields of `NodeSettings`.
        `metrics`: the `metrics_…` fields of `WorkerOptions`."""
        instance_id = instance_id or secrets.token_hex(8)
        options = {
            "engine": engine,
            "model": str(model or self.model()),
            "nats_url": self.url,
            "namespace": self.namespace,
            "component": self.component,
            "instance_id": instance_id if copies == 1 else None,
            "copies": copies,
            "weight_roots": [str(self.tmp / "weights")],
            "weight_urls": list(weight_urls),
            "engine_args": {key: str(value) for key, value in engine_args.items()},
            "drain_s": drain_s,
            "dtype": dtype,
            "task": task,
            "logprobs_mode": logprobs_mode,
            **(metrics or {}),
            **({} if nodes is None else {"nodes": dict(nodes)}),
        }
        log = self.tmp / f"{instance_id}-{len(self.spawned)}.log"
        arguments = [json.dumps(options), patch]
        process = fork_module(engine, "tests.support.worker_main", arguments, log, text=True)
        self.spawned.append(Spawned(instance_id, process, log))
        return self.spawned[-1].wait_ready() if ready else self.spawned[-1]

    def spawn_copies(self, count: int, **engine_args: Any) -> list[str]:
        """Spawns `count` workers in one process, which starts as fast as one worker, and returns their instance
        ids."""
        one = self.spawn(ready=False, copies=count, **engine_args)
        return sorted(one.wait_ready().instance_ids)

    def spawn_many(self, count: int, **options: Any) -> list[Spawned]:
        started = [self.spawn(ready=False, **options) for _ in range(count)]
        return [one.wait_ready() for one in started]

    async def client(
        self,
        name: str = "test",
        lock_timings: LockTimings = LOCK_TIMINGS,
        connect_bus: BusConnector | None = None,
        kind: type[RlClient] = RlClient,
    ) -> RlClient:
        client = await kind.connect(
            self.url,
            self.namespace,
            self.component,
            name=name,
            lock_timings=lock_timings,
            connect_bus=connect_bus,
        )
        return await self._clients.enter_async_context(client)

    async def fleet(self, name: str = "test", lock_timings: LockTimings = LOCK_TIMINGS) -> Fleet:
        return Fleet(await self.client(name, lock_timings))

    async def until(
        self, holds: Callable[[], object] | Callable[[], Awaitable[object]], bound_s: float = 30.0
    ) -> Any:
        """Waits for a truth that makes no event, and gives it; fails after the bound."""
        give_up = time.monotonic() + bound_s
        while True:
            found = holds()
            if inspect.isawaitable(found):
                found = await found
            if found:
                return found
            assert time.monotonic() < give_up, f"it did not come to hold within {bound_s:g} s"
            await asyncio.sleep(0.02)

    def kill_all(self) -> None:
        for one in self.spawned:
            one.close()
        server, self._server = self._server, None
        if server is not None:
            server.close()

    async def close(self) -> None:
        self.kill_all()
        await self._clients.aclose()


@pytest.fixture(scope="module")
def nats() -> Iterator[NatsServer]:
    """Configured as we like it: disconnect advisories, fast PINGs."""
    server = NatsServer()
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def plain_nats() -> Iterator[NatsServer]:
    """Any NATS server with JetStream: no advisories, PINGs every two minutes."""
    server = NatsServer(config=None)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def namespace() -> str:
    return f"t{secrets.token_hex(6)}"


@pytest_asyncio.fixture
async def plane(nats: NatsServer, namespace: str, tmp_path: Path) -> AsyncIterator[Plane]:
    plane = Plane(nats.url, namespace, tmp_path)
    yield plane
    await plane.close()


@pytest_asyncio.fixture
async def plain_plane(plain_nats: NatsServer, namespace: str, tmp_path: Path) -> AsyncIterator[Plane]:
    plane = Plane(plain_nats.url, namespace, tmp_path)
    yield plane
    await plane.close()


@pytest_asyncio.fixture
async def own_nats(namespace: str, tmp_path: Path) -> AsyncIterator[tuple[NatsServer, Plane]]:
    """A server for one test, which may kill it; its store is `tmp_path / "store"`."""
    server = NatsServer(store=tmp_path / "store")
    server.start()
    plane = Plane(server.url, namespace, tmp_path)
    yield server, plane
    await plane.close()
    server.stop()


@pytest.fixture(scope="module")
def make_plane(nats: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Plane]]:
    """Planes that live as long as the module, for tests that leave no trace; they have workers, no clients."""
    made: list[Plane] = []

    def make() -> Plane:
        made.append(Plane(nats.url, f"t{secrets.token_hex(6)}", tmp_path_factory.mktemp("plane")))
        return made[-1]

    yield make
    for plane in made:
        plane.kill_all()


@pytest.fixture
def spawn_worker(plane: Plane) -> Callable[..., Spawned]:
    """`spawn_worker(**engine_args)` → a ready worker with `instance_id` and `process`; killed with the test."""
    return plane.spawn


# of the filesystem transport

CLOSED_S = 10.0
"""The bound in seconds for threads to close a file on a busy machine."""


@pytest.fixture
def no_descriptor_leaks() -> Iterator[None]:
    """Checks that the test leaks no descriptor. A thread that reads may hold one for a moment."""
    before = set(os.listdir("/proc/self/fd"))
    yield
    give_up = time.monotonic() + CLOSED_S
    while (stayed := set(os.listdir("/proc/self/fd")) - before) and time.monotonic() < give_up:
        time.sleep(0.01)
    assert not stayed


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The directory that weights are read from."""
    root = tmp_path / "root"
    root.mkdir()
    return root


class OneByOne(FilesystemTransport):
    """Reads each tensor in a run of its own."""

    def open(self, request: Mapping[str, Any], kind: Kind) -> CheckpointDelivery:
        delivery = super().open(request, kind)
        delivery.checkpoint.run_bytes = 1
        return delivery


@pytest.fixture(params=["at once", "one by one"])
def transport(root: Path, request: pytest.FixtureRequest) -> FilesystemTransport:
    """A transport that reads small files in one run, or each tensor in a run of its own on another thread."""
    kind = OneByOne if request.param == "one by one" else FilesystemTransport
    return kind(TransportContext((root,)))

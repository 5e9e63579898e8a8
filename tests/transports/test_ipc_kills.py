"""SIGKILL of trainer or worker, and SIGSTOP of a worker, at points of an `ipc` update, on real processes of one fleet:
every side ends, no memory is left, the surviving workers serve right weights, and the next publication reaches all.

One case: `-k kill-worker-middle`.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest
import pytest_asyncio

from rl_plane.client import RlClient
from rl_plane.errors import InvalidRequest, UpdateAborted
from rl_plane.transports.ipc.sender import Layout
from tests.support.ipc_memory import BUCKET_BYTES, MIDDLE, model_of, serves, shared_memory
from tests.support.ipc_trainer import Trainer

if TYPE_CHECKING:
    from tests.conftest import Plane, Spawned

if sys.platform != "linux":
    pytest.skip("memfd_create and abstract sockets", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]

BOUND_S = 30.0
"""The bound in seconds: far less than any wait for a live process, far more than any step takes."""

BUCKETS = 6
BOUNDS = {"silent_receiver_s": 2.0, "other_receivers_s": 2.0}
"""The bound for a worker that does not come, or hangs."""
POLICY = {"on_prepare_failure": "exclude", "prepare_timeout_s": 6.0}

Point = Literal["open", "first", "middle", "last", "taken", "prepared"]
HOLDS: dict[Point, tuple[int, ...]] = {
    "open": (),  # no receiver has come yet
    "first": (2,),  # the buckets that there are buffers for are sent, the first is taken
    "middle": (MIDDLE,),
    "last": (BUCKETS,),  # all buckets are sent, the digests are not
    "taken": (BUCKETS + 1,),  # all have everything, and the trainer holds its buffers
    "prepared": (BUCKETS + 1,),  # and all have staged it: another call is to commit it
}


@dataclass(frozen=True)
class Case:
    fault: Literal["kill", "stop"]
    victim: Literal["trainer", "worker"]
    point: Point
    forked: bool = False
    """The trainer has a child, which lives on."""
    layout: Layout = "packed"

    def __str__(self) -> str:
        return f"{self.fault}-{self.victim}-{self.point}" + "-forked" * self.forked + f"-{self.layout}"


CASES = [
    *(Case("kill", "trainer", point) for point in HOLDS),
    Case("kill", "trainer", "middle", forked=True),
    *(Case("kill", who, "first", layout="tensors") for who in ("trainer", "worker")),
    *(Case("kill", "worker", point) for point in HOLDS if point != "taken"),
    *(Case("stop", "worker", point) for point in HOLDS if point not in ("taken", "prepared")),
]


@dataclass
class Bench:
    """Two workers and a trainer. Killed processes are replaced."""

    plane: Plane
    client: RlClient
    stack: ExitStack
    workers: list[Spawned]
    serving: Path
    """The version that all workers serve."""
    seeds: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    trainer: Trainer | None = None

    def publish(self, case: Case | None = None, workers: int = 2) -> tuple[Trainer, Path]:
        if self.trainer is None:
            self.trainer = Trainer()
            self.stack.callback(self.trainer.close)
        model = model_of(self.plane, next(self.seeds))
        holds = [] if case is None else HOLDS[case.point]
        child = case is not None and case.forked
        layout = "packed" if case is None else case.layout
        bounds = BOUNDS if case is not None and case.victim == "worker" else {}
        self.trainer.publish(
            model, workers, bucket_bytes=BUCKET_BYTES, holds=holds, child=child, layout=layout, **bounds
        )
        return self.trainer, model

    def nothing_left(self) -> bool:
        running = [one.process for one in self.workers if one.process.poll() is None]
        if self.trainer is not None:
            running.append(self.trainer.process)
        return not any(
            shared_memory(process.pid) or "/dev/shm" in Path(f"/proc/{process.pid}/maps").read_text()
            for process in running
        )

    async def all_take_the_next(self) -> None:
        trainer, model = self.publish()
        transport = (await trainer.says("transport"))["transport"]
        reply = await self.client.run("update_weights", {"transport": transport, "version": model.name})
        assert reply["excluded"] == []
        assert (await trainer.says("ended"))["ended"] is None
        self.serving = model
        for one in self.workers:
            await serves(self.client, one.instance_id, model)

    def lose(self, case: Case) -> None:
        if case.victim == "trainer":
            assert self.trainer is not None
            self.trainer.kill()
            assert not list(Path("/dev/shm").glob(f"torch_{self.trainer.process.pid}_*"))
            self.trainer = None
        elif case.fault == "kill":
            self.workers[-1].kill()
        else:
            self.workers[-1].stop()

    async def replace(self, case: Case) -> None:
        lost = self.workers[-1]
        if case.fault == "stop":
            lost.go_on()
        else:
            self.workers[-1] = await asyncio.to_thread(self.plane.spawn, model=model_of(self.plane, 0))
        wanted = {one.instance_id for one in self.workers}

        async def there() -> bool:
            return {member.instance_id for member in await self.client.list_workers()} == wanted

        await self.plane.until(there)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(make_plane: Callable[[], Plane]) -> AsyncIterator[Bench]:
    plane = make_plane()
    client = await plane.client()
    model = model_of(plane, 0)
    workers = await asyncio.to_thread(plane.spawn_many, 2, model=model)
    with ExitStack() as stack:
        yield Bench(plane, client, stack, workers, model)
    await plane.close()


@pytest.mark.parametrize("case", CASES, ids=str)
async def test_the_fleet_serves_on_after_a_process_died_in_the_middle_of_an_update(
    case: Case, bench: Bench
) -> None:
    client = bench.client
    trainer, model = bench.publish(case)
    child = None
    body: dict[str, Any] = {"version": model.name, "policy": POLICY, **(await trainer.says("transport"))}
    body.pop("buckets")
    try:
        async with asyncio.timeout(BOUND_S):
            if case.point == "open":
                bench.lose(case)
            op = "update_weights" if case.point != "prepared" else "prepare_weights_update"
            update = asyncio.create_task(client.run(op, body))
            if case.point != "open":
                child = (await trainer.says("at"))["child"]
                if case.point != "taken":
                    assert not bench.nothing_left()
                if case.point == "prepared":
                    body = {"update_id": (await update)["update_id"]}
                bench.lose(case)
                if case.point == "prepared":
                    update = asyncio.create_task(client.run("complete_weights_update", body))
            if case.victim == "worker":
                if case.point != "open":
                    trainer.go_on()
                lost = [bench.workers[-1].instance_id]
                # A worker that is known to be dead before the update begins is no member of it.
                assert (await update)["excluded"] in ([lost] if case.point != "open" else [[], lost])
                assert (await trainer.says("ended"))["ended"] is None
                bench.serving = model
            elif case.point in ("taken", "prepared"):
                assert (await update)["excluded"] == []
                bench.serving = model
            else:
                with pytest.raises((UpdateAborted, InvalidRequest), match="trainer"):
                    await update
            if child is not None:
                assert shared_memory(child) == []
    finally:
        if child is not None:
            os.kill(child, signal.SIGKILL)
    await serves(client, bench.workers[0].instance_id, bench.serving)
    if case.victim == "worker":
        await bench.replace(case)
    await bench.plane.until(bench.nothing_left)
    await bench.all_take_the_next()
    await bench.plane.until(bench.nothing_left)  # a worker closes what it has copied beside its answer

"""Tests the watch over an engine's processes, and how they are ended."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest

from rl_plane.errors import EngineDied, EngineFailed, InvalidRequest
from worker.engines.base import EngineOptions
from worker.engines.common.process_watch import (
    LOOK_S,
    ProcessWatch,
    StartWatch,
    descendants,
    engine_processes,
    killed,
    or_death,
)
from worker.engines.sglang.processes import SglangProcess
from worker.receive.host_agent.host_agent_process import MODULE

pytestmark = [pytest.mark.slow, pytest.mark.parallel]

BOUND_S = 30.0


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen[bytes]]]:
    command = [sys.executable, "-c", "input()"]
    found = [subprocess.Popen(command, stdin=subprocess.PIPE) for _ in range(3)]
    yield found
    for child in found:
        child.kill()
        child.communicate()


async def test_the_first_vital_death_is_reported_once(children: list[subprocess.Popen[bytes]]) -> None:
    deaths: asyncio.Queue[int] = asyncio.Queue()
    pids = [child.pid for child in children]
    assert set(pids) <= engine_processes([]).keys()
    assert not set(pids) & engine_processes(descendants()).keys()
    watch = ProcessWatch({pids[0]: "a helper", pids[1]: "x::1", pids[2]: "x::2"}, "x::", deaths.put_nowait)
    children[0].kill()  # a helper may end
    children[0].wait()
    children[1].kill()
    async with asyncio.timeout(BOUND_S):
        assert await deaths.get() == pids[1]
    watch.kill()
    watch.wait(BOUND_S)
    assert children[2].wait(BOUND_S) < 0
    await asyncio.sleep(0)
    assert deaths.empty()
    watch.kill()  # all gone
    watch.close()


async def test_a_process_that_ended_before_the_watch_is_reported(children: list[subprocess.Popen[bytes]]) -> None:
    children[0].kill()
    children[0].wait()
    deaths: asyncio.Queue[int] = asyncio.Queue()
    watch = ProcessWatch({children[0].pid: "x::1"}, "x::", deaths.put_nowait)
    async with asyncio.timeout(BOUND_S):
        assert await deaths.get() == children[0].pid
    watch.close()


async def test_nothing_is_reported_after_stop(children: list[subprocess.Popen[bytes]]) -> None:
    deaths: asyncio.Queue[int] = asyncio.Queue()
    watch = ProcessWatch({children[0].pid: "x::1"}, "x::", deaths.put_nowait)
    watch.stop()
    watch.kill()
    watch.wait(BOUND_S)
    await asyncio.sleep(0)
    assert deaths.empty()
    watch.close()
    watch.close()


class OfChildren(SglangProcess):
    """An SGLang whose ranks are these children: its library does not run."""

    vital = "sleep"

    def __init__(self, model: Path, count: int) -> None:
        super().__init__(EngineOptions(model), {}, "cpu", 0)
        self.children: list[subprocess.Popen[bytes]] = []
        self._count = count

    def _build(self, directory: Path) -> None:
        self.children = [subprocess.Popen(["sleep", "600"]) for _ in range(self._count)]

    async def _start_agents(self, directory: Path) -> None:
        """There are no ranks to ask."""


async def test_the_processes_that_a_dead_sglang_leaves_are_killed(tmp_path: Path) -> None:
    process, deaths = OfChildren(tmp_path, 3), asyncio.Queue[EngineDied]()
    process.on_death(deaths.put_nowait)
    try:
        await process.start()
        first, *others = process.children
        (agent,) = set(process.pids()) - {child.pid for child in process.children}
        assert MODULE in psutil.Process(agent).cmdline()
        first.kill()
        async with asyncio.timeout(BOUND_S):
            assert str(first.pid) in str(await deaths.get())
        for child in others:
            assert child.wait(BOUND_S) < 0
    finally:
        for child in process.children:
            child.kill()
            child.wait()
        await process.end()


async def test_the_end_of_the_host_agent_is_the_death_of_its_engine(tmp_path: Path) -> None:
    process, deaths = OfChildren(tmp_path, 1), asyncio.Queue[EngineDied]()
    process.on_death(deaths.put_nowait)
    try:
        await process.start()
        (child,) = process.children
        (agent,) = set(process.pids()) - {child.pid}
        os.kill(agent, signal.SIGKILL)
        async with asyncio.timeout(BOUND_S):
            assert str(await deaths.get()) == f"the host agent (pid {agent}) has ended"
        assert child.wait(BOUND_S) < 0
    finally:
        for child in process.children:
            child.kill()
            child.wait()
        await process.end()
    assert not psutil.pid_exists(agent)


SPAWN = multiprocessing.get_context("spawn")


def _rank(end: Any) -> NoReturn:
    end.recv()
    os._exit(1)


class Building:
    """An engine has two ranks. The last one ends, while the engine's own thread waits for the first."""

    def __init__(self) -> None:
        self.pipes = [SPAWN.Pipe(duplex=False) for _ in range(2)]
        self.ranks = [SPAWN.Process(target=_rank, args=(reader,), daemon=True) for reader, _ in self.pipes]

    def start(self, watch: StartWatch) -> None:
        for rank in self.ranks:
            rank.start()
        give_up = time.monotonic() + BOUND_S
        while not watch.started.issuperset(self.ranks):
            assert time.monotonic() < give_up
            time.sleep(LOOK_S)

    def run(self, end: Callable[[Building], None], waits_for: int) -> None:
        with StartWatch() as watch:
            self.start(watch)
            end(self)
            self.ranks[waits_for].join(BOUND_S)
            raise RuntimeError(f"rank {waits_for} has ended: {self.ranks[waits_for].exitcode}")

    def end_itself(self) -> None:
        self.pipes[1][1].send("end")

    def be_killed(self) -> None:
        self.ranks[1].kill()

    def be_terminated(self) -> None:
        self.ranks[1].terminate()

    def crash(self) -> None:
        assert self.ranks[1].pid is not None
        os.kill(self.ranks[1].pid, signal.SIGABRT)

    def close(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.join()


@pytest.fixture
def building() -> Iterator[Building]:
    building = Building()
    yield building
    building.close()


def test_a_kill_while_an_engine_is_built_ends_the_processes_that_it_waits_for(building: Building) -> None:
    other = SPAWN.Process(target=time.sleep, args=(600,), daemon=True)
    other.start()
    try:
        with pytest.raises(EngineDied, match=r"was killed while it started: rank 0 has ended: -9$") as caught:
            building.run(Building.be_killed, waits_for=0)
        assert f"process {building.ranks[1].pid} was" in caught.value.message
        assert other.is_alive(), "another owner has started it"
    finally:
        other.kill()
        other.join()


@pytest.mark.parametrize(
    ("end", "code"),
    [(Building.end_itself, 1), (Building.be_terminated, -signal.SIGTERM), (Building.crash, -signal.SIGABRT)],
)
def test_the_engine_reports_a_process_that_ends_by_itself(
    building: Building, end: Callable[[Building], None], code: int
) -> None:
    """A new process would end in the same way."""
    with pytest.raises(RuntimeError, match=f"rank 1 has ended: {code}$"):
        building.run(end, waits_for=1)
    assert building.ranks[0].is_alive()


def test_a_kill_as_the_building_ends_is_a_death_too(building: Building) -> None:
    def build() -> None:
        with StartWatch() as watch:
            building.start(watch)
            building.be_killed()
            building.ranks[1].join(BOUND_S)

    with pytest.raises(EngineDied, match=r"was killed while it started$"):
        build()


@pytest.mark.parametrize("dies", [True, False])
async def test_an_error_that_a_death_makes_before_it_is_seen_is_of_the_death(dies: bool) -> None:
    dead: asyncio.Future[NoReturn] = asyncio.get_running_loop().create_future()

    async def broken() -> None:
        if dies:
            asyncio.get_running_loop().call_soon(dead.set_exception, EngineDied("process 1 ended"))
        raise EngineFailed("rank 0 can't be reached")

    with pytest.raises(EngineFailed) as caught:
        await or_death(broken(), dead)
    assert caught.value.message == ("process 1 ended" if dies else "rank 0 can't be reached")
    assert isinstance(caught.value, EngineDied) is dies


async def test_bad_input_is_reported_at_once() -> None:
    async def refused() -> None:
        raise InvalidRequest("no such file", field="model", fix="name another")

    with pytest.raises(InvalidRequest):
        await or_death(refused(), asyncio.get_running_loop().create_future())


def test_a_process_that_is_closed_meanwhile_is_not_reported() -> None:
    with StartWatch() as watch:
        helper = SPAWN.Process(target=time.sleep, args=(6 * BOUND_S,), daemon=True)
        helper.start()
        give_up = time.monotonic() + BOUND_S
        while helper not in watch.started:
            assert time.monotonic() < give_up
            time.sleep(LOOK_S)
        helper.terminate()
        helper.join()
        helper.close()


class ClosedByOwner(SpawnProcess):
    """A process that its owner closes while another thread waits for its end."""

    def join(self, timeout: float | None = None) -> None:
        super().join()
        self.close()


def test_a_process_closed_during_the_check_is_not_reported() -> None:
    helper = ClosedByOwner(target=time.sleep, args=(0,), daemon=True)
    helper.start()
    assert killed([helper], BOUND_S) is None

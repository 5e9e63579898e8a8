"""Watching an engine's processes, and ending them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("psutil")

from rl_plane.errors import EngineDied
from worker.engines.base import EngineOptions
from worker.engines.process_watch import ProcessWatch, descendants, engine_processes
from worker.engines.sglang_process import SglangProcess

BOUND_S = 10.0


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen[bytes]]]:
    command = [sys.executable, "-c", "input()"]
    found = [subprocess.Popen(command, stdin=subprocess.PIPE) for _ in range(3)]
    yield found
    for child in found:
        child.kill()
        child.communicate()


async def test_the_first_vital_death_is_told_once(children: list[subprocess.Popen[bytes]]) -> None:
    told: asyncio.Queue[int] = asyncio.Queue()
    pids = [child.pid for child in children]
    assert set(pids) <= engine_processes([]).keys()
    assert not set(pids) & engine_processes(descendants()).keys()
    watch = ProcessWatch({pids[0]: "a helper", pids[1]: "x::1", pids[2]: "x::2"}, "x::", told.put_nowait)
    children[0].kill()  # nobody's concern
    children[0].wait()
    children[1].kill()
    async with asyncio.timeout(BOUND_S):
        assert await told.get() == pids[1]
    watch.kill()
    watch.wait(BOUND_S)
    assert children[2].wait(BOUND_S) < 0
    await asyncio.sleep(0)
    assert told.empty()
    watch.kill()  # all gone
    watch.close()


async def test_one_that_is_gone_already(children: list[subprocess.Popen[bytes]]) -> None:
    children[0].kill()
    children[0].wait()
    told: asyncio.Queue[int] = asyncio.Queue()
    watch = ProcessWatch({children[0].pid: "x::1"}, "x::", told.put_nowait)
    async with asyncio.timeout(BOUND_S):
        assert await told.get() == children[0].pid
    watch.close()


async def test_after_stop_nothing_is_told(children: list[subprocess.Popen[bytes]]) -> None:
    told: asyncio.Queue[int] = asyncio.Queue()
    watch = ProcessWatch({children[0].pid: "x::1"}, "x::", told.put_nowait)
    watch.stop()
    watch.kill()
    watch.wait(BOUND_S)
    await asyncio.sleep(0)
    assert told.empty()
    watch.close()
    watch.close()


async def test_what_is_left_of_a_dead_sglang_is_killed(
    children: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    process = SglangProcess(EngineOptions(tmp_path), {}, "cpu", 0)
    process._dead = asyncio.get_running_loop().create_future()
    told: asyncio.Queue[EngineDied] = asyncio.Queue()
    process.on_death(told.put_nowait)
    pids = {child.pid: f"sglang::{number}" for number, child in enumerate(children)}
    process._watch = ProcessWatch(pids, "sglang::", process._process_ended)
    children[0].kill()
    async with asyncio.timeout(BOUND_S):
        assert str(children[0].pid) in str(await told.get())
    for child in children[1:]:
        assert child.wait(BOUND_S) < 0
    process._watch.close()

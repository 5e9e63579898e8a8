"""What is peculiar in the `vllm` engine, with a stand-in for vLLM. All else: tests/engines/test_engine_adapters.py."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rl_plane.errors import DeadlineExceeded, EngineFailed
from rl_plane.protocol.versions import WeightVersion
from worker.engines.base import EngineOptions
from worker.engines.vllm.adapter import VllmEngine
from worker.receive.rank_agents.agent_client import AgentClient
from worker.receive.rank_agents.agent_server import AgentServer
from worker.receive.rank_agents.ranks import Ranks

VERSION = WeightVersion("run", 1, "step_1", "blake3:" + "1" * 64)


class Llm:
    """AsyncLLM, and its engine_core. What it was asked for is in `asked`; its answer to a resume waits for `lets_go`;
    `fails` are those that fail once."""

    def __init__(self) -> None:
        self.engine_core = self
        self.asked: list[Any] = []
        self.paused = False
        self.lets_go = asyncio.Event()
        self.lets_go.set()
        self.resuming = asyncio.Event()
        self.fails: set[str] = set()
        self.flushes = True

    def _is_asked(self, method: str, *details: Any) -> None:
        self.asked.append((method, *details))
        if method in self.fails:
            self.fails.remove(method)
            raise EngineFailed(f"no {method}")

    async def pause_scheduler_async(self, mode: str, clear_cache: bool) -> None:
        self._is_asked("pause", mode)
        self.paused = True
        if mode == "wait":
            await asyncio.Event().wait()

    async def resume_generation(self) -> None:
        self._is_asked("resume")
        self.paused = False
        self.resuming.set()
        await self.lets_go.wait()

    async def reset_prefix_cache(self, reset_running_requests: bool, reset_connector: bool) -> bool:
        self._is_asked("flush", reset_running_requests, reset_connector)
        return self.flushes

    async def update_weight_version(self, name: str) -> None:
        self._is_asked("name")

    async def sleep(self, level: int, mode: str) -> None:
        self._is_asked("sleep", level, mode)

    async def release_kv_cache_memory(self) -> None:
        self._is_asked("release_kv_cache_memory")

    async def wake_up(self, tags: list[str]) -> None:
        self._is_asked("wake_up", tags)


class Process:
    """In the place of a VllmProcess; and its ranks."""

    def __init__(self, llm: Llm) -> None:
        self.llm = llm
        self.ranks = self

    def check_alive(self) -> None:
        pass

    async def ask(self, work: Coroutine[Any, Any, Any]) -> Any:
        return await work

    async def on_ranks(self, method: str, *arguments: Any) -> list[dict[str, Any]]:
        self.llm.asked.append((method, *arguments))
        return [{"rank": 0}]

    def rows(self, op: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"rank": 0, "path": f"/nowhere/{body['staging']}"}]


class Streams:
    """None."""

    def of_adapter(self, name: str) -> list[Any]:
        return []

    async def abort(self, streams: list[Any]) -> None:
        pass


def standing_in(directory: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[VllmEngine, Llm]:
    """An engine that says it can sleep."""
    (directory / "config.json").write_text("{}")
    engine, llm = VllmEngine(EngineOptions(directory)), Llm()
    monkeypatch.setattr(engine, "_process", Process(llm))
    monkeypatch.setattr(engine, "_no_sleep", lambda: None)
    monkeypatch.setattr(engine, "_info", SimpleNamespace(check_place=lambda name, loaded: None))
    monkeypatch.setattr(engine, "_streams", Streams())
    return engine, llm


async def test_what_a_cancelled_pause_undoes_late_does_not_undo_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, llm = standing_in(tmp_path, monkeypatch)
    waits = asyncio.create_task(engine.pause("wait", False))
    await asyncio.sleep(0)
    llm.lets_go.clear()
    waits.cancel()
    async with asyncio.timeout(10):
        await llm.resuming.wait()
    await engine.pause("abort", False)
    llm.lets_go.set()
    with pytest.raises(asyncio.CancelledError):
        await waits
    assert llm.paused
    assert await engine.swap("staging", VERSION) is True


@pytest.mark.parametrize("was_paused", [False, True])
async def test_a_pause_that_fails_leaves_the_engine_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, was_paused: bool
) -> None:
    engine, llm = standing_in(tmp_path, monkeypatch)
    if was_paused:
        await engine.pause("keep", False)
    llm.fails.add("flush")
    with pytest.raises(EngineFailed, match="no flush"):
        await engine.pause("keep", True)
    assert llm.paused is was_paused


async def test_a_flush_takes_what_is_kept_beside_the_cache_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, llm = standing_in(tmp_path, monkeypatch)
    await engine.flush_cache()
    await engine.pause("keep", False)
    await engine.swap("staging", VERSION)
    assert [asked for asked in llm.asked if asked[0] == "flush"] == [("flush", False, True), ("flush", True, True)]


async def test_a_cache_that_is_not_flushed_fails_what_would_find_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adapter's part is its own by its number, which the next one of its name takes over."""
    engine, llm = standing_in(tmp_path, monkeypatch)
    await engine.pause("keep", False)
    llm.flushes = False
    with pytest.raises(EngineFailed, match="did not flush"):
        await engine.swap("staging", VERSION)
    assert engine._state.base is None
    assert await engine.swap_adapter("x", "first", VERSION) is False
    before = engine._loras["x"]
    with pytest.raises(EngineFailed, match="did not flush"):
        await engine.swap_adapter("x", "second", VERSION)
    assert engine._loras["x"] == before
    assert llm.asked[-1] == ("rl_plane_add_lora", before.number, before.path), "the old one is back"
    assert await engine.swap_adapter("x", None, None) is False
    assert engine._loras == {}


async def test_adapters_that_are_gone_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = standing_in(tmp_path, monkeypatch)
    await engine.pause("keep", False)
    for name in ("a", "b", "c"):
        await engine.swap_adapter(name, name, VERSION)
        if name != "c":
            await engine.swap_adapter(name, None, None)
    assert engine._state.adapters == {"c": VERSION}
    await engine.swap_adapter("c", None, None)
    await engine.swap("staging", VERSION)
    assert engine._state.adapters == {}


async def test_a_check_on_a_gpu_has_a_time_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads each byte of the model, and other calls of an agent none."""
    engine, _ = standing_in(tmp_path, monkeypatch)
    server = AgentServer(tmp_path, 0, {"check": lambda body, cancelled: {"checksum": body["action"]}})
    server.start()
    monkeypatch.setattr(engine, "_info", SimpleNamespace(device="cuda"))
    monkeypatch.setattr(engine._process, "ranks", Ranks(AgentClient(tmp_path, 1)))
    assert AgentClient.ask.__kwdefaults__ is not None
    monkeypatch.setitem(AgentClient.ask.__kwdefaults__, "timeout_s", 0.0)
    try:
        with pytest.raises(DeadlineExceeded):
            engine._process.ranks.rows("check", {"action": "any"})
        assert await engine.check_weights("checksum") == [{"rank": 0, "checksum": "checksum"}]
    finally:
        server.close()

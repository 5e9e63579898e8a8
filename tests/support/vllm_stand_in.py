"""Helpers of `tests/unit/engines/test_vllm.py` and of other tests."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rl_plane.errors import EngineFailed
from worker.engines.base import EngineOptions
from worker.engines.vllm.adapter import VllmEngine


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
    info = SimpleNamespace(check_place=lambda name, loaded: None, capabilities={})
    monkeypatch.setattr(engine, "_info", info)
    monkeypatch.setattr(engine, "_streams", Streams())
    return engine, llm

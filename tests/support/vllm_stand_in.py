"""Helpers of `tests/unit/engines/test_vllm.py` and of other tests."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from rl_plane.errors import EngineFailed
from worker.engines.base import EngineInfo, EngineOptions
from worker.engines.common.spans import Label
from worker.engines.vllm.adapter import VllmEngine


class Llm:
    """Stands in for AsyncLLM and its engine_core. `asked` has the calls in their order. The answer to a resume waits
    for `lets_go`. Each method in `fails` fails once."""

    def __init__(self) -> None:
        self.engine_core = self
        self.asked: list[Any] = []
        self.paused = False
        self.lets_go = asyncio.Event()
        self.lets_go.set()
        self.resuming = asyncio.Event()
        self.fails: set[str] = set()
        self.flushes = True
        self.tasks = ("generate",)
        self.weights_name = "default"
        """The engine's name of the weights, with which vLLM labels tokens."""

    def _is_asked(self, method: str, *details: Any) -> None:
        self.asked.append((method, *details))
        if method in self.fails:
            self.fails.remove(method)
            raise EngineFailed(f"no {method}")

    def asked_of(self, method: str) -> list[Any]:
        """The calls of this method so far."""
        return [one for one in self.asked if one[0] == method]

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
        self.weights_name = name

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return self.tasks

    async def sleep(self, level: int, mode: str) -> None:
        self._is_asked("sleep", level, mode)

    async def release_kv_cache_memory(self) -> None:
        self._is_asked("release_kv_cache_memory")

    async def wake_up(self, tags: list[str]) -> None:
        self._is_asked("wake_up", tags)


class Process:
    """Stands in for a VllmProcess, its ranks and its host agent."""

    def __init__(self, llm: Llm, ranks: Any = None) -> None:
        self.llm = llm
        self.ranks = ranks or self
        self.host = self
        self.directory = None
        self.arguments: dict[str, Any] = {}

    async def start(self) -> None:
        pass

    def check_alive(self) -> None:
        pass

    async def end(self) -> None:
        pass

    async def ask(self, work: Coroutine[Any, Any, Any]) -> Any:
        return await work

    async def on_ranks(self, method: str, *arguments: Any) -> list[dict[str, Any]]:
        self.llm.asked.append((method, *arguments))
        return [{"rank": 0}]

    async def on_cores(self, method: str, *arguments: Any) -> list[list[str]]:
        self.llm.asked.append((method, *arguments))
        return [[]]

    def take(self, staging: str) -> None:
        pass

    def loaded(self, staging: str) -> None:
        pass

    def forget(self, staging: str) -> None:
        pass

    def rows(self, op: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"rank": 0}]


class Streams:
    """Stands in for an engine's requests: there are none."""

    def coming(self) -> list[Any]:
        return []

    def of_adapter(self, name: str) -> list[Any]:
        return []

    async def abort(self, streams: list[Any]) -> None:
        pass


class StandIn(VllmEngine):
    """An engine without vLLM that reports that it can sleep."""

    def __init__(self, directory: Path, llm: Llm, ranks: Any, device: str) -> None:
        (directory / "config.json").write_text("{}")
        process: Any = Process(llm, ranks)
        super().__init__(EngineOptions(directory), process)
        self._llm = llm
        self._device = device
        self.in_flight = (0, 0)

    def load(self) -> tuple[int, int]:
        return self.in_flight

    async def _start(self) -> EngineInfo:
        streams: Any = Streams()
        self._streams = streams
        return EngineInfo(
            engine="vllm",
            engine_version="none",
            model="none",
            dtype="float32",
            device=self._device,
            world_size=1,
            vocab_size=16,
            max_model_len=16,
            lacks={},
            transports=(),
        )

    def label(self, adapter: str | None = None) -> Label:
        """The label of tokens that vLLM makes now."""
        return self._label(self._llm.weights_name, adapter)


async def standing_in(directory: Path, ranks: Any = None, device: str = "cpu") -> tuple[StandIn, Llm]:
    llm = Llm()
    engine = StandIn(directory, llm, ranks, device)
    await engine.start()
    return engine, llm

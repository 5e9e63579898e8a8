"""Models, requests and updates of the fake engine in the process of a test."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from rl_plane.protocol.generation import GenerateDelta, GenerateRequest
from rl_plane.protocol.update_requests import PreparedReply
from rl_plane.protocol.versions import WeightVersion
from tests.support.receive_requests import NamedRequest, files_request
from worker.engines.base import EngineOptions
from worker.engines.fake.adapter import FakeEngine, build, make_fake_model
from worker.receive.staging import model_digest

BOUND_S = 10.0

PROMPT = [5, 6, 7]


def version(sequence: int, directory: Path) -> WeightVersion:
    return WeightVersion("run", sequence, f"step_{sequence}", model_digest(directory))


async def started(model: Path, **extra: str) -> FakeEngine:
    engine = build(EngineOptions(model, extra=extra, weight_roots=(model.parent,)))
    await engine.start()
    engine.set_version(version(0, model))
    return engine


NAMES = (f"staging-{number}" for number in itertools.count())


def reception(directory: Path, **more: Any) -> NamedRequest:
    return files_request(next(NAMES), directory, **more)


def stage(engine: FakeEngine, directory: Path, cancelled: Callable[[], bool] = lambda: False) -> str:
    return receive(engine, reception(directory), cancelled)[0]


def receive(
    engine: FakeEngine, what: NamedRequest, cancelled: Callable[[], bool] = lambda: False
) -> tuple[str, PreparedReply]:
    engine.receiver.open(*what)
    return what.staging, engine.receiver.receive(what.staging, cancelled)


def ask(name: str = "r", **fields: Any) -> GenerateRequest:
    if not fields.keys() & {"prompt", "messages"}:
        fields.setdefault("prompt_token_ids", PROMPT)
    return GenerateRequest(id=name, **fields)


async def drain(stream: AsyncIterator[GenerateDelta]) -> list[GenerateDelta]:
    async with asyncio.timeout(BOUND_S):
        return [delta async for delta in stream]


def tokens(deltas: list[GenerateDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(BOUND_S):
        while not true():  # noqa: ASYNC110  (what is waited for makes no event)
            await asyncio.sleep(0)


class Reader:
    """A request that is read as fast as it comes."""

    def __init__(
        self, engine: FakeEngine, name: str = "r", max_tokens: int = 1000, adapter: str | None = None
    ) -> None:
        request = ask(name, max_tokens=max_tokens, adapter=adapter)
        self.deltas: list[GenerateDelta] = []
        self.task = asyncio.create_task(self._read(engine.generate(request)))

    async def _read(self, stream: AsyncIterator[GenerateDelta]) -> None:
        async for delta in stream:
            self.deltas.append(delta)

    async def end(self) -> GenerateDelta:
        async with asyncio.timeout(BOUND_S):
            await self.task
        return self.deltas[-1]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return make_fake_model(tmp_path / "base", 0)


@pytest.fixture
def new(tmp_path: Path) -> Path:
    return make_fake_model(tmp_path / "new", 1)

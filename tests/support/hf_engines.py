"""Starts `hf` engines for tests, and closes them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from worker.engines.base import EngineOptions

if TYPE_CHECKING:
    from worker.engines.hf.adapter import HfEngine

Start = Callable[..., Awaitable["HfEngine"]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    from worker.engines.hf.adapter import HfEngine  # it imports transformers

    engines: list[HfEngine] = []

    async def start_one(model: Path, **extra: int) -> HfEngine:
        engine = HfEngine(EngineOptions(model, extra={key: str(value) for key, value in extra.items()}))
        engines.append(engine)
        await engine.start()
        return engine

    yield start_one
    for engine in engines:
        await engine.close()
        await engine.close()

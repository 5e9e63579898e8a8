"""The engine that the tests of one module share, vLLM or SGLang, and what these tests have in common."""

from __future__ import annotations

import random
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.engine_kinds import Kind, OffersMemory
from tests.support.engine_models import Models
from tests.support.engine_runs import (
    ask,
    run,
    update,
    version,
)
from worker.engines.base import EngineInfo
from worker.receive.staging import model_digest
from worker.testing.tiny_model import VOCAB_SIZE

ENDLESS = 2000
"""More tokens than an engine makes meanwhile."""

ADAPTERS = ("x", "y", "z")
"""Names that tests use."""


@pytest.fixture
def scratch(models: Models) -> Iterator[Path]:
    """Weights may be read from here."""
    with tempfile.TemporaryDirectory(dir=models.root) as path:
        yield Path(path)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared(kind: Kind, models: Models) -> AsyncIterator[tuple[OffersMemory, EngineInfo]]:
    engine = kind.build(kind.options(models.witness[1]))
    with pytest.MonkeyPatch.context() as patched:
        # Unix sockets have paths of 107 characters at most.
        long = models.root / ("x" * 100)
        long.mkdir(exist_ok=True)
        patched.setenv("TMPDIR", str(long))
        patched.setattr(tempfile, "tempdir", None)
        info = await engine.start()
    yield engine, info
    await engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def engine(shared: tuple[OffersMemory, EngineInfo], models: Models) -> AsyncIterator[OffersMemory]:
    """A running engine with witness 1 and without adapters."""
    engine, _ = shared
    spans = (await run(engine, ask([3], max_tokens=1))).spans
    if [span.digest for span in spans] != [model_digest(models.witness[1])]:
        await update(engine, models.witness[1], 0)
    engine.set_version(version(0, models.witness[1]))
    yield engine
    await engine.pause("abort", False)
    for name in ADAPTERS:
        await engine.swap_adapter(name, None, None)
    await engine.resume()


@pytest.fixture
def info(shared: tuple[OffersMemory, EngineInfo]) -> EngineInfo:
    return shared[1]


def prompt_of(seed: int, length: int) -> list[int]:
    return [random.Random(f"{seed} {length}").randrange(3, VOCAB_SIZE) for _ in range(length)]

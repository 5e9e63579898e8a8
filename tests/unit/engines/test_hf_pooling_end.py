"""The end of the `hf` engine for pooling models while it computes."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rl_plane.errors import EngineDied
from rl_plane.protocol.generation import GenerateRequest
from rl_plane.protocol.pooling import Pooling
from worker.engines.base import EngineOptions
from worker.engines.common.spans import Label

BOUND_S = 30.0


async def test_close_ends_the_computed_and_the_waiting_inputs(tmp_path: Path) -> None:
    from worker.engines.hf.pooling_engine import HfPoolingEngine  # it imports transformers

    computing, may_end = threading.Event(), threading.Event()

    class WithoutModel(HfPoolingEngine):
        def __init__(self) -> None:
            super().__init__(EngineOptions(tmp_path, device="cpu", task="embed"))
            self._thread = ThreadPoolExecutor(1)

        def _forward(self, batch: Any) -> Any:
            computing.set()
            may_end.wait(BOUND_S)
            return [[0.0]], Label(None)

    (tmp_path / "config.json").write_text("{}")
    engine = WithoutModel()

    def ask(number: int) -> asyncio.Task[Any]:
        request = GenerateRequest(
            id=str(number), prompt_token_ids=[number], max_tokens=1, pooling=Pooling(task="embed")
        )
        return asyncio.create_task(engine._raw(request, [number]))

    first = ask(1)
    assert await asyncio.to_thread(computing.wait, BOUND_S)
    second = ask(2)
    while not engine._queue:  # noqa: ASYNC110 - no event shows that the input waits
        await asyncio.sleep(0)
    await engine.close()
    may_end.set()
    for one in (first, second):
        with pytest.raises(EngineDied):
            async with asyncio.timeout(BOUND_S):
                await one

"""A real engine whose model processes stand still: `test_engine_watch.py` has the same of a fake one."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from rl_plane.bus.token_stream import StreamReceiver
from rl_plane.errors import PlaneError
from tests.conftest import START_S, lives
from tests.support.mixed_fleet import ARGUMENTS
from tests.support.stream_messages import messages_of
from worker import exit_codes
from worker.engines.common.shared_names import shared_names
from worker.runtime.engine_watch import DEFAULT_LIVENESS_TIMEOUT_S
from worker.testing.tiny_model import make_tiny_model

if TYPE_CHECKING:
    from tests.conftest import Plane

HANG_S = 8.0
"""More than one round trip's time-out: the worker is seen closed before it ends."""
RANKS = {"vllm": "VLLM::Worker", "sglang": "sglang::schedul"}


@pytest.mark.engines("vllm", "sglang")
@pytest.mark.parametrize("engine", RANKS)
async def test_a_real_engine_that_hangs_closes_its_worker_and_then_ends_it(plane: Plane, engine: str) -> None:
    model = make_tiny_model(plane.tmp / "weights" / "tiny", 0, "bfloat16")
    one = plane.spawn(
        ready=False, engine=engine, model=model, patch=f"options['engine_hang_s'] = {HANG_S}", **ARGUMENTS[engine]
    ).wait_ready(3 * START_S)
    client = await plane.client()
    view = await client.view()
    receiver = StreamReceiver(client.bus)
    await receiver.start()
    body = {"request": {"prompt_token_ids": [5], "max_tokens": 1500, "ignore_eos": True}}
    messages = messages_of(await receiver.open(client.subjects().generate(one.instance_id), "r1", body))
    await anext(messages)  # accepted
    await anext(messages)  # it is running

    processes = psutil.Process(one.process.pid).children(recursive=True)
    ranks = [process for process in processes if process.name().startswith(RANKS[engine])]
    assert ranks, [process.name() for process in processes]
    names = shared_names(process.pid for process in processes)
    for rank in ranks:
        rank.send_signal(signal.SIGSTOP)

    async def closed() -> bool:
        admission = (await client.call(one.instance_id, "state")).body["admission"]
        return any(reason.startswith("engine: ") for reason in admission["reasons"])

    await plane.until(closed, 3 * DEFAULT_LIVENESS_TIMEOUT_S)
    assert view.member(one.instance_id) is not None, "it may answer again"

    async def read_on() -> None:
        async with asyncio.timeout(3 * (HANG_S + DEFAULT_LIVENESS_TIMEOUT_S)):
            async for _ in messages:
                pass

    with pytest.raises(PlaneError):
        await read_on()
    await plane.until(lambda: one.process.poll() is not None, 3 * (HANG_S + DEFAULT_LIVENESS_TIMEOUT_S))
    assert one.process.returncode == exit_codes.ENGINE_HUNG
    await plane.until(lambda: view.member(one.instance_id) is None)
    await plane.until(lambda: not any(map(lives, processes)))
    await plane.until(lambda: not any(map(Path.exists, names)))
    await receiver.stop()

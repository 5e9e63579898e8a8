"""A flush that gives up before NATS answers."""

from __future__ import annotations

import asyncio
import signal
import sys

import pytest
from nats.aio.msg import Msg

from rl_plane.bus.connection import Bus
from rl_plane.bus.server import NatsServer
from tests.conftest import stop_process

BOUND_S = 10.0


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGSTOP")
async def test_the_connection_stays_when_the_answer_comes_after_a_flush_has_given_up(nats: NatsServer) -> None:
    bus = await Bus.connect(nats.url, "flushes")
    heard = asyncio.Event()

    async def hear(message: Msg) -> None:
        heard.set()

    try:
        await bus.subscribe("told", hear)
        await bus.flush()
        stop_process(nats.process.pid)
        try:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await bus.flush()
        finally:
            nats.process.send_signal(signal.SIGCONT)
        await bus.nc.publish("told", b"")
        async with asyncio.timeout(BOUND_S):
            await heard.wait()
        assert bus.nc.stats["reconnects"] == 0
    finally:
        await bus.close()

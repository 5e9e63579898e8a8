"""Runs a frontend in the process of the test."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from frontend.main import serve
from frontend.server.options import FrontendOptions
from rl_plane.membership.worker_calls import BusConnector


@asynccontextmanager
async def started(
    options: FrontendOptions, connect_bus: BusConnector | None = None
) -> AsyncIterator[dict[str, Any]]:
    """Runs a frontend beside other work in this loop until the block ends. Yields what `on_ready` gets."""
    urls: dict[str, Any] = {}
    ready = asyncio.Event()

    def on_ready(found: dict[str, Any]) -> None:
        urls.update(found)
        ready.set()

    run = asyncio.create_task(serve(options, on_ready, connect_bus))
    run.add_done_callback(lambda _: ready.set())
    try:
        await ready.wait()
        if run.done():
            await run  # raises the error of the start
        yield urls
    finally:
        run.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await run

"""Waits for a trainer that does not listen yet, so that no worker begins a rendezvous too early."""

from __future__ import annotations

import asyncio
import contextlib
import time

from rl_plane.errors import Unavailable

LOOK_S = 1.0
"""Seconds between two tries to connect."""
CONNECT_S = 5.0
"""The time for one try in seconds."""


async def await_trainer(host: str, port: int, timeout_s: float) -> None:
    """Returns when something listens at this address. Raises Unavailable after `timeout_s` seconds."""
    until = time.monotonic() + timeout_s
    while True:
        try:
            async with asyncio.timeout(CONNECT_S):
                _, writer = await asyncio.open_connection(host, port)
        except (OSError, TimeoutError) as error:
            if time.monotonic() > until:
                raise Unavailable(
                    f"no trainer listens at {host}:{port} after {timeout_s:g} s: {error or 'no answer'}",
                    field="host",
                    fix="name an address of the trainer that this frontend and all workers reach",
                ) from error
            await asyncio.sleep(LOOK_S)
            continue
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        return

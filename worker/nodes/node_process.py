"""Runs a node that is not the head: its part of an engine, and the answers to the head."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable

from rl_plane._util.processes import exit_within
from rl_plane._util.tasks import end_tasks
from rl_plane.errors import InvalidRequest
from worker import exit_codes
from worker.nodes.follower_link import FollowerLink
from worker.nodes.spans_hosts import SpansHosts

log = logging.getLogger("worker.nodes")


class NodeProcess:
    """Runs one node's part of an engine until a signal, its death, or the end of the head."""

    def __init__(self, link: FollowerLink, adapter: SpansHosts) -> None:
        self._link = link
        self._adapter = adapter

    async def run(self, on_ready: Callable[[], None]) -> int:
        """Returns the exit code."""
        loop, told = asyncio.get_running_loop(), asyncio.Event()
        lost = asyncio.Event()

        def end_soon(why: str) -> None:
            # This process may wait for ranks of other hosts.
            exit_within(exit_codes.EXIT_MARGIN_S, exit_codes.ENGINE_DEAD)
            loop.call_soon_threadsafe(lost.set)

        self._link.on_lost(end_soon)
        try:
            part = await self._adapter.start_node()
            await asyncio.to_thread(self._link.serve, part)
        except Exception as error:
            await asyncio.to_thread(self._link.tell_end, f"{type(error).__name__}: {error}")
            if isinstance(error, InvalidRequest):
                raise
            log.error("this node's part of the engine did not start: %s", error)
            return exit_codes.ENGINE_DEAD
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, told.set)
        on_ready()
        died = asyncio.create_task(self._adapter.node_died())
        waits = [died, *(asyncio.create_task(event.wait()) for event in (told, lost))]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        await end_tasks(waits)
        if self._link.lost is not None:
            return exit_codes.ENGINE_DEAD if self._link.exit_code is None else self._link.exit_code
        exit_within(exit_codes.EXIT_MARGIN_S, exit_codes.ENGINE_DEAD)
        if told.is_set():
            await asyncio.to_thread(self._link.tell_end, "its process was told to end")
            return exit_codes.OK
        why = await died
        log.error("%s", why)
        await asyncio.to_thread(self._link.tell_end, why)
        return exit_codes.ENGINE_DEAD

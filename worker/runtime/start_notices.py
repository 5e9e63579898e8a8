"""Tells the frontends each second that this process loads its engine, until it joins the fleet.

A thread with a loop of its own sends the notices: the loading blocks the engine's loop for minutes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import platform
import threading
import time

import nats.errors

from rl_plane.bus.connection import SERVICE_CONNECT_S, Bus
from rl_plane.bus.credentials import NatsCredentials
from rl_plane.errors import BusUnreachable, PlaneError
from rl_plane.protocol.notices import EVERY_S, MAX_CHARS, StartNotice
from rl_plane.protocol.subjects import Subjects

log = logging.getLogger("worker.runtime.start_notices")

PING_INTERVAL_S = 10.0
"""Seconds between two PINGs of this connection. A long import holds the interpreter, and is no lost connection."""


class StartNotices:
    """The notices of one start. `begin` starts them, `end` stops them; both return at once."""

    def __init__(
        self, url: str, subjects: Subjects, instance_id: str, engine: str, credentials: NatsCredentials
    ) -> None:
        self._url, self._credentials = url, credentials
        self._subject = subjects.starting(instance_id)
        self._instance_id, self._engine = instance_id, engine
        self._began_at = time.monotonic()
        self._phase = "starting", self._began_at
        self._ended = threading.Event()
        # A daemon: the exit of the process does not wait for NATS.
        self._thread = threading.Thread(target=self._run, name="start-notices", daemon=True)

    def begin(self) -> None:
        self._thread.start()

    def phase(self, words: str) -> None:
        """The worker does something else now."""
        self._phase = words, time.monotonic()

    def end(self) -> None:
        """Sends no more notices. May be called again."""
        self._ended.set()

    def _run(self) -> None:
        # An engine that loads within this time is a member before a person could look.
        if self._ended.wait(EVERY_S):
            return
        try:
            asyncio.run(self._send())
        except Exception:
            log.exception("start notices")  # the worker starts all the same

    async def _send(self) -> None:
        if (bus := await self._connected()) is None:
            return
        try:
            while not self._ended.is_set():
                with contextlib.suppress(nats.errors.Error, BusUnreachable):
                    bus.check_connected()
                    await bus.nc.publish(self._subject, self._notice(*bus.identity).encode())
                await asyncio.sleep(EVERY_S)
        finally:
            await bus.close()  # the frontends learn of it by the server's advisory

    async def _connected(self) -> Bus | None:
        """The connection. None: the start has ended, or NATS refuses this process, which the worker itself reports."""
        while not self._ended.is_set():
            try:
                return await Bus.connect(
                    self._url,
                    f"{self._instance_id}-starts",
                    SERVICE_CONNECT_S,
                    self._credentials,
                    ping_interval_s=PING_INTERVAL_S,
                )
            except BusUnreachable as error:
                log.debug("no notice of the start: %s", error)
            except PlaneError as error:
                log.warning("NATS refuses this worker, which can't join: %s", error.message)
                return None
            await asyncio.sleep(EVERY_S)
        return None

    def _notice(self, server_id: str, client_id: int) -> StartNotice:
        now, (words, since) = time.monotonic(), self._phase
        return StartNotice(
            engine=self._engine[:MAX_CHARS],
            host=platform.node()[:MAX_CHARS],
            pid=os.getpid(),
            phase=words,
            elapsed_s=now - self._began_at,
            in_phase_s=now - since,
            server_id=server_id,
            client_id=client_id,
        )

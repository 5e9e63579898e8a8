"""Tells the frontends how a worker's process has ended, which only its supervisor knows."""

from __future__ import annotations

import contextlib
import platform

import nats.errors

from rl_plane.bus.connection import Bus
from rl_plane.bus.credentials import NatsCredentials
from rl_plane.errors import PlaneError
from rl_plane.protocol.notices import MAX_CHARS, ExitNotice
from rl_plane.protocol.subjects import Subjects


async def tell_exit(
    url: str, credentials: NatsCredentials, subjects: Subjects, instance_id: str, engine: str, pid: int, code: int
) -> None:
    """Sends one notice. A notice that can't be sent is left out: the supervisor's own lines have the exit code."""
    notice = ExitNotice(engine=engine[:MAX_CHARS], host=platform.node()[:MAX_CHARS], pid=pid, exit_code=code)
    with contextlib.suppress(PlaneError, nats.errors.Error):
        bus = await Bus.connect(url, "rl-plane-up", credentials=credentials)
        try:
            await bus.nc.publish(subjects.exited(instance_id), notice.encode())
            await bus.flush()
        finally:
            await bus.close()

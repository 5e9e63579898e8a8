"""Keeps a session alive while one of its own calls waits for the lock, because its trainer is not silent then."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rl_plane._util.tasks import end_tasks
from rl_plane.bus.connection import Bus, WrongSequence
from rl_plane.bus.lock import HeldLock
from rl_plane.bus.state_store import session_of
from rl_plane.errors import BusUnreachable
from rl_plane.membership.view import MembershipView
from rl_plane.membership.worker_calls import WorkerCalls
from rl_plane.protocol.record import UpdateSession
from rl_plane.protocol.subjects import SESSION, KeyValueBucket

log = logging.getLogger("rl_plane.commit.session_keepalive")

RENEWALS = 4
"""Renewals in one idle time of the session. The session survives if two of them are lost."""


@asynccontextmanager
async def lock_with_keepalive(
    calls: WorkerCalls, view: MembershipView, waiting: UpdateSession | None, wait_s: float, update_id: str = ""
) -> AsyncIterator[HeldLock]:
    """Takes the component's lock for a call of the session `waiting` (None: there is none), and renews the session
    meanwhile. If this process dies, the session expires as it does for a silent trainer."""
    renewals = []
    if waiting is not None:
        work = _renewals(calls.bus, view.subjects.state, waiting)
        renewals.append(asyncio.create_task(work, name=f"renewals of {waiting.update_id}"))
    try:
        async with calls.lock(view, wait_s, update_id=update_id) as held:
            await end_tasks(renewals)
            yield held
    finally:
        await end_tasks(renewals)


async def _renewals(bus: Bus, state: KeyValueBucket, session: UpdateSession) -> None:
    """Writes the session again and again until the update has ended, so that the server counts its silence from
    then."""
    while True:
        await asyncio.sleep(session.idle_s / RENEWALS)
        try:
            entry = await bus.get(state, SESSION)
            there = session_of(entry)
            if entry is None or there is None or there.update_id != session.update_id:
                return
            # This write does not need the lock: the holder may replace it, and it replaces only the value read here.
            await bus.put(state, SESSION, there.encode(), last=entry.sequence, ttl_s=there.idle_s)
        except WrongSequence:
            pass  # another call has written the session first
        except BusUnreachable as error:
            log.warning("could not renew the update %s: %s", session.update_id, error)

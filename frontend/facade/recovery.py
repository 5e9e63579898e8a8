"""Ends what a coordinator left half done when it died: decided, and not opened."""

from __future__ import annotations

import asyncio
import logging

from rl_plane._util.tasks import end_tasks
from rl_plane.errors import Locked, PlaneError
from rl_plane.fleet.fleet import Fleet
from rl_plane.membership.view import MembershipView
from rl_plane.protocol.record import DecisionRecord

log = logging.getLogger("frontend.facade.recovery")

LOOK_S = 1.0
"""A coordinator that lives holds the lock, and is left alone; a dead one is followed within two of these."""


class Finisher:
    def __init__(self, fleet: Fleet, view: MembershipView) -> None:
        self._fleet = fleet
        self._view = view
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            await end_tasks([self._task])

    async def _run(self) -> None:
        before: DecisionRecord | None = None
        while True:
            await asyncio.sleep(LOOK_S)
            record = self._view.record
            # Without a worker no score tells whether the version may be served.
            if record is not None and not record.final and record == before and self._view.snapshot():
                await self._finish(record)
            before = record

    async def _finish(self, record: DecisionRecord) -> None:
        try:
            version = await self._fleet.finish()
            if version == record.made:
                log.warning("the update %s was left half done: finished", record.update_id)
            else:
                log.warning(
                    "the update %s was left half done, and %s is committed now", record.update_id, version.label
                )
        except Locked:
            pass  # its coordinator lives, or another frontend is at it
        except PlaneError as error:
            log.warning("the update %s could not be finished: %s", record.update_id, error)
        except Exception:
            log.exception("the update %s could not be finished", record.update_id)

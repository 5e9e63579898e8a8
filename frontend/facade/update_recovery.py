"""Completes an update that was decided and not opened, because its coordinator died. Writes the record for workers
whose keys may not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from nats.aio.msg import Msg

from rl_plane._util.tasks import end_tasks
from rl_plane.bus.state_store import record_of
from rl_plane.errors import Locked, PlaneError
from rl_plane.fleet.fleet import Fleet
from rl_plane.membership.view import MembershipView
from rl_plane.protocol.record import DecisionRecord

log = logging.getLogger("frontend.facade.update_recovery")

LOOK_S = 1.0
"""The interval at which the record is checked. Recovery takes over within two intervals of a coordinator's death; a
living coordinator holds the lock."""


QUEUE = "frontends"


class UpdateRecovery:
    """Watches the record, and completes an update that stays undone."""

    def __init__(self, fleet: Fleet, view: MembershipView) -> None:
        self._fleet = fleet
        self._view = view
        self._task: asyncio.Task[None] | None = None
        self._asked = False
        """A worker has asked for the record to be written."""

    async def start(self) -> None:
        await self._view.bus.subscribe(self._view.subjects.keep_record, self._on_ask, queue=QUEUE)
        self._task = asyncio.create_task(self._watch())

    async def _on_ask(self, message: Msg) -> None:
        self._asked = True

    async def stop(self) -> None:
        if self._task is not None:
            await end_tasks([self._task])

    async def _watch(self) -> None:
        before: DecisionRecord | None = None
        while True:
            await asyncio.sleep(LOOK_S)
            record = self._view.record
            asked, self._asked = self._asked, False
            if asked and self._view.snapshot():
                await self._keep_record()
                continue
            # Without a worker no score tells whether the version may be served.
            if record is not None and not record.final and record == before and self._view.snapshot():
                await self._complete(record)
            before = record

    async def _keep_record(self) -> None:
        """Does what a worker without a role does by itself: writes a record that the store lacks, and bars the
        coordinators before, by sealing the record."""
        with _logged("the record could not be written for a worker"):
            if record_of(await self._view.read_record()) is None:
                await self._fleet.updates.fix_first_version()
            else:
                await self._fleet.updates.finish()

    async def _complete(self, record: DecisionRecord) -> None:
        with _logged(f"the update {record.update_id} could not be completed"):
            version = await self._fleet.updates.finish()
            if version == record.made:
                how = "this frontend has completed it"
            else:
                how = f"this frontend has judged it, and {version.label} is committed now"
            log.warning("the update %s was left half done; %s", record.update_id, how)


@contextmanager
def _logged(what: str) -> Iterator[None]:
    """Logs an error of the block. A locked fleet is none: its coordinator, or another frontend, does the same."""
    try:
        yield
    except Locked:
        pass
    except PlaneError as error:
        log.warning("%s: %s", what, error)
    except Exception:
        log.exception("%s", what)

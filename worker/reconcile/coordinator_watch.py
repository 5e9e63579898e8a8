"""Watches the coordinator of what is staged or received here, and drops it when the coordinator is gone."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from rl_plane.bus.connection import Bus
from rl_plane.bus.lock import fence_of
from rl_plane.bus.sealed_record import bar
from rl_plane.bus.state_store import read_session, record_of
from rl_plane.errors import PermissionDenied
from rl_plane.protocol.subjects import LOCK, RECORD, Subjects
from worker.reconcile.engine_changes import EngineChanges
from worker.reconcile.instructions import CoordinatedUpdate
from worker.reconcile.record_watch import RecordWatch
from worker.reconcile.staged_updates import WeightUpdates
from worker.reconcile.worker_core import WorkerCore

log = logging.getLogger("worker.reconcile.coordinator_watch")


@dataclass(eq=False)
class CoordinatorWatch:
    """Asks, at each tick, whether the coordinator that this worker depends on still holds the lock."""

    _bus: Bus
    _subjects: Subjects
    _core: WorkerCore
    _record: RecordWatch
    _changes: EngineChanges
    _updates: WeightUpdates

    async def tick(self) -> None:
        """Staged weights, a receive and a rolling update need their coordinator. If it is gone, the record decides."""
        if self._core.ticked(time.monotonic(), self._changes.changing.locked()):
            self._changes.look()
        self._note_receive()
        if not self._core.depends_on_coordinator():
            return
        # The order of the reads matters: when a session has ended, its update was decided or aborted before, and the
        # record, read last, says which.
        before = self._core.record
        fence, held = fence_of(await self._bus.get(self._subjects.state, LOCK))
        if self._core.coordinator_holds(fence, held, time.monotonic()):
            return  # the usual case: if a thousand workers read on here, the store's leader would delay the update
        session = await read_session(self._bus, self._subjects.state)
        await self._record.read()
        if self._core.record is not before:
            return  # a newer decision has another coordinator, and the lock was read before it
        waiting_for = session.update_id if session is not None else None
        given_up = self._core.given_up(waiting_for)
        if given_up is not None and await self._is_barred(given_up.fence):
            self._note_receive()
            # The next coordinator may have asked for the same update meanwhile.
            if given_up == self._core.given_up(waiting_for):
                log.warning(
                    "%s drops the update %s: its coordinator is gone",
                    self._core.state.instance_id,
                    given_up.update_id,
                )
                await self._updates.give_up(given_up.update_id)
        self._changes.look()

    def _note_receive(self) -> None:
        receive = self._updates.receiving
        if receive is None or receive.fence is None:
            self._core.receiving = None
        else:
            self._core.receiving = CoordinatedUpdate(receive.update_id, receive.fence)

    async def _is_barred(self, fence: int) -> bool:
        """Makes the store refuse any decision of the coordinator with this fence, which would need what is staged here.

        Returns False if the record has changed meanwhile."""
        entry = await self._bus.get(self._subjects.state, RECORD)
        if entry is None or record_of(entry) != self._core.record:
            await self._record.read()
            return False
        try:
            return await bar(self._bus, self._subjects.state, entry, fence)
        except PermissionDenied:
            await self._record.ask_frontends()
            return False

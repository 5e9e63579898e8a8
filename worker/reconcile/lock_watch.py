"""Follows the component's lock, so that a worker knows which fence is live."""

from __future__ import annotations

from nats.aio.msg import Msg

from rl_plane.bus.connection import Bus, is_marker
from rl_plane.bus.lock import fence_of, raise_sequence
from rl_plane.errors import PermissionDenied
from rl_plane.protocol.subjects import LOCK, Entry, Subjects
from worker.reconcile.worker_state import WorkerState


class LockWatch:
    """Raises the fence in the worker's state with each write to the lock."""

    def __init__(self, bus: Bus, subjects: Subjects, state: WorkerState) -> None:
        self._held = False
        self._asked_on: tuple[str, int] | None = None
        """The connection on which the leader was last asked. A worker misses the writes between two connections."""
        self._sequence = 0
        self._bus = bus
        self._bucket = subjects.state
        self._ask_subject = subjects.keep_record
        self._state = state

    async def start(self) -> None:
        await self._bus.ensure_bucket(self._bucket)
        await self._bus.subscribe(self._bucket.feed(LOCK), self._heard)
        await self._bus.flush()
        self._bus.on_reconnect(self._ask)
        await self._ask()

    def is_holders(self, fence: int) -> bool:
        """Returns whether this is the fence of the lock's holder, by what this worker has heard."""
        return self._held and self._asked_on == self._bus.identity and fence == self._state.fence

    async def is_live(self, fence: int) -> bool:
        """Returns the same, but asks the leader first if in doubt: an op may arrive before the news of its lock."""
        if not self.is_holders(fence):
            await self._ask()
        return self.is_holders(fence)

    async def _ask(self) -> None:
        known, connection = self._sequence, self._bus.identity
        entry = await self._bus.get(self._bucket, LOCK)
        if self._sequence == known and (entry is None or entry.sequence < known):
            self._held = False
            await self._raise_fence()
        self._take(entry)
        self._asked_on = connection

    async def _raise_fence(self) -> None:
        """Raises the bucket's sequence if the store has lost it. An expired marker alone changes nothing."""
        try:
            await raise_sequence(self._bus, self._bucket, self._sequence)
        except PermissionDenied:
            await self._bus.nc.publish(self._ask_subject)  # a frontend seals the record with a higher fence

    async def _heard(self, message: Msg) -> None:
        headers = message.headers or {}
        value = None if is_marker(headers) else message.data
        self._take(Entry(LOCK, value, int(headers["Nats-Sequence"])))

    def _take(self, entry: Entry | None) -> None:
        if entry is not None and entry.sequence >= self._sequence:
            self._sequence = entry.sequence
            fence, self._held = fence_of(entry)
            self._state.fence = max(self._state.fence, fence)

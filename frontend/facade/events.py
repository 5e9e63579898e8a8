"""`GET /v1/rl/events`: what happens to the fleet, as it happens, by server-sent events.

Each event has `id` (rising, over restarts too), `event` (its kind) and `data` (JSON). Kinds:

- `member`      {change: joined | left | reconnected | restarted, instance_id, incarnation, epoch}
- `update`      {change: began | prepared | committed | finished | aborted, update_id, label, version, who, error?,
                 excluded?, canary?, state?}; `committed` when it is decided, `finished` when the outcome of each
                 worker is known. `version` is what the update made, of the base or of an adapter; `committed` also
                 has `state`: {version, adapters}, what is to be served from now on. `canary` is what the numeric
                 canary has shown: {action, scored, failed, reasons?, against?, difference?, mismatch_kl?,
                 tolerance?, warning?}
- `admission`   {instance_id, incarnation, open, reasons, paused, version, sequence, adapters}: one of these has
                 changed
- `end`         {reason: slow | stopping}: the last event; connect again, and read the state

Nothing is told again: whoever connects reads `state` after the first bytes have come, and then follows.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any, Literal

from nats.aio.msg import Msg

from frontend.facade.canary_counts import CanaryCounts
from frontend.routing.fleet_status import FleetStatus, WorkerStatus
from frontend.server.http import to_json
from rl_plane.bus.connection import is_marker
from rl_plane.commit.history import UpdateEntry
from rl_plane.errors import Unavailable
from rl_plane.membership.core import Changed
from rl_plane.membership.view import MembershipView
from rl_plane.protocol.record import DecisionRecord
from rl_plane.protocol.subjects import HISTORY_PREFIX
from rl_plane.protocol.versions import WeightVersion

log = logging.getLogger("frontend.facade.events")

MAX_LISTENERS = 64
"""Each is an open connection and a queue; more people than that do not look at one fleet."""
QUEUE_EVENTS = 4096
"""That a listener may be behind: a fleet of a thousand closes and opens in one update, which is 2,000 events."""
KEEP_ALIVE_S = 15.0
"""Proxies cut a connection that is silent for 30 s or more."""
TOLD_UPDATES = 1024
"""Outcomes that are remembered, so that none is told twice."""

Kind = Literal["member", "update", "admission", "end"]

HELLO = b": connected\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

_CHANGE_OF = {"running": "began", "prepared": "prepared", "committed": "finished", "aborted": "aborted"}


class Listener:
    """One reader's queue. The last event is `end`."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[bytes | None] = asyncio.Queue(QUEUE_EVENTS)
        self.ending: Literal["slow", "stopping"] | None = None

    def put(self, event: bytes) -> None:
        if self.ending is None:
            try:
                self.queue.put_nowait(event)
            except asyncio.QueueFull:
                self.end("slow")

    def end(self, reason: Literal["slow", "stopping"]) -> None:
        """After what is queued already."""
        self.ending = self.ending or reason
        with contextlib.suppress(asyncio.QueueFull):  # a full queue is not waited on
            self.queue.put_nowait(None)


class FleetEvents:
    """Collects what happens and hands it to every listener."""

    def __init__(self, view: MembershipView, status: FleetStatus) -> None:
        self._view = view
        self._status = status
        self._listeners: set[Listener] = set()
        self._last_id = int(time.time() * 1000)
        self._workers: dict[str, dict[str, Any]] = {}
        """instance_id → the last `admission` event's data."""
        self._made: WeightVersion | None = None
        """By the last update that was told as committed."""
        self.canaries = CanaryCounts()
        self._updates: dict[tuple[str, str, float | None], None] = {}
        self._stop_view: Callable[[], None] = lambda: None
        self._stop_record: Callable[[], None] = lambda: None
        self._stopping = False

    async def start(self) -> None:
        """Before the status is started, so that every change of it is seen."""
        state = self._view.subjects.state
        self._made = self._view.record.made if self._view.record is not None else None
        self._stop_view = self._view.listen(self._member)
        self._stop_record = self._view.listen_record(self._record)
        self._status.on_status = self._worker
        await self._view.bus.subscribe(state.feed(HISTORY_PREFIX + ">"), self._history)
        await self._view.bus.flush()

    def stop(self) -> None:
        """Ends every stream, and takes no more listeners."""
        self._stopping = True
        self._stop_view()
        self._stop_record()
        self._stop_view = self._stop_record = lambda: None
        for listener in self._listeners:
            listener.end("stopping")

    async def listen(self) -> AsyncGenerator[bytes, None]:
        """A stream's bytes. Unavailable before the first of them, when there are too many already."""
        if len(self._listeners) >= MAX_LISTENERS or self._stopping:
            raise Unavailable(
                "this frontend is stopping" if self._stopping else f"{MAX_LISTENERS} listeners are connected",
                retry_after_s=1.0,
                fix="end another stream, or ask another frontend",
            )
        listener = Listener()
        self._listeners.add(listener)
        try:
            yield HELLO
            while listener.ending is None or not listener.queue.empty():
                try:
                    async with asyncio.timeout(KEEP_ALIVE_S):
                        event = await listener.queue.get()
                except TimeoutError:
                    yield KEEP_ALIVE
                    continue
                if event is not None:
                    yield event
            yield self._framed("end", {"reason": listener.ending})
        finally:
            self._listeners.discard(listener)

    def _framed(self, kind: Kind, data: dict[str, Any]) -> bytes:
        self._last_id += 1
        return b"id: %d\nevent: %s\ndata: %s\n\n" % (self._last_id, kind.encode(), to_json(data))

    def _tell(self, kind: Kind, data: dict[str, Any]) -> None:
        if not self._listeners:
            return
        event = self._framed(kind, data)
        for listener in self._listeners:
            listener.put(event)

    # ---- what happens ----

    def _member(self, change: Changed) -> None:
        member = change.after or change.before
        assert member is not None
        if change.after is None:
            what = "left"
            self._workers.pop(member.instance_id, None)
        elif change.before is None:
            what = "joined"
        else:
            what = "reconnected" if change.before.incarnation == change.after.incarnation else "restarted"
        told = {"change": what, "instance_id": member.instance_id, "incarnation": member.incarnation}
        self._tell("member", {**told, "epoch": self._view.snapshot().epoch})

    def _worker(self, instance_id: str, status: WorkerStatus) -> None:
        now = {
            "instance_id": instance_id,
            "incarnation": status.incarnation,
            "open": status.open,
            "reasons": list(status.reasons),
            "paused": status.paused,
            "version": status.version,
            "sequence": status.sequence,
            "adapters": status.adapters,
        }
        if self._workers.get(instance_id) != now:
            self._workers[instance_id] = now
            self._tell("admission", now)

    def _record(self, record: DecisionRecord) -> None:
        if record.made == self._made:
            return  # it was opened
        self._made = record.made
        self._tell(
            "update",
            {
                "change": "committed",
                "update_id": record.update_id,
                "label": record.made.label,
                "version": record.made.to_wire(),
                "state": record.held.to_wire(),
            },
        )

    async def _history(self, message: Msg) -> None:
        if is_marker(message.headers):
            return
        try:
            entry = UpdateEntry.decode(message.data)
        except (ValueError, TypeError, KeyError):
            log.warning("a malformed entry on %s", message.subject)
            return
        key = (entry.update_id, entry.outcome, entry.began_at)
        if not entry.update_id or key in self._updates:
            return  # the workers' own model; or told before
        self._updates[key] = None
        while len(self._updates) > TOLD_UPDATES:
            del self._updates[next(iter(self._updates))]
        told: dict[str, Any] = {
            "change": _CHANGE_OF[entry.outcome],
            "update_id": entry.update_id,
            "label": entry.label,
            "version": entry.version.to_wire() if entry.version is not None else None,
            "who": entry.who,
        }
        if entry.error is not None:
            told["error"] = {key: entry.error.get(key) for key in ("code", "message")}
        if entry.excluded:
            told["excluded"] = list(entry.excluded)
        if entry.canary is not None:
            told["canary"] = dict(entry.canary)
            self.canaries.take(entry.canary)
        self._tell("update", told)

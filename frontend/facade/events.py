"""`GET /v1/rl/events`: what happens to the fleet, as it happens, by server-sent events. `EVENTS_DOC` in
`facade_routes.py` lists the events."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Literal

from nats.aio.msg import Msg

from frontend.facade.kept_events import KeptEvents, Kind, last_admissions, passing
from frontend.facade.stored_events import StoredEvents
from frontend.frontend_limits import LIMITS, FrontendLimits
from frontend.routing.fleet_status import FleetStatus, WorkerStatus
from rl_plane._util.limited_log import LimitedLog
from rl_plane.bus.connection import is_marker
from rl_plane.bus.entries import decoded
from rl_plane.commit.history import UpdateEntry
from rl_plane.errors import InvalidRequest, PlaneError, Unavailable
from rl_plane.fleet.fleet_call import said
from rl_plane.membership.core import Changed
from rl_plane.membership.view import MembershipView
from rl_plane.protocol.fleet_reply_types import RunningUpdate
from rl_plane.protocol.notices import OpNotice
from rl_plane.protocol.record import DecisionRecord
from rl_plane.protocol.subjects import HISTORY_PREFIX, Entry
from rl_plane.protocol.versions import WeightVersion

log = logging.getLogger("frontend.facade.events")

TOLD_UPDATES = 1024
"""The number of outcomes that are remembered, so that no event comes twice."""

PROGRESS_S = 1.0
"""The interval of the events `progress`. The workers are asked only while an update runs and a reader listens."""

HELLO = b": connected\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
_CHANGE_OF = {"running": "began", "prepared": "prepared", "committed": "finished", "aborted": "aborted"}


async def _nothing_runs() -> RunningUpdate | None:
    return None


class Listener:
    """The queue of one reader. Its last event is `end`."""

    def __init__(self, max_events: int) -> None:
        self.queue: asyncio.Queue[bytes | None] = asyncio.Queue(max_events)
        self.ending: Literal["slow", "stopping"] | None = None

    def put(self, event: bytes) -> None:
        if self.ending is None:
            try:
                self.queue.put_nowait(event)
            except asyncio.QueueFull:
                self.end("slow")

    def end(self, reason: Literal["slow", "stopping"]) -> None:
        """Ends the stream after the events that are queued already."""
        self.ending = self.ending or reason
        with contextlib.suppress(asyncio.QueueFull):  # the reader wakes anyway
            self.queue.put_nowait(None)


class FleetEvents:
    """Collects what happens to the fleet, and hands it to every listener."""

    def __init__(
        self, view: MembershipView, status: FleetStatus, frontend_id: str, limits: FrontendLimits = LIMITS
    ) -> None:
        self.limits = limits
        self._view = view
        self._status = status
        self._listeners: set[Listener] = set()
        self._kept = KeptEvents(limits.kept_events)
        self.stored = StoredEvents(view.bus, view.subjects.events, frontend_id)
        self._workers: dict[str, dict[str, Any]] = {}
        """instance_id → the last `admission` event's data."""
        self._made: WeightVersion | None = None
        """The version of the last `committed` event."""
        self.on_ended: Callable[[UpdateEntry], None] = lambda entry: None
        """Called with the final entry of each update."""
        self.running: Callable[[], Awaitable[RunningUpdate | None]] = _nothing_runs
        """Reads the update that runs, for the event `progress`."""
        self._following: asyncio.Task[None] | None = None
        """Sends the progress of the update that runs."""
        self._updates: dict[tuple[str, str, float | None], None] = {}
        self._stop_view: Callable[[], None] = lambda: None
        self._stop_record: Callable[[], None] = lambda: None
        self._stopping = False
        self._malformed = LimitedLog(log)

    async def start(self) -> None:
        """Call it before `FleetStatus.start`, so that no change is missed."""
        earlier = await self.stored.start()
        self._kept.load(earlier)
        # Drop workers that left while no frontend ran: if such a worker returns, its admission is an event again.
        there = {member.instance_id for member in self._view.snapshot()}
        self._workers = {key: data for key, data in last_admissions(earlier).items() if key in there}
        state = self._view.subjects.state
        self._made = self._view.record.made if self._view.record is not None else None
        self._stop_view = self._view.listen(self._on_member)
        self._stop_record = self._view.listen_record(self._on_record)
        self._status.on_status.append(self._on_worker)
        await self._view.bus.subscribe(state.feed(HISTORY_PREFIX + ">"), self._on_history)
        await self._view.bus.subscribe(self._view.subjects.op_notices, self._on_notice)
        await self._view.bus.flush()

    def stop(self) -> None:
        """Ends every stream, and collects nothing more of members and the record."""
        self.end_streams()
        self._stop_view()
        self._stop_record()
        self._stop_view = self._stop_record = lambda: None

    def end_streams(self) -> None:
        """Ends every stream, and refuses new listeners. What happens until `stop` is still stored, for the next
        frontend."""
        self._stopping = True
        if self._following is not None:
            self._following.cancel()
        for listener in self._listeners:
            listener.end("stopping")

    async def listen(
        self, after: int | None = None, since_s: float | None = None, *, follow: bool = True
    ) -> AsyncGenerator[bytes, None]:
        """The bytes of one stream. Raises Unavailable before the first byte if there are too many listeners.

        Args:
            after: The id of the last event that the reader has. The kept events after it come first.
            since_s: The kept events of so many seconds come first. With both, `after` counts.
            follow: Wait for more events. Else the stream ends after the kept ones.
        """
        if len(self._listeners) >= self.limits.event_listeners or self._stopping:
            raise Unavailable(
                "this frontend is stopping"
                if self._stopping
                else f"{self.limits.event_listeners} listeners are connected",
                retry_after_s=1.0,
                fix="end another stream, or ask another frontend",
            )
        listener = Listener(self.limits.queued_events)
        missed = self._kept.missed(after, since_s)
        self._listeners.add(listener)
        self._follow_update()
        try:
            yield HELLO
            for framed in missed:
                yield framed
            if not follow:
                return
            while listener.ending is None or not listener.queue.empty():
                try:
                    async with asyncio.timeout(self.limits.event_keep_alive_s):
                        event = await listener.queue.get()
                except TimeoutError:
                    yield KEEP_ALIVE
                    continue
                if event is not None:
                    yield event
            yield passing("end", {"reason": listener.ending})
        finally:
            self._listeners.discard(listener)

    def on_op(self, who: str, op: str, asked_by: str, outcome: str, caller: str = "") -> None:
        """Sends that a process has carried out a changing op. `who`, `caller`: as in `UpdateEntry`. `asked_by`: as in
        `FleetCall`. `outcome`: ok, or the error's code."""
        self._send("op", {"op": op, "who": who, "caller": caller, "asked_by": asked_by, "outcome": outcome})

    def _send(self, kind: Kind, data: dict[str, Any]) -> None:
        """Sends an event to every reader, and keeps it for readers that connect later."""
        event = self._kept.new(kind, data)
        self.stored.add(event)
        if self._listeners:
            self._put(event.framed())

    def _put(self, framed: bytes) -> None:
        for listener in self._listeners:
            listener.put(framed)

    # ---- sources ----

    def _on_member(self, change: Changed) -> None:
        member = change.after or change.before
        assert member is not None
        if change.after is None:
            what = "left"
            self._workers.pop(member.instance_id, None)
        elif change.before is None:
            what = "joined"
        else:
            what = "reconnected" if change.before.incarnation == change.after.incarnation else "restarted"
        facts = {"change": what, "instance_id": member.instance_id, "incarnation": member.incarnation}
        self._send("member", {**facts, "epoch": self._view.snapshot().epoch})

    def _on_worker(self, instance_id: str, status: WorkerStatus) -> None:
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
            self._send("admission", now)

    def _on_record(self, record: DecisionRecord) -> None:
        if record.made == self._made:
            return  # the update was opened, and its commit is known
        self._made = record.made
        self._send(
            "update",
            {
                "change": "committed",
                "update_id": record.update_id,
                "label": record.made.label,
                "version": record.made.to_wire(),
                "state": record.held.to_wire(),
            },
        )

    async def _on_notice(self, message: Msg) -> None:
        try:
            notice = OpNotice.decode(message.data)
        except InvalidRequest as error:
            self._malformed.warning("a malformed message on %s: %s", message.subject, error.message)
            return
        self.on_op(notice.who, notice.op, said(notice.key), notice.outcome)

    async def _on_history(self, message: Msg) -> None:
        if is_marker(message.headers):
            return
        sequence = int((message.headers or {})["Nats-Sequence"])
        entry = decoded(Entry(message.subject, message.data, sequence), UpdateEntry.decode)
        if entry is None:
            return
        key = (entry.update_id, entry.outcome, entry.began_at)
        if not entry.update_id or key in self._updates:
            return  # the workers' own model, or an event that was sent before
        self._updates[key] = None
        while len(self._updates) > TOLD_UPDATES:
            del self._updates[next(iter(self._updates))]
        event: dict[str, Any] = {
            "change": _CHANGE_OF[entry.outcome],
            "update_id": entry.update_id,
            "label": entry.label,
            "version": entry.version.to_wire() if entry.version is not None else None,
            "who": entry.who,
            "caller": entry.caller,
            "asked_by": entry.asked_by,
        }
        if entry.error is not None:
            event["error"] = {key: entry.error.get(key) for key in ("code", "message")}
        if entry.excluded:
            event["excluded"] = list(entry.excluded)
        if entry.canary is not None:
            event["canary"] = dict(entry.canary)
        if entry.phases:
            event["phases"] = dict(entry.phases)
        if entry.final:
            self.on_ended(entry)
        self._send("update", event)
        if not entry.final:
            self._follow_update()

    # ---- the update that runs ----

    def _follow_update(self) -> None:
        """Begins to send the progress of the update that runs, if a reader is there to hear it."""
        if self._listeners and not self._stopping and (self._following is None or self._following.done()):
            self._following = asyncio.create_task(self._send_progress(), name="progress of the update")

    async def _send_progress(self) -> None:
        """Sends the progress of the update each second, until no update runs or no reader is left."""
        while True:
            await asyncio.sleep(PROGRESS_S)
            if not self._listeners:
                return
            try:
                update = await self.running()
            except PlaneError as error:  # the next look may succeed
                log.debug("no progress is known: %s", error)
            else:
                if update is None:
                    return
                self._put(passing("update", {"change": "progress", **update}))

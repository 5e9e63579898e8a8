"""The status of each worker: whether it takes generation, and its load. Workers send it on the status subject; this
module asks for `state` where it may have missed a message."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgpack
from nats.aio.msg import Msg

from frontend.routing.demands import Point
from frontend.routing.router import Load
from frontend.routing.worker_work import NO_WORK, Engine, WorkerWork
from rl_plane._util.limited_log import LimitedLog
from rl_plane._util.tasks import end_tasks
from rl_plane.client import RlClient
from rl_plane.errors import PlaneError
from rl_plane.membership.core import Changed, Member
from rl_plane.membership.view import MembershipView
from rl_plane.protocol.generation import VersionSpan

log = logging.getLogger("frontend.routing.fleet_status")

ASK_CLOSED_S = 2.0
"""The interval at which closed, unknown and late workers are asked. A lost message costs no more than this."""
ASK_RETRY_S = 0.2
"""The pause after a failed question, for example while NATS restarts."""
REFUSED_S = 0.1
"""A worker that refused a request gets no other one for this long, unless its status changes before."""


CLOSED_REASONS = (
    "starting",
    "behind",
    "updating",
    "disabled",
    "draining",
    "leaving",
    "memory",
    "numerics",
    "checking",
    "engine",
)
"""The reasons why a worker may be closed: see docs/operators.md. Metrics use these words alone as labels."""

STATES = ("open", "paused", "closed", "unknown")
"""The states of a member. `paused`: it is open, and its engine stands still. `unknown`: it has not said yet."""


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """The last status that a worker has reported. Two are equal if the worker takes the same requests: load and time do
    not count."""

    incarnation: str
    reasons: tuple[str, ...]
    """Why the worker is closed. Empty: it is open."""
    load: Load = field(compare=False)
    heard_at: float = field(compare=False)
    """Monotonic seconds."""
    version: Mapping[str, Any] | None = None
    """The committed version of the base that the worker holds."""
    paused: bool = False
    sequence: int | None = None
    """The sequence of the committed state that the worker holds. None: it does not hold one completely."""
    adapters: Mapping[str, Any] = field(default_factory=dict)
    """Adapter → the version that the worker holds."""
    work: WorkerWork = field(default=NO_WORK, compare=False)

    @property
    def open(self) -> bool:
        return not self.reasons

    def serves(self, adapter: str | None) -> Point | None:
        """The version that makes the tokens of a request for this adapter. None: it is unknown."""
        held = [self.version, self.adapters.get(adapter) if adapter is not None else None]
        sequences = [int(version["sequence"]) for version in held if version is not None]
        return Point(str(self.version["run"]), max(sequences)) if self.version is not None else None

    def holds(self, span: VersionSpan) -> bool:
        """Whether the worker holds exactly the weights that made these tokens."""
        base, adapter = self.version, span.adapter
        if base is None or (base["run"], base["sequence"], base["digest"]) != (
            span.run,
            span.sequence,
            span.digest,
        ):
            return False
        if adapter is None:
            return True
        held = self.adapters.get(adapter.name)
        return held is not None and (held["sequence"], held["digest"]) == (adapter.sequence, adapter.digest)

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any], incarnation: str, heard_at: float) -> WorkerStatus:
        """Reads a status message or a `state` reply."""
        return cls(
            incarnation,
            () if wire["admission"]["open"] else tuple(wire["admission"]["reasons"]) or ("closed",),
            Load(
                int(wire["running"]),
                int(wire["waiting"]),
                int(wire.get("running_tokens", 0)),
                int(wire.get("waiting_tokens", 0)),
            ),
            heard_at,
            wire.get("version"),
            bool(wire.get("paused")) or wire.get("pause_state") == "paused",
            wire.get("sequence"),
            wire.get("adapters") or {},
            WorkerWork.from_wire(wire),
        )


class FleetStatus:
    """The status of every worker. The router picks from `admitted()`; `wait_changed` waits for a change."""

    def __init__(self, client: RlClient, view: MembershipView) -> None:
        self._client = client
        self._view = view
        self._malformed = LimitedLog(log)
        self._known: dict[str, WorkerStatus] = {}
        self._last_status: dict[str, WorkerStatus] = {}
        """The last status, which stays while a worker is asked again: a worker never returns to weights that it has
        left."""
        self._refused_until: dict[str, float] = {}
        self._changed = asyncio.Event()
        self._ask_now = asyncio.Event()
        self._asking: asyncio.Task[None] | None = None
        self.on_status: list[Callable[[str, WorkerStatus], None]] = []
        """Called with each status of a member, changed or not."""

    async def start(self) -> None:
        await self._client.bus.subscribe(self._view.subjects.status("*"), self._on_message)
        await self._client.bus.flush()
        self._view.listen(self._on_member_change)
        self._client.bus.on_reconnect(self._on_reconnect)
        with contextlib.suppress(PlaneError):
            await self._ask({member.instance_id for member in self._view.snapshot()})
        self._asking = asyncio.create_task(self._ask_repeatedly())

    async def stop(self) -> None:
        if self._asking is not None:
            await end_tasks([self._asking])

    def admitted(self, adapter: str | None = None) -> dict[str, WorkerStatus]:
        """instance id → status of the members that are open, and have said that they hold the adapter."""
        now = time.monotonic()
        self._refused_until = {key: until for key, until in self._refused_until.items() if until > now}
        found = {}
        for member in self._view.snapshot():  # without the generator of _of_members: this runs for each request
            status = self._known.get(member.instance_id)
            if (
                status is not None
                and status.open
                and status.incarnation == member.incarnation
                and member.instance_id not in self._refused_until
                and (adapter is None or adapter in status.adapters)
            ):
                found[member.instance_id] = status
        return found

    def why_closed(self, adapter: str | None = None) -> dict[str, str]:
        """instance id → reasons of the members that are not open, or have not said that they hold the adapter."""
        found = {}
        for member, status in self._of_members():
            if status is None:
                found[member.instance_id] = "it has not answered"
            elif not status.open:
                found[member.instance_id] = ", ".join(status.reasons)
            elif adapter is not None and adapter not in status.adapters:
                found[member.instance_id] = f"it has not loaded {adapter} yet"
        return found

    def closed_by_reason(self) -> dict[str, int]:
        """Reason → the number of members that it closes. A member with several reasons counts for each."""
        found = dict.fromkeys(CLOSED_REASONS, 0)
        for _, status in self._of_members():
            reasons = status.reasons if status is not None else ()
            for reason in {reason.partition(":")[0] for reason in reasons} & found.keys():
                found[reason] += 1
        return found

    def by_state(self) -> dict[str, int]:
        """The number of members in each of `STATES`."""
        found = dict.fromkeys(STATES, 0)
        for _, status in self._of_members():
            if status is None:
                found["unknown"] += 1
            elif not status.open:
                found["closed"] += 1
            else:
                found["paused" if status.paused else "open"] += 1
        return found

    def version_lag(self, committed: int) -> int:
        """The number of versions by which the last of the members is behind the committed one."""
        held = [one.sequence for _, one in self._of_members() if one is not None and one.sequence is not None]
        return max(0, committed - min(held, default=committed))

    def engine_requests(self) -> dict[str, int]:
        """Returns how many requests run in all engines, and how many wait in them."""
        loads = [status.load for _, status in self._of_members() if status is not None]
        return {"running": sum(one.running for one in loads), "waiting": sum(one.waiting for one in loads)}

    def engines(self) -> list[Engine]:
        """The engines of all members that have answered, by their instance ids."""
        return [
            Engine(member, status.work)
            for member, status in sorted(self._of_members(), key=lambda found: found[0].instance_id)
            if member.pipeline_stage is None and status is not None
        ]

    def _of_members(self) -> Iterator[tuple[Member, WorkerStatus | None]]:
        """Each member with its status. None: it has not answered."""
        for member in self._view.snapshot():
            status = self._known.get(member.instance_id)
            is_its = status is not None and status.incarnation == member.incarnation
            yield member, status if is_its else None

    def may_make(self, member: Member, span: VersionSpan) -> bool:
        """Whether the worker may still make tokens by these weights. False once it has said that it holds others."""
        status = self._last_status.get(member.instance_id)
        return status is None or status.incarnation != member.incarnation or status.holds(span)

    def on_refusal(self, instance_id: str) -> None:
        """A worker refused a request although its status is open."""
        self._refused_until[instance_id] = time.monotonic() + REFUSED_S

    async def wait_changed(self, timeout_s: float) -> None:
        """Waits until something may have changed. The end of `REFUSED_S` after a refusal counts."""
        changed = self._changed
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(timeout_s, REFUSED_S) if self._refused_until else timeout_s):
                await changed.wait()

    def wake(self) -> None:
        """Wakes all that wait in `wait_changed`."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    # ---- status messages ----

    async def _on_message(self, message: Msg) -> None:
        now = time.monotonic()
        try:
            wire = msgpack.unpackb(message.data)
            instance_id = str(wire["instance_id"])
            status = WorkerStatus.from_wire(wire, str(wire["incarnation"]), now)
        except Exception:  # whatever the bytes make of the decoder
            self._malformed.warning("a malformed message on %s", message.subject)
            return
        if instance_id != message.subject.rpartition(".")[2]:
            log.warning("a status of %s came on %s", instance_id, message.subject)
            return
        self._take(instance_id, status)

    def _take(self, instance_id: str, status: WorkerStatus) -> None:
        member = self._view.member(instance_id)
        if member is None or member.incarnation != status.incarnation:
            return  # the worker has left; or it is not a member yet, and is asked when it joins
        before = self._known.get(instance_id)
        refused = self._refused_until.pop(instance_id, None)
        self._known[instance_id] = self._last_status[instance_id] = status
        for listener in self.on_status:
            listener(instance_id, status)
        # A changed load wakes nothing: it changes all the time.
        if refused is not None or before is None or before != status:
            self.wake()

    def _on_member_change(self, change: Changed) -> None:
        if change.after is None:
            assert change.before is not None
            self._known.pop(change.before.instance_id, None)
            self._last_status.pop(change.before.instance_id, None)
            self._refused_until.pop(change.before.instance_id, None)
        else:
            self._ask_now.set()
        self.wake()

    async def _on_reconnect(self) -> None:
        # Messages of the outage are lost, so every worker is unknown, and is asked.
        self._known.clear()
        self._ask_now.set()

    # ---- questions ----

    def _unsure(self) -> set[str]:
        """The workers whose status may be out of date."""
        committed = self._view.record.sequence if self._view.record is not None else None
        return {
            member.instance_id
            for member, status in self._of_members()
            if status is None or not status.open or status.sequence != committed
        }

    async def _ask_repeatedly(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ASK_CLOSED_S):
                    await self._ask_now.wait()
            self._ask_now.clear()
            try:
                await self._ask(self._unsure())
            except PlaneError as error:
                log.debug("asking for state: %s", error)
                await asyncio.sleep(ASK_RETRY_S)
                self._ask_now.set()

    async def _ask(self, instance_ids: set[str]) -> None:
        if not instance_ids:
            return
        asked_at = time.monotonic()
        component = self._view.subjects.component
        out = await self._client.call_all("state", workers=sorted(instance_ids), component=component, empty="ok")
        for row in out.rows:
            before = self._known.get(row.instance_id)
            newer = before is not None and before.heard_at >= asked_at and before.incarnation == row.incarnation
            if row.status == "ok" and not newer:
                self._take(row.instance_id, WorkerStatus.from_wire(row.body, row.incarnation, asked_at))

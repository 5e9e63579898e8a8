"""Remembers the workers that have left the fleet, and counts them by what this frontend knew of them."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable

from nats.aio.msg import Msg

from frontend.routing.fleet_status import FleetStatus, WorkerStatus
from rl_plane._util.limited_log import LimitedLog
from rl_plane.errors import InvalidRequest
from rl_plane.membership.core import Changed, Member
from rl_plane.membership.view import MembershipView
from rl_plane.protocol.fleet_reply_types import LeftWorker
from rl_plane.protocol.notices import ExitNotice

log = logging.getLogger("frontend.routing.departures")

NO_MEMBER = "start"
"""The reason for a process that ended before it was a member. The frontend lists the process and does not count it."""
KEPT = 100
"""The most workers that the frontend remembers: more than an operator reads."""
KEPT_S = 3600.0
"""An operator who is called looks within the hour. The log has what came before."""
MAX_WHY_CHARS = 300
WHY = {
    "ended": "it has ended in order, by a signal or after a drain",
    "engine": "its engine hung or died",
    "connection": "its connection to NATS has closed: it was killed, it crashed or it stands still",
    "silent": "it did not answer: it hangs, or the network between is broken",
    "replaced": "a new process has taken its instance id",
    NO_MEMBER: "its process has ended before it joined",
}
"""Reason → its words for an operator. docs/metrics.md lists the reasons that are counted: all but NO_MEMBER."""


class Departures:
    """The workers that have left since the start."""

    def __init__(self, view: MembershipView, status: FleetStatus, clock: Callable[[], float] = time.time) -> None:
        """`clock`: Unix seconds."""
        self.counts = {reason: 0 for reason in WHY if reason != NO_MEMBER}
        self._clock = clock
        self._view = view
        self._status = status
        self._left: deque[tuple[Member, float, str, str]] = deque(maxlen=KEPT)
        """The worker, Unix seconds, the reason, and the reason in words."""
        self._closed_by: dict[str, dict[str, str]] = {}
        """instance_id → why the worker is closed, by its last status: reason → its text."""
        self._exits: OrderedDict[tuple[str, int], int] = OrderedDict()
        """(instance_id, pid) → the exit code of this process. Its notice may come before the member has left."""
        self._malformed = LimitedLog(log)

    def start(self) -> None:
        self._view.listen(self._on_change)
        self._status.on_status.append(self._on_status)

    def _on_status(self, instance_id: str, status: WorkerStatus) -> None:
        self._closed_by[instance_id] = {reason.partition(":")[0]: reason for reason in status.reasons}

    async def on_exit(self, message: Msg) -> None:
        """Takes the notice of a supervisor that a worker's process has ended."""
        try:
            instance_id, notice = ExitNotice.received(message.subject, message.data)
        except InvalidRequest as error:
            self._malformed.warning("a malformed message on %s: %s", message.subject, error.message)
            return
        self._exits[instance_id, notice.pid] = notice.exit_code
        while len(self._exits) > KEPT:
            self._exits.popitem(last=False)
        member = self._view.member(instance_id)
        known = [one for one, *_ in self._left if one.instance_id == instance_id]
        if all(one.info.get("pid") != notice.pid for one in [*known, *([member] if member else [])]):
            info = {"engine": notice.engine, "host": notice.host, "pid": notice.pid}
            process = Member(instance_id, "", "", 0, 0, info)
            # A worker may end again and again. Its new end replaces the one before, so other workers keep their place.
            others = [one for one in self._left if (one[0].instance_id, one[2]) != (instance_id, NO_MEMBER)]
            self._left = deque(others, maxlen=KEPT)
            self._left.append((process, self._clock(), NO_MEMBER, WHY[NO_MEMBER]))

    def _exit_code(self, member: Member) -> int | None:
        pid = member.info.get("pid")
        return self._exits.get((member.instance_id, pid)) if isinstance(pid, int) else None

    def _on_change(self, change: Changed) -> None:
        before, after = change.before, change.after
        if before is None or (after is not None and after.incarnation == before.incarnation):
            return
        reasons = self._closed_by.pop(before.instance_id, {})
        if before.pipeline_stage is not None:
            return  # no count of workers has it
        if "leaving" in reasons:
            reason = "ended"
        elif "engine" in reasons:
            reason = "engine"
        elif after is not None:
            reason = "replaced"
        else:
            closed = self._view.connection_closed((before.server_id, before.client_id))
            reason = "connection" if closed else "silent"
        self.counts[reason] += 1
        why = f"{WHY[reason]} ({reasons['engine'][:MAX_WHY_CHARS]})" if reason == "engine" else WHY[reason]
        self._left.append((before, self._clock(), reason, why))

    def recent(self) -> list[LeftWorker]:
        """The workers that have left in the last hour, newest first."""
        now, here = self._clock(), {member.instance_id for member in self._view.snapshot()}
        return [
            LeftWorker(
                instance_id=member.instance_id,
                incarnation=member.incarnation,
                engine=member.info.get("engine"),
                host=member.info.get("host"),
                pid=member.info.get("pid"),
                left_at=at,
                ago_s=max(0.0, now - at),
                reason=reason,
                why=why,
                back=member.instance_id in here,
                exit_code=self._exit_code(member),
            )
            for member, at, reason, why in reversed(self._left)
            if now - at <= KEPT_S
        ]

"""Lists the workers that load their engines, from the notices that they send each second. They are no members."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from nats.aio.msg import Msg

from rl_plane._util.limited_log import LimitedLog
from rl_plane.bus.connection import Bus
from rl_plane.errors import InvalidRequest
from rl_plane.membership.core import Changed
from rl_plane.membership.view import MembershipView
from rl_plane.protocol.fleet_reply_types import StartingWorker
from rl_plane.protocol.notices import EVERY_S, StartNotice

log = logging.getLogger("frontend.facade.starting_workers")

SILENT_S = 15 * EVERY_S
"""A worker that sends nothing for so long is not listed any more. An import of torch from a slow disk holds the
interpreter for seconds."""
MAX_STARTING = 1000
"""The workers that are listed. Anything that NATS lets publish here could name more."""


@dataclass(frozen=True, slots=True)
class _Heard:
    notice: StartNotice
    at: float
    """Monotonic seconds."""


class StartingWorkers:
    """The workers that start, each until it is a member, its connection closes, or it is silent for SILENT_S."""

    def __init__(self, bus: Bus, view: MembershipView, clock: Callable[[], float] = time.monotonic) -> None:
        self._bus = bus
        self._view = view
        self._clock = clock
        self._heard: dict[str, _Heard] = {}
        self._malformed = LimitedLog(log)

    async def start(self) -> None:
        self._view.listen(self._on_change)
        await self._bus.subscribe(self._view.subjects.starting("*"), self._on_message)

    async def _on_message(self, message: Msg) -> None:
        try:
            instance_id, notice = StartNotice.received(message.subject, message.data)
        except InvalidRequest as error:
            self._malformed.warning("a malformed message on %s: %s", message.subject, error.message)
            return
        if instance_id not in self._heard and len(self._heard) >= MAX_STARTING:
            self._drop_ended()  # only now: for each notice of a thousand workers it would take a core
        if instance_id in self._heard or len(self._heard) < MAX_STARTING:
            self._heard[instance_id] = _Heard(notice, self._clock())

    def _on_change(self, change: Changed) -> None:
        if change.after is not None:
            self._heard.pop(change.after.instance_id, None)

    def _drop_ended(self) -> None:
        now = self._clock()
        self._heard = {
            instance_id: one
            for instance_id, one in self._heard.items()
            if now - one.at <= SILENT_S
            and not self._view.connection_closed((one.notice.server_id, one.notice.client_id))
        }

    def now(self) -> list[StartingWorker]:
        """The workers that start now, the longest first."""
        self._drop_ended()
        now, clock = self._clock(), time.time()
        listed = []
        for instance_id, one in self._heard.items():
            notice, since_notice_s = one.notice, now - one.at
            elapsed_s = notice.elapsed_s + since_notice_s
            listed.append(
                StartingWorker(
                    instance_id=instance_id,
                    engine=notice.engine,
                    host=notice.host,
                    pid=notice.pid,
                    phase=notice.phase,
                    since=clock - elapsed_s,
                    elapsed_s=elapsed_s,
                    in_phase_s=notice.in_phase_s + since_notice_s,
                )
            )
        return sorted(listed, key=lambda one: -one["elapsed_s"])

"""Counts the workers that have left the fleet, by what this frontend knew of them."""

from __future__ import annotations

from collections.abc import Callable

from frontend.routing.fleet_status import FleetStatus, WorkerStatus
from rl_plane.membership.core import Changed
from rl_plane.membership.view import MembershipView

REASONS = ("ended", "engine", "connection", "silent", "replaced")
"""The reasons that docs/metrics.md explains."""


class Departures:
    """The workers that have left since the start."""

    def __init__(self, view: MembershipView, status: FleetStatus) -> None:
        self.counts = dict.fromkeys(REASONS, 0)
        self._view = view
        self._status = status
        self._closed_by: dict[str, frozenset[str]] = {}
        """instance_id → why the worker is closed, by its last status."""
        self._stop_view: Callable[[], None] = lambda: None

    def start(self) -> None:
        self._stop_view = self._view.listen(self._on_change)
        self._status.on_status.append(self._on_status)

    def stop(self) -> None:
        self._stop_view()
        self._stop_view = lambda: None

    def _on_status(self, instance_id: str, status: WorkerStatus) -> None:
        self._closed_by[instance_id] = frozenset(reason.partition(":")[0] for reason in status.reasons)

    def _on_change(self, change: Changed) -> None:
        before, after = change.before, change.after
        if before is None or (after is not None and after.incarnation == before.incarnation):
            return
        reasons = self._closed_by.pop(before.instance_id, frozenset())
        if before.stage is not None:
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

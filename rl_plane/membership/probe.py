"""Decides when an unanswered probe means death: the pure core of the sweep. Time is passed in.

If the NATS server sends disconnect advisories, the sweep finds only the deaths that they missed. With any other server
the sweep finds every death.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Outcome = Literal["answered", "no_responder", "silent"]

SWEEP_S = 0.4
"""The interval without advisories. A death is confirmed within three sweeps, so within 2 s."""
SWEEP_PER_MEMBER_S = 0.0005
"""Added to the interval for each member. Without it the probes of a large fleet would take more than 5 % of a core."""
MAX_SWEEP_S = 1.0
BACKSTOP_SWEEP_S = 2.0
"""The interval with advisories. The sweep then finds only the deaths that they missed."""
PROBE_TIMEOUT_S = 0.3
"""The time for which one sweep waits for answers. A later answer still counts when it arrives."""
CONFIRM_S = 0.25
"""The time between two probes that confirm a death. A new member's subscription reaches other nodes of a cluster later
than its record."""
HUNG_AFTER_S = 5.0
"""A worker's NATS loop never blocks, so a silence of this length is a hang. With the sweep it is found within 8 s."""
MIN_SILENT_PROBES = 3
"""Silent sweeps that make a hang. A prober that was itself stopped sees one, not several."""


@dataclass(slots=True)
class _WatchedWorker:
    revision: int
    heard_at: float
    silent_probes: int = 0
    refused_at: float | None = None


@dataclass(slots=True)
class ProbeCore:
    _watched: dict[str, _WatchedWorker] = field(default_factory=dict)

    def restart(self) -> None:
        """Forgets all silence so far, because the prober's own connection or loop was stopped."""
        self._watched.clear()

    def interval_s(self, members: int, advisories: bool) -> float:
        if any(watch.refused_at is not None for watch in self._watched.values()):
            return CONFIRM_S
        if advisories:
            return BACKSTOP_SWEEP_S
        return min(MAX_SWEEP_S, max(SWEEP_S, members * SWEEP_PER_MEMBER_S))

    def keep_only(self, instance_ids: set[str]) -> None:
        for gone in self._watched.keys() - instance_ids:
            del self._watched[gone]

    def probed(self, instance_id: str, revision: int, outcome: Outcome, now: float) -> bool:
        """Takes the outcome of one probe. True: the worker registered at `revision` is dead or hangs."""
        watch = self._watched.get(instance_id)
        if watch is None or watch.revision != revision:
            watch = self._watched[instance_id] = _WatchedWorker(revision, now)
        if outcome == "answered":
            watch.heard_at, watch.silent_probes, watch.refused_at = now, 0, None
            return False
        if outcome == "no_responder":
            if watch.refused_at is None:
                watch.refused_at = now
                return False
            return now - watch.refused_at >= CONFIRM_S * 0.9
        watch.silent_probes += 1
        watch.refused_at = None
        return now - watch.heard_at >= HUNG_AFTER_S and watch.silent_probes >= MIN_SILENT_PROBES

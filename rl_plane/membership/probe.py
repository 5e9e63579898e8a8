"""When does an unanswered probe mean death? The pure core of the sweep; time is passed in.

Where disconnect advisories reach us this is a backstop; on any other NATS server it is how deaths are found.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Outcome = Literal["answered", "no_responder", "silent"]

SWEEP_S = 0.4
"""Interval without advisories: a death is confirmed within three sweeps, so inside 2 s."""
SWEEP_PER_MEMBER_S = 0.0005
"""Large fleets are swept more slowly, or probing would take more than 5 % of a core."""
MAX_SWEEP_S = 1.0
BACKSTOP_SWEEP_S = 2.0
"""Interval with advisories: it only has to find what they missed."""
PROBE_TIMEOUT_S = 0.3
"""How long one sweep waits for answers; a later one still counts, when it comes."""
CONFIRM_S = 0.25
"""A fresh member's subscription reaches other nodes of a cluster later than its record: ask twice."""
HUNG_AFTER_S = 5.0
"""A worker's NATS loop never blocks, so this long a silence is a hang (found within 8 s with the sweep)."""
MIN_SILENT_PROBES = 3
"""A prober that was itself stopped sees one silent sweep, not several."""


@dataclass(slots=True)
class _Watch:
    revision: int
    heard_at: float
    silent_probes: int = 0
    refused_at: float | None = None


@dataclass(slots=True)
class ProbeCore:
    _watched: dict[str, _Watch] = field(default_factory=dict)

    def restart(self) -> None:
        """The prober's own connection or loop stood still: what it did not hear in that time means nothing."""
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
        """The outcome of one probe. True: the worker registered at `revision` is dead or hung."""
        watch = self._watched.get(instance_id)
        if watch is None or watch.revision != revision:
            watch = self._watched[instance_id] = _Watch(revision, now)
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

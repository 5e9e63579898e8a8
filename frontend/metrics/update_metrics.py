"""Counts the updates that this frontend sees end: outcomes, seconds, bytes, and the results of the canary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, get_args

from prometheus_client.metrics_core import Metric

from rl_plane._util.bucket_counts import BucketCounts
from rl_plane._util.metric_families import OTHER, closed, counters, gauge, histogram, transports
from rl_plane.commit.coordinator import TIMED
from rl_plane.commit.history import WAY_BACK, UpdateEntry
from rl_plane.protocol.canary import CanaryReason

SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000)
"""Buckets from a flush of the cache to an update of a large model over a slow link."""
DIFFERENCES = (1e-6, 1e-5, 1e-4, 1e-3, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)
"""Buckets from equal kernels to weights that are wrong. A difference of log probabilities is in nats."""
NO_TRANSPORT = "none"
"""The label of an update that brings no weights: it unloads an adapter."""
OUTCOMES = ("committed", "excluded", "failed", "unreported", "aborted", "rollback")
"""The ends of an update, as docs/metrics.md explains them."""


class UpdateMetrics:
    """The updates that this frontend has seen end, whichever process coordinated them."""

    def __init__(self) -> None:
        self._backends = (*transports(), NO_TRANSPORT)
        self._outcomes: dict[tuple[str, ...], int] = {
            (outcome, backend): 0 for outcome in OUTCOMES for backend in self._backends
        }
        self._bytes = dict.fromkeys(self._backends, 0)
        self._seconds: dict[tuple[str, ...], BucketCounts] = {}
        self._phases: dict[tuple[str, ...], BucketCounts] = {}
        self._differences = BucketCounts(DIFFERENCES)
        self._last_difference: float | None = None
        self._last_kl: float | None = None
        self._canary_failures = dict.fromkeys(get_args(CanaryReason), 0)

    def on_ended(self, entry: UpdateEntry) -> None:
        """Counts an update by its final entry in the history."""
        outcome, backend = outcome_of(entry), self._backend(entry.transport)
        self._outcomes[outcome, backend] += 1
        if entry.began_at is not None and entry.ended_at is not None:
            self._observe(self._seconds, (outcome, backend), entry.ended_at - entry.began_at)
        if entry.outcome == "committed":
            for phase, seconds in entry.phases.items():
                self._observe(self._phases, (closed(phase.removesuffix("_s"), TIMED),), seconds)
            received = sum(reply.get("status") == "ok" for reply in entry.workers.values())
            self._bytes[backend] += (entry.sent_bytes or 0) * (received + entry.workers_left_out)
        if entry.canary is not None:
            self._take_canary(entry.canary)

    def collect(self) -> Iterable[Metric]:
        labels = ("outcome", "transport")
        yield counters("rl_plane_updates", "Updates that have ended.", labels, self._outcomes)
        words = "Seconds of each update, from its begin to its answer."
        yield histogram("rl_plane_update_seconds", words, labels, self._seconds)
        words = "Seconds of each phase of the updates that were committed."
        yield histogram("rl_plane_update_phase_seconds", words, ["phase"], self._phases)
        words = "Bytes of tensors that all workers have received in committed updates."
        yield counters("rl_plane_update_received_bytes", words, ["transport"], self._bytes)
        words = "Workers that failed the numeric canary of an update, by reason."
        yield counters("rl_plane_canary_failures", words, ["reason"], self._canary_failures)
        words = "The largest difference of a log probability in the canary of each update."
        yield histogram("rl_plane_canary_difference", words, [], {(): self._differences})
        if self._last_difference is not None:
            words = "The same difference, in the last update that compared anything."
            yield gauge("rl_plane_canary_last_difference", words, self._last_difference)
        if self._last_kl is not None:
            yield gauge("rl_plane_canary_last_mismatch_kl", "The mismatch_kl of that canary.", self._last_kl)

    def _take_canary(self, canary: Mapping[str, Any]) -> None:
        """`canary`: as `rl_plane.commit.canary_rules.Settlement.summary` makes it."""
        self._last_difference, self._last_kl = canary.get("difference"), canary.get("mismatch_kl")
        if self._last_difference is not None:
            self._differences.observe(self._last_difference)
        reasons = canary.get("reasons") or {}
        for reason in self._canary_failures:
            self._canary_failures[reason] += reasons.get(reason, 0)

    def _backend(self, transport: Mapping[str, Any] | None) -> str:
        if transport is None:
            return NO_TRANSPORT
        found = closed(str(transport.get("backend")), self._backends)
        return OTHER if found == NO_TRANSPORT else found

    @staticmethod
    def _observe(series: dict[tuple[str, ...], BucketCounts], key: tuple[str, ...], seconds: float) -> None:
        if key not in series:
            series[key] = BucketCounts(SECONDS)
        series[key].observe(seconds)


def outcome_of(entry: UpdateEntry) -> str:
    """The end of an update, one of `OUTCOMES`."""
    if entry.outcome == "aborted":
        return "aborted"
    if entry.update_id.endswith(WAY_BACK):
        return "rollback"
    if entry.outcome_unreported:
        return "unreported"
    if entry.error is not None:
        return "failed"
    return "excluded" if entry.excluded else "committed"

"""The frontend's metrics, which `/metrics` shows in Prometheus's text format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rl_plane.commit.canary_rules import Reason

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
"""Buckets from a flush of the cache to an update of a large model."""
FIRST_TOKEN_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)

disable_created_metrics()  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What the frontend's parts know at the time of one scrape."""

    workers: int
    admitted: int
    closed: Mapping[str, int]
    epoch: int
    sequence: int | None
    """The sequence of the committed state. None: nothing is committed yet."""
    outcomes: Mapping[str, int]
    in_flight: int
    lease: bool | None
    """None: this frontend delivers no tokens."""
    picks: Mapping[str, int]
    moves: Mapping[str, int]


class FrontendMetrics:
    """All metrics of one frontend. `snapshot` supplies what other parts count; the rest is counted here."""

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_SnapshotCollector(snapshot))
        self._first_token = Histogram(
            "rl_plane_generation_first_token_seconds",
            "Seconds from a generation call to the first token of each choice.",
            buckets=FIRST_TOKEN_SECONDS,
            registry=self._registry,
        )
        self._phases = Histogram(
            "rl_plane_update_phase_seconds",
            "Seconds of each phase of the updates that were committed.",
            ["phase"],
            buckets=SECONDS,
            registry=self._registry,
        )
        self._canaries = _CanaryMetrics()
        self._registry.register(self._canaries)

    def on_first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def on_committed(self, phases: Mapping[str, float]) -> None:
        """An update has ended, and its coordinator has reported the seconds of its phases."""
        for phase, seconds in phases.items():
            self._phases.labels(phase.removesuffix("_s")).observe(seconds)

    def on_canary(self, canary: Mapping[str, Any]) -> None:
        """An update has ended. `canary`: as `rl_plane.commit.canary_rules.Settlement.summary` makes it."""
        self._canaries.take(canary)

    def text(self) -> bytes:
        return generate_latest(self._registry)


@dataclass(eq=False)
class _CanaryMetrics(Collector):
    """What the numeric canaries have shown in the updates that this frontend has seen end."""

    difference: float | None = None
    mismatch_kl: float | None = None
    failures: dict[str, int] = field(default_factory=lambda: dict.fromkeys(get_args(Reason), 0))
    """Reason → workers that failed for it."""

    def take(self, canary: Mapping[str, Any]) -> None:
        self.difference, self.mismatch_kl = canary.get("difference"), canary.get("mismatch_kl")
        reasons = canary.get("reasons") or {}
        for reason in self.failures:
            self.failures[reason] += reasons.get(reason, 0)

    def collect(self) -> Iterable[Metric]:
        words = "Workers that failed the numeric canary of an update, by reason."
        yield _counter("rl_plane_canary_failures", words, "reason", self.failures)
        if self.difference is not None:
            words = "The largest difference of a log probability in the canary of the last update."
            yield GaugeMetricFamily("rl_plane_canary_difference", words, self.difference)
        if self.mismatch_kl is not None:
            words = "The mismatch_kl of the same canary."
            yield GaugeMetricFamily("rl_plane_canary_mismatch_kl", words, self.mismatch_kl)


class _SnapshotCollector(Collector):
    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterable[Metric]:
        now = self._snapshot()
        yield GaugeMetricFamily("rl_plane_workers", "Workers in the fleet.", now.workers)
        yield GaugeMetricFamily("rl_plane_workers_admitted", "Workers that take generation.", now.admitted)
        closed = GaugeMetricFamily(
            "rl_plane_workers_closed", "Workers that take no generation, by reason.", labels=["reason"]
        )
        for reason, count in sorted(now.closed.items()):
            closed.add_metric([reason], count)
        yield closed
        yield GaugeMetricFamily("rl_plane_membership_epoch", "Grows with each join and leave.", now.epoch)
        words = "Generation calls that have ended here, by outcome."
        yield _counter("rl_plane_generation_requests", words, "outcome", now.outcomes)
        yield GaugeMetricFamily("rl_plane_generation_in_flight", "Choices under way here.", now.in_flight)
        words = (
            "Workers chosen here, by what decided: the request's session, a prefix that is cached, or the load."
        )
        yield _counter("rl_plane_generation_picks", words, "by", now.picks)
        words = "Choices tried again or continued at another worker, begun anew or cut for their demands."
        yield _counter("rl_plane_generation_moves", words, "how", now.moves)
        if now.sequence is not None:
            words = "The sequence of the committed state."
            yield GaugeMetricFamily("rl_plane_committed_sequence", words, now.sequence)
        if now.lease is not None:
            words = "Whether this frontend may route generation: it has confirmed the committed state."
            yield GaugeMetricFamily("rl_plane_serving_lease", words, float(now.lease))


def _counter(name: str, words: str, label: str, counts: Mapping[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, words, labels=[label])
    for value, count in sorted(counts.items()):
        family.add_metric([value], count)
    return family

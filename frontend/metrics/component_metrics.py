"""The metrics of one component in a frontend. The counts lie in the parts that make them; a scrape reads them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from prometheus_client.metrics_core import Metric

from frontend.completions.token_timings import TokenTimings
from frontend.metrics.update_metrics import UpdateMetrics
from rl_plane._util.metric_families import OUTCOMES, closed, counter, counters, gauge, gauges, histogram
from rl_plane.protocol.fleet_ops import FLEET_OPS

NO_REQUESTS = dict.fromkeys(("ok", "disconnected"), 0)
NO_PICKS = dict.fromkeys(("session", "prefix", "load"), 0)
NO_MOVES = dict.fromkeys(("retried", "migrated", "rerun", "cut"), 0)
"""Series that are there before their first event. Without them Prometheus would miss that event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetFacts:
    """The component as this frontend sees it, at the time of one scrape."""

    by_state: Mapping[str, int]
    closed: Mapping[str, int]
    left: Mapping[str, int]
    engine_requests: Mapping[str, int]
    epoch: int
    sequence: int | None
    """The sequence of the committed state. None: nothing is committed yet."""
    version_lag: int
    lease: bool | None
    """None if this frontend delivers no tokens."""
    lock_held_by: Mapping[str, int]
    lock_held_s: float
    pause_left_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationFacts:
    """The generation calls of this frontend, up to one scrape."""

    outcomes: Mapping[str, int]
    in_flight: int
    picks: Mapping[str, int]
    moves: Mapping[str, int]
    timings: TokenTimings


class FactsSource(Protocol):
    """Reads the other parts of the component."""

    def fleet_facts(self) -> FleetFacts: ...

    def generation_facts(self) -> GenerationFacts: ...


class ComponentMetrics:
    """The families of one component. `facts` returns the facts of the other parts."""

    def __init__(self, facts: FactsSource) -> None:
        self.updates = UpdateMetrics()
        self._facts = facts
        self._calls: Counter[tuple[str, ...]] = Counter()

    def on_op(self, op: str, outcome: str) -> None:
        """Counts a changing op that this frontend has carried out. `outcome`: ok, cancelled, or the error's code."""
        self._calls[closed(op, FLEET_OPS), closed(outcome, OUTCOMES)] += 1

    def collect(self) -> Iterable[Metric]:
        yield from _fleet(self._facts.fleet_facts())
        yield from self.updates.collect()
        words = "Changing calls that this frontend has carried out, by outcome: ok, or the error's code."
        yield counters("rl_plane_calls", words, ["op", "outcome"], self._calls)
        yield from _generation(self._facts.generation_facts())


def _fleet(now: FleetFacts) -> Iterable[Metric]:
    yield gauges("rl_plane_workers", "Workers in the fleet, each in one state.", "state", now.by_state)
    words = "Workers that are closed, by reason. A worker with two reasons counts for both."
    yield gauges("rl_plane_workers_closed", words, "reason", now.closed)
    words = "Workers that have left the fleet, by reason."
    yield counters("rl_plane_workers_left", words, ["reason"], now.left)
    words = "The number of versions by which the last worker is behind the committed one."
    yield gauge("rl_plane_workers_version_lag", words, now.version_lag)
    words = "Requests in all engines of the fleet: running requests, and requests without a token yet."
    yield gauges("rl_plane_engine_requests", words, "state", now.engine_requests)
    yield gauge("rl_plane_membership_epoch", "Grows with each join and leave.", now.epoch)
    if now.sequence is not None:
        yield gauge("rl_plane_committed_sequence", "The sequence of the committed state.", now.sequence)
    if now.lease is not None:
        words = "Whether this frontend may route generation: it has confirmed the committed state."
        yield gauge("rl_plane_serving_lease", words, now.lease)
    yield gauge("rl_plane_paused", "Whether a trainer has paused the fleet.", now.pause_left_s > 0)
    words = "Seconds until a paused fleet resumes by itself."
    yield gauge("rl_plane_pause_lease_left_seconds", words, now.pause_left_s)
    words = "Which kind of process holds the lock, so that no other one changes the fleet."
    yield gauges("rl_plane_lock_held", words, "by", now.lock_held_by)
    words = "Seconds since the lock's holder acquired it. 0: the lock is free."
    yield gauge("rl_plane_lock_held_seconds", words, now.lock_held_s)


def _generation(now: GenerationFacts) -> Iterable[Metric]:
    words = "Generation calls that have ended here, by outcome."
    yield counters("rl_plane_generation_requests", words, ["outcome"], {**NO_REQUESTS, **now.outcomes})
    yield gauge("rl_plane_generation_in_flight", "Choices under way here.", now.in_flight)
    yield counter(
        "rl_plane_generation_tokens", "Tokens that came here from workers, for the replies.", now.timings.tokens
    )
    words = "Seconds from a generation call to the first token of each choice."
    yield histogram("rl_plane_generation_first_token_seconds", words, [], {(): now.timings.first_token})
    words = "Seconds between two tokens of a choice. Tokens that come together count equal shares."
    yield histogram("rl_plane_generation_token_gap_seconds", words, [], {(): now.timings.gaps})
    words = "Versions by which the oldest token of a choice was behind the committed one when the choice ended."
    yield histogram("rl_plane_generation_version_lag", words, [], {(): now.timings.lags})
    words = "Workers chosen here, by what decided: the request's session, a prefix that is cached, or the load."
    yield counters("rl_plane_generation_picks", words, ["by"], {**NO_PICKS, **now.picks})
    words = "Choices tried again or continued at another worker, begun anew or cut for their demands."
    yield counters("rl_plane_generation_moves", words, ["how"], {**NO_MOVES, **now.moves})

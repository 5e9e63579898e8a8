"""The metrics of one component in a frontend. The counts lie in the parts that make them; a scrape reads them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from prometheus_client.metrics_core import Metric

from frontend.completions.service import Generation
from frontend.metrics.lock_and_pause import LockAndPause
from frontend.metrics.update_metrics import UpdateMetrics
from frontend.routing.committed import Committed
from frontend.routing.departures import Departures
from frontend.routing.engine_client import EngineClient
from frontend.routing.fleet_status import FleetStatus
from frontend.routing.routing_lease import FrontendLease
from rl_plane._util.metric_families import OUTCOMES, closed, counter, counters, gauge, gauges, histogram
from rl_plane.membership.view import MembershipView
from rl_plane.protocol.fleet_ops import FLEET_OPS

NO_REQUESTS = dict.fromkeys(("ok", "disconnected"), 0)
NO_PICKS = dict.fromkeys(("session", "prefix", "load"), 0)
NO_MOVES = dict.fromkeys(("retried", "migrated", "rerun", "cut"), 0)
"""Series that are there before their first event. Without them Prometheus would miss that event."""


class ComponentMetrics:
    """The families of one component. Each part is asked at each scrape. `lease`: None if this frontend delivers no
    tokens."""

    def __init__(
        self,
        *,
        view: MembershipView,
        status: FleetStatus,
        departures: Departures,
        committed: Committed,
        lease: FrontendLease | None,
        lock_and_pause: LockAndPause,
        engines: EngineClient,
        generation: Generation,
    ) -> None:
        self.updates = UpdateMetrics()
        self._view, self._status, self._departures = view, status, departures
        self._committed, self._lease, self._lock_and_pause = committed, lease, lock_and_pause
        self._engines, self._generation = engines, generation
        self._calls: Counter[tuple[str, ...]] = Counter()

    def on_op(self, op: str, outcome: str) -> None:
        """Counts a changing op that this frontend has carried out. `outcome`: ok, cancelled, or the error's code."""
        self._calls[closed(op, FLEET_OPS), closed(outcome, OUTCOMES)] += 1

    def collect(self) -> Iterable[Metric]:
        yield from self._of_fleet()
        yield from self.updates.collect()
        words = "Changing calls that this frontend has carried out, by outcome: ok, or the error's code."
        yield counters("rl_plane_calls", words, ["op", "outcome"], self._calls)
        yield from self._of_generation()

    def _of_fleet(self) -> Iterable[Metric]:
        status, record = self._status, self._committed.record
        yield gauges("rl_plane_workers", "Workers in the fleet, each in one state.", "state", status.by_state())
        words = "Workers that are closed, by reason. A worker with two reasons counts for both."
        yield gauges("rl_plane_workers_closed", words, "reason", status.closed_by_reason())
        words = "Workers that have left the fleet, by reason."
        yield counters("rl_plane_workers_left", words, ["reason"], self._departures.counts)
        words = "The number of versions by which the last worker is behind the committed one."
        lag = status.version_lag(record.sequence) if record else 0
        yield gauge("rl_plane_workers_version_lag", words, lag)
        words = "Requests in all engines of the fleet: running requests, and requests without a token yet."
        yield gauges("rl_plane_engine_requests", words, "state", status.engine_requests())
        words = "Grows with each join and leave."
        yield gauge("rl_plane_membership_epoch", words, self._view.snapshot().epoch)
        if record:
            yield gauge("rl_plane_committed_sequence", "The sequence of the committed state.", record.sequence)
        if self._lease is not None:
            words = "Whether this frontend may route generation: it has confirmed the committed state."
            yield gauge("rl_plane_serving_lease", words, self._lease.holds())
        pause_left_s = self._lock_and_pause.pause_left_s()
        yield gauge("rl_plane_paused", "Whether a trainer has paused the fleet.", pause_left_s > 0)
        words = "Seconds until a paused fleet resumes by itself."
        yield gauge("rl_plane_pause_lease_left_seconds", words, pause_left_s)
        words = "Which kind of process holds the lock, so that no other one changes the fleet."
        yield gauges("rl_plane_lock_held", words, "by", self._lock_and_pause.held_by())
        words = "Seconds since the lock's holder acquired it. 0: the lock is free."
        yield gauge("rl_plane_lock_held_seconds", words, self._lock_and_pause.held_s())

    def _of_generation(self) -> Iterable[Metric]:
        generation, timings = self._generation, self._generation.timings
        words = "Generation calls that have ended here, by outcome."
        yield counters("rl_plane_generation_requests", words, ["outcome"], {**NO_REQUESTS, **generation.outcomes})
        yield gauge("rl_plane_generation_in_flight", "Choices under way here.", generation.in_flight)
        words = "Tokens that came here from workers, for the replies."
        yield counter("rl_plane_generation_tokens", words, timings.tokens)
        words = "Seconds from a generation call to the first token of each choice."
        yield histogram("rl_plane_generation_first_token_seconds", words, [], {(): timings.first_token})
        words = "Seconds between two tokens of a choice. Tokens that come together count equal shares."
        yield histogram("rl_plane_generation_token_gap_seconds", words, [], {(): timings.gaps})
        words = (
            "Versions by which the oldest token of a choice was behind the committed one when the choice ended."
        )
        yield histogram("rl_plane_generation_version_lag", words, [], {(): timings.lags})
        words = (
            "Workers chosen here, by what decided: the request's session, a prefix that is cached, or the load."
        )
        picks = {**NO_PICKS, **self._engines.router.picks}
        yield counters("rl_plane_generation_picks", words, ["by"], picks)
        words = "Choices tried again or continued at another worker, begun anew or cut for their demands."
        yield counters("rl_plane_generation_moves", words, ["how"], {**NO_MOVES, **self._engines.moves})

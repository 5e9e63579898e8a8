"""All metrics of one frontend: those of the process, and those of each component, labelled with its name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client.metrics_core import Metric

from frontend.metrics.component_metrics import ComponentMetrics
from frontend.metrics.upstream_names import upstream_families
from frontend.routing.engine_facts import EngineFacts
from rl_plane._util.metric_families import MetricsPage, counter, counters, gauge, labelled
from rl_plane.protocol.envelope import PROTOCOL_VERSION

NO_RECORDS = dict.fromkeys(("written", "dropped", "failed"), 0)
"""Series that are there before their first event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendFacts:
    """The frontend's process at the time of one scrape."""

    connected: bool
    reconnects: int
    records: Mapping[str, int] = field(default_factory=dict)
    """Rollout records by what became of them. Empty: nothing is recorded."""


class FrontendMetrics:
    """The page of `GET /metrics`.

    Args:
        facts: Reads the facts of the process.
        components: Name → the metrics of the component.
        engines: Reads the engines of the frontend's own component.
        dialects: The dialects that are switched on. Their clients read the engines' load by names of their own.
    """

    def __init__(
        self,
        facts: Callable[[], FrontendFacts],
        components: Mapping[str, ComponentMetrics],
        engines: Callable[[], Sequence[EngineFacts]],
        dialects: Iterable[str] = (),
    ) -> None:
        self._facts = facts
        self._components = components
        self._engines = engines
        self._dialects = tuple(dialects)
        self._page = MetricsPage(self._collect, PROTOCOL_VERSION)

    def text(self) -> bytes:
        return self._page.text()

    async def text_for_scraper(self) -> bytes:
        return await self._page.text_for_scraper()

    def _collect(self) -> Iterable[Metric]:
        now = self._facts()
        yield gauge("rl_plane_nats_connected", "Whether this frontend is connected to NATS.", now.connected)
        yield counter("rl_plane_nats_reconnects", "Connections to NATS after the first one.", now.reconnects)
        yield from labelled("component", {name: one.collect() for name, one in self._components.items()})
        words = "Choices that --record was to write, by what became of them."
        yield counters("rl_plane_records", words, ["outcome"], {**NO_RECORDS, **now.records})
        if self._dialects:
            yield from upstream_families(self._dialects, self._engines())

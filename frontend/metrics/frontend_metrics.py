"""All metrics of one frontend: those of the process, and those of each component, labelled with its name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client.metrics_core import Metric

from frontend.metrics.component_metrics import ComponentMetrics
from frontend.metrics.upstream_names import upstream_families
from frontend.routing.worker_work import Engine
from rl_plane._util.metric_families import MetricsPage, counter, counters, gauge, labelled
from rl_plane.bus.connection import Bus
from rl_plane.protocol.envelope import PROTOCOL_VERSION

NO_RECORDS = dict.fromkeys(("written", "dropped", "failed"), 0)
"""Series that are there before their first event."""


class FrontendMetrics:
    """The page of `GET /metrics`.

    Args:
        bus: The connection to NATS.
        records: Rollout records by what became of them. Empty: nothing is recorded.
        components: Name → the metrics of the component.
        engines: Reads the engines of the frontend's own component.
        dialects: The dialects that are switched on. Their clients read the engines' load by names of their own.
    """

    def __init__(
        self,
        bus: Bus,
        records: Mapping[str, int],
        components: Mapping[str, ComponentMetrics],
        engines: Callable[[], Sequence[Engine]],
        dialects: Iterable[str] = (),
    ) -> None:
        self._bus, self._records = bus, records
        self._components = components
        self._engines = engines
        self._dialects = tuple(dialects)
        self._page = MetricsPage(self._collect, PROTOCOL_VERSION)

    def text(self) -> bytes:
        return self._page.text()

    async def text_for_scraper(self) -> bytes:
        return await self._page.text_for_scraper()

    def _collect(self) -> Iterable[Metric]:
        nats = self._bus.nc
        yield gauge("rl_plane_nats_connected", "Whether this frontend is connected to NATS.", nats.is_connected)
        words = "Connections to NATS after the first one."
        yield counter("rl_plane_nats_reconnects", words, nats.stats["reconnects"])
        yield from labelled("component", {name: one.collect() for name, one in self._components.items()})
        words = "Choices that --record was to write, by what became of them."
        yield counters("rl_plane_records", words, ["outcome"], {**NO_RECORDS, **self._records})
        if self._dialects:
            yield from upstream_families(self._dialects, self._engines())

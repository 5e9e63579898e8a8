"""Makes metric families in Prometheus's text format, for frontends and workers. It needs prometheus_client, which the
extra `metrics` installs.

Every label has a closed set of values, so that the number of series is bounded."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from rl_plane._util.bucket_counts import BucketCounts
from rl_plane._util.own_version import own_version
from rl_plane._util.plugins import TRANSPORTS, plugins
from rl_plane.errors import ERROR_CODES

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OTHER = "other"
"""The label of each value that is not in the closed set."""
OUTCOMES = ERROR_CODES | {"ok", "skipped", "cancelled"}
"""The outcomes of an op: ok, an error's code, or the state of a worker that has no engine."""


def closed(value: str, known: Iterable[str]) -> str:
    """The value as a label: itself if it is in the closed set, else `other`."""
    return value if value in known else OTHER


@functools.cache
def transports() -> tuple[str, ...]:
    """The names of the installed transports, and `other`."""
    return (*sorted(plugins(TRANSPORTS)), OTHER)


gauge, counter = GaugeMetricFamily, CounterMetricFamily
"""Each makes a family with one value and no labels, from its name, its description and the value."""


def gauges(name: str, words: str, label: str, values: Mapping[str, float]) -> Metric:
    """A gauge with one label. `values`: the label's value → the number."""
    family = GaugeMetricFamily(name, words, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def info(name: str, words: str, **labels: str) -> Metric:
    """A gauge that is always 1, and tells facts by its labels."""
    family = GaugeMetricFamily(name, words, labels=list(labels))
    family.add_metric(list(labels.values()), 1)
    return family


def counters(
    name: str, words: str, labels: Sequence[str], counts: Mapping[str, float] | Mapping[tuple[str, ...], float]
) -> Metric:
    """A counter with labels. `counts`: the labels' values → the number."""
    family = CounterMetricFamily(name, words, labels=labels)
    for key, value in sorted(counts.items()):
        family.add_metric([key] if isinstance(key, str) else list(key), value)
    return family


def histogram(
    name: str, words: str, labels: Sequence[str], series: Mapping[tuple[str, ...], BucketCounts]
) -> Metric:
    """A histogram. `series`: the labels' values → the counts."""
    family = HistogramMetricFamily(name, words, labels=labels)
    for key, counts in sorted(series.items()):
        bounds = [*map(floatToGoString, counts.bounds), "+Inf"]
        family.add_metric(key, list(zip(bounds, counts.cumulative(), strict=True)), counts.total)
    return family


def labelled(label: str, parts: Mapping[str, Iterable[Metric]]) -> Iterable[Metric]:
    """Joins the families of several parts, so that each family is there once. `label` names the part in each series.
    `parts`: the name of a part → its families."""
    found: dict[str, Metric] = {}
    for value, families in parts.items():
        for family in families:
            joined = found.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            joined.samples += [one._replace(labels={label: value, **one.labels}) for one in family.samples]
    return found.values()


class _Families(Collector):
    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Metric]:
        return self._collect()


class MetricsPage:
    """All metrics of one process: those of `collect`, the build, and the process itself (memory, CPU, descriptors).

    `protocol`: the version of the messages on NATS."""

    def __init__(self, collect: Callable[[], Iterable[Metric]], protocol: int) -> None:
        self._registry = CollectorRegistry()
        self._protocol = str(protocol)
        self._registry.register(_Families(self._build))
        self._registry.register(_Families(collect))
        ProcessCollector(registry=self._registry)

    def text(self) -> bytes:
        return self._read()()

    async def text_for_scraper(self) -> bytes:
        """Reads the values at once, and writes them on a thread: to write some hundred lines takes milliseconds, in
        which a loop would pass on no token."""
        return await asyncio.to_thread(self._read())

    def _read(self) -> Callable[[], bytes]:
        """Reads all values now. The result writes them, on any thread."""
        families = _Families(functools.partial(iter, list(self._registry.collect())))
        return lambda: generate_latest(families)

    def _build(self) -> Iterable[Metric]:
        words = "The version of rl_plane that runs, and of the messages that it sends on NATS."
        yield info("rl_plane_build_info", words, version=own_version(), protocol=self._protocol)

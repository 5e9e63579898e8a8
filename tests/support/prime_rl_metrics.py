"""prime-rl's reader of vLLM's metrics, for its control of concurrency.

From https://github.com/PrimeIntellect-ai/prime-rl at 559b447, `src/prime_rl/orchestrator/inference_metrics.py` and
`concurrency.py`, under the Apache License 2.0. The code is theirs, without what writes to W&B and to its log.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from httpx import AsyncClient
from prometheus_client.parser import text_string_to_metric_families

FETCH_TIMEOUT = 5.0
METRIC_PREFIX = "vllm:"
CACHE_CONFIG_FAMILY = "vllm:cache_config_info"
PD_ROLES = {"prefill", "decode"}


@dataclass(frozen=True)
class EngineLoadSample:
    """Per-engine load facts for one ``/metrics`` poll. Raw values only —
    thresholds and verdicts live in the controller."""

    engine_id: str
    role: str | None
    kv_capacity_tokens: int | None
    max_model_len: int | None
    kv_usage: float
    running: int
    waiting: int
    # Requests queued specifically for KV capacity (None if the engine does
    # not report the by-reason breakdown; fall back to ``waiting``)
    waiting_capacity: int | None
    preemptions_delta: int


@dataclass
class HistogramSnapshot:
    sum: float = 0.0
    count: float = 0.0
    buckets: dict[float, float] = field(default_factory=dict)
    """Upper bound (``le``) -> cumulative count."""


@dataclass
class EngineSnapshot:
    """All samples scraped for one engine, keyed by vLLM sample name.

    Samples that carry extra labels (e.g. ``finished_reason``) are summed over
    those labels so each name maps to a single value per engine.
    """

    gauges: dict[str, float] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)
    histograms: dict[str, HistogramSnapshot] = field(default_factory=dict)
    cache_config: dict[str, str] = field(default_factory=dict)
    """Labels of ``vllm:cache_config_info`` (e.g. ``num_gpu_blocks``, ``block_size``)."""


@dataclass(frozen=True)
class MetricsEndpoint:
    client: AsyncClient
    role: str | None
    key: str
    name: str


@dataclass(frozen=True)
class TimedSnapshot:
    timestamp: float
    snapshot: EngineSnapshot


@dataclass(frozen=True)
class EngineSample:
    endpoint: MetricsEndpoint
    engine_label: str
    timestamp: float
    snapshot: EngineSnapshot

    @property
    def engine_id(self) -> str:
        return f"{self.endpoint.name}.{self.engine_label}"

    @property
    def key(self) -> tuple[str, str]:
        return (self.endpoint.key, self.engine_label)


def parse_prometheus_text(text: str) -> dict[str, EngineSnapshot]:
    """Parse a vLLM Prometheus exposition into one snapshot per engine label."""
    engines: dict[str, EngineSnapshot] = {}
    for family in text_string_to_metric_families(text):
        if not family.name.startswith(METRIC_PREFIX) or family.type not in ("counter", "gauge", "histogram"):
            continue
        for sample in family.samples:
            if sample.name.endswith("_created") or not math.isfinite(sample.value):
                continue
            engine = engines.setdefault(sample.labels.get("engine", "0"), EngineSnapshot())
            if family.name == CACHE_CONFIG_FAMILY:
                engine.cache_config.update(sample.labels)
                continue
            name = sample.name.removeprefix(METRIC_PREFIX)
            # Keep the queue-reason breakdown instead of summing it away — the
            # concurrency controller keys on capacity-queued requests
            if name == "num_requests_waiting_by_reason":
                name = f"num_requests_waiting_reason_{sample.labels.get('reason', 'unknown')}"
            if family.type == "gauge":
                engine.gauges[name] = engine.gauges.get(name, 0.0) + sample.value
            elif family.type == "counter":
                engine.counters[name] = engine.counters.get(name, 0.0) + sample.value
            else:
                histogram = engine.histograms.setdefault(
                    family.name.removeprefix(METRIC_PREFIX), HistogramSnapshot()
                )
                if sample.name.endswith("_sum"):
                    histogram.sum += sample.value
                elif sample.name.endswith("_count"):
                    histogram.count += sample.value
                elif sample.name.endswith("_bucket"):
                    le = float(sample.labels["le"])
                    histogram.buckets[le] = histogram.buckets.get(le, 0.0) + sample.value
    return engines


def build_metrics_endpoints(
    admin_clients: list[AsyncClient], roles: list[str | None] | None = None
) -> list[MetricsEndpoint]:
    """Attach optional P/D roles and stable display names to admin clients."""
    if roles is None:
        roles = [None] * len(admin_clients)
    if len(roles) != len(admin_clients):
        raise ValueError(f"Got {len(roles)} inference metric role(s) for {len(admin_clients)} admin client(s)")

    endpoints: list[MetricsEndpoint] = []
    counts: dict[str, int] = {}
    for client, role in zip(admin_clients, roles, strict=True):
        if role is not None and role not in PD_ROLES:
            raise ValueError(f"Unsupported inference metrics role: {role}")
        prefix = role or "server"
        index = counts.get(prefix, 0)
        counts[prefix] = index + 1
        endpoints.append(
            MetricsEndpoint(
                client=client,
                role=role,
                key=str(client.base_url).rstrip("/"),
                name=f"{prefix}{index}",
            )
        )
    return endpoints


class InferenceMetricsCollector:
    def __init__(
        self,
        admin_clients: list[AsyncClient],
        roles: list[str | None] | None = None,
        on_load: Callable[[list[EngineLoadSample]], None] | None = None,
    ) -> None:
        self.endpoints = build_metrics_endpoints(admin_clients, roles=roles)
        self.previous: dict[tuple[str, str], TimedSnapshot] = {}
        self.max_model_len_by_endpoint: dict[str, int] = {}
        self.on_load = on_load

    async def probe(self, attempts: int = 3, interval: float = 2.0) -> bool:
        """Scrape once, outside the poll loop, and report whether any engine
        answered with metrics. External API endpoints (no vLLM ``/metrics``)
        fail every attempt immediately; the retries only cover a real engine
        racing its first exposition."""
        for attempt in range(attempts):
            if attempt > 0:
                await asyncio.sleep(interval)
            try:
                await self.collect_and_log()
            except Exception:
                pass
            if self.previous:
                return True
        return False

    async def collect_and_log(self) -> None:
        now = time.monotonic()

        async def fetch(endpoint: MetricsEndpoint) -> str | None:
            try:
                response = await endpoint.client.get("/metrics", timeout=FETCH_TIMEOUT)
                response.raise_for_status()
                return response.text
            except Exception:
                return None

        results = await asyncio.gather(*[fetch(endpoint) for endpoint in self.endpoints])
        samples = [
            EngineSample(endpoint=endpoint, engine_label=engine_label, timestamp=now, snapshot=snapshot)
            for endpoint, text in zip(self.endpoints, results, strict=True)
            if text is not None
            for engine_label, snapshot in sorted(parse_prometheus_text(text).items())
        ]
        if not samples:
            return

        await asyncio.gather(*[self.fetch_max_model_len(endpoint) for endpoint in self.endpoints])
        load_samples = [self.build_load_sample(sample) for sample in samples]
        for sample in samples:
            self.previous[sample.key] = TimedSnapshot(timestamp=sample.timestamp, snapshot=sample.snapshot)

        if self.on_load is not None:
            self.on_load(load_samples)

    async def fetch_max_model_len(self, endpoint: MetricsEndpoint) -> None:
        """Cache the engine's max context length from ``/v1/models`` (set
        explicitly or derived from the model config). Static per engine
        lifetime; retried next poll on failure."""
        if endpoint.key in self.max_model_len_by_endpoint:
            return
        try:
            response = await endpoint.client.get("/v1/models", timeout=FETCH_TIMEOUT)
            response.raise_for_status()
            lengths = [card.get("max_model_len") for card in response.json().get("data", [])]
            lengths = [length for length in lengths if length]
            if lengths:
                self.max_model_len_by_endpoint[endpoint.key] = max(lengths)
        except Exception:
            pass

    def build_load_sample(self, sample: EngineSample) -> EngineLoadSample:
        """Raw per-engine load facts for the concurrency controller."""
        cache_config = sample.snapshot.cache_config
        kv_capacity_tokens: int | None = None
        # ``kv_cache_size_tokens`` is authoritative; the ``num_gpu_blocks``
        # label does not reflect ``num_gpu_blocks_override`` (observed 4x off)
        size_tokens = cache_config.get("kv_cache_size_tokens", "")
        num_gpu_blocks, block_size = cache_config.get("num_gpu_blocks", ""), cache_config.get("block_size", "")
        if size_tokens.isdigit():
            kv_capacity_tokens = int(size_tokens)
        elif num_gpu_blocks.isdigit() and block_size.isdigit():
            kv_capacity_tokens = int(num_gpu_blocks) * int(block_size)

        # First poll has no baseline — a nonzero cumulative counter (e.g. after
        # an orchestrator restart) is not a fresh preemption
        previous = self.previous.get(sample.key)
        preemptions_delta = 0
        if previous is not None:
            for name in ("num_preemptions", "num_preemptions_total"):
                if name in sample.snapshot.counters:
                    delta = sample.snapshot.counters[name] - previous.snapshot.counters.get(name, 0.0)
                    preemptions_delta = max(preemptions_delta, int(delta))

        return EngineLoadSample(
            engine_id=sample.engine_id,
            role=sample.endpoint.role,
            kv_capacity_tokens=kv_capacity_tokens,
            max_model_len=self.max_model_len_by_endpoint.get(sample.endpoint.key),
            kv_usage=sample.snapshot.gauges.get("kv_cache_usage_perc", 0.0),
            running=int(sample.snapshot.gauges.get("num_requests_running", 0.0)),
            waiting=int(sample.snapshot.gauges.get("num_requests_waiting", 0.0)),
            waiting_capacity=(
                int(capacity_waiting)
                if (capacity_waiting := sample.snapshot.gauges.get("num_requests_waiting_reason_capacity"))
                is not None
                else None
            ),
            preemptions_delta=preemptions_delta,
        )

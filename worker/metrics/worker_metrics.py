"""All metrics of one worker. It imports prometheus_client, so nothing may import it before the engine is loaded: an
engine may first have to choose how prometheus_client counts (SGLang's `enable_metrics`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.metrics_core import Metric

from rl_plane._util.metric_families import MetricsPage, counter, counters, gauge, gauges, info, transports
from rl_plane.protocol.envelope import PROTOCOL_VERSION
from worker.metrics.worker_facts import WorkerFacts


class WorkerMetrics:
    """The page of the worker's `GET /metrics`. `facts` returns the worker's facts now."""

    def __init__(self, facts: Callable[[], WorkerFacts]) -> None:
        self._facts = facts
        self._page = MetricsPage(self._collect, PROTOCOL_VERSION)

    async def text_for_scraper(self) -> bytes:
        return await self._page.text_for_scraper()

    def _collect(self) -> Iterable[Metric]:
        now = self._facts()
        words = "The engine beside this worker."
        yield info("rl_plane_worker_engine_info", words, engine=now.engine, engine_version=now.engine_version)
        yield gauge("rl_plane_worker_nats_connected", "Whether this worker is connected to NATS.", now.connected)
        is_open = not any(now.closed.values())
        yield gauge("rl_plane_worker_open", "Whether this worker takes generation.", is_open)
        yield gauges("rl_plane_worker_closed", "Whether this worker is closed for a reason.", "reason", now.closed)
        if now.sequence is not None:
            words = "The sequence of the committed state that the engine holds."
            yield gauge("rl_plane_worker_sequence", words, now.sequence)
        yield gauge("rl_plane_worker_paused", "Whether the engine is paused.", now.pause_left_s is not None)
        words = "Seconds until a paused engine resumes by itself."
        yield gauge("rl_plane_worker_pause_lease_left_seconds", words, now.pause_left_s or 0.0)
        words = "Requests in the engine: those that run, and those without a token yet."
        yield gauges("rl_plane_worker_requests", words, "state", now.requests)
        words = "Tokens in the engine: those of running requests, and prompts that are still to be computed."
        yield gauges("rl_plane_worker_request_tokens", words, "state", now.tokens)
        yield counter("rl_plane_worker_tokens", "Tokens that the engine has made.", now.tokens_made)
        words = "Bytes of tensors that have come and were verified."
        found = {**dict.fromkeys(transports(), 0), **now.received_bytes}
        yield counters("rl_plane_worker_received_bytes", words, ["transport"], found)
        words = "Bytes of the version that is staged and waits for its commit."
        yield gauge("rl_plane_worker_staged_bytes", words, now.staged_bytes)
        words = "Bytes of the version that is kept in host memory, for deltas and other workers."
        yield gauge("rl_plane_worker_kept_bytes", words, now.kept_bytes)
        words = "Ops that this worker has answered, by outcome: ok, skipped, or the error's code."
        yield counters("rl_plane_worker_ops", words, ["op", "outcome"], now.ops)

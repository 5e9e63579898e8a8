"""All metrics of one worker. It imports prometheus_client, so nothing may import it before the engine is loaded: an
engine may first have to choose how prometheus_client counts (SGLang's `enable_metrics`)."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import get_args

from prometheus_client.metrics_core import Metric

from rl_plane._util.metric_families import MetricsPage, counter, counters, gauge, gauges, info, transports
from rl_plane.protocol.envelope import PROTOCOL_VERSION
from worker.reconcile.worker_state import Reason
from worker.worker import Worker


class WorkerMetrics:
    """The page of the worker's `GET /metrics`."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._page = MetricsPage(self._collect, PROTOCOL_VERSION)

    async def text_for_scraper(self) -> bytes:
        return await self._page.text_for_scraper()

    def _collect(self) -> Iterable[Metric]:
        worker, state = self._worker, self._worker.state
        running, waiting = worker.adapter.load()
        words = "The engine beside this worker."
        yield info(
            "rl_plane_worker_engine_info",
            words,
            engine=worker.info.engine,
            engine_version=worker.info.engine_version,
        )
        yield gauge(
            "rl_plane_worker_nats_connected",
            "Whether this worker is connected to NATS.",
            worker.bus.nc.is_connected,
        )
        yield gauge("rl_plane_worker_open", "Whether this worker takes generation.", not state.closed)
        closed = {reason: int(reason in state.closed) for reason in get_args(Reason)}
        yield gauges("rl_plane_worker_closed", "Whether this worker is closed for a reason.", "reason", closed)
        if state.sequence is not None:
            words = "The sequence of the committed state that the engine holds."
            yield gauge("rl_plane_worker_sequence", words, state.sequence)
        yield gauge("rl_plane_worker_paused", "Whether the engine is paused.", state.pause_mode is not None)
        left_s = max(0.0, state.pause_until - time.monotonic()) if state.pause_mode is not None else 0.0
        words = "Seconds until a paused engine resumes by itself."
        yield gauge("rl_plane_worker_pause_lease_left_seconds", words, left_s)
        words = "Requests in the engine: running requests, and requests without a token yet."
        yield gauges("rl_plane_worker_requests", words, "state", {"running": running, "waiting": waiting})
        words = "Tokens in the engine: those of running requests, and prompts that are still to be computed."
        yield gauges(
            "rl_plane_worker_request_tokens",
            words,
            "state",
            {"running": state.tokens.running, "waiting": state.tokens.waiting},
        )
        yield counter("rl_plane_worker_tokens", "Tokens that the engine has made.", state.tokens.made)
        words = "Bytes of tensors that have come and were verified."
        found = {**dict.fromkeys(transports(), 0), **worker.received_bytes}
        yield counters("rl_plane_worker_received_bytes", words, ["transport"], found)
        staged = worker.updates.staged
        # Weights that were written over the served ones need no memory of their own.
        beside = staged.reply if staged is not None and staged.name is not None else None
        staged_bytes = 0 if beside is None else beside.get("model_bytes", beside["bytes"])
        words = "Bytes of the version that is staged and waits for its commit."
        yield gauge("rl_plane_worker_staged_bytes", words, staged_bytes)
        specs = worker.adapter.receiver.weight_spec().values() if worker.updates.cached_digest is not None else ()
        words = "Bytes of the kept copy in host memory, for deltas and other workers."
        yield gauge("rl_plane_worker_kept_bytes", words, sum(spec.nbytes for spec in specs))
        words = "Ops that this worker has answered, by outcome: ok, skipped, or the error's code."
        yield counters("rl_plane_worker_ops", words, ["op", "outcome"], worker.dispatcher.answers)

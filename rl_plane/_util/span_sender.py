"""Sends ended spans from a thread of its own. Nothing ever waits for the collector: what does not fit is dropped."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

log = logging.getLogger("rl_plane._util.span_sender")

MAX_QUEUED_SPANS = 8192
"""Spans that may wait for the collector: some minutes of a busy frontend, and about 20 MB."""
BATCH_SPANS = 512
"""Spans in one request: about half a megabyte."""
BATCH_S = 0.5
"""The longest wait for a batch to fill. An operator waits as long for a trace to appear."""
CLOSE_S = 2.0
"""The time in which the queue is sent at the end of the process. It is part of no drain."""


class Export(Protocol):
    """Sends spans to a collector."""

    def send(self, spans: Sequence[Any]) -> str | None:
        """Sends one batch, within a bound. Returns None, or the reason why the collector has not taken it."""

    def stop(self) -> None:
        """Ends a send that is under way."""


class SpanSender:
    """Sends spans to one collector, from the first span on until `close`. Any thread may put spans."""

    def __init__(self, export: Export, collector: str) -> None:
        """`collector`: its address, for the log."""
        self._export = export
        self._collector = collector
        self._queue: queue.Queue[Any] = queue.Queue(MAX_QUEUED_SPANS)
        self._closing = threading.Event()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._warned = False
        self._lost = 0
        """Spans that were lost since the collector took the last batch."""

    def put(self, span: Any) -> None:
        """Queues a span, or drops it. Returns at once."""
        if self._closing.is_set():
            return
        try:
            self._queue.put_nowait(span)
        except queue.Full:
            self._on_lost(1, f"more than {MAX_QUEUED_SPANS} wait")
            return
        if self._thread is None:
            self._start()

    def _start(self) -> None:
        """Starts the thread, with the first span: an engine that forks while it loads has no copy of it."""
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Sends what is queued, for at most CLOSE_S. It blocks."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S)
        self._export.stop()

    # ---- the thread ----

    def _run(self) -> None:
        while True:
            batch = self._batch()
            if not batch and self._closing.is_set():
                return
            if batch:
                self._send(batch)

    def _batch(self) -> list[Any]:
        """The next spans. Waits BATCH_S for a batch to fill, unless the process ends."""
        batch: list[Any] = []
        until = time.monotonic() + BATCH_S
        while len(batch) < BATCH_SPANS:
            left_s = 0.0 if self._closing.is_set() else until - time.monotonic()
            try:
                batch.append(self._queue.get(timeout=left_s) if left_s > 0 else self._queue.get_nowait())
            except queue.Empty:
                break
        return batch

    def _send(self, batch: list[Any]) -> None:
        try:
            why = self._export.send(batch)
        except Exception as error:  # the thread must continue
            why = f"{type(error).__name__}: {error}"
        if why is not None:
            self._on_lost(len(batch), why)
        elif self._warned:
            log.info("the collector %s takes trace spans again: %d were lost", self._collector, self._lost)
            self._warned, self._lost = False, 0

    def _on_lost(self, spans: int, why: str) -> None:
        self._lost += spans
        if not self._warned:
            self._warned = True
            log.warning(
                "trace spans are lost: the collector %s does not take them: %.300s; fix: start it, or set "
                "--otel-endpoint. The fleet goes on",
                self._collector,
                why,
            )

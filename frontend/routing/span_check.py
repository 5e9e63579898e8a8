"""Checks the version spans of one worker's stream: whether its tokens may be delivered."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from frontend.frontend_limits import LIMITS
from frontend.routing.committed import History, Interval, key_of_span
from rl_plane.errors import StaleWeights, Unlabelled
from rl_plane.protocol.generation import GenerateDelta, VersionSpan, unwitnessed


class SpanCheck:
    """The spans of one stream so far. `take` refuses a delta whose tokens may not be delivered."""

    def __init__(
        self,
        history: History,
        adapter: str | None,
        since: int,
        may_make: Callable[[VersionSpan], bool] = lambda span: True,
        witnesses: bool = True,
        stale_after_s: float = LIMITS.stale_after_s,
    ) -> None:
        """`adapter`: the adapter that the request names.
        `since`: the place of the history at which the request was sent.
        `may_make`: whether the worker may still make tokens by these weights, as far as its status says.
        `witnesses`: whether the engine can say which weights make its tokens.
        `stale_after_s`: this long after the end of an update, no worker makes tokens by the weights before."""
        self._history = history
        self._adapter = adapter
        self._since = since
        self._may_make = may_make
        self._witnesses = witnesses
        self._stale_after_s = stale_after_s
        self._tokens = 0
        self._spans: Sequence[VersionSpan] = ()
        self._last: Interval | None = None
        """The places of the last span."""

    def take(self, delta: GenerateDelta, arrived: float) -> None:
        """Adds a delta. Raises Unlabelled or StaleWeights if it may not be delivered.

        `arrived`: when the delta came, not when its reader took it. A delta that came late is still right if the worker
        serves other weights by now: it waited at the worker for a slow reader."""
        delivered = self._tokens
        self._tokens += delta.size
        if not self._witnesses:
            self._check_unknown(delta)
            return
        if delta.spans or delta.finish_reason is not None:
            self._check(delta.spans, delivered)
        if not delta.size:
            return
        if self._last is None:
            raise Unlabelled("the worker does not say which weights made its tokens", retry_after_s=1.0)
        span = self._spans[-1]
        if self._is_stale(self._last, arrived) and self._may_make(span):
            raise StaleWeights(
                f"the worker still generates under {span.version!r} ({span.sequence}), which was replaced more than "
                f"{self._stale_after_s:g} s ago",
                sequence=span.sequence,
                digest=span.digest,
                retry_after_s=1.0,
            )

    def _check_unknown(self, delta: GenerateDelta) -> None:
        """Requires the worker to say that its engine cannot name the weights."""
        due = delta.spans or delta.finish_reason is not None or self._tokens == delta.size
        if due and delta.spans != unwitnessed(self._tokens):
            raise Unlabelled("the worker's engine can't witness, and its tokens don't say so", retry_after_s=1.0)

    def _check(self, spans: Sequence[VersionSpan], delivered: int) -> None:
        self._history.check(spans, self._tokens, self._since)
        if any((span.adapter.name if span.adapter else None) != self._adapter for span in spans):
            raise Unlabelled(
                f"the tokens were not made with {f'the adapter {self._adapter!r}' if self._adapter else 'the base'}",
                retry_after_s=1.0,
            )
        before = len(self._spans)
        again = [(span.start, key_of_span(span)) for span in spans[:before]]
        same = again == [(span.start, key_of_span(span)) for span in self._spans]
        if not same or (before and spans[before - 1].end < delivered):
            raise Unlabelled("the worker has changed its word on tokens that were delivered", retry_after_s=1.0)
        self._spans = spans
        if spans:
            self._last = self._history.interval(key_of_span(spans[-1]))

    def _is_stale(self, interval: Interval, now: float) -> bool:
        return interval.replaced_at is not None and now - interval.replaced_at > self._stale_after_s

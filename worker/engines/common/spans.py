"""Spans: which weights made which tokens of a request, and when a delta reports them."""

from __future__ import annotations

from dataclasses import dataclass

from rl_plane.protocol.generation import AdapterSpan, KvVersion, VersionSpan
from rl_plane.protocol.versions import WeightVersion


@dataclass(frozen=True, slots=True)
class Label:
    """The weights of one token. A version that is None is unknown: then the token is in no span."""

    base: WeightVersion | None
    adapter: str | None = None
    adapter_version: WeightVersion | None = None
    kv: WeightVersion | None = None
    """The oldest base weights of which the KV before the token may hold a part. None: those of the token."""

    @property
    def known(self) -> bool:
        return self.base is not None and (self.adapter is None or self.adapter_version is not None)


class SpanLog:
    """The labels of one request's tokens: `add` for tokens of one label, `tell` for each delta."""

    def __init__(self) -> None:
        self._runs: list[tuple[Label, int]] = []  # (label, end); each run starts where the one before ends
        self._count = 0
        self._told = 0  # runs that a delta has reported

    def add(self, label: Label, count: int = 1) -> None:
        self._count += count
        if self._runs:
            last = self._runs[-1][0]
            if last is label or last == label:  # mostly the same object, which costs no comparison of versions
                self._runs.pop()
        self._runs.append((label, self._count))

    def tell(self, last: bool) -> list[VersionSpan]:
        """Returns all spans, or none if the new tokens only lengthen the last span. If the last tokens are of unknown
        weights, it returns all spans each time: an empty list would lengthen a span that does not hold them."""
        if not last and len(self._runs) == self._told and (not self._runs or self._runs[-1][0].known):
            return []
        self._told = len(self._runs)
        spans, start = [], 0
        for label, end in self._runs:
            if label.known:
                spans.append(_span(label, start, end))
            start = end
        return spans


def _span(label: Label, start: int, end: int) -> VersionSpan:
    base, adapter = label.base, label.adapter_version
    assert base is not None, "the caller checks that the label is known"
    return VersionSpan(
        version=base.label,
        sequence=base.sequence,
        digest=base.digest,
        run=base.run,
        start=start,
        end=end,
        adapter=None
        if label.adapter is None or adapter is None
        else AdapterSpan(
            name=label.adapter, version=adapter.label, sequence=adapter.sequence, digest=adapter.digest
        ),
        kv_version=None
        if label.kv is None
        else KvVersion(version=label.kv.label, sequence=label.kv.sequence, digest=label.kv.digest),
    )

"""Helpers of `tests/unit/frontend/test_committed.py` and of other tests."""

from __future__ import annotations

from dataclasses import replace

from rl_plane.protocol.generation import AdapterSpan, VersionSpan
from rl_plane.protocol.record import CommittedAdapter, DecisionRecord, WeightSource
from rl_plane.protocol.versions import WeightVersion

SOURCE = WeightSource({"backend": "filesystem", "path": "/x"})


def version(sequence: int, run: str = "r") -> WeightVersion:
    return WeightVersion(run, sequence, f"step_{sequence}", f"blake3:{sequence}")


def record(base: int, run: str = "r", /, **adapters: int) -> DecisionRecord:
    """The newest of all is what it made."""
    loaded = {name: CommittedAdapter(version(sequence, run), SOURCE) for name, sequence in adapters.items()}
    made = version(max(base, *adapters.values(), 0), run)
    return DecisionRecord(version(base, run), SOURCE, "u", made, loaded, decided_at=0.0)


def rolling(to: DecisionRecord, before: DecisionRecord) -> DecisionRecord:
    return replace(to, rolling_from=before.held)


def span(base: int, start: int, end: int, run: str = "r", /, **adapter: int) -> VersionSpan:
    """`span(1, 0, 4, a=2)`: made by base 1 with adapter `a` 2."""
    of = [
        AdapterSpan(name=name, version=f"step_{sequence}", sequence=sequence, digest=f"blake3:{sequence}")
        for name, sequence in adapter.items()
    ]
    return VersionSpan(
        version=f"step_{base}",
        sequence=base,
        digest=f"blake3:{base}",
        run=run,
        start=start,
        end=end,
        adapter=of[0] if of else None,
    )

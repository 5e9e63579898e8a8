"""The committed record."""

from __future__ import annotations

from rl_plane.protocol.record import DecisionRecord, VersionSource, first_record
from rl_plane.protocol.versions import WeightVersion

DIGEST = "xxh3:" + "0" * 32


def test_the_sources_of_the_version_before_stay_named_while_the_fleet_may_return_to_it() -> None:
    run = first_record(DIGEST).version.run
    one, two = (WeightVersion(run, number, f"step_{number}", DIGEST) for number in (1, 2))
    before = DecisionRecord(one, VersionSource({"path": "one"}), "u1", one)
    record = DecisionRecord(two, VersionSource({"path": "two"}), "u2", two, fallback=before, open=False)
    assert [source.transport for source in record.sources] == [{"path": "two"}, {"path": "one"}]
    assert [source.transport for source in record.opened().sources] == [{"path": "two"}]

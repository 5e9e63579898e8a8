"""The process that takes a lost lock bars the holder before it from the record, even in a call that decides
nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from rl_plane.bus.sealed_record import SealedRecord, restore
from rl_plane.bus.state_store import read_record
from rl_plane.errors import StaleFence
from rl_plane.protocol.record import first_record
from rl_plane.protocol.subjects import LOCK
from rl_plane.protocol.versions import WeightVersion

if TYPE_CHECKING:
    from tests.conftest import Plane


@pytest.mark.parametrize("given_back", [False, True])
async def test_a_new_holder_bars_the_decision_of_a_holder_that_lost_the_lock(
    plane: Plane, given_back: bool
) -> None:
    """The new holder is a call such as `pause`, which never writes the record. After a lock that was released there is
    no holder to bar, and nothing is written."""
    first, second = await plane.client("first"), await plane.client("second")
    bus, bucket = first.bus, first.subjects().state
    base = first_record("blake3:" + "0" * 64)
    await second.view()
    await restore(bus, bucket, base, None)
    async with first.lock(await first.view()) as held:
        record = SealedRecord(bus, bucket, held)
        sealed = await record.seal(lambda stored: stored)
        assert sealed is not None
        entry = await bus.get(bucket, LOCK)
        assert entry is not None
        if given_back:
            await bus.purge(bucket, LOCK, entry.sequence)
        else:
            await bus.put(bucket, LOCK, entry.value or b"", last=entry.sequence, ttl_s=1)
        async with second.lock(await second.view(), wait_s=10) as mine:
            there = await read_record(second.bus, bucket)
            assert there is not None
            assert (there.barred >= held.fence) is not given_back
            made = WeightVersion(base.version.run, 1, "late", "blake3:" + "1" * 64)
            late = replace(sealed, made=made, version=made, update_id="late")
            if not given_back:
                with pytest.raises(StaleFence):
                    await record.decide(late)
                assert await read_record(second.bus, bucket) == sealed
            assert mine.fence > held.fence

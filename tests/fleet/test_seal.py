"""Only the coordinator that has sealed the decision record last may write it, on a real server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest

from rl_plane.bus.connection import Bus, WrongSequence
from rl_plane.bus.lock import HeldLock, LockTimings, hold_lock
from rl_plane.bus.sealed_record import SEAL_TRIES, SealedRecord, bar, restore
from rl_plane.bus.state_store import read_record
from rl_plane.client import RlClient
from rl_plane.errors import BusUnreachable, StaleFence
from rl_plane.protocol.record import DecisionRecord, VersionSource, first_record
from rl_plane.protocol.subjects import FENCE_KEY, LOCK, RECORD, Entry
from rl_plane.protocol.versions import WeightVersion
from tests.support.faults import hold_back
from tests.support.lost_writes import lose_all

if TYPE_CHECKING:
    from tests.conftest import Plane

BASE = first_record("model")


def decision(update_id: str = "u1", base: DecisionRecord = BASE) -> DecisionRecord:
    made = WeightVersion(base.version.run, base.sequence + 1, update_id, f"digest of {update_id}")
    return replace(
        base, version=made, made=made, source=VersionSource({"backend": "filesystem"}), update_id=update_id
    )


def as_stored(stored: DecisionRecord | None) -> DecisionRecord | None:
    """Returns the stored record, because no process knows a newer one."""
    return stored


async def entry_of(client: RlClient) -> Entry:
    entry = await client.bus.get(client.subjects().state, RECORD)
    assert entry is not None
    return entry


async def stored(client: RlClient) -> DecisionRecord:
    record = await read_record(client.bus, client.subjects().state)
    assert record is not None
    return record


async def store(client: RlClient, record: DecisionRecord) -> int:
    """Writes the record without a seal, like a worker that restores it."""
    return await client.bus.put(client.subjects().state, RECORD, record.encode())


@asynccontextmanager
async def coordinator(client: RlClient, wait_s: float = 10.0) -> AsyncIterator[tuple[HeldLock, SealedRecord]]:
    async with client.lock(await client.view(), wait_s) as held:
        yield held, SealedRecord(client.bus, client.subjects().state, held)


SHORT = LockTimings(ttl_s=1, renew_s=60)
"""Such a lock ends after a second, because its holder does not renew it."""


# ---- the seal ----


async def test_the_seal_is_the_coordinators_fence_and_bars_all_before_it(plane: Plane) -> None:
    client = await plane.client()
    async with coordinator(client) as (held, sealed):
        assert await sealed.seal(as_stored) is None, "there is no record yet"
        written = await store(client, BASE)
        record = await sealed.seal(as_stored)
        assert record == BASE, "what was decided, and by whom, stays"
        assert (record.seal, record.barred, record.fence) == (held.fence, held.fence - 1, 0)
        assert (await entry_of(client)).sequence == sealed.sequence > written
        assert await stored(client) == record
        assert await sealed.seal(as_stored) == record
        assert (await entry_of(client)).sequence == sealed.sequence, "sealed once, it costs no write more"
        decided = await sealed.decide(decision())
        assert decided.fence == held.fence
        opened = await sealed.write(replace(decided, open=True))
        found = await stored(client)
        assert found == opened
        assert (found.seal, found.barred, found.fence) == (held.fence, held.fence - 1, held.fence)


async def test_the_coordinator_seals_the_newest_record_that_any_process_knows(plane: Plane) -> None:
    client = await plane.client()
    await store(client, BASE)
    known = decision("known to a worker")
    async with coordinator(client) as (held, sealed):
        assert await sealed.seal(lambda stored: known) == known
        assert (await stored(client), (await stored(client)).seal) == (known, held.fence)


async def test_a_record_written_between_the_read_and_the_seal_is_sealed(plane: Plane) -> None:
    client = await plane.client()
    await store(client, BASE)
    late, put = decision("late"), client.bus.put
    overtaken = 1

    async def overtaking(bucket: Any, key: str, value: bytes, **conditions: Any) -> int:
        nonlocal overtaken
        if key == RECORD and overtaken > 0:
            overtaken -= 1
            await store_raw(late)
        return await put(bucket, key, value, **conditions)

    async def store_raw(record: DecisionRecord) -> None:
        await put(client.subjects().state, RECORD, record.encode())

    async with coordinator(client) as (_, sealed):
        client.bus.put = overtaking  # type: ignore[method-assign]
        assert await sealed.seal(as_stored) == late
        overtaken = SEAL_TRIES
        await store_raw(decision("later"))
        with pytest.raises(StaleFence, match="has changed"):
            await sealed.seal(as_stored)


# ---- late writes ----


@pytest.mark.parametrize("told", [True, False])
async def test_a_delayed_decision_is_refused_whatever_other_calls_did_meanwhile(plane: Plane, told: bool) -> None:
    """Not `told`: the marker of the lost lock has gone, as it does after a while."""
    one, two = await plane.client("one", SHORT), await plane.client("two")
    state = one.subjects().state
    await store(one, BASE)
    async with coordinator(one) as (_, late), asyncio.timeout(30):
        await late.seal(as_stored)
        on_its_way, go_on = hold_back(one.bus)
        deciding = asyncio.create_task(late.decide(decision("late")))
        try:
            await on_its_way.wait()
            async with two.lock(await two.view(), wait_s=10):
                pass
            if not told:
                await two.bus.nc.jetstream().purge_stream(state.stream, subject=state.key(LOCK))
            async with coordinator(two) as (_, sealed):
                await sealed.seal(as_stored)
                go_on.set()
                with pytest.raises(StaleFence, match="another coordinator has taken over"):
                    await deciding
                await sealed.decide(decision("of the holder"))
        finally:
            go_on.set()
            await asyncio.wait([deciding])
        with pytest.raises(StaleFence):
            await late.write(decision("late"))
    assert (await stored(two)).update_id == "of the holder"


async def test_a_decision_that_arrives_before_the_seal_stands(plane: Plane) -> None:
    """The coordinator has lost the lock, and no other has acted yet. The next coordinator finds the decision and
    carries it out."""
    one, two = await plane.client("one", SHORT), await plane.client("two")
    await store(one, BASE)
    async with coordinator(one) as (held, late):
        await late.seal(as_stored)
        state, view = two.subjects().state, await two.view()
        async with hold_lock(two.bus, state, two.owner, wait_s=10, died=view.connection_died) as next_held:
            sealed = SealedRecord(two.bus, state, next_held)
            await late.decide(decision("late"))
            found = await sealed.seal(as_stored)
            assert found is not None
            assert (found.update_id, found.fence) == ("late", held.fence)
            with pytest.raises(StaleFence):
                await late.write(decision("later"))


async def test_a_call_that_decides_nothing_bars_the_holder_from_which_it_has_taken_the_lock(plane: Plane) -> None:
    one, two = await plane.client("one", SHORT), await plane.client("two")
    await store(one, BASE)
    async with coordinator(one) as (_, late):
        await late.seal(as_stored)
        async with two.lock(await two.view(), wait_s=10) as held:
            assert (await stored(two)).barred == held.fence - 1
            with pytest.raises(StaleFence):
                await late.decide(decision("late"))
            before = await entry_of(two)
    async with two.lock(await two.view()):
        assert await entry_of(two) == before, "a lock that was given back costs no write"


async def test_a_coordinator_that_knows_that_its_lock_is_lost_writes_nothing(plane: Plane) -> None:
    one, two = await plane.client("one", SHORT), await plane.client("two")
    await store(one, BASE)
    async with coordinator(one) as (held, late):
        await late.seal(as_stored)
        state, view = two.subjects().state, await two.view()
        async with hold_lock(
            two.bus, state, two.owner, wait_s=10, died=view.connection_died
        ):  # nothing is barred yet
            with pytest.raises(StaleFence):
                await held.check()
            with pytest.raises(StaleFence):
                await late.decide(decision("late"))
    assert await stored(two) == BASE


async def test_a_write_with_a_lost_answer_is_resolved_under_a_new_fence(plane: Plane) -> None:
    client = await plane.client()
    await store(client, BASE)
    put = client.bus.put
    sent: list[dict[str, Any]] = []

    async def losing(bucket: Any, key: str, value: bytes, **conditions: Any) -> int:
        sent.append({"value": value, **conditions})
        raise BusUnreachable("its answer was lost")

    async with coordinator(client) as (held, sealed):
        await sealed.seal(as_stored)
        client.bus.put = losing  # type: ignore[method-assign]
        with pytest.raises(BusUnreachable):
            await sealed.decide(decision("late"))
        client.bus.put = put  # type: ignore[method-assign]
        first = held.fence
        await sealed.refence()
        assert held.fence > first
        found = await sealed.seal(as_stored)
        assert found == BASE, "it had not arrived"
        late = sent[-1]
        with pytest.raises(WrongSequence):
            await put(client.subjects().state, RECORD, late.pop("value"), **late)
        assert (await sealed.decide(decision("next"))).fence == held.fence


# ---- bars ----


async def test_a_worker_bars_a_coordinator_that_is_gone(plane: Plane) -> None:
    one, two = await plane.client("one"), await plane.client("two")
    state = one.subjects().state
    await store(one, BASE)
    async with coordinator(one) as (held, late):
        await late.seal(as_stored)
        entry = await entry_of(two)
        assert await bar(two.bus, state, entry, held.fence)
        barred = await entry_of(two)
        assert await stored(two) == BASE
        assert (await stored(two)).barred == held.fence
        for fence in (held.fence, held.fence - 1):
            assert await bar(two.bus, state, barred, fence), "it is barred already"
        assert (await entry_of(two)).sequence == barred.sequence, "a write more would cost the next one its seal"
        assert not await bar(two.bus, state, entry, held.fence + 1), "the record has changed since"
        for write in (late.decide(decision("late")), late.seal(as_stored), late.write(BASE)):
            with pytest.raises(StaleFence):
                await write
        assert (await entry_of(two)).sequence == barred.sequence
    async with coordinator(two) as (held, sealed):
        record = await sealed.seal(as_stored)
        assert record is not None
        assert record.barred == held.fence - 1
        await sealed.decide(decision())


@pytest.mark.parametrize("known", [None, replace(decision("known to a worker"), seal=1)])
async def test_a_coordinator_that_was_barred_before_its_seal_does_not_seal(
    plane: Plane, known: DecisionRecord | None
) -> None:
    one, two = await plane.client("one", SHORT), await plane.client("two")
    await store(one, BASE)
    async with coordinator(one) as (held, late):
        async with two.lock(await two.view(), wait_s=10):
            pass
        assert await bar(two.bus, two.subjects().state, await entry_of(two), held.fence)
        before = await entry_of(two)
        with pytest.raises(StaleFence):
            await late.seal(lambda stored: known or stored)
        assert await entry_of(two) == before


@pytest.mark.parametrize("where", ["sealed", "barred", "known to a worker"])
async def test_after_a_store_lost_writes_no_fence_is_lower_than_a_known_one(plane: Plane, where: str) -> None:
    """It has lost writes; a worker or frontend has written back a record of a fence that was lost with them."""
    client = await plane.client()
    state = client.subjects().state
    lost = await store(client, BASE) + 500
    before = decision("before")
    before = replace(before, barred=lost) if where == "barred" else replace(before, seal=lost)
    if where != "known to a worker":
        await store(client, before)
    async with coordinator(client) as (held, sealed):
        assert held.fence < lost
        record = await sealed.seal(lambda stored: before)
        assert record == before
        assert record.barred < held.fence
        assert lost <= held.fence == record.seal
        assert await client.bus.last_sequence(state) > lost
        await sealed.decide(decision("next", before))
        # While it is at work no record can be above its fence, unless another coordinator is at work too.
        await store(client, replace(before, seal=held.fence + 9))
        with pytest.raises(StaleFence):
            await sealed.seal(as_stored)
        # Only an answer that was lost makes it begin anew.
        await store(client, replace(before, seal=held.fence + 50))
        await sealed.refence()
        assert await sealed.seal(as_stored) == before
        assert (await stored(client)).seal == held.fence


# ---- restore ----


async def test_a_lost_record_is_restored_unless_another_process_restored_it_first(plane: Plane) -> None:
    client = await plane.client()
    bus, state = client.bus, client.subjects().state
    known = replace(decision(), seal=7, barred=6)
    await restore(bus, state, known, None)
    assert await stored(client) == known
    await restore(bus, state, decision("another"), None)
    assert await stored(client) == known
    await bus.purge(state, RECORD, (await entry_of(client)).sequence)
    await restore(bus, state, known, await entry_of(client))
    assert ((await stored(client)).seal, (await stored(client)).barred) == (7, 6)
    older = await entry_of_older(client, barred=9)
    await restore(bus, state, known, older)
    assert (await stored(client), (await stored(client)).barred) == (known, 9), "who is barred stays so"
    await restore(bus, state, decision("another"), older)
    assert await stored(client) == known, "it has changed since it was read"


async def entry_of_older(client: RlClient, barred: int) -> Entry:
    await store(client, replace(BASE, barred=barred))
    return await entry_of(client)


# ---- connections ----


async def reconnected(plane: Plane, bus: Bus) -> None:
    before = bus.identity
    cast(Any, bus.nc).abort()
    await plane.until(lambda: bus.nc.is_connected and bus.identity != before)


async def test_a_reconnected_coordinator_decides_only_if_lock_and_record_are_unchanged(plane: Plane) -> None:
    client, other = await plane.client(), await plane.client("other")
    await store(client, BASE)
    async with coordinator(client) as (_, sealed):
        await sealed.seal(as_stored)
        await reconnected(plane, client.bus)
        decided = await sealed.decide(decision())
        await reconnected(plane, client.bus)
        assert await sealed.seal(as_stored) == decided
        assert (await entry_of(client)).sequence == sealed.sequence
        await reconnected(plane, client.bus)
        await store(other, decision("restored"))
        with pytest.raises(StaleFence, match="restored a record"):
            await sealed.write(decided)


async def lose_writes(client: RlClient, at: int, record: DecisionRecord | None) -> None:
    """Makes the store lose all writes but the lock's, and gives the sequence `at` a second time: to
    `record`, or to another key."""
    bus, state = client.bus, client.subjects().state
    lock = await bus.get(state, LOCK)
    assert lock is not None
    assert lock.value is not None
    await lose_all(bus, state, first_sequence=at - 1)
    await bus.put(state, LOCK, lock.value)
    if record is None:
        await bus.put(state, FENCE_KEY, b"")
    else:
        await store(client, record)
    assert await bus.last_sequence(state) == at


async def test_a_sequence_that_comes_a_second_time_is_not_taken_for_the_own_write(plane: Plane) -> None:
    """A server that lost writes has broken every connection before that."""
    client = await plane.client()
    await store(client, BASE)
    async with coordinator(client) as (held, sealed):
        await sealed.seal(as_stored)
        of_another = replace(BASE, update_id="another", seal=held.fence, barred=held.fence - 1)
        others = of_another, replace(BASE, seal=held.fence - 1), replace(BASE, seal=held.fence, barred=0), None
        for there in others:
            await lose_writes(client, sealed.sequence, there)
            await reconnected(plane, client.bus)
            with pytest.raises(StaleFence, match="another writer has replaced"):
                await sealed.decide(decision())


async def test_a_lock_that_was_lost_with_the_connection_decides_nothing(plane: Plane) -> None:
    client, other = await plane.client(lock_timings=LockTimings(renew_s=60)), await plane.client("other")
    await store(client, BASE)
    async with coordinator(client) as (_, sealed):
        await sealed.seal(as_stored)
        state = client.subjects().state
        await reconnected(plane, client.bus)
        await other.bus.put(state, LOCK, b'{"owner":"x","server_id":"s","client_id":1,"nonce":"n"}')
        with pytest.raises(StaleFence):
            await sealed.decide(decision())
        assert await stored(client) == BASE
        entry = await other.bus.get(state, LOCK)
        assert entry is not None
        with contextlib.suppress(BusUnreachable):
            await other.bus.purge(state, LOCK, entry.sequence)

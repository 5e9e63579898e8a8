"""The component's lock on real servers: one holder at a time, whoever dies."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from nats.aio.msg import Msg

import rl_plane.lock
from rl_plane.bus import Bus, WrongSequence
from rl_plane.client import RlClient
from rl_plane.errors import BusUnreachable, Locked, StaleFence
from rl_plane.lock import LOCK_TTL_S, fence_of, read_holder
from rl_plane.record import first_record, read_record
from rl_plane.subjects import LOCK, RECORD, Bucket
from tests.faults import hold_back

if TYPE_CHECKING:
    from tests.conftest import Plane

_HOLDER = """
import asyncio, sys
import rl_plane.lock
from rl_plane.client import RlClient
async def main():
    *where, rl_plane.lock.LOCK_TTL_S = *sys.argv[1:-1], int(sys.argv[-1])
    client = await RlClient.connect(*where, name="doomed")
    async with client.lock(await client.view()) as held:
        print(held.fence, flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""


async def live_fence(bus: Bus, bucket: Bucket) -> tuple[int, bool]:
    return fence_of(await bus.get(bucket, LOCK))


async def dead_holder(plane: Plane, ttl_s: int = LOCK_TTL_S) -> int:
    """A process takes the lock and is killed; its fence."""
    arguments = [plane.url, plane.namespace, str(ttl_s)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _HOLDER, *arguments, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    async with asyncio.timeout(60):
        fence = int(await process.stdout.readline())
        process.kill()
        await process.wait()
    return fence


async def test_many_take_turns_and_fences_rise(plane: Plane) -> None:
    clients = [await plane.client(f"c{number}") for number in range(4)]
    inside = 0
    fences: list[int] = []

    async def work(client: RlClient) -> None:
        nonlocal inside
        async with client.lock(await client.view(), wait_s=15) as held:
            inside += 1
            assert inside == 1, "two hold the lock"
            assert await live_fence(client.bus, client.subjects().state) == (held.fence, True)
            await held.put("witness", str(held.fence).encode())
            await held.renew()
            fences.append(held.fence)
            inside -= 1

    await asyncio.gather(*(work(clients[number % 4]) for number in range(20)))
    assert len(fences) == 20
    assert fences == sorted(set(fences))
    fence, held = await live_fence(clients[0].bus, clients[0].subjects().state)
    assert not held
    assert fence >= fences[-1]


async def test_a_dead_holder_is_replaced_long_before_its_ttl(plane: Plane) -> None:
    client = await plane.client()
    view = await client.view()
    await plane.until(lambda: view.advisories)
    fence = await dead_holder(plane, ttl_s=600)
    written: list[bytes] = []

    async def heard(message: Msg) -> None:
        written.append(message.data)

    await client.bus.subscribe(view.subjects.state.feed(LOCK), heard)
    async with client.lock(view, wait_s=30) as held:
        assert held.fence > fence
        assert held.took_over
        await client.bus.flush()
        assert all(written), "to whoever is faster it never looks as if the dead one had given it back"
        assert written
    async with client.lock(view) as held:
        assert not held.took_over


async def test_without_advisories_a_dead_holder_is_replaced_at_its_ttl(plain_plane: Plane) -> None:
    client = await plain_plane.client()
    view = await client.view()
    fence = await dead_holder(plain_plane)
    with pytest.raises(Locked):
        async with client.lock(view, wait_s=0.1):
            raise AssertionError("the lock of a holder that may live was taken")
    async with client.lock(view, wait_s=LOCK_TTL_S * 3) as held:
        assert held.fence > fence
        assert held.took_over


async def test_a_holder_that_gave_it_back_was_not_taken_over(plane: Plane) -> None:
    client = await plane.client()
    view = await client.view()
    async with client.lock(view) as first:
        pass
    async with client.lock(view) as second:
        assert second.fence > first.fence
        assert not second.took_over


async def test_waiting_for_the_lock_has_a_bound(plane: Plane) -> None:
    one, two = await plane.client("one"), await plane.client("two")
    async with one.lock(await one.view()):
        start = time.monotonic()
        with pytest.raises(Locked) as caught:
            async with two.lock(await two.view(), wait_s=0.3):
                raise AssertionError("two hold the lock")
        assert time.monotonic() - start < LOCK_TTL_S
    assert caught.value.facts["retry_after_s"] > 0
    assert caught.value.facts["holder"] == one.owner
    assert caught.value.facts["fix"]
    assert caught.value.http_status == 503


async def test_a_holder_that_lost_the_lock_writes_nothing(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rl_plane.lock, "RENEW_S", 60)  # it stands still
    one, two = await plane.client("one"), await plane.client("two")
    state = one.subjects().state
    async with contextlib.AsyncExitStack() as locks:
        with monkeypatch.context() as patch:
            patch.setattr(rl_plane.lock, "LOCK_TTL_S", 1)
            stale = await locks.enter_async_context(one.lock(await one.view()))
        held = await locks.enter_async_context(two.lock(await two.view(), wait_s=10))
        assert held.took_over
        before = await stale.replace("record", b"base", 0)
        last = await held.replace("record", b"base", before)
        with pytest.raises(WrongSequence):
            await stale.replace("record", b"one", before)
        with pytest.raises(StaleFence):
            await stale.check()
        await held.check()
        await held.replace("record", b"two", last)
        for write in (stale.put("record", b"one"), stale.renew()):
            with pytest.raises(StaleFence) as caught:
                await write
            assert caught.value.facts["fence"] == stale.fence
        stale._revision = held.fence  # as where a store that lost writes gives a sequence a second time
        for write in (stale.put("record", b"one"), stale.renew()):
            with pytest.raises(StaleFence):
                await write
        entry = await two.bus.get(state, "record")
        assert entry is not None
        assert entry.value == b"two"
        assert stale.lost
    assert await live_fence(two.bus, state) == (await two.bus.last_sequence(state), False), "given back once"


async def loser_and_next(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> tuple[RlClient, RlClient, Callable[[], None]]:
    """Locks last for a second, as one is to be lost, until the function is called: the next ones last as ever."""
    as_ever = functools.partial(monkeypatch.setattr, rl_plane.lock, "LOCK_TTL_S", rl_plane.lock.LOCK_TTL_S)
    monkeypatch.setattr(rl_plane.lock, "LOCK_TTL_S", 1)
    return await plane.client("one"), await plane.client("two"), as_ever


@pytest.mark.parametrize("told", [True, False])
async def test_a_decision_that_stands_still_is_refused_whatever_was_done_meanwhile(
    plane: Plane, monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    """Not `told`: what tells that the lock was lost has gone, as it does after a while."""
    one, two, as_ever = await loser_and_next(plane, monkeypatch)
    view, state = await two.view(), one.subjects().state
    base = first_record("model")
    await one.bus.put(state, RECORD, base.encode(), last=0)
    on_its_way, go_on = hold_back(one.bus)

    async def is_free() -> bool:
        return await read_holder(two.bus, state) is None

    async with one.lock(await one.view()) as stale, asyncio.timeout(30):
        entry = await one.bus.get(state, RECORD)
        assert entry is not None
        decision = replace(base, update_id="late").encode()
        deciding = asyncio.create_task(stale.replace(RECORD, decision, entry.sequence))
        try:
            await on_its_way.wait()
            as_ever()
            await plane.until(is_free)
            if not told:
                await two.bus.js.purge_stream(state.stream, subject=state.key(LOCK))
            await two.run("pause", {"min_workers": 0})
            async with two.lock(view) as held:
                assert not held.took_over, "it was given back"
                go_on.set()
                with pytest.raises(WrongSequence):
                    await deciding
                with pytest.raises(StaleFence):
                    await stale.check()
                await held.check()
        finally:
            go_on.set()
            await asyncio.wait([deciding])
    assert await read_record(two.bus, state) == base


async def test_a_holder_whose_decision_may_come_yet_does_not_give_the_lock_back(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, as_ever = await loser_and_next(plane, monkeypatch)
    view, state = await two.view(), one.subjects().state
    base = first_record("model")
    last = await one.bus.put(state, RECORD, base.encode(), last=0)
    put = one.bus.put

    async def lose(bucket: Any, key: str, *given: Any, **named: Any) -> int:
        if key == RECORD:
            raise BusUnreachable("its answer was lost")
        return await put(bucket, key, *given, **named)

    decision = replace(base, update_id="late").encode()
    async with one.lock(await one.view()) as held:
        monkeypatch.setattr(one.bus, "put", lose)
        with pytest.raises(BusUnreachable):
            await held.replace(RECORD, decision, last)
        monkeypatch.setattr(one.bus, "put", put)
    as_ever()
    async with two.lock(view, wait_s=10) as held:
        assert held.took_over
        with pytest.raises(WrongSequence):
            await put(state, RECORD, decision, last=last)
    # One that has settled it gives it back.
    async with one.lock(await one.view()) as held:
        assert not held.took_over
        last = (await one.bus.get(state, RECORD)).sequence  # type: ignore[union-attr]
        monkeypatch.setattr(one.bus, "put", lose)
        with pytest.raises(BusUnreachable):
            await held.replace(RECORD, decision, last)
        monkeypatch.setattr(one.bus, "put", put)
        await held.replace(RECORD, base.encode(), last)
    async with two.lock(view) as held:
        assert not held.took_over


async def test_a_lock_that_was_given_back_costs_no_write(plane: Plane) -> None:
    client = await plane.client()
    view, state = await client.view(), client.subjects().state
    async with client.lock(view) as first:
        assert first.anew is None, "there is no record yet"
    written = await client.bus.put(state, RECORD, first_record("model").encode(), last=0)
    async with client.lock(view) as second:
        assert second.anew is None
    await client.bus.js.purge_stream(state.stream, subject=state.key(LOCK))
    async with client.lock(view) as third:
        assert third.anew is not None
        assert third.anew[0] == written
        assert not third.took_over


async def test_a_holder_keeps_it_longer_than_its_ttl(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rl_plane.lock, "RENEW_S", 0.2)
    monkeypatch.setattr(rl_plane.lock, "LOCK_TTL_S", 3)
    one, two = await plane.client("one"), await plane.client("two")
    async with one.lock(await one.view()) as held:
        with pytest.raises(Locked):
            async with two.lock(await two.view(), wait_s=4.5):
                raise AssertionError("two hold the lock")
        await held.put("witness", b"")
        assert await live_fence(one.bus, one.subjects().state) == (held.fence, True)


async def test_a_renewal_whose_answer_was_lost_does_not_cost_the_lock(plane: Plane) -> None:
    client = await plane.client("holder")
    async with client.lock(await client.view()) as held:
        renewing = asyncio.create_task(held.renew())
        await asyncio.sleep(0)  # it is sent, and not answered
        renewing.cancel()
        await asyncio.wait([renewing])
        assert renewing.cancelled()
        await held.put("witness", b"mine")
        assert not held.lost
        entry = await client.bus.get(client.subjects().state, "witness")
        assert entry is not None
        assert entry.value == b"mine"
        await held.renew()


async def test_a_renewal_that_was_cancelled_on_its_way_does_not_keep_the_lock(plane: Plane) -> None:
    client = await plane.client("holder")
    view = await client.view()
    async with client.lock(view) as held:
        renewing = asyncio.create_task(held.renew())
        await asyncio.sleep(0)  # it is sent, and not answered
        renewing.cancel()
        await asyncio.wait([renewing])
        assert renewing.cancelled()
    async with client.lock(view, wait_s=0.0) as again:
        assert not again.took_over

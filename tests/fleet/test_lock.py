"""The component's lock on real servers: it has one holder at a time, even if processes die."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, cast

import pytest
from nats.aio.msg import Msg

from rl_plane.bus.connection import Bus
from rl_plane.bus.lock import LOCK_TTL_S, POLL_S, HeldLock, LockTimings, fence_of, hold_lock, read_holder
from rl_plane.client import RlClient
from rl_plane.errors import Locked, StaleFence
from rl_plane.protocol.subjects import LOCK, KeyValueBucket
from tests.support.faulty_bus import BusFaults

if TYPE_CHECKING:
    from tests.conftest import Plane

pytestmark = [pytest.mark.slow, pytest.mark.parallel]

_HOLDER = """
import asyncio, sys
from rl_plane.bus.lock import LockTimings
from rl_plane.client import RlClient
async def main():
    *where, ttl_s = sys.argv[1:]
    client = await RlClient.connect(*where, name="doomed", lock_timings=LockTimings(int(ttl_s)))
    async with client.lock(await client.view()) as held:
        print(held.fence, flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""

UNRENEWED = LockTimings(renew_s=60)
SHORT = LockTimings(ttl_s=1, renew_s=60)
"""Such a lock ends after a second, because its holder does not renew it."""


async def live_fence(bus: Bus, bucket: KeyValueBucket) -> tuple[int, bool]:
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
        await client.bus.flush()
        assert all(written), "the faster caller never believes that the dead holder has released it"
        assert written


async def test_without_advisories_a_dead_holder_is_replaced_at_its_ttl(plain_plane: Plane) -> None:
    client = await plain_plane.client()
    view = await client.view()
    fence = await dead_holder(plain_plane)
    with pytest.raises(Locked):
        async with client.lock(view, wait_s=0.1):
            raise AssertionError("the lock of a holder that may live was taken")
    async with client.lock(view, wait_s=LOCK_TTL_S * 3) as held:
        assert held.fence > fence


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


async def test_a_holder_that_lost_the_lock_writes_nothing(plane: Plane) -> None:
    one, two = await plane.client("one", SHORT), await plane.client("two")
    state = one.subjects().state
    async with one.lock(await one.view()) as stale, two.lock(await two.view(), wait_s=10) as held:
        stale.check_unlost()  # as far as it knows
        with pytest.raises(StaleFence):
            await stale.put("witness", b"one")
        with pytest.raises(StaleFence):
            stale.check_unlost()
        with pytest.raises(StaleFence):
            await stale.check()
        await held.check()
        await held.put("witness", b"two")
        # A store that has lost writes gives a sequence a second time.
        same_sequence = HeldLock(one.bus, state, {"nonce": "of one"}, held.fence)
        same_sequence.lost = True
        for late in (stale, same_sequence):
            for write in (late.put("witness", b"one"), late.renew(), late.refence()):
                with pytest.raises(StaleFence) as caught:
                    await write
                assert caught.value.facts["fence"] == late.fence
        entry = await two.bus.get(state, "witness")
        assert entry is not None
        assert entry.value == b"two"
    assert await live_fence(two.bus, state) == (await two.bus.last_sequence(state), False), "given back once"


async def test_a_holder_keeps_it_longer_than_its_ttl(plane: Plane) -> None:
    one = await plane.client("one", LockTimings(ttl_s=3, renew_s=0.2))
    two = await plane.client("two")
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


@pytest.mark.parametrize("next_one", ["renew", "refence", "release"])
async def test_the_call_after_a_renewal_with_a_lost_answer_counts_the_renewal(plane: Plane, next_one: str) -> None:
    client = await plane.client("holder")
    view = await client.view()
    async with client.lock(view) as held:
        await cancelled_on_its_way(held.renew())
        if next_one != "release":
            await (held.renew() if next_one == "renew" else held.refence())
            await held.check()
            assert await live_fence(client.bus, view.subjects.state) == (held.fence, True)
    async with client.lock(view, wait_s=0.0):
        pass


async def cancelled_on_its_way(work: Coroutine[Any, Any, None]) -> None:
    renewing = asyncio.create_task(work)
    await asyncio.sleep(0)  # it is sent, and not answered
    renewing.cancel()
    await asyncio.wait([renewing])
    assert renewing.cancelled()


async def test_a_renewal_is_not_taken_for_a_new_fence(plane: Plane) -> None:
    faults = BusFaults()
    client, other = await plane.client("holder", UNRENEWED, faults.connect), await plane.client("other")
    state = client.subjects().state

    async def renewal_arrives(key: str) -> None:
        if key == LOCK:
            await other.bus.put(state, LOCK, renewal)

    async with client.lock(await client.view()) as held:
        entry = await client.bus.get(state, LOCK)
        assert entry is not None
        assert entry.value is not None
        renewal, fence = entry.value, held.fence
        faults.before_put = renewal_arrives
        with pytest.raises(StaleFence):
            await held.refence()
        assert held.fence == fence


async def test_on_a_new_connection_a_sequence_is_not_taken_for_the_own_lock(plane: Plane) -> None:
    """A server that lost writes has broken every connection before it gives their sequences to another holder. No
    renewal has seen the new connection yet."""
    one, two = await plane.client("one"), await plane.client("two")
    state, before = one.subjects().state, one.bus.identity
    other = b'{"owner": "x", "server_id": "s", "client_id": 1, "nonce": "n"}'
    held = HeldLock(one.bus, state, {"nonce": "of one"}, await two.bus.put(state, LOCK, other, ttl_s=1))
    cast(Any, one.bus.nc).abort()
    await plane.until(lambda: one.bus.nc.is_connected and one.bus.identity != before)
    with pytest.raises(StaleFence):
        await held.put("witness", b"mine")
    assert await two.bus.get(state, "witness") is None


async def test_two_calls_of_one_process_do_not_share_a_lock(plane: Plane) -> None:
    """Both calls have one owner and one connection, and neither names an update."""
    client = await plane.client(lock_timings=UNRENEWED)
    view = await client.view()
    short = hold_lock(client.bus, view.subjects.state, client.owner, died=view.connection_died, timings=SHORT)
    async with short as first, client.lock(view, wait_s=10) as second:
        with pytest.raises(StaleFence):
            await first.check()
        first.lost = False
        with pytest.raises(StaleFence):
            await first.renew()
        await second.check()
        await second.renew()
        assert await live_fence(client.bus, view.subjects.state) == (second.fence, True)


async def test_the_same_update_is_waited_for_longer_than_another(plane: Plane) -> None:
    one, two = await plane.client("one"), await plane.client("two")
    view = await two.view()
    async with one.lock(await one.view(), update_id="u1"):
        for update_id, same_wait_s in (("u2", 60.0), ("u1", 0.0), ("", 60.0)):
            with pytest.raises(Locked):
                async with two.lock(view, 0.0, update_id=update_id, same_wait_s=same_wait_s):
                    raise AssertionError("two hold the lock")
        waiting = asyncio.create_task(taken(two, "u1"))
        await asyncio.sleep(3 * POLL_S)  # it has looked, and looks again
        assert not waiting.done()
    assert await waiting


async def taken(client: RlClient, update_id: str) -> bool:
    async with client.lock(await client.view(), 0.0, update_id=update_id, same_wait_s=30.0):
        return True


async def test_a_new_fence_is_taken_without_giving_the_lock_away(plane: Plane) -> None:
    one, two = await plane.client("one"), await plane.client("two")
    state = one.subjects().state
    async with one.lock(await one.view()) as held:
        first = held.fence
        await held.refence()
        assert held.fence > first
        assert await live_fence(one.bus, state) == (held.fence, True)
        with pytest.raises(Locked):
            async with two.lock(await two.view(), wait_s=0.0):
                raise AssertionError("two hold the lock")
        await held.renew()
        assert await live_fence(one.bus, state) == (held.fence, True), "a renewal is no new fence"
        await held.put("witness", b"mine")
        await held.refence(held.fence + 50)
        assert held.fence >= first + 50
        assert await live_fence(one.bus, state) == (held.fence, True)
        await held.check()
    async with two.lock(await two.view(), wait_s=0.0) as again:
        assert again.fence > held.fence


async def test_a_holder_that_reconnects_keeps_the_lock(plane: Plane) -> None:
    """The server announces that the connection of the lock is closed, and a waiting call would take the lock at once.
    A long prepare renews the lock only now and then."""
    one, two = await plane.client("one", UNRENEWED), await plane.client("two")
    view, state = await two.view(), one.subjects().state
    await plane.until(lambda: view.advisories)
    async with one.lock(await one.view()) as held:
        before = one.bus.identity
        cast(Any, one.bus.nc).abort()
        await plane.until(lambda: one.bus.nc.is_connected and one.bus.identity != before)
        await plane.until(lambda: view.connection_died(before))
        with pytest.raises(Locked):
            async with two.lock(view, wait_s=0.3):
                raise AssertionError("the lock of a living holder was taken")
        holder = await read_holder(two.bus, state)
        assert holder is not None
        assert (holder["server_id"], holder["client_id"]) == one.bus.identity
        await held.check()
        assert await live_fence(two.bus, state) == (held.fence, True)

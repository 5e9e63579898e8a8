"""A worker's watch of the lock knows which fence is live, on a real server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest

from rl_plane.client import RlClient
from rl_plane.protocol.subjects import LOCK
from tests.support.lost_writes import lose_all
from worker.reconcile.lock_watch import LockWatch
from worker.reconcile.worker_state import WorkerState

if TYPE_CHECKING:
    from tests.conftest import Plane


async def watching(client: RlClient) -> tuple[LockWatch, WorkerState]:
    state = WorkerState("0" * 16, "me")
    watch = LockWatch(client.bus, client.subjects(), state)
    await watch.start()
    return watch, state


async def test_the_fence_of_the_holder_is_live_and_no_other(plane: Plane) -> None:
    worker, client = await plane.client("worker"), await plane.client()
    watch, state = await watching(worker)
    assert not await watch.is_live(0)
    view = await client.view()
    async with client.lock(view) as first:
        assert await watch.is_live(first.fence)
        assert state.fence == first.fence
        assert not await watch.is_live(first.fence + 1), "no caller holds it"
        await first.renew()
        assert await watch.is_live(first.fence), "a renewal is no new holder"
    await plane.until(lambda: not watch.is_holders(first.fence))
    assert not await watch.is_live(first.fence), "it was given back"
    assert not await watch.is_live(state.fence)
    async with client.lock(view) as second:
        assert await watch.is_live(second.fence)
        assert not await watch.is_live(first.fence)


async def test_on_a_new_connection_the_leader_is_asked_before_anything_is_live(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker has missed the announcements made while it had no connection."""
    worker, client = await plane.client("worker"), await plane.client()
    watch, _ = await watching(worker)
    monkeypatch.setattr(worker.bus, "_on_reconnect", [])  # the question after a reconnect comes too late
    async with client.lock(await client.view()) as held:
        assert await watch.is_live(held.fence)
        before = worker.bus.identity
        cast(Any, worker.bus.nc).abort()
        await plane.until(lambda: worker.bus.nc.is_connected and worker.bus.identity != before)
        assert not watch.is_holders(held.fence)
        assert await watch.is_live(held.fence)
        assert watch.is_holders(held.fence)


async def test_a_restored_store_never_repeats_a_fence(plane: Plane) -> None:
    worker, client = await plane.client("worker"), await plane.client()
    watch, state = await watching(worker)
    async with client.lock(await client.view()) as held:
        assert await watch.is_live(held.fence)
    bucket = client.subjects().state
    left_behind = await worker.bus.last_sequence(bucket)
    await lose_all(worker.bus, bucket, first_sequence=left_behind - 200)
    assert not await watch.is_live(state.fence)
    assert await worker.bus.last_sequence(client.subjects().state) >= left_behind
    async with client.lock(await client.view()) as held:
        assert held.fence > left_behind
        assert await watch.is_live(held.fence)


async def test_without_need_no_fence_is_raised(plane: Plane) -> None:
    worker, client = await plane.client("worker"), await plane.client()
    watch, worker_state = await watching(worker)
    async with client.lock(await client.view()):
        pass
    state = client.subjects().state
    await client.bus.nc.jetstream().purge_stream(state.stream, subject=state.key(LOCK))  # the marker has expired
    before = await client.bus.last_sequence(state)
    assert not await watch.is_live(worker_state.fence)
    assert await client.bus.last_sequence(state) == before

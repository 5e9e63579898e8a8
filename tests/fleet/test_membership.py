"""The members of a fleet, on real servers with real processes that are killed, stopped and started again."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import rl_plane.membership.probe
from rl_plane._util.tasks import end_tasks
from rl_plane.bus.connection import Bus
from rl_plane.bus.server import NatsServer
from rl_plane.bus.token_stream import StreamReceiver
from rl_plane.client import RlClient
from rl_plane.errors import BusUnreachable, Conflict, DeadlineExceeded, NotAdmitted
from rl_plane.membership.core import Changed, Member
from rl_plane.membership.view import MembershipView
from rl_plane.protocol.subjects import MEMBER_PREFIX, KeyValueBucket, Subjects
from tests.support.faults import Stream
from tests.support.faulty_bus import BusFaults
from tests.support.stream_messages import messages_of
from worker import exit_codes
from worker.runtime.registration import Registration

if TYPE_CHECKING:
    from tests.conftest import Plane, Spawned

EVENT_S = 10.0
"""Many times what an advisory, a purge and its feed take on a busy machine."""
SWEEP_S = 6.0
"""Three times the sweep's bound."""
HUNG_S = 24.0
"""Three times the bound within which a hung worker is found."""


@asynccontextmanager
async def changes(client: RlClient) -> AsyncIterator[asyncio.Queue[Changed]]:
    queue: asyncio.Queue[Changed] = asyncio.Queue()
    stop = (await client.view()).listen(queue.put_nowait)
    yield queue
    stop()


async def gone(queue: asyncio.Queue[Changed], instance_id: str, bound_s: float) -> None:
    async with asyncio.timeout(bound_s):
        while True:
            change = await queue.get()
            if change.before is not None and change.before.instance_id == instance_id and change.after is None:
                return


async def joined(queue: asyncio.Queue[Changed], instance_id: str, bound_s: float) -> Member:
    async with asyncio.timeout(bound_s):
        while True:
            change = await queue.get()
            if change.after is not None and change.after.instance_id == instance_id:
                return change.after


async def agreed(plane: Plane, views: list[MembershipView], workers: int, bound_s: float = 30.0) -> int:
    """The epoch at which all views show the same fleet of so many."""

    def same() -> bool:
        seen = [view.snapshot() for view in views]
        return len({(one.epoch, one.fingerprint) for one in seen}) == 1 and len(seen[0]) == workers

    await plane.until(same, bound_s)
    return views[0].snapshot().epoch


async def test_a_worker_that_is_taken_out_while_it_registers_registers_again(plane: Plane) -> None:
    """The worker has written its record, and does not know yet that it is registered."""
    bus = await Bus.connect(plane.url)
    members = Subjects(plane.namespace, plane.component).members
    written, go_on = asyncio.Event(), asyncio.Event()

    async def registered() -> None:
        written.set()
        await go_on.wait()

    registration = Registration(
        bus, members, "a", "ia", {}, on_registered=registered, on_superseded=lambda: pytest.fail("superseded")
    )
    start = asyncio.create_task(registration.start())
    try:
        async with asyncio.timeout(EVENT_S):
            await written.wait()
            first = registration.revision
            await bus.purge(members, MEMBER_PREFIX + "a", first)
            go_on.set()
            await start

            async def listed() -> bool:
                entry = await bus.get(members, MEMBER_PREFIX + "a")
                return entry is not None and entry.value is not None and entry.sequence > first

            await plane.until(listed)
    finally:
        start.cancel()
        await registration.leave()
        await bus.close()


async def test_a_worker_that_waits_for_its_engine_registers_again_meanwhile(plane: Plane) -> None:
    """The worker's next step after registering may wait until its weights are overwritten. It stays a member all the
    same."""
    bus = await Bus.connect(plane.url)
    members = Subjects(plane.namespace, plane.component).members
    waits, go_on = asyncio.Event(), asyncio.Event()
    began: list[int] = []
    under_way = 0

    async def registered() -> None:
        nonlocal under_way
        began.append(registration.revision)
        if len(began) == 2 and not go_on.is_set():
            waits.set()
            under_way += 1
            await go_on.wait()
            under_way -= 1
            raise BusUnreachable("it is asked again")
        assert not under_way

    registration = Registration(
        bus, members, "a", "ia", {}, on_registered=registered, on_superseded=lambda: pytest.fail("superseded")
    )

    async def written_after(sequence: int) -> bool:
        entry = await bus.get(members, MEMBER_PREFIX + "a")
        return entry is not None and entry.value is not None and entry.sequence > sequence

    try:
        async with asyncio.timeout(EVENT_S):
            await registration.start()
            first = registration.revision
            await bus.nc.force_reconnect()
            await waits.wait()
            second = registration.revision
            assert began == [first, second]
            await bus.purge(members, MEMBER_PREFIX + "a", second)
            await plane.until(lambda: written_after(second + 1))
            third = registration.revision
            await bus.purge(members, MEMBER_PREFIX + "a", third)
            await plane.until(lambda: written_after(third + 1))
            assert began == [first, second], "one at a time"
            go_on.set()
            await plane.until(lambda: not registration._tasks)
            assert began == [first, second, registration.revision], "once for all that were written meanwhile"
    finally:
        go_on.set()
        await registration.leave()
        await bus.close()


@asynccontextmanager
async def unheard(plane: Plane, on_superseded: Callable[[], None]) -> AsyncIterator[tuple[Bus, Registration]]:
    """A worker's registration that hears no news of its record, and reads the record often."""

    async def registered() -> None:
        pass

    faults, members = BusFaults(), Subjects(plane.namespace, plane.component).members
    faults.loses = lambda message: message.subject.startswith(members.feed(MEMBER_PREFIX))
    bus = await faults.connect(plane.url, "worker", EVENT_S)
    registration = Registration(
        bus, members, "a", "ia", {}, on_registered=registered, on_superseded=on_superseded, check_s=0.05
    )
    await registration.start()
    keeping = asyncio.create_task(registration.keep())
    try:
        yield bus, registration
    finally:
        await end_tasks([keeping])
        await registration.leave()
        await bus.close()


async def test_a_worker_that_never_hears_that_it_was_taken_out_registers_again(plane: Plane) -> None:
    members = Subjects(plane.namespace, plane.component).members
    async with unheard(plane, lambda: pytest.fail("superseded")) as (bus, registration):
        first = registration.revision
        await bus.purge(members, MEMBER_PREFIX + "a", first)

        async def listed() -> bool:
            entry = await bus.get(members, MEMBER_PREFIX + "a")
            return entry is not None and entry.value is not None and entry.sequence > first

        await plane.until(listed)


async def test_a_worker_that_never_hears_of_another_process_with_its_id_ends(plane: Plane) -> None:
    members, superseded = Subjects(plane.namespace, plane.component).members, asyncio.Event()
    async with unheard(plane, superseded.set) as (bus, registration):
        other = Member("a", "another", "SERVER", 7, 0, {}).to_record()
        written = await bus.put(members, MEMBER_PREFIX + "a", other, last=registration.revision)
        async with asyncio.timeout(EVENT_S):
            await superseded.wait()
        entry = await bus.get(members, MEMBER_PREFIX + "a")
        assert entry is not None
        assert entry.sequence == written, "it does not take the id back"


async def test_a_join_is_seen_by_every_client(plane: Plane) -> None:
    one, two = await plane.client(), await plane.client()
    async with changes(one) as first, changes(two) as second:
        worker = plane.spawn()
        member = await joined(first, worker.instance_id, EVENT_S)
        assert await joined(second, worker.instance_id, EVENT_S) == member
    assert member.info["pid"] == worker.process.pid
    assert member.info["engine"] == "fake"
    assert "filesystem" in member.info["transports"]
    assert await one.list_workers() == await two.list_workers()


async def test_a_killed_worker_leaves_every_view_and_moves_the_epoch_by_one(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rl_plane.membership.probe, "BACKSTOP_SWEEP_S", 600.0)  # the server's advisory is enough
    one, two = await plane.client(), await plane.client()
    doomed, other = plane.spawn_many(2)
    views = [await one.view(), await two.view()]
    await plane.until(lambda: all(view.advisories for view in views))
    before = await agreed(plane, views, 2)
    async with changes(one) as first, changes(two) as second:
        doomed.kill()
        await gone(first, doomed.instance_id, EVENT_S)
        await gone(second, doomed.instance_id, EVENT_S)
    assert await agreed(plane, views, 1) == before + 1
    assert (await one.list_workers()).epoch == before + 1, "two reapers moved the epoch twice"
    assert [row.instance_id for row in (await one.call_all("state")).rows] == [other.instance_id]


async def test_without_advisories_the_sweep_finds_a_killed_worker(plain_plane: Plane) -> None:
    one, two = await plain_plane.client(), await plain_plane.client()
    doomed, _ = plain_plane.spawn_many(2)
    views = [await one.view(), await two.view()]
    before = await agreed(plain_plane, views, 2)
    async with changes(one) as first, changes(two) as second:
        doomed.kill()
        await gone(first, doomed.instance_id, SWEEP_S)
        await gone(second, doomed.instance_id, SWEEP_S)
    assert not any(view.advisories for view in views)
    assert await agreed(plain_plane, views, 1) == before + 1


async def test_a_client_that_connects_after_a_death_finds_it_too(plane: Plane) -> None:
    doomed, other = plane.spawn_many(2)
    doomed.kill()
    view = await (await plane.client()).view()
    await plane.until(lambda: _ids(view) == [other.instance_id])


def _ids(view: MembershipView) -> list[str]:
    return [member.instance_id for member in view.snapshot()]


async def hang_and_return(plane: Plane, hung: Spawned, other: Spawned) -> None:
    client = await plane.client()
    view = await client.view()
    before = view.member(hung.instance_id)
    assert before is not None
    async with changes(client) as queue:
        hung.stop()
        try:
            out = await client.call_all("state", timeout_s=3)
            rows = {row.instance_id: row for row in out.rows}
            assert rows[other.instance_id].status == "ok"
            assert isinstance(rows[hung.instance_id].error, DeadlineExceeded)
            assert out.elapsed_s < 6
            await gone(queue, hung.instance_id, HUNG_S)
            out = await client.call_all("state")
            assert [row.instance_id for row in out.rows] == [other.instance_id]
        finally:
            hung.go_on()
        after = await joined(queue, hung.instance_id, EVENT_S)
    assert after.incarnation == before.incarnation
    assert after.revision > before.revision
    assert (await client.call(hung.instance_id, "state")).status == "ok"
    await plane.until(lambda: _is_open(client, hung.instance_id))


async def _is_open(client: RlClient, instance_id: str) -> bool:
    return bool((await client.call(instance_id, "state")).body["admission"]["open"])


async def test_the_fleet_loses_a_hung_worker_and_takes_it_back(plane: Plane) -> None:
    hung, other = plane.spawn_many(2)
    await hang_and_return(plane, hung, other)


@pytest.mark.slow
@pytest.mark.parallel
async def test_without_advisories_the_fleet_loses_a_hung_worker_and_takes_it_back(plain_plane: Plane) -> None:
    hung, other = plain_plane.spawn_many(2)
    await hang_and_return(plain_plane, hung, other)


@pytest.mark.slow
@pytest.mark.parallel
async def test_a_worker_whose_engine_blocks_never_looks_dead(plain_plane: Plane) -> None:
    patch = """
import time
from worker.engines.fake.adapter import FakeEngine
async def blocking(self):
    time.sleep(8)
    return True
FakeEngine.flush_cache = blocking
"""
    busy = plain_plane.spawn(patch=patch)
    client = await plain_plane.client()
    async with changes(client) as queue:
        work = asyncio.create_task(client.call(busy.instance_id, "flush_cache"))
        while not work.done():
            assert (await client.call(busy.instance_id, "state", timeout_s=5)).status == "ok"
            await asyncio.wait([work], timeout=0.3)
        assert (await work).status == "ok"
        assert queue.empty(), "a busy worker left the fleet"
    await plain_plane.until(lambda: _is_open(client, busy.instance_id))


async def test_a_killed_and_restarted_server_loses_no_member(
    own_nats: tuple[NatsServer, Plane], caplog: pytest.LogCaptureFixture
) -> None:
    server, plane = own_nats
    one, two = await plane.client(), await plane.client()
    workers = plane.spawn_many(3)
    views = [await one.view(), await two.view()]
    before = await agreed(plane, views, 3)
    incarnations = {member.incarnation for member in views[0].snapshot()}
    server.kill()
    server.start()
    await plane.until(lambda: all(_revision(view) > before for view in views), 30)
    after = await agreed(plane, views, 3)
    assert after >= before + 3
    assert {member.incarnation for member in views[0].snapshot()} == incarnations
    lost = [record for record in caplog.records if "the connection to NATS is lost" in record.getMessage()]
    assert {record.levelname for record in lost} == {"WARNING"}
    await plane.until(lambda: _all_answer(one, 3))
    doomed = workers[0]
    doomed.kill()
    await plane.until(lambda: all(doomed.instance_id not in _ids(view) for view in views), SWEEP_S)
    assert await agreed(plane, views, 2) == after + 1


def _revision(view: MembershipView) -> int:
    return min((member.revision for member in view.snapshot()), default=0)


async def _all_answer(client: RlClient, count: int) -> bool:
    rows = (await client.call_all("state", empty="ok")).rows
    return len(rows) == count and all(row.status == "ok" for row in rows)


async def seen_and_gone(plane: Plane, *clients: RlClient) -> None:
    """A worker that is killed when all of them have it in their views."""
    worker = plane.spawn()
    for client in clients:
        await client.list_workers()
    worker.kill()


async def lose_the_store(server: NatsServer, plane: Plane) -> None:
    server.kill()
    shutil.rmtree(plane.tmp / "store")
    server.start()


async def test_a_lost_store_never_lets_the_epoch_fall(own_nats: tuple[NatsServer, Plane]) -> None:
    server, plane = own_nats
    one, two = await plane.client(), await plane.client()
    views = [await one.view(), await two.view()]
    for _ in range(3):  # epochs that no living worker has seen
        await seen_and_gone(plane, one, two)
        await agreed(plane, views, 0)
    plane.spawn_many(2)
    await seen_and_gone(plane, one, two)
    before = await agreed(plane, views, 2)
    await lose_the_store(server, plane)
    await plane.until(lambda: all(_revision(view) > before for view in views), 40)
    after = await agreed(plane, views, 2)
    assert after > before
    fresh = await plane.client()
    assert (await fresh.list_workers()).epoch >= after
    assert len(await fresh.list_workers()) == 2
    await plane.until(lambda: _all_answer(one, 2))


async def test_workers_that_make_the_lost_store_anew_know_the_highest_epoch(
    own_nats: tuple[NatsServer, Plane],
) -> None:
    """The views reconnect later than the workers, whose own records are older than the last epoch."""
    server, plane = own_nats
    faults = BusFaults()
    client = await plane.client(connect_bus=faults.connect)
    view = await client.view()
    plane.spawn_many(2)
    await seen_and_gone(plane, client)
    before = await agreed(plane, [view], 2)
    members = client.subjects().members

    async def after_the_workers(bucket: KeyValueBucket) -> None:
        if bucket == members:
            await plane.until(lambda: client.bus.bucket_exists(bucket))

    faults.before_bucket = after_the_workers
    await lose_the_store(server, plane)
    await plane.until(lambda: _revision(view) > before, 40)
    assert await agreed(plane, [view], 2) > before
    assert (await (await plane.client()).list_workers()).epoch > before


async def test_after_a_lost_store_the_fleet_serves_what_it_had_committed(
    own_nats: tuple[NatsServer, Plane],
) -> None:
    server, plane = own_nats
    fleet = await plane.fleet()
    workers = plane.spawn_copies(2)
    body = {"transport": {"backend": "filesystem", "path": str(plane.model(1))}, "version": "step_1"}
    committed = (await fleet.run("update_weights", body))["version"]
    await lose_the_store(server, plane)

    async def served() -> bool:
        out = await fleet.client.call_all("state", empty="ok")
        return len(out.rows) == len(workers) and all(
            row.status == "ok" and row.body["admission"]["open"] and row.body["version"] == committed
            for row in out.rows
        )

    await plane.until(served, 40)
    body = {"transport": {"backend": "filesystem", "path": str(plane.model(2))}, "version": "step_2"}
    reply = await fleet.run("update_weights", body)
    assert reply["version"]["sequence"] == committed["sequence"] + 1
    assert reply["version"]["run"] == committed["run"]
    assert reply["excluded"] == []


async def test_a_second_process_with_the_same_id_takes_the_place_of_the_first(plane: Plane) -> None:
    client = await plane.client()
    first = plane.spawn()
    second = plane.spawn(instance_id=first.instance_id)
    assert await asyncio.to_thread(first.process.wait, 30) == exit_codes.SUPERSEDED
    snapshot = await client.list_workers()
    assert [member.info["pid"] for member in snapshot] == [second.process.pid]
    assert (await client.call(second.instance_id, "state")).status == "ok"


@pytest.mark.slow
@pytest.mark.parallel
async def test_a_worker_that_was_cut_off_does_not_take_its_id_back(plane: Plane) -> None:
    """The worker hung, a supervisor started another process in its place, and then the worker continued."""
    client = await plane.client()
    view = await client.view()
    first = plane.spawn()
    async with changes(client) as queue:
        first.stop()
        await gone(queue, first.instance_id, HUNG_S)
    second = plane.spawn(instance_id=first.instance_id)
    first.go_on()
    assert await asyncio.to_thread(first.process.wait, 30) == exit_codes.SUPERSEDED
    assert second.process.poll() is None
    assert await view.wait_until(lambda now: len(now) == 1, HUNG_S)  # the two may change places more than once
    member = view.member(first.instance_id)
    assert member is not None
    assert member.info["pid"] == second.process.pid


def in_session(session: int) -> list[str]:
    """The processes that a worker has left; each worker is started in a session of its own."""
    left = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = status.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                left.append(status.parent.name)
    return left


async def test_a_killed_worker_leaves_no_child_behind(plane: Plane) -> None:
    worker = plane.spawn()
    assert in_session(worker.process.pid) == [str(worker.process.pid)]
    worker.kill()
    await plane.until(lambda: in_session(worker.process.pid) == [])


async def test_sigterm_leaves_with_exit_code_0_and_no_children(plane: Plane) -> None:
    client = await plane.client()
    worker = plane.spawn()
    async with changes(client) as queue:
        worker.signal(signal.SIGTERM)
        await gone(queue, worker.instance_id, EVENT_S)
    assert await asyncio.to_thread(worker.process.wait, 30) == 0
    assert in_session(worker.process.pid) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_lets_running_generation_end(plane: Plane, number: signal.Signals) -> None:
    client = await plane.client()
    worker = plane.spawn(token_delay_s=0.05)
    receiver = StreamReceiver(client.bus)
    await receiver.start()
    body = {"request": {"prompt_token_ids": [5, 6], "max_tokens": 20}}
    stream = await receiver.open(client.subjects().generate(worker.instance_id), "r1", body)
    tokens: list[int] = []
    async for message in messages_of(stream):
        if "accepted" in message:
            worker.signal(number)
            continue
        tokens += message["delta"]["token_ids"]
    assert len(tokens) == 20
    await receiver.stop()
    assert await asyncio.to_thread(worker.process.wait, 30) == 0


async def test_a_worker_that_is_ending_is_not_opened_again(plane: Plane) -> None:
    client = await plane.client()
    worker = plane.spawn(token_delay_s=0.05)
    stream = Stream(client, worker.instance_id, [5, 6], 1000)
    await stream.more()
    worker.signal(signal.SIGTERM)

    async def leaving() -> bool:
        state = (await client.call(worker.instance_id, "state")).body
        return state["draining"] and "leaving" in state["admission"]["reasons"]

    await plane.until(leaving)
    await client.run("enable", {"workers": [worker.instance_id]})
    assert await leaving()
    with pytest.raises(NotAdmitted):
        await Stream(client, worker.instance_id, [5, 6], 1).end()
    stream.stop()
    assert await asyncio.to_thread(worker.process.wait, 30) == 0


async def test_a_bucket_with_replicas_is_refused(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    """One server makes no replicas, so the configuration is changed on its way here."""
    bus = await Bus.connect(plane.url)
    bucket = Subjects(plane.namespace, "engine").state
    try:
        await bus.ensure_bucket(bucket)
        await bus.ensure_bucket(bucket)
        request = bus._request

        async def replicated(*args: Any, **more: Any) -> dict[str, Any]:
            reply = await request(*args, **more)
            reply.get("config", {})["num_replicas"] = 3
            return reply

        monkeypatch.setattr(bus, "_request", replicated)
        with pytest.raises(Conflict, match="3 replicas") as caught:
            await bus.ensure_bucket(bucket)
        assert caught.value.facts["field"] == "num_replicas"
    finally:
        await bus.close()

"""RlClient against real workers, and against records whose owners never existed."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

import rl_plane.bus.scatter
from rl_plane.bus.connection import CONNECT_TIMEOUT_S, Bus
from rl_plane.client import RlClient
from rl_plane.errors import (
    BusUnreachable,
    DeadlineExceeded,
    InvalidRequest,
    MembershipChanged,
    NotFound,
    NoWorkers,
    PayloadTooLarge,
    PlaneError,
    WorkerLost,
)
from rl_plane.membership.core import Changed, Member
from rl_plane.membership.worker_calls import ASK_AGAIN_S
from rl_plane.protocol.envelope import Reply, decode, encode
from rl_plane.protocol.subjects import MEMBER_PREFIX, Entry, Subjects
from tests.support.hung_node import Node, node_before

if TYPE_CHECKING:
    from nats.aio.msg import Msg

    from rl_plane.bus.server import NatsServer
    from tests.conftest import Plane

UNKNOWN_ID = "0" * 16


async def register(client: RlClient, instance_id: str | None = None) -> str:
    """A member's record without a process."""
    instance_id = instance_id or secrets.token_hex(8)
    member = Member(instance_id, secrets.token_hex(8), "server", 1, 0, {"engine": "none"})
    await client.bus.put(client.subjects().members, MEMBER_PREFIX + instance_id, member.to_record())
    return instance_id


async def test_one_worker_is_asked_strictly(plane: Plane) -> None:
    one, other = plane.spawn_many(2)
    client = await plane.client()
    row = await client.call(one.instance_id, "describe")
    assert row.instance_id == one.instance_id
    assert row.body["engine"] == "fake"
    with pytest.raises(NotFound):
        await client.call(UNKNOWN_ID, "state")
    with pytest.raises(InvalidRequest):
        await client.call("some-name", "state")
    other.kill()
    with pytest.raises((WorkerLost, NotFound)):
        await client.call(other.instance_id, "state")
    assert (await client.call(one.instance_id, "state")).status == "ok"


async def test_each_row_of_a_fan_out_reports_its_own_worker(plane: Plane) -> None:
    fine, hung, dead = plane.spawn_many(3)
    client = await plane.client()
    hung.stop()
    dead.process.kill()
    out = await client.call_all("state", timeout_s=3)
    rows = {row.instance_id: row for row in out.rows}
    assert rows[fine.instance_id].status == "ok"
    assert isinstance(rows[hung.instance_id].error, DeadlineExceeded)
    assert dead.instance_id not in rows or isinstance(rows[dead.instance_id].error, WorkerLost)
    assert out.elapsed_s < 6


async def test_a_dead_worker_is_reported_at_once(plain_plane: Plane) -> None:
    fine, dead = plain_plane.spawn_many(2)
    client = await plain_plane.client()
    dead.kill()
    out = await client.call_all("state", timeout_s=60)
    rows = {row.instance_id: row for row in out.rows}
    assert rows[fine.instance_id].status == "ok"
    assert dead.instance_id not in rows or rows[dead.instance_id].lost
    assert out.elapsed_s < 20


async def test_a_selection_is_asked_in_its_order_and_once(plane: Plane) -> None:
    ids = [worker.instance_id for worker in plane.spawn_many(3)]
    client = await plane.client()
    await client.wait_for(3, 10)
    out = await client.call_all("ping", workers=[ids[2], ids[0], ids[2]])
    assert [row.instance_id for row in out.rows] == [ids[2], ids[0]]
    assert (await client.call_all("ping", workers=[], empty="ok")).rows == []
    with pytest.raises(NotFound):
        await client.call_all("ping", workers=[ids[0], UNKNOWN_ID])


async def test_two_components_of_one_bucket_name_are_distinguished(nats: NatsServer) -> None:
    tag = secrets.token_hex(4)
    async with await RlClient.connect(nats.url, f"{tag}_b", "c"):
        with pytest.raises(InvalidRequest) as caught:
            await RlClient.connect(nats.url, tag, "b_c")
    assert caught.value.facts["field"] == "component"


async def test_another_fleet_than_the_pinned_one_is_an_error_with_both_epochs(plane: Plane) -> None:
    client = await plane.client()
    await register(client)
    pinned = await client.list_workers()
    await register(client)
    with pytest.raises(MembershipChanged) as caught:
        await client.call_all("ping", epoch=pinned.epoch)
    assert (caught.value.before_epoch, caught.value.after_epoch) == (pinned.epoch, pinned.epoch + 1)
    with pytest.raises(MembershipChanged) as caught:
        await client.call_all("ping", fingerprint=pinned.fingerprint)
    assert caught.value.after_epoch == pinned.epoch + 1
    assert caught.value.facts["fingerprint"] == (await client.list_workers()).fingerprint


async def test_a_pinned_fleet_that_changes_during_the_call_is_an_error(plane: Plane) -> None:
    fine, doomed = plane.spawn_many(2)
    client = await plane.client()
    pinned = await client.wait_for(2, 10)
    fine.stop()
    call = asyncio.create_task(
        client.call_all("state", epoch=pinned.epoch, fingerprint=pinned.fingerprint, timeout_s=5)
    )
    doomed.kill()
    with pytest.raises(MembershipChanged) as caught:
        await call
    assert caught.value.facts["fingerprint"] != pinned.fingerprint
    fine.go_on()


async def test_the_caller_decides_what_an_empty_fleet_means(plane: Plane) -> None:
    client = await plane.client()
    with pytest.raises(NoWorkers) as caught:
        await client.call_all("state")
    assert caught.value.facts["fix"]
    out = await client.call_all("state", empty="ok")
    assert (out.rows, len(out.snapshot)) == ([], 0)
    fleet = await plane.fleet()
    with pytest.raises(NoWorkers):
        await fleet.run("state", {"wait_s": 0.1})
    assert (await fleet.run("state", {"min_workers": 0}))["workers"] == []


async def test_waiting_for_workers_has_a_bound(plane: Plane) -> None:
    client = await plane.client()
    with pytest.raises(NoWorkers, match="0 of 2"):
        await client.wait_for(2, 0.2)
    waiting = asyncio.create_task(client.wait_for(2, 10))
    await register(client)
    await register(client)
    assert len(await waiting) == 2


async def test_a_watch_yields_every_change(plane: Plane) -> None:
    client = await plane.client()
    changes = client.watch()
    first = asyncio.ensure_future(anext(changes))
    await asyncio.sleep(0)
    worker = plane.spawn()
    change = await asyncio.wait_for(first, 10)
    assert change.before is None
    assert change.after is not None
    assert change.after.instance_id == worker.instance_id
    worker.kill()
    change = await asyncio.wait_for(anext(changes), 10)
    assert change.after is None


async def all_of(changes: AsyncIterator[Changed]) -> list[Changed]:
    return [change async for change in changes]


async def read_once(client: RlClient, other: RlClient, max_behind: int) -> AsyncIterator[Changed]:
    """A watcher that has read one change, and no more."""
    slow = client.watch(max_behind=max_behind)
    first = asyncio.ensure_future(anext(slow))
    await asyncio.sleep(0)
    await register(other)
    await asyncio.wait_for(first, 10)
    return slow


async def test_a_watcher_that_is_too_slow_ends_alone(plane: Plane) -> None:
    client, other = await plane.client(), await plane.client()
    slow = await read_once(client, other, max_behind=2)
    for _ in range(4):
        await register(other)
    assert len(await client.list_workers()) == 5
    assert len(await client.wait_for(5, 5)) == 5
    with pytest.raises(BusUnreachable):
        await asyncio.wait_for(all_of(slow), 5)


async def test_a_watcher_that_is_behind_delays_no_other(plane: Plane) -> None:
    """The change that the watcher misses still ends a wait for a fleet of that size."""
    client, other = await plane.client(), await plane.client()
    slow = await read_once(client, other, max_behind=1)
    view = await client.view()
    later: list[Changed] = []
    view.listen(later.append)
    waiting = asyncio.create_task(client.wait_for(4, 10))
    for _ in range(3):
        await register(other)
    assert len(await waiting) == 4
    assert len([change for change in later if change.before is None]) == 3
    with pytest.raises(BusUnreachable, match="1 changes behind"):
        await asyncio.wait_for(all_of(slow), 5)


class Deaf:
    """A member that answers its n-th message only."""

    def __init__(self, client: RlClient, instance_id: str, answers_at: int) -> None:
        self.heard = 0
        self._client = client
        self._id = instance_id
        self._answers_at = answers_at

    async def start(self) -> None:
        await self._client.bus.subscribe(self._client.subjects().read(self._id), self._message)
        await self._client.bus.flush()

    async def _message(self, message: Msg) -> None:
        request = decode(message.data)
        if request["op"] == "ping":
            await message.respond(encode(Reply("ping", instance_id=self._id).to_wire()))
            return
        self.heard += 1
        if self.heard == self._answers_at:
            await message.respond(encode(Reply(request["op"], body={"n": self.heard}).to_wire()))


async def test_a_fan_out_asks_silent_workers_again(plane: Plane) -> None:
    client, server = await plane.client(), await plane.client()
    slow, quick = await register(client), await register(client)
    deaf, prompt = Deaf(server, slow, 2), Deaf(server, quick, 1)
    await deaf.start()
    await prompt.start()
    await client.wait_for(2, 5)
    out = await client.call_all("state", timeout_s=2 * ASK_AGAIN_S)
    assert {row.instance_id: row.body for row in out.rows} == {slow: {"n": 2}, quick: {"n": 1}}
    assert (deaf.heard, prompt.heard) == (2, 1)
    out = await client.call_all("state", workers=[slow], timeout_s=0.2)
    assert isinstance(out.rows[0].error, DeadlineExceeded)


@pytest.mark.parametrize("change", ["it has died", "it has lost its connection"])
async def test_a_change_during_a_large_fan_out_is_not_missed(
    change: str, plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fan-out waits for no dead worker, and asks a worker again that may have missed the request."""
    monkeypatch.setattr(rl_plane.bus.scatter, "YIELD_EVERY", 1)
    client, server = await plane.client(), await plane.client()
    died, instance_id = change == "it has died", await register(client)
    deaf = Deaf(server, instance_id, 2)
    await deaf.start()
    await client.wait_for(1, 5)
    view = await client.view()
    member = view.member(instance_id)
    assert member is not None

    def told() -> None:
        entry = Entry(MEMBER_PREFIX + instance_id, None if died else member.to_record(), view.snapshot().epoch + 1)
        view._carry_out(view._core.feed(entry))

    asyncio.get_running_loop().call_soon(told)  # in the loop's next turn: when one was sent
    async with asyncio.timeout(10):
        (row,) = (await client.call_all("state", timeout_s=300)).rows
    assert isinstance(row.error, WorkerLost) if died else row.body == {"n": 2}


async def test_a_reply_that_cannot_be_read_is_that_workers_error(plane: Plane) -> None:
    client, server = await plane.client(), await plane.client()
    bad = await register(client)

    async def nonsense(message: Msg) -> None:
        await message.respond(b"\xc1\xc1")

    await server.bus.subscribe(server.subjects().read(bad), nonsense)
    await server.bus.flush()
    await client.wait_for(1, 5)
    out = await client.call_all("state", timeout_s=30)
    assert out.rows[0].error is not None
    assert out.rows[0].error.code == "engine_failed"


@pytest.mark.parametrize("op", ["state", "pause"])
@pytest.mark.parametrize("timeout_s", [math.nan, math.inf, -1.0, 0.0])
async def test_a_time_out_that_is_none_is_refused(plane: Plane, op: str, timeout_s: float) -> None:
    client = await plane.client()
    await register(client)
    with pytest.raises(InvalidRequest) as caught:
        async with asyncio.timeout(3):
            await client.call_all(op, timeout_s=timeout_s)
    assert caught.value.facts["field"] == "timeout_s"


@pytest.mark.parametrize("timeout_s", [math.nan, -1.0])
async def test_a_wait_that_is_none_is_refused(plane: Plane, timeout_s: float) -> None:
    client = await plane.client()
    with pytest.raises(InvalidRequest) as caught:
        async with asyncio.timeout(3):
            await client.wait_for(5, timeout_s)
    assert caught.value.facts["field"] == "timeout_s"


@pytest.mark.parametrize(
    ("op", "body", "field"),
    [
        ("stat", None, "op"),
        ("state", {"x": 1}, "x"),
        ("pause", {"mode": "off"}, "mode"),
        ("drain", {"timeout_s": -1}, "timeout_s"),
    ],
)
async def test_the_client_refuses_bad_input_before_it_asks_a_worker(
    plane: Plane, op: str, body: dict[str, object] | None, field: str
) -> None:
    client = await plane.client()
    await register(client)  # would not answer
    with pytest.raises(InvalidRequest) as caught:
        await client.call_all(op, body, timeout_s=30)
    assert caught.value.facts["field"] == field


async def test_the_client_refuses_a_missing_field_before_it_asks_a_worker(plane: Plane) -> None:
    client = await plane.client()
    await register(client)
    with pytest.raises(InvalidRequest) as caught:
        async with asyncio.timeout(5):
            await client.call_all("prepare_update", timeout_s=30)
    assert caught.value.facts["field"] == "update_id"


async def test_a_body_over_the_limit_is_refused_and_the_connection_stays(plane: Plane) -> None:
    client = await plane.client()
    await register(client)
    with pytest.raises(PayloadTooLarge) as caught:
        await client.call_all("abort_requests", {"request_ids": ["x" * 1_100_000]})
    assert caught.value.http_status == 413
    assert len(await client.list_workers()) == 1


async def test_names_are_checked_before_anything_is_opened() -> None:
    for names in (("a.b", "c"), ("a", "c d"), ("", "c"), ("a", "x" * 65), ("a", "*"), ("a", ">")):
        with pytest.raises(InvalidRequest):
            await RlClient.connect("nats://127.0.0.1:1", *names)


async def test_a_component_without_members_is_not_found(plane: Plane) -> None:
    client = await plane.client()
    with pytest.raises(NotFound) as caught:
        await client.list_workers("typo")
    assert caught.value.facts["field"] == "component"
    fleet = await plane.fleet()
    with pytest.raises(NotFound):
        await fleet.run("state", {"component": "typo"})
    with pytest.raises(InvalidRequest):
        await fleet.run("state", {"component": "not a name"})


@pytest.mark.parametrize("url", ["nats://127.0.0.1:1", "nats://no-such-host.invalid:4222"])
async def test_an_unreachable_server_is_reported_within_the_bound(url: str) -> None:
    assert CONNECT_TIMEOUT_S <= 5
    start = time.monotonic()
    with pytest.raises(BusUnreachable) as caught:
        await RlClient.connect(url, wait_s=1)
    assert time.monotonic() - start < CONNECT_TIMEOUT_S
    assert url in caught.value.message
    assert caught.value.facts["fix"]


@pytest.mark.parametrize(
    "url",
    ["nats://127.0.0.1:notaport", "nats://127.0.0.1:99999", "http://127.0.0.1:4222", "", "nats://", "nats://[::1"],
)
async def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await RlClient.connect(url)
    assert caught.value.facts["field"] == "nats_url"
    assert caught.value.facts["fix"]


async def test_a_lost_connection_is_reported_at_once(plane: Plane) -> None:
    client = await plane.client()
    await register(client)
    await client.close()
    for call in (client.call_all("state"), client.list_workers()):
        with pytest.raises(PlaneError):
            async with asyncio.timeout(5):
                await call


HUNG_BOUND_S = 30.0
"""Several times what a node that hangs may cost, on a busy machine."""
MUCH = bytes(1_000_000)
MANY = 24
"""So many of them are more than the kernel takes for a node that hangs, and nats-py's own buffer."""


@pytest.fixture
async def node(nats: NatsServer) -> AsyncIterator[Node]:
    async with node_before(nats.url) as node:
        yield node


@asynccontextmanager
async def publishing(
    bus: Bus, count: int = MANY, payload: bytes = MUCH
) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Publishers, some of whom have bytes that the server does not take."""
    publishers = [asyncio.create_task(bus.nc.publish("unheard", payload)) for _ in range(count)]
    try:
        async with asyncio.timeout(HUNG_BOUND_S):
            while not unsent(bus):  # noqa: ASYNC110 - it causes no event
                await asyncio.sleep(0.01)
        yield publishers
    finally:
        for publisher in publishers:
            publisher.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HUNG_BOUND_S):
                await asyncio.gather(*publishers, return_exceptions=True)


def unsent(bus: Bus) -> int:
    return int(bus.nc._transport._io_writer.transport.get_write_buffer_size())


@pytest.mark.parametrize("each", [1, 100])
async def test_a_node_that_hangs_with_bytes_unsent_is_left_for_another(node: Node, each: int) -> None:
    """`each`: in so many parts, by so many more publishers."""
    bus = await Bus.connect(node.url, ping_interval_s=1.0)
    back = asyncio.Event()

    async def reconnected() -> None:
        back.set()

    bus.on_reconnect(reconnected)
    node.hang()
    many = publishing(bus, MANY * each, MUCH[::each])
    async with many as publishers, asyncio.timeout(HUNG_BOUND_S):
        await back.wait()
        await asyncio.gather(*publishers, return_exceptions=True)
        await bus.flush()
    await bus.close()


async def test_a_fan_out_to_a_node_that_hangs_ends(node: Node) -> None:
    bus = await Bus.connect(node.url, ping_interval_s=1.0)
    fan_outs = rl_plane.bus.scatter.Gather(bus)
    await fan_outs.start_listening()
    node.hang(others_listen=False)
    async with publishing(bus), asyncio.timeout(HUNG_BOUND_S):
        with pytest.raises(BusUnreachable):
            await fan_outs.run([("unheard", MUCH)] * MANY, HUNG_BOUND_S)
        await bus.close()


async def test_no_request_waits_longer_for_a_node_that_hangs_with_bytes_unsent(node: Node) -> None:
    bus = await Bus.connect(node.url, ping_interval_s=60.0)  # no PING finds the hung node meanwhile
    members = Subjects("rl", "engine").members
    await bus.ensure_bucket(members)
    node.hang()
    async with publishing(bus) as publishers, asyncio.timeout(HUNG_BOUND_S):
        last = publishers[-1]
        assert not last.done()
        last.cancel()
        await asyncio.wait([last])
        assert last.cancelled(), "a worker that gets SIGTERM does"
        with pytest.raises(BusUnreachable):
            await bus.get(members, "any")
        await asyncio.gather(*publishers, return_exceptions=True)
        assert unsent(bus), "the node hangs still"
        await bus.close()


async def test_a_death_under_an_unpinned_changing_call_is_no_error(plane: Plane) -> None:
    fleet = await plane.fleet()
    doomed, other = plane.spawn_many(2)
    await fleet.client.wait_for(2, 10)
    doomed.stop()
    pausing = asyncio.create_task(fleet.run("pause"))

    async def reached() -> bool:
        return bool((await fleet.client.call(other.instance_id, "state")).body["pause"]["paused"])

    await plane.until(reached)
    doomed.kill()
    reply = await pausing
    assert [row["instance_id"] for row in reply["workers"]] == [other.instance_id]


async def test_a_death_under_a_changing_call_to_that_worker_is_its_error(plane: Plane) -> None:
    fleet = await plane.fleet()
    doomed, other = plane.spawn_many(2)
    await fleet.client.wait_for(2, 10)
    doomed.stop()
    body = {"workers": [doomed.instance_id, other.instance_id]}
    pausing = asyncio.create_task(fleet.run("pause", body))

    async def reached() -> bool:
        return bool((await fleet.client.call(other.instance_id, "state")).body["pause"]["paused"])

    await plane.until(reached)
    doomed.kill()
    with pytest.raises(PlaneError) as caught:
        await pausing
    assert caught.value.http_status in (409, 503)
    rows = {row["instance_id"]: row["status"] for row in caught.value.facts["workers"]}
    assert rows == {doomed.instance_id: "error", other.instance_id: "ok"}


async def test_liveness_and_ready_ask_the_engines(plane: Plane) -> None:
    fleet = await plane.fleet()
    plane.spawn()
    await fleet.client.wait_for(1, 10)
    assert (await fleet.run("liveness"))["alive"]
    assert (await fleet.run("ready"))["ready"]
    stuck = plane.spawn(hang_liveness="true")
    await fleet.client.wait_for(2, 10)
    fleet.liveness_timeout_s = 2
    for op in ("liveness", "ready"):
        with pytest.raises(PlaneError) as caught:
            await fleet.run(op)
        assert caught.value.http_status == 503
    rows = {row["instance_id"]: row["status"] for row in caught.value.facts["workers"]}
    assert rows[stuck.instance_id] == "error"
    assert sorted(rows.values()) == ["error", "ok"]

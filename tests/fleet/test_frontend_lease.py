"""The frontend's serving lease: pure, and on a real NATS: listed, informed, lost and found again."""

from __future__ import annotations

import asyncio
import secrets
import shutil
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from frontend.frontend_limits import LIMITS, FrontendLimits
from frontend.routing.routing_lease import FrontendLease
from frontend.served_component import ServedComponent
from rl_plane.bus.server import NatsServer
from rl_plane.errors import BusUnreachable, NotAdmitted
from rl_plane.protocol.generation import GenerateDelta, GenerateRequest
from rl_plane.protocol.record import SERVING_LEASE_S, first_record
from rl_plane.protocol.serving_lease import ServingLease
from rl_plane.protocol.subjects import FRONTEND_PREFIX, RECORD
from tests.support.committed_records import record
from tests.support.faulty_bus import BusFaults
from tests.support.lease_calls import BOUND_S, follow, listed, running, scripted, tell
from tests.support.scripted_worker import decide

if TYPE_CHECKING:
    from tests.conftest import Plane

HERE, THERE = ("server", 1), ("server", 2)


# ---- pure ----


def test_a_lease_runs_from_before_the_question() -> None:
    lease = ServingLease()
    assert not lease.holds(0.0, HERE)
    lease.confirm(10.0, HERE)
    assert lease.holds(10.0, HERE)
    assert lease.holds(9.99 + SERVING_LEASE_S, HERE)
    assert not lease.holds(10.0 + SERVING_LEASE_S, HERE)


def test_a_lease_is_good_on_its_own_connection_only() -> None:
    lease = ServingLease()
    lease.confirm(10.0, HERE)
    assert not lease.holds(10.0, THERE)
    lease.confirm(11.0, THERE)
    assert lease.holds(11.0, THERE)
    assert not lease.holds(11.0, HERE)
    lease.confirm(10.5, HERE)  # asked before the connection broke, and heard only now
    assert lease.holds(11.0, THERE)
    lease.give_up()
    assert not lease.holds(11.0, THERE)


async def test_the_next_confirmation_wakes_every_waiting_call() -> None:
    bus: Any = SimpleNamespace(nc=SimpleNamespace(is_connected=True), identity=HERE)
    view: Any = SimpleNamespace(bus=bus)
    lease, loop = FrontendLease(view, "f"), asyncio.get_running_loop()
    waiting = [asyncio.create_task(lease.wait(loop.time() + BOUND_S)) for _ in range(2)]
    await asyncio.sleep(0)
    lease.confirm(loop.time(), HERE)
    async with asyncio.timeout(1.0):
        await asyncio.gather(*waiting)
    bus.identity = THERE
    with pytest.raises(NotAdmitted):
        await lease.wait(loop.time() + 0.001)


def test_the_bounds_fit_together() -> None:
    assert 2 * LIMITS.confirm_interval_s < SERVING_LEASE_S, "one confirmation may be lost"
    assert LIMITS.lease_key_ttl_s > SERVING_LEASE_S, "a frontend that may still route is listed"


# ---- on NATS ----


async def ask(one: ServedComponent, **more: Any) -> list[int]:
    request = GenerateRequest(id=secrets.token_hex(8), prompt="hi", **more)
    return [
        token
        async for event in one.engines.generate(request)
        if isinstance(event, GenerateDelta)
        for token in event.token_ids
    ]


async def test_a_frontend_that_delivers_tokens_is_listed_until_it_ends(plane: Plane) -> None:
    client = await plane.client()
    async with running(plane) as one, running(plane, rl_port=0, http_port=None, dialects=()) as other:
        assert one.lease.holds()
        assert await listed(client) == [one.lease.frontend_id]
        assert not other.lease.holds()
        assert (one.about()["serving_lease"], other.about()["serving_lease"]) == (True, None)
    assert await listed(client) == []


async def test_a_frontend_that_vanishes_leaves_the_list_by_itself(plane: Plane) -> None:
    client = await plane.client()
    view = await (await plane.client("frontend")).view()
    gone = FrontendLease(view, "0" * 16, FrontendLimits(lease_key_ttl_s=3))
    await gone.start()
    await view.bus.close()
    assert await listed(client) == ["0" * 16]

    async def nobody() -> bool:
        return await listed(client) == []

    await plane.until(nobody)


async def test_a_frontend_listens_before_it_is_listed_and_asks_for_its_lease_last(plane: Plane) -> None:
    """A coordinator that finds the frontend in the list can reach it. A coordinator that does not find it decided
    before the frontend asked."""
    client, faults = await plane.client(), BusFaults()
    view = await (await plane.client("frontend", connect_bus=faults.connect)).view()
    one = FrontendLease(view, "0" * 16)
    steps: list[str] = []

    async def before_put(key: str) -> None:
        if key.startswith(FRONTEND_PREFIX):
            reply = await tell(client, "0" * 16, follow(first_record("blake3:0"), 1))
            steps.append(f"told {reply['status']}")

    async def after_put(key: str) -> None:
        if key.startswith(FRONTEND_PREFIX):
            steps.append(f"listed {not one.holds()}")

    async def before_get(key: str) -> None:
        if key == RECORD:
            steps.append(f"asks {await listed(client) == ['0' * 16]}")

    faults.before_put, faults.after_put, faults.before_get = before_put, after_put, before_get
    await one.start()
    assert steps == ["told ok", "listed True", "asks True"]
    assert one.holds()
    await one.stop()


async def test_a_frontend_follows_a_decision_that_a_coordinator_sends(plane: Plane) -> None:
    client = await plane.client()
    async with running(plane) as one:
        name = one.lease.frontend_id
        reply = await tell(client, name, follow(record(1), 100))
        assert (reply["status"], reply["body"], reply["op"], reply["id"]) == (
            "ok",
            {"sequence": 1},
            "follow_record",
            "x",
        )
        assert reply["instance_id"] == reply["incarnation"] == name
        assert (one.view.record, one.committed.sequence) == (record(1), 1)
        closed = replace(record(1, a=2), open=False)
        reply = await tell(client, name, follow(closed, 101), "json")
        assert (reply["status"], reply["body"]) == ("ok", {"sequence": 2})
        assert one.view.record == closed
        # What it knows already is newer.
        reply = await tell(client, name, follow(record(1), 100))
        assert (reply["status"], reply["body"]) == ("ok", {"sequence": 2})
        assert one.view.record == closed
        assert one.committed.history.count == 2


@pytest.mark.parametrize(
    ("wire", "code"),
    [
        (b"\xc1", "invalid_request"),
        ({"body": {}}, "invalid_request"),
        ({"op": "follow_record"}, "invalid_request"),
        ({"op": "follow_record", "body": {"record": {}, "sequence": 1}}, "invalid_request"),
        (
            {"op": "follow_record", "body": {"record": {**record(1).to_wire(), "x": 1}, "sequence": 1}},
            "invalid_request",
        ),
        (
            {"op": "follow_record", "body": {"record": {**record(1).to_wire(), "made": 3}, "sequence": 1}},
            "invalid_request",
        ),
        ({"op": "follow_record", "body": {"record": record(1).to_wire(), "sequence": -1}}, "invalid_request"),
        ({"op": "pause", "body": {}}, "unsupported"),
    ],
)
async def test_a_frontend_refuses_an_invalid_decision(plane: Plane, wire: Any, code: str) -> None:
    client = await plane.client()
    async with running(plane) as one:
        reply = await tell(client, one.lease.frontend_id, wire)
        assert (reply["status"], reply["error"]["code"]) == ("error", code)
        assert one.view.record is None


async def test_without_a_lease_requests_wait_for_it(plane: Plane) -> None:
    """The store answers nothing, because its stream is gone."""
    client = await plane.client()
    async with running(plane, admission_wait_s=0.5) as one, scripted(plane, record(1), 7):
        await decide(client.bus, client.subjects(), record(1))
        await plane.until(lambda: one.status.admitted())
        assert await ask(one) == [7]
        await client.bus.nc.jetstream().delete_stream(client.subjects().state.stream)
        await plane.until(lambda: not one.lease.holds())
        assert one.status.admitted()
        with pytest.raises(NotAdmitted) as caught:
            await ask(one)
        assert caught.value.facts["retry_after_s"]
        waiting = asyncio.create_task(ask(one))
        await asyncio.sleep(0)
        await client.bus.ensure_bucket(client.subjects().state)
        assert await waiting == [7]


async def test_a_connection_that_breaks_takes_the_lease_with_it(own_nats: tuple[NatsServer, Plane]) -> None:
    server, plane = own_nats
    client = await plane.client()
    async with running(plane) as one, scripted(plane, record(1), 7, 8):
        await decide(client.bus, client.subjects(), record(1))
        await plane.until(lambda: one.status.admitted())
        before = one.client.bus.identity
        server.kill()
        await plane.until(lambda: not one.lease.holds())
        waiting = asyncio.create_task(ask(one))
        await asyncio.sleep(0)
        server.start()
        assert await waiting == [7, 8]
        assert one.client.bus.identity != before
        assert one.lease.holds()
        assert await listed(client) == [one.lease.frontend_id]


async def test_a_question_that_was_lost_with_its_connection_is_not_waited_for(
    own_nats: tuple[NatsServer, Plane],
) -> None:
    server, plane = own_nats
    stuck, faults = asyncio.Event(), BusFaults()

    async def lost(key: str) -> None:
        if key.startswith(FRONTEND_PREFIX) and not stuck.is_set():
            stuck.set()
            await asyncio.Event().wait()

    async with running(plane, faults.connect) as one:
        faults.before_put = lost
        async with asyncio.timeout(BOUND_S):
            await stuck.wait()
        server.kill()
        server.start()
        await plane.until(one.lease.holds)


async def test_a_store_that_lost_writes_does_not_set_a_frontend_back(own_nats: tuple[NatsServer, Plane]) -> None:
    server, plane = own_nats
    client = await plane.client()
    async with running(plane) as one, scripted(plane, record(2), 7) as worker:
        await decide(client.bus, client.subjects(), record(2))
        await plane.until(lambda: one.view.record == record(2))
        server.kill()
        shutil.rmtree(plane.tmp / "store")
        server.start()
        await plane.until(lambda: client.bus.nc.is_connected)

        async def old_one_is_there() -> bool:
            try:
                return bool(await decide(client.bus, client.subjects(), record(1)))
            except BusUnreachable:
                return False

        await plane.until(old_one_is_there)
        await plane.until(one.lease.holds)
        await one.view.read_record()
        assert one.view.record == record(2)
        written = await decide(client.bus, client.subjects(), record(2))  # a worker writes it back
        await one.view.read_record()
        assert (one.view.record, one.view.record_sequence) == (record(2), written)
        await worker.register()
        await plane.until(lambda: one.status.admitted())
        assert await ask(one) == [7]
        assert worker.requests[-1]["sequence"] == 2


async def test_a_request_goes_out_under_what_was_decided_last(plane: Plane) -> None:
    """While two states are served the worker decides. While one is served, the worker must hold it whole."""
    client = await plane.client()
    async with running(plane) as one, scripted(plane, record(1), 7) as worker:
        for number, (decided, sent) in enumerate(
            [
                (record(1), 1),
                (replace(record(1, a=2), rolling_from=record(1).held), None),
                (record(1, a=2), 2),
            ]
        ):
            await worker.hold(decided)
            await tell(client, one.lease.frontend_id, follow(decided, 100 + number))
            assert await ask(one) == [7]
            assert worker.requests[-1]["sequence"] == sent

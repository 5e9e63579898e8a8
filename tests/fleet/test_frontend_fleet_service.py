"""The fleet subject: the facade's twin, from any NATS client."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgpack
import pytest_asyncio

from frontend.facade.nats_service import FleetService
from frontend.facade.op_runner import OpRunner
from frontend.frontend_limits import LIMITS, FrontendLimits
from frontend.server.options import FrontendOptions
from rl_plane.bus.connection import Bus
from rl_plane.fleet.fleet import Fleet
from rl_plane.protocol.envelope import MAX_MESSAGE_BYTES
from tests.support.frontend_here import started

if TYPE_CHECKING:
    from tests.conftest import Plane

UNKNOWN_ID = "0123456789abcdef"


class Service:
    """A service that knows nothing of us but one subject."""

    def __init__(self, bus: Bus, subject: str) -> None:
        self.bus = bus
        self.subject = subject

    async def send(self, data: bytes) -> bytes:
        return bytes((await self.bus.nc.request(self.subject, data, timeout=20)).data)

    async def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        reply: dict[str, Any] = json.loads(await self.send(json.dumps({"op": op, **fields}).encode()))
        return reply


@pytest_asyncio.fixture
async def service(plane: Plane) -> AsyncIterator[Service]:
    async with service_of(plane) as one:
        yield one


@asynccontextmanager
async def service_of(plane: Plane, limits: FrontendLimits = LIMITS) -> AsyncIterator[Service]:
    """Starts two frontends without any listener. Both answer on one subject."""
    options = FrontendOptions(
        plane.url, plane.namespace, plane.component, rl_port=None, http_port=None, limits=limits
    )
    async with started(options), started(options):
        bus = await Bus.connect(plane.url, "a service")
        yield Service(bus, f"{plane.namespace}.{plane.component}.fleet")
        await bus.close()


async def test_a_reply_over_nats_is_merged_and_in_the_callers_format(plane: Plane, service: Service) -> None:
    one, two = plane.spawn_many(2)
    await service.ask("state", body={"min_workers": 2})
    reply = await service.ask("pause", body={"mode": "keep"}, id="call 1")
    assert reply.keys() == {"v", "id", "op", "status", "body"}
    assert (reply["v"], reply["id"], reply["op"], reply["status"]) == (1, "call 1", "pause", "ok")
    assert {row["pause_state"] for row in reply["body"]["workers"]} == {"paused"}
    packed = await service.send(msgpack.packb({"op": "resume", "targets": [one.instance_id]}))
    rows = msgpack.unpackb(packed)["body"]["workers"]
    assert [row["instance_id"] for row in rows] == [one.instance_id]
    states = (await service.ask("state"))["body"]["workers"]
    assert {row["instance_id"]: row["pause_state"] for row in states} == {
        one.instance_id: "running",
        two.instance_id: "paused",
    }


async def test_only_one_of_two_frontends_answers_a_call(plane: Plane, service: Service) -> None:
    plane.spawn()
    answers: list[bytes] = []
    enough = asyncio.Event()

    async def collect(message: Any) -> None:
        answers.append(message.data)
        if len(answers) == 20:
            enough.set()

    inbox = service.bus.nc.new_inbox()
    await service.bus.subscribe(inbox, collect)
    for number in range(20):
        await service.bus.nc.publish(
            service.subject, json.dumps({"op": "state", "id": str(number)}).encode(), reply=inbox
        )
    async with asyncio.timeout(20):
        await enough.wait()
    await service.ask("state")
    assert sorted(int(json.loads(answer)["id"]) for answer in answers) == list(range(20))


async def test_the_envelope_pins_the_fleet(plane: Plane, service: Service) -> None:
    plane.spawn()
    now = (await service.ask("state"))["body"]
    pinned = await service.ask("state", epoch=now["epoch"], fingerprint=now["fingerprint"])
    assert pinned["status"] == "ok"
    reply = await service.ask("pause", epoch=now["epoch"] + 7)
    assert (reply["status"], reply["error"]["code"]) == ("error", "membership_changed")
    assert reply["error"]["after_epoch"] == now["epoch"]
    assert reply["fingerprint"] == now["fingerprint"]


BAD: list[tuple[bytes, str, str]] = [
    (b"", "invalid_request", "body"),
    (b"\xc1", "invalid_request", "body"),
    (b"{", "invalid_request", "body"),
    (b'{"op": "state", "body": {"wait_s": NaN}}', "invalid_request", "body"),
    (b'{"op": "state", "op": "pause"}', "invalid_request", "body"),
    (b"[1]", "invalid_request", "body"),
    (b"{}", "invalid_request", "op"),
    (b'{"op": "fly"}', "invalid_request", "op"),
    (b'{"op": "state", "v": 2}', "invalid_request", "v"),
    (b'{"op": "state", "what": 1}', "invalid_request", "what"),
    (b'{"op": "state", "body": []}', "invalid_request", "body"),
    (b'{"op": "state", "body": {"what": 1}}', "invalid_request", "what"),
    (b'{"op": "state", "targets": "all"}', "invalid_request", "targets"),
    (b'{"op": "state", "targets": [1]}', "invalid_request", "targets.0"),
    (b'{"op": "state", "epoch": true}', "invalid_request", "epoch"),
    (b'{"op": "pause", "fence": 5}', "invalid_request", "fence"),
    (b'{"op": "pause", "body": {"mode": "hard"}}', "invalid_request", "mode"),
    (b'{"op": "pause", "timeout_ms": "1"}', "invalid_request", "timeout_ms"),
    (b'{"op": "state", "targets": ["%s"]}' % UNKNOWN_ID.encode(), "not_found", "workers"),
    (b'{"op": "pause", "body": {"component": "unknown"}}', "not_found", "component"),
    (msgpack.packb({"op": "fly"}), "invalid_request", "op"),
    (msgpack.packb({1: 2}), "invalid_request", "body"),
]


async def test_bad_input_gets_a_typed_error_in_kind(plane: Plane, service: Service) -> None:
    plane.spawn()
    await service.ask("state", body={"min_workers": 1})
    for data, code, field in BAD:
        answer = await service.send(data)
        reply = json.loads(answer) if data[:1] == b"{" else msgpack.unpackb(answer)
        assert (data, reply["status"], reply["error"]["code"]) == (data, "error", code)
        assert (data, reply["error"].get("field")) == (data, field)
    assert (await service.ask("state"))["body"]["pause_state"] == "running"


async def test_without_a_reply_subject_it_is_done_all_the_same(plane: Plane, service: Service) -> None:
    plane.spawn()
    await service.bus.nc.publish(service.subject, b'{"op": "pause"}')

    async def paused() -> bool:
        return bool((await service.ask("state"))["body"]["pause_state"] == "paused")

    await plane.until(paused)


async def test_equal_ids_are_one_update(plane: Plane, service: Service) -> None:
    plane.spawn(stage_delay_s=0.3)
    await service.ask("state", body={"min_workers": 1})
    body = {"transport": {"backend": "filesystem", "path": str(plane.model(1))}, "version": "s1"}
    first = await service.ask("update_weights", body=body, id="one")
    again = await service.ask("update_weights", body=body, id="one")
    assert first["body"]["version"] == again["body"]["version"]
    assert first["body"]["version"]["sequence"] == 1


@asynccontextmanager
async def answering(plane: Plane, answer: Callable[[], Awaitable[dict[str, Any]]]) -> AsyncIterator[Service]:
    """A fleet subject whose ops give this answer. It ends without a grace."""

    class Answering(Fleet):
        async def run(self, *args: Any, **more: Any) -> dict[str, Any]:
            return await answer()

    client = await plane.client()
    subject = client.subjects().fleet
    service = FleetService(client.bus, subject, OpRunner(Answering(client)))
    await service.start()
    yield Service((await plane.client("a service")).bus, subject)
    await service.stop(grace_s=0.0)


async def test_a_reply_too_large_for_nats_is_a_typed_error(plane: Plane) -> None:
    async def large() -> dict[str, Any]:
        return {"status": "ok", "workers": ["x" * MAX_MESSAGE_BYTES]}

    async with answering(plane, large) as service:
        reply = await service.ask("state", id="big")
    assert (reply["id"], reply["error"]["code"]) == ("big", "payload_too_large")
    assert reply["error"]["call_status"] == "ok"


async def test_a_call_that_the_end_cuts_is_answered(plane: Plane) -> None:
    begun = asyncio.Event()

    async def never() -> dict[str, Any]:
        begun.set()
        await asyncio.Event().wait()
        return {}

    async with answering(plane, never) as service:
        asking = asyncio.create_task(service.ask("update_weights", id="cut"))
        await begun.wait()
    reply = await asking
    assert (reply["id"], reply["error"]["code"], reply["error"]["retry_after_s"]) == ("cut", "unavailable", 1.0)


async def test_calls_under_way_are_bounded(plane: Plane) -> None:
    async with service_of(plane, FrontendLimits(fleet_calls=0)) as service:
        reply = await service.ask("state")
    assert (reply["error"]["code"], reply["error"]["retry_after_s"]) == ("unavailable", 1.0)


async def test_an_unexpected_error_is_answered_without_its_insides(plane: Plane) -> None:
    async def broken() -> dict[str, Any]:
        raise RuntimeError("a secret path")

    start = time.monotonic()
    async with answering(plane, broken) as service:
        reply = await service.ask("state")
    assert reply["error"]["code"] == "internal"
    assert "secret" not in json.dumps(reply)
    assert time.monotonic() - start < 10

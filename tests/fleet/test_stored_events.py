"""Events outlive the frontend that reported them."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from collections.abc import Callable
from typing import Any, cast

import pytest
from nats.aio.msg import Msg

from frontend.facade.kept_events import FleetEvent
from frontend.facade.stored_events import CHUNK_EVENTS, CHUNKS, EVENT_BYTES, StoredEvents
from rl_plane.bus.connection import Bus
from rl_plane.bus.server import NatsServer
from rl_plane.cli import main
from rl_plane.errors import PermissionDenied
from rl_plane.protocol.subjects import KeyValueBucket, Subjects
from tests.conftest import Plane
from tests.support.started_command import BACK_S, READY_S, Started, eventually, start

__all__ = ["start"]


async def test_a_frontend_that_is_killed_leaves_its_events_to_the_next_one(
    plane: Plane, start: Callable[..., Started], capsys: pytest.CaptureFixture[str]
) -> None:
    where = ("--nats-url", plane.url, "--namespace", plane.namespace, "--component", plane.component)
    argv = ("frontend", "--rl-port", "0", "--http-port", "off", *where)
    worker = plane.spawn()
    first = start(*argv)
    url = first.line(READY_S, ready="frontend")["rl_url"]
    model = plane.model(1)
    assert main.run(["update", str(model), "--version", "step_1", "--url", url]) == 0
    capsys.readouterr()

    before = _events(url, capsys)
    client = await plane.client()
    last = b'"id":%d' % before[-1]["id"]

    async def is_stored() -> bool:
        entries = await client.bus.list_keys(plane_bucket(plane), ">")
        return any(last in (entry.value or b"") for entry in entries)

    await plane.until(is_stored, BACK_S)
    first.process.kill()
    first.process.wait()
    second = start(*argv)
    url = second.line(READY_S, ready="frontend")["rl_url"]
    after = _events(url, capsys)
    assert after[: len(before)] == before
    assert {"update", "admission"} <= {one["event"] for one in before}
    repeated = [one for one in after[len(before) :] if one["event"] == "admission"]
    assert repeated == [], "nothing has changed at the worker"
    ids = [one["id"] for one in after]
    assert ids == sorted(set(ids))
    worker.kill()
    eventually(lambda: _events(url, capsys)[-1].get("change") == "left", READY_S, "the worker has not left")


def _events(url: str, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    assert main.run(["events", "--since", "1h", "--url", url, "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def event(number: int, text: str = "") -> FleetEvent:
    return FleetEvent(number, 1.0 + number / 1e6, "op", {"number": number, "text": text})


async def stored_by(bus: Bus, bucket: KeyValueBucket) -> list[FleetEvent]:
    """Returns the events that the next frontend reads."""
    reader = StoredEvents(bus, bucket, "reader")
    events = await reader.start()
    await reader.stop()
    return events


async def test_chunks_are_bounded_and_the_newest_stay(plane: Plane) -> None:
    count = (CHUNKS - 1) * CHUNK_EVENTS + CHUNK_EVENTS // 2
    total = count + CHUNK_EVENTS + CHUNK_EVENTS // 2
    bus = (await plane.client()).bus
    bucket = plane_bucket(plane)
    writer = StoredEvents(bus, bucket, "one")
    assert await writer.start() == []
    for number in range(count):
        writer.add(event(number))
    writer.add(event(count, "x" * EVENT_BYTES))  # it is too long
    await writer.stop()
    assert [one.id for one in await stored_by(bus, bucket)] == list(range(count))
    other = StoredEvents(bus, bucket, "two")
    await other.start()
    for number in range(count, total):
        other.add(event(number))
    await other.stop()
    assert len(await bus.list_keys(bucket, ">")) == CHUNKS
    assert [one.id for one in await stored_by(bus, bucket)] == list(range(2 * CHUNK_EVENTS, total))


async def test_the_frontend_continues_without_a_store_of_events_and_warns_of_it(
    plane: Plane, caplog: pytest.LogCaptureFixture
) -> None:
    class Refusing:
        """A connection whose key may not read the bucket."""

        async def ensure_bucket(self, bucket: KeyValueBucket) -> None:
            raise PermissionDenied("frontend may not read", role="frontend", fix="add the key")

    writer = StoredEvents(cast(Bus, Refusing()), plane_bucket(plane), "one")
    with caplog.at_level(logging.WARNING):
        assert await writer.start() == []
    assert (
        "this process can't store its events, so they are lost when it ends: frontend may not read" in caplog.text
    )
    writer.add(event(1))
    await writer.stop()


def plane_bucket(plane: Plane) -> KeyValueBucket:
    return Subjects(plane.namespace, plane.component).events


async def _heard(bus: Bus, bucket: KeyValueBucket) -> asyncio.Queue[bytes]:
    """The writes to a bucket, as they come."""
    heard: asyncio.Queue[bytes] = asyncio.Queue()

    async def hear(message: Msg) -> None:
        heard.put_nowait(message.data)

    await bus.subscribe(bucket.feed(">"), hear)
    await bus.flush()
    return heard


async def test_events_are_stored_again_after_nats_has_lost_its_store(own_nats: tuple[NatsServer, Plane]) -> None:
    server, plane = own_nats
    bus, bucket = await Bus.connect(plane.url), plane_bucket(plane)
    stored = StoredEvents(bus, bucket, "f1")
    try:
        assert await stored.start() == []
        heard = await _heard(bus, bucket)
        stored.add(FleetEvent(1, 1.0, "op", {}))
        async with asyncio.timeout(BACK_S):
            await heard.get()
        server.kill()
        shutil.rmtree(plane.tmp / "store")
        server.start()
        stored.add(FleetEvent(2, 2.0, "op", {}))
        async with asyncio.timeout(BACK_S):
            assert b'"id":2' in await heard.get()
    finally:
        await stored.stop()
        await bus.close()


async def test_a_frontend_that_starts_while_nats_does_not_answer_stores_its_events_later(
    own_nats: tuple[NatsServer, Plane],
) -> None:
    server, plane = own_nats
    bus, bucket = await Bus.connect(plane.url), plane_bucket(plane)
    stored = StoredEvents(bus, bucket, "f1")
    try:
        heard = await _heard(bus, bucket)
        server.kill()
        assert await stored.start() == []
        stored.add(FleetEvent(1, 1.0, "op", {}))
        server.start()
        async with asyncio.timeout(BACK_S):
            assert b'"id":1' in await heard.get()
    finally:
        await stored.stop()
        await bus.close()

"""Stream replies that no worker of the plane sends: the caller gets a typed error, and no token of another process."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgpack
import pytest

from rl_plane._util.limited_log import MAX_WARNINGS
from rl_plane.bus.token_stream import WINDOW, StreamReceiver
from rl_plane.errors import EngineFailed
from tests.support.committed_records import record
from tests.support.scripted_worker import ScriptedWorker, Stream
from tests.support.staged_streams import Stage, staged
from tests.support.stream_messages import messages_of

if TYPE_CHECKING:
    from nats.aio.msg import Msg

    from tests.conftest import Plane

pytestmark = [pytest.mark.slow, pytest.mark.parallel]

TYPED = {"engine_failed", "worker_lost", "unlabelled", "not_admitted"}
DELTA: dict[str, Any] = {"token_ids": [7], "spans": [], "finish_reason": None}
BAD_MESSAGES: dict[str, Any] = {
    "no map": [1, 2],
    "no number": {"delta": DELTA},
    "a number that is text": {"n": "1", "delta": DELTA},
    "a number that is true": {"n": True, "delta": DELTA},
    "no delta": {"n": 1},
    "a delta that is a list": {"n": 1, "delta": [1]},
    "tokens that are text": {"n": 1, "delta": {**DELTA, "token_ids": ["x"]}},
    "tokens that are no list": {"n": 1, "delta": {**DELTA, "token_ids": 7}},
    "spans of another shape": {"n": 1, "delta": {**DELTA, "spans": [7]}},
    "an unknown finish_reason": {"n": 1, "delta": {**DELTA, "finish_reason": "done"}},
    "an error that is text": {"n": 1, "error": "internal", "end": True},
    "an error without a code": {"n": 1, "error": {"message": "x"}, "end": True},
    "an internal error": {"n": 1, "error": {"code": "internal", "message": "x"}, "end": True},
    "an unknown error": {"n": 1, "error": {"code": "x", "message": "x"}, "end": True},
    "an error with a wrong fact": {
        "n": 1,
        "error": {"code": "worker_lost", "message": "x", "retry_after_s": "soon"},
        "end": True,
    },
    "an error with our own names": {
        "n": 1,
        "error": {"code": "worker_lost", "message": "x", "self": 1},
        "end": True,
    },
    "a bundle that is text": {"many": "ab"},
    "a bundle of an odd length": {"many": ["a"]},
    "a bundle with numbers for keys": {"many": [1, {"n": 1}]},
}


class Rogue(ScriptedWorker):
    """Answers each request with an acceptance, and then with these bytes."""

    data = b""
    accepted: Mapping[str, Any] = MappingProxyType({})
    """Fields of the acceptance that differ from a worker's."""

    async def _generate(self, message: Msg) -> None:
        if msgpack.unpackb(message.data)["kind"] != "open":
            return
        assert self.held is not None
        accepted: dict[str, Any] = {"instance_id": self.instance_id, "incarnation": self.incarnation}
        accepted |= {"version": self.held.version.to_wire(), **self.accepted}
        await self._bus.nc.publish(message.reply, msgpack.packb({"n": 0, "accepted": accepted}))
        await self._bus.nc.publish(message.reply, self.data)


async def _never(stream: Stream) -> None:
    raise AssertionError("a rogue has no script")


async def rogue(stage: Stage) -> Rogue:
    client = await stage.plane.client("worker")
    worker = Rogue(client.bus, client.subjects(), _never, record(1))
    await worker.start()
    await stage.decide(record(1))
    return worker


async def test_replies_that_cannot_be_read_are_typed_errors(
    plane: Plane, caplog: pytest.LogCaptureFixture
) -> None:
    async with staged(plane) as stage:
        worker = await rogue(stage)
        sent = {name: msgpack.packb(wire) for name, wire in BAD_MESSAGES.items()}
        for name, data in {**sent, "text": b"garbage", "truncated": b"\x81"}.items():
            worker.data = data
            for more in ({}, {"stream": True}):
                reply = await stage.ask(**more)
                error = reply.json()["error"]
                assert error["code"] in TYPED, f"{name}: {reply.text}"
                assert "partial" not in error, name
    assert not [record.getMessage() for record in caplog.records if record.exc_info]


@pytest.mark.parametrize(
    "accepted",
    [
        {"instance_id": "0" * 16},
        {"incarnation": "another process"},
        {"version": {}},
        {"version": {"run": "r", "sequence": "x", "label": "l", "digest": "d"}},
    ],
)
async def test_an_acceptance_of_another_process_or_shape_is_refused(
    plane: Plane, accepted: dict[str, Any]
) -> None:
    async with staged(plane) as stage:
        worker = await rogue(stage)
        worker.accepted = accepted
        worker.data = msgpack.packb({"n": 1, "delta": {**DELTA, "finish_reason": "stop"}, "end": True})
        reply = await stage.ask()
        assert reply.json()["error"]["code"] in TYPED, reply.text
        assert "token_ids" not in reply.text


async def test_a_worker_cannot_write_into_the_streams_of_others(plane: Plane) -> None:
    """A bundle may go to every stream of its receiver, so a stream's key can't be guessed from another one."""
    client = await plane.client()
    receiver = StreamReceiver(client.bus)
    keys = [(await receiver.open("nowhere", str(number), {})).key for number in range(20)]
    assert len(set(keys)) == 20
    assert min(len(key) for key in keys) >= 16
    numbers = sorted(int(key, 16) for key in keys)
    assert min(after - before for before, after in itertools.pairwise(numbers)) > 1 << 32


async def test_a_worker_that_waits_for_no_credit_fills_no_queue(plane: Plane) -> None:
    client = await plane.client()
    stream = await StreamReceiver(client.bus).open("nowhere", "x", {})
    for number in range(10 * WINDOW):
        stream.put({"n": number, "delta": DELTA})
    got = []

    async def read() -> None:
        async for message in messages_of(stream):
            got.append(message["n"])

    with pytest.raises(EngineFailed, match="credit"):
        await read()
    assert got == list(range(WINDOW))


async def test_warnings_about_malformed_messages_are_bounded(
    plane: Plane, caplog: pytest.LogCaptureFixture
) -> None:
    """In the worker and in the frontend. The fleet subject answers malformed messages, and logs none."""
    caplog.set_level(logging.WARNING)
    spawned = plane.spawn()
    client = await plane.client()
    subjects = client.subjects()
    async with staged(plane) as stage:
        await client.wait_for(1)
        for subject in (
            subjects.generate(spawned.instance_id),
            subjects.status(spawned.instance_id),
            subjects.fleet,
        ):
            for _ in range(10 * MAX_WARNINGS):
                await client.bus.nc.publish(subject, b"garbage")
        await client.bus.flush()
        assert (await stage.ask(max_tokens=1)).status_code == 200
    assert spawned.log.read_text().count("malformed message") == MAX_WARNINGS
    assert sum("malformed message" in one for one in caplog.messages) == MAX_WARNINGS

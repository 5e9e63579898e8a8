"""A worker's subjects as any NATS client meets them: raw messages to a real process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import msgpack
import pytest
import pytest_asyncio
from nats.aio.msg import Msg

from rl_plane.client import RlClient
from rl_plane.protocol.subjects import Subjects
from rl_plane.protocol.worker_ops import OPS

if TYPE_CHECKING:
    from tests.conftest import Plane

ANSWER_S = 20.0


class Raw:
    """A NATS client that knows nothing of rl_plane."""

    def __init__(self, client: RlClient, subjects: Subjects, ids: list[str]) -> None:
        self.nc = client.bus.nc
        self.client = client
        self.subjects = subjects
        self.ids = sorted(ids)

    @property
    def one(self) -> str:
        return self.subjects.rl_direct(self.ids[0])

    async def request(self, data: bytes, subject: str | None = None) -> bytes:
        return bytes((await self.nc.request(subject or self.one, data, timeout=ANSWER_S)).data)

    async def json(self, subject: str | None = None, **message: Any) -> dict[str, Any]:
        reply: dict[str, Any] = json.loads(await self.request(json.dumps(message).encode(), subject))
        return reply

    async def broadcast(self, data: bytes, expect: int) -> list[bytes]:
        """All the answers; one more than expected would be found by the ones of a last, direct message."""
        queue: asyncio.Queue[Msg] = asyncio.Queue()
        inbox = self.nc.new_inbox()
        subscription = await self.nc.subscribe(inbox, cb=queue.put)
        await self.nc.publish(self.subjects.rl, data, reply=inbox)
        for instance_id in self.ids:  # each worker answers in order: these come after its first answer
            await self.nc.publish(self.subjects.rl_direct(instance_id), b'{"op":"ping","id":"last"}', reply=inbox)
        async with asyncio.timeout(ANSWER_S):
            answers = [bytes((await queue.get()).data) for _ in range(expect + len(self.ids))]
        await subscription.unsubscribe()
        return [answer for answer in answers if b'"last"' not in answer]

    async def incarnation(self) -> str:
        return str((await self.json(op="state"))["incarnation"])


@pytest.fixture(scope="module")
def shared(make_plane: Callable[[], Plane]) -> Plane:
    """Two workers for all tests that leave no trace in them."""
    plane = make_plane()
    plane.spawn_copies(2)
    return plane


@pytest_asyncio.fixture
async def raw(shared: Plane) -> AsyncIterator[Raw]:
    async with await RlClient.connect(shared.url, shared.namespace) as client:
        yield Raw(client, client.subjects(), shared.spawned[0].instance_ids)
        for instance_id in shared.spawned[0].instance_ids:
            state = (await client.call(instance_id, "state")).body
            assert state["ready"], "a message left a trace"
            assert state["pause_state"] == "running"


@pytest_asyncio.fixture
async def own(plane: Plane) -> Raw:
    """Two workers of the test's own."""
    ids = plane.spawn_copies(2)
    client = await plane.client()
    return Raw(client, client.subjects(), ids)


async def test_plain_json_to_the_one_subject_is_answered_by_every_worker(raw: Raw) -> None:
    answers = [json.loads(answer) for answer in await raw.broadcast(b'{"op":"state"}', 2)]
    assert sorted(answer["instance_id"] for answer in answers) == raw.ids
    for answer in answers:
        assert answer["status"] == "ok"
        assert answer["v"] == 1
        assert answer["op"] == "state"
        assert answer["body"]["admission"] == {"open": True, "reasons": []}
        assert answer["elapsed_s"] >= 0


async def test_white_space_means_json_too(raw: Raw) -> None:
    assert json.loads(await raw.request(b' \r\n\t{"op": "describe"}'))["body"]["engine"] == "fake"


async def test_msgpack_is_answered_in_kind(raw: Raw) -> None:
    reply = msgpack.unpackb(await raw.request(msgpack.packb({"v": 1, "op": "state", "id": "abc"})))
    assert (reply["status"], reply["id"], reply["instance_id"]) == ("ok", "abc", raw.ids[0])


async def test_targets_filter_on_the_broadcast_subject(raw: Raw) -> None:
    message = json.dumps({"op": "state", "targets": [raw.ids[1]]}).encode()
    answers = [json.loads(answer) for answer in await raw.broadcast(message, 1)]
    assert [answer["instance_id"] for answer in answers] == [raw.ids[1]]


async def test_an_empty_list_of_targets_asks_no_worker(raw: Raw) -> None:
    assert await raw.broadcast(b'{"op":"state","targets":[]}', 0) == []


async def test_a_direct_message_for_others_is_refused(raw: Raw) -> None:
    reply = await raw.json(op="state", targets=[raw.ids[1]])
    assert (reply["error"]["code"], reply["error"]["field"]) == ("invalid_request", "targets")


@pytest.mark.parametrize("op", sorted(name for name, op in OPS.items() if op.changes))
async def test_an_op_that_changes_needs_a_fence(raw: Raw, op: str) -> None:
    reply = await raw.json(op=op)
    assert reply["error"]["code"] == "fence_required"
    assert "RlClient" in reply["error"]["fix"]
    assert ".fleet" in reply["error"]["fix"]


async def test_fence_and_incarnation_are_checked(raw: Raw) -> None:
    incarnation = await raw.incarnation()
    reply = await raw.json(op="pause", fence=1)
    assert (reply["error"]["code"], reply["error"]["field"]) == ("fence_required", "incarnation")
    reply = await raw.json(op="pause", incarnation=incarnation)
    assert (reply["error"]["code"], reply["error"]["field"]) == ("fence_required", "fence")
    async with raw.client.lock(await raw.client.view()) as held:
        reply = await raw.json(op="pause", fence=held.fence, incarnation="0" * 16)
        assert reply["error"]["code"] == "wrong_incarnation"
        reply = await raw.json(op="flush_cache", fence=held.fence, incarnation=incarnation)
        assert reply["status"] == "ok"
        reply = await raw.json(op="pause", fence=held.fence - 1, incarnation=incarnation)
        assert (reply["error"]["code"], reply["error"]["fence"]) == ("stale_fence", held.fence)


@pytest.mark.parametrize("fence", [0, 10**6])
async def test_a_fence_without_a_holder_changes_nothing(own: Raw, fence: int) -> None:
    """An op that changes a worker needs a *live* fence."""
    reply = await own.json(op="pause", fence=fence, incarnation=await own.incarnation())
    assert reply["status"] == "error"
    assert (await own.json(op="state"))["body"]["pause"]["paused"] is False


@pytest.mark.parametrize("fence", [10**6, 2**62, 10**30])
async def test_a_made_up_fence_on_a_reading_op_locks_no_caller_out(own: Raw, fence: int) -> None:
    await own.json(op="state", fence=fence)
    out = await own.client.call_all("flush_cache", timeout_s=ANSWER_S)
    assert [row.status for row in out.rows] == ["ok", "ok"], [row.error for row in out.rows]
    out = await own.client.call_all("state")
    assert [row.status for row in out.rows] == ["ok", "ok"], [row.error for row in out.rows]


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"op": "stat"}, "op"),
        ({"op": 7}, "op"),
        ({}, "op"),
        ({"op": ""}, "op"),
        ({"op": "state", "body": []}, "body"),
        ({"op": "state", "body": {"x": 1}}, "x"),
        ({"op": "state", "boddy": {}}, "boddy"),
        ({"op": "state", "v": 2}, "v"),
        ({"op": "state", "v": True}, "v"),
        ({"op": "state", "v": "1"}, "v"),
        ({"op": "state", "id": 5}, "id"),
        ({"op": "state", "id": "x" * 129}, "id"),
        ({"op": "state", "targets": "all"}, "targets"),
        ({"op": "state", "targets": [1]}, "targets.0"),
        ({"op": "state", "fence": "1"}, "fence"),
        ({"op": "state", "fence": 1.5}, "fence"),
        ({"op": "state", "timeout_ms": "soon"}, "timeout_ms"),
        ({"op": "state", "timeout_ms": -1}, "timeout_ms"),
        ({"op": "state", "deadline": 1_700_000_000_000}, "deadline"),
    ],
)
async def test_the_error_of_a_wrong_message_names_its_field(raw: Raw, message: dict[str, Any], field: str) -> None:
    reply = await raw.json(**message)
    assert reply["status"] == "error"
    assert reply["error"]["code"] == "invalid_request"
    assert reply["error"]["field"] == field
    assert reply["error"]["fix"]
    assert reply["instance_id"] == raw.ids[0]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b" ",
        b'{"op":"state"} x',
        b'{"op":"state","body":{"x":NaN}}',
        b'{"op":"\xff"}',
        b'{"op":"\\ud800"}',
        b"{" * 100_000,
        b'{"op":"state","body":' + b'{"a":' * 50_000 + b"1" + b"}" * 50_001,
        b"[1]",
        b" [1]",
        b'"state"',
        b"\xc1",
        b"\x81",
        b"\x81\xa2op",
        b"\x81\xa2op\xa1\xff",
        b"\x91" * 5_000 + b"\x01",
        b"\x81\x01\x02",
        b"\x00" * 100,
        b" " + b"x" * 1_000_000,
    ],
    ids=range(20),
)
async def test_bytes_that_are_no_message_get_a_typed_error(raw: Raw, data: bytes) -> None:
    answer = await raw.request(data)
    reply = json.loads(answer) if data[:1] in (b"{", b" ") else msgpack.unpackb(answer)
    assert reply["status"] == "error"
    assert reply["error"]["code"] == "invalid_request"


async def test_without_a_reply_subject_nothing_breaks(raw: Raw) -> None:
    await raw.nc.publish(raw.one, b"\xc1")
    await raw.nc.publish(raw.one, b'{"op":"state"}')
    assert (await raw.json(op="state"))["status"] == "ok"


async def test_a_call_whose_time_has_passed_gets_deadline_exceeded(raw: Raw) -> None:
    reply = await raw.json(op="tokenize", body={"prompt": "a"}, timeout_ms=0)
    assert reply["error"]["code"] == "deadline_exceeded"
    assert (await raw.json(op="liveness", timeout_ms=5000))["body"]["alive"]


async def test_a_broadcast_to_workers_that_do_not_exist_costs_nothing(raw: Raw) -> None:
    assert await raw.broadcast(json.dumps({"op": "state", "targets": ["f" * 16]}).encode(), 0) == []


async def test_a_delta_names_the_version_that_it_changes(raw: Raw) -> None:
    body = {"update_id": "u", "label": "x", "transport": {"backend": "filesystem", "path": "/x"}}
    async with raw.client.lock(await raw.client.view()) as held:
        reply = await raw.json(
            op="prepare_update",
            body={**body, "encoding": "delta"},
            fence=held.fence,
            incarnation=await raw.incarnation(),
        )
    assert reply["error"]["code"] == "invalid_request"
    assert reply["error"]["field"] == "base"


async def test_a_worker_answers_in_inboxes_alone(raw: Raw) -> None:
    """NATS does not check whether a client may write to the subject that its message names for the answer."""
    subjects, one = raw.subjects, raw.ids[0]
    heard: list[str] = []

    async def hear(message: Msg) -> None:
        heard.append(message.subject)

    subscription = await raw.nc.subscribe("elsewhere.>", cb=hear)
    request = {"prompt_token_ids": [5], "max_tokens": 1, "ignore_eos": True}
    opening = {"kind": "open", "id": "foreign", "request": request}
    credit = {"kind": "credit", "id": "gone", "consumed": 0, "have": 0, "resend": False}
    for number, message in enumerate((opening, credit)):
        await raw.nc.publish(subjects.generate(one), msgpack.packb(message), reply=f"elsewhere.generate{number}")
    for subject in (subjects.rl, subjects.rl_direct(one), subjects.read(one)):
        await raw.nc.publish(subject, b'{"op":"ping"}', reply=f"elsewhere.{subject}")
    gone = await raw.request(msgpack.packb(credit), subjects.generate(one))
    assert msgpack.unpackb(gone) == {"gone": True}
    for instance_id in raw.ids:  # each worker answers in order: an answer elsewhere would come before this one
        for subject in (subjects.rl_direct(instance_id), subjects.read(instance_id)):
            assert (await raw.json(subject, op="ping"))["status"] == "ok"
    await subscription.unsubscribe()
    assert heard == []

"""Tests the dispatcher's bounds without a worker: the bus only stores the answers."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from nats.aio.msg import Msg

from rl_plane.errors import EngineFailed, PlaneError
from rl_plane.protocol.envelope import MAX_MESSAGE_BYTES
from rl_plane.protocol.subjects import Subjects
from rl_plane.protocol.worker_ops import OPS
from worker.ops.dispatcher import MAX_TOKENIZING, TOKENIZING_AT_ONCE, Dispatcher
from worker.reconcile.worker_state import WorkerState

BOUND_S = 5.0
INSTANCE, INCARNATION = "0" * 16, "me"
SUBJECTS = Subjects("ns", "engine")
TENSOR_FIX = "leave it out, or leave out tensors with skip_tensor_list"


class Asked:
    """One worker's dispatcher. Ops that tokenize and `check_weights` end when `go` is set, the other ops at once."""

    def __init__(self, reply: Mapping[str, Any] | PlaneError) -> None:
        self.answers: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.go = asyncio.Event()
        self.at_work, self.full = 0, asyncio.Event()
        """Set when as many ops that tokenize have begun as may run at once."""
        self._inboxes = (f"_INBOX.{number}" for number in itertools.count())
        self._bus: Any = SimpleNamespace(nc=self, subscribe=self.subscribe)
        self._callbacks: dict[str, Callable[[Msg], Awaitable[None]]] = {}

        async def later(body: Any, fence: int) -> Mapping[str, Any]:
            self.at_work += 1
            if self.at_work == TOKENIZING_AT_ONCE:
                self.full.set()
            await self.go.wait()
            if isinstance(reply, PlaneError):
                raise reply
            return reply

        async def at_once(body: Any, fence: int) -> Mapping[str, Any]:
            return {}

        handlers = dict.fromkeys(OPS, at_once) | dict.fromkeys(("tokenize", "detokenize", "check_weights"), later)
        lock: Any = SimpleNamespace(is_holders=lambda fence: True)
        self.dispatcher = Dispatcher(WorkerState(INSTANCE, INCARNATION), lock, handlers)

    async def subscribe(self, subject: str, callback: Callable[[Msg], Awaitable[None]]) -> None:
        self._callbacks[subject] = callback

    async def publish(self, subject: str, data: bytes) -> None:
        self.answers.put_nowait(json.loads(data))

    async def ask(self, op: str, timeout_ms: int | None = None, inbox: str = "", **body: Any) -> None:
        """`inbox`: the same for a message that is sent again."""
        await self.dispatcher.listen(self._bus, SUBJECTS)
        subject = SUBJECTS.rl_direct(INSTANCE)
        request = {"op": op, "body": body, "timeout_ms": timeout_ms, "fence": 1, "incarnation": INCARNATION}
        message: Any = Msg(
            self._bus.nc, subject, reply=inbox or next(self._inboxes), data=json.dumps(request).encode()
        )
        await self._callbacks[subject](message)

    async def answer(self) -> dict[str, Any]:
        async with asyncio.timeout(BOUND_S):
            return await self.answers.get()


async def test_ops_that_tokenize_leave_room_for_other_ops() -> None:
    asked = Asked({"tokens": [1], "max_model_len": 8})
    for _ in range(MAX_TOKENIZING):
        await asked.ask("tokenize", prompt="a")
    await asked.ask("detokenize", tokens=[1])
    error = (await asked.answer())["error"]
    assert (error["code"], error["retry_after_s"]) == ("unavailable", 1.0)
    await asked.ask("liveness")
    assert (await asked.answer())["status"] == "ok"
    assert asked.at_work == TOKENIZING_AT_ONCE
    asked.go.set()
    for _ in range(MAX_TOKENIZING):
        assert (await asked.answer())["body"]["tokens"] == [1]
    await asyncio.sleep(0)  # the tasks' ends, which come after their answers
    await asked.ask("tokenize", prompt="a")
    assert (await asked.answer())["status"] == "ok"
    await asked.dispatcher.stop()


async def test_a_message_that_is_sent_again_starts_no_second_op_beside_the_first() -> None:
    asked = Asked({"digest": "d"})
    for _ in range(3):
        await asked.ask("check_weights", inbox="_INBOX.same", action="checksum")
    asked.go.set()
    assert (await asked.answer())["status"] == "ok"
    await asyncio.sleep(0)  # the task's end, which comes after its answer
    await asked.ask("check_weights", inbox="_INBOX.same", action="checksum")
    assert (await asked.answer())["status"] == "ok", "the first answer may be lost"
    assert asked.at_work == 1
    await asked.ask("check_weights", inbox="_INBOX.next", action="checksum")
    assert (await asked.answer())["status"] == "ok"
    assert asked.at_work == 2, "another call"
    assert asked.answers.empty()
    await asked.dispatcher.stop()


async def test_an_op_that_waits_to_tokenize_ends_with_its_deadline() -> None:
    asked = Asked({"tokens": [1], "max_model_len": 8})
    for _ in range(TOKENIZING_AT_ONCE):
        await asked.ask("tokenize", prompt="a")
    async with asyncio.timeout(BOUND_S):
        await asked.full.wait()
    await asked.ask("tokenize", timeout_ms=0, prompt="a")
    assert (await asked.answer())["error"]["code"] == "deadline_exceeded"
    asked.go.set()
    for _ in range(TOKENIZING_AT_ONCE):
        assert (await asked.answer())["status"] == "ok"
    await asked.dispatcher.stop()


@pytest.mark.parametrize(
    ("op", "body", "field", "fix"),
    [
        ("tokenize", {"prompt": "a"}, "prompt", "send it in parts"),
        ("detokenize", {"tokens": [1]}, "tokens", "send it in parts"),
        ("check_weights", {"action": "checksum", "per_tensor": True}, "per_tensor", TENSOR_FIX),
    ],
)
async def test_the_error_of_a_reply_that_is_too_long_names_the_field(
    op: str, body: dict[str, Any], field: str, fix: str
) -> None:
    asked = Asked({"long": "x" * MAX_MESSAGE_BYTES})
    asked.go.set()
    await asked.ask(op, **body)
    error = (await asked.answer())["error"]
    assert (error["code"], error["field"], error["fix"]) == ("payload_too_large", field, fix)


async def test_the_reply_of_a_failure_has_the_ranks() -> None:
    ranks = [{"rank": 0}, {"rank": 1, "error": {"code": "engine_failed", "message": "no"}}]
    asked = Asked(EngineFailed("no", rank_results=ranks))
    asked.go.set()
    await asked.ask("tokenize", prompt="a")
    assert (await asked.answer())["rank_results"] == ranks

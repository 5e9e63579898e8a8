"""The op dispatcher: bytes in, one typed op, bytes out. It runs on the NATS loop and never blocks it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Protocol

import nats.errors
from nats.aio.msg import Msg
from pydantic import BaseModel

from rl_plane._util.tasks import end_tasks
from rl_plane.bus.connection import Bus
from rl_plane.errors import (
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    PayloadTooLarge,
    PlaneError,
    StaleFence,
    Unavailable,
)
from rl_plane.membership.view import PING
from rl_plane.protocol.envelope import (
    MAX_MESSAGE_BYTES,
    Format,
    Reply,
    Request,
    Status,
    decode,
    encode,
    format_of,
    request_from_wire,
)
from rl_plane.protocol.subjects import Subjects
from rl_plane.protocol.validation import parse_body
from rl_plane.protocol.worker_ops import OPS, Op, op_named
from worker.reconcile.lock_watch import LockWatch
from worker.reconcile.worker_state import WorkerState
from worker.testing.phase_hooks import with_holds

log = logging.getLogger("worker.ops.dispatcher")

MAX_OPS = 256
"""Ops under way in one worker; a control plane that has more is broken, and is told so."""

OF_STAGES = ("ping", "liveness")
"""The ops that a stage does not skip."""

MAX_TOKENIZING = 64
"""Of those below, which anybody may ask for, a megabyte each: they leave MAX_OPS to the control plane."""
AT_ONCE = 8
"""Of these; the others wait, until their deadline."""

TOKENIZING = {"tokenize": "prompt", "detokenize": "tokens"}
"""Op → the field that its reply's length comes from."""

UNREAD = Request("")
"""What an error is an answer to when the request itself can't be read."""


class ByRank(dict[str, Any]):
    """A handler's outcome that the ranks of its engine answer for too."""

    def __init__(self, body: Mapping[str, Any], ranks: list[dict[str, Any]]) -> None:
        super().__init__(body)
        self.ranks = ranks


class Handler(Protocol):
    def __call__(self, body: Any, fence: int, /) -> Mapping[str, Any] | Awaitable[Mapping[str, Any]]: ...


class Dispatcher:
    """`handlers`: op → handler, plain for what is answered at once, a coroutine function for the rest. `stage`: why
    this is none of an engine (`EngineInfo.stage`)."""

    def __init__(
        self,
        state: WorkerState,
        lock: LockWatch,
        handlers: Mapping[str, Handler],
        revision: Callable[[], int],
        stage: str | None = None,
    ) -> None:
        assert handlers.keys() | {"ping"} == OPS.keys()
        self._state = state
        self._lock = lock
        self._handlers = with_holds(handlers, state.instance_id)
        self._revision = revision
        self._stage = stage
        self._tasks: set[asyncio.Task[None]] = set()
        self._tokenizing: set[asyncio.Task[None]] = set()
        self._tokenizers = asyncio.Semaphore(AT_ONCE)

    async def listen(self, bus: Bus, subjects: Subjects) -> None:
        async def everybody(message: Msg) -> None:
            await self._message(bus, message, direct=False)

        async def me(message: Msg) -> None:
            await self._message(bus, message, direct=True)

        await bus.subscribe(subjects.rl, everybody)
        await bus.subscribe(subjects.rl_direct(self._state.instance_id), me)

    async def stop(self) -> None:
        await end_tasks(self._tasks | self._tokenizing)

    async def _message(self, bus: Bus, message: Msg, direct: bool) -> None:
        start = time.monotonic()
        form = format_of(message.data)
        request = UNREAD
        try:
            if message.data == PING:
                await self._answer(bus, message, self._reply(request, start, {"revision": self._revision()}), form)
                return
            request = request_from_wire(decode(message.data))
            if not self._is_meant(request, direct):
                return
            op = op_named(request.op)
            skips = self._stage is not None and op.name not in OF_STAGES
            if op.changes and not skips:
                self._state.check_changing(request)
            body = parse_body(op.request, request.body)
            if skips:
                skipped = self._reply(request, start, {"reason": self._stage}, "skipped")
                await self._answer(bus, message, skipped, form)
                return
            if op.name == "ping":
                await self._answer(bus, message, self._reply(request, start, {"revision": self._revision()}), form)
                return
            outcome = self._change(request, body) if op.changes else self._handlers[op.name](body, 0)
            if isinstance(outcome, Mapping):
                await self._answer(bus, message, self._reply(request, start, outcome), form)
                return
            apart = op.name in TOKENIZING
            tasks, most = (self._tokenizing, MAX_TOKENIZING) if apart else (self._tasks, MAX_OPS)
            if len(tasks) >= most:
                if isinstance(outcome, Coroutine):
                    outcome.close()
                what = "ops that tokenize" if apart else "ops"
                raise Unavailable(f"{most} {what} are under way in this worker", retry_after_s=1.0)
            if apart:
                outcome = self._in_turn(outcome)
            task = asyncio.create_task(self._finish(bus, message, request, op, outcome, start, form))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        except PlaneError as error:
            await self._answer(bus, message, self._failed(request, start, error), form)
        except Exception as error:
            log.exception("op %s", request.op)
            failure = EngineFailed(f"{type(error).__name__}: {error}")
            await self._answer(bus, message, self._failed(request, start, failure), form)

    async def _in_turn(self, outcome: Awaitable[Mapping[str, Any]]) -> Mapping[str, Any]:
        try:
            async with self._tokenizers:
                return await outcome
        finally:
            if isinstance(outcome, Coroutine):
                outcome.close()  # of one that has not had its turn

    def _change(self, request: Request, body: BaseModel) -> Mapping[str, Any] | Awaitable[Mapping[str, Any]]:
        assert request.fence is not None, "check_changing"
        if self._lock.is_holders(request.fence):
            return self._handlers[request.op](body, request.fence)
        return self._change_if_live(request, body, request.fence)

    async def _change_if_live(self, request: Request, body: BaseModel, fence: int) -> Mapping[str, Any]:
        if not await self._lock.is_live(fence):
            self._state.check_fence(fence)
            raise StaleFence(f"nobody holds the fence {fence}", fence=self._state.fence)
        outcome = self._handlers[request.op](body, fence)
        return outcome if isinstance(outcome, Mapping) else await outcome

    def _is_meant(self, request: Request, direct: bool) -> bool:
        if request.targets is None or self._state.instance_id in request.targets:
            return True
        if direct:
            raise InvalidRequest(
                "this message came to one worker, but targets names others",
                field="targets",
                fix="leave it out, or send it to the fleet subject",
            )
        return False

    async def _finish(
        self,
        bus: Bus,
        message: Msg,
        request: Request,
        op: Op,
        outcome: Awaitable[Mapping[str, Any]],
        start: float,
        form: Format,
    ) -> None:
        try:
            # The worker's own bound, for a caller that gave none or is gone.
            async with asyncio.timeout(self._bound_s(request, op)):
                reply = self._reply(request, start, await outcome)
        except PlaneError as error:
            reply = self._failed(request, start, error)
        except TimeoutError:
            reply = self._failed(request, start, DeadlineExceeded(f"{op.name} took longer than its deadline"))
        except Exception as error:
            log.exception("op %s", op.name)
            reply = self._failed(request, start, EngineFailed(f"{type(error).__name__}: {error}"))
        await self._answer(bus, message, reply, form)

    @staticmethod
    def _bound_s(request: Request, op: Op) -> float:
        return op.timeout_s if request.timeout_ms is None else request.timeout_ms / 1000

    def _reply(self, request: Request, start: float, body: Mapping[str, Any], status: Status = "ok") -> Reply:
        return Reply(
            request.op or "ping",
            request.id,
            status,
            body,
            None,
            self._state.instance_id,
            self._state.incarnation,
            body.ranks if isinstance(body, ByRank) else None,
            elapsed_s=time.monotonic() - start,
        )

    def _failed(self, request: Request, start: float, error: PlaneError) -> Reply:
        return Reply(
            request.op,
            request.id,
            "error",
            {},
            error,
            self._state.instance_id,
            self._state.incarnation,
            error.facts.get("rank_results"),
            elapsed_s=time.monotonic() - start,
        )

    async def _answer(self, bus: Bus, message: Msg, reply: Reply, form: Format) -> None:
        if not message.reply:
            return
        data = encode(reply.to_wire(), form)
        if len(data) > MAX_MESSAGE_BYTES:
            failure = _too_long(
                reply.op, f"the reply has {len(data)} bytes; a message carries {MAX_MESSAGE_BYTES}"
            )
            data = encode(self._failed(Request(reply.op, id=reply.id), time.monotonic(), failure).to_wire(), form)
        try:
            await bus.nc.publish(message.reply, data)
        except nats.errors.Error:
            pass  # the caller times out, or asks again after its own reconnect


def _too_long(op: str, message: str) -> PlaneError:
    if op in TOKENIZING:
        return PayloadTooLarge(message, field=TOKENIZING[op], fix="send it in parts")
    return EngineFailed(message)

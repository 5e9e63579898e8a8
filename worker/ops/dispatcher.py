"""Turns each message into one typed op, and its outcome into the answer. Runs on the NATS loop and never blocks it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import nats.errors
from nats.aio.msg import Msg
from pydantic import BaseModel

from rl_plane._util import tracing
from rl_plane._util.tracing import OFF, Span
from rl_plane.bus.answers import answer_subject
from rl_plane.bus.connection import Bus
from rl_plane.errors import (
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    PayloadTooLarge,
    PlaneError,
    StaleFence,
)
from rl_plane.membership.view import PING, PING_REQUEST
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
from rl_plane.protocol.worker_ops import OPS, Op, Pool, op_named
from worker.ops.contract import ByRank, Handler
from worker.ops.op_pool import OpPool, Outcome
from worker.reconcile.lock_watch import LockWatch
from worker.reconcile.worker_state import WorkerState

log = logging.getLogger("worker.ops.dispatcher")

MAX_OPS = 256
"""Ops under way in one worker. A control plane never has so many at the same time; the caller gets Unavailable."""
MAX_TOKENIZING = 64
"""Ops of the tokenizer pool. Any client may send them, each with a megabyte; MAX_OPS stays for the control plane."""
TOKENIZING_AT_ONCE = 8
"""The tokenizer's threads gain nothing from more. The others wait, until their deadline."""

KEPT_ANSWERS = 64
"""The last answers of changing ops, for messages that come again. An op such as a part of an update can't be carried
out twice."""

SHOWN = (
    "bytes",
    "model_bytes",
    "tensors",
    "missing",
    "digest",
    "swap_s",
    "cache_flushed",
    "sequence",
    "discarded",
    "aborted",
    "pause_state",
    "listening",
)
"""The fields of an answer that a span shows, if they are there."""

UNREAD = Request("")
"""Stands in for a request that can't be read, in the answer to it."""


class Dispatcher:
    """Checks each message, calls the op's handler, and answers.

    `handlers` has one handler for each op. `pipeline_stage`: why this worker has no engine of its own. It
    then answers only the ops that a stage has.
    """

    def __init__(
        self,
        state: WorkerState,
        lock: LockWatch,
        handlers: Mapping[str, Handler],
        pipeline_stage: str | None = None,
    ) -> None:
        assert handlers.keys() == OPS.keys()
        self._state = state
        self._lock = lock
        self.handlers = handlers
        self.answers: Counter[tuple[str, ...]] = Counter()
        """Op and outcome (ok, skipped, or the error's code) → the number of answers. A name that is no op counts as
        `other`."""
        self._under_way: set[tuple[str, bytes]] = set()
        """The inbox and the bytes of each message whose op runs."""
        self._kept: dict[tuple[str, int], bytes] = {}
        """The inbox and the hash of each message whose changing op has ended → its answer. The oldest comes first."""
        self._pipeline_stage = pipeline_stage
        self._pools: dict[Pool, OpPool] = {
            "control": OpPool("ops", MAX_OPS),
            "tokenizer": OpPool("ops that tokenize", MAX_TOKENIZING, TOKENIZING_AT_ONCE),
        }

    async def listen(self, bus: Bus, subjects: Subjects) -> None:
        async def to_fleet(message: Msg) -> None:
            await self._message(bus, message, direct=False)

        async def to_this_worker(message: Msg) -> None:
            await self._message(bus, message, direct=True)

        async def to_read(message: Msg) -> None:
            await self._message(bus, message, direct=True, reads=True)

        await bus.subscribe(subjects.rl, to_fleet)
        await bus.subscribe(subjects.rl_direct(self._state.instance_id), to_this_worker)
        await bus.subscribe(subjects.read(self._state.instance_id), to_read)

    async def stop(self) -> None:
        for pool in self._pools.values():
            await pool.stop()

    async def _message(self, bus: Bus, message: Msg, direct: bool, reads: bool = False) -> None:
        """`reads`: the message came by the subject for ops that change nothing."""
        asked = answer_subject(message), message.data
        if asked in self._under_way:
            return  # a caller asks again: the answer to its first message will reach it
        if asked[0] and (kept := self._kept.get((asked[0], hash(message.data)))) is not None:
            await _publish(bus, asked[0], kept)  # the first answer may be lost
            return
        start = time.monotonic()
        form = format_of(message.data)
        request, span = UNREAD, OFF
        try:
            # Every prober of the fleet sends these very bytes, so they are not parsed.
            request = PING_REQUEST if message.data == PING else request_from_wire(decode(message.data))
            if not self._is_meant(request, direct):
                return
            op = op_named(request.op)
            if op.changes and (parent := tracing.parent_in(message.headers)) is not None:
                span = tracing.begin(op.name, parent, worker=self._state.instance_id)
            if reads and op.changes:
                raise InvalidRequest(
                    f"{op.name} changes something, and came by the subject for reading",
                    field="op",
                    fix="send it to the worker's rl subject",
                )
            skips = self._pipeline_stage is not None and not op.of_pipeline_stage
            if op.changes and not skips:
                self._state.check_changing(request)
            body = parse_body(op.request, request.body)
            if skips:
                skipped = self._reply(request, start, {"reason": self._pipeline_stage}, "skipped")
                await self._answer(bus, message, skipped, form, span)
                return
            with tracing.using(span):
                outcome = self._change(request, body) if op.changes else self.handlers[op.name](body, 0)
            if isinstance(outcome, Mapping):
                await self._answer(bus, message, self._reply(request, start, outcome), form, span)
                return

            async def finish(outcome: Outcome) -> None:
                try:
                    await self._finish(bus, message, request, op, outcome, start, form, span)
                finally:
                    self._under_way.discard(asked)

            with tracing.using(span):  # the op runs in a task, which has this span as its current one
                self._pools[op.pool].start(outcome, finish)
            self._under_way.add(asked)
        except PlaneError as error:
            await self._answer(bus, message, self._failed(request, start, error), form, span)
        except Exception as error:
            log.exception("op %s", request.op)
            failure = EngineFailed(f"{type(error).__name__}: {error}")
            await self._answer(bus, message, self._failed(request, start, failure), form, span)

    def _change(self, request: Request, body: BaseModel) -> Mapping[str, Any] | Outcome:
        assert request.fence is not None, "check_changing"
        if self._lock.is_holders(request.fence):
            return self.handlers[request.op](body, request.fence)
        return self._change_if_live(request, body, request.fence)

    async def _change_if_live(self, request: Request, body: BaseModel, fence: int) -> Mapping[str, Any]:
        if not await self._lock.is_live(fence):
            self._state.check_fence(fence)
            raise StaleFence(f"no coordinator holds the fence {fence}", fence=self._state.fence)
        outcome = self.handlers[request.op](body, fence)
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
        outcome: Outcome,
        start: float,
        form: Format,
        span: Span,
    ) -> None:
        try:
            # A caller may give no deadline, or die.
            async with asyncio.timeout(self._bound_s(request, op)):
                reply = self._reply(request, start, await outcome)
        except PlaneError as error:
            reply = self._failed(request, start, error)
        except TimeoutError:
            reply = self._failed(request, start, DeadlineExceeded(f"{op.name} took longer than its deadline"))
        except Exception as error:
            log.exception("op %s", op.name)
            reply = self._failed(request, start, EngineFailed(f"{type(error).__name__}: {error}"))
        await self._answer(bus, message, reply, form, span, keep=op.changes)

    @staticmethod
    def _bound_s(request: Request, op: Op) -> float:
        return op.timeout_s if request.timeout_ms is None else request.timeout_ms / 1000

    def _reply(self, request: Request, start: float, body: Mapping[str, Any], status: Status = "ok") -> Reply:
        return Reply(
            request.op,
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

    async def _answer(
        self, bus: Bus, message: Msg, reply: Reply, form: Format, span: Span, keep: bool = False
    ) -> None:
        """`keep`: stores the answer, for the case that the message comes again."""
        _note_answer(span, reply)
        outcome = reply.status if reply.error is None else type(reply.error).code
        self.answers[reply.op if reply.op in OPS else "other", outcome] += 1
        if not (inbox := answer_subject(message)):
            return
        data = encode(reply.to_wire(), form)
        if len(data) > MAX_MESSAGE_BYTES:
            failure = _too_long(
                reply.op, f"the reply has {len(data)} bytes; a message carries {MAX_MESSAGE_BYTES}"
            )
            data = encode(self._failed(Request(reply.op, id=reply.id), time.monotonic(), failure).to_wire(), form)
        if keep:
            self._kept[inbox, hash(message.data)] = data
            while len(self._kept) > KEPT_ANSWERS:
                del self._kept[next(iter(self._kept))]
        await _publish(bus, inbox, data)


async def _publish(bus: Bus, inbox: str, data: bytes) -> None:
    with contextlib.suppress(nats.errors.Error):  # the caller times out, or asks again after its own reconnect
        await bus.nc.publish(inbox, data)


def _too_long(name: str, message: str) -> PlaneError:
    op = OPS.get(name)
    if op is not None and op.reply_follows is not None:
        return PayloadTooLarge(message, field=op.reply_follows, fix=op.shorter)
    return EngineFailed(message)


def _note_answer(span: Span, reply: Reply) -> None:
    """Notes the facts of an answer, and ends the span."""
    if span is OFF:
        return
    found = {name: reply.body[name] for name in SHOWN if reply.body.get(name) is not None}
    span.set(status=reply.status, **found)
    span.end(reply.error)

"""Serves the fleet's ops on the NATS subject `<ns>.<comp>.fleet`, and the reading ones on `<ns>.<comp>.fleet.read`, in
JSON or msgpack."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Any

import nats.errors
from nats.aio.msg import Msg

from frontend.facade.op_runner import OpRunner
from frontend.frontend_limits import LIMITS
from frontend.server.replies import error_body, to_json, unanswered
from rl_plane._util import tracing
from rl_plane.bus.answers import answer_subject
from rl_plane.bus.connection import Bus
from rl_plane.errors import InvalidRequest, PayloadTooLarge, PlaneError, Unavailable
from rl_plane.fleet.fleet_call import ASKED_BY, CALLED_FROM, said
from rl_plane.protocol.envelope import (
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    Request,
    decode,
    encode,
    format_of,
    request_from_wire,
)
from rl_plane.protocol.fleet_ops import FLEET_OPS
from rl_plane.protocol.subjects import key_of_inbox

log = logging.getLogger("frontend.facade.nats_service")

QUEUE = "frontends"


def call_body(request: Request) -> dict[str, Any]:
    """The op's body with the selection of the envelope. A field that both give must have the same value."""
    for key in ("fence", "incarnation"):
        if getattr(request, key) is not None:
            raise InvalidRequest(
                f"{key} belongs in a message to one worker",
                field=key,
                fix="leave it out",
            )
    body = dict(request.body)
    targets = list(request.targets) if request.targets is not None else None
    for key, value in (("workers", targets), ("epoch", request.epoch), ("fingerprint", request.fingerprint)):
        if value is None:
            continue
        if body.setdefault(key, value) != value:
            raise InvalidRequest(
                f"the message and its body differ in {key}", field=f"body.{key}", fix="give it in one of the two"
            )
    return body


class FleetService:
    """Answers messages, each in a task of its own. A message without a reply subject is carried out too."""

    def __init__(
        self,
        bus: Bus,
        subject: str,
        calls: OpRunner,
        reads: bool = False,
        max_calls: int = LIMITS.fleet_calls,
    ) -> None:
        """`reads`: the subject takes only the ops that change nothing."""
        self._reads = reads
        self._bus = bus
        self._subject = subject
        self._calls = calls
        self._max_calls = max_calls
        self._subscription: Any = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._subscription = await self._bus.subscribe(self._subject, self._message, queue=QUEUE)
        await self._bus.flush()

    async def stop(self, grace_s: float) -> None:
        """Refuses new messages, and waits at most `grace_s` for those under way."""
        if self._subscription is not None and not self._bus.nc.is_closed:
            with contextlib.suppress(nats.errors.Error):
                await self._subscription.unsubscribe()
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=grace_s)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _message(self, message: Msg) -> None:
        task = asyncio.create_task(self._serve(message))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, message: Msg) -> None:
        # A caller names the inbox of its own key, or gets no answer.
        inbox = answer_subject(message)
        ASKED_BY.set(said(key_of_inbox(inbox)))
        if tracing.is_on() and message.headers:
            tracing.hear(message.headers.get(tracing.TRACEPARENT))
        start = time.monotonic()
        head: dict[str, Any] = {"v": PROTOCOL_VERSION, "id": "", "op": ""}
        reply: dict[str, Any]
        try:
            reply = {"status": "ok", "body": await self._run(message.data, head)}
        except PlaneError as error:
            reply = error_body(error, time.monotonic() - start)
        except asyncio.CancelledError:  # the frontend ends
            reply = error_body(unanswered(), time.monotonic() - start)
        except Exception:
            log.exception("%s on the fleet subject", head["op"])
            reply = error_body(PlaneError("an unexpected error; see the log"), time.monotonic() - start)
        if inbox:
            await self._answer(message, inbox, {**head, **reply}, start)

    async def _run(self, data: bytes, head: dict[str, Any]) -> dict[str, Any]:
        wire = decode(data)
        # The reply to a refused request has them too.
        head.update({key: wire[key] for key in ("id", "op") if isinstance(wire.get(key), str)})
        request = request_from_wire(wire)
        if len(self._tasks) > self._max_calls:
            raise Unavailable(f"{self._max_calls} fleet calls are under way in this frontend", retry_after_s=1.0)
        if self._reads and request.op in FLEET_OPS and FLEET_OPS[request.op].method != "GET":
            raise InvalidRequest(
                f"{request.op} changes something, and came by the subject for reading",
                field="op",
                fix=f"send it to {self._subject.removesuffix('.read')}",
            )
        CALLED_FROM.set("a service on NATS")  # each message is a task with a context of its own
        return await self._calls.run(request.op, call_body(request), request.id)

    async def _answer(self, message: Msg, inbox: str, reply: dict[str, Any], start: float) -> None:
        form = format_of(message.data)
        packed = to_json(reply) if form == "json" else encode(reply, form)
        if len(packed) > MAX_MESSAGE_BYTES:
            error = PayloadTooLarge(
                f"the call ended with status {reply['status']!r}, but its reply has {len(packed)} bytes; "
                f"a message carries {MAX_MESSAGE_BYTES}",
                call_status=reply["status"],
                fix="name fewer workers in targets, or ask over HTTP",
            )
            head = {key: reply[key] for key in ("v", "id", "op")}
            packed = encode({**head, **error_body(error, time.monotonic() - start)}, form)
        with contextlib.suppress(nats.errors.Error):  # a caller that lost its connection repeats the call
            await self._bus.nc.publish(inbox, packed)

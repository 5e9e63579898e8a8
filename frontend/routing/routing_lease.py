"""A frontend's right to route requests. The frontend lists itself in the state bucket, then asks the leader for the
record. For SERVING_LEASE_S from before both steps, either it knows every decision, or the coordinator waits for it
(docs/decisions/serving-lease.md)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable
from typing import Any

import nats.errors
from nats.aio.msg import Msg

from frontend.frontend_limits import LIMITS, FrontendLimits
from rl_plane._util.tasks import end_tasks
from rl_plane.bus.answers import answer_subject
from rl_plane.bus.connection import Bus, WrongSequence
from rl_plane.errors import NotAdmitted, PlaneError, Unsupported
from rl_plane.membership.view import MembershipView
from rl_plane.protocol.envelope import Reply, Request, decode, encode, format_of, request_from_wire
from rl_plane.protocol.serving_lease import Connection, ServingLease
from rl_plane.protocol.subjects import FRONTEND_PREFIX
from rl_plane.protocol.update_requests import FollowedReply, FollowRecord
from rl_plane.protocol.validation import parse_body
from rl_plane.protocol.worker_ops import AbortedInFrontend, AbortInFrontend

log = logging.getLogger("frontend.routing.routing_lease")

RETRY_S = 0.2
"""The pause after a failed confirmation, for example while NATS restarts. Requests wait meanwhile."""
RETRY_AFTER_S = 1.0
"""The `retry_after_s` of an error. NATS has mostly recovered by then."""


class FrontendLease:
    """Lists this frontend while it runs, renews the lease, and acknowledges the decisions of coordinators."""

    def __init__(self, view: MembershipView, frontend_id: str, limits: FrontendLimits = LIMITS) -> None:
        self._limits = limits
        self.frontend_id = frontend_id
        self.lease = ServingLease()
        """The lease, in loop seconds."""
        self._confirmed = asyncio.Event()
        self.on_abort: Callable[[list[str] | None, bool], AbortedInFrontend] = lambda *_: AbortedInFrontend(
            aborted=0, made={}
        )
        """Called with the ids or names of the requests to abort (None: all)."""
        self._view = view
        self._bus: Bus = view.bus
        self._flushed: tuple[str, int] | None = None
        """The connection on which the server surely has the subscription."""
        self._task: asyncio.Task[None] | None = None
        self._subscription: Any = None

    def holds(self) -> bool:
        now = asyncio.get_running_loop().time()
        return self._bus.nc.is_connected and self.lease.holds(now, self._bus.identity)

    async def wait(self, give_up: float) -> None:
        """Waits until the lease holds. Raises NotAdmitted at `give_up` (loop seconds)."""
        while not self.holds():
            left_s = give_up - asyncio.get_running_loop().time()
            if left_s <= 0:
                raise NotAdmitted(
                    "this frontend has not confirmed the committed version lately: does NATS answer it?",
                    retry_after_s=RETRY_AFTER_S,
                )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._confirmed.wait()

    async def start(self) -> None:
        self._subscription = await self._bus.subscribe(
            self._view.subjects.frontend(self.frontend_id), self._on_message
        )
        self._bus.on_reconnect(self._on_reconnect)
        with contextlib.suppress(PlaneError):
            await self._confirm()  # otherwise _renew confirms soon
        self._task = asyncio.create_task(self._renew(self._limits.confirm_interval_s if self.holds() else RETRY_S))

    async def stop(self) -> None:
        """Ends the lease and removes this frontend from the list, so that no update waits for it."""
        self.lease.give_up()
        task, self._task = self._task, None
        if task is not None:
            await end_tasks([task])
        state = self._view.subjects.state
        with contextlib.suppress(PlaneError, WrongSequence, nats.errors.Error):  # otherwise the key expires
            self._bus.check_connected()
            if self._subscription is not None:
                await self._subscription.unsubscribe()
            entry = await self._bus.get(state, self._key)
            if entry is not None and entry.value is not None:
                await self._bus.purge(state, self._key, entry.sequence)

    # ---- the lease ----

    @property
    def _key(self) -> str:
        return FRONTEND_PREFIX + self.frontend_id

    async def _on_reconnect(self) -> None:
        if self._task is not None:
            self._task.cancel()  # the answer that it waits for was lost with the connection
            self._task = asyncio.create_task(self._renew(0.0))

    async def _renew(self, wait_s: float) -> None:
        """Confirms repeatedly, the first time after `wait_s`."""
        while True:
            await asyncio.sleep(wait_s)
            try:
                await self._confirm()
                wait_s = self._limits.confirm_interval_s
            except Exception as error:
                if not isinstance(error, (PlaneError, nats.errors.Error)):
                    log.exception("the lease")  # the loop must continue
                log.debug("the lease could not be confirmed: %s", error)
                wait_s = RETRY_S

    async def _confirm(self) -> None:
        """Lists this frontend, then asks. A coordinator that does not find it in the list has decided before."""
        asked_at, connection = asyncio.get_running_loop().time(), self._bus.identity
        self._bus.check_connected()
        if self._flushed != connection:
            await self._bus.flush()  # a listed frontend must receive what coordinators send
            self._flushed = connection
        facts = json.dumps({"name": self._bus.name}).encode()
        await self._bus.put(self._view.subjects.state, self._key, facts, ttl_s=self._limits.lease_key_ttl_s)
        await self._view.keep_record()
        self.confirm(asked_at, connection)

    def confirm(self, asked_at: float, connection: Connection) -> None:
        """After `asked_at` this frontend was listed, and then the leader returned the record."""
        if self.lease.confirm(asked_at, connection):
            confirmed, self._confirmed = self._confirmed, asyncio.Event()
            confirmed.set()

    # ---- messages of coordinators ----

    async def _on_message(self, message: Msg) -> None:
        start = time.monotonic()
        request = Request("")
        try:
            request = request_from_wire(decode(message.data))
            reply = Reply(request.op, request.id, body=self._do(request))
        except PlaneError as error:
            reply = Reply(request.op, request.id, "error", error=error)
        if inbox := answer_subject(message):
            wire = {
                **reply.to_wire(),
                "instance_id": self.frontend_id,
                "incarnation": self.frontend_id,
                "elapsed_s": time.monotonic() - start,
            }
            with contextlib.suppress(nats.errors.Error):  # the coordinator gets no answer, and waits for the lease
                await self._bus.nc.publish(inbox, encode(wire, format_of(message.data)))

    def _do(self, request: Request) -> FollowedReply | AbortedInFrontend:
        if request.op == "abort_requests":
            ask = parse_body(AbortInFrontend, request.body)
            return self.on_abort(ask.request_ids, ask.waiting)
        if request.op != "follow_record":
            raise Unsupported(
                f"a frontend answers follow_record and abort_requests, not {request.op!r}",
                field="op",
                fix="send it to a worker",
            )
        body = parse_body(FollowRecord, request.body)
        self._view.take_record(body.record, body.sequence)
        assert self._view.record is not None, "taken just now"
        return FollowedReply(sequence=self._view.record.sequence)

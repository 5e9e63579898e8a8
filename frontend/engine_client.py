"""One generation request, carried to a worker and, while it has no token yet, to another if that one is lost.

It is sent only under this frontend's serving lease; what comes back is checked against what was committed, delta by
delta, before it goes on."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgpack

from frontend.committed import Committed, Labels
from frontend.fleet_status import FleetStatus
from frontend.lease import FrontendLease
from frontend.routing import Router
from rl_plane.errors import (
    DeadlineExceeded,
    EngineFailed,
    NotAdmitted,
    NotFound,
    NoWorkers,
    PayloadTooLarge,
    Unavailable,
    Unlabelled,
    WorkerLost,
    WrongIncarnation,
)
from rl_plane.generation import GenerateDelta, GenerateRequest
from rl_plane.membership import Changed, Member
from rl_plane.streams import IncomingStream, StreamReceiver
from rl_plane.subjects import check_instance_id
from rl_plane.versions import WeightVersion
from rl_plane.view import MembershipView
from rl_plane.wire import MAX_MESSAGE_BYTES

ACCEPT_TIMEOUT_S = 10.0
"""A worker's NATS loop answers at once, also while its engine is paused; a hung one is found within 8 s."""
IDLE_TIMEOUT_S = 3600.0
"""Between two tokens. Deaths are found otherwise; this ends what a pause without end would keep for ever."""
MAX_EXAMPLES = 3
"""Closed workers that an error names."""
MAX_LOST = 4
"""Workers that may die under one request before it is given back to its caller."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """A worker has taken the request; under `version` of the base as it says."""

    instance_id: str
    incarnation: str
    version: WeightVersion


Event = Accepted | GenerateDelta


class EngineClient:
    """Opens streams to workers. `generate` may run any number of times at once."""

    def __init__(
        self,
        receiver: StreamReceiver,
        view: MembershipView,
        status: FleetStatus,
        committed: Committed,
        lease: FrontendLease,
        admission_wait_s: float,
    ) -> None:
        self.router = Router()
        self._receiver = receiver
        self._view = view
        self._status = status
        self._committed = committed
        self._lease = lease
        self._admission_wait_s = admission_wait_s
        self._streams: dict[str, set[IncomingStream]] = {}
        self._stop_listening: Callable[[], None] | None = None

    def start(self) -> None:
        self._stop_listening = self._view.listen(self._member_changed)

    def stop(self) -> None:
        if self._stop_listening is not None:
            self._stop_listening()

    def _member_changed(self, change: Changed) -> None:
        before, after = change.before, change.after
        if before is None or (after is not None and after.incarnation == before.incarnation):
            return
        for stream in self._streams.get(before.instance_id, ()):
            stream.fail(WorkerLost("the worker died or left", instance_id=before.instance_id))
        if after is None:
            self.router.forget(before.instance_id)

    async def generate(self, request: GenerateRequest, pinned: str | None = None) -> AsyncGenerator[Event, None]:
        """Accepted, then deltas with checked spans, of which the last has `finish_reason`. Accepted may come again
        while no token has come: then another worker has taken over. Closing it aborts the request."""
        loop = asyncio.get_running_loop()
        give_up = loop.time() + self._admission_wait_s
        lost: list[Member] = []
        for attempt in itertools.count():
            member = await self._pick(lost, pinned, request.adapter, give_up)
            # Nothing is awaited from here until the request is sent: the lease and the record hold for it.
            tokens = 0
            # A stream's id is used once: a worker takes the second one for a repetition of the first.
            stream_id = f"{request.id}.{attempt}" if attempt else request.id
            try:
                async with aclosing(self._attempt(request, stream_id, member)) as events:
                    async for event in events:
                        if isinstance(event, GenerateDelta):
                            tokens += len(event.token_ids)
                        yield event
                return
            except (WorkerLost, WrongIncarnation, EngineFailed) as error:
                lost.append(member)
                if tokens or pinned is not None or len(lost) >= MAX_LOST:
                    raise error if isinstance(error, EngineFailed) else _as_lost(error, member) from error
                give_up = loop.time() + self._admission_wait_s
            except Unavailable as error:
                # Full or closed; what else is unavailable (NATS, a label) is no better on another worker.
                if tokens or not (isinstance(error, NotAdmitted) or type(error) is Unavailable):
                    raise
                before = self._committed.record
                await self._committed.try_read()
                # Refused because we were behind: it may take the request now. Else it says when it opens.
                if self._committed.record == before:
                    self._status.refused(member.instance_id)
                if loop.time() >= give_up:
                    raise

    # ---- choosing ----

    async def _pick(self, lost: list[Member], pinned: str | None, adapter: str | None, give_up: float) -> Member:
        """Under the serving lease."""
        loop = asyncio.get_running_loop()
        if pinned is not None:
            await self._lease.wait(give_up)
            await self._check_pin(pinned)
        while True:
            await self._lease.wait(give_up)
            gone = {member.instance_id for member in lost if self._is_current(member)}
            needed = self._needed(adapter)
            admitted = self._status.admitted(needed)
            if pinned is not None:
                admitted = {key: load for key, load in admitted.items() if key == pinned}
            if (chosen := self.router.pick(admitted, gone)) is not None:
                member = self._view.member(chosen)
                if member is not None:
                    return member
            left = give_up - loop.time()
            if left <= 0:
                raise self._nobody(pinned, lost, needed)
            await self._status.wait_changed(left)

    def _needed(self, adapter: str | None) -> str | None:
        """The adapter that a worker must have told us of: while two states are served, not each worker has it."""
        record = self._committed.record
        if adapter is None or record is None:
            return None
        if adapter not in record.adapters:
            raise NotFound(
                f"the adapter {adapter[:200]!r} is not loaded any more",
                field="model",
                fix="list them: GET /v1/models",
            )
        return adapter if record.rolling_from is not None else None

    def _is_current(self, member: Member) -> bool:
        """Is it still this process? A new one under the same instance id may well take the request."""
        now = self._view.member(member.instance_id)
        return now is not None and now.incarnation == member.incarnation

    async def _check_pin(self, pinned: str) -> None:
        check_instance_id("nvext.instance_id", pinned)
        if self._view.member(pinned) is None:
            await self._view.barrier()
        if self._view.member(pinned) is None:
            raise NotFound(
                f"no worker {pinned} is in the fleet",
                field="nvext.instance_id",
                fix="leave it out, or take one from GET /v1/rl/workers",
            )

    def _nobody(self, pinned: str | None, lost: list[Member], needed: str | None) -> Unavailable:
        waited = f"after {self._admission_wait_s:g} s"
        if not len(self._view.snapshot()):
            return NoWorkers(f"no worker is there {waited}", fix="start one: `rl-plane worker`", retry_after_s=1.0)
        closed = self._status.why_closed(needed)
        if lost:
            return WorkerLost(
                f"{len(lost)} workers were lost before a token came, and no other was there {waited}",
                lost=[member.instance_id for member in lost],
                retry_after_s=1.0,
            )
        if pinned:
            closed = {key: why for key, why in closed.items() if key == pinned}
        examples = "; ".join(f"{key}: {why}" for key, why in list(closed.items())[:MAX_EXAMPLES])
        return NotAdmitted(
            f"{f'worker {pinned} takes' if pinned else 'no worker takes'} "
            f"{'no ' if pinned else ''}requests {waited} ({examples})",
            fix="GET /v1/rl/workers tells why each one is closed",
            retry_after_s=1.0,
        )

    # ---- one try ----

    async def _attempt(
        self, request: GenerateRequest, stream_id: str, member: Member
    ) -> AsyncGenerator[Event, None]:
        labels = self._committed.labels(request.adapter)
        message = {
            "request": request.model_dump(exclude_defaults=True),
            "sequence": self._committed.sequence,
            "incarnation": member.incarnation,
        }
        _check_size(message)
        subject = self._view.subjects.generate(member.instance_id)
        self.router.started(member.instance_id)
        streams = self._streams.setdefault(member.instance_id, set())
        stream = None
        try:
            stream = await self._receiver.open(subject, stream_id, message)
            streams.add(stream)
            if not self._is_current(member):
                stream.fail(WorkerLost("the worker left just now", instance_id=member.instance_id))
            async with aclosing(self._events(stream, request, labels)) as events:
                async for event in events:
                    yield event
        finally:
            self.router.ended(member.instance_id)
            if stream is not None:
                streams.discard(stream)
                await stream.close()
            if not streams and self._streams.get(member.instance_id) is streams:
                del self._streams[member.instance_id]

    async def _events(
        self, stream: IncomingStream, request: GenerateRequest, labels: Labels
    ) -> AsyncGenerator[Event, None]:
        loop = asyncio.get_running_loop()
        async with aclosing(stream.messages()) as messages:  # type: ignore[type-var]
            first = await _next(messages, ACCEPT_TIMEOUT_S)
            if first is None:
                raise WorkerLost(f"the worker did not take the request within {ACCEPT_TIMEOUT_S:g} s")
            accepted = _accepted(first)
            if not await self._committed.is_known(accepted.version):
                raise NotAdmitted(f"the worker serves {accepted.version.label}, which was never committed")
            yield accepted
            begun = False
            while True:
                message = await _next(messages, IDLE_TIMEOUT_S)
                if message is None:
                    raise DeadlineExceeded(f"no token for {IDLE_TIMEOUT_S:g} s: is the fleet paused for ever?")
                delta = _delta(message, request)
                if delta.token_ids and not begun:
                    begun = True
                    if request.prompt_logprobs:
                        _check_prompt_logprobs(delta)
                await self._committed.learn(delta.spans)
                labels.take(delta, loop.time())
                yield delta
                if delta.finish_reason is not None:
                    return


async def _next(messages: Any, timeout_s: float) -> dict[str, Any] | None:
    """None: nothing came in time."""
    try:
        async with asyncio.timeout(timeout_s):
            message: dict[str, Any] = await anext(messages)
            return message
    except TimeoutError:
        return None
    except StopAsyncIteration:
        raise EngineFailed("the worker's stream ended without a finish_reason") from None


def _accepted(message: dict[str, Any]) -> Accepted:
    told = message.get("accepted")
    if not isinstance(told, dict) or not isinstance(told.get("version"), dict):
        raise Unlabelled("the worker does not say which weights it serves", retry_after_s=1.0)
    return Accepted(str(told["instance_id"]), str(told["incarnation"]), WeightVersion.from_wire(told["version"]))


def _delta(message: dict[str, Any], request: GenerateRequest) -> GenerateDelta:
    delta = GenerateDelta.model_validate(message.get("delta"))
    if request.logprobs and len(delta.logprobs or ()) != len(delta.token_ids):
        raise EngineFailed(
            f"the worker sent {len(delta.logprobs or ())} logprobs with {len(delta.token_ids)} tokens"
        )
    return delta


def _check_prompt_logprobs(first: GenerateDelta) -> None:
    prompt, logprobs = first.prompt_token_ids or [], first.prompt_logprobs or []
    if not prompt or len(logprobs) != len(prompt) or logprobs[0] is not None:
        raise EngineFailed(f"the worker sent {len(logprobs)} prompt logprobs of {len(prompt)} tokens")
    if not all(value is not None and math.isfinite(value) for value in logprobs[1:]):
        raise EngineFailed("the worker sent prompt logprobs that are not finite numbers")


def _check_size(message: dict[str, Any]) -> None:
    size = len(msgpack.packb(message))
    if size > MAX_MESSAGE_BYTES - 1000:  # room for the stream's own fields
        raise PayloadTooLarge(
            f"the request has {size} bytes; a NATS message carries {MAX_MESSAGE_BYTES}",
            field="prompt",
            fix="send a shorter prompt",
        )


def _as_lost(error: WorkerLost | WrongIncarnation, member: Member) -> WorkerLost:
    facts = {"instance_id": member.instance_id, "retry_after_s": 1.0, **error.facts}
    return WorkerLost(error.message, **facts)

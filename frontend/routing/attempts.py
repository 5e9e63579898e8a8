"""One try of a request at one worker. Opens the stream, and checks each delta against the committed versions before it
passes it on."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import ValidationError

from frontend.frontend_limits import LIMITS, FrontendLimits
from frontend.routing.committed import Committed
from frontend.routing.fleet_status import FleetStatus
from frontend.routing.router import NO_AFFINITY, Affinity, Router
from frontend.routing.span_check import SpanCheck
from rl_plane._util.tracing import OFF, Span
from rl_plane.bus.token_stream import IncomingStream, StreamReceiver, unreadable
from rl_plane.errors import (
    EngineFailed,
    NotAdmitted,
    PlaneError,
    Unlabelled,
    WorkerLost,
)
from rl_plane.membership.core import Member
from rl_plane.membership.view import MembershipView
from rl_plane.protocol.generation import GenerateDelta, GenerateRequest
from rl_plane.protocol.pooling import unpacked
from rl_plane.protocol.prompt_tops import PromptTops
from rl_plane.protocol.token_batching import joined
from rl_plane.protocol.versions import WeightVersion

IDLE_TIMEOUT_S = 3600.0
"""The longest time between two tokens. A worker's death is found otherwise; this bound ends a pause without end."""


READ_EVERY_S = 1.0
"""Seconds between two looks at the tokens of a reply that is sent at its end. The tokens have arrived, so a worker that
dies loses none of them."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """A worker has taken the request. It says that it serves `version` of the base."""

    instance_id: str
    incarnation: str
    version: WeightVersion
    at: int = 0
    """The number of tokens that lost workers made before."""


class Attempts:
    """`run` may run any number of times at once."""

    def __init__(
        self,
        receiver: StreamReceiver,
        view: MembershipView,
        status: FleetStatus,
        committed: Committed,
        router: Router,
        limits: FrontendLimits = LIMITS,
    ) -> None:
        self._limits = limits
        self._receiver = receiver
        self._view = view
        self._status = status
        self._committed = committed
        self._router = router
        self._streams: dict[str, set[IncomingStream]] = {}
        self._given_up: Callable[[], PlaneError] | None = None

    def on_lost(self, instance_id: str) -> None:
        """Ends the streams of a worker that died or left."""
        for stream in self._streams.get(instance_id, ()):
            stream.fail(WorkerLost("the worker died or left", instance_id=instance_id))

    def give_up(self, error: Callable[[], PlaneError]) -> None:
        """Ends all streams, also the ones being opened."""
        self._given_up = error
        for streams in self._streams.values():
            for stream in streams:
                stream.fail(error())

    async def run(
        self,
        request: GenerateRequest,
        stream_id: str,
        member: Member,
        affinity: Affinity = NO_AFFINITY,
        span: Span = OFF,
    ) -> AsyncGenerator[Accepted | GenerateDelta, None]:
        """Yields Accepted, then deltas with checked spans; the last delta has `finish_reason`. Closing it aborts.

        Nothing is awaited before the request is sent, so the lease and the record that chose the worker still hold.
        `span`: the try's own, which the worker gets as its parent."""
        may_make, witnesses = partial(self._status.may_make, member), bool(member.info.get("witnesses", True))
        history = self._committed.history
        check = SpanCheck(history, request.adapter, history.count, may_make, witnesses, self._limits.stale_after_s)
        opened = self._router.on_start(member.instance_id, request.prompt_size(), affinity)
        try:
            async with (
                self._stream(request, stream_id, member, span) as stream,
                aclosing(stream.batches()) as batches,
            ):
                first, *batch = await _first(batches, self._limits.accept_timeout_s)
                accepted = _accepted(first, member)
                if not await self._committed.is_known(accepted.version):
                    raise NotAdmitted(f"the worker serves {accepted.version.label}, which was never committed")
                yield accepted
                begun, places = False, 0
                while True:
                    for delta in _deltas(batch, request):
                        if delta.prompt_tops is not None:
                            _check_prompt_tops(delta.prompt_tops, request.prompt_top_logprobs)
                            places += delta.prompt_tops.places
                        if delta.token_ids:
                            if request.prompt_logprobs and not begun:
                                _check_prompt_logprobs(delta, places, bool(request.prompt_top_logprobs))
                            begun = True
                            stream.read_every_s = READ_EVERY_S if request.gather_s else 0.0
                        if delta.spans:
                            await self._committed.learn(delta.spans)
                        check.take(delta, stream.arrived)
                        if delta.token_ids:
                            self._router.on_tokens(opened, len(delta.token_ids))
                        yield delta
                        if delta.finish_reason is not None:
                            return
                    batch = await _next(batches)
        finally:
            self._router.on_end(opened)

    @asynccontextmanager
    async def _stream(
        self, request: GenerateRequest, stream_id: str, member: Member, span: Span
    ) -> AsyncIterator[IncomingStream]:
        """Sends the request. The stream that answers it fails when the worker is lost, and is closed at the end."""
        message = {
            "request": request.model_dump(exclude_defaults=True),
            "sequence": self._committed.sequence,
            "incarnation": member.incarnation,
        }
        subject = self._view.subjects.generate(member.instance_id)
        streams = self._streams.setdefault(member.instance_id, set())
        stream = None
        try:
            headers = span.context.header if span.context is not None else None
            stream = await self._receiver.open(subject, stream_id, message, IDLE_TIMEOUT_S, headers)
            streams.add(stream)
            now = self._view.member(member.instance_id)
            if now is None or now.incarnation != member.incarnation:
                stream.fail(WorkerLost("the worker left just now", instance_id=member.instance_id))
            if self._given_up is not None:
                stream.fail(self._given_up())
            yield stream
        finally:
            if stream is not None:
                streams.discard(stream)
                await stream.close()
            if not streams and self._streams.get(member.instance_id) is streams:
                del self._streams[member.instance_id]


async def _first(batches: AsyncIterator[list[dict[str, Any]]], timeout_s: float) -> list[dict[str, Any]]:
    try:
        async with asyncio.timeout(timeout_s):
            return await _next(batches)
    except TimeoutError:
        raise WorkerLost(f"the worker did not take the request within {timeout_s:g} s") from None


async def _next(batches: AsyncIterator[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    try:
        return await anext(batches)
    except StopAsyncIteration:
        raise EngineFailed("the worker's stream ended without a finish_reason") from None


def _accepted(message: dict[str, Any], member: Member) -> Accepted:
    accepted = message.get("accepted")
    if not isinstance(accepted, dict) or not isinstance(accepted.get("version"), dict):
        raise Unlabelled("the worker does not say which weights it serves", retry_after_s=1.0)
    if (accepted.get("instance_id"), accepted.get("incarnation")) != (member.instance_id, member.incarnation):
        raise WorkerLost("another process than the worker that was asked has answered", retry_after_s=1.0)
    try:
        version = WeightVersion.from_wire(accepted["version"])
    except (ValueError, TypeError, LookupError):
        raise unreadable("its version has other fields") from None
    return Accepted(member.instance_id, member.incarnation, version)


def _deltas(batch: list[dict[str, Any]], request: GenerateRequest) -> Iterator[GenerateDelta]:
    """Merges the deltas that came at once into as few as possible. Raises at the first wrong delta, after those before
    it."""
    deltas: list[GenerateDelta] = []
    failure: EngineFailed | None = None
    for message in batch:
        try:
            delta = GenerateDelta.model_validate(message.get("delta"))
        except ValidationError as error:
            failure = unreadable(f"{error.error_count()} fields of a delta do not fit")
            break
        failure = _wrong_vector(delta, request) or (_wrong_logprobs(delta) if request.logprobs else None)
        if failure is not None:
            break
        deltas.append(delta)
    yield from joined(deltas) if deltas and not request.top_logprobs else deltas
    if failure is not None:
        raise failure


def _wrong_vector(delta: GenerateDelta, request: GenerateRequest) -> EngineFailed | None:
    """A pooling request is answered by one vector of finite numbers, any other request by none."""
    if delta.pooled is None:
        is_missing = request.pooling is not None and delta.finish_reason not in (None, "abort")
        return EngineFailed("the worker sent no vector") if is_missing else None
    if request.pooling is None or delta.token_ids:
        return EngineFailed("the worker sent a vector that was not asked for")
    try:
        numbers = unpacked(delta.pooled)
    except ValueError as error:
        return EngineFailed(f"the worker sent a wrong vector: {error}")
    if not all(map(math.isfinite, numbers)):
        return EngineFailed("the worker sent a vector with numbers that are not finite")
    return None


def _wrong_logprobs(delta: GenerateDelta) -> EngineFailed | None:
    """With broken weights an engine can make tokens without log probabilities."""
    tokens, logprobs = delta.token_ids, delta.logprobs or []
    if len(logprobs) != len(tokens):
        return EngineFailed(f"the worker sent {len(logprobs)} logprobs with {len(tokens)} tokens")
    if not all(map(math.isfinite, logprobs)):
        return EngineFailed("the worker sent logprobs that are not finite numbers")
    return None


def _check_prompt_tops(rows: PromptTops, count: int) -> None:
    if rows.count != count or not rows.fits:
        raise EngineFailed(
            f"the worker sent other rows of a prompt's likeliest tokens than {count} for each token"
        )


def _check_prompt_logprobs(first: GenerateDelta, places: int, has_tops: bool) -> None:
    """`places`: the rows of likeliest tokens so far. `has_tops`: the request asks for them."""
    prompt, logprobs = first.prompt_token_ids or [], first.prompt_logprobs or []
    if not prompt or len(logprobs) != len(prompt) or logprobs[0] is not None:
        raise EngineFailed(f"the worker sent {len(logprobs)} prompt logprobs of {len(prompt)} tokens")
    if not all(value is not None and math.isfinite(value) for value in logprobs[1:]):
        raise EngineFailed("the worker sent prompt logprobs that are not finite numbers")
    if places != len(prompt) - 1 and (places or has_tops):
        raise EngineFailed(f"the worker sent the likeliest tokens of {places} places of {len(prompt)} tokens")

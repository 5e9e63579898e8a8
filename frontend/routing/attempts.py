"""One try of a request at one worker: the stream is opened, and what comes is checked, delta by delta, against what
was committed, before it goes on."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

from frontend.routing.committed import Committed, Labels
from frontend.routing.fleet_status import FleetStatus
from frontend.routing.router import NO_WISH, Router, Wish
from rl_plane.bus.token_stream import IncomingStream, StreamReceiver
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
from rl_plane.protocol.token_batching import joined
from rl_plane.protocol.versions import WeightVersion

ACCEPT_TIMEOUT_S = 10.0
"""A worker's NATS loop answers at once, also while its engine is paused; a hung one is found within 8 s."""
IDLE_TIMEOUT_S = 3600.0
"""Between two tokens. Deaths are found otherwise; this ends what a pause without end would keep for ever."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """A worker has taken the request; under `version` of the base as it says."""

    instance_id: str
    incarnation: str
    version: WeightVersion
    at: int = 0
    """So many tokens were there, of workers that are lost."""


class Attempts:
    """`run` may run any number of times at once."""

    def __init__(
        self,
        receiver: StreamReceiver,
        view: MembershipView,
        status: FleetStatus,
        committed: Committed,
        router: Router,
    ) -> None:
        self._receiver = receiver
        self._view = view
        self._status = status
        self._committed = committed
        self._router = router
        self._streams: dict[str, set[IncomingStream]] = {}
        self._given_up: Callable[[], PlaneError] | None = None

    def lost(self, instance_id: str) -> None:
        """This worker died or left: whatever it was asked ends."""
        for stream in self._streams.get(instance_id, ()):
            stream.fail(WorkerLost("the worker died or left", instance_id=instance_id))

    def give_up(self, error: Callable[[], PlaneError]) -> None:
        """All of them end, and those that are on their way."""
        self._given_up = error
        for streams in self._streams.values():
            for stream in streams:
                stream.fail(error())

    async def run(
        self, request: GenerateRequest, stream_id: str, member: Member, wish: Wish = NO_WISH
    ) -> AsyncGenerator[Accepted | GenerateDelta, None]:
        """Accepted, then deltas with checked spans, of which the last has `finish_reason`. Nothing is awaited before
        the request is sent: what was looked at when the worker was chosen holds for it. Closing it aborts."""
        may_make, witnesses = partial(self._status.may_make, member), bool(member.info.get("witnesses", True))
        labels = self._committed.labels(request.adapter, may_make, witnesses)
        message = {
            "request": request.model_dump(exclude_defaults=True),
            "sequence": self._committed.sequence,
            "incarnation": member.incarnation,
        }
        subject = self._view.subjects.generate(member.instance_id)
        turn = self._router.started(member.instance_id, request.prompt_size(), wish)
        streams = self._streams.setdefault(member.instance_id, set())
        stream = None
        try:
            stream = await self._receiver.open(subject, stream_id, message, IDLE_TIMEOUT_S)
            streams.add(stream)
            now = self._view.member(member.instance_id)
            if now is None or now.incarnation != member.incarnation:
                stream.fail(WorkerLost("the worker left just now", instance_id=member.instance_id))
            if self._given_up is not None:
                stream.fail(self._given_up())
            async with aclosing(self._events(stream, request, labels)) as events:
                async for event in events:
                    if isinstance(event, GenerateDelta) and event.token_ids:
                        self._router.grew(turn, len(event.token_ids))
                    yield event
        finally:
            self._router.ended(turn)
            if stream is not None:
                streams.discard(stream)
                await stream.close()
            if not streams and self._streams.get(member.instance_id) is streams:
                del self._streams[member.instance_id]

    async def _events(
        self, stream: IncomingStream, request: GenerateRequest, labels: Labels
    ) -> AsyncGenerator[Accepted | GenerateDelta, None]:
        async with aclosing(stream.batches()) as batches:
            first, *batch = await _first(batches)
            accepted = _accepted(first)
            if not await self._committed.is_known(accepted.version):
                raise NotAdmitted(f"the worker serves {accepted.version.label}, which was never committed")
            yield accepted
            begun = False
            while True:
                for delta in _deltas(batch, request):
                    if delta.token_ids and not begun:
                        begun = True
                        if request.prompt_logprobs:
                            _check_prompt_logprobs(delta)
                    if delta.spans:
                        await self._committed.learn(delta.spans)
                    labels.take(delta, stream.arrived)
                    yield delta
                    if delta.finish_reason is not None:
                        return
                batch = await _next(batches)


async def _first(batches: AsyncIterator[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    try:
        async with asyncio.timeout(ACCEPT_TIMEOUT_S):
            return await _next(batches)
    except TimeoutError:
        raise WorkerLost(f"the worker did not take the request within {ACCEPT_TIMEOUT_S:g} s") from None


async def _next(batches: AsyncIterator[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    try:
        return await anext(batches)
    except StopAsyncIteration:
        raise EngineFailed("the worker's stream ended without a finish_reason") from None


def _accepted(message: dict[str, Any]) -> Accepted:
    told = message.get("accepted")
    if not isinstance(told, dict) or not isinstance(told.get("version"), dict):
        raise Unlabelled("the worker does not say which weights it serves", retry_after_s=1.0)
    return Accepted(str(told["instance_id"]), str(told["incarnation"]), WeightVersion.from_wire(told["version"]))


def _deltas(batch: list[dict[str, Any]], request: GenerateRequest) -> Iterator[GenerateDelta]:
    """Of what came at once as few as can be, unless that grows too large; then the error, if one is not right."""
    deltas: list[GenerateDelta] = []
    failure: EngineFailed | None = None
    for message in batch:
        deltas.append(GenerateDelta.model_validate(message.get("delta")))
        if request.logprobs and (failure := _wrong_logprobs(deltas[-1])) is not None:
            deltas.pop()
            break
    yield from joined(deltas) if deltas and not request.top_logprobs else deltas
    if failure is not None:
        raise failure


def _wrong_logprobs(delta: GenerateDelta) -> EngineFailed | None:
    """Of weights that are broken an engine may well make tokens, and give them no numbers."""
    tokens, logprobs = delta.token_ids, delta.logprobs or []
    if len(logprobs) != len(tokens):
        return EngineFailed(f"the worker sent {len(logprobs)} logprobs with {len(tokens)} tokens")
    if not all(map(math.isfinite, logprobs)):
        return EngineFailed("the worker sent logprobs that are not finite numbers")
    return None


def _check_prompt_logprobs(first: GenerateDelta) -> None:
    prompt, logprobs = first.prompt_token_ids or [], first.prompt_logprobs or []
    if not prompt or len(logprobs) != len(prompt) or logprobs[0] is not None:
        raise EngineFailed(f"the worker sent {len(logprobs)} prompt logprobs of {len(prompt)} tokens")
    if not all(value is not None and math.isfinite(value) for value in logprobs[1:]):
        raise EngineFailed("the worker sent prompt logprobs that are not finite numbers")

"""Reads the messages in which a worker sends the tokens of its engine, without NATS and without an engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import msgpack
from nats.aio.msg import Msg

from rl_plane.protocol.generation import GenerateDelta, GenerateRequest
from worker.generation_service import GenerationService
from worker.reconcile.worker_state import TokenLoad

BOUND_S = 60.0
SUBJECT = "generate"
REQUEST_ID = "r"


class _Reader:
    """The bus of the service, and a frontend that confirms each message."""

    max_payload = 1 << 20

    def __init__(self) -> None:
        self.nc = self
        self.identity = ("server", 1)
        self.messages: list[dict[str, Any]] = []
        self._service: Callable[[Msg], Awaitable[None]] | None = None

    async def subscribe(self, subject: str, callback: Callable[[Msg], Awaitable[None]]) -> None:
        self._service = callback

    async def send(self, **body: Any) -> None:
        assert self._service is not None, "the service listens"
        client: Any = self
        data = msgpack.packb({"id": REQUEST_ID, **body})
        await self._service(Msg(client, SUBJECT, reply="_INBOX.a.key", data=data))

    async def publish(self, subject: str, data: bytes) -> None:
        message = msgpack.unpackb(data)
        bundle = message.get("many")
        self.messages += [message] if bundle is None else bundle[1::2]
        read = len(self.messages)
        await self.send(kind="credit", consumed=read, have=read, resend=False)


class _Engine:
    """An engine and its loop. It makes each of the deltas by itself, so that the service joins none."""

    gathers = True

    def __init__(self, *deltas: GenerateDelta) -> None:
        self._deltas = deltas

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateDelta]:
        for delta in self._deltas:
            yield delta

    async def stream(
        self, source: AsyncIterator[GenerateDelta], gather_s: float
    ) -> AsyncIterator[list[GenerateDelta]]:
        async for delta in source:
            yield [delta]


async def sent_parts(delta: GenerateDelta, made: int = 0) -> list[GenerateDelta]:
    """Returns the deltas in which a worker sends this one to a frontend, as the frontend reads them. `made`: the number
    of tokens that the worker has sent before."""
    before = [GenerateDelta(token_ids=[0] * made)] if made else []
    after = [GenerateDelta(token_ids=[], finish_reason="stop")] if delta.finish_reason is None else []
    reader, engine = _Reader(), _Engine(*before, delta, *after)
    state = SimpleNamespace(
        check_lease=lambda now, connection: None,
        check_admitted=lambda sequence, incarnation: None,
        instance_id="0" * 16,
        incarnation="one",
        version=None,
        tokens=TokenLoad(),
    )
    parts: list[Any] = [reader, engine, engine, state, True, SimpleNamespace(cuts=0, delivers=lambda began: True)]
    service = GenerationService(*parts)
    await service.start(SUBJECT)
    try:
        await reader.send(kind="open", request={"prompt_token_ids": [1]})
        assert await service.wait_idle(BOUND_S)
    finally:
        await service.stop()
    assert [message["n"] for message in reader.messages] == [*range(len(reader.messages))]
    first, *rest = reader.messages
    assert "accepted" in first
    deltas = [GenerateDelta.model_validate(message["delta"]) for message in rest]
    return deltas[len(before) : len(deltas) - len(after)]

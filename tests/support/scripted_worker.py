"""A worker that does what a test says, over a real NATS: it is listed, answers `ping` and `state`, and takes requests
with the sequence that the test sets. For what a frontend must do when a worker lies, lags or is between states.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Literal

import msgpack
from nats.aio.msg import Msg

from rl_plane.bus.connection import Bus
from rl_plane.bus.token_stream import StreamSender
from rl_plane.errors import NotAdmitted, Unavailable
from rl_plane.membership.core import Member
from rl_plane.protocol.envelope import Reply, decode, encode, format_of, request_from_wire
from rl_plane.protocol.generation import GenerateDelta, VersionSpan
from rl_plane.protocol.record import DecisionRecord, Held
from rl_plane.protocol.subjects import MEMBER_PREFIX, RECORD, Subjects

Script = Callable[["Stream"], Awaitable[None]]


class Stream:
    """One request as the worker has it."""

    def __init__(self, body: dict[str, Any], sender: StreamSender) -> None:
        self.body = body
        self._sender = sender
        self._prompt = body["request"].get("prompt_token_ids")

    async def send(self, tokens: list[int], *spans: VersionSpan, end: bool = False, logprob: float = -1.0) -> None:
        logprobs = [logprob] * len(tokens) if self.body["request"].get("logprobs") else None
        reason: Literal["length"] | None = "length" if end else None
        prompt, self._prompt = self._prompt, None
        delta = GenerateDelta(
            token_ids=tokens,
            logprobs=logprobs,
            spans=list(spans),
            finish_reason=reason,
            prompt_token_ids=prompt,
        )
        message = {"delta": delta.model_dump()}
        await (self._sender.finish(message) if end else self._sender.send(message))


class ScriptedWorker:
    """`holds`: the state and its sequence that it serves."""

    def __init__(self, bus: Bus, subjects: Subjects, script: Script, holds: DecisionRecord | None) -> None:
        self.instance_id = secrets.token_hex(8)
        self.requests: list[dict[str, Any]] = []
        self.aborted: asyncio.Queue[str] = asyncio.Queue()
        self.held: Held | None = holds.held if holds is not None else None
        self.sequence = holds.sequence if holds is not None else None
        self._bus = bus
        self._subjects = subjects
        self._script = script
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._senders: dict[str, StreamSender] = {}

    @property
    def incarnation(self) -> str:
        return self.instance_id

    async def start(self) -> None:
        await self._bus.subscribe(self._subjects.rl_direct(self.instance_id), self._op)
        await self._bus.subscribe(self._subjects.read(self.instance_id), self._op)
        await self._bus.subscribe(self._subjects.generate(self.instance_id), self._generate)
        await self._bus.flush()
        await self.register()

    async def register(self) -> None:
        server_id, client_id = self._bus.identity
        info = {"model": "base", "max_model_len": 4096}
        member = Member(self.instance_id, self.incarnation, server_id, client_id, 0, info)
        await self._bus.put(self._subjects.members, MEMBER_PREFIX + self.instance_id, member.to_record(), last=0)
        await self.tell()

    async def hold(self, record: DecisionRecord) -> None:
        self.held, self.sequence = record.held, record.sequence
        await self.tell()

    async def tell(self) -> None:
        message = {"instance_id": self.instance_id, "incarnation": self.incarnation, **self._state()}
        await self._bus.nc.publish(self._subjects.status(self.instance_id), msgpack.packb(message))
        await self._bus.flush()

    async def stop(self) -> None:
        for task in list(self._tasks.values()):
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _state(self) -> dict[str, Any]:
        held = self.held
        return {
            "admission": {"open": held is not None, "reasons": [] if held else ["behind"]},
            "version": held.version.to_wire() if held else None,
            "sequence": self.sequence,
            "adapters": {name: one.to_wire() for name, one in held.adapters.items()} if held else {},
            "paused": False,
            "running": len(self._tasks),
            "waiting": 0,
        }

    async def _op(self, message: Msg) -> None:
        request = request_from_wire(decode(message.data))
        body = {"revision": 0} if request.op == "ping" else self._state()
        reply = Reply(request.op, request.id, "ok", body, None, self.instance_id, self.incarnation)
        await self._bus.nc.publish(message.reply, encode(reply.to_wire(), format_of(message.data)))

    async def _generate(self, message: Msg) -> None:
        body = msgpack.unpackb(message.data)
        stream_id = body["id"]
        if body["kind"] == "credit" and (sender := self._senders.get(stream_id)):
            await sender.credit(body["consumed"], body["have"], body["resend"])
        elif body["kind"] == "abort":
            self.aborted.put_nowait(stream_id)
            if task := self._tasks.get(stream_id):
                task.cancel()
        elif body["kind"] == "open" and stream_id not in self._tasks:
            self.requests.append(body)

            async def publish(data: bytes, within_s: float) -> None:
                await self._bus.nc.publish(message.reply, data)

            sender = self._senders[stream_id] = StreamSender(publish, self._bus.nc.max_payload)
            self._tasks[stream_id] = asyncio.create_task(self._serve(body, sender))

    async def _serve(self, body: dict[str, Any], sender: StreamSender) -> None:
        with suppress(Unavailable):
            if self.held is None or body["sequence"] not in (None, self.sequence):
                await sender.finish({"error": NotAdmitted("another sequence").to_wire()})
                return
            identity = {"instance_id": self.instance_id, "incarnation": self.incarnation}
            await sender.send({"accepted": {**identity, "version": self.held.version.to_wire()}})
            await self._script(Stream(body, sender))


async def decide(bus: Bus, subjects: Subjects, record: DecisionRecord) -> int:
    """Writes the record like a coordinator, and returns the sequence of the write."""
    return await bus.put(subjects.state, RECORD, record.encode())

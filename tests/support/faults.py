"""Switches faults of a fake worker on and off while it runs, collects the statuses of a fleet, and delays a
decision."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack
from nats.aio.msg import Msg

from rl_plane.bus.connection import Bus
from rl_plane.bus.token_stream import StreamReceiver
from rl_plane.client import RlClient
from rl_plane.membership.worker_calls import WorkerCalls
from rl_plane.protocol.generation import GenerateDelta
from rl_plane.protocol.record import DecisionRecord
from rl_plane.protocol.subjects import RECORD, KeyValueBucket
from tests.support.stream_messages import messages_of

if TYPE_CHECKING:
    from tests.conftest import Plane, Spawned

_PATCH = """
import worker.engines.fake.adapter as fake
def _switch(name):
    return property(lambda self: Path({folder!r}, name).exists(), lambda self, value: None)
for _name in ("fail_stage", "fail_swap", "fail_overwrite", "miscompute"):
    setattr(fake.FakeConfig, _name, _switch(_name))
"""


@dataclass
class Faulty:
    """A worker, and the faults of its engine: `fail_stage`, `fail_swap`, `fail_overwrite`, `miscompute`."""

    worker: Spawned
    folder: Path

    @property
    def instance_id(self) -> str:
        return self.worker.instance_id

    def fail(self, name: str) -> None:
        (self.folder / name).touch()

    def mend(self, name: str) -> None:
        (self.folder / name).unlink()


def spawn_faulty(plane: Plane, *failing: str, **options: Any) -> Faulty:
    """`failing`: the faults that are on from the start."""
    folder = plane.tmp / f"faults-{secrets.token_hex(4)}"
    folder.mkdir()
    for name in failing:
        (folder / name).touch()
    return Faulty(plane.spawn(patch=_PATCH.format(folder=str(folder)), **options), folder)


@dataclass
class StatusLog:
    """Collects the status messages of the workers in the order in which they arrive."""

    latest: dict[str, dict[str, Any]] = field(default_factory=dict)
    """instance_id → the worker's last status."""
    events: list[dict[str, Any]] = field(default_factory=list)
    admitted: list[frozenset[str]] = field(default_factory=list)
    """The admitted workers after each event."""

    @classmethod
    async def follow(cls, client: WorkerCalls) -> StatusLog:
        """Begins with the present states, and follows all later messages."""
        log = cls()

        async def heard(message: Msg) -> None:
            log.add(msgpack.unpackb(message.data))

        await client.bus.subscribe(client.subjects().status("*"), heard)
        await client.bus.flush()
        await client.list_workers()
        for row in (await client.call_all("state")).rows:
            log.latest.setdefault(row.instance_id, {"instance_id": row.instance_id, **row.body})
        log.admitted = [log.open_workers()]  # the messages before did not show the whole fleet
        return log

    def add(self, status: dict[str, Any]) -> None:
        self.latest[status["instance_id"]] = status
        self.events.append(status)
        self.admitted.append(self.open_workers())

    def open_workers(self) -> frozenset[str]:
        """The workers that take requests, by their latest statuses."""
        return frozenset(key for key, status in self.latest.items() if status["admission"]["open"])

    def of(self, instance_id: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["instance_id"] == instance_id]


STREAM_S = 30.0
"""The bound in seconds of a stream in a test."""


class Stream:
    """A request to one worker, past any frontend."""

    def __init__(
        self, client: WorkerCalls, instance_id: str, prompt: list[int], max_tokens: int, **request: Any
    ) -> None:
        self.tokens: list[int] = []
        self.spans: list[dict[str, Any]] = []
        """The spans of all tokens, once the request has ended."""
        self.finish_reason: str | None = None
        self._client = client
        self._subject = client.subjects().generate(instance_id)
        self._request = {"prompt_token_ids": prompt, "max_tokens": max_tokens, **request}
        self._progress = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        receiver = StreamReceiver(self._client.bus)
        await receiver.start()
        try:
            stream = await receiver.open(self._subject, f"r{secrets.token_hex(4)}", {"request": self._request})
            async for message in messages_of(stream):
                if "delta" in message:
                    delta = GenerateDelta.model_validate(message["delta"])
                    self.tokens += delta.token_ids
                    self.spans = [span.model_dump() for span in delta.spans] or self.spans
                    self.finish_reason = delta.finish_reason
                    self._progress.set()
        finally:
            self._progress.set()
            await receiver.stop()

    async def more(self) -> None:
        """Waits until more tokens have come. Raises the error that ended the stream."""
        self._progress.clear()
        if self._task.done():
            await self._task
            return
        async with asyncio.timeout(STREAM_S):
            await self._progress.wait()

    async def until(self, tokens: int = 0, spans: int = 0) -> None:
        """Waits until `count` tokens have come. Raises the error that ended the stream; a good end before is a failure
        too."""
        while len(self.tokens) < tokens or len(self.spans) < spans:
            assert not self._task.done() or self._task.exception() is not None, "it ended too early"
            await self.more()

    async def end(self) -> Stream:
        """Raises the worker's error."""
        async with asyncio.timeout(STREAM_S):
            await self._task
        return self

    def stop(self) -> None:
        self._task.cancel()


async def generate(
    client: RlClient, instance_id: str, prompt: list[int], max_tokens: int, **request: Any
) -> Stream:
    return await Stream(client, instance_id, prompt, max_tokens, **request).end()


def hold_back(bus: Bus) -> tuple[asyncio.Event, asyncio.Event]:
    """A decision stands still on its way: (is it on its way?, release it)."""
    real, on_its_way, go_on = bus.put, asyncio.Event(), asyncio.Event()

    async def put(bucket: KeyValueBucket, key: str, value: bytes, **conditions: Any) -> int:
        if key == RECORD and DecisionRecord.decode(value).update_id and not on_its_way.is_set():
            on_its_way.set()
            await go_on.wait()
        return await real(bucket, key, value, **conditions)

    bus.put = put  # type: ignore[method-assign]
    return on_its_way, go_on

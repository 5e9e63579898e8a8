"""Scatter-gather: many direct requests, one inbox.

Each target gets its own publish with the reply subject `<inbox>.<scatter>.<index>`. NATS answers 503 to the index of a
dead target at once, so the caller does not wait for its time-out.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Sequence
from enum import Enum

import nats.errors
from nats.aio.msg import Msg

from rl_plane.bus.connection import Bus
from rl_plane.errors import BusUnreachable, PayloadTooLarge, PermissionDenied
from rl_plane.protocol.envelope import MAX_MESSAGE_BYTES

YIELD_EVERY = 256
"""Publishes between two turns of the loop, so that a large fan-out does not starve its own replies."""
NO_RESPONDER_RETRY_S = 0.1
NO_RESPONDER_RETRIES = 2
"""A member that has just joined another node of a cluster answers 503 for up to 250 ms."""


class Missing(Enum):
    LOST = "its subject has no subscriber: it is dead"
    SILENT = "no answer within the time-out"
    LEFT = "it left the fleet while the answer was awaited"
    DENIED = "NATS does not let this process's key ask it"


Answer = bytes | Missing
Heard = Callable[[int, Answer], None]
"""Receives each answer when it arrives, with the target's index, so that answers are read while others are on their
way. It must not raise."""


class Scatter:
    """One fan-out that is under way. `Gather.scatter` creates it."""

    def __init__(
        self,
        gather: Gather,
        key: str,
        targets: Sequence[tuple[str, bytes]],
        heard: Heard | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        self._gather = gather
        self._key = key
        self._targets = targets
        self._heard = heard
        self._headers = headers
        self._answers: dict[int, Answer] = {}
        self._retries: dict[int, int] = {}
        self._all = asyncio.Event()

    @property
    def unanswered(self) -> list[int]:
        return [index for index in range(len(self._targets)) if index not in self._answers]

    def answer(self, index: int, answer: Answer) -> None:
        if index in self._answers or index >= len(self._targets):
            return
        self._answers[index] = answer
        if self._heard is not None:
            self._heard(index, answer)
        if len(self._answers) == len(self._targets):
            self._all.set()

    async def send(self, index: int) -> None:
        subject, payload = self._targets[index]
        reply = f"{self._gather.inbox}.{self._key}.{index}"
        await self._gather.bus.nc.publish(subject, payload, reply=reply, headers=self._headers)

    async def ask_again(self) -> bool:
        """Sends again what has no answer yet. Returns False if it sends nothing, because the targets may still be
        reconnecting too."""
        if self._gather.bus.others_may_reconnect:
            return False
        with contextlib.suppress(nats.errors.Error):  # the caller's time-out ends the wait
            for sent, index in enumerate(self.unanswered):
                await self.send(index)
                if sent % YIELD_EVERY == YIELD_EVERY - 1:
                    await asyncio.sleep(0)
        return True

    def _refused(self, index: int) -> None:
        tries = self._retries.get(index, 0)
        if tries >= NO_RESPONDER_RETRIES:
            self.answer(index, Missing.LOST)
            return
        self._retries[index] = tries + 1
        asyncio.get_running_loop().call_later(NO_RESPONDER_RETRY_S, self._retry, index)

    def _retry(self, index: int) -> None:
        if index not in self._answers and self._gather.is_open(self._key):
            self._gather.start(self.send(index))

    async def wait(self, timeout_s: float) -> bool:
        """Waits for all answers, at most `timeout_s`. Returns whether all have come. It may be called again."""
        if not self._all.is_set():
            try:
                async with asyncio.timeout(timeout_s):
                    await self._all.wait()
            except TimeoutError:
                return False
        return True

    def answers(self) -> list[Answer]:
        """The answers so far, in the order of the targets."""
        return [self._answers.get(index, Missing.SILENT) for index in range(len(self._targets))]


class Gather:
    """The reply side of all fan-outs of one connection."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.inbox = bus.nc.new_inbox()
        self._open: dict[str, Scatter] = {}
        self._numbers = itertools.count()
        self._sending: set[asyncio.Task[None]] = set()

    def _denied(self, subject: str, error: PermissionDenied) -> None:
        """Ends the wait for the targets that this process may not ask."""
        for scatter in list(self._open.values()):
            for index in scatter.unanswered:
                if scatter._targets[index][0].lower() == subject:
                    scatter.answer(index, Missing.DENIED)

    async def start_listening(self) -> None:
        self.bus.on_denial(self._denied)
        await self.bus.subscribe(f"{self.inbox}.*.*", self._reply)

    def is_open(self, key: str) -> bool:
        return key in self._open

    def start(self, sending: object) -> None:
        task = asyncio.ensure_future(sending)  # type: ignore[call-overload]
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _reply(self, message: Msg) -> None:
        _, key, index = message.subject.rsplit(".", 2)
        scatter = self._open.get(key)
        if scatter is None:
            return  # a late answer: its fan-out has ended
        if not message.data and message.headers and message.headers.get("Status") == "503":
            scatter._refused(int(index))
        else:
            scatter.answer(int(index), message.data)

    async def scatter(
        self,
        targets: Sequence[tuple[str, bytes]],
        heard: Heard | None = None,
        headers: dict[str, str] | None = None,
    ) -> Scatter:
        """Sends each `(subject, payload)`. The caller must `close` the result. If the server takes no bytes any more,
        this raises BusUnreachable when the connection is given up. `headers`: those of each message."""
        for _, payload in targets:
            if len(payload) > MAX_MESSAGE_BYTES:
                raise PayloadTooLarge(
                    f"the request has {len(payload)} bytes; a NATS message carries {MAX_MESSAGE_BYTES}",
                    field="body",
                    fix="send weights by a transport, not in the request",
                )
        self.bus.check_connected()
        key = format(next(self._numbers), "x")
        scatter = self._open[key] = Scatter(self, key, targets, heard, headers)
        try:
            publish, prefix = self.bus.nc.publish, f"{self.inbox}.{key}."
            for index, (subject, payload) in enumerate(targets):
                await publish(subject, payload, reply=f"{prefix}{index}", headers=headers)
                if index % YIELD_EVERY == YIELD_EVERY - 1:
                    await asyncio.sleep(0)
        except nats.errors.Error as error:
            del self._open[key]
            raise BusUnreachable("the connection to NATS went down", retry_after_s=1.0) from error
        except BaseException:
            del self._open[key]
            raise
        if not targets:
            scatter._all.set()
        return scatter

    def close(self, scatter: Scatter) -> None:
        self._open.pop(scatter._key, None)

    async def run(self, targets: Sequence[tuple[str, bytes]], timeout_s: float) -> list[Answer]:
        """Sends, waits and closes."""
        scatter = await self.scatter(targets)
        try:
            await scatter.wait(timeout_s)
            return scatter.answers()
        finally:
            self.close(scatter)

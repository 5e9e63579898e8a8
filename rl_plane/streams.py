"""Token streams over NATS: numbered messages with credit, so that nothing is lost, unbounded or forgotten.

NATS has neither flow control from end to end nor delivery after a restart of its server. So a sender (worker)
numbers its messages, keeps those that are not confirmed, and stops when a window of them is out; a receiver
(frontend) confirms as it reads, at least every CREDIT_INTERVAL_S, which also tells the sender that somebody is
still there. After a gap or a reconnect the receiver asks for what it has missed.

    open    → {kind: open, id, request, …}                      reply subject = the receiver's inbox
            ← {n: 0, …} {n: 1, …} … {n: last, end: true, …}
    credit  → {kind: credit, id, consumed: n, have: n, resend: bool}
            ← {gone: true}  of a stream that the sender has given up, while the receiver stood still
    abort   → {kind: abort, id}
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgpack
import nats.errors
from nats.aio.msg import Msg

from rl_plane.bus import RECONNECT_GRACE_S, Bus
from rl_plane.errors import EngineFailed, PayloadTooLarge, WorkerLost, error_from_wire

WINDOW = 256
"""Unconfirmed messages of one stream: at 1 ms per round trip, 256,000 deltas a second."""
CREDIT_EVERY = 64
"""A quarter of the window: the sender never waits for a receiver that keeps up."""
CREDIT_INTERVAL_S = 2.0
ABANDONED_AFTER_S = 10.0
"""Five missed confirmations: the receiver is dead, and its request is aborted."""

Publish = Callable[[bytes], Awaitable[None]]


class SendWindow:
    """The sender's pure half: what is out, what is confirmed, who is still there."""

    def __init__(self, now: float, max_bytes: int) -> None:
        """`max_bytes`: what one message of the bus carries."""
        self.next = 0
        self._max_bytes = max_bytes
        self._unconfirmed: OrderedDict[int, bytes] = OrderedDict()
        self._heard_at = now

    def has_room(self) -> bool:
        return len(self._unconfirmed) < WINDOW

    def add(self, message: dict[str, Any]) -> bytes:
        """Numbers and encodes the next message. PayloadTooLarge: it is not sent; a smaller one may be the next."""
        packed: bytes = msgpack.packb({"n": self.next, **message})
        if len(packed) > self._max_bytes:
            raise PayloadTooLarge(
                f"the reply has a message of {len(packed)} bytes; a NATS message carries {self._max_bytes}",
                field="prompt",  # nothing else of a reply grows so large
                fix="send a shorter prompt, or raise max_payload of nats-server",
            )
        self._unconfirmed[self.next] = packed
        self.next += 1
        return packed

    def credit(self, consumed: int, have: int, resend: bool, now: float) -> list[bytes]:
        """The receiver has used everything before `consumed` and holds everything before `have`; returns what
        to send again."""
        self._heard_at = now
        while self._unconfirmed and next(iter(self._unconfirmed)) < consumed:
            self._unconfirmed.popitem(last=False)
        return [packed for number, packed in self._unconfirmed.items() if resend and number >= have]

    def all_confirmed(self) -> bool:
        return not self._unconfirmed

    def abandoned(self, now: float) -> bool:
        return now - self._heard_at > ABANDONED_AFTER_S


class ReceiveWindow:
    """The receiver's pure half: messages in order, each once, and when to confirm.

    Only what was used is confirmed, so a slow reader holds the sender back and a window bounds the queue."""

    def __init__(self) -> None:
        self.next = 0
        self.consumed = 0
        self._confirmed = 0
        self._missed = -1

    def take(self, number: int) -> tuple[bool, bool]:
        """(is it the next one?, is there a new gap before it?) One gap is told once: a window of messages may
        follow it, and each of them must not bring the whole window again."""
        if number == self.next:
            self.next += 1
            return True, False
        is_new = number > self.next != self._missed
        if is_new:
            self._missed = self.next
        return False, is_new

    def credit_due(self) -> bool:
        return self.consumed - self._confirmed >= CREDIT_EVERY

    def credit(self, resend: bool) -> dict[str, Any]:
        self._confirmed = self.consumed
        return {"kind": "credit", "consumed": self.consumed, "have": self.next, "resend": resend}


class StreamSender:
    """A worker's end of one stream."""

    def __init__(self, publish: Publish, max_bytes: int) -> None:
        self._publish = publish
        self._window = SendWindow(time.monotonic(), max_bytes)
        self._credit = asyncio.Event()

    async def send(self, message: dict[str, Any]) -> None:
        """Waits while the window is full. WorkerLost (of the receiver) when nobody confirms any more."""
        while not self._window.has_room():
            await self._wait_for_credit()
        packed = self._window.add(message)
        # A publish that fails while NATS is away is sent again at the receiver's next credit.
        with contextlib.suppress(nats.errors.Error):
            await self._publish(packed)

    async def finish(self, message: dict[str, Any]) -> None:
        """The last message; returns when all is confirmed or nobody is there."""
        await self.send({**message, "end": True})
        while not self._window.all_confirmed():
            await self._wait_for_credit()

    async def _wait_for_credit(self) -> None:
        self._credit.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CREDIT_INTERVAL_S):
                await self._credit.wait()
        self.check_receiver()

    def check_receiver(self) -> None:
        if self._window.abandoned(time.monotonic()):
            raise WorkerLost("the receiver of this stream is gone")

    async def credit(self, consumed: int, have: int, resend: bool) -> None:
        again = self._window.credit(consumed, have, resend, time.monotonic())
        self._credit.set()
        for packed in again:
            with contextlib.suppress(nats.errors.Error):
                await self._publish(packed)


class IncomingStream:
    """A receiver's end. Iterate it once; `close` (or leaving the iteration) aborts what has not ended."""

    def __init__(self, receiver: StreamReceiver, key: str, subject: str, stream_id: str, opening: bytes) -> None:
        self._receiver = receiver
        self._key = key
        self._reply = f"{receiver.inbox}.{key}"
        self._subject = subject
        self._id = stream_id
        self._opening = opening
        self._window = ReceiveWindow()
        self._queue: asyncio.Queue[dict[str, Any] | Exception] = asyncio.Queue()
        self._ended = False

    def put(self, message: Msg) -> bool:
        """A message from the worker. True: something is missing before it."""
        if not message.data and message.headers and message.headers.get("Status") == "503":
            if not self._receiver.just_back():  # else the worker may be on its way back too: it is asked again
                self.fail(WorkerLost("the worker was gone before it had the request", field="instance_id"))
            return False
        body = msgpack.unpackb(message.data)
        if body.get("gone"):
            self.fail(WorkerLost("the worker has given the request up: nobody had confirmed its tokens"))
            return False
        is_next, gap = self._window.take(body["n"])
        if is_next:
            self._queue.put_nowait(body)  # a window at most: the sender waits for our credit
        return gap

    def fail(self, error: Exception) -> None:
        """Ends the iteration with this error, after what has arrived."""
        self._queue.put_nowait(error)

    async def tell(self, message: dict[str, Any]) -> None:
        packed = msgpack.packb({**message, "id": self._id})
        with contextlib.suppress(nats.errors.Error):
            await self._receiver.bus.nc.publish(self._subject, packed, reply=self._reply)

    async def send_opening(self) -> None:
        await self._receiver.bus.nc.publish(self._subject, self._opening, reply=self._reply)

    async def credit(self) -> None:
        await self.tell(self._window.credit(False))

    async def ask_again(self) -> None:
        """For what may have been lost: the request itself, or messages that came since."""
        if self._window.next == 0:
            with contextlib.suppress(nats.errors.Error):
                await self.send_opening()
        else:
            await self.tell(self._window.credit(True))

    async def messages(self) -> AsyncIterator[dict[str, Any]]:
        """Each message in order, the last one with `end`; a typed error that the worker sent is raised."""
        try:
            while not self._ended:
                item = await self._queue.get()
                if isinstance(item, Exception):
                    raise item
                self._window.consumed += 1
                self._ended = bool(item.get("end"))
                if self._ended or self._window.credit_due():
                    await self.credit()
                if error := item.get("error"):
                    raise error_from_wire(error)
                yield item
        finally:
            await self.close()

    async def close(self) -> None:
        self._receiver.forget(self._key)
        if not self._ended:
            self._ended = True
            await self.tell({"kind": "abort"})


class StreamReceiver:
    """The receiving end of all streams of one connection."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.inbox = bus.nc.new_inbox()
        self._open: dict[str, IncomingStream] = {}
        self._numbers = itertools.count()
        self._credits: asyncio.Task[None] | None = None
        self._reconnected_at = -math.inf

    async def start(self) -> None:
        await self.bus.subscribe(f"{self.inbox}.*", self._message)
        self.bus.on_reconnect(self._reconnected)
        self._credits = asyncio.create_task(self._give_credit())

    async def stop(self) -> None:
        if self._credits is not None:
            self._credits.cancel()
        for stream in list(self._open.values()):
            await stream.close()

    async def open(self, subject: str, stream_id: str, message: dict[str, Any]) -> IncomingStream:
        """Sends the request to a worker's generate subject."""
        self.bus.check_connected()
        key = format(next(self._numbers), "x")
        opening = msgpack.packb({**message, "kind": "open", "id": stream_id})
        stream = self._open[key] = IncomingStream(self, key, subject, stream_id, opening)
        try:
            await stream.send_opening()
        except nats.errors.Error as error:
            self.forget(key)
            raise EngineFailed(f"the request could not be sent: {error}") from error
        return stream

    def forget(self, key: str) -> None:
        self._open.pop(key, None)

    async def _message(self, message: Msg) -> None:
        stream = self._open.get(message.subject.rsplit(".", 1)[1])
        if stream is not None and stream.put(message):
            await stream.ask_again()

    def just_back(self) -> bool:
        """This connection was down until now: that nobody listens to a subject means nothing yet."""
        return time.monotonic() < self._reconnected_at + RECONNECT_GRACE_S

    async def _reconnected(self) -> None:
        self._reconnected_at = time.monotonic()
        await self._ask_again()

    async def _ask_again(self) -> None:
        for stream in list(self._open.values()):
            await stream.ask_again()

    async def _give_credit(self) -> None:
        while True:
            await asyncio.sleep(CREDIT_INTERVAL_S)
            for stream in list(self._open.values()):
                # Each time also for what is missing: that repairs a loss which no later message shows.
                await stream.ask_again()

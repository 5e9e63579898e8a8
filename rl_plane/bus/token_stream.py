"""Token streams over NATS: numbered messages with credit, so that nothing is lost, unbounded or forgotten.

NATS has neither flow control from end to end nor delivery after a restart of its server. So a sender (worker)
numbers its messages, keeps those that are not confirmed, and stops when a window of them is out; a receiver
(frontend) confirms as it reads, at least every CREDIT_INTERVAL_S, which also tells the sender that somebody is
still there. After a gap or a reconnect the receiver asks for what it has missed.

    open    → {kind: open, id, request, …}                      reply subject = the receiver's inbox
              again, if nothing came: then the request, or all that was sent so far, was lost
            ← {n: 0, …} {n: 1, …} … {n: last, end: true, …}
    credit  → {kind: credit, id, consumed: n, have: n, resend: bool}
            ← {gone: true}  of a stream that the sender has given up, while the receiver stood still
    abort   → {kind: abort, id}

What a sender has for several streams of one receiver at one time goes as one message, to the inbox of any of them:
{many: [key, message, key, message, …]}, where a key is the last part of a stream's own reply subject.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import Any

import msgpack
import nats.errors
from nats.aio.msg import Msg

from rl_plane.bus.connection import RECONNECT_GRACE_S, Bus
from rl_plane.errors import BusUnreachable, PayloadTooLarge, Stalled, WorkerLost, error_from_wire
from rl_plane.protocol.envelope import MAX_MESSAGE_BYTES

WINDOW = 256
"""Unconfirmed messages of one stream: at 1 ms per round trip, 256,000 deltas a second."""
CREDIT_EVERY = 64
"""A quarter of the window: the sender never waits for a receiver that keeps up."""
CREDIT_INTERVAL_S = 2.0
ABANDONED_AFTER_S = 10.0
"""Five missed confirmations: the receiver is dead, and its request is aborted."""

MAX_BUNDLE_BYTES = 1 << 16
"""Of messages that go as one: a thousand short ones, and more in one would save nothing."""
HEAD_BYTES, KEY_BYTES = 16, 24
"""What a bundle takes beside its messages, and beside each of them."""
MAX_WAITING_BYTES = 1 << 20
"""In an outbox: then whoever sends waits until NATS has taken it."""

Publish = Callable[[bytes, float], Awaitable[None]]
"""Gets a message, and how long it may wait for others to go with it."""


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

    async def send(self, message: dict[str, Any], within_s: float = 0.0) -> None:
        """Waits while the window is full. WorkerLost (of the receiver) when nobody confirms any more. `within_s`: the
        message may wait so long for others to go with it."""
        while not self._window.has_room():
            await self._wait_for_credit()
        packed = self._window.add(message)
        # A publish that fails while NATS is away is sent again at the receiver's next credit.
        with contextlib.suppress(nats.errors.Error):
            await self._publish(packed, within_s)

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
                await self._publish(packed, 0.0)


class Outbox:
    """The way out of all streams of one sender. What they send in one turn of the loop to one receiver is one message:
    an engine's step makes a token for each of its requests."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._waiting: dict[str, list[tuple[str, bytes]]] = {}
        """Inbox of a receiver → (key of a stream, its message)."""
        self._size = 0
        self._sending: asyncio.Task[None] | None = None
        self._later: asyncio.TimerHandle | None = None

    async def publish(self, reply: str, packed: bytes, within_s: float = 0.0) -> None:
        """`reply`: where the stream's messages go. `within_s`: this one goes with the next, of whichever stream, or
        after so long. What NATS does not take is lost, as any message may be."""
        inbox, _, key = reply.rpartition(".")
        self._waiting.setdefault(inbox, []).append((key, packed))
        self._size += len(packed)
        if within_s and self._sending is None and self._later is None:
            self._later = asyncio.get_running_loop().call_later(within_s, self._begin)
        elif not within_s:
            self._begin()
        if self._size > MAX_WAITING_BYTES:
            await asyncio.shield(self._begin())

    def _begin(self) -> asyncio.Task[None]:
        if self._later is not None:
            self._later.cancel()
            self._later = None
        if self._sending is None:
            self._sending = asyncio.create_task(self._send())
        return self._sending

    async def _send(self) -> None:
        waiting, self._waiting, self._size, self._sending = self._waiting, {}, 0, None
        most = min(MAX_BUNDLE_BYTES, self._bus.nc.max_payload)
        for inbox, messages in waiting.items():
            for key, packed in bundles(messages, most):
                with contextlib.suppress(nats.errors.Error):
                    await self._bus.nc.publish(f"{inbox}.{key}", packed)


def bundles(messages: Iterable[tuple[str, bytes]], most: int) -> Iterator[tuple[str, bytes]]:
    """(key, packed) to be sent, of at most so many bytes where several go as one."""
    several: list[tuple[str, bytes]] = []
    size = HEAD_BYTES
    for key, packed in messages:
        if several and size + len(packed) + KEY_BYTES > most:
            yield _bundle(several)
            several, size = [], HEAD_BYTES
        several.append((key, packed))
        size += len(packed) + KEY_BYTES
    if several:
        yield _bundle(several)


def _bundle(messages: list[tuple[str, bytes]]) -> tuple[str, bytes]:
    first, packed = messages[0]
    if len(messages) == 1:
        return first, packed
    packer = msgpack.Packer()
    parts = [packer.pack_map_header(1), packer.pack("many"), packer.pack_array_header(2 * len(messages))]
    for key, packed in messages:
        parts += (packer.pack(key), packed)
    return first, b"".join(parts)


class IncomingStream:
    """A receiver's end. Iterate it once; `close` (or leaving the iteration) aborts what has not ended."""

    def __init__(
        self,
        receiver: StreamReceiver,
        key: str,
        subject: str,
        stream_id: str,
        opening: bytes,
        silence_s: float,
    ) -> None:
        self._receiver = receiver
        self._key = key
        self._reply = f"{receiver.inbox}.{key}"
        self._subject = subject
        self._id = stream_id
        self._opening = opening
        self._window = ReceiveWindow()
        self._queue: asyncio.Queue[tuple[float, dict[str, Any]] | Exception] = asyncio.Queue()
        self.arrived = 0.0
        """When the last message that was taken came, however late its reader took it; loop seconds. A batch has one
        time: what came early is taken for as late as what came last with it."""
        self._ended = False
        self._silence_s = silence_s
        self._waits_since = math.inf

    def put(self, body: dict[str, Any]) -> bool:
        """A message from the worker. True: something is missing before it."""
        if body.get("gone"):
            self.fail(WorkerLost("the worker has given the request up: nobody had confirmed its tokens"))
            return False
        is_next, gap = self._window.take(body["n"])
        if is_next:
            # A window at most: the sender waits for our credit.
            self._queue.put_nowait((asyncio.get_running_loop().time(), body))
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
        async with contextlib.aclosing(self.batches()) as batches:
            async for batch in batches:
                for message in batch:
                    yield message

    async def batches(self) -> AsyncGenerator[list[dict[str, Any]], None]:
        """Likewise, what has come since the last ones were taken: CREDIT_EVERY at most, since they count as used."""
        try:
            while not self._ended:
                batch, error = await self._take()
                if self._ended or self._window.credit_due():
                    await self.credit()
                if batch:
                    yield batch
                if error is not None:
                    raise error
        finally:
            await self.close()

    async def _take(self) -> tuple[list[dict[str, Any]], Exception | None]:
        """Messages, and the error that came after them."""
        batch: list[dict[str, Any]] = []
        if self._queue.empty():
            self._waits_since = time.monotonic()
        item = await self._queue.get()
        self._waits_since = math.inf
        while True:
            if isinstance(item, Exception):
                return batch, item
            self.arrived, message = item
            self._window.consumed += 1
            self._ended = bool(message.get("end"))
            if error := message.get("error"):
                return batch, error_from_wire(error)
            batch.append(message)
            if self._ended or len(batch) == CREDIT_EVERY or self._queue.empty():
                return batch, None
            item = self._queue.get_nowait()

    def check_silence(self, now: float) -> None:
        if now - self._waits_since > self._silence_s:
            self._waits_since = math.inf
            words = f"no token for {self._silence_s:g} s: is the fleet paused for ever?"
            self.fail(Stalled(words, fix="resume the fleet, and send it again", retry_after_s=1.0))

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

    async def open(
        self, subject: str, stream_id: str, message: dict[str, Any], silence_s: float = math.inf
    ) -> IncomingStream:
        """Sends the request to a worker's generate subject; PayloadTooLarge if no message carries it,
        BusUnreachable if NATS does not take it. `silence_s`: a reader that has waited so long gets Stalled,
        within CREDIT_INTERVAL_S."""
        self.bus.check_connected()
        key = format(next(self._numbers), "x")
        opening: bytes = msgpack.packb({**message, "kind": "open", "id": stream_id})
        most = min(MAX_MESSAGE_BYTES, self.bus.nc.max_payload)
        if len(opening) > most:
            raise PayloadTooLarge(
                f"the request has {len(opening)} bytes; a NATS message carries {most}",
                field="prompt",  # nothing else of a request grows so large
                fix="send a shorter prompt",
            )
        stream = self._open[key] = IncomingStream(self, key, subject, stream_id, opening, silence_s)
        try:
            await stream.send_opening()
        except nats.errors.Error as error:
            self.forget(key)
            raise BusUnreachable(f"the request could not be sent: {error}", retry_after_s=1.0) from error
        return stream

    def forget(self, key: str) -> None:
        self._open.pop(key, None)

    async def _message(self, message: Msg) -> None:
        key = message.subject.rsplit(".", 1)[1]
        if not message.data:
            if message.headers and message.headers.get("Status") == "503":
                self._nobody_there(key)
            return
        body = msgpack.unpackb(message.data)
        several = body.get("many")
        for one, each in zip(several[::2], several[1::2], strict=True) if several else ((key, body),):
            stream = self._open.get(one)
            if stream is not None and stream.put(each):
                await stream.ask_again()

    def _nobody_there(self, key: str) -> None:
        stream = self._open.get(key)
        if (
            stream is not None and not self.just_back()
        ):  # else the worker may be on its way back: it is asked again
            stream.fail(WorkerLost("the worker was gone before it had the request", field="instance_id"))

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
                stream.check_silence(time.monotonic())
                # Each time also for what is missing: that repairs a loss which no later message shows.
                await stream.ask_again()

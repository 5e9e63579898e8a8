"""Token streams over NATS: numbered messages with credit, so that no token is lost and no queue is unbounded.

NATS has neither flow control from end to end nor delivery after a restart of its server. So a sender (worker) numbers
its messages, keeps the unconfirmed ones, and stops when a window of them is out. A receiver (frontend) confirms the
messages that it has read, at least every CREDIT_INTERVAL_S, which also shows the sender that the receiver is alive.
After a gap or a reconnect the receiver asks for the messages that it has missed.

    open    → {kind: open, id, request, …}                      reply subject = the receiver's inbox
              sent again if nothing arrives, because the request or all messages so far may be lost
            ← {n: 0, …} {n: 1, …} … {n: last, end: true, …}
    credit  → {kind: credit, id, consumed: n, have: n, resend: bool}
            ← {gone: true}  the sender has given the stream up, because the receiver was silent
    abort   → {kind: abort, id}

A sender packs the messages of several streams to one receiver into one message, to the inbox of any of these streams:
{many: [key, message, key, message, …]}. A key is the last part of a stream's reply subject.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from typing import Any

import msgpack
import nats.errors
from nats.aio.msg import Msg

from rl_plane._util.alarm import Alarm
from rl_plane._util.limited_log import LimitedLog
from rl_plane.bus.connection import Bus
from rl_plane.errors import (
    BusUnreachable,
    EngineFailed,
    PayloadTooLarge,
    PermissionDenied,
    PlaneError,
    Stalled,
    WorkerLost,
    error_from_wire,
)
from rl_plane.protocol.envelope import MAX_MESSAGE_BYTES

log = logging.getLogger("rl_plane.bus.token_stream")

WINDOW = 256
"""Unconfirmed messages of one stream. With a round trip of 1 ms they allow 256,000 deltas a second."""
CREDIT_EVERY = 64
"""A quarter of the window, so that the sender never waits for a receiver that keeps up."""
CREDIT_INTERVAL_S = 2.0
ABANDONED_AFTER_S = 10.0
"""Five missed confirmations. The receiver counts as dead, and its request is aborted."""

MAX_BUNDLE_BYTES = 1 << 16
"""The size of a bundle: a thousand short messages. A larger one would save nothing."""
KEY_CHARS = 16
"""A stream's key is random, so a worker can't name the streams of other workers to the same receiver."""
HEAD_BYTES, KEY_BYTES = 16, 24
"""The bytes that a bundle adds to its messages, and to each of them."""
MAX_WAITING_BYTES = 1 << 20
"""Bytes that wait in an outbox. A sender of more waits until NATS has taken them."""

Publish = Callable[[bytes, float], Awaitable[None]]
"""Sends a message. The second argument is the time for which it may wait for others, to go with them."""


class SendWindow:
    """The sender's pure half: the unconfirmed messages, and when the receiver was last heard."""

    def __init__(self, now: float, max_bytes: int) -> None:
        """`max_bytes`: the size of the largest message of the bus."""
        self.next = 0
        self._max_bytes = max_bytes
        self._unconfirmed: OrderedDict[int, bytes] = OrderedDict()
        self._heard_at = now

    def has_room(self) -> bool:
        return len(self._unconfirmed) < WINDOW

    def add(self, message: dict[str, Any]) -> bytes:
        """Numbers and encodes the next message. PayloadTooLarge: the message is dropped, and its number stays free."""
        packed: bytes = msgpack.packb({"n": self.next, **message})
        if len(packed) > self._max_bytes:
            raise PayloadTooLarge(
                f"the reply has a message of {len(packed)} bytes; a NATS message carries {self._max_bytes}",
                field="prompt",  # the only cause of so large a reply
                fix="send a shorter prompt, or raise max_payload of nats-server",
            )
        self._unconfirmed[self.next] = packed
        self.next += 1
        return packed

    def credit(self, consumed: int, have: int, resend: bool, now: float) -> list[bytes]:
        """Notes that the receiver has used all messages before `consumed`, and has all before `have`. Returns the
        messages to send again."""
        self._heard_at = now
        while self._unconfirmed and next(iter(self._unconfirmed)) < consumed:
            self._unconfirmed.popitem(last=False)
        return [packed for number, packed in self._unconfirmed.items() if resend and number >= have]

    def all_confirmed(self) -> bool:
        return not self._unconfirmed

    def cut_off(self, now: float) -> None:
        """The sender has no connection, so the silence does not count."""
        self._heard_at = now

    def abandoned(self, now: float) -> bool:
        return now - self._heard_at > ABANDONED_AFTER_S


class ReceiveWindow:
    """The receiver's pure half: the order of the messages, and when to confirm them.

    It confirms only messages that were used. So a slow reader slows the sender down, and the window bounds the
    queue."""

    def __init__(self) -> None:
        self.next = 0
        self.consumed = 0
        self._confirmed = 0
        self._missed = -1

    def take(self, number: int) -> tuple[bool, bool]:
        """Returns whether this is the next message, and whether a new gap is before it. Each gap is reported once: a
        whole window may follow it, and not every message of it may request the window again."""
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
        """Sends a message; waits first while the window is full. WorkerLost: the receiver does not confirm any more.
        `within_s`: the message may wait this long, to go with others."""
        while not self._window.has_room():
            await self._wait_for_credit()
        packed = self._window.add(message)
        # A publish that fails while NATS is down is sent again at the receiver's next credit.
        with contextlib.suppress(nats.errors.Error):
            await self._publish(packed, within_s)

    async def finish(self, message: dict[str, Any]) -> None:
        """Sends the last message. Returns when every message is confirmed, or the receiver is gone."""
        await self.send({**message, "end": True})
        while not self._window.all_confirmed():
            await self._wait_for_credit()

    async def _wait_for_credit(self) -> None:
        self._credit.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CREDIT_INTERVAL_S):
                await self._credit.wait()
        self.check_receiver()

    def cut_off(self) -> None:
        """Notes that this process has no connection, so the receiver's silence does not count."""
        self._window.cut_off(time.monotonic())

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
    """Sends the messages of all streams of one sender. Messages to one receiver in one turn of the event loop go as
    one, because a step of an engine makes a token for each of its requests."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._waiting: dict[str, list[tuple[str, bytes]]] = {}
        """Inbox of a receiver → (key of a stream, its message)."""
        self._size = 0
        self._sending: asyncio.Task[None] | None = None
        self._later: asyncio.TimerHandle | None = None

    async def publish(self, reply: str, packed: bytes, within_s: float = 0.0) -> None:
        """Queues a message for the stream with the reply subject `reply`. `within_s`: the message waits for the next
        one of any stream, at most this long. A message that NATS does not take is lost; the receiver asks for it
        again."""
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
        for inbox, messages in waiting.items():
            for key, packed in bundles(messages, MAX_BUNDLE_BYTES):
                with contextlib.suppress(nats.errors.Error):
                    await self._bus.nc.publish(f"{inbox}.{key}", packed)


def bundles(messages: Iterable[tuple[str, bytes]], most: int) -> Iterator[tuple[str, bytes]]:
    """Packs messages into bundles of at most `most` bytes. Yields the key and the bytes of each."""
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
    """A receiver's end of one stream. Iterate it once. `close`, or leaving the iteration, aborts an unfinished
    request."""

    def __init__(
        self,
        receiver: StreamReceiver,
        key: str,
        subject: str,
        stream_id: str,
        opening: bytes,
        silence_s: float,
        headers: dict[str, str] | None = None,
    ) -> None:
        self._receiver = receiver
        self.key = key
        """The last part of the reply subject, by which a bundle names this stream."""
        self._reply = f"{receiver.inbox}.{key}"
        self.subject = subject
        self._id = stream_id
        self._opening = opening
        self._headers = headers
        self._window = ReceiveWindow()
        self._queue: asyncio.Queue[tuple[float, dict[str, Any]] | Exception] = asyncio.Queue()
        self.arrived = 0.0
        """The time at which the last read message arrived, in seconds of the loop. A batch has one time: the arrival of
        its last message."""
        self._ended = False
        self._failed = False
        self._silence_s = silence_s
        self._waits_since = math.inf
        self.read_every_s = 0.0
        """The reader does not need the messages as they come: it gets them this often, and at the end."""
        self._last_is_here = False
        self._alarm = Alarm()

    def put(self, body: Any) -> bool:
        """Takes a message from the worker. True: a message before it is missing.

        A message that no worker sends ends the stream with EngineFailed."""
        if self._failed:
            return False
        if not isinstance(body, dict) or not (body.get("gone") or type(body.get("n")) is int):
            self.fail(unreadable("it has a message without a number"))
            return False
        if body.get("gone"):
            self.fail(WorkerLost("the worker has given the request up: its tokens were not confirmed in time"))
            return False
        is_next, gap = self._window.take(body["n"])
        if is_next:
            # The queue has at most a window: the sender waits for this receiver's credit.
            if self._window.next - self._window.consumed > WINDOW:
                self.fail(unreadable("it does not wait for credit"))
                return False
            self._queue.put_nowait((asyncio.get_running_loop().time(), body))
            self._last_is_here = bool(body.get("end"))
            if self._is_due():
                self._alarm.ring()
        return gap

    def fail(self, error: Exception) -> None:
        """Ends the iteration with this error, after what has arrived. The first error counts."""
        if self._failed:
            return
        self._failed = True
        self._queue.put_nowait(error)
        self._alarm.ring()

    async def tell(self, message: dict[str, Any]) -> None:
        packed = msgpack.packb({**message, "id": self._id})
        with contextlib.suppress(nats.errors.Error):
            await self._receiver.bus.nc.publish(self.subject, packed, reply=self._reply)

    async def send_opening(self) -> None:
        await self._receiver.bus.nc.publish(self.subject, self._opening, reply=self._reply, headers=self._headers)

    async def ask_again(self) -> None:
        """Asks again for what may be lost: sends the request itself, or a credit that requests the missing messages."""
        if self._window.next == 0:
            with contextlib.suppress(nats.errors.Error):
                await self.send_opening()
        else:
            await self.tell(self._window.credit(True))

    async def batches(self) -> AsyncGenerator[list[dict[str, Any]], None]:
        """Yields the messages that have arrived since the last batch: at most CREDIT_EVERY, because they count as
        used. The last message has `end`. Raises a typed error that the worker sent."""
        try:
            while not self._ended:
                batch, error = await self._take()
                if self._ended or self._window.credit_due():
                    await self.tell(self._window.credit(False))
                if batch:
                    yield batch
                if error is not None:
                    raise error
        finally:
            await self.close()

    async def _take(self) -> tuple[list[dict[str, Any]], Exception | None]:
        """Waits for messages. Returns them, and the error that follows them."""
        batch: list[dict[str, Any]] = []
        if self.read_every_s and not self._is_due():
            await self._alarm.wait(asyncio.get_running_loop().time() + self.read_every_s)
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
                return batch, _error_of(error)
            batch.append(message)
            if self._ended or len(batch) == CREDIT_EVERY or self._queue.empty():
                return batch, None
            item = self._queue.get_nowait()

    def _is_due(self) -> bool:
        """Reports whether a reader with `read_every_s` gets what has come now."""
        return self._last_is_here or self._failed or self._queue.qsize() >= CREDIT_EVERY

    def check_silence(self, now: float) -> None:
        if now - self._waits_since > self._silence_s:
            self._waits_since = math.inf
            words = f"no token for {self._silence_s:g} s: the fleet may be paused"
            self.fail(Stalled(words, fix="resume the fleet, and send it again", retry_after_s=1.0))

    async def close(self) -> None:
        self._receiver.forget(self.key)
        if not self._ended:
            self._ended = True
            await self.tell({"kind": "abort"})


def unreadable(why: str) -> EngineFailed:
    """Returns the error for a stream with a message that no worker of this version sends."""
    return EngineFailed(
        f"the worker's stream can't be read: {why}",
        fix="install the same version of rl-plane for the worker and for the frontend",
    )


def _error_of(wire: Any) -> PlaneError:
    """The error that ends a stream. One without a code that this side knows is the worker's failure."""
    try:
        error = error_from_wire(wire)
    except Exception:  # whatever it has instead of the fields of an error
        return unreadable("its error can't be decoded")
    if not isinstance(error.facts.get("retry_after_s", 0.0), (int, float)):
        return unreadable("its error's retry_after_s is no number")
    return EngineFailed(error.message) if type(error) is PlaneError else error


def _unpacked(key: str, data: bytes) -> list[tuple[str, Any]]:
    """The messages in one message to the stream `key`, each with the key of its stream."""
    body = msgpack.unpackb(data)
    several = body.get("many")
    if several is None:
        return [(key, body)]
    if not isinstance(several, list) or several[:1] != [key]:
        raise ValueError("a bundle whose first message is another stream's")
    found = list(zip(several[::2], several[1::2], strict=True))
    if not all(isinstance(one, str) for one, _ in found):
        raise ValueError("a key is not a string")
    return found


class StreamReceiver:
    """The receiving end of all streams of one connection."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.inbox = bus.nc.new_inbox()
        self._open: dict[str, IncomingStream] = {}
        self._malformed = LimitedLog(log)
        self._credits: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.bus.subscribe(f"{self.inbox}.*", self._message)
        self.bus.on_reconnect(self._reconnected)
        self.bus.on_denial(self._denied)
        self._credits = asyncio.create_task(self._give_credit())

    async def stop(self) -> None:
        if self._credits is not None:
            self._credits.cancel()
        for stream in list(self._open.values()):
            await stream.close()

    async def open(
        self,
        subject: str,
        stream_id: str,
        message: dict[str, Any],
        silence_s: float = math.inf,
        headers: dict[str, str] | None = None,
    ) -> IncomingStream:
        """Sends the request to a worker's generate subject. PayloadTooLarge: it does not fit in one message.
        BusUnreachable: NATS does not take it. `silence_s`: a reader that has waited this long gets Stalled, at most
        CREDIT_INTERVAL_S later. `headers`: those of the request's message."""
        self.bus.check_connected()
        key = secrets.token_hex(KEY_CHARS // 2)
        opening: bytes = msgpack.packb({**message, "kind": "open", "id": stream_id})
        if len(opening) > MAX_MESSAGE_BYTES:
            raise PayloadTooLarge(
                f"the request has {len(opening)} bytes; a NATS message carries {MAX_MESSAGE_BYTES}",
                field="prompt",  # the only field of a request that grows so large
                fix="send a shorter prompt",
            )
        stream = self._open[key] = IncomingStream(self, key, subject, stream_id, opening, silence_s, headers)
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
                stream = self._open.get(key)
                # After a reconnect the worker may be reconnecting too: the request is sent again.
                if stream is not None and not self.bus.others_may_reconnect:
                    stream.fail(WorkerLost("the worker was gone before it had the request", field="instance_id"))
            return
        try:
            messages = _unpacked(key, message.data)
        except Exception as error:  # whatever the bytes make of the decoder
            self._malformed.warning("a malformed message on %s: %s", message.subject, error)
            if (stream := self._open.get(key)) is not None:
                stream.fail(unreadable("it has a message that can't be decoded"))
            return
        for one, each in messages:
            stream = self._open.get(one)
            if stream is not None and stream.put(each):
                await stream.ask_again()

    def _denied(self, subject: str, error: PermissionDenied) -> None:
        for stream in list(self._open.values()):
            if stream.subject.lower() == subject:
                stream.fail(type(error)(error.message, **error.facts))  # a caller adds its own tokens to its error

    async def _reconnected(self) -> None:
        for stream in list(self._open.values()):
            await stream.ask_again()

    async def _give_credit(self) -> None:
        while True:
            await asyncio.sleep(CREDIT_INTERVAL_S)
            for stream in list(self._open.values()):
                stream.check_silence(time.monotonic())
                # This also requests missing messages, which repairs a loss that no later message shows. Without a
                # connection nats-py would keep each of these messages.
                if self.bus.nc.is_connected:
                    await stream.ask_again()

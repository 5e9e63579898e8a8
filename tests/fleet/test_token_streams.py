"""Token streams: many at once between two threads, in bundles over NATS, and with readers that wait."""

from __future__ import annotations

import asyncio
import itertools
import random
import secrets
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import msgpack
import pytest
from nats.aio.msg import Msg
from nats.errors import OutboundBufferLimitError

from rl_plane.bus.connection import Bus
from rl_plane.bus.server import NatsServer
from rl_plane.bus.token_stream import CREDIT_EVERY, Outbox, StreamReceiver, StreamSender, bundles
from rl_plane.errors import BusUnreachable, PayloadTooLarge, Stalled, WorkerLost
from rl_plane.protocol.envelope import MAX_MESSAGE_BYTES
from tests.support.faulty_bus import BusFaults
from tests.support.stream_messages import messages_of
from worker.runtime.engine_loop import UNDO_S, EngineLoop

if TYPE_CHECKING:
    from tests.conftest import Plane

BOUND_S = 30.0
ENDLESS_S = 1e9
"""Longer than any test."""
STREAMS, MESSAGES = 20, 150
"""More messages than a batch takes, of more streams than one message need carry."""


@pytest.mark.parametrize("seed", range(10))
def test_a_bundle_loses_nothing_and_stays_within_its_bound(seed: int) -> None:
    pick = random.Random(seed)
    most = 1000
    sent = [
        (format(number, "x"), msgpack.packb({"n": number, "x": "y" * pick.choice([1, 10, 400, 1500])}))
        for number in range(200)
    ]
    got: list[tuple[str, Any]] = []
    for key, packed in bundles(sent, most):
        several = msgpack.unpackb(packed).get("many")
        parts = (
            list(zip(several[::2], several[1::2], strict=True)) if several else [(key, msgpack.unpackb(packed))]
        )
        assert parts[0][0] == key, "it goes to a stream that is in it"
        assert len(packed) <= most or len(parts) == 1
        got += parts
    assert got == [(key, msgpack.unpackb(packed)) for key, packed in sent]


class Sending:
    """A worker's end: each stream that is opened sends its number of messages, as fast as it may."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._outbox = Outbox(bus)
        self._senders: dict[str, StreamSender] = {}
        self.tasks: list[asyncio.Task[None]] = []

    async def message(self, message: Msg) -> None:
        body = msgpack.unpackb(message.data)
        if body["kind"] == "open":
            sender = self._senders[body["id"]] = StreamSender(
                partial(self._outbox.publish, message.reply), self._bus.nc.max_payload
            )
            self.tasks.append(asyncio.create_task(self._send(sender, body["messages"])))
        elif body["kind"] == "credit":
            await self._senders[body["id"]].credit(body["consumed"], body["have"], body["resend"])

    async def _send(self, sender: StreamSender, messages: int) -> None:
        for number in range(messages):
            await sender.send({"x": number})
            await asyncio.sleep(0)
        if messages:
            await sender.finish({"x": messages})


@asynccontextmanager
async def both_ends(
    url: str, faults: BusFaults | None = None
) -> AsyncIterator[tuple[StreamReceiver, str, Counter[str]]]:
    """The receiver, the subject of the sender, and how many messages came over NATS. `faults`: of the receiver's
    connection."""
    there, here = await Bus.connect(url), await (faults or BusFaults()).connect(url, "receiver", BOUND_S)
    subject, counted = f"streams.{secrets.token_hex(4)}", Counter[str]()
    sending, receiver = Sending(there), StreamReceiver(here)
    await there.subscribe(subject, sending.message)
    await there.flush()

    async def count(message: Msg) -> None:
        counted["messages"] += 1

    await receiver.start()
    await here.subscribe(f"{receiver.inbox}.*", count)
    await here.flush()
    try:
        yield receiver, subject, counted
    finally:
        for task in sending.tasks:
            task.cancel()
        await asyncio.gather(*sending.tasks, return_exceptions=True)
        await receiver.stop()
        await here.close()
        await there.close()


async def test_streams_that_send_at_once_share_messages(nats: NatsServer) -> None:
    async with both_ends(nats.url) as (receiver, subject, counted):

        async def read(number: int) -> list[int]:
            stream = await receiver.open(subject, f"s{number}", {"messages": MESSAGES})
            got: list[int] = []
            async for batch in stream.batches():
                assert len(batch) <= CREDIT_EVERY
                got += [message["x"] for message in batch]
            return got

        read_all = await asyncio.gather(*map(read, range(STREAMS)))
        assert read_all == [list(range(MESSAGES + 1))] * STREAMS
        assert counted["messages"] < STREAMS * MESSAGES / 2


async def test_a_message_that_may_wait_goes_with_the_next_or_by_itself(nats: NatsServer) -> None:
    async with both_ends(nats.url) as (receiver, _, _):
        came: asyncio.Queue[Any] = asyncio.Queue()

        async def take(message: Msg) -> None:
            came.put_nowait((message.subject, msgpack.unpackb(message.data)))

        inbox = receiver.bus.nc.new_inbox()
        await receiver.bus.subscribe(f"{inbox}.*", take)
        await receiver.bus.flush()
        outbox = Outbox(receiver.bus)
        async with asyncio.timeout(BOUND_S):
            await outbox.publish(f"{inbox}.a", msgpack.packb(1), within_s=2 * BOUND_S)
            await outbox.publish(f"{inbox}.b", msgpack.packb(2), within_s=2 * BOUND_S)
            await outbox.publish(f"{inbox}.a", msgpack.packb(3))
            assert await came.get() == (f"{inbox}.a", {"many": ["a", 1, "b", 2, "a", 3]})
            await outbox.publish(f"{inbox}.c", msgpack.packb(4), within_s=0.01)
            assert await came.get() == (f"{inbox}.c", 4)


async def test_a_token_that_comes_at_once_takes_the_acceptance_with_it(plane: Plane) -> None:
    worker = plane.spawn(
        patch="import worker.generation_service as generation; generation.ACCEPTED_WITHIN_S = 600"
    )
    client = await plane.client()
    came: list[Any] = []
    all_here = asyncio.Event()

    async def take(message: Msg) -> None:
        came.append(msgpack.unpackb(message.data))
        all_here.set()

    inbox = client.bus.nc.new_inbox()
    await client.bus.subscribe(f"{inbox}.*", take)
    await client.bus.flush()
    request = {"prompt_token_ids": [5], "max_tokens": 1, "ignore_eos": True}
    opening = msgpack.packb({"kind": "open", "id": "r1", "request": request})
    await client.bus.nc.publish(client.subjects().generate(worker.instance_id), opening, reply=f"{inbox}.a")
    async with asyncio.timeout(BOUND_S):
        await all_here.wait()
    _, accepted, _, token = came[0]["many"]
    assert accepted["accepted"]["instance_id"] == worker.instance_id
    assert len(token["delta"]["token_ids"]) == 1


def first_of(body: dict[str, Any]) -> dict[str, Any]:
    """The first of the stream's messages that one NATS message carries."""
    found: dict[str, Any] = body["many"][1] if "many" in body else body
    return found


async def test_a_first_message_that_is_lost_is_sent_again(plane: Plane) -> None:
    """All that the receiver can do is to send its request again: it knows of nothing that came."""
    lost: list[dict[str, Any]] = []
    faults = BusFaults()

    def loses(message: Msg) -> bool:
        if lost or not message.subject.startswith(f"{receiver.inbox}."):
            return False
        lost.append(msgpack.unpackb(message.data))
        return True

    # It is not to begin anew after it has given up the first one.
    worker = plane.spawn(patch="import rl_plane.bus.token_stream as streams; streams.ABANDONED_AFTER_S = 600")
    client = await plane.client(connect_bus=faults.connect)
    receiver = StreamReceiver(client.bus)
    await receiver.start()
    faults.loses = loses
    body = {"request": {"prompt_token_ids": [5], "max_tokens": 3, "ignore_eos": True}}
    stream = await receiver.open(client.subjects().generate(worker.instance_id), "r1", body)
    async with asyncio.timeout(BOUND_S):
        first, *others = [message async for message in messages_of(stream)]
    await receiver.stop()
    assert first_of(lost[0])["n"] == 0
    assert first["accepted"]["instance_id"] == worker.instance_id
    assert sum(len(one["delta"]["token_ids"]) for one in others) == 3


async def test_a_request_that_no_message_carries_is_not_sent(nats: NatsServer) -> None:
    async with both_ends(nats.url) as (receiver, subject, _):
        with pytest.raises(PayloadTooLarge, match=str(MAX_MESSAGE_BYTES)):
            await receiver.open(subject, "s", {"messages": 3, "prompt": "x" * MAX_MESSAGE_BYTES})
        stream = await receiver.open(subject, "s", {"messages": 3, "prompt": "x" * (MAX_MESSAGE_BYTES - 100)})
        async with asyncio.timeout(BOUND_S):
            assert [message["x"] async for message in messages_of(stream)] == [0, 1, 2, 3]


async def test_a_request_that_nats_does_not_take_is_no_engines_failure(
    nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(*args: Any, **kwargs: Any) -> None:
        raise OutboundBufferLimitError

    async with both_ends(nats.url) as (receiver, subject, _):
        with monkeypatch.context() as patched:
            patched.setattr(receiver.bus.nc, "publish", full)
            with pytest.raises(BusUnreachable, match="could not be sent") as caught:
                await receiver.open(subject, "s", {"messages": 0})
        assert caught.value.facts["retry_after_s"] == 1.0


async def test_a_reader_waits_for_a_token_so_long_and_no_longer(nats: NatsServer) -> None:
    async with both_ends(nats.url) as (receiver, subject, _):
        stream = await receiver.open(subject, "s", {"messages": 0}, silence_s=60.0)
        stream.check_silence(time.monotonic() + 61.0)  # no reader waits yet
        async with aclosing(stream.batches()) as batches:
            waiting = asyncio.ensure_future(anext(batches))
            await asyncio.sleep(0)
            stream.check_silence(time.monotonic() + 59.0)
            await asyncio.sleep(0)
            assert not waiting.done()
            stream.check_silence(time.monotonic() + 61.0)
            with pytest.raises(Stalled):
                await waiting


async def test_the_arrival_time_of_a_message_does_not_depend_on_when_it_is_read(nats: NatsServer) -> None:
    loop, all_here = asyncio.get_running_loop(), asyncio.Event()
    faults = BusFaults()

    def noted(message: Msg) -> None:
        body = msgpack.unpackb(message.data)
        if any(one.get("end") for one in body.get("many", [body])[1::2] or [body]):
            all_here.set()

    faults.after = noted
    async with both_ends(nats.url, faults) as (receiver, subject, _):
        stream = await receiver.open(subject, "s", {"messages": MESSAGES})
        async with asyncio.timeout(BOUND_S):
            await all_here.wait()
        read_from = loop.time()
        came = [(len(batch), stream.arrived) async for batch in stream.batches()]
    assert sum(count for count, _ in came) == MESSAGES + 1
    assert 0.0 < came[0][1] <= came[-1][1] <= read_from


async def test_a_reader_in_no_hurry_gets_the_rest_at_its_end_or_failure(nats: NatsServer) -> None:
    """A full batch comes too, since the sender waits for credit."""
    async with both_ends(nats.url) as (receiver, subject, _), asyncio.timeout(BOUND_S):
        stream = await receiver.open(subject, "s", {"messages": 0})
        stream.read_every_s = ENDLESS_S
        async with aclosing(stream.batches()) as batches:
            waiting = asyncio.ensure_future(anext(batches))
            await asyncio.sleep(0)
            for number in range(CREDIT_EVERY):
                assert not waiting.done()
                stream.put({"n": number})
                await asyncio.sleep(0)
            assert len(await waiting) == CREDIT_EVERY
            waiting = asyncio.ensure_future(anext(batches))
            await asyncio.sleep(0)
            stream.put({"n": CREDIT_EVERY})
            await asyncio.sleep(0)
            assert not waiting.done()
            stream.fail(WorkerLost("gone"))
            assert len(await waiting) == 1, "what has come is not lost"
            with pytest.raises(WorkerLost):
                await anext(batches)
        stream = await receiver.open(subject, "t", {"messages": CREDIT_EVERY // 2})
        stream.read_every_s = ENDLESS_S
        assert [len(batch) async for batch in stream.batches()] == [CREDIT_EVERY // 2 + 1]


async def test_a_reader_in_no_hurry_looks_now_and_then(nats: NatsServer) -> None:
    async with both_ends(nats.url) as (receiver, subject, _), asyncio.timeout(BOUND_S):
        stream = await receiver.open(subject, "s", {"messages": 0})
        stream.read_every_s = 0.01
        async with aclosing(stream.batches()) as batches:
            for number in range(3):
                stream.put({"n": number})
                assert [message["n"] for message in await anext(batches)] == [number]


async def test_a_worker_that_reconnects_later_than_its_frontend_counts_as_alive(
    own_nats: tuple[NatsServer, Plane],
) -> None:
    server, plane = own_nats
    faults, refused = BusFaults(), asyncio.Event()

    def noted(message: Msg) -> None:
        if not message.data:
            refused.set()

    async def nothing(message: Msg) -> None:
        pass

    faults.after = noted
    there, here = await Bus.connect(server.url), await faults.connect(server.url, "receiver", BOUND_S)
    await there.subscribe("worker", nothing)
    await there.flush()
    receiver = StreamReceiver(here)
    await receiver.start()
    stream = await receiver.open("worker", "s", {"messages": 0})
    await here.flush()
    server.kill()
    await plane.until(lambda: not here.nc.is_connected)
    await stream.ask_again()  # nats-py sends it first when NATS is back
    await there.close()
    server.start()
    async with asyncio.timeout(BOUND_S):
        await refused.wait()
        stream.put({"n": 0, "end": True})
        assert [message["n"] async for message in messages_of(stream)] == [0]
    await receiver.stop()
    await here.close()


# ---- between the threads of a worker ----


@pytest.fixture
def engine_loop() -> Iterator[tuple[EngineLoop, asyncio.AbstractEventLoop]]:
    with engine_thread() as one:
        yield one


@contextmanager
def engine_thread(undo_s: float = UNDO_S) -> Iterator[tuple[EngineLoop, asyncio.AbstractEventLoop]]:
    """Runs an engine loop in a thread until the block ends."""
    made: list[tuple[EngineLoop, asyncio.AbstractEventLoop]] = []
    ready, end = threading.Event(), asyncio.Event()

    async def run() -> None:
        made.append((EngineLoop(undo_s), asyncio.get_running_loop()))
        ready.set()
        await end.wait()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    assert ready.wait(30)
    try:
        yield made[0]
    finally:
        made[0][1].call_soon_threadsafe(end.set)
        thread.join()


async def test_events_of_one_turn_of_an_engine_cross_to_the_worker_at_once(
    engine_loop: tuple[EngineLoop, asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, crossings = asyncio.get_running_loop(), 0
    to_here = here.call_soon_threadsafe

    def counted(*args: Any, **more: Any) -> asyncio.Handle:
        nonlocal crossings
        crossings += 1
        return to_here(*args, **more)

    async def source(fails: bool) -> AsyncGenerator[int, None]:
        for number in range(MESSAGES):
            yield number
            await asyncio.sleep(0)
        if fails:
            raise ValueError("as it should")

    async def read(fails: bool) -> list[int]:
        got: list[int] = []
        try:
            async for batch in engine_loop[0].stream(source(fails)):
                got += batch
        except ValueError:
            assert fails
        else:
            assert not fails
        return got

    monkeypatch.setattr(here, "call_soon_threadsafe", counted)
    assert (
        await asyncio.gather(*(read(number % 2 == 0) for number in range(STREAMS)))
        == [list(range(MESSAGES))] * STREAMS
    )
    assert crossings < STREAMS * MESSAGES / 2


async def test_a_reader_who_waits_for_the_end_gets_what_was_made_meanwhile_at_once(
    engine_loop: tuple[EngineLoop, asyncio.AbstractEventLoop],
) -> None:
    read_first = threading.Event()

    async def source() -> AsyncGenerator[int, None]:
        yield 0
        await asyncio.to_thread(read_first.wait, 30)
        for number in range(1, MESSAGES):
            yield number
            await asyncio.sleep(0)

    batches: list[list[int]] = []
    async with asyncio.timeout(30):
        async for batch in engine_loop[0].stream(source(), gather_s=ENDLESS_S):
            batches.append(batch)
            read_first.set()
    assert batches == [[0], list(range(1, MESSAGES))], "the end of the source ends the wait"


async def test_gathered_items_come_after_their_time_also_if_the_source_continues(
    engine_loop: tuple[EngineLoop, asyncio.AbstractEventLoop],
) -> None:
    async def source() -> AsyncGenerator[int, None]:
        for number in itertools.count():
            yield number
            await asyncio.sleep(0.001)

    got: list[int] = []
    async with asyncio.timeout(30):
        async for batch in engine_loop[0].stream(source(), gather_s=0.02):
            got += batch
            if len(got) > 100:
                break
    assert got == list(range(len(got)))


async def test_a_cancelled_caller_waits_until_its_work_has_cleaned_up(
    engine_loop: tuple[EngineLoop, asyncio.AbstractEventLoop],
) -> None:
    """Otherwise the next change of the engine would run beside the cleanup."""
    engine, its_loop = engine_loop
    begun, undoing, may_end, ended = threading.Event(), threading.Event(), asyncio.Event(), threading.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            undoing.set()
            await may_end.wait()
            ended.set()

    caller = asyncio.create_task(engine.run(work()))
    assert await asyncio.to_thread(begun.wait, 30)
    caller.cancel()
    assert await asyncio.to_thread(undoing.wait, 30)
    assert not caller.done()
    its_loop.call_soon_threadsafe(may_end.set)
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert ended.is_set()


async def test_work_that_goes_to_its_end_is_waited_for(
    engine_loop: tuple[EngineLoop, asyncio.AbstractEventLoop],
) -> None:
    engine, its_loop = engine_loop
    begun, may_end, ended = threading.Event(), asyncio.Event(), threading.Event()

    async def work() -> None:
        begun.set()
        await may_end.wait()
        ended.set()

    caller = asyncio.create_task(engine.run(work(), to_its_end=True))
    assert await asyncio.to_thread(begun.wait, 30)
    caller.cancel()
    here = asyncio.get_running_loop()
    here.call_soon(lambda: its_loop.call_soon_threadsafe(may_end.set))  # behind the cancellation
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert ended.is_set()


async def test_the_caller_of_work_that_ignores_cancellation_returns_after_a_bound(
    caplog: pytest.LogCaptureFixture,
) -> None:
    begun, may_end = threading.Event(), asyncio.Event()

    async def stubborn() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await may_end.wait()

    with engine_thread(undo_s=0.05) as (engine, its_loop):
        caller = asyncio.create_task(engine.run(stubborn()))
        assert await asyncio.to_thread(begun.wait, 30)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert "stubborn does not end after its caller was cancelled" in caplog.text
        its_loop.call_soon_threadsafe(may_end.set)

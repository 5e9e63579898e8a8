"""An update that is dropped leaves a worker as it was, whatever comes meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from rl_plane.errors import EngineFailed, UpdateAborted
from rl_plane.protocol.update_requests import AbortUpdate, PreparedReply, ReceiveRequest, Transport
from tests.support.receive_requests import named_request
from worker.reconcile.coordinator_calls import CoordinatorCalls
from worker.reconcile.staged_updates import WeightUpdates

ROAD = {"backend": "road"}
BOUND_S = 10.0


class Engine:
    """An EngineAdapter and its EngineLoop. A receive ends when it is cancelled, or with `complete`."""

    def __init__(self) -> None:
        self.receiver = self
        self.opened = 0
        self.is_open = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.complete = False
        self.discards = asyncio.Event()
        self.may_discard = asyncio.Event()
        self.discarded: list[str] = []

    def open(self, *_: object) -> None:
        self.opened += 1
        self._loop.call_soon_threadsafe(self.is_open.set)

    def receive(self, staging: str, cancelled: Callable[[], bool]) -> PreparedReply:
        while not self.complete:
            if cancelled():
                raise EngineFailed("staging was cancelled")
        return PreparedReply(digest="d", tensors=1, bytes=1, refetchable=True)

    def received(self) -> None:
        return None

    def discard(self, staging: str) -> None:
        asyncio.run_coroutine_threadsafe(self._discard(staging), self._loop).result()

    async def _discard(self, staging: str) -> None:
        self.discards.set()
        await self.may_discard.wait()
        self.discarded.append(staging)


def updates_of(engine: Any) -> WeightUpdates:
    info: Any = SimpleNamespace(transports=("road",), vocab_size=512, max_model_len=512)
    return WeightUpdates(engine, info, lambda staged: None, lambda: None)


def calls_of(changes: Any, updates: WeightUpdates) -> CoordinatorCalls:
    async def read() -> None:
        pass

    core: Any = SimpleNamespace(
        state=SimpleNamespace(check_fence=lambda fence: None, check_weights_here=lambda: None, adapters={}),
        check_undecided=lambda update_id: None,
    )
    record: Any = SimpleNamespace(read=read)
    updates.check = lambda *_: None  # type: ignore[method-assign]
    return CoordinatorCalls(core, record, changes, updates, Transport(backend="road"), lambda: None)


@pytest.fixture(autouse=True)
async def bound() -> AsyncIterator[None]:
    async with asyncio.timeout(BOUND_S):
        yield


async def test_an_update_that_was_dropped_while_it_listened_begins_anew() -> None:
    """A trainer may repeat a call whose first try was aborted. The worker must listen again then."""
    engine = Engine()
    updates, request = updates_of(engine), named_request("u", ROAD).request
    for opened in (1, 2):
        await updates.listen(request, 1)
        assert engine.opened == opened
        assert await updates.drop("u")
        assert updates.failed is None, "it was aborted"


async def test_a_drop_waits_for_what_an_earlier_one_still_discards() -> None:
    """The call that drops an update may end early. The next update needs the memory."""
    engine = Engine()
    engine.complete = True
    updates = updates_of(engine)
    await updates.prepare(named_request("u", ROAD).request, 1)
    first = asyncio.create_task(updates.drop("u"))
    await engine.discards.wait()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    second = asyncio.create_task(updates.drop(None))
    done, _ = await asyncio.wait([second], timeout=0.1)
    assert not done
    engine.may_discard.set()
    await second
    assert engine.discarded == ["staging-0"]


@pytest.mark.parametrize("aborted", ["u", None, "another"])
async def test_an_abort_reaches_an_update_in_place_that_waits_for_its_turn(aborted: str | None) -> None:
    turn, waits, engine = asyncio.Event(), asyncio.Event(), Engine()

    class Changes:
        @asynccontextmanager
        async def turn(self, fence: int) -> AsyncIterator[None]:
            waits.set()
            await turn.wait()
            yield

        async def overwrite(self, request: ReceiveRequest, fence: int, mode: str, bound_s: None) -> PreparedReply:
            return await updates.prepare(request, fence)

        def look(self) -> None:
            pass

    updates = updates_of(engine)
    calls = calls_of(Changes(), updates)
    prepare = asyncio.create_task(calls.prepare(named_request("u", ROAD, in_place=True).request, 1))
    await waits.wait()
    assert await calls.abort(AbortUpdate(update_id=aborted), 1) == {"discarded": False}
    turn.set()
    if aborted == "another":
        await engine.is_open.wait()
        engine.may_discard.set()
        assert await calls.abort(AbortUpdate(update_id="u"), 1) == {"discarded": True}
        with pytest.raises(UpdateAborted, match="while it was received"):
            await prepare
        return
    with pytest.raises(UpdateAborted, match="before it began"):
        await prepare
    assert not engine.opened


async def test_a_heal_in_place_ends_when_the_next_update_in_place_comes() -> None:
    """The heal changes the engine until it ends, so the update could not begin before."""
    engine, changing = Engine(), asyncio.Lock()
    engine.may_discard.set()

    class Changes:
        @asynccontextmanager
        async def turn(self, fence: int) -> AsyncIterator[None]:
            async with changing:
                yield

        async def overwrite(self, request: ReceiveRequest, fence: int, mode: str, bound_s: None) -> PreparedReply:
            engine.complete = True
            return await updates.prepare(request, fence)

    async def heal() -> None:
        async with changing:
            await updates.prepare(named_request("committed", ROAD, in_place=True).request)

    updates = updates_of(engine)
    calls = calls_of(Changes(), updates)
    healing = asyncio.create_task(heal())
    await engine.is_open.wait()
    try:
        async with asyncio.timeout(BOUND_S):
            reply = await calls.prepare(named_request("u", ROAD, in_place=True).request, 1)
        assert reply["digest"] == "d"
    finally:
        engine.complete = True
    with pytest.raises(UpdateAborted, match="while it was received"):
        await healing

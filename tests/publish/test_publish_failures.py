"""A publication that fails names the reason, ends the sending, and leaves the fleet as it was."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import rl_plane.publish.publisher as publishers
from rl_plane.errors import (
    Conflict,
    InvalidRequest,
    InvalidWeights,
    PlaneError,
    Unavailable,
    UpdateAborted,
)
from rl_plane.publish import Progress, WeightPublisher
from rl_plane.publish.fleet_access import BlockingFleet
from rl_plane.publish.publish_options import PublishLimits
from rl_plane.publish.sources.base import Taken
from rl_plane.publish.sources.directory import DirectorySource
from rl_plane.transports.base import SenderContext
from rl_plane.transports.filesystem.sender import FilesystemSender
from rl_plane.transports.ipc.ipc_session import Bounds
from rl_plane.transports.ipc.sender import IpcSender
from tests.conftest import Plane
from tests.support.delta_updates import tensors_in
from tests.support.publishing import (
    BOUND_S,
    Changing,
    Gathering,
    Held,
    Lending,
    Streaming,
    publisher_by,
    root_of,
    served,
)
from worker.receive.staging import model_digest

pytestmark = [pytest.mark.slow, pytest.mark.parallel]


class Meanwhile(DirectorySource):
    """Calls a function when some of its tensors have been read."""

    def __init__(self, path: Path, happens: Callable[[], object], after: int = 10) -> None:
        super().__init__(path)
        self.happens, self.after = happens, after

    def take(self) -> Taken:
        taken = super().take()

        def tensors() -> Iterator[Any]:
            yield from itertools.islice(taken.tensors, self.after)
            self.happens()
            yield from taken.tensors

        return Taken(taken.specs, tensors(), None, taken.close)


@pytest.mark.parametrize(
    ("backend", "ends"),
    [("gloo", "killed"), ("ipc", "killed"), *((each, "without room") for each in ("gloo", "ipc", "nixl"))],
)
async def test_a_worker_that_ends_while_it_receives_is_named_and_why(
    backend: str, ends: str, plane: Plane
) -> None:
    """The error does not name the workers that only take part in that failure. A `nixl` receiver comes when all
    tensors are there."""
    if backend == "nixl":
        pytest.importorskip("nixl")
    shape = {"tensors": 40, "nbytes": 65536}
    others = plane.spawn_many(2, model=plane.model(0, **shape))
    room: dict[str, Any] = {"staging_bytes": 20 * 65536} if ends == "without room" else {}
    failing = plane.spawn(model=plane.model(0, **shape), **room)
    source = Meanwhile(plane.model(1, **shape), failing.kill if ends == "killed" else lambda: None)
    client, fleet = await plane.client(), await plane.fleet()
    publisher = WeightPublisher(source, fleet, transport=backend, bucket_bytes=1 << 18, workers=3)
    with pytest.raises(PlaneError) as caught:
        await publisher.publish_async("one")
    message, rows = str(caught.value), {row["instance_id"]: row for row in caught.value.facts["workers"]}
    assert rows.keys() == {one.instance_id for one in plane.spawned}
    why = rows[failing.instance_id]["error"]
    assert failing.instance_id in message
    assert not any(one.instance_id in message for one in others)
    if ends == "killed":
        assert why["code"] == "worker_lost"
        assert await (await client.view()).wait_until(lambda now: len(now) == 2, BOUND_S)
    else:
        assert "bytes to stage" in why["message"]
        assert why["message"] in message
    assert await served(plane) == {("initial", model_digest(plane.model(0, **shape)), 0)}
    await asyncio.to_thread(publisher.close)


async def test_a_worker_that_died_before_it_connected_is_not_waited_for(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker dies between the publisher's look at the fleet and the update. The other workers get the version
    meanwhile."""
    shape = {"tensors": 8, "nbytes": 1000}
    plane.spawn_many(2, model=plane.model(0, **shape))

    def with_one_more_at_first(name: str, around: SenderContext) -> IpcSender:
        more = iter([1])
        return IpcSender(
            lambda: len(around.workers()) + next(more, 0), bounds=Bounds(other_receivers_s=10 * BOUND_S)
        )

    how: dict[str, Any] = {"transport": "ipc", "bucket_bytes": 1500, "workers": 2}
    publisher = publisher_by(with_one_more_at_first, plane.model(1, **shape), await plane.client(), **how)
    async with asyncio.timeout(BOUND_S):
        await publisher.publish_async("one")
    assert await served(plane) == {("one", model_digest(plane.model(1, **shape)), 1)}
    await asyncio.to_thread(publisher.close)


@contextlib.contextmanager
def no_threads() -> Iterator[None]:
    """A publisher gets no further thread, because the process has too many."""

    def refuse(_: Callable[[], object]) -> None:
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publishers, "on_thread", refuse)
        yield


@pytest.mark.parametrize("gathered", [False, True])
async def test_a_publication_that_gets_no_thread_has_ended(gathered: bool, plane: Plane) -> None:
    """The fleet's prepared update ends too."""
    plane.spawn()
    changing = Changing()
    changing.path = plane.model(1)
    source = Gathering(plane.model(1)) if gathered else changing
    how: dict[str, Any] = {"namespace": plane.namespace, "component": plane.component, "bucket_bytes": 1500}
    publisher = WeightPublisher(source, plane.url, transport="gloo", **how)

    with no_threads(), pytest.raises(RuntimeError, match="new thread"):
        await publisher.publish_async("one")
    if not gathered:  # and what is under way is waited for all the same
        held = changing.source = Held(plane.model(2))
        before = publisher.publish("before", wait=False)
        await asyncio.to_thread(held.begun.wait, BOUND_S)
        with no_threads(), pytest.raises(RuntimeError, match="new thread"):
            publisher.publish("between", wait=False)
        assert publisher.latest is before
        held.go.set()
        await before.wait()
        changing.source = None
    async with asyncio.timeout(BOUND_S):
        await publisher.publish_async("two")
    assert await served(plane) == {("two", model_digest(plane.model(1)), 1 if gathered else 2)}
    await asyncio.to_thread(publisher.close)


async def test_a_failure_names_the_worker_and_leaves_the_fleet_as_it_was(plane: Plane) -> None:
    plane.spawn_many(2)
    fleet = await plane.fleet()
    good, other = plane.model(1), plane.model(2, nbytes=2048)
    await WeightPublisher(good, fleet, root=root_of(plane)).publish_async("good")
    before = await served(plane)
    publisher = WeightPublisher(other, fleet, root=root_of(plane))
    with pytest.raises(InvalidWeights) as caught:
        await publisher.publish_async("other")
    assert any(one.instance_id in str(caught.value) for one in plane.spawned)
    assert len(caught.value.facts["workers"]) == 2
    assert await served(plane) == before

    class Broken(Held):
        def take(self) -> Taken:
            taken = super().take()
            specs = list(taken.specs)
            return Taken(specs[::-1], taken.tensors, None, taken.close)

    broken = Broken(good)
    broken.go.set()
    with pytest.raises(InvalidRequest, match=r"expected .* next"):
        await WeightPublisher(broken, fleet, root=root_of(plane)).publish_async("broken")
    with pytest.raises(InvalidRequest, match="version"):
        await WeightPublisher(good, fleet, root=root_of(plane)).publish_async("bad\nlabel")
    assert await served(plane) == before
    assert not [path for path in root_of(plane).iterdir() if path.name.startswith(".")]


class Losing(BlockingFleet):
    """Loses the first answer to an op, which may be an error. With `at_once` it loses the answer before the op has
    ended."""

    def __init__(self, plane: Plane, op: str, *, at_once: bool = False) -> None:
        super().__init__(plane.url, namespace=plane.namespace, component=plane.component)
        self.asked: list[str] = []
        """Update ids."""
        self.first = threading.Thread(target=lambda: None)
        self._op = op
        self._at_once = at_once

    def run(self, op: str, body: dict[str, Any], request_id: str = "") -> dict[str, Any]:
        run = super().run
        if op != self._op:
            return run(op, body, request_id)
        self.asked.append(request_id or body["update_id"])
        if len(self.asked) > 1:
            return run(op, body, request_id)

        def first() -> None:
            with contextlib.suppress(PlaneError):
                run(op, body, request_id)

        self.first = threading.Thread(target=first)
        self.first.start()
        if not self._at_once:
            self.first.join()
        raise Unavailable("the answer was lost")


class AgainAtOnce(WeightPublisher):
    """Asks at once for an answer that was lost."""

    limits = PublishLimits(again_s=0.01)


async def test_an_answer_that_was_lost_is_asked_for_again(plane: Plane) -> None:
    """The publisher repeats the call with the same id, so the version is committed once."""
    plane.spawn()
    losing = Losing(plane, "update_weights")
    publisher = AgainAtOnce(plane.model(1), losing, root=root_of(plane))
    reply = (await publisher.publish_async("one")).result()
    assert reply["version"]["sequence"] == 1
    assert len(losing.asked) == 2
    assert losing.asked[0] == losing.asked[1]
    assert await served(plane) == {("one", model_digest(plane.model(1)), 1)}


DOES_NOT_FIT = """
import worker.receive.weight_receiver as receiver
from rl_plane.errors import EngineFailed
received = receiver.receive
def receive(*given, **named):
    received(*given, **named)
    raise EngineFailed("it does not fit")
receiver.receive = receive
"""
"""The versions that have come whole."""


@pytest.mark.parametrize(
    ("fails", "at_once"), [("while it receives", False), ("at its end", False), ("at its end", True)]
)
async def test_a_reason_whose_answer_was_lost_is_asked_for_again(fails: str, at_once: bool, plane: Plane) -> None:
    """The error names the worker and the reason, although the pushed update is gone. `at_once`: it is about to fail."""
    plane.spawn()
    if fails == "at its end":
        failing, why = plane.spawn(patch=DOES_NOT_FIT), "it does not fit"
    else:
        failing, why = plane.spawn(staging_bytes=1), "bytes to stage"
    losing = Losing(plane, "complete_weights_update", at_once=at_once)
    publisher = AgainAtOnce(plane.model(1), losing, transport="gloo", workers=2)
    with pytest.raises(UpdateAborted, match=why) as caught:
        await publisher.publish_async("one")
    rows = {row["instance_id"]: row for row in caught.value.facts["workers"]}
    assert rows.keys() == {one.instance_id for one in plane.spawned}
    assert why in rows[failing.instance_id]["error"]["message"]
    assert failing.instance_id in str(caught.value)
    assert len(losing.asked) == 2
    assert losing.asked[0] == losing.asked[1]
    await asyncio.to_thread(losing.first.join, BOUND_S)
    assert await served(plane) == {("initial", model_digest(plane.model(0)), 0)}
    await asyncio.to_thread(publisher.close)


async def test_an_abort_by_an_operator_reaches_the_trainer(plane: Plane) -> None:
    plane.spawn_many(2)
    loop, fleet = asyncio.get_running_loop(), await plane.fleet()
    operator = await plane.client("operator")

    def abort() -> None:
        asyncio.run_coroutine_threadsafe(operator.run("abort_weights_update", {}), loop).result(BOUND_S)

    source = Meanwhile(plane.model(1), abort, after=2)
    publisher = WeightPublisher(source, fleet, transport="gloo", workers=2, bucket_bytes=256)
    with pytest.raises(UpdateAborted, match=r"aborted by operator@\S+") as caught:
        await publisher.publish_async("one")
    assert operator.owner in caught.value.message
    assert await served(plane) == {("initial", model_digest(plane.model(0)), 0)}
    await asyncio.to_thread(publisher.close)


async def test_a_version_is_not_served_if_a_progress_callback_raises(plane: Plane) -> None:
    plane.spawn()

    def refuse(progress: Progress) -> None:
        raise RuntimeError("enough")

    publisher = WeightPublisher(plane.model(1), await plane.fleet(), root=root_of(plane), progress=refuse)
    with pytest.raises(RuntimeError, match="enough"):
        await publisher.publish_async("one")
    assert {label for label, _, _ in await served(plane)} == {"initial"}


@pytest.mark.parametrize("kind", [Streaming, Lending])
async def test_receivers_that_fail_end_the_sending(
    kind: type[Streaming], plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The publisher raises the fleet's error, which explains the transport's."""
    import torch

    worker = plane.spawn()
    senders: list[Streaming] = []

    def make(backend: str, around: SenderContext) -> Streaming:
        senders.append(kind(around))
        return senders[-1]

    publisher = publisher_by(make, {"one": torch.ones(4)}, await plane.fleet(), root=root_of(plane))
    with pytest.raises(InvalidRequest, match="is not there") as caught:
        await publisher.publish_async("one")
    assert worker.instance_id in str(caught.value)
    await asyncio.to_thread(publisher.close)
    (sender,) = senders
    assert sender.events[0] == "closed"
    assert sender.events[-1] == "destroyed"
    assert await served(plane) == {("initial", model_digest(plane.model()), 0)}


@pytest.mark.parametrize("fails", ["close", "state"])
async def test_the_fleets_error_is_raised_although_another_failure_follows(
    fails: str, plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane.spawn()

    class Stuck(FilesystemSender):
        def close(self) -> None:
            super().close()
            if fails == "close":
                raise RuntimeError("can't start new thread")

    class Refusing(BlockingFleet):
        def run(self, op: str, body: dict[str, Any], request_id: str = "") -> dict[str, Any]:
            if op == "update_weights":
                raise Conflict("refused")
            if op == "state" and fails == "state":
                raise OSError("the connection broke")
            return super().run(op, body, request_id)

    publisher = publisher_by(
        lambda name, around: Stuck(root_of(plane)),
        plane.model(1),
        Refusing(await plane.fleet()),
        root=root_of(plane),
    )
    async with asyncio.timeout(BOUND_S):
        with pytest.raises(Conflict, match="refused"):
            await publisher.publish_async("one")
    assert {label for label, _, _ in await served(plane)} == {"initial"}
    await asyncio.to_thread(publisher.close)


class Lost(Gathering):
    """A source that can't gather any more once the transport can't send."""

    def __init__(self, path: Path, error: BaseException) -> None:
        super().__init__(path)
        self.error = error
        self.lost = False

    def take(self) -> Taken:
        taken = super().take()

        def tensors() -> Iterator[Any]:
            for pair in taken.tensors:
                if self.lost:
                    raise self.error
                yield pair

        return Taken(taken.specs, tensors(), None, taken.close)


@pytest.mark.parametrize(
    ("error", "raised"), [(RuntimeError("a rank is gone"), OSError), (KeyboardInterrupt(), KeyboardInterrupt)]
)
async def test_a_gather_that_breaks_off_after_a_failure_ends_the_publication(
    error: BaseException, raised: type[BaseException], plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer, which has raised, `close` and the next version do not wait for the gather."""
    plane.spawn()
    source = Lost(plane.model(1), error)

    class Full(FilesystemSender):
        def send(self, number: int) -> None:
            if source.error is error:
                source.lost = True
                raise OSError("no space left")
            super().send(number)

    publisher = publisher_by(
        lambda name, around: Full(root_of(plane)),
        source,
        await plane.fleet(),
        root=root_of(plane),
        bucket_bytes=1,
    )

    def publish() -> None:
        with pytest.raises(raised):
            publisher.publish("one")

    await asyncio.to_thread(publish)
    one = publisher.latest
    assert one is not None
    await plane.until(lambda: one.done, BOUND_S)
    assert 0 < source.taken < len(tensors_in(plane.model(1)))
    source.error, source.lost = RuntimeError(), False
    assert (await asyncio.to_thread(publisher.publish, "two")).result()["version"]["sequence"] == 1
    await asyncio.to_thread(publisher.close)


async def test_a_source_that_does_not_close_ends_the_publication(plane: Plane) -> None:
    plane.spawn()

    class Open(DirectorySource):
        def take(self) -> Taken:
            taken = super().take()

            def close() -> None:
                taken.close()
                raise RuntimeError("it stays open")

            return Taken(taken.specs, taken.tensors, None, close)

    publisher = WeightPublisher(Open(plane.model(1)), await plane.fleet(), root=root_of(plane))
    async with asyncio.timeout(BOUND_S):
        with pytest.raises(RuntimeError, match="stays open"):
            await publisher.publish_async("one")
    assert {label for label, _, _ in await served(plane)} == {"initial"}
    await asyncio.to_thread(publisher.close)

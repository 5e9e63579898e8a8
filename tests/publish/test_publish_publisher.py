"""WeightPublisher against a real fleet: what is published is served, and a failure leaves the fleet as it was."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import platform
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import rl_plane.publish.attempt as attempts
import rl_plane.publish.publish_options as publish_options
import rl_plane.publish.publisher as publishers
import rl_plane.publish.send_plan as send_plan
import rl_plane.transports.ipc.sender as ipc
from rl_plane.client import RlClient
from rl_plane.errors import (
    Conflict,
    InvalidRequest,
    InvalidWeights,
    Locked,
    MembershipChanged,
    NoWorkers,
    PlaneError,
    Unavailable,
    UpdateAborted,
)
from rl_plane.protocol.versions import tensor_digest
from rl_plane.publish import Progress, Publication, WeightPublisher
from rl_plane.publish.fleet_access import BlockingFleet
from rl_plane.publish.publication import RunningPublication
from rl_plane.publish.sources.base import Taken
from rl_plane.publish.sources.directory import DirectorySource
from rl_plane.sync import SyncRlClient
from rl_plane.transports.base import KeepingSender, LendingSender, Sender, SenderContext, world_size
from rl_plane.transports.filesystem.sender import FilesystemSender
from rl_plane.transports.packing import raw_bytes, spec_of
from rl_plane.transports.registry import installed
from rl_plane.weights.manifest import Manifest, pack
from tests.conftest import Plane
from tests.support.delta_updates import tensors_in
from tests.support.healing import until_behind
from tests.support.paths import ROOT
from tests.support.publishing import BOUND_S, Broken, Changing, Gathering, Held, nudged, root_of, serve, served
from worker.engines.fake.adapter import make_fake_adapter
from worker.receive.staging import adapter_digest, model_digest

pytestmark = [pytest.mark.slow, pytest.mark.parallel]

HEAL_S = 120.0
"""A worker that starts, and imports torch and nixl to fetch."""


async def test_a_version_is_published_by_each_kind_of_client(plane: Plane) -> None:
    plane.spawn_many(2)
    first, second, third = (plane.model(seed) for seed in (1, 2, 3))
    told: list[Progress] = []
    async with await plane.client() as client:
        publisher = WeightPublisher(first, client, root=root_of(plane), workers=2, progress=told.append)
        done = await publisher.publish_async("one")
        assert done.result()["version"]["label"] == "one"
        assert publisher.backend == "filesystem"
        assert await served(plane) == {("one", model_digest(first), 1)}
        with pytest.raises(InvalidRequest, match="would block"):
            publisher.publish("never")
        publisher.close()

    def plain() -> None:
        fleet = SyncRlClient.connect(plane.url, plane.namespace)
        with fleet, WeightPublisher(second, fleet, root=root_of(plane), transport="filesystem") as publisher:
            assert publisher.publish("two").read
        url = {"namespace": plane.namespace, "component": plane.component}
        with WeightPublisher(third, plane.url, root=root_of(plane), **url) as publisher:  # type: ignore[arg-type]
            assert publisher.publish().result()["version"]["label"] == "3"

    await asyncio.to_thread(plain)
    assert await served(plane) == {("3", model_digest(third), 3)}
    assert told[0].stage == "sending"
    assert [one.stage for one in told][-2:] == ["committing", "committed"]
    assert told[-1].buckets == told[-1].of_buckets > 0
    assert told[-1].nbytes == told[-1].of_nbytes > 0
    # The committed one and the newest stay on the disk.
    assert len(list(root_of(plane).iterdir())) == 2


@pytest.mark.parametrize("backend", sorted(installed().keys() - {"nccl"}))
async def test_every_sender_publishes_and_fails_cleanly(backend: str, plane: Plane) -> None:
    """The weights take many buckets. Transports that need a GPU are left out."""
    shape = {"tensors": 40, "nbytes": 65536}
    plane.spawn_many(2, model=plane.model(0, **shape))
    one, two = plane.model(1, **shape), plane.model(2, **shape)
    common: dict[str, Any] = {"root": root_of(plane), "transport": backend, "bucket_bytes": 1 << 18, "workers": 2}
    fleet = await plane.fleet()

    async def publish(source: Any, version: str) -> None:
        publisher = WeightPublisher(source, fleet, **common)
        try:
            await publisher.publish_async(version)
        finally:
            await asyncio.to_thread(publisher.close)

    await publish(one, "one")
    with pytest.raises(RuntimeError, match="out of memory"):
        await publish(Broken(two), "two")
    with pytest.raises(PlaneError) as caught:
        await publish(plane.model(3, tensors=40, nbytes=131072), "three")
    assert caught.value.facts["workers"]
    assert await served(plane) == {("one", model_digest(one), 1)}
    await publish(two, "four")
    assert {digest for _, digest, _ in await served(plane)} == {model_digest(two)}


class Meanwhile(DirectorySource):
    """Something happens when some tensors are read."""

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
    """The others, which only take part in its failure, are not. (To `nixl` they come when everything is there.)"""
    pytest.importorskip({"gloo": "torch", "nixl": "nixl"}.get(backend, "rl_plane"))
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
    looks = 0

    def one_more_at_first(workers: Any) -> int:
        nonlocal looks
        looks += 1
        return world_size(workers) + (looks == 1)

    monkeypatch.setattr(ipc, "world_size", one_more_at_first)
    defaults: dict[str, Any] = ipc.IpcSender.__init__.__kwdefaults__  # type: ignore[assignment]
    monkeypatch.setitem(defaults, "other_receivers_s", 10 * BOUND_S)
    how: dict[str, Any] = {"transport": "ipc", "bucket_bytes": 1500, "workers": 2}
    publisher = WeightPublisher(plane.model(1, **shape), await plane.client(), **how)
    async with asyncio.timeout(BOUND_S):
        await publisher.publish_async("one")
    assert await served(plane) == {("one", model_digest(plane.model(1, **shape)), 1)}
    await asyncio.to_thread(publisher.close)


async def test_another_trainers_group_takes_no_update_that_is_sent(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second trainer waits for a while. The version that is being sent is committed."""
    pytest.importorskip("torch")
    plane.spawn_many(2)
    monkeypatch.setattr(attempts, "OTHERS_S", 0.0)
    how: dict[str, Any] = {"transport": "gloo", "bucket_bytes": 1500, "workers": 2}
    client, fleet = await plane.client(), await plane.fleet()
    held = Held(plane.model(1))
    first, second = WeightPublisher(held, fleet, **how), WeightPublisher(plane.model(2), client, **how)
    sending = first.publish("one", wait=False)
    assert await asyncio.to_thread(held.begun.wait, BOUND_S)
    with pytest.raises(Locked, match="is prepared and waits"):
        await second.publish_async("two")
    held.go.set()
    await sending.wait()
    assert await served(plane) == {("one", model_digest(plane.model(1)), 1)}
    monkeypatch.undo()
    await second.publish_async("two")
    assert await served(plane) == {("two", model_digest(plane.model(2)), 2)}
    for publisher in (first, second):
        await asyncio.to_thread(publisher.close)


async def test_two_trainers_form_their_groups_in_turn(plane: Plane) -> None:
    """Each takes the place of the other's: before anything is sent, the other forms its own anew."""
    pytest.importorskip("torch")
    plane.spawn_many(2)

    async def publish(who: str, number: int) -> None:
        client = await plane.client()
        publisher = WeightPublisher(plane.model(number), client, transport="gloo", bucket_bytes=1500, workers=2)
        try:
            for version in range(4):
                await publisher.publish_async(f"{who} {version}")
        finally:
            await asyncio.to_thread(publisher.close)

    await asyncio.gather(publish("one", 1), publish("two", 2))
    assert {sequence for _, _, sequence in await served(plane)} == {8}


async def test_a_keeping_sender_keeps_what_is_committed(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    plane.spawn()
    events: list[Any] = []

    class Keeping(FilesystemSender, KeepingSender):
        def keep(self, adapter: str | None = None, onto_previous: bool = False) -> None:
            events.append(("kept", adapter))

        def close(self) -> None:
            events.append("closed")
            super().close()

    monkeypatch.setattr(send_plan, "make_sender", lambda backend, around: Keeping(around.root))
    fleet = await plane.fleet()
    adapter = make_fake_adapter(plane.tmp / "adapter", 1, plane.model())
    await WeightPublisher(adapter, fleet, root=root_of(plane), adapter="a").publish_async("one")
    assert events[0] == ("kept", "a")
    assert set(events[1:]) == {"closed"}
    events.clear()
    with pytest.raises(InvalidWeights):
        await WeightPublisher(plane.model(2, nbytes=2048), fleet, root=root_of(plane)).publish_async("two")
    assert set(events) == {"closed"}
    # An update that is committed, but hardly served yet, is an error; those who come late need it all the same.
    run = BlockingFleet.run

    def late(self: BlockingFleet, op: str, body: dict[str, Any], request_id: str = "") -> dict[str, Any]:
        reply = run(self, op, body, request_id)
        if op == "update_weights":
            raise Conflict("it is committed, but 0 workers serve it", version=reply["version"])
        return reply

    monkeypatch.setattr(BlockingFleet, "run", late)
    events.clear()
    with pytest.raises(Conflict, match="0 workers"):
        await WeightPublisher(plane.model(3), fleet, root=root_of(plane)).publish_async("three")
    assert events[0] == ("kept", None)


@pytest.mark.parametrize("gathered", [False, True])
async def test_a_publication_that_gets_no_thread_has_ended(
    gathered: bool, plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the fleet's side too, where it was prepared."""
    pytest.importorskip("torch")
    plane.spawn()
    source = Gathering(plane.model(1)) if gathered else plane.model(1)
    how: dict[str, Any] = {"namespace": plane.namespace, "component": plane.component, "bucket_bytes": 1500}
    publisher = WeightPublisher(source, plane.url, transport="gloo", **how)

    def no_thread(_: Callable[[], object]) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(publishers, "on_thread", no_thread)
        with pytest.raises(RuntimeError, match="new thread"):
            await publisher.publish_async("one")
    if not gathered:  # and what is under way is waited for all the same
        held = publisher._source = Held(plane.model(2))
        before = publisher.publish("before", wait=False)
        await asyncio.to_thread(held.begun.wait, BOUND_S)
        with monkeypatch.context() as patch:
            patch.setattr(publishers, "on_thread", no_thread)
            with pytest.raises(RuntimeError, match="new thread"):
                publisher.publish("between", wait=False)
        assert publisher._previous is before
        held.go.set()
        await before.wait()
        publisher._source = DirectorySource(plane.model(1))
    async with asyncio.timeout(BOUND_S):
        await publisher.publish_async("two")
    assert await served(plane) == {("two", model_digest(plane.model(1)), 1 if gathered else 2)}
    await asyncio.to_thread(publisher.close)


async def test_overlapped_and_one_after_another(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    plane.spawn()
    source = Held(plane.model(1))
    fleet = await plane.fleet()
    publisher = WeightPublisher(source, fleet, root=root_of(plane))
    one = publisher.publish("one", wait=False)
    await asyncio.to_thread(source.begun.wait, BOUND_S)
    assert not one.read
    assert not one.done
    with pytest.raises(PlaneError, match="not read within"):
        one.wait_read(0.01)
    with pytest.raises(PlaneError, match="not committed within"):
        one.result(0.01)
    two = publisher.publish("two", wait=False)
    source.go.set()
    await asyncio.to_thread(one.wait_read, BOUND_S)
    assert (await asyncio.to_thread(one.result, BOUND_S))["version"]["label"] == "one"
    assert (await asyncio.to_thread(two.result, BOUND_S))["version"]["sequence"] == 2
    # One that does not end: the next is refused once the bound is over.
    monkeypatch.setattr(publish_options, "DRAIN_S", -1e6)
    source.go.clear()
    three = publisher.publish("three", wait=False)
    four = publisher.publish("four", wait=False)
    with pytest.raises(Locked, match="three is still under way"):
        await asyncio.to_thread(four.result, BOUND_S)
    source.go.set()
    assert (await asyncio.to_thread(three.result, BOUND_S))["version"]["label"] == "three"


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


class Losing:
    """The first answer to an op, be it an error. `at_once`: before it is there."""

    def __init__(self, patch: pytest.MonkeyPatch, op: str, *, at_once: bool = False) -> None:
        self.asked: list[str] = []
        """Update ids."""
        self.first = threading.Thread(target=lambda: None)
        run = BlockingFleet.run

        def losing(fleet: BlockingFleet, asked: str, body: dict[str, Any], request_id: str = "") -> dict[str, Any]:
            if asked != op:
                return run(fleet, asked, body, request_id)
            self.asked.append(request_id or body["update_id"])
            if len(self.asked) > 1:
                return run(fleet, asked, body, request_id)

            def first() -> None:
                with contextlib.suppress(PlaneError):
                    run(fleet, asked, body, request_id)

            self.first = threading.Thread(target=first)
            self.first.start()
            if not at_once:
                self.first.join()
            raise Unavailable("the answer was lost")

        patch.setattr(BlockingFleet, "run", losing)
        patch.setattr(attempts, "AGAIN_S", 0.01)


async def test_an_answer_that_was_lost_is_asked_for_again(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the same id: the version is committed once."""
    plane.spawn()
    losing = Losing(monkeypatch, "update_weights")
    publisher = WeightPublisher(plane.model(1), await plane.fleet(), root=root_of(plane))
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
async def test_a_reason_whose_answer_was_lost_is_asked_for_again(
    fails: str, at_once: bool, plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the worker and the reason, although the pushed update is gone. `at_once`: it is about to fail."""
    pytest.importorskip("torch")
    plane.spawn()
    if fails == "at its end":
        failing, why = plane.spawn(patch=DOES_NOT_FIT), "it does not fit"
    else:
        failing, why = plane.spawn(staging_bytes=1), "bytes to stage"
    losing = Losing(monkeypatch, "complete_weights_update", at_once=at_once)
    publisher = WeightPublisher(plane.model(1), await plane.fleet(), transport="gloo", workers=2)
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
    pytest.importorskip("torch")
    plane.spawn_many(2)
    loop, fleet = asyncio.get_running_loop(), await plane.fleet()
    operator = await plane.client("operator")

    def abort() -> None:
        asyncio.run_coroutine_threadsafe(operator.run("abort_weights_update", {}), loop).result(BOUND_S)

    source = Meanwhile(plane.model(1), abort, after=2)
    publisher = WeightPublisher(source, fleet, transport="gloo", workers=2, bucket_bytes=256)
    with pytest.raises(UpdateAborted, match=r"abort_weights_update, by \S+, aborted the update") as caught:
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


class Streaming(Sender):
    """A sender of its own making, whose receivers find nothing."""

    backend = "filesystem"

    def __init__(self, around: SenderContext) -> None:
        self._root = around.root
        self._closed = threading.Event()
        self.events: list[str] = []

    def open(self, manifest: Manifest) -> dict[str, Any]:
        self._sizes = [bucket.nbytes for bucket in manifest.buckets]
        return {"backend": "filesystem", "path": f"{self._root}/nothing"}

    def buffer(self, number: int) -> memoryview:
        return memoryview(bytearray(self._sizes[number]))

    def send(self, number: int) -> None:
        # Blocks like one whose receivers don't come, until it is closed from the thread that asked the fleet.
        assert self._closed.wait(BOUND_S)
        raise Unavailable("nobody is left to send to")

    def finish(self, digests: Mapping[str, str] | None) -> None:
        raise AssertionError("it failed before")

    def close(self) -> None:
        self._closed.set()
        self.events.append("closed")

    def destroy(self) -> None:
        self.events.append("destroyed")


class Lending(Streaming, LendingSender):
    def lend(self, tensors: Mapping[str, Any]) -> set[int]:
        self.send(0)
        return set()


@pytest.mark.parametrize("kind", [Streaming, Lending])
async def test_receivers_that_fail_end_the_sending(
    kind: type[Streaming], plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The publisher raises the fleet's error, which explains the transport's."""
    torch = pytest.importorskip("torch")
    worker = plane.spawn()
    senders: list[Streaming] = []

    def make(backend: str, around: SenderContext) -> Streaming:
        senders.append(kind(around))
        return senders[-1]

    monkeypatch.setattr(send_plan, "make_sender", make)
    publisher = WeightPublisher({"one": torch.ones(4)}, await plane.fleet(), root=root_of(plane))
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
    run = BlockingFleet.run

    class Stuck(FilesystemSender):
        def close(self) -> None:
            super().close()
            if fails == "close":
                raise RuntimeError("can't start new thread")

    def refusing(self: BlockingFleet, op: str, body: dict[str, Any], request_id: str = "") -> dict[str, Any]:
        if op == "update_weights":
            raise Conflict("refused")
        if op == "state" and fails == "state":
            raise OSError("the connection broke")
        return run(self, op, body, request_id)

    monkeypatch.setattr(send_plan, "make_sender", lambda name, around: Stuck(root_of(plane)))
    monkeypatch.setattr(BlockingFleet, "run", refusing)
    publisher = WeightPublisher(plane.model(1), await plane.fleet(), root=root_of(plane))
    async with asyncio.timeout(BOUND_S):
        with pytest.raises(Conflict, match="refused"):
            await publisher.publish_async("one")
    assert {label for label, _, _ in await served(plane)} == {"initial"}
    await asyncio.to_thread(publisher.close)


class Noted(FilesystemSender):
    """Tells when it goes."""

    def __init__(self, name: str, root: Path, alive: list[str]) -> None:
        super().__init__(root)
        self.alive, self.name = alive, name
        alive.append(name)

    def destroy(self) -> None:
        self.alive.remove(self.name)


async def test_a_sender_stays_until_a_version_by_the_next_is_committed(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane.spawn()
    alive: list[str] = []
    told = iter(["first", "second", "third", "third"])
    monkeypatch.setattr(send_plan, "candidates", lambda *_, **__: [next(told)])
    monkeypatch.setattr(send_plan, "make_sender", lambda name, around: Noted(name, root_of(plane), alive))
    refused = threading.Event()

    def refuse(progress: Progress) -> None:
        if refused.is_set():
            raise RuntimeError("enough")

    how: dict[str, Any] = {"root": root_of(plane), "progress": refuse, "encoding": "full"}
    publisher = WeightPublisher(plane.model(1), await plane.fleet(), **how)
    await publisher.publish_async("one")
    assert alive == ["first"]
    refused.set()
    for now in (["first", "second"], ["first", "third"]):
        with pytest.raises(RuntimeError, match="enough"):
            await publisher.publish_async("two")
        assert alive == now
    refused.clear()
    await publisher.publish_async("two")
    assert alive == ["third"]
    await asyncio.to_thread(publisher.close)
    assert not alive


@pytest.mark.engines("nixl")
async def test_a_sender_that_workers_elsewhere_do_not_reach_is_not_used(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane.spawn()
    publisher = WeightPublisher(plane.model(1), await plane.fleet(), transport="nixl")
    await publisher.publish_async("one")
    with monkeypatch.context() as patched:
        patched.setattr("platform.node", lambda: "elsewhere")
        with pytest.raises(InvalidRequest, match="on other machines") as caught:
            await publisher.publish_async("two")
        assert caught.value.facts["field"] == "options.host"
    plane.spawn()  # it heals from the sender of the first version
    await plane.until(lambda: two_serve(plane), BOUND_S)
    await asyncio.to_thread(publisher.close)


async def two_serve(plane: Plane) -> bool:
    rows = (await (await plane.fleet("state")).run("state"))["workers"]
    return [row["version"]["label"] for row in rows if row["admission"]["open"]] == ["one", "one"]


@pytest.mark.engines("nixl")
@pytest.mark.timeout(240)
async def test_a_version_is_pulled_from_the_trainers_tensors_and_copied_once(plane: Plane) -> None:
    pytest.importorskip("torch")
    plane.spawn()
    client = await plane.client()
    models = [plane.model(seed) for seed in (1, 2, 3)]
    state = {name: tensor.clone() for name, tensor in loaded(models[0]).items()}

    def step(number: int) -> str:
        for name, tensor in loaded(models[number]).items():
            state[name].copy_(tensor)
        return model_digest(models[number])

    publisher = WeightPublisher(state, await plane.fleet(), transport="nixl")
    for number, label in enumerate(("one", "two")):
        digest = step(number)
        assert (await publisher.publish_async(label)).read
        assert await served(plane) == {(label, digest, number + 1)}
    sender: Any = publisher._plan._sender if publisher._plan is not None else None
    (kept,) = sender._kept[None]
    assert not kept.lent
    assert sender._loan is not None
    assert sender._free == [], "no second copy"
    for tensor in state.values():  # as the next step does
        tensor.zero_()
    plane.spawn()
    await plane.until(lambda: serve(client, "two"), HEAL_S)
    # What goes on while the trainer does is packed beside it.
    digest = step(2)
    publication = await asyncio.to_thread(publisher.publish, "three", wait=False)
    await asyncio.to_thread(publication.wait_read, BOUND_S)
    for tensor in state.values():
        tensor.zero_()
    await publication.wait()
    assert await served(plane) == {("three", digest, 3)}
    await asyncio.to_thread(publisher.close)


def loaded(model: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    found: dict[str, Any] = load_file(model / "model.safetensors")
    return found


@pytest.mark.engines("nixl")
@pytest.mark.timeout(240)
async def test_without_a_copy_a_late_worker_heals_from_another_one(plane: Plane) -> None:
    pytest.importorskip("torch")
    plane.spawn()
    client, fleet = await plane.client(), await plane.fleet()

    def publisher_of(keep_copy: Any) -> WeightPublisher:
        weights, policy = loaded(plane.model(1)), {"keep_staged": True}
        return WeightPublisher(weights, fleet, transport="nixl", policy=policy, options={"keep_copy": keep_copy})

    with pytest.raises(InvalidRequest, match="keep_copy"):
        await publisher_of("no").publish_async("never")
    publisher = publisher_of(False)
    await publisher.publish_async("one")
    sender: Any = publisher._plan._sender if publisher._plan is not None else None
    assert (sender._kept, sender._free, sender._server._offers) == ({}, [], {})
    plane.spawn()
    await plane.until(lambda: serve(client, "one"), HEAL_S)
    assert await served(plane) == {("one", model_digest(plane.model(1)), 1)}
    unstaged = {"transport": {"backend": "filesystem", "path": str(plane.model(2))}, "policy": {"staging": "none"}}
    with pytest.raises(InvalidRequest) as refused:  # a worker that fails could not come back
        await client.run("update_weights", unstaged)
    assert refused.value.facts["field"] == "policy.staging"
    await asyncio.to_thread(publisher.close)


class Joining:
    """A progress callback: each time that the first bucket is sent a worker joins, up to a number of times."""

    def __init__(self, plane: Plane) -> None:
        self.plane, self.times = plane, 0

    def __call__(self, progress: Progress) -> None:
        if self.times and (progress.stage, progress.buckets) == ("sending", 1):
            self.times -= 1
            self.plane.spawn()


@pytest.mark.parametrize("encoding", ["full", "delta"])
async def test_if_a_worker_joins_the_version_is_pushed_to_all_workers_again(encoding: Any, plane: Plane) -> None:
    """The publisher is a trainer that waits, or sends from its copy."""
    pytest.importorskip("torch")
    plane.spawn()
    one = plane.model(1)
    two, source, joining = nudged(plane, one, 1), Changing(), Joining(plane)
    how: dict[str, Any] = {"transport": "gloo", "encoding": encoding, "bucket_bytes": 1500}
    publisher = WeightPublisher(source, await plane.fleet(), progress=joining, **how)

    async def publish(label: str) -> dict[str, Any]:
        if encoding == "full":
            return (await publisher.publish_async(label)).result()
        publication = publisher.publish(label, wait=False)
        await asyncio.to_thread(publication.wait_read, BOUND_S)
        source.path = Path()
        return await publication.wait()

    versions = [("one", one), ("two", two)] if encoding == "delta" else [("one", one)]
    for number, (label, model) in enumerate(versions, 1):
        source.path, joining.times = model, 1
        reply = await publish(label)
        assert (joining.times, len(reply["workers"]), reply["excluded"]) == (0, number + 1, [])
        assert await served(plane) == {(label, model_digest(model), number)}
    # Not for one more in that time, which is told.
    source.path, joining.times = one, 2
    with pytest.raises(MembershipChanged, match="joined since"):
        await publish("three")
    assert joining.times == 0
    source.path = one
    assert len((await publish("four"))["workers"]) == len(versions) + 3
    assert await served(plane) == {("four", model_digest(one), len(versions) + 1)}
    await asyncio.to_thread(publisher.close)


@pytest.mark.parametrize("kind", ["overlapped", "gathered"])
async def test_a_source_that_may_not_be_read_again_is_not_pushed_again(kind: str, plane: Plane) -> None:
    """Its tensors may have changed, or other ranks would have to gather with it."""
    pytest.importorskip("torch")
    plane.spawn()
    source, joining = Gathering(plane.model(1)), Joining(plane)
    source.collective = kind == "gathered"
    how: dict[str, Any] = {"namespace": plane.namespace, "component": plane.component, "bucket_bytes": 1500}
    publisher = WeightPublisher(source, plane.url, transport="gloo", progress=joining, **how)

    def publish(label: str) -> dict[str, Any]:
        return publisher.publish(label, wait=kind == "gathered").result(BOUND_S)

    joining.times = 1
    with pytest.raises(MembershipChanged, match="joined since") as caught:
        await asyncio.to_thread(publish, "one")
    assert caught.value.facts["fix"]
    count = source.taken
    assert len((await asyncio.to_thread(publish, "two"))["workers"]) == 2
    assert source.taken == 2 * count
    assert await served(plane) == {("two", model_digest(plane.model(1)), 1)}
    await asyncio.to_thread(publisher.close)


@pytest.mark.timeout(400)  # five workers import torch, one after the other
@pytest.mark.parametrize("kind", ["overlapped", "gathered"])
async def test_a_worker_that_joins_before_anything_is_read_gets_the_version_too(
    kind: str, plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the group forms, and between that and the update, whether the source may be read again or not."""
    pytest.importorskip("torch")
    joining = {"init_transport": 1, "prepare_weights_update": 1}
    ask, run = RlClient.ask, BlockingFleet.run

    def join(op: str) -> None:
        if joining.get(op):
            joining[op] -= 1
            plane.spawn()

    async def forming(self: RlClient, view: Any, members: Any, op: str, *given: Any, **named: Any) -> Any:
        if op == "init_transport":
            await asyncio.to_thread(join, op)
        return await ask(self, view, members, op, *given, **named)

    def preparing(self: BlockingFleet, op: str, body: dict[str, Any], request_id: str = "") -> dict[str, Any]:
        if op == "prepare_weights_update":
            join(op)
        return run(self, op, body, request_id)

    monkeypatch.setattr(RlClient, "ask", forming)
    monkeypatch.setattr(BlockingFleet, "run", preparing)
    plane.spawn()
    source = Gathering(plane.model(1))
    source.collective = kind == "gathered"
    how: dict[str, Any] = {"namespace": plane.namespace, "component": plane.component, "bucket_bytes": 1500}
    publisher = WeightPublisher(source, plane.url, transport="gloo", **how)

    def publish(label: str) -> dict[str, Any]:
        return publisher.publish(label, wait=kind == "gathered").result(HEAL_S)

    reply = await asyncio.to_thread(publish, "one")
    assert joining == {"init_transport": 0, "prepare_weights_update": 0}
    assert (len(reply["workers"]), reply["excluded"]) == (3, [])
    assert source.taken == len(tensors_in(plane.model(1)))  # once
    assert await served(plane) == {("one", model_digest(plane.model(1)), 1)}
    # Not without end.
    monkeypatch.setattr(attempts, "OPENINGS", 2)
    joining["prepare_weights_update"] = 2
    with pytest.raises(MembershipChanged, match="fingerprint"):
        await asyncio.to_thread(publish, "two")
    assert joining["prepare_weights_update"] == 0
    assert len((await asyncio.to_thread(publish, "three"))["workers"]) == 5
    assert await served(plane) == {("three", model_digest(plane.model(1)), 2)}
    await asyncio.to_thread(publisher.close)


class Lost(Gathering):
    """Once nothing can be sent any more, it can't be gathered either."""

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
    ("error", "told"), [(RuntimeError("a rank is gone"), OSError), (KeyboardInterrupt(), KeyboardInterrupt)]
)
async def test_a_gather_that_breaks_off_after_a_failure_ends_the_publication(
    error: BaseException, told: type[BaseException], plane: Plane, monkeypatch: pytest.MonkeyPatch
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

    monkeypatch.setattr(send_plan, "make_sender", lambda name, around: Full(root_of(plane)))
    publisher = WeightPublisher(source, await plane.fleet(), root=root_of(plane), bucket_bytes=1)

    def publish() -> None:
        with pytest.raises(told):
            publisher.publish("one")

    await asyncio.to_thread(publish)
    one = publisher._previous
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


@pytest.mark.parametrize("kind", [Held, Gathering])
async def test_a_publication_continues_after_its_waiter_is_cancelled(
    kind: type[Held], plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane.spawn()
    alive: list[str] = []
    monkeypatch.setattr(send_plan, "make_sender", lambda name, around: Noted(name, root_of(plane), alive))
    run, held, go = BlockingFleet.run, threading.Event(), threading.Event()

    def holding(self: BlockingFleet, op: str, body: dict[str, Any], request_id: str = "") -> dict[str, Any]:
        if op == "update_weights":
            held.set()
            assert go.wait(BOUND_S)
        return run(self, op, body, request_id)

    monkeypatch.setattr(BlockingFleet, "run", holding)
    source = kind(plane.model(1))
    source.go.set()
    publisher = WeightPublisher(source, await plane.fleet(), root=root_of(plane))
    waiting = asyncio.create_task(publisher.publish_async("a"))
    await asyncio.to_thread(held.wait, BOUND_S)

    async def asked() -> Publication | None:
        a = publisher._previous
        return a if a is not None and a._watched else None

    a = await plane.until(asked, BOUND_S)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not a.done
    b = asyncio.create_task(publisher.publish_async("b"))
    await plane.until(lambda: publisher._previous is not a, BOUND_S)
    go.set()
    replies = [await asyncio.to_thread(a.result, BOUND_S), (await b).result()]
    assert [(reply["version"]["label"], reply["version"]["sequence"]) for reply in replies] == [("a", 1), ("b", 2)]
    await asyncio.to_thread(publisher.close)
    assert not alive


async def test_in_the_loop_of_its_client_a_publisher_is_closed_without_blocking_it(plane: Plane) -> None:
    plane.spawn()
    client, held = await plane.client(), Held(plane.model(1))
    publisher = WeightPublisher(held, client, root=root_of(plane))
    one = publisher.publish("one", wait=False)
    assert await asyncio.to_thread(held.begun.wait, BOUND_S)
    with pytest.raises(InvalidRequest, match="would block") as refused:
        publisher.close()
    assert "aclose" in refused.value.facts["fix"]
    assert not one.done
    async with asyncio.timeout(BOUND_S):
        closing = asyncio.create_task(publisher.aclose())
        held.go.set()
        await closing
        assert (await one.wait())["version"]["label"] == "one"
        publisher.close()  # nothing is under way
        async with WeightPublisher(plane.model(2), client, root=root_of(plane)) as publisher:
            two = publisher.publish("two", wait=False)
        assert two.done
    assert await served(plane) == {("two", model_digest(plane.model(2)), 2)}


async def test_a_block_that_is_left_in_the_loop_of_its_client_tells_its_own_error(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelled while a version is under way; what the transport held is freed once that has ended."""
    plane.spawn()
    alive: list[str] = []
    monkeypatch.setattr(send_plan, "make_sender", lambda name, around: Noted(name, root_of(plane), alive))
    client, held = await plane.client(), Held(plane.model(1))

    async def publish() -> None:
        with WeightPublisher(held, client, root=root_of(plane)) as publisher:
            await publisher.publish_async("one")

    publishing = asyncio.create_task(publish())
    assert await asyncio.to_thread(held.begun.wait, BOUND_S)
    publishing.cancel()
    async with asyncio.timeout(BOUND_S):
        with pytest.raises(asyncio.CancelledError):
            await publishing
    assert alive
    held.go.set()
    await plane.until(lambda: not alive, BOUND_S)
    assert await served(plane) == {("one", model_digest(plane.model(1)), 1)}
    held.go.clear()
    publisher = WeightPublisher(held, client, root=root_of(plane))
    publisher.publish("two", wait=False)
    with pytest.raises(InvalidRequest, match="would block"):  # there is no error to hide
        publisher.__exit__(None, None, None)
    held.go.set()
    await publisher.aclose()


@pytest.mark.parametrize(
    ("transport", "how"),
    [(each, {}) for each in ("filesystem", "gloo", "ipc", "nixl", "object_store")]
    + [("ipc", {"initial": "two"}), ("filesystem", {"encoding": "delta"})],
)
async def test_ctrl_c_in_the_middle_gives_the_version_up(
    transport: str, how: dict[str, Any], plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the error is raised the tensors may change. No worker gets changed tensors."""
    pytest.importorskip("torch")
    pytest.importorskip({"nixl": "nixl"}.get(transport, "rl_plane"))
    shape = {"tensors": 40, "nbytes": 65536}
    plane.spawn_many(2, model=plane.model(0, **shape))
    one, two = loaded(plane.model(1, **shape)), loaded(plane.model(2, **shape))
    begun, given_up = threading.Event(), threading.Event()
    told: dict[str, Any] = {"namespace": plane.namespace, "component": plane.component, "root": root_of(plane)}
    told |= {"transport": transport, "bucket_bytes": 1 << 18, "workers": 2, "progress": lambda now: holds(now)}

    def holds(now: Progress) -> None:
        if now.buckets == 2:
            begun.set()
            assert given_up.wait(BOUND_S)

    def interrupted(self: Publication, timeout_s: float | None = None) -> dict[str, Any]:
        assert begun.wait(BOUND_S)
        raise KeyboardInterrupt

    give_up = RunningPublication.give_up

    def noted(self: RunningPublication, error: BaseException) -> None:
        give_up(self, error)
        given_up.set()

    given_up.set()
    first = WeightPublisher(one, plane.url, **{**told, "initial": None})
    await first.publish_async("one")
    await asyncio.to_thread(first.close)
    before = await served(plane)
    assert {label for label, _, _ in before} == {"one"}
    begun.clear()
    given_up.clear()
    publishers_made: list[WeightPublisher] = []

    def publish() -> None:
        publishers_made.append(WeightPublisher(two, plane.url, **{**told, **how}))
        publishers_made[0].publish("two")

    with monkeypatch.context() as patch:
        patch.setattr(Publication, "result", interrupted)
        patch.setattr(RunningPublication, "give_up", noted)
        with pytest.raises(KeyboardInterrupt):
            await asyncio.to_thread(publish)
    for tensor in two.values():
        tensor.add_(1)
    if publishers_made:
        cut_off = publishers_made[0]._previous
        assert cut_off is not None
        assert cut_off.read
        with pytest.raises(UpdateAborted, match="KeyboardInterrupt"):
            await asyncio.to_thread(cut_off.result, BOUND_S)
    assert await served(plane) == before
    again = publishers_made[0] if publishers_made else WeightPublisher(two, plane.url, **told)
    assert (await again.publish_async("three")).result()["version"]["label"] == "three"
    manifest = Manifest(pack([(name, spec_of(tensor)) for name, tensor in two.items()], 1 << 18))
    digest = manifest.digested({name: tensor_digest(raw_bytes(tensor)) for name, tensor in two.items()}).digest
    assert {each[:2] for each in await served(plane)} == {("three", digest)}
    await asyncio.to_thread(again.close)


async def test_ctrl_c_ends_a_sender_without_receivers(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    plane.spawn()
    begun = threading.Event()

    class Stuck(Streaming):
        receivers_from = "finish"

        def send(self, number: int) -> None:
            begun.set()
            super().send(number)

    def interrupted(self: Publication, timeout_s: float | None = None) -> dict[str, Any]:
        assert begun.wait(BOUND_S)
        raise KeyboardInterrupt

    monkeypatch.setattr(send_plan, "make_sender", lambda name, around: Stuck(around))
    told: dict[str, Any] = {"namespace": plane.namespace, "component": plane.component, "root": root_of(plane)}
    publisher = WeightPublisher(plane.model(1), plane.url, **told)
    with monkeypatch.context() as patch:
        patch.setattr(Publication, "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            await asyncio.to_thread(publisher.publish, "one")
    one = publisher._previous
    assert one is not None
    assert one.read
    with pytest.raises(UpdateAborted, match="one was given up"):
        await asyncio.to_thread(one.result, BOUND_S)
    await asyncio.to_thread(publisher.close)


NOT_CLOSED = """
import sys
import threading
from rl_plane.publish import DirectorySource, WeightPublisher

url, namespace, component, model, ends = sys.argv[1:]
begun = threading.Event()

class Slow(DirectorySource):
    def take(self):
        begun.set()
        if ends == "under way":
            threading.Event().wait()
        raise RuntimeError("out of memory, say")

publisher = WeightPublisher(Slow(model), url, namespace=namespace, component=component, transport="ipc")
publication = publisher.publish("last", wait=False)
begun.wait()
if ends != "under way":
    publication._outcome.exception()
if ends == "told":
    try:
        publication.result()
    except RuntimeError:
        pass
if ends == "closed":
    publisher.close()
"""


@pytest.mark.parametrize(
    ("ends", "told"),
    [("under way", "last is lost"), ("failed", "not published"), ("told", ""), ("closed", "not published")],
)
async def test_a_script_that_ends_before_its_last_version_says_so(ends: str, told: str, plane: Plane) -> None:
    ended = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", NOT_CLOSED, plane.url, plane.namespace, plane.component, str(plane.model(1)), ends],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=True,
    )
    assert told in ended.stderr
    assert len(ended.stderr.splitlines()) == bool(told), ended.stderr


async def test_the_fleet_has_the_trainers_weights_from_the_start(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane.spawn()
    source = Gathering(plane.model(1))

    def begin(label: str, source: Any = source, then: str | None = None, **more: Any) -> None:
        told: dict[str, Any] = {"namespace": plane.namespace, "component": plane.component, "root": root_of(plane)}
        with WeightPublisher(source, plane.url, initial=label, **{**told, **more}) as publisher:
            if then is not None:
                publisher.publish(then)

    await asyncio.to_thread(begin, "initial")  # as the fleet calls what nobody has published
    assert await served(plane) == {("initial", model_digest(plane.model(1)), 1)}
    await asyncio.to_thread(begin, "step_0")
    assert await served(plane) == {("step_0", model_digest(plane.model(1)), 2)}
    count = source.taken
    await asyncio.to_thread(begin, "step_0")  # a trainer that starts again
    assert await served(plane) == {("step_0", model_digest(plane.model(1)), 2)}
    assert source.taken == 3 * count // 2, "other ranks, which gather, are not left waiting"
    with monkeypatch.context() as patch:
        patch.setattr(platform, "node", lambda: "elsewhere")  # which nixl would have to know how to reach
        await asyncio.to_thread(begin, "step_0", root=None, transport="nixl")
    assert await served(plane) == {("step_0", model_digest(plane.model(1)), 2)}
    other = Gathering(plane.model(2))  # another run's, under the same label
    for encoding in ("full", "delta"):
        await asyncio.to_thread(begin, "step_0", other, encoding=encoding)
        assert await served(plane) == {("step_0", model_digest(plane.model(2)), 3)}
    assert other.taken == count
    # What a trainer before has sent may be gone with it, so the next version is no delta of that.
    third = Gathering(plane.model(3))
    await asyncio.to_thread(begin, "step_0", third, encoding="delta")
    assert await served(plane) == {("step_0", model_digest(plane.model(3)), 4)}
    await asyncio.to_thread(begin, "step_0", third, "step_1", encoding="delta")
    told = (await (await plane.fleet()).run("updates"))["updates"]
    assert [(one["label"], one["encoding"]) for one in told[:2]] == [("step_1", "full"), ("step_0", "full")]
    with pytest.raises(NoWorkers):
        await asyncio.to_thread(begin, "step_1", workers=2, wait_s=0.1)
    await asyncio.to_thread(begin, "step_0", rank=1)
    with pytest.raises(InvalidRequest, match="would block") as refused:
        WeightPublisher(source, await plane.fleet(), initial="step_1")
    assert refused.value.facts["field"] == "initial"


async def test_a_committed_version_that_no_worker_serves_is_sent_when_the_publisher_starts(plane: Plane) -> None:
    """Trainer and worker have ended, and what would bring the version is gone."""
    worker, client, model = plane.spawn(), await plane.client(), plane.model(1)
    told: dict[str, Any] = {"namespace": plane.namespace, "component": plane.component, "root": root_of(plane)}

    def begin() -> None:
        WeightPublisher(model, plane.url, initial="step_0", **told).close()

    await asyncio.to_thread(begin)
    assert await served(plane) == {("step_0", model_digest(model), 1)}
    worker.kill()
    root_of(plane).rename(plane.tmp / "away")
    assert await (await client.view()).wait_until(lambda now: len(now) == 0, BOUND_S)
    again = plane.spawn(instance_id=worker.instance_id)
    await until_behind(plane, client, again.instance_id)
    await asyncio.to_thread(begin)
    assert await served(plane) == {("step_0", model_digest(model), 2)}


async def test_what_came_while_it_was_compared_does_not_stay(plane: Plane) -> None:
    plane.spawn()
    fleet, model = await plane.fleet(), plane.model(1)
    told: dict[str, Any] = {"namespace": plane.namespace, "component": plane.component, "root": root_of(plane)}

    def begin(source: Any) -> None:
        WeightPublisher(source, plane.url, initial="step_0", **told).close()

    await asyncio.to_thread(begin, model)
    assert await served(plane) == {("step_0", model_digest(model), 1)}
    source = Held(model)
    beginning = asyncio.create_task(asyncio.to_thread(begin, source))
    assert await asyncio.to_thread(source.begun.wait, BOUND_S)
    body = {"version": "other", "transport": {"backend": "filesystem", "path": str(plane.model(2))}}
    await fleet.run("update_weights", body)
    source.go.set()
    await beginning
    assert await served(plane) == {("step_0", model_digest(model), 3)}


async def test_a_copy_that_is_made_to_be_compared_is_not_lent(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sender holds on to what it was lent: the copy would stay as long as the trainer."""
    plane.spawn()
    lent: list[int] = []

    class Lending(FilesystemSender, LendingSender):
        def lend(self, tensors: Mapping[str, Any]) -> Collection[int]:
            lent.append(len(tensors))
            return ()

    monkeypatch.setattr(send_plan, "make_sender", lambda backend, around: Lending(around.root))
    told: dict[str, Any] = {"namespace": plane.namespace, "component": plane.component, "root": root_of(plane)}

    def begin(seed: int) -> None:
        WeightPublisher(plane.model(seed), plane.url, initial="step_0", **told).close()

    def publish() -> None:
        with WeightPublisher(plane.model(3), plane.url, encoding="delta", **told) as publisher:
            publisher.publish("step_1")

    await asyncio.to_thread(begin, 1)
    assert await served(plane) == {("step_0", model_digest(plane.model(1)), 1)}
    lent.clear()
    await asyncio.to_thread(begin, 2)  # other weights, which go from the copy
    assert await served(plane) == {("step_0", model_digest(plane.model(2)), 2)}
    assert not lent
    await asyncio.to_thread(publish)  # by the publisher's own copy, which stays
    assert await served(plane) == {("step_1", model_digest(plane.model(3)), 3)}
    assert lent


async def test_an_adapter_that_is_served_from_the_start_is_compared_too(plane: Plane) -> None:
    plane.spawn()
    told: dict[str, Any] = {"namespace": plane.namespace, "component": plane.component, "root": root_of(plane)}
    fleet = await plane.fleet()
    adapters = [make_fake_adapter(plane.tmp / f"adapter{seed}", seed, plane.model()) for seed in (1, 2)]
    for adapter, sequence in ((adapters[0], 1), (adapters[0], 1), (adapters[1], 2)):
        publisher = await asyncio.to_thread(
            WeightPublisher, adapter, plane.url, adapter="a", initial="step_0", **told
        )
        await asyncio.to_thread(publisher.close)
        made = (await fleet.run("state"))["adapters"]["a"]
        assert (made["digest"], made["sequence"]) == (adapter_digest(adapter), sequence)
        await served(plane)  # else it would be sent again


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"adapter": "a"}, "adapter"),
        ({"bucket_bytes": 0}, "bucket_bytes"),
        ({"fleet": 3}, "fleet"),
        ({"encoding": "half"}, "encoding"),
        ({"encoding": "delta", "cast": True}, "encoding"),
        ({"encoding": "delta", "policy": {"staging": "none"}}, "encoding"),
    ],
)
def test_wrong_arguments_are_named(given: dict[str, Any], field: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest) as caught:
        WeightPublisher(DirectorySource(tmp_path), **{"fleet": "http://127.0.0.1:9", **given})
    assert caught.value.facts["field"] == field


async def test_an_absent_fleet_is_an_error_within_the_bound(plane: Plane) -> None:
    publisher = WeightPublisher(plane.model(1), await plane.fleet(), root=root_of(plane), wait_s=0.1)
    with pytest.raises(NoWorkers):
        await publisher.publish_async("one")


@pytest.mark.parametrize("transport", ["filesystem", "gloo", "ipc", "nixl", "object_store"])
async def test_each_transport_brings_one_version_after_another(transport: str, plane: Plane) -> None:
    pytest.importorskip({"gloo": "torch", "nixl": "nixl"}.get(transport, "rl_plane"))
    workers, client, source = plane.spawn_many(2), await plane.client(), Changing()
    publisher = WeightPublisher(
        source,
        plane.url,
        namespace=plane.namespace,
        transport=transport,
        root=root_of(plane) if transport == "filesystem" else None,
        bucket_bytes=1500,
        encoding="delta",
    )
    two = plane.model(2)
    one_more = nudged(plane, two, 1)
    steps = [two, one_more, nudged(plane, one_more, 2), plane.model(3), two]
    try:
        for number, source.path in enumerate(steps, 1):
            if number == 5:  # to a fleet that has changed
                workers[0].kill()
                assert await (await client.view()).wait_until(lambda now: len(now) == 1, BOUND_S)
            await publisher.publish_async(f"step {number}")
            assert await served(plane) == {(f"step {number}", model_digest(source.path), number)}
        assert publisher.backend == transport
        told = (await client.run("updates"))["updates"]
        assert [one["encoding"] for one in told[::-1][1:]] == ["full", "delta", "delta", "full", "full"]
    finally:
        await asyncio.to_thread(publisher.close)


def test_the_page_of_transports_lists_what_is_tested() -> None:
    """In every engine, at one rank and two: tests/support/each_transport.py."""
    page = (ROOT / "docs" / "transports.md").read_text()
    everywhere = "| base, LoRA, delta " * 3 + "|"
    listed = {
        line.split("`")[1] for line in page.splitlines() if line.startswith("| `") and line.endswith(everywhere)
    }
    assert listed == installed().keys() - {"nccl"}

"""WeightPublisher against a real fleet: what is published is served, and a failure leaves the fleet as it was."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rl_plane.errors import (
    Conflict,
    InvalidRequest,
    InvalidWeights,
    Locked,
    NoWorkers,
    PlaneError,
)
from rl_plane.publish import Progress, WeightPublisher
from rl_plane.publish.fleet_access import BlockingFleet
from rl_plane.publish.publish_options import PublishLimits
from rl_plane.publish.sources.directory import DirectorySource
from rl_plane.sync import SyncRlClient
from rl_plane.transports.base import Sender, SenderContext
from rl_plane.transports.filesystem.sender import FilesystemSender
from rl_plane.transports.registry import installed
from tests.conftest import Plane
from tests.support.paths import ROOT
from tests.support.publishing import (
    BOUND_S,
    Broken,
    Changing,
    Held,
    nudged,
    publisher_by,
    root_of,
    served,
)
from worker.engines.fake.adapter import make_fake_adapter
from worker.receive.staging import model_digest

pytestmark = [pytest.mark.slow, pytest.mark.parallel]


async def test_a_version_is_published_by_each_kind_of_client(plane: Plane) -> None:
    plane.spawn_many(2)
    first, second, third = (plane.model(seed) for seed in (1, 2, 3))
    reported: list[Progress] = []
    async with await plane.client() as client:
        publisher = WeightPublisher(first, client, root=root_of(plane), workers=2, progress=reported.append)
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
    assert reported[0].phase == "sending"
    assert [one.phase for one in reported][-2:] == ["committing", "committed"]
    assert reported[-1].buckets == reported[-1].of_buckets > 0
    assert reported[-1].nbytes == reported[-1].of_nbytes > 0
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


async def test_a_keeping_sender_keeps_what_is_committed(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    plane.spawn()
    events: list[Any] = []

    class Keeping(FilesystemSender):
        def keep(
            self, adapter: str | None = None, onto_previous: bool = False, earlier: int | None = None
        ) -> None:
            events.append(("kept", adapter))

        def close(self) -> None:
            events.append("closed")
            super().close()

    def make(backend: str, around: SenderContext) -> Sender:
        return Keeping(root_of(plane))

    fleet = await plane.fleet()
    adapter = make_fake_adapter(plane.tmp / "adapter", 1, plane.model())
    await publisher_by(make, adapter, fleet, root=root_of(plane), adapter="a").publish_async("one")
    assert events[0] == ("kept", "a")
    assert set(events[1:]) == {"closed"}
    events.clear()
    with pytest.raises(InvalidWeights):
        await publisher_by(make, plane.model(2, nbytes=2048), fleet, root=root_of(plane)).publish_async("two")
    assert set(events) == {"closed"}

    # An update that is committed, but hardly served yet, is an error; late workers need it all the same.
    class Late(BlockingFleet):
        def run(self, op: str, body: dict[str, Any], request_id: str = "") -> dict[str, Any]:
            reply = super().run(op, body, request_id)
            if op == "update_weights":
                raise Conflict("it is committed, but 0 workers serve it", version=reply["version"])
            return reply

    events.clear()
    with pytest.raises(Conflict, match="0 workers"):
        await publisher_by(make, plane.model(3), Late(fleet), root=root_of(plane)).publish_async("three")
    assert events[0] == ("kept", None)


class Hasty(WeightPublisher):
    """Refuses a version at once while another is under way."""

    limits = PublishLimits(drain_s=-1e6)


async def test_publications_overlap_the_next_step_and_run_one_after_another(plane: Plane) -> None:
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
    # While an update does not end, the next one is refused once the bound is over.
    source.go.clear()
    publisher = Hasty(source, fleet, root=root_of(plane))
    three = publisher.publish("three", wait=False)
    four = publisher.publish("four", wait=False)
    with pytest.raises(Locked, match="three is still under way"):
        await asyncio.to_thread(four.result, BOUND_S)
    source.go.set()
    assert (await asyncio.to_thread(three.result, BOUND_S))["version"]["label"] == "three"


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
    if transport == "nixl":
        pytest.importorskip("nixl")
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
        updates = (await client.run("updates"))["updates"]
        assert [one["encoding"] for one in updates[::-1][1:]] == ["full", "delta", "delta", "full", "full"]
    finally:
        await asyncio.to_thread(publisher.close)


def test_the_page_of_transports_lists_what_is_tested() -> None:
    """tests/support/each_transport.py lists every engine, with one rank and with two."""
    page = (ROOT / "docs" / "transports.md").read_text()
    everywhere = "| base, LoRA, delta " * 3 + "|"
    listed = {
        line.split("`")[1] for line in page.splitlines() if line.startswith("| `") and line.endswith(everywhere)
    }
    assert listed == installed().keys() - {"nccl"} | {"http"}, "http has no sender"

"""A publisher chooses its sender anew where the fleet changes, and workers that join get the version."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

import rl_plane.publish.send_plan as send_plan
from rl_plane.client import RlClient
from rl_plane.errors import (
    InvalidRequest,
    Locked,
    MembershipChanged,
)
from rl_plane.publish import Progress, WeightPublisher
from rl_plane.publish.fleet_access import BlockingFleet
from rl_plane.publish.publish_options import PublishLimits
from rl_plane.transports.base import SenderContext
from rl_plane.transports.nixl.sender import NixlSender, build
from tests.conftest import Plane
from tests.support.delta_updates import tensors_in
from tests.support.publishing import (
    BOUND_S,
    HEAL_S,
    Changing,
    Gathering,
    Held,
    Noted,
    loaded,
    nudged,
    on_another_machine,
    publisher_by,
    root_of,
    serve,
    served,
)
from worker.receive.staging import model_digest

pytestmark = [pytest.mark.slow, pytest.mark.parallel]


class Hasty(WeightPublisher):
    """Waits for no other trainer, and opens an update at most three times."""

    limits = PublishLimits(others_s=0.0, openings=3)


async def test_another_trainers_group_takes_no_update_that_is_sent(plane: Plane) -> None:
    """The second trainer waits for a while. The version that is being sent is committed."""
    plane.spawn_many(2)
    how: dict[str, Any] = {"transport": "gloo", "bucket_bytes": 1500, "workers": 2}
    client, fleet = await plane.client(), await plane.fleet()
    held = Held(plane.model(1))
    first, second = WeightPublisher(held, fleet, **how), WeightPublisher(plane.model(2), client, **how)
    hasty = Hasty(plane.model(2), client, **how)
    sending = first.publish("one", wait=False)
    assert await asyncio.to_thread(held.begun.wait, BOUND_S)
    with pytest.raises(Locked, match="is prepared and waits"):
        await hasty.publish_async("two")
    held.go.set()
    await sending.wait()
    assert await served(plane) == {("one", model_digest(plane.model(1)), 1)}
    await second.publish_async("two")
    assert await served(plane) == {("two", model_digest(plane.model(2)), 2)}
    for publisher in (first, second, hasty):
        await asyncio.to_thread(publisher.close)


async def test_two_trainers_form_their_groups_in_turn(plane: Plane) -> None:
    """Each trainer replaces the other's group. The other trainer forms its group anew before it sends anything."""
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


async def test_a_sender_stays_until_a_version_by_the_next_is_committed(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane.spawn()
    alive: list[str] = []
    backends = iter(["first", "second", "third", "third"])
    monkeypatch.setattr(send_plan, "candidates", lambda *_, **__: [next(backends)])
    refused = threading.Event()

    def refuse(progress: Progress) -> None:
        if refused.is_set():
            raise RuntimeError("enough")

    how: dict[str, Any] = {"root": root_of(plane), "progress": refuse, "encoding": "full"}
    publisher = publisher_by(
        lambda name, around: Noted(name, root_of(plane), alive), plane.model(1), await plane.fleet(), **how
    )
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
async def test_a_sender_that_workers_elsewhere_do_not_reach_is_not_used(plane: Plane) -> None:
    plane.spawn()
    publisher = WeightPublisher(plane.model(1), await plane.fleet(), transport="nixl")
    await publisher.publish_async("one")
    with on_another_machine():
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
    plane.spawn()
    client = await plane.client()
    models = [plane.model(seed) for seed in (1, 2, 3)]
    state = {name: tensor.clone() for name, tensor in loaded(models[0]).items()}

    def step(number: int) -> str:
        for name, tensor in loaded(models[number]).items():
            state[name].copy_(tensor)
        return model_digest(models[number])

    made: list[NixlSender] = []

    def make(name: str, around: SenderContext) -> NixlSender:
        made.append(build(around))
        return made[-1]

    publisher = publisher_by(make, state, await plane.fleet(), transport="nixl")
    for number, label in enumerate(("one", "two")):
        digest = step(number)
        assert (await publisher.publish_async(label)).read
        assert await served(plane) == {(label, digest, number + 1)}
    (sender,) = made
    nbytes = sum(tensor.nbytes for tensor in state.values())
    assert sender.lent_bytes == nbytes
    assert nbytes <= sender.kept_bytes < 2 * nbytes
    assert sender.own_bytes == sender.kept_bytes, "no second copy"
    for tensor in state.values():  # as the next step does
        tensor.zero_()
    plane.spawn()
    await plane.until(lambda: serve(client, "two"), HEAL_S)
    # A publication without `wait` packs its tensors while the trainer continues.
    digest = step(2)
    publication = await asyncio.to_thread(publisher.publish, "three", wait=False)
    await asyncio.to_thread(publication.wait_read, BOUND_S)
    for tensor in state.values():
        tensor.zero_()
    await publication.wait()
    assert await served(plane) == {("three", digest, 3)}
    await asyncio.to_thread(publisher.close)


@pytest.mark.engines("nixl")
@pytest.mark.timeout(240)
async def test_without_a_copy_a_late_worker_heals_from_another_one(plane: Plane) -> None:
    plane.spawn()
    client, fleet = await plane.client(), await plane.fleet()

    made: list[NixlSender] = []

    def make(name: str, around: SenderContext) -> NixlSender:
        made.append(build(around))
        return made[-1]

    def publisher_of(keep_copy: Any) -> WeightPublisher:
        weights, policy = loaded(plane.model(1)), {"keep_staged": True}
        options = {"keep_copy": keep_copy}
        return publisher_by(make, weights, fleet, transport="nixl", policy=policy, options=options)

    with pytest.raises(InvalidRequest, match="keep_copy"):
        await publisher_of("no").publish_async("never")
    publisher = publisher_of(False)
    await publisher.publish_async("one")
    assert [sender.own_bytes for sender in made] == [0]
    plane.spawn()
    await plane.until(lambda: serve(client, "one"), HEAL_S)
    assert await served(plane) == {("one", model_digest(plane.model(1)), 1)}
    unstaged = {"transport": {"backend": "filesystem", "path": str(plane.model(2))}, "policy": {"staging": "none"}}
    with pytest.raises(InvalidRequest) as refused:  # a worker that fails could not heal
        await client.run("update_weights", unstaged)
    assert refused.value.facts["field"] == "policy.staging"
    await asyncio.to_thread(publisher.close)


class Joining:
    """A progress callback. Each time that the first bucket is sent it starts a worker, up to a number of times."""

    def __init__(self, plane: Plane) -> None:
        self.plane, self.times = plane, 0

    def __call__(self, progress: Progress) -> None:
        if self.times and (progress.phase, progress.buckets) == ("sending", 1):
            self.times -= 1
            self.plane.spawn()


@pytest.mark.parametrize("encoding", ["full", "delta"])
async def test_if_a_worker_joins_the_version_is_pushed_to_all_workers_again(encoding: Any, plane: Plane) -> None:
    """The publisher is a trainer that waits, or sends from its copy."""
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
    # A second worker that joins in that time is reported as an error.
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
    """The source's tensors may have changed, or other ranks would have to gather again."""
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
    """One worker joins while the group forms, and another before the update is prepared."""
    joining = {"init_transport": 1, "prepare_weights_update": 1}
    ask = RlClient.ask

    def join(op: str) -> None:
        if joining.get(op):
            joining[op] -= 1
            plane.spawn()

    async def forming(self: RlClient, view: Any, members: Any, op: str, *given: Any, **named: Any) -> Any:
        if op == "init_transport":
            await asyncio.to_thread(join, op)
        return await ask(self, view, members, op, *given, **named)

    class Preparing(BlockingFleet):
        def run(self, op: str, body: dict[str, Any], request_id: str = "") -> dict[str, Any]:
            if op == "prepare_weights_update":
                join(op)
            return super().run(op, body, request_id)

    monkeypatch.setattr(RlClient, "ask", forming)
    plane.spawn()
    source = Gathering(plane.model(1))
    source.collective = kind == "gathered"
    fleet = Preparing(plane.url, namespace=plane.namespace, component=plane.component)
    publisher = Hasty(source, fleet, transport="gloo", bucket_bytes=1500)

    def publish(label: str) -> dict[str, Any]:
        return publisher.publish(label, wait=kind == "gathered").result(HEAL_S)

    reply = await asyncio.to_thread(publish, "one")
    assert joining == {"init_transport": 0, "prepare_weights_update": 0}
    assert (len(reply["workers"]), reply["excluded"]) == (3, [])
    assert source.taken == len(tensors_in(plane.model(1)))  # once
    assert await served(plane) == {("one", model_digest(plane.model(1)), 1)}
    # Not without end.
    joining["prepare_weights_update"] = 3
    with pytest.raises(MembershipChanged, match="fingerprint"):
        await asyncio.to_thread(publish, "two")
    assert joining["prepare_weights_update"] == 0
    assert len((await asyncio.to_thread(publish, "three"))["workers"]) == 6
    assert await served(plane) == {("three", model_digest(plane.model(1)), 2)}
    await asyncio.to_thread(publisher.close)

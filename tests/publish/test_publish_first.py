"""With `initial` the fleet serves the trainer's weights when the publisher is made."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import Any

import pytest

from rl_plane.errors import (
    InvalidRequest,
    NoWorkers,
)
from rl_plane.publish import WeightPublisher
from rl_plane.transports.base import Sender, SenderContext
from rl_plane.transports.filesystem.sender import FilesystemSender
from tests.conftest import Plane
from tests.support.healing import until_behind
from tests.support.publishing import (
    BOUND_S,
    Gathering,
    Held,
    on_another_machine,
    publisher_by,
    root_of,
    served,
)
from worker.engines.fake.adapter import make_fake_adapter
from worker.receive.staging import adapter_digest, model_digest

pytestmark = [pytest.mark.slow, pytest.mark.parallel]


async def test_the_fleet_has_the_trainers_weights_from_the_start(plane: Plane) -> None:
    plane.spawn()
    source = Gathering(plane.model(1))

    def begin(label: str, source: Any = source, then: str | None = None, **more: Any) -> None:
        options: dict[str, Any] = {
            "namespace": plane.namespace,
            "component": plane.component,
            "root": root_of(plane),
        }
        with WeightPublisher(source, plane.url, initial=label, **{**options, **more}) as publisher:
            if then is not None:
                publisher.publish(then)

    await asyncio.to_thread(begin, "initial")  # as the fleet calls a version that no trainer has published
    assert await served(plane) == {("initial", model_digest(plane.model(1)), 1)}
    await asyncio.to_thread(begin, "step_0")
    assert await served(plane) == {("step_0", model_digest(plane.model(1)), 2)}
    count = source.taken
    await asyncio.to_thread(begin, "step_0")  # a trainer that starts again
    assert await served(plane) == {("step_0", model_digest(plane.model(1)), 2)}
    assert source.taken == 3 * count // 2, "other ranks, which gather, are not left waiting"
    with on_another_machine():  # which nixl would have to know how to reach
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
    updates = (await (await plane.fleet()).run("updates"))["updates"]
    assert [(one["label"], one["encoding"]) for one in updates[:2]] == [("step_1", "full"), ("step_0", "full")]
    with pytest.raises(NoWorkers):
        await asyncio.to_thread(begin, "step_1", workers=2, wait_s=0.1)
    await asyncio.to_thread(begin, "step_0", rank=1)
    with pytest.raises(InvalidRequest, match="would block") as refused:
        WeightPublisher(source, await plane.fleet(), initial="step_1")
    assert refused.value.facts["field"] == "initial"


async def test_a_committed_version_that_no_worker_serves_is_sent_when_the_publisher_starts(plane: Plane) -> None:
    """Trainer and worker have ended, and no process or file has the version."""
    worker, client, model = plane.spawn(), await plane.client(), plane.model(1)
    options: dict[str, Any] = {"namespace": plane.namespace, "component": plane.component, "root": root_of(plane)}

    def begin() -> None:
        WeightPublisher(model, plane.url, initial="step_0", **options).close()

    await asyncio.to_thread(begin)
    assert await served(plane) == {("step_0", model_digest(model), 1)}
    worker.kill()
    root_of(plane).rename(plane.tmp / "away")
    assert await (await client.view()).wait_until(lambda now: len(now) == 0, BOUND_S)
    again = plane.spawn(instance_id=worker.instance_id)
    await until_behind(plane, client, again.instance_id)
    await asyncio.to_thread(begin)
    assert await served(plane) == {("step_0", model_digest(model), 2)}


async def test_a_version_committed_during_the_comparison_is_replaced(plane: Plane) -> None:
    plane.spawn()
    fleet, model = await plane.fleet(), plane.model(1)
    options: dict[str, Any] = {"namespace": plane.namespace, "component": plane.component, "root": root_of(plane)}

    def begin(source: Any) -> None:
        WeightPublisher(source, plane.url, initial="step_0", **options).close()

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
    """A sender keeps memory that it was lent, so a lent copy would stay as long as the trainer."""
    plane.spawn()
    lent: list[int] = []

    class Lending(FilesystemSender):
        def lend(self, tensors: Mapping[str, Any]) -> Collection[int]:
            lent.append(len(tensors))
            return ()

    def make(backend: str, around: SenderContext) -> Sender:
        assert around.root is not None
        return Lending(around.root)

    options: dict[str, Any] = {"namespace": plane.namespace, "component": plane.component, "root": root_of(plane)}

    def begin(seed: int) -> None:
        publisher_by(make, plane.model(seed), plane.url, initial="step_0", **options).close()

    def publish() -> None:
        with publisher_by(make, plane.model(3), plane.url, encoding="delta", **options) as publisher:
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
    options: dict[str, Any] = {"namespace": plane.namespace, "component": plane.component, "root": root_of(plane)}
    fleet = await plane.fleet()
    adapters = [make_fake_adapter(plane.tmp / f"adapter{seed}", seed, plane.model()) for seed in (1, 2)]
    for adapter, sequence in ((adapters[0], 1), (adapters[0], 1), (adapters[1], 2)):
        publisher = await asyncio.to_thread(
            WeightPublisher, adapter, plane.url, adapter="a", initial="step_0", **options
        )
        await asyncio.to_thread(publisher.close)
        made = (await fleet.run("state"))["adapters"]["a"]
        assert (made["digest"], made["sequence"]) == (adapter_digest(adapter), sequence)
        await served(plane)  # else it would be sent again

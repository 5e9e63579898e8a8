"""WeightPublisher against a real fleet: versions of which only some tensors are sent."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rl_plane.client import RlClient
from rl_plane.errors import InvalidRequest, NotAdmitted, NotAtBase
from rl_plane.protocol.record import MAX_DELTAS
from rl_plane.protocol.versions import TensorSpec
from rl_plane.publish import WeightPublisher
from rl_plane.publish.partial_attempt import Baseline, Link
from rl_plane.publish.publish_options import PublishOptions
from rl_plane.transports.base import Sender, SenderContext
from rl_plane.transports.nixl.sender import NixlSender
from rl_plane.transports.registry import make_sender
from rl_plane.weights.safetensors_file import write_safetensors
from tests.conftest import Plane
from tests.support.delta_updates import tensors_in
from tests.support.fleet_updates import generated
from tests.support.healing import until_behind
from tests.support.publishing import (
    BOUND_S,
    Changing,
    all_keep,
    nudged,
    publisher_by,
    root_of,
    serve,
    unnoticed_loss,
)
from worker.engines.fake.adapter import fake_token
from worker.receive.staging import model_digest

pytestmark = [pytest.mark.slow, pytest.mark.parallel]

PROMPT = [5, 6, 7]
WHOLE, ONE = 4096, 1024
"""The bytes of a fake model, and of one of its four tensors."""


async def computes_with(plane: Plane, client: RlClient, model: Path) -> bool:
    """True if every engine computes with exactly these bytes, by the tokens that it makes."""
    made = [fake_token(model_digest(model), PROMPT, position) for position in range(4)]

    async def tokens() -> list[Any]:
        rows = (await client.run("workers"))["workers"]
        with contextlib.suppress(NotAdmitted):  # on a busy machine a worker loses its lease for a moment
            return [await generated(client, row["instance_id"], PROMPT, 4) for row in rows]
        return []

    found: list[Any] = await plane.until(tokens, BOUND_S)
    return found == [made] * len(found)


class Published:
    """A publisher of fake models, and what the fleet says of each version."""

    def __init__(self, plane: Plane, client: RlClient, publisher: WeightPublisher, source: Changing) -> None:
        self.plane, self.client, self.publisher, self.source = plane, client, publisher, source
        self.count = 0

    async def __call__(self, model: Path) -> tuple[str, int]:
        """Publishes a model. Returns the encoding, and the bytes that were sent."""
        self.source.path = model
        label = f"step {self.count}"
        self.count += 1
        await self.publisher.publish_async(label)
        (newest,) = (await self.client.run("updates", {"limit": 1}))["updates"]
        assert newest["label"] == label
        assert newest["version"]["digest"] == model_digest(model)
        await self.plane.until(functools.partial(serve, self.client, label), BOUND_S)
        await self.plane.until(functools.partial(all_keep, self.client, model), BOUND_S)
        assert await computes_with(self.plane, self.client, model)
        return newest["encoding"], newest["sent_bytes"]


def transport_options(plane: Plane, transport: str) -> dict[str, Any]:
    return {"root": root_of(plane)} if transport == "filesystem" else {"transport": transport}


@pytest.mark.parametrize("transport", ["filesystem", "object_store", "ipc", "gloo", "nixl"])
async def test_a_partial_version_sends_only_changed_tensors(transport: str, plane: Plane) -> None:
    if transport == "nixl":
        pytest.importorskip("nixl")
    plane.spawn_many(2)
    models = [plane.model(1)]
    for number in (1, 5, 2):
        models.append(nudged(plane, models[-1], number))
    client, source = await plane.client(), Changing()
    publisher = WeightPublisher(
        source, client, encoding="partial", workers=2, **transport_options(plane, transport)
    )
    publish = Published(plane, client, publisher, source)
    assert await publish(models[0]) == ("full", WHOLE)
    assert await publish(models[1]) == ("partial", ONE)
    assert await publish(models[2]) == ("partial", ONE)
    assert publisher._baseline.chain[1:] == [Link(model_digest(models[2]), frozenset({"layers.1.weight"}), ONE)]
    assert await publish(models[3]) == ("partial", ONE)
    # A version without a change is committed under its label, and moves no bytes of a tensor.
    again, sent = await publish(models[3])
    assert again == "partial", "what a late worker fetches is as before"
    assert sent == 24
    # The tensors may be equal to those of an earlier version. Then the source of that version is enough.
    back = plane.tmp / "weights" / "back"
    back.mkdir()
    write_safetensors(
        back / "model.safetensors",
        {**tensors_in(models[3]), "layers.2.weight": tensors_in(models[0])["layers.2.weight"]},
    )
    assert await publish(back) == ("partial", ONE)
    assert [link.digest for link in publisher._baseline.chain] == [
        model_digest(models[0]),
        model_digest(models[2]),
    ]
    # Everything differs.
    assert await publish(plane.model(2)) == ("full", WHOLE)
    assert await publish(nudged(plane, plane.model(2), 3)) == ("partial", ONE)
    await asyncio.to_thread(publisher.close)


async def test_a_full_version_is_sent_to_a_fleet_that_has_lost_the_base(plane: Plane) -> None:
    plane.spawn()
    models = [plane.model(1)]
    for number in range(1, 8):
        models.append(nudged(plane, models[-1], number))
    client, source = await plane.client(), Changing()
    publisher = WeightPublisher(source, client, root=root_of(plane), encoding="partial", options={"keep": 1})
    publish = Published(plane, client, publisher, source)
    for number in range(3):
        assert (await publish(models[number]))[0] == ("partial" if number else "full")
    plane.spawn()
    await plane.until(functools.partial(serve, client, "step 2"), BOUND_S)
    await plane.until(functools.partial(all_keep, client, models[2]), BOUND_S)
    assert await computes_with(plane, client, models[2])
    assert (await publish(models[3]))[0] == "partial"
    # Another trainer has published meanwhile: no worker keeps the version before.
    body: dict[str, Any] = {"transport": {"backend": "filesystem", "path": str(models[0])}}
    await client.run("update_weights", body)
    assert (await publish(models[4]))[0] == "full"
    assert (await publish(models[5]))[0] == "partial"
    # The publisher hears of it only after it has read the tensors, which are as they were.
    await client.run("update_weights", body)
    with unnoticed_loss():
        assert (await publish(models[6]))[0] == "full"
    assert (await publish(models[7]))[0] == "partial"
    # They may have changed: the next version goes in full.
    await client.run("update_weights", body)
    source.path = models[6]
    with unnoticed_loss(), pytest.raises(NotAtBase, match="may have changed"):
        await publisher.publish("late", wait=False).wait()
    assert (await publish(models[6]))[0] == "full"
    await asyncio.to_thread(publisher.close)


async def test_a_worker_that_can_not_follow_is_brought_back_by_a_full_version(plane: Plane) -> None:
    alone = "import sys; sys.modules['nixl'] = None"  # no other worker helps it
    worker, _ = (plane.spawn(patch=alone) for _ in range(2))
    models = [plane.model(1)]
    for number in range(1, 4):
        models.append(nudged(plane, models[-1], number))
    client, source = await plane.client(), Changing()
    publisher = WeightPublisher(source, client, transport="ipc", encoding="partial", workers=2)
    publish = Published(plane, client, publisher, source)
    assert [(await publish(models[number]))[0] for number in (0, 1)] == ["full", "partial"]
    worker.kill()
    assert await (await client.view()).wait_until(lambda now: len(now) == 1, BOUND_S)
    again = plane.spawn(instance_id=worker.instance_id, patch=alone)
    await until_behind(plane, client, again.instance_id)
    assert [(await publish(models[number]))[0] for number in (2, 3)] == ["full", "partial"]
    await asyncio.to_thread(publisher.close)


async def test_a_sender_keeps_no_version_that_a_later_one_replaces(plane: Plane) -> None:
    pytest.importorskip("nixl")
    plane.spawn()
    made: list[NixlSender] = []

    def make(name: str, around: SenderContext) -> Sender:
        sender = make_sender(name, around)
        assert isinstance(sender, NixlSender)
        made.append(sender)
        return sender

    client, source = await plane.client(), Changing()
    publisher = publisher_by(make, source, client, transport="nixl", encoding="partial")
    publish = Published(plane, client, publisher, source)
    model = plane.model(1)
    await publish(model)
    for number in (1, 5, 9):  # always the same tensor
        model = nudged(plane, model, number)
        assert await publish(model) == ("partial", ONE)
    (sender,) = made
    assert sender.kept_bytes == WHOLE + ONE
    plane.spawn()
    await plane.until(functools.partial(serve, client, "step 3"), BOUND_S)
    assert await computes_with(plane, client, model)
    await asyncio.to_thread(publisher.close)


async def test_a_partial_version_reads_and_sends_only_trained_tensors(plane: Plane) -> None:
    import torch

    plane.spawn_many(2)
    client = await plane.client()

    class Model(torch.nn.Module):  # type: ignore[misc]
        """The tensors of a fake model."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(256, 1, bias=False) for _ in range(4))
            for layer in self.layers:
                layer.weight = torch.nn.Parameter(layer.weight.detach().reshape(-1))

    model = Model()
    for number in (0, 1):
        model.layers[number].weight.requires_grad_(False)
    publisher = WeightPublisher(model, client, root=root_of(plane), trainable_only=True, workers=2)

    async def publish(label: str, *changed: int) -> tuple[str, int]:
        with torch.no_grad():
            for number in changed:
                model.layers[number].weight += 1
        await publisher.publish_async(label)
        (newest,) = (await client.run("updates", {"limit": 1}))["updates"]

        async def kept() -> bool:
            rows = (await client.run("workers"))["workers"]
            return {row.get("kept") for row in rows} == {newest["digest"]}

        await plane.until(kept, BOUND_S)
        return newest["encoding"], newest["sent_bytes"]

    assert await publish("zero") == ("full", WHOLE)
    assert await publish("one", 2, 3) == ("partial", 2 * ONE)
    assert await publish("two", 3) == ("partial", ONE)
    model.layers[3].weight.requires_grad_(False)  # frozen after a last step
    assert await publish("three", 2, 3) == ("partial", 2 * ONE)
    model.layers[0].weight.requires_grad_(True)
    assert await publish("four", 0) == ("partial", ONE)
    directory = plane.tmp / "weights" / "trained"
    directory.mkdir()
    from safetensors.torch import save_file

    save_file(
        {name: one.detach().contiguous() for name, one in model.state_dict().items()},
        directory / "model.safetensors",
    )
    assert await computes_with(plane, client, directory)
    await asyncio.to_thread(publisher.close)


def test_options_that_exclude_one_another_are_refused() -> None:
    class Nothing:
        collective = adapter = False

    wrong: list[tuple[Mapping[str, Any], str]] = [
        ({"encoding": "delta", "trainable_only": True}, "trainable_only"),
        ({"encoding": "full", "trainable_only": True}, "trainable_only"),
        ({"trainable_only": True, "cast": True}, "trainable_only"),
        ({"encoding": "partial", "policy": {"staging": "none"}}, "encoding"),
        ({"encoding": "partial", "adapter": "a"}, "encoding"),
        ({"encoding": "some"}, "encoding"),
    ]
    for how, field in wrong:
        with pytest.raises(InvalidRequest) as caught:
            PublishOptions(**how)
        assert caught.value.facts["field"] == field
    assert PublishOptions(trainable_only=True).mode == "partial"
    with pytest.raises(InvalidRequest, match="does not know which tensors"):
        WeightPublisher({}, "http://127.0.0.1:1", trainable_only=True)


def test_a_chain_ends_when_it_does_not_pay() -> None:
    baseline = Baseline()
    specs = {name: TensorSpec("F32", (256,)) for name in "abcd"}
    digests = dict.fromkeys(specs, "0" * 64)
    baseline.set_full("full", specs, digests)
    for number in range(1, 6):
        assert not baseline.is_long
        names = frozenset("abcd"[number % 4])
        chain = baseline.chain_before(names)
        baseline.set_partial(str(number), digests, [*chain, Link(str(number), names, ONE)])
    assert baseline.is_long, "a late worker would fetch more than the full version has"
    assert [link.digest for link in baseline.chain_before(frozenset("abcd"))] == ["full"]
    assert [link.digest for link in baseline.chain_before(frozenset("bc"))] == ["full", "1", "2", "3", "4"][:5]
    baseline.set_full("full", specs, digests)
    for number in range(MAX_DELTAS):
        assert not baseline.is_long
        baseline.set_partial(str(number), digests, [*baseline.chain, Link(str(number), frozenset("a"), 0)])
    assert baseline.is_long

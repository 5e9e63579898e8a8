"""WeightPublisher against a real fleet: which versions go as deltas, from its own copy."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import functools
import importlib
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from rl_plane.errors import InvalidRequest, UpdateAborted
from rl_plane.publish import WeightPublisher, host_copy
from rl_plane.publish.fleet_access import BlockingFleet
from rl_plane.publish.free_memory import free_memory
from rl_plane.publish.host_copy import AGAIN, TRIES, HostCopy
from rl_plane.publish.publish_options import PublishOptions
from rl_plane.publish.send_plan import SenderFactory
from rl_plane.transports.base import Sender, SenderContext
from rl_plane.transports.nixl.sender import NixlSender, build
from rl_plane.transports.registry import make_sender
from rl_plane.weights.safetensors_file import write_safetensors
from tests.conftest import Plane
from tests.support.delta_updates import tensors_in
from tests.support.fleet_updates import all_serve
from tests.support.healing import until_behind
from tests.support.publishing import (
    BOUND_S,
    Broken,
    Changing,
    all_keep,
    nudged,
    on_another_machine,
    publisher_by,
    root_of,
    serve,
    served,
    unnoticed_loss,
    with_free_memory,
)
from worker.engines.fake.adapter import make_fake_adapter, make_fake_model
from worker.receive.staging import model_digest

pytestmark = [pytest.mark.slow, pytest.mark.parallel]


async def test_the_publisher_sends_deltas_unless_their_base_is_lost(plane: Plane) -> None:
    """The last version but one may be gone, a source may fail, and a worker may have lost what it kept."""
    plane.spawn_many(2)
    models = [plane.model(1)]
    for number in range(1, 11):
        models.append(nudged(plane, models[-1], number))
    client, source = await plane.client(), Changing()
    strict = threading.Event()

    class Strict(BlockingFleet):
        """Asks for more ready workers than there are, while `strict` is set."""

        def run(self, op: str, body: dict[str, Any], request_id: str = "") -> dict[str, Any]:
            if op == "update_weights" and strict.is_set():
                body = {**body, "policy": {**body["policy"], "min_ready": 9}}
            return super().run(op, body, request_id)

    fleet = Strict(client)
    publisher = WeightPublisher(source, fleet, root=root_of(plane), options={"keep": 1}, encoding="delta")

    async def publish(model: int, encoding: str) -> None:
        source.path = models[model]
        await publisher.publish_async(f"step {model}")
        (newest,) = (await client.run("updates", {"limit": 1}))["updates"]
        assert (newest["label"], newest["encoding"]) == (f"step {model}", encoding)
        # A worker that offers what it keeps loads nixl, and with it torch: on a busy machine it is late once.
        await plane.until(lambda: serve(client, f"step {model}"), BOUND_S)
        await plane.until(lambda: all_keep(client, models[model]), BOUND_S)

    for model, encoding in ((0, "full"), (1, "delta"), (2, "delta"), (3, "delta")):
        await publish(model, encoding)
    # A new worker still finds what the chain needs.
    plane.spawn()
    await plane.until(lambda: all_serve(client, "step 3"), BOUND_S)
    # A source that breaks off, or a fleet that refuses, leaves the copy at what is committed.
    broken = Broken(models[5])
    broken.good = 3
    source.source = broken
    with pytest.raises(RuntimeError, match="out of memory"):
        await publisher.publish_async("broken")
    source.source = None
    strict.set()
    source.path = models[6]
    with pytest.raises(UpdateAborted, match="min_ready"):
        await publisher.publish_async("too few")
    strict.clear()
    await publish(4, "delta")
    # No worker keeps the base, and its checkpoint is gone.
    body: dict[str, Any] = {"transport": {"backend": "filesystem", "path": str(models[4])}}
    await client.run("update_weights", body)
    models[4].rename(plane.tmp / "away")
    with unnoticed_loss():
        await publish(5, "full")
    await publish(6, "delta")
    # Another trainer has published meanwhile.
    body = {"transport": {"backend": "filesystem", "path": str(models[2])}, "policy": {"keep_staged": True}}
    await client.run("update_weights", body)
    await publish(7, "full")
    await publish(8, "delta")
    # With another transport, what the chain needs went with the sender before.
    assert publisher._plan is not None
    publisher._plan.options = dataclasses.replace(publisher._options, transport="object_store")
    await publish(9, "full")
    await publish(10, "delta")
    await asyncio.to_thread(publisher.close)


@pytest.mark.parametrize(("transport", "encodings"), [("ipc", ["full"]), ("filesystem", ["delta", "full"])])
async def test_a_worker_that_can_not_follow_deltas_is_brought_back_by_a_full_version(
    transport: str, encodings: list[str], plane: Plane
) -> None:
    """A full version comes at once if no worker can fetch what it lacks. Otherwise it comes after the first delta that
    the worker missed."""
    alone = "import sys; sys.modules['nixl'] = None"  # no other worker helps it
    worker, _ = (plane.spawn(patch=alone) for _ in range(2))
    models = [plane.model(1)]
    for number in range(1, 5):
        models.append(nudged(plane, models[-1], number))
    client, source = await plane.client(), Changing()
    root = root_of(plane) if transport == "filesystem" else None
    publisher = WeightPublisher(source, client, transport=transport, root=root, encoding="delta", workers=2)

    async def publish(model: int) -> str:
        source.path = models[model]
        await publisher.publish_async(f"step {model}")
        (newest,) = (await client.run("updates", {"limit": 1}))["updates"]
        assert newest["label"] == f"step {model}"
        return str(newest["encoding"])

    for model, encoding in enumerate(("full", "delta")):
        assert await publish(model) == encoding
        await plane.until(functools.partial(all_keep, client, models[model]), BOUND_S)
    worker.kill()
    if root is not None:
        for version in root.iterdir():
            version.rename(plane.tmp / version.name)
    assert await (await client.view()).wait_until(lambda now: len(now) == 1, BOUND_S)
    again = plane.spawn(instance_id=worker.instance_id, patch=alone)
    await until_behind(plane, client, again.instance_id)
    assert [await publish(2 + number) for number in range(len(encodings))] == encodings
    last = 2 + len(encodings)
    await plane.until(lambda: serve(client, f"step {last - 1}"), BOUND_S)
    await plane.until(lambda: all_keep(client, models[last - 1]), BOUND_S)
    assert await publish(last) == "delta"
    await plane.until(lambda: serve(client, f"step {last}"), BOUND_S)
    await asyncio.to_thread(publisher.close)


async def test_no_delta_is_tried_where_a_worker_can_not_keep_what_it_serves(plane: Plane) -> None:
    """A delta would be refused each time, and the full version sent after it."""
    plane.spawn()
    # Its model ties tensors, say.
    plane.spawn(
        patch="import worker.receive.weight_receiver; worker.receive.weight_receiver.as_kept = lambda *_: None"
    )
    models = [plane.model(1)]
    models += [nudged(plane, models[0], number) for number in (1, 2)]
    client, source = await plane.client(), Changing()
    publisher = WeightPublisher(source, client, root=root_of(plane), encoding="delta", workers=2)
    for number, source.path in enumerate(models):
        await publisher.publish_async(f"step {number}")
        await plane.until(functools.partial(serve, client, f"step {number}"), BOUND_S)
    assert None in {row.get("kept") for row in (await client.run("workers"))["workers"]}
    updates = (await client.run("updates"))["updates"]
    sent = [(one["label"], one["encoding"], one["outcome"]) for one in updates if one["label"] != "initial"]
    assert sent == [(f"step {number}", "full", "committed") for number in (2, 1, 0)]
    await asyncio.to_thread(publisher.close)


async def test_a_delta_is_chosen_where_bytes_are_slow_and_there_is_memory(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deltas pay across machines and with the object store, but not within one machine."""
    plane.spawn()
    models = [plane.model(1)]
    for number in range(1, 11):
        models.append(nudged(plane, models[-1], number))
    client, source = await plane.client(), Changing()
    rest = iter(enumerate(models))

    async def publish(encoding: str, *, kept: bool) -> None:
        number, source.path = next(rest)
        await publisher.publish_async(f"step {number}")
        (newest,) = (await client.run("updates", {"limit": 1}))["updates"]
        assert (newest["label"], newest["encoding"]) == (f"step {number}", encoding)
        await plane.until(functools.partial(serve, client, f"step {number}"), BOUND_S)
        digest = model_digest(source.path) if kept else None

        async def keeps() -> bool:
            return [row.get("kept") for row in (await client.run("workers"))["workers"]] == [digest]

        await plane.until(keeps, BOUND_S)

    publisher = WeightPublisher(source, client, root=root_of(plane))
    await publish("full", kept=False)
    with on_another_machine(), monkeypatch.context() as patch:
        await publish("full", kept=True)
        await publish("delta", kept=True)
        nbytes = publisher.copy_bytes
        with with_free_memory(nbytes):
            await publish("delta", kept=True)  # the copy is there already
        with with_free_memory(nbytes - 1):
            await publish("full", kept=False)
            assert not publisher.copy_bytes
        with with_free_memory(3 * nbytes):
            await publish("full", kept=True)
            patch.setitem(sys.modules, "numba", None)  # as if it weren't installed
            await publish("full", kept=False)
    await publish("full", kept=False)
    assert not publisher.copy_bytes
    await asyncio.to_thread(publisher.close)

    publisher = WeightPublisher(source, client, transport="object_store")
    with with_free_memory(0):
        await publish("full", kept=False)
    await publish("full", kept=True)
    await publish("delta", kept=True)
    await asyncio.to_thread(publisher.close)


@pytest.mark.parametrize("transport", ["gloo", "nixl"])
async def test_deltas_that_are_chosen_overlap_the_next_step(transport: str, plane: Plane) -> None:
    """The memory lent from the copy is returned once all workers are on one machine again."""
    if transport == "nixl":
        pytest.importorskip("nixl")
    plane.spawn()
    client, source = await plane.client(), Changing()
    how: dict[str, Any] = {"namespace": plane.namespace, "component": plane.component, "bucket_bytes": 1500}
    made: list[Sender] = []

    def make(name: str, around: SenderContext) -> Sender:
        made.append(make_sender(name, around))
        return made[-1]

    publisher = publisher_by(make, source, plane.url, transport=transport, options={"host": "127.0.0.1"}, **how)
    models = [plane.model(1)]
    for number in (1, 2):
        models.append(nudged(plane, models[-1], number))

    async def publish(number: int, encoding: str) -> None:
        source.path = models[number]
        publication = publisher.publish(f"step {number}", wait=False)
        await asyncio.to_thread(publication.wait_read, BOUND_S)
        source.path = Path()
        await publication.wait()
        assert await served(plane) == {(f"step {number}", model_digest(models[number]), number + 1)}
        (newest,) = (await client.run("updates", {"limit": 1}))["updates"]
        assert newest["encoding"] == encoding

    with on_another_machine():
        await publish(0, "full")
        await plane.until(functools.partial(all_keep, client, models[0]), BOUND_S)
        await publish(1, "delta")
    await publish(2, "full")
    assert not publisher.copy_bytes
    assert [sender.lent_bytes for sender in made if isinstance(sender, NixlSender)] == [0] * (transport == "nixl")
    await asyncio.to_thread(publisher.close)


def changed(plane: Plane, model: Path, share: float) -> Path:
    """A model that differs in this share of each tensor's bytes."""
    tensors = {name: (spec, bytearray(data)) for name, (spec, data) in tensors_in(model).items()}
    for _, data in tensors.values():
        for place in range(0, len(data), max(1, round(1 / share))):
            data[place] ^= 1
    path = plane.tmp / "weights" / f"{model.name}~"
    path.mkdir()
    write_safetensors(
        path / "model.safetensors", {name: (spec, bytes(data)) for name, (spec, data) in tensors.items()}
    )
    return path


async def publish_changed(
    plane: Plane, share: float, count: int, make: SenderFactory = make_sender, **how: Any
) -> tuple[list[str], WeightPublisher]:
    """Publishes `count` versions. Returns the encoding of each, and the publisher."""
    client, source = await plane.client(), Changing()
    publisher = publisher_by(make, source, client, **how)
    source.path = plane.model(1)
    sent = []
    for number in range(count):
        await publisher.publish_async(f"step {number}")
        (newest,) = (await client.run("updates", {"limit": 1}))["updates"]
        assert newest["label"] == f"step {number}"
        sent.append(newest["encoding"])
        await plane.until(functools.partial(serve, client, f"step {number}"), BOUND_S)
        if publisher.copy_bytes:
            await plane.until(functools.partial(all_keep, client, source.path), BOUND_S)
        source.path = changed(plane, source.path, share)
    return sent, publisher


async def test_a_chain_of_deltas_is_no_larger_than_the_model(plane: Plane) -> None:
    """Late workers fetch the whole chain, and its source keeps all of it in memory."""
    pytest.importorskip("nixl")
    plane.spawn()
    made: list[NixlSender] = []

    def make(name: str, around: SenderContext) -> NixlSender:
        made.append(build(around))
        return made[-1]

    sent, publisher = await publish_changed(plane, 1 / 25, 7, make, transport="nixl", encoding="delta")
    assert [sender.kept_bytes <= 2 * publisher.copy_bytes for sender in made] == [True]
    assert sent[:2] == ["full", "delta"]
    assert "full" in sent[2:]
    assert "delta" in sent[-2:], "a new chain"
    await asyncio.to_thread(publisher.close)


def test_deltas_that_did_not_pay_are_tried_again_after_some_versions() -> None:
    copy = HostCopy()
    copy.in_vain = TRIES - 1
    assert copy.is_tried()
    for _ in range(2):
        copy.in_vain += 1
        assert [copy.is_tried() for _ in range(AGAIN)] == [False] * AGAIN
        assert copy.is_tried()


async def test_memory_lent_to_nixl_is_returned_before_a_copy_is_allocated(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine has memory for one copy, and not for two."""
    pytest.importorskip("nixl")
    nixl = importlib.import_module("rl_plane.transports.nixl.sender")

    plane.spawn()
    how: dict[str, Any] = {"namespace": plane.namespace, "component": plane.component, "bucket_bytes": 1500}
    source = Changing()
    senders: list[NixlSender] = []

    def make_nixl(name: str, around: SenderContext) -> NixlSender:
        senders.append(build(around))
        return senders[-1]

    publisher = publisher_by(make_nixl, source, plane.url, transport="nixl", options={"host": "127.0.0.1"}, **how)
    source.path = plane.model(1)
    with on_another_machine():
        await publisher.publish_async("one")
    (sender,), make, lent = senders, nixl.RegisteredMemory, []
    assert sender.lent_bytes

    def memory(*given: Any) -> Any:
        lent.append(sender.lent_bytes)
        return make(*given)

    monkeypatch.setattr(nixl, "RegisteredMemory", memory)
    source.path = plane.model(2)
    with on_another_machine(), with_free_memory(0):
        await publisher.publish("two", wait=False).wait()
    assert lent == [0]
    assert await served(plane) == {("two", model_digest(plane.model(2)), 2)}
    await asyncio.to_thread(publisher.close)


async def test_a_copy_whose_comparisons_save_nothing_is_dropped(plane: Plane) -> None:
    plane.spawn()
    sent, publisher = await publish_changed(plane, 1.0, 4, transport="object_store")
    assert sent == ["full"] * 4
    assert publisher.copy_bytes
    await publisher.publish_async("one more")
    assert not publisher.copy_bytes
    rows = (await (await plane.client()).run("workers"))["workers"]
    assert [row.get("kept") for row in rows] == [None]
    await asyncio.to_thread(publisher.close)


@pytest.mark.parametrize(
    ("how", "encoding"),
    [
        ({}, "auto"),
        ({"encoding": "delta"}, "delta"),
        ({"encoding": "full"}, "full"),
        ({"policy": {"keep_staged": True}}, "auto"),
        ({"policy": {"keep_staged": False}}, "full"),
        ({"policy": {"staging": "none"}}, "full"),
        ({"cast": True}, "full"),
        ({"trainer_stays": False}, "full"),
        ({"trainer_stays": False, "encoding": "delta"}, "delta"),
    ],
)
def test_options_decide_whether_deltas_are_sent(how: dict[str, Any], encoding: str) -> None:
    assert PublishOptions(**how).mode == encoding


def test_adapters_are_sent_in_full(tmp_path: Path) -> None:
    adapter = make_fake_adapter(tmp_path / "a", 1, make_fake_model(tmp_path / "model", 0))
    assert PublishOptions(adapter="a").mode == "full"
    with pytest.raises(InvalidRequest, match="in full") as caught:
        WeightPublisher(adapter, "http://127.0.0.1:9", adapter="a", encoding="delta")
    assert caught.value.facts["field"] == "encoding"


def test_the_free_memory_is_the_least_that_the_host_and_its_cgroups_leave(tmp_path: Path) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    assert free_memory(proc, cgroups) == 0, "it is unknown"
    assert free_memory() > 0
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 64 kB\nMemAvailable: 32 kB\nHugePages_Total: 0\n")
    (proc / "self" / "cgroup").write_text("4:cpu,memory:/one\n0::/pods/one\n")
    assert free_memory(proc, cgroups) == 32 << 10
    for group, limit in ((cgroups / "memory", str(2**63 - 4096)), (cgroups / "memory" / "one", "30000")):
        group.mkdir(parents=True)
        (group / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (group / "memory.usage_in_bytes").write_text("12000\n")
        (group / "memory.stat").write_text("inactive_file 7\ntotal_inactive_file 2000\n")
    assert free_memory(proc, cgroups) == 20000
    for group, limit in ((cgroups / "pods", "20000"), (cgroups / "pods" / "one", "max")):
        group.mkdir(parents=True)
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text("12000\n")
        (group / "memory.stat").write_text("anon 9000\ninactive_file 2000\n")
    assert free_memory(proc, cgroups) == 10000
    (cgroups / "pods" / "one" / "memory.max").write_text("5000\n")
    assert free_memory(proc, cgroups) == 0, "it is over its limit"


async def test_versions_are_sent_in_full_without_memory_for_a_copy(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Limits that can't be read beforehand refuse the copy."""
    plane.spawn()

    def refused(nbytes: int) -> memoryview:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(host_copy, "host_memory", refused)
    publisher = WeightPublisher(plane.model(1), await plane.client(), transport="object_store")
    await publisher.publish_async("one")
    assert await served(plane) == {("one", model_digest(plane.model(1)), 1)}
    assert not publisher.copy_bytes
    await asyncio.to_thread(publisher.close)
    where: dict[str, Any] = {"namespace": plane.namespace, "component": plane.component, "root": root_of(plane)}
    begin = functools.partial(WeightPublisher, plane.model(1), plane.url, initial="one", **where)
    await asyncio.to_thread((await asyncio.to_thread(begin)).close)
    assert {(label, digest) for label, digest, _ in await served(plane)} == {("one", model_digest(plane.model(1)))}

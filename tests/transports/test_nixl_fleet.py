"""Fleets that pull weights by `nixl` out of the memory of a trainer in a process of its own, with deaths."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rl_plane.errors import NotAdmitted, PlaneError, UpdateAborted
from rl_plane.transports.nixl.sender import NixlSender
from tests.support.fleet_updates import all_serve, generated, states
from tests.support.healing import until_behind, until_open
from tests.support.ipc_trainer import Trainer as IpcTrainer
from tests.support.nixl_offers import (
    data_of,
    needs_nixl,
    offer,
    pull,
    puller,
    sender,
    tensors,
)
from tests.support.nixl_trainer import Trainer
from tests.support.nixl_trainers import HEAL_S, trainer, update_of
from worker.engines.fake.adapter import fake_token, make_fake_adapter, make_fake_model
from worker.receive.staging import adapter_digest, model_digest

__all__ = ["puller", "sender", "trainer"]

if TYPE_CHECKING:
    from rl_plane.client import RlClient
    from rl_plane.transports.nixl.receiver import NixlTransport
    from tests.conftest import Plane, Spawned

pytestmark = pytest.mark.timeout(400)


async def publish(
    client: RlClient, trainer: Trainer, directory: Path, version: str, **policy: Any
) -> dict[str, Any]:
    transport = await trainer.offers(directory)
    reply: dict[str, Any] = await client.run("update_weights", update_of(transport, version, **policy))
    return reply


@needs_nixl
async def test_a_stopped_and_a_killed_worker_delay_no_other_and_heal(
    plane: Plane, trainer: Callable[..., Trainer]
) -> None:
    source, client = trainer(), await plane.client()
    stopped, killed, well = plane.spawn_many(3)
    await publish(client, source, plane.model(1), "one")
    assert await source.keeps() == 1
    assert await all_serve(client, "one")
    transport = await source.offers(plane.model(2))
    stopped.stop()
    killed.kill()
    reply = await client.run("update_weights", update_of(transport, "two", on_prepare_failure="exclude"))
    assert {row["instance_id"] for row in reply["workers"] if row["status"] == "ok"} == {well.instance_id}
    assert await source.keeps() == 2
    stopped.go_on()
    again = await asyncio.to_thread(plane.spawn, instance_id=killed.instance_id)
    late = await asyncio.to_thread(plane.spawn)
    for one in (stopped, again, late):
        await until_open(plane, client, one.instance_id, "two", HEAL_S)
        expected = [fake_token(model_digest(plane.model(2)), [5, 6], position) for position in range(4)]
        assert await plane.until(lambda one=one: _said(client, one), HEAL_S) == expected
    await publish(client, source, plane.model(3), "three")
    assert await source.keeps() == 2, "memory is registered once"
    assert await all_serve(client, "three")


async def _said(client: RlClient, worker: Spawned) -> list[int] | None:
    """Returns None while the worker has no lease yet: loading torch and nixl takes a while on a busy machine."""
    try:
        return await generated(client, worker.instance_id, [5, 6], 4)
    except NotAdmitted:
        return None


def _held_at(plane: Plane, number: int, more: str = "") -> tuple[str, Path, Path, Path]:
    """Code for a worker that waits before it reads this bucket, and says when a read is under way."""
    at, go, flying = (plane.tmp / name for name in ("at", "go", "flying"))
    patch = f"""
import os, time
{more}
import rl_plane.transports.nixl.pull as receiving
read, look = receiving.Pull._read, receiving.Pull._look
def held(self, number, buffer):
    if number == {number}:
        Path({str(at)!r}).touch()
        give_up = time.monotonic() + {HEAL_S}
        while not Path({str(go)!r}).exists():
            assert time.monotonic() < give_up
            time.sleep(0.01)
    return read(self, number, buffer)
def looked(self):
    if Path({str(go)!r}).exists():
        Path({str(flying)!r}).touch()
    return look(self)
receiving.Pull._read, receiving.Pull._look = held, looked
"""
    return patch, at, go, flying


TCP = "os.environ['UCX_TLS'] = 'tcp'\n"
"""Then a read needs the source's help, as it does not in one machine's memory."""


@needs_nixl
@pytest.mark.parametrize(
    ("flight", "forks"), [("between reads", False), ("in a read", False), ("in a read", True)]
)
async def test_a_trainer_that_is_killed_leaves_the_fleet_as_it_was(
    plane: Plane, trainer: Callable[..., Trainer], flight: str, forks: bool, request: pytest.FixtureRequest
) -> None:
    """With `forks` the trainer has a child that outlives it, such as a data loader."""
    in_flight = flight == "in a read"
    patch, at, go, flying = _held_at(plane, 2, TCP if in_flight else "")
    source, client = trainer(**({"UCX_TLS": "tcp"} if in_flight else {})), await plane.client()
    worker, _ = plane.spawn(patch=patch), plane.spawn(patch=TCP.join(["import os\n", ""]) if in_flight else "")
    transport = await source.offers(plane.model(1))
    task = asyncio.create_task(client.run("update_weights", update_of(transport, "one")))
    await plane.until(at.exists, HEAL_S)
    if forks:
        child = (await source.does(do="fork"))["child"]
        request.addfinalizer(lambda: os.kill(child, signal.SIGKILL))
    if in_flight:
        source.stop()
        go.touch()
        await plane.until(flying.exists, HEAL_S)
        source.kill()
    else:
        source.kill()
        go.touch()
    with pytest.raises(UpdateAborted, match="is gone") as caught:
        await asyncio.wait_for(task, HEAL_S)
    failed = {row["instance_id"] for row in caught.value.facts["workers"] if row["status"] == "error"}
    assert worker.instance_id in failed  # the other one may have everything by then
    assert await all_serve(client, "initial")
    # The next trainer finds workers that can pull again.
    await publish(client, trainer(**({"UCX_TLS": "tcp"} if in_flight else {})), plane.model(2), "two")
    assert await all_serve(client, "two")
    assert len(await states(client)) == 2


@needs_nixl
@pytest.mark.parametrize("child", ["exits", "drops all"])
async def test_a_forked_child_that_ends_leaves_its_trainers_agent_as_it_was(
    tmp_path: Path, trainer: Callable[..., Trainer], puller: NixlTransport, child: str
) -> None:
    source = trainer(starts=True)
    for seed in range(3):
        directory = make_fake_model(tmp_path / str(seed), seed)
        transport = await source.offers(directory)
        _, digest = await asyncio.to_thread(pull, puller, transport)
        assert digest == model_digest(directory)
        await source.keeps()
        if seed == 0:
            assert (await source.does(do=f"fork a child that {child}"))["status"] == 0
    assert await source.ends() == 0


@needs_nixl
@pytest.mark.parametrize("child", ["exits", "drops all"])
async def test_a_forked_child_that_ends_leaves_its_workers_agents_as_they_were(
    trainer: Callable[..., Trainer], sender: NixlSender, puller: NixlTransport, child: str
) -> None:
    worker = trainer(starts=True)
    for seed in range(3):
        passed_on = await worker.does(do="pass on", transport=offer(sender, seed))
        pulled = await asyncio.to_thread(pull, puller, passed_on["transport"])
        assert pulled[0] == data_of(tensors(seed))
        if seed == 0:
            assert (await worker.does(do=f"fork a child that {child}"))["status"] == 0
    assert await worker.ends() == 0


@needs_nixl
async def test_a_pull_from_a_trainer_that_hangs_ends_by_its_bound(
    plane: Plane, trainer: Callable[..., Trainer]
) -> None:
    patch, at, go, _ = _held_at(
        plane, 2, TCP + "import rl_plane.transports.nixl.pull\nrl_plane.transports.nixl.pull.READ_S = 3"
    )
    source, client = trainer(UCX_TLS="tcp"), await plane.client()
    plane.spawn(patch=patch)
    transport = await source.offers(plane.model(1))
    task = asyncio.create_task(client.run("update_weights", update_of(transport, "one")))
    await plane.until(at.exists, HEAL_S)
    source.stop()
    go.touch()
    with pytest.raises(UpdateAborted, match="did not come in"):
        await asyncio.wait_for(task, HEAL_S)
    assert await all_serve(client, "initial")
    source.process.send_signal(signal.SIGCONT)
    await publish(client, source, plane.model(2), "two")
    assert await all_serve(client, "two")


@needs_nixl
async def test_an_aborted_update_ends_in_the_middle_of_a_read(
    plane: Plane, trainer: Callable[..., Trainer]
) -> None:
    bounds = "import rl_plane.transports.nixl.pull, worker.reconcile.staged_updates\n"
    # Only a cancellation ends it.
    bounds += "rl_plane.transports.nixl.pull.READ_S = worker.reconcile.staged_updates.ABORT_WAIT_S = 600\n"
    patch, at, go, flying = _held_at(plane, 2, TCP + bounds)
    source, client = trainer(UCX_TLS="tcp"), await plane.client()
    plane.spawn(patch=patch)
    await client.run("init_transport", {"backend": "nixl"})  # or it takes the time that the update has
    transport = await source.offers(plane.model(1))
    task = asyncio.create_task(client.run("update_weights", update_of(transport, "one", prepare_timeout_s=12)))
    await plane.until(at.exists, HEAL_S)
    source.stop()
    go.touch()
    await plane.until(flying.exists, HEAL_S)
    with pytest.raises(PlaneError):
        await asyncio.wait_for(task, HEAL_S)
    assert await all_serve(client, "initial")
    source.process.send_signal(signal.SIGCONT)
    await asyncio.wait_for(publish(client, source, plane.model(2), "two"), HEAL_S)
    assert await all_serve(client, "two")


@needs_nixl
async def test_a_slow_healer_heals_to_the_next_version_of_its_source(
    plane: Plane, trainer: Callable[..., Trainer]
) -> None:
    patch, at, go, _ = _held_at(plane, 2)
    source, client = trainer(), await plane.client()
    plane.spawn()
    await publish(client, source, plane.model(1), "one")
    await source.keeps()
    slow = plane.spawn(ready=False, patch=patch)
    await plane.until(at.exists, HEAL_S)
    await publish(client, source, plane.model(2), "two", on_prepare_failure="exclude", prepare_timeout_s=6)
    await source.keeps()
    await source.offers(plane.model(3))  # over what it was reading
    go.touch()
    await asyncio.to_thread(slow.wait_ready, HEAL_S)
    await until_open(plane, client, slow.instance_id, "two", HEAL_S)
    assert (await states(client))[slow.instance_id]["version"]["digest"] == model_digest(plane.model(2))


@needs_nixl
async def test_a_late_worker_without_a_trainer_waits_for_the_next_update(
    plane: Plane, trainer: Callable[..., Trainer]
) -> None:
    source, client = trainer(), await plane.client()
    plane.spawn()
    await publish(client, source, plane.model(1), "one")
    await source.keeps()
    source.kill()
    late = plane.spawn(ready=False)
    await plane.until(lambda: _listed(client, late), HEAL_S)
    assert "source_gone" in await until_behind(plane, client, late.instance_id)
    await publish(client, trainer(), plane.model(2), "two")
    await until_open(plane, client, late.instance_id, "two", HEAL_S)


async def _listed(client: RlClient, worker: Spawned) -> bool:
    return worker.instance_id in await states(client)


@needs_nixl
async def test_a_new_worker_heals_base_and_adapter_from_the_trainer(
    plane: Plane, trainer: Callable[..., Trainer]
) -> None:
    source, client = trainer(), await plane.client()
    worker = plane.spawn()
    await publish(client, source, plane.model(1), "one", staging="none")
    await source.keeps()
    adapter = make_fake_adapter(plane.tmp / "adapter", 1, plane.model(1))
    transport = await source.offers(adapter, "lora")
    body = {"target": {"kind": "lora", "op": "load", "name": "a"}, **update_of(transport, "a1")}
    reply = await client.run("update_weights", body)
    assert reply["version"]["digest"] == adapter_digest(adapter)
    await source.keeps("a")
    worker.kill()
    again = await asyncio.to_thread(plane.spawn, instance_id=worker.instance_id)
    await until_open(plane, client, again.instance_id, "one", HEAL_S)
    state = (await states(client))[again.instance_id]
    assert list(state["loras"]) == ["a"]
    again.signal(signal.SIGTERM)
    assert await asyncio.to_thread(again.process.wait, HEAL_S) == 0


# ---- real models ----


@needs_nixl
async def test_hf_takes_base_and_adapter_and_a_late_worker_heals_both(
    plane: Plane, trainer: Callable[..., Trainer]
) -> None:
    from tests.support.frontend_process import frontend
    from tests.support.hf_fleet import Witnesses, proven

    witnesses, source, client = Witnesses(plane), trainer(), await plane.client()
    ids = await asyncio.to_thread(witnesses.spawn, 1)
    async with frontend(plane, admission_wait_s=HEAL_S) as http:
        transport = await source.offers(witnesses.base(2), bucket_bytes=1 << 16)
        await client.run("update_weights", update_of(transport, "two"))
        await source.keeps()
        await proven(http, ids, 2)
        transport = await source.offers(witnesses.adapter(3), "lora")
        target = {"kind": "lora", "op": "load", "name": "a"}
        await client.run("update_weights", {"target": target, **update_of(transport, "a3")})
        await source.keeps("a")
        await proven(http, ids, 2, a=3)
        ids += await asyncio.to_thread(witnesses.spawn, 1)
        await plane.until(lambda: all_serve(client, "two"), HEAL_S)
        await proven(http, ids, 2, a=3)


@needs_nixl
async def test_without_its_trainer_a_worker_heals_from_another(
    plane: Plane, trainer: Callable[..., Trainer]
) -> None:
    from tests.support.frontend_process import frontend
    from tests.support.hf_fleet import Witnesses, proven

    witnesses, source, client = Witnesses(plane), trainer(), await plane.client()
    ids = await asyncio.to_thread(witnesses.spawn, 2)

    async def heals(number: int, label: str, seed: int) -> None:
        """The worker `ids[number]` is killed, and starts again with its old model."""
        next(one for one in reversed(plane.spawned) if one.instance_id == ids[number]).kill()
        await asyncio.to_thread(witnesses.spawn, 1, instance_id=ids[number])
        await plane.until(lambda: all_serve(client, label), HEAL_S)
        digest = (await states(client))[ids[number]]["version"]["digest"]
        assert digest == model_digest(witnesses.base(seed))
        await proven(http, [ids[number]], seed)

    async with frontend(plane, admission_wait_s=HEAL_S) as http:
        transport = await source.offers(witnesses.base(2), bucket_bytes=1 << 16)
        await client.run("update_weights", update_of(transport, "two", keep_staged=True))
        await source.keeps()
        source.kill()
        await heals(0, "two", 2)
        # What can't be fetched again by the transport that brought it, too.
        pushing = IpcTrainer()
        try:
            pushing.publish(witnesses.base(3), 2)
            body = update_of((await pushing.says("transport"))["transport"], "three", keep_staged=True)
            await client.run("update_weights", body)
        finally:
            pushing.close()
        await heals(1, "three", 3)

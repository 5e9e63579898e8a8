"""A worker is admitted only with the committed weights, and heals by itself."""

from __future__ import annotations

import asyncio
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack
import pytest

from rl_plane.bus.token_stream import CREDIT_INTERVAL_S, StreamReceiver
from rl_plane.errors import InvalidRequest, PlaneError, WorkerLost
from rl_plane.protocol.subjects import ADMISSION_PREFIX, DISABLED, PAUSE
from rl_plane.protocol.versions import WeightVersion
from tests.support.faults import Stream, spawn_faulty
from tests.support.fleet_updates import generated
from tests.support.healing import checksum_of, state_of, until_behind, until_open
from tests.support.ipc_trainer import Trainer
from tests.support.stream_messages import messages_of
from worker.engines.fake.adapter import make_fake_model
from worker.exit_codes import MODEL_CHANGED
from worker.receive.staging import model_digest

if TYPE_CHECKING:
    from rl_plane.client import RlClient
    from tests.conftest import Plane, Spawned

pytestmark = [pytest.mark.slow, pytest.mark.parallel]


def update_of(directory: Path, version: str, **policy: Any) -> dict[str, Any]:
    return {
        "transport": {"backend": "filesystem", "path": str(directory)},
        "version": version,
        **({"policy": policy} if policy else {}),
    }


async def test_a_joiner_takes_the_committed_version_before_it_is_admitted(plane: Plane) -> None:
    fleet, first = await plane.fleet(), plane.spawn()
    new = plane.model(1)
    await fleet.run("update_weights", update_of(new, "step_1"))
    joiner = plane.spawn(stage_delay_s=0.5, ready=False)
    client = fleet.client
    seen: list[tuple[bool, str | None]] = []

    async def watched() -> bool:
        view = await client.view()
        if view.member(joiner.instance_id) is None:
            return False
        state = await state_of(client, joiner.instance_id)
        seen.append((state["admission"]["open"], state["applied_weight_version"]))
        return bool(state["admission"]["open"])

    await plane.until(watched, 40)
    assert all(version == "step_1" for is_open, version in seen if is_open)
    assert await checksum_of(client, joiner.instance_id) == await checksum_of(client, first.instance_id)


async def test_a_worker_that_heard_of_the_record_before_it_asked_serves_as_soon_as_it_is_ready(
    plane: Plane,
) -> None:
    """Two workers start on an empty store at once: one fixes sequence 0, and the other hears of it."""
    wait = f"""
import asyncio
import worker.reconcile.record_watch as record_watch
from worker.runtime.registration import Registration
record_watch.CONFIRM_S = 60
registered = Registration.start
async def start(self):
    await registered(self)
    Path({str(plane.tmp)!r}, "listed").touch()
    while not Path({str(plane.tmp)!r}, "go").exists():
        await asyncio.sleep(0.02)
Registration.start = start
"""
    late = plane.spawn(patch=wait, ready=False)
    await plane.until(lambda: (plane.tmp / "listed").exists(), 30)
    plane.spawn()
    (plane.tmp / "go").touch()
    late.wait_ready()
    client = await plane.client()
    assert len(await generated(client, late.instance_id, [5, 6], 3)) == 3


async def test_a_joiner_with_another_model_is_listed_and_says_why_it_is_closed(plane: Plane) -> None:
    plane.spawn()
    client = await plane.client()
    other = plane.spawn(model=plane.model(7))
    reasons = await until_behind(plane, client, other.instance_id)
    assert model_digest(plane.model(7)) in reasons
    assert model_digest(plane.model(0)) in reasons
    state = await state_of(client, other.instance_id)
    assert not state["ready"]
    assert state["version"] is None


CHANGED = """
import os
import worker.engines.fake.adapter as fake
model, new = Path({model!r}), Path({new!r})
really = fake.FakeEngine.start
async def start(self):
    info = await really(self)
    {change}
    return info
fake.FakeEngine.start = start
"""
CHANGES = {
    "a link that leads elsewhere": "os.symlink(new, {next!r}); os.replace({next!r}, model)",
    "another file": "fake.make_fake_model(model, 1)",
    "other bytes": "(model / 'model.safetensors').write_bytes((new / 'model.safetensors').read_bytes())",
}


@pytest.mark.parametrize("how", CHANGES)
async def test_a_worker_whose_model_changed_while_it_started_is_not_taken_for_what_lies_there_now(
    plane: Plane, how: str
) -> None:
    """It holds what lay there before, whatever its digest says: that is of what lies there now."""
    plane.spawn()
    client = await plane.client()
    new = plane.model(1)
    await client.run("update_weights", update_of(new, "step_1"))
    latest = plane.tmp / "latest"
    latest.symlink_to(make_fake_model(plane.tmp / "own", 0))
    change = CHANGES[how].format(next=str(plane.tmp / "next"))
    patch = CHANGED.format(model=str(latest), new=str(new), change=change)
    late = plane.spawn(model=latest, patch=patch, ready=False)
    await plane.until(lambda: late.process.poll() is not None, 30)
    assert late.process.returncode == MODEL_CHANGED
    assert "changed while the engine loaded them" in late.log.read_text()
    assert (await client.view()).member(late.instance_id) is None


TIES = """
import dataclasses, worker.engines.fake.adapter as fake
really = fake.FakeEngine.start
async def start(self):
    info = await really(self)
    head, embedding, *_ = self.weight_spec()
    return dataclasses.replace(info, tied={head: embedding})
fake.FakeEngine.start = start
"""


async def test_a_worker_does_not_serve_a_directory_whose_tie_is_broken(plane: Plane) -> None:
    """Its engine has one tensor for the two, and its digest would be of both."""
    one = plane.spawn(patch=TIES, ready=False)
    await plane.until(lambda: one.process.poll() is not None, 30)
    told = one.log.read_text()
    assert "InvalidWeights: this engine's model ties" in told, told
    assert (await (await plane.client()).view()).member(one.instance_id) is None


async def test_reset_tensors_at_sequence_0_heals_to_the_models_own_bytes(plane: Plane) -> None:
    one = plane.spawn()
    client = await plane.client()
    before = await checksum_of(client, one.instance_id)
    await client.call(one.instance_id, "check_weights", {"action": "reset_tensors"})

    async def admitted() -> bool:
        return bool((await state_of(client, one.instance_id))["admission"]["open"])

    await plane.until(admitted)
    assert await checksum_of(client, one.instance_id) == before, "noise was admitted"


async def test_reset_tensors_after_an_update_heals_from_the_source(plane: Plane) -> None:
    one = plane.spawn()
    fleet = await plane.fleet()
    client = fleet.client
    await fleet.run("update_weights", update_of(plane.model(1), "step_1"))
    before = await checksum_of(client, one.instance_id)
    await client.call(one.instance_id, "check_weights", {"action": "reset_tensors"})
    await until_open(plane, client, one.instance_id, "step_1")
    assert await checksum_of(client, one.instance_id) == before


async def test_a_joiner_whose_source_is_gone_heals_when_it_is_back(plane: Plane) -> None:
    plane.spawn()
    fleet = await plane.fleet()
    new = plane.model(1)
    await fleet.run("update_weights", update_of(new, "step_1"))
    hidden = new.with_name("hidden")
    shutil.move(new, hidden)
    joiner = plane.spawn()
    assert str(new) in await until_behind(plane, fleet.client, joiner.instance_id)
    shutil.move(hidden, new)
    await until_open(plane, fleet.client, joiner.instance_id, "step_1")


async def test_releasing_memory_closes_and_resuming_heals(plane: Plane) -> None:
    one = plane.spawn()
    fleet = await plane.fleet()
    client = fleet.client
    await fleet.run("update_weights", update_of(plane.model(1), "step_1"))
    await fleet.run("release_memory")
    state = await state_of(client, one.instance_id)
    assert not state["admission"]["open"]
    assert any(reason.startswith("memory") for reason in state["admission"]["reasons"])
    await fleet.run("resume_memory", {"tags": ["kv_cache"]})
    assert not (await state_of(client, one.instance_id))["admission"]["open"]
    await fleet.run("resume_memory", {"tags": ["weights"]})
    await until_open(plane, client, one.instance_id, "step_1")


async def test_a_pushed_version_whose_swap_failed_once_is_swapped_in_from_the_workers_own_copy(
    plane: Plane,
) -> None:
    only = await asyncio.to_thread(spawn_faulty, plane, "fail_swap")
    fleet, pushing = await plane.fleet(), Trainer()
    client = fleet.client

    async def failed() -> bool:
        return "fail_swap" in str((await state_of(client, only.instance_id))["admission"]["reasons"])

    try:
        pushing.publish(plane.model(1), 1)
        transport = (await pushing.says("transport"))["transport"]
        body = {"transport": transport, "version": "pushed", "policy": {"keep_staged": True}}
        update = asyncio.create_task(fleet.run("update_weights", body))
        await plane.until(failed)
    finally:
        pushing.close()
    only.mend("fail_swap")
    await until_open(plane, client, only.instance_id, "pushed")
    assert (await update)["version"]["label"] == "pushed"


async def test_a_release_that_the_engine_refuses_closes_nothing(plane: Plane) -> None:
    one = plane.spawn(token_delay_s=0.05)
    client = await plane.client()
    receiver = StreamReceiver(client.bus)
    await receiver.start()
    body = {"request": {"prompt_token_ids": [5], "max_tokens": 1000}}
    stream = await receiver.open(client.subjects().generate(one.instance_id), "r1", body)
    messages = messages_of(stream)
    await anext(messages)  # accepted
    await anext(messages)  # it is running
    with pytest.raises(InvalidRequest):
        await client.call(one.instance_id, "release_memory", {"tags": ["weights"]})
    state = await state_of(client, one.instance_id)
    await receiver.stop()
    assert state["admission"] == {"open": True, "reasons": []}


async def test_a_stream_that_the_worker_gave_up_ends_with_an_error(plane: Plane) -> None:
    """The worker's frontend stood still for so long that the worker removed it. When the worker continues, no frontend
    sends."""
    one = plane.spawn(token_delay_s=0.05)
    client = await plane.client()
    receiver = StreamReceiver(client.bus)
    await receiver.start()
    subject = client.subjects().generate(one.instance_id)
    body = {"request": {"prompt_token_ids": [5], "max_tokens": 1000}}
    messages = messages_of(await receiver.open(subject, "r1", body))
    await anext(messages)  # accepted
    await anext(messages)  # it is running
    await client.bus.nc.publish(subject, msgpack.packb({"kind": "abort", "id": "r1"}))

    async def read_on() -> None:
        async with asyncio.timeout(10 * CREDIT_INTERVAL_S):
            async for _ in messages:
                pass

    with pytest.raises(WorkerLost):
        await read_on()
    await receiver.stop()


async def test_a_joiner_that_heals_while_the_fleet_updates_ends_at_the_newest(plane: Plane) -> None:
    first = plane.spawn()
    fleet = await plane.fleet()
    await fleet.run("update_weights", update_of(plane.model(1), "step_1"))
    joiner = plane.spawn(stage_delay_s=1, ready=False)
    await fleet.client.wait_for(2, 20)
    reply = await fleet.run("update_weights", update_of(plane.model(2), "step_2"))
    assert reply["version"]["label"] == "step_2"
    for one in (first, joiner):
        await until_open(plane, fleet.client, one.instance_id, "step_2", 30)
    versions = {
        WeightVersion.from_wire(row.body["version"]) for row in (await fleet.client.call_all("state")).rows
    }
    assert len(versions) == 1


async def test_a_joiner_after_keep_pause_runs_when_the_fleet_was_resumed(plane: Plane) -> None:
    """The committed version was decided with keep_pause; the pause itself is over."""
    plane.spawn()
    fleet = await plane.fleet()
    await fleet.client.wait_for(1)
    body = {
        "transport": {"backend": "filesystem", "path": str(plane.model(1))},
        "policy": {"keep_pause": True},
    }
    await fleet.run("update_weights", body)
    assert (await fleet.run("state"))["pause_state"] == "paused"
    await fleet.run("resume")
    plane.spawn()
    await fleet.client.wait_for(2)
    reply = await fleet.run("ready", {"min_workers": 2, "wait_s": 20})
    assert [row["pause_state"] for row in reply["workers"]] == ["running", "running"]


async def test_a_worker_that_heals_as_it_starts_obeys_sigterm(plane: Plane) -> None:
    plane.spawn()
    fleet = await plane.fleet()
    await fleet.run("update_weights", update_of(plane.model(1), "step_1"))
    slow = plane.spawn(stage_delay_s=60, ready=False)
    await fleet.client.wait_for(2, 20)
    slow.signal(signal.SIGTERM)
    assert await asyncio.to_thread(slow.process.wait, 30) == 0


async def test_a_worker_that_was_away_does_as_the_fleet_does_when_it_is_back(plane: Plane) -> None:
    """A pause that it missed holds for it too, and a resume that it missed ends its own."""
    _, two = plane.spawn_many(2)
    fleet = await plane.fleet()
    await fleet.client.wait_for(2)
    view = await fleet.client.view()
    for op, pause_state in (("pause", "paused"), ("resume", "running")):
        two.stop()
        assert await view.wait_until(lambda now: len(now) == 1, 40)
        await fleet.run(op)
        two.go_on()
        await fleet.client.wait_for(2, 20)

        async def all_do(wanted: str = pause_state) -> bool:
            rows = (await fleet.client.call_all("state")).rows
            return [row.body.get("pause_state") for row in rows] == [wanted, wanted]

        await plane.until(all_do, 30)


async def joined_again(plane: Plane, client: RlClient, worker: Spawned) -> None:
    """Stops a worker until the fleet has dropped it, and returns when it has read again what the fleet is asked to
    do."""
    view, state = await client.view(), client.subjects().state
    worker.stop()
    assert await view.wait_until(lambda now: len(now) == 1, 40)
    disabled = ADMISSION_PREFIX + worker.instance_id
    await client.bus.put(state, disabled, DISABLED)  # it reads this first
    worker.go_on()
    await client.wait_for(2, 20)

    async def has_read() -> bool:
        return "disabled" in (await state_of(client, worker.instance_id))["admission"]["reasons"]

    await plane.until(has_read, 30)
    await client.run("enable", {"workers": [worker.instance_id]})
    await client.run("flush_cache", {"workers": [worker.instance_id]})  # waits until it has also done what it read


@pytest.mark.parametrize("closes", ["disable", "drain"])
async def test_a_worker_that_missed_enable_opens_when_it_is_back(plane: Plane, closes: str) -> None:
    client = await plane.client()
    _, two = plane.spawn_many(2)
    await client.wait_for(2)
    workers, view = {"workers": [two.instance_id]}, await client.view()
    if closes == "disable":
        await client.run("disable", workers)
    else:
        await client.call(two.instance_id, "drain")
    two.stop()
    with pytest.raises(PlaneError):
        await client.run("enable", workers)
    assert await view.wait_until(lambda now: len(now) == 1, 40)
    two.go_on()
    await client.wait_for(2, 20)

    async def is_open() -> bool:
        return bool((await state_of(client, two.instance_id))["admission"]["open"])

    await plane.until(is_open, 30)


async def pauses(client: RlClient, *ids: str) -> list[str]:
    return [(await state_of(client, one))["pause_state"] for one in ids]


async def test_a_worker_that_was_away_keeps_what_a_newer_call_has_asked_of_it_by_name(plane: Plane) -> None:
    client = await plane.client()
    one, two = plane.spawn_many(2)
    await client.wait_for(2)
    ids = one.instance_id, two.instance_id
    await client.run("pause")
    await client.run("resume")
    await client.run("pause", {"workers": [two.instance_id]})
    await joined_again(plane, client, two)
    assert await pauses(client, *ids) == ["running", "paused"]
    await client.run("pause")
    await client.run("resume", {"workers": [two.instance_id]})
    await joined_again(plane, client, two)
    assert await pauses(client, *ids) == ["paused", "running"]


async def test_a_paused_worker_does_not_resume_when_the_store_has_lost_the_pause(plane: Plane) -> None:
    client = await plane.client()
    _, two = plane.spawn_many(2)
    await client.wait_for(2)
    await client.run("pause")
    entry = await client.bus.get(client.subjects().state, PAUSE)
    assert entry is not None
    await client.bus.purge(client.subjects().state, PAUSE, entry.sequence)
    await joined_again(plane, client, two)
    assert await pauses(client, two.instance_id) == ["paused"]


NO_PAUSE = """
import asyncio, worker.engines.fake.adapter as fake, worker.reconcile.follower as follower
follower.FREEZE_S = 0.5
really, calls = fake.FakeEngine.pause, []
async def pause(self, *arguments):
    if not Path({folder!r}, "go").exists():
        calls.append(arguments)
        Path({folder!r}, f"call{{len(calls)}}").touch()
        await asyncio.Event().wait()
    return await really(self, *arguments)
fake.FakeEngine.pause = pause
"""


async def test_an_engine_that_does_not_pause_loses_nothing_until_it_does(plane: Plane) -> None:
    """Its own try comes behind the coordinator's, with what is staged and the requests that run."""
    patch = NO_PAUSE.format(folder=str(plane.tmp))
    slow, _ = plane.spawn(patch=patch, token_delay_s=0.01), plane.spawn()
    client = await plane.client()
    await client.wait_for(2)
    stream = Stream(client, slow.instance_id, [5, 6], 4000)
    await stream.until(tokens=1)
    reply = await client.run("update_weights", update_of(plane.model(1), "step_1", commit_timeout_s=3))
    assert reply["excluded"] == [slow.instance_id]
    shutil.rmtree(plane.model(1))
    assert "is not paused" in await until_behind(plane, client, slow.instance_id)
    await plane.until((plane.tmp / "call2").exists)
    assert (await state_of(client, slow.instance_id))["applied_weight_version"] == "initial"
    (plane.tmp / "go").touch()  # for the third one
    await until_open(plane, client, slow.instance_id, "step_1", 30)
    await stream.until(spans=2)
    assert [span["version"] for span in stream.spans] == ["initial", "step_1"]
    stream.stop()


SLOW_THAW = """
import asyncio, worker.engines.fake.adapter as fake
really = fake.FakeEngine.resume
async def resume(self):
    while not Path({folder!r}, "go").exists():
        Path({folder!r}, "resumes").touch()
        await asyncio.sleep(0.01)
    await really(self)
fake.FakeEngine.resume = resume
"""


async def test_a_deadline_in_the_middle_of_the_thaw_leaves_no_frozen_engine(plane: Plane) -> None:
    """The worker is open by then, so no later call would thaw the engine."""
    slow = plane.spawn(patch=SLOW_THAW.format(folder=str(plane.tmp)))
    client = await plane.client()
    await client.wait_for(1)
    calling = asyncio.create_task(
        client.run("update_weights", update_of(plane.model(1), "step_1", commit_timeout_s=0.5))
    )
    await plane.until((plane.tmp / "resumes").exists)
    await asyncio.wait([calling])
    (plane.tmp / "go").touch()
    await until_open(plane, client, slow.instance_id, "step_1", 30)
    assert await generated(client, slow.instance_id, [5, 6], 3)


async def test_memory_that_was_taken_back_to_a_frozen_engine_is_asked_for_again(plane: Plane) -> None:
    slow = plane.spawn(patch=SLOW_THAW.format(folder=str(plane.tmp)))
    client = await plane.client()
    await client.wait_for(1)
    await client.run("release_memory", {"tags": ["kv_cache"]})
    asking = asyncio.create_task(
        client.call(slow.instance_id, "resume_memory", {"tags": ["kv_cache"]}, timeout_s=5.0)
    )
    await plane.until((plane.tmp / "resumes").exists)
    with pytest.raises(PlaneError):
        await asking
    (plane.tmp / "go").touch()
    await client.call(slow.instance_id, "resume_memory", {"tags": ["kv_cache"]})
    assert await generated(client, slow.instance_id, [5, 6], 3)

"""Updates of a real fleet: each is committed on all workers or leaves no trace, even if processes die."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from nats.aio.msg import Msg

from rl_plane.bus.lock import LockTimings
from rl_plane.client import RlClient
from rl_plane.commit.steps import SESSION_IDLE_S
from rl_plane.errors import (
    Conflict,
    EngineFailed,
    InvalidRequest,
    InvalidWeights,
    Locked,
    MembershipChanged,
    PlaneError,
    StaleFence,
    UpdateAborted,
)
from rl_plane.fleet.fleet import Fleet
from rl_plane.membership.worker_reply import WorkerReply
from rl_plane.protocol.subjects import RECORD
from rl_plane.protocol.versions import TensorSpec
from rl_plane.weights.safetensors_file import write_safetensors
from tests.support.faults import hold_back
from tests.support.fleet_updates import (
    all_serve,
    coordinator_that_dies,
    generated,
    is_locked,
    states,
    update_of,
    while_preparing,
)
from worker.engines.fake.adapter import fake_token
from worker.receive.staging import model_digest

if TYPE_CHECKING:
    from tests.conftest import Plane


async def test_an_update_reaches_every_worker_and_versions_rise(plane: Plane) -> None:
    fleet = await plane.fleet()
    ids = plane.spawn_copies(3)
    for step in (1, 2, 3):
        directory = plane.model(step)
        reply = await fleet.run("update_weights", update_of(directory, f"step_{step}"))
        assert reply["version"]["sequence"] == step
        assert reply["version"]["label"] == f"step_{step}"
        assert reply["version"]["digest"] == model_digest(directory)
        assert [row["instance_id"] for row in reply["workers"]] == ids
        assert all(row["version"] == reply["version"] and row["cache_flushed"] for row in reply["workers"])
        assert reply["excluded"] == []
        assert await all_serve(fleet.client, f"step_{step}")
    tokens = await generated(fleet.client, ids[0], [5, 6], 4)
    assert tokens == [fake_token(model_digest(plane.model(3)), [5, 6], position) for position in range(4)]


async def test_a_version_without_a_label_is_called_by_its_sequence(plane: Plane) -> None:
    fleet = await plane.fleet()
    plane.spawn()
    reply = await fleet.run("update_weights", update_of(plane.model(1)))
    assert reply["version"]["label"] == "1"


async def test_a_roll_back_is_an_update_like_any_other(plane: Plane) -> None:
    fleet = await plane.fleet()
    plane.spawn()
    await fleet.run("update_weights", update_of(plane.model(1), "one"))
    reply = await fleet.run("update_weights", update_of(plane.model(0), "back"))
    assert (reply["version"]["sequence"], reply["version"]["digest"]) == (2, model_digest(plane.model(0)))
    reply = await fleet.run("update_weights", update_of(plane.model(0), "same bytes"))
    assert reply["version"]["sequence"] == 3
    assert reply["excluded"] == []
    assert await all_serve(fleet.client, "same bytes")


async def test_asked_again_under_its_id_the_first_answer_stands(plane: Plane) -> None:
    fleet = await plane.fleet()
    plane.spawn()
    first = await fleet.run("update_weights", update_of(plane.model(1), "one"), "the-id")
    again = await fleet.run("update_weights", update_of(plane.model(1), "one"), "the-id")
    assert again["version"] == first["version"]


def _missing(directory: Path) -> dict[str, tuple[TensorSpec, bytes]]:
    return {name: _tensor() for name in _names()[:-1]}


def _extra(directory: Path) -> dict[str, tuple[TensorSpec, bytes]]:
    return {name: _tensor() for name in [*_names(), "one.more"]}


def _shape(directory: Path) -> dict[str, tuple[TensorSpec, bytes]]:
    return {name: (TensorSpec("F32", (2, 128)), bytes(1024)) for name in _names()}


def _dtype(directory: Path) -> dict[str, tuple[TensorSpec, bytes]]:
    return {name: (TensorSpec("I32", (256,)), bytes(1024)) for name in _names()}


def _names() -> list[str]:
    return [f"layers.{number}.weight" for number in range(4)]


def _tensor() -> tuple[TensorSpec, bytes]:
    return TensorSpec("F32", (256,)), bytes(1024)


async def refused(plane: Plane, body: dict[str, Any], kind: type[PlaneError]) -> PlaneError:
    """The update fails so, and nothing has changed: the worker serves on, nothing is staged."""
    fleet = await plane.fleet()
    ids = plane.spawn_copies(2)
    before = await states(fleet.client)
    with pytest.raises(kind) as caught:
        await fleet.run("update_weights", body)
    assert caught.value.http_status == kind.http_status
    after = await states(fleet.client)
    assert {key: (state["version"], state["admission"], state["staged"]) for key, state in after.items()} == {
        key: (state["version"], {"open": True, "reasons": []}, None) for key, state in before.items()
    }
    digest = model_digest(plane.model(0))
    tokens = await generated(fleet.client, ids[0], [9], 2)
    assert tokens == [fake_token(digest, [9], position) for position in range(2)]
    return caught.value


@pytest.mark.parametrize("make", [_missing, _extra, _shape, _dtype])
async def test_weights_that_do_not_fit_change_nothing(
    plane: Plane, make: Callable[[Path], dict[str, tuple[TensorSpec, bytes]]]
) -> None:
    directory = plane.tmp / "weights" / "bad"
    directory.mkdir(parents=True)
    write_safetensors(directory / "model.safetensors", make(directory))
    error = await refused(plane, update_of(directory), InvalidWeights)
    assert len(error.facts["workers"]) == 2


async def test_a_truncated_file_changes_nothing(plane: Plane) -> None:
    file = plane.model(1) / "model.safetensors"
    os.truncate(file, file.stat().st_size - 100)
    await refused(plane, update_of(file.parent), InvalidWeights)


async def test_a_path_outside_the_roots_changes_nothing(plane: Plane) -> None:
    error = await refused(plane, update_of(Path("/etc")), InvalidRequest)
    assert error.facts["field"] == "transport.path"
    assert error.facts["fix"]


async def test_another_digest_than_the_stated_one_changes_nothing(plane: Plane) -> None:
    body = {**update_of(plane.model(1)), "digest": "blake3:" + "0" * 64}
    await refused(plane, body, InvalidWeights)


async def test_an_engine_that_cannot_stage_aborts_on_all(plane: Plane) -> None:
    fleet = await plane.fleet()
    plane.spawn_copies(2)
    plane.spawn(fail_stage="true")
    with pytest.raises(UpdateAborted) as caught:
        await fleet.run("update_weights", update_of(plane.model(1), "one"))
    assert caught.value.http_status == 409
    assert len(caught.value.facts["workers"]) == 3
    assert all(state["staged"] is None for state in (await states(fleet.client)).values())
    assert await all_serve(fleet.client, "initial")


async def test_an_engine_that_cannot_stage_can_be_excluded(plane: Plane) -> None:
    fleet = await plane.fleet()
    plane.spawn_copies(2)
    broken = plane.spawn(fail_stage="true")
    body = update_of(plane.model(1), "one", on_prepare_failure="exclude", min_ready=2)
    reply = await fleet.run("update_weights", body)
    assert reply["excluded"] == [broken.instance_id]
    state = (await states(fleet.client))[broken.instance_id]
    assert not state["admission"]["open"]
    body = update_of(plane.model(2), "two", on_prepare_failure="exclude", min_ready=3)
    with pytest.raises(UpdateAborted):
        await fleet.run("update_weights", body)
    reply = await fleet.run("update_weights", update_of(plane.model(2), "two"))
    assert reply["version"]["sequence"] == 2, "an excluded worker failed a later update"


async def test_a_swap_that_fails_after_the_decision_excludes_that_worker(plane: Plane) -> None:
    fleet = await plane.fleet()
    plane.spawn_copies(2)
    broken = plane.spawn(fail_swap="true")
    reply = await fleet.run("update_weights", update_of(plane.model(1), "one"))
    assert reply["version"]["label"] == "one"
    assert reply["excluded"] == [broken.instance_id]
    rows = {row["instance_id"]: row for row in reply["workers"]}
    assert rows[broken.instance_id]["error"]["code"] == EngineFailed.code
    assert not (await states(fleet.client))[broken.instance_id]["admission"]["open"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"transport": {"backend": "filesystem", "path": "/x"}, "speed": 9}, "speed"),
        ({"transport": {"backend": "filesystem", "path": "/x"}, "policy": {"mode": "keep"}}, "policy.mode"),
        (
            {"transport": {"backend": "filesystem", "path": "/x"}, "policy": {"pause_mode": "no"}},
            "policy.pause_mode",
        ),
        (
            {
                "transport": {"backend": "filesystem", "path": "/x"},
                "policy": {"pause_mode": "in_place", "kv": "recompute"},
            },
            "policy.kv",
        ),
        (
            {
                "transport": {"backend": "filesystem", "path": "/x"},
                "policy": {"kv": "keep", "staging": "none"},
            },
            "policy.kv",
        ),
        ({"transport": {"backend": "filesystem", "path": "/x"}, "wait_s": -1}, "wait_s"),
        ({"transport": {"backend": "filesystem", "path": "/x"}, "wait_s": float("nan")}, "wait_s"),
        ({"transport": {"backend": "filesystem", "path": "/x"}, "encoding": "half"}, "encoding"),
        ({"transport": {"backend": "filesystem", "path": "/x"}, "digest": "md5:1"}, "digest"),
        ({"transport": {"backend": "filesystem", "path": "/x"}, "workers": ["0" * 16]}, "workers"),
        ({"transport": {"path": "/x"}}, "transport.backend"),
        ({}, "transport"),
        ({"transport": {"backend": "pigeon"}}, "transport.backend"),
        ({"transport": {"backend": "filesystem", "path": "/x", "speed": 1}}, "transport.speed"),
        ({"transport": {"backend": "filesystem"}}, "transport.path"),
    ],
)
async def test_a_wrong_field_is_named(plane: Plane, body: dict[str, Any], field: str) -> None:
    fleet = await plane.fleet()
    plane.spawn()
    with pytest.raises(InvalidRequest) as caught:
        await fleet.run("update_weights", body)
    assert caught.value.facts["field"] == field
    assert caught.value.facts["fix"]
    assert await all_serve(fleet.client, "initial")


async def test_two_updates_at_once_do_not_mix(plane: Plane) -> None:
    one, two = await plane.fleet(), await plane.fleet()
    plane.spawn_copies(2)
    results = await asyncio.gather(
        one.run("update_weights", update_of(plane.model(1), "one")),
        two.run("update_weights", update_of(plane.model(2), "two")),
        return_exceptions=True,
    )
    done = [result for result in results if isinstance(result, dict)]
    assert all(isinstance(result, dict | Locked) for result in results)
    assert sorted(result["version"]["sequence"] for result in done) == list(range(1, len(done) + 1))
    newest = max(done, key=lambda result: int(result["version"]["sequence"]))["version"]
    assert await all_serve(one.client, newest["label"])


@pytest.mark.slow
@pytest.mark.parallel
async def test_an_update_under_a_longer_one_is_locked_with_a_retry_time(plane: Plane) -> None:
    one, two = await plane.fleet(), await plane.fleet()
    plane.spawn(stage_delay_s=8)
    slow = asyncio.create_task(one.run("update_weights", update_of(plane.model(1), "one")))
    view = await one.client.view()
    await plane.until(lambda: is_locked(one.client))
    with pytest.raises(Locked) as caught:
        await two.run("update_weights", update_of(plane.model(2), "two"))
    assert caught.value.facts["retry_after_s"] > 0
    assert caught.value.http_status == 503
    assert (await slow)["version"]["label"] == "one"
    assert len(view.snapshot()) == 1


# ---- two calls ----


async def test_one_client_prepares_and_another_completes(plane: Plane) -> None:
    one, two = await plane.fleet(), await plane.fleet()
    plane.spawn_copies(2)
    prepared = await one.run("prepare_weights_update", update_of(plane.model(1), "one"))
    assert prepared["digest"] == model_digest(plane.model(1))
    assert await all_serve(one.client, "initial")
    assert all(state["staged"]["label"] == "one" for state in (await states(one.client)).values())
    with pytest.raises(Locked):
        await two.run("update_weights", update_of(plane.model(2), "two"))
    await asyncio.sleep(1.2)  # two ticks of the workers: none may drop what a session keeps
    done = await two.run("complete_weights_update", {"update_id": prepared["update_id"]})
    assert done["version"]["label"] == "one"
    assert done["excluded"] == []
    assert await all_serve(two.client, "one")
    with pytest.raises(UpdateAborted):
        await two.run("complete_weights_update")


async def test_prepared_twice_under_one_id_the_first_stands(plane: Plane) -> None:
    one, two = await plane.fleet(), await plane.fleet()
    plane.spawn_copies(2)
    body = update_of(plane.model(1), "one")
    first = await one.run("prepare_weights_update", body, "the-id")
    again = await two.run("prepare_weights_update", body, "the-id")
    assert (
        (again["update_id"], again["digest"])
        == (first["update_id"], first["digest"])
        == ("the-id", first["digest"])
    )
    await two.run("complete_weights_update", {"update_id": "the-id"})
    assert await all_serve(two.client, "one")


async def test_a_part_for_an_update_that_takes_no_parts_leaves_it_prepared(plane: Plane) -> None:
    fleet = await plane.fleet()
    plane.spawn()
    prepared = await fleet.run("prepare_weights_update", update_of(plane.model(1), "one"))
    part = {"names": ["w"], "dtypes": ["bfloat16"], "shapes": [[2, 3]]}
    with pytest.raises(InvalidRequest):
        await fleet.run("receive_weights_part", {"update_id": prepared["update_id"], **part})
    assert (await fleet.run("updates", {}))["updates"][0]["outcome"] == "prepared"
    assert (await fleet.run("state", {}))["update"] is not None
    await fleet.run("complete_weights_update", {"update_id": prepared["update_id"]})
    assert (await fleet.run("updates", {}))["updates"][0]["outcome"] == "committed"


async def test_one_client_prepares_and_another_aborts(plane: Plane) -> None:
    one, two = await plane.fleet(), await plane.fleet()
    plane.spawn_copies(2)
    prepared = await one.run("prepare_weights_update", update_of(plane.model(1), "one"))
    with pytest.raises(UpdateAborted):
        await two.run("abort_weights_update", {"update_id": "another"})
    await two.run("abort_weights_update", {"update_id": prepared["update_id"]})
    assert all(state["staged"] is None for state in (await states(one.client)).values())
    with pytest.raises(UpdateAborted):
        await one.run("complete_weights_update", {"update_id": prepared["update_id"]})
    assert (await one.run("update_weights", update_of(plane.model(2), "two")))["version"]["sequence"] == 1


async def test_a_silent_session_expires(plane: Plane) -> None:
    assert SESSION_IDLE_S == 120
    fleet = Fleet(await plane.client(), session_idle_s=1)
    plane.spawn()
    prepared = await fleet.run("prepare_weights_update", update_of(plane.model(1), "one"))

    async def dropped() -> bool:
        return all(state["staged"] is None for state in (await states(fleet.client)).values())

    await plane.until(dropped)
    with pytest.raises(UpdateAborted):
        await fleet.run("complete_weights_update", {"update_id": prepared["update_id"]})
    assert (await fleet.run("update_weights", update_of(plane.model(2), "two")))["version"]["sequence"] == 1


async def test_a_session_that_lost_a_worker_is_not_completed(plane: Plane) -> None:
    fleet = await plane.fleet()
    doomed, other = plane.spawn_many(2)
    prepared = await fleet.run("prepare_weights_update", update_of(plane.model(1), "one"))
    doomed.kill()
    view = await fleet.client.view()
    await plane.until(lambda: view.member(doomed.instance_id) is None)
    with pytest.raises(UpdateAborted):
        await fleet.run("complete_weights_update", {"update_id": prepared["update_id"]})
    assert await all_serve(fleet.client, "initial")
    assert (await states(fleet.client))[other.instance_id]["staged"] is None


# ---- deaths on the way ----


async def test_a_death_while_preparing_aborts_the_update(plane: Plane) -> None:
    fleet = await plane.fleet()
    doomed, *_ = plane.spawn(stage_delay_s=600), *plane.spawn_many(2)
    task = await while_preparing(plane, fleet, update_of(plane.model(1), "one"))
    doomed.kill()
    with pytest.raises(UpdateAborted) as caught:
        await task
    rows = {row["instance_id"]: row for row in caught.value.facts["workers"]}
    assert rows[doomed.instance_id]["error"]["code"] == "worker_lost"
    assert await all_serve(fleet.client, "initial")
    assert all(state["staged"] is None for state in (await states(fleet.client)).values())
    assert (await fleet.run("update_weights", update_of(plane.model(2), "two")))["version"]["sequence"] == 1


async def test_a_death_while_preparing_can_be_excluded(plane: Plane) -> None:
    fleet = await plane.fleet()
    doomed, *others = plane.spawn(stage_delay_s=600), *plane.spawn_many(2)
    body = update_of(plane.model(1), "one", on_prepare_failure="exclude")
    task = await while_preparing(plane, fleet, body)
    doomed.kill()
    reply = await task
    assert reply["excluded"] == [doomed.instance_id]
    served = {row["instance_id"] for row in reply["workers"] if row["status"] == "ok"}
    assert served == {other.instance_id for other in others}
    assert await all_serve(fleet.client, "one")


async def test_a_hung_worker_aborts_an_update_whose_policy_is_abort(plane: Plane) -> None:
    fleet = await plane.fleet()
    hung, _ = plane.spawn_many(2)
    hung.stop()
    with pytest.raises(UpdateAborted):
        await fleet.run("update_weights", update_of(plane.model(1), "one"))
    assert await all_serve(fleet.client, "initial")


@pytest.mark.parametrize("op", ["prepare_update", "follow_record"])
@pytest.mark.slow
@pytest.mark.parallel
async def test_a_worker_that_hangs_before_the_commit_is_excluded_and_heals(plane: Plane, op: str) -> None:
    """It has prepared the update, and hangs before `complete` asks it again, or before it learns of the decision."""
    completing = False

    async def before(name: str) -> None:
        if completing and name == op:
            hung.stop()

    fleet = await fleet_asking(plane, before)
    hung, *others = plane.spawn_many(3)
    policy = {"on_prepare_failure": "exclude" if op == "prepare_update" else "abort"}
    await fleet.run("prepare_weights_update", {**update_of(plane.model(1), "one"), "policy": policy})
    completing = True
    reply = await fleet.run("complete_weights_update")
    completing = False
    assert reply["excluded"] == [hung.instance_id]
    assert {row["instance_id"] for row in reply["workers"] if row["status"] == "ok"} == {
        other.instance_id for other in others
    }
    hung.go_on()

    async def healed() -> bool:
        return len(await states(fleet.client)) == 3 and await all_serve(fleet.client, "one")

    await plane.until(healed, 40)


@pytest.mark.slow
@pytest.mark.parallel
async def test_a_worker_that_hangs_before_complete_asks_it_again_fails_an_update_of_all(plane: Plane) -> None:
    fleet = await plane.fleet()
    hung, _ = plane.spawn_many(2)
    await fleet.run("prepare_weights_update", update_of(plane.model(1), "one"))
    hung.stop()
    with pytest.raises(UpdateAborted, match=hung.instance_id):
        await fleet.run("complete_weights_update")
    hung.go_on()

    async def back() -> bool:
        known = await states(fleet.client)
        return len(known) == 2 and all(state["staged"] is None for state in known.values())

    await plane.until(back, 40)
    assert await all_serve(fleet.client, "initial")


async def fleet_asking(plane: Plane, before: Callable[[str], Awaitable[None]]) -> Fleet:
    """A fleet whose client awaits `before` with the op, before it asks the workers in a phase of an update."""

    class Asking(RlClient):
        async def ask(self, view: Any, members: Any, op: str, *args: Any, **more: Any) -> list[WorkerReply]:
            await before(op)
            return await super().ask(view, members, op, *args, **more)

    return Fleet(await plane.client(kind=Asking))


@pytest.mark.parametrize("op", ["prepare_update", "follow_record", "commit_update"])
async def test_a_death_just_before_a_phase_gives_the_answer_of_the_protocol(plane: Plane, op: str) -> None:
    """409 before the decision; after it the version is committed and the dead one excluded."""

    async def before(name: str) -> None:
        if name == op and doomed.process.poll() is None:
            doomed.kill()
            await plane.until(lambda: view.member(doomed.instance_id) is None)

    fleet = await fleet_asking(plane, before)
    client = fleet.client
    doomed, other = plane.spawn_many(2)
    view = await client.view()
    update = fleet.run("update_weights", update_of(plane.model(1), "one"))
    if op == "prepare_update":
        with pytest.raises(Conflict):
            await update
        assert await all_serve(client, "initial")
    else:
        reply = await update
        assert reply["excluded"] == [doomed.instance_id]
        assert [row["instance_id"] for row in reply["workers"] if row["status"] == "ok"] == [other.instance_id]
        assert await all_serve(client, "one")


async def test_a_pinned_fleet_that_changed_is_not_updated(plane: Plane) -> None:
    fleet = await plane.fleet()
    plane.spawn()
    epoch = (await fleet.client.list_workers()).epoch
    plane.spawn()
    await fleet.client.wait_for(2, 10)
    with pytest.raises(MembershipChanged) as caught:
        await fleet.run("update_weights", {**update_of(plane.model(1)), "epoch": epoch})
    assert (caught.value.before_epoch, caught.value.after_epoch) == (epoch, epoch + 1)
    assert await all_serve(fleet.client, "initial")


@pytest.mark.slow
@pytest.mark.parallel
async def test_a_coordinator_that_dies_before_the_decision_leaves_no_trace(plane: Plane) -> None:
    fleet = await plane.fleet()
    plane.spawn_copies(2)
    await coordinator_that_dies(plane, update_of(plane.model(1), "one"), "prepare_update")

    async def dropped() -> bool:
        return all(state["staged"] is None for state in (await states(fleet.client)).values())

    await plane.until(dropped, 30)
    assert await all_serve(fleet.client, "initial")
    reply = await fleet.run("update_weights", update_of(plane.model(2), "two"))
    assert (reply["version"]["sequence"], reply["version"]["label"]) == (1, "two")


async def test_a_decision_that_comes_after_the_workers_gave_up_is_refused(plane: Plane) -> None:
    """No call takes the lock that its coordinator has lost."""
    fleet, late = await plane.fleet(), await plane.fleet("late", LockTimings(ttl_s=3, renew_s=60))
    plane.spawn_copies(4)
    await fleet.client.wait_for(4)
    on_its_way, go_on = hold_back(late.client.bus)
    written: list[bytes] = []

    async def heard(message: Msg) -> None:
        written.append(message.data)

    await fleet.client.bus.subscribe(fleet.client.subjects().state.feed(RECORD), heard)
    await fleet.client.bus.flush()

    async def dropped() -> bool:
        return all(state["staged"] is None for state in (await states(fleet.client)).values())

    updating = asyncio.create_task(late.run("update_weights", update_of(plane.model(1), "one")))
    async with asyncio.timeout(60):
        await on_its_way.wait()
        await fleet.client.bus.flush()
        written.clear()
        assert not await dropped()
        await plane.until(dropped, 30)
        go_on.set()
        with pytest.raises(StaleFence):
            await updating
    await fleet.client.bus.flush()
    assert len(written) == 1, "one worker bars the coordinator, for all"
    assert await all_serve(fleet.client, "initial")
    reply = await fleet.run("update_weights", update_of(plane.model(2), "two"))
    assert (reply["version"]["sequence"], reply["version"]["label"]) == (1, "two")


async def test_the_next_update_does_not_wait_for_a_dead_coordinators_staging(plane: Plane) -> None:
    fleet = await plane.fleet()
    plane.spawn_copies(2)
    await coordinator_that_dies(plane, update_of(plane.model(1), "one"), "prepare_update")
    reply = await fleet.run("update_weights", update_of(plane.model(2), "two"))
    assert (reply["version"]["sequence"], reply["version"]["label"]) == (1, "two")
    assert await all_serve(fleet.client, "two")


@pytest.mark.parametrize("at", ["follow_record", "commit_update"])
@pytest.mark.slow
@pytest.mark.parallel
async def test_after_the_decision_the_workers_finish_without_their_coordinator(plane: Plane, at: str) -> None:
    fleet = await plane.fleet()
    plane.spawn_copies(2)
    await coordinator_that_dies(plane, update_of(plane.model(1), "one"), at)
    await plane.until(lambda: all_serve(fleet.client, "one"), 40)
    reply = await fleet.run("update_weights", update_of(plane.model(2), "two"))
    assert reply["version"]["sequence"] == 2


async def test_workers_left_gated_obey_the_next_coordinator(plane: Plane) -> None:
    fleet = await plane.fleet()
    plane.spawn_copies(2)
    await coordinator_that_dies(plane, update_of(plane.model(1), "one"), "commit_update")
    reply = await fleet.run("update_weights", update_of(plane.model(2), "two"))
    assert reply["version"]["sequence"] == 2
    await plane.until(lambda: all_serve(fleet.client, "two"), 30)

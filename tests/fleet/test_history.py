"""The history of the updates of a real fleet, roll-backs by it, and calls that are repeated under one request id."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rl_plane.bus.lock import HeldLock
from rl_plane.client import RlClient
from rl_plane.commit.coordinator import Coordinator
from rl_plane.commit.history import KEEP, UpdateEntry, history_key, read_history
from rl_plane.commit.journal import Journal
from rl_plane.commit.steps import Event, Instruction, Write
from rl_plane.errors import (
    BusUnreachable,
    Conflict,
    InvalidRequest,
    InvalidWeights,
    Locked,
    NotFound,
    OutcomeUnknown,
    PlaneError,
    StaleFence,
    Unavailable,
    UpdateAborted,
)
from rl_plane.protocol.subjects import HISTORY_PREFIX, RECORD
from tests.support.dying_coordinator import ENDS, CoordinatorDies, ends_at

if TYPE_CHECKING:
    from tests.conftest import Plane

DIGEST = "blake3:" + "ab" * 32
OTHER_DIGEST = "blake3:" + "cd" * 32


def update_of(directory: Path, label: str | None = None, **more: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"transport": {"backend": "filesystem", "path": str(directory)}, **more}
    return body if label is None else {**body, "version": label}


async def told(client: RlClient, **more: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await client.run("updates", more))["updates"]
    return found


async def served(client: RlClient) -> set[tuple[str, bool]]:
    await client.list_workers()
    rows = (await client.call_all("state")).rows
    return {(row.body["version"]["digest"], row.body["admission"]["open"]) for row in rows}


async def test_committed_and_aborted_updates_are_listed_newest_first(plane: Plane) -> None:
    client = await plane.client("trainer")
    ids = plane.spawn_copies(2)
    first = await client.run("update_weights", update_of(plane.model(1), "step_1"), "id-1")
    with pytest.raises(InvalidRequest):
        await client.run("update_weights", update_of(Path("/etc"), "bad"), "id-2")
    await client.run("update_weights", update_of(plane.model(2)))
    newest, aborted, oldest, initial = await told(client)
    assert newest["version"]["sequence"] == 2
    assert newest["label"] == "2"
    assert (aborted["update_id"], aborted["label"], aborted["outcome"]) == ("id-2", "bad", "aborted")
    assert aborted["version"] is None
    assert aborted["error"]["field"] == "transport.path"
    assert set(aborted["workers"]) == set(ids)
    assert {row["error"]["code"] for row in aborted["workers"].values()} == {"invalid_request"}
    assert aborted["phases"].keys() == {"wait_s", "prepare_s", "other_s"}
    assert sum(aborted["phases"].values()) == pytest.approx(aborted["ended_at"] - aborted["began_at"], abs=1e-6)
    assert (oldest["update_id"], oldest["outcome"]) == ("id-1", "committed")
    assert oldest["version"] == first["version"]
    assert oldest["digest"] == first["version"]["digest"]
    assert oldest["transport"]["path"] == str(plane.model(1))
    assert oldest["who"] == client.owner
    assert oldest["ended_at"] >= oldest["began_at"] > 1e9
    assert oldest["phases"] == first["phases"]
    assert {key: row["status"] for key, row in oldest["workers"].items()} == dict.fromkeys(ids, "ok")
    assert (initial["label"], initial["transport"]) == ("initial", None)
    assert [one["update_id"] for one in await told(client, limit=2)] == [newest["update_id"], "id-2"]
    only = await told(client, workers=ids[:1])
    assert set(only[0]["workers"]) == {ids[0]}


async def test_the_history_is_read_without_workers_and_has_an_end(plane: Plane) -> None:
    client = await plane.client()
    assert await told(client) == []
    worker = plane.spawn()
    await client.run("update_weights", update_of(plane.model(1), "step_1"), "first")
    state = client.subjects().state
    first = await client.bus.get(state, history_key("first"))
    assert first is not None
    assert first.value is not None
    for number in range(KEEP):
        copy = replace(UpdateEntry.decode(first.value), update_id=f"copy-{number}", label=f"copy_{number}")
        await client.bus.put(state, history_key(copy.update_id), copy.encode())
    for step in (2, 3):
        await client.run("update_weights", update_of(plane.model(step), f"step_{step}"))
    worker.kill()
    labels = [one["label"] for one in await told(client, limit=KEEP)]
    assert labels == ["step_3", "step_2", *(f"copy_{number}" for number in reversed(range(2, KEEP)))]
    stored, _ = await client.bus.read_keys(state, HISTORY_PREFIX + ">")
    assert len(stored) == KEEP


@pytest.mark.parametrize("body", [{"limit": 0}, {"limit": 257}, {"limit": "x"}, {"since": 1}])
async def test_a_wrong_question_for_updates_is_refused(plane: Plane, body: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await (await plane.client()).run("updates", body)
    assert caught.value.facts["field"] in body


async def test_a_repeated_update_returns_its_first_answer_and_changes_nothing_after_later_updates(
    plane: Plane,
) -> None:
    one, two = await plane.client("one"), await plane.client("two")
    ids = plane.spawn_copies(2)
    body = update_of(plane.model(1), "step_1")
    first = await one.run("update_weights", body, "id-1")
    await one.run("update_weights", update_of(plane.model(2), "step_2"), "id-2")
    before = await served(one)
    again = await two.run("update_weights", {**body, "policy": {"commit_timeout_s": 5}}, "id-1")
    assert again["version"] == first["version"]
    assert [(row["instance_id"], row["status"]) for row in again["workers"]] == [(key, "ok") for key in ids]
    assert (again["excluded"], again["phases"]) == ([], first["phases"])
    assert await served(two) == before
    assert len(await told(two)) == 3
    plane.kill_all()
    assert (await two.run("update_weights", body, "id-1"))["version"] == first["version"]
    with pytest.raises(InvalidRequest) as caught:
        await two.run("update_weights", update_of(plane.model(2), "step_1"), "id-1")
    assert caught.value.facts["field"] == "Idempotency-Key"


async def test_a_repeated_aborted_update_gives_its_error_again(plane: Plane) -> None:
    client = await plane.client()
    worker = plane.spawn(fail_stage="true")
    body = update_of(plane.model(1), "step_1")
    with pytest.raises(UpdateAborted) as first:
        await client.run("update_weights", body, "id-1")
    worker.kill()
    plane.spawn()
    with pytest.raises(UpdateAborted) as again:
        await client.run("update_weights", body, "id-1")
    assert again.value.message == first.value.message
    assert [row["instance_id"] for row in again.value.facts["workers"]] == [worker.instance_id]
    assert again.value.facts["repeated"] is True
    assert (await client.run("update_weights", body, "id-2"))["version"]["sequence"] == 1


async def test_an_update_that_did_not_begin_leaves_no_entry_and_may_be_repeated(plane: Plane) -> None:
    one, two = await plane.client(), await plane.client()
    plane.spawn()
    body = update_of(plane.model(1), "step_1")
    async with one.lock(await one.view()):
        with pytest.raises(Locked):
            await two.run("update_weights", body, "id-1")
    assert [entry["label"] for entry in await told(two)] == ["initial"]
    assert (await two.run("update_weights", body, "id-1"))["version"]["label"] == "step_1"


async def test_a_duplicate_waits_for_the_one_in_flight_elsewhere(plane: Plane) -> None:
    one, two = await plane.client("one"), await plane.client("two")
    plane.spawn(stage_delay_s=6)
    body = update_of(plane.model(1), "step_1")
    first = asyncio.create_task(one.run("update_weights", body, "id-1"))

    async def running() -> bool:
        return [entry["outcome"] for entry in await told(two)] == ["running", "committed"]

    # The record, which no update has overwritten yet, is the entry of sequence 0.
    await plane.until(running)
    assert [entry["outcome"] for entry in await told(two, limit=1)] == ["running"]
    again = await two.run("update_weights", body, "id-1")  # the lock is waited for longer than its 2 s
    assert again["version"] == (await first)["version"]
    assert [entry["label"] for entry in await told(two)] == ["step_1", "initial"]
    assert {entry["who"] for entry in await told(two)} == {one.owner, ""}


async def test_a_commit_whose_coordinator_died_at_once_is_in_the_history(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = await plane.client("one"), await plane.client("two")
    ids = plane.spawn_copies(2)
    body = update_of(plane.model(1), "step_1")
    with monkeypatch.context() as patch:
        ends_at(patch, "gate", CoordinatorDies())
        with pytest.raises(CoordinatorDies):
            await one.run("update_weights", body, "id-1")
    entry = (await told(two))[0]
    assert (entry["update_id"], entry["outcome"], entry["label"]) == ("id-1", "committed", "step_1")
    assert (entry["version"]["sequence"], entry["who"]) == (1, one.owner)
    # The answer is given once it is true: the workers serve it, without waiting for the end of their gate.
    again = await two.run("update_weights", body, "id-1")
    assert again["version"] == entry["version"]
    assert [(row["instance_id"], row["status"]) for row in again["workers"]] == [(key, "ok") for key in ids]
    assert await served(two) == {(again["version"]["digest"], True)}
    assert (await told(two))[0]["who"] == one.owner
    # Another decision overwrites the record; the entry stays.
    await two.run("update_weights", update_of(plane.model(2), "step_2"), "id-2")
    labels = [(entry["label"], entry["outcome"]) for entry in await told(two)]
    assert labels == [("step_2", "committed"), ("step_1", "committed"), ("initial", "committed")]
    assert (await one.run("update_weights", body, "id-1"))["version"] == entry["version"]


async def test_a_repeated_prepare_keeps_the_beginning_of_its_entry(plane: Plane) -> None:
    client = await plane.client()
    plane.spawn()
    body = update_of(plane.model(1))
    prepared = await client.run("prepare_weights_update", body, "id-1")
    first = (await told(client))[0]
    assert (first["label"], first["outcome"]) == ("1", "prepared")
    assert first["began_at"] > 1e9
    again = await (await plane.client("another")).run("prepare_weights_update", body, "id-1")
    assert again["digest"] == prepared["digest"]
    assert (await told(client))[0] == first


async def test_a_repeated_call_asks_the_workers_about_an_opened_update_without_an_entry(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = await plane.client("one"), await plane.client("two")
    ids = plane.spawn_copies(2)
    body = update_of(plane.model(1), "step_1")

    async def dies(*args: Any) -> None:
        raise CoordinatorDies

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "committed", dies)
        with pytest.raises(CoordinatorDies):
            await one.run("update_weights", body, "id-1")
    again = await two.run("update_weights", body, "id-1")
    assert again["version"]["label"] == "step_1"
    assert [(row["instance_id"], row["status"]) for row in again["workers"]] == [(key, "ok") for key in ids]
    assert sorted((await told(two))[0]["workers"]) == ids, "noted now"


async def test_an_update_whose_coordinator_died_before_the_decision_is_aborted_and_may_be_repeated(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = await plane.client("one"), await plane.client("two")
    plane.spawn()
    body = update_of(plane.model(1), "step_1")
    with monkeypatch.context() as patch:
        ends_at(patch, "decide", CoordinatorDies())
        with pytest.raises(CoordinatorDies):
            await one.run("update_weights", body, "id-1")
    newest = (await told(two))[0]
    assert (newest["update_id"], newest["outcome"], newest["error"]["code"]) == (
        "id-1",
        "aborted",
        "update_aborted",
    )
    assert (await two.run("update_weights", body, "id-1"))["version"]["sequence"] == 1
    assert [(entry["update_id"], entry["outcome"]) for entry in await told(two)] == [
        ("id-1", "committed"),
        ("", "committed"),
    ]


@pytest.mark.parametrize("error", [Conflict("0 workers serve it"), Unavailable("NATS is down")])
async def test_an_error_after_the_decision_is_a_commit_all_the_same(
    plane: Plane, monkeypatch: pytest.MonkeyPatch, error: PlaneError
) -> None:
    client = await plane.client()
    ids = plane.spawn_copies(2)
    with monkeypatch.context() as patch:
        ends_at(patch, "gate", error)
        with pytest.raises(type(error)):
            await client.run("update_weights", update_of(plane.model(1), "step_1"), "id-1")
    entry = (await told(client))[0]
    assert (entry["outcome"], entry["version"]["label"], entry["error"]["code"]) == (
        "committed",
        "step_1",
        error.code,
    )
    again = client.run("update_weights", update_of(plane.model(1), "step_1"), "id-1")
    if isinstance(error, Unavailable):  # of the moment: now it is carried out, and noted
        reply = await again
        assert reply["version"] == entry["version"]
        assert [(row["instance_id"], row["status"]) for row in reply["workers"]] == [(key, "ok") for key in ids]
        noted = (await told(client))[0]
        assert ("error" in noted, sorted(noted["workers"])) == (False, ids)
    else:
        with pytest.raises(Conflict, match="0 workers serve it"):
            await again


async def asked(
    client: RlClient, body: dict[str, Any], calls: int, monkeypatch: pytest.MonkeyPatch, end: BaseException
) -> Callable[[RlClient], Awaitable[dict[str, Any]]]:
    """An update by one call or by two, which ends so after its decision; what asks again."""
    if calls == 2:
        await client.run("prepare_weights_update", body, "id-1")

    async def ask(client: RlClient) -> dict[str, Any]:
        if calls == 2:
            return await client.run("complete_weights_update", {"update_id": "id-1"})
        return await client.run("update_weights", body, "id-1")

    with monkeypatch.context() as patch:
        ends_at(patch, "gate", end)
        with pytest.raises(type(end)):
            await ask(client)
    return ask


async def until_gone(plane: Plane, client: RlClient, instance_id: str) -> None:
    view = await client.view()
    await plane.until(lambda: view.member(instance_id) is None)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("calls", [1, 2])
async def test_a_repeated_update_is_no_success_if_fewer_workers_serve_it_than_its_policy_demands(
    plane: Plane, monkeypatch: pytest.MonkeyPatch, end: BaseException, calls: int
) -> None:
    client = await plane.client()
    doomed, other = plane.spawn_many(2)
    body = {**update_of(plane.model(1), "step_1"), "policy": {"min_ready": 2}}
    ask = await asked(client, body, calls, monkeypatch, end)
    doomed.kill()
    await until_gone(plane, client, doomed.instance_id)
    if calls == 2:
        with pytest.raises(Conflict, match="is committed as step_1"):
            await client.run("prepare_weights_update", body, "id-1")
    with pytest.raises(Conflict, match="step_1 is committed, but 1 workers serve it") as caught:
        await ask(client)
    assert [row["instance_id"] for row in caught.value.facts["workers"]] == [other.instance_id]
    noted = (await told(client))[0]
    assert (noted["outcome"], noted["error"]["code"]) == ("committed", "conflict")
    with pytest.raises(Conflict, match="1 workers serve it") as caught:
        await ask(client)
    assert caught.value.facts["repeated"] is True


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("calls", [1, 2])
async def test_a_repeated_call_for_an_unreported_outcome_fails_once_another_is_committed(
    plane: Plane, monkeypatch: pytest.MonkeyPatch, end: BaseException, calls: int
) -> None:
    one, two = await plane.client("one"), await plane.client("two")
    plane.spawn_copies(2)
    body = update_of(plane.model(1), "step_1")
    ask = await asked(one, body, calls, monkeypatch, end)
    await two.run("update_weights", update_of(plane.model(2), "step_2"), "id-2")
    before = await served(two)
    for client in (one, two):
        with pytest.raises(Conflict, match="step_1 was committed, and another version since") as caught:
            await ask(client)
        assert (caught.value.facts["version"]["label"], caught.value.facts["repeated"]) == ("step_1", True)
    assert await served(two) == before
    with pytest.raises(Conflict, match="is committed as step_1"):
        await one.run("prepare_weights_update", body, "id-1")
    entry = next(entry for entry in await told(two) if entry["update_id"] == "id-1")
    assert (entry["outcome"], entry["version"]["sequence"]) == ("committed", 1)
    assert entry["error"]["code"] == "unavailable"


@pytest.mark.parametrize("lost", ["decision", "all of it"])
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("calls", [1, 2])
async def test_a_repeated_call_takes_no_worker_back_after_a_lost_later_decision(
    plane: Plane, monkeypatch: pytest.MonkeyPatch, end: BaseException, calls: int, lost: str
) -> None:
    """The workers report that version."""
    client = await plane.client()
    plane.spawn_copies(2)
    body, state = update_of(plane.model(1), "step_1"), client.subjects().state
    ask = await asked(client, body, calls, monkeypatch, end)
    keys = [RECORD, *([history_key("id-1")] if lost == "all of it" else [])]
    old = {key: await client.bus.get(state, key) for key in keys}
    await client.run("update_weights", update_of(plane.model(2), "step_2"), "id-2")
    before = await served(client)
    for key, entry in old.items():
        assert entry is not None
        assert entry.value is not None
        await client.bus.put(state, key, entry.value)
    if calls == 2:
        with pytest.raises(Conflict, match="step_1 was committed, and another version since"):
            await client.run("prepare_weights_update", body, "id-1")
    with pytest.raises(Conflict, match="step_1 was committed, and another version since"):
        await ask(client)
    assert await served(client) == before
    found = next(entry for entry in await told(client) if entry["update_id"] == "id-1")
    assert (found["outcome"], found["version"]["sequence"]) == ("committed", 1)
    with pytest.raises(Conflict, match="step_1 was committed, and another version since"):
        await ask(client)
    assert await served(client) == before


@pytest.mark.parametrize("end", ENDS)
async def test_a_repeated_update_is_locked_while_another_prepared_update_waits(
    plane: Plane, monkeypatch: pytest.MonkeyPatch, end: BaseException
) -> None:
    client = await plane.client()
    plane.spawn()
    body = update_of(plane.model(1), "step_1")
    with monkeypatch.context() as patch:
        ends_at(patch, "gate", end)
        with pytest.raises(type(end)):
            await client.run("update_weights", body, "id-1")
    await client.run("prepare_weights_update", update_of(plane.model(2), "step_2"), "id-2")
    with pytest.raises(Locked):
        await client.run("update_weights", body, "id-1")
    found = next(entry for entry in await told(client) if entry["update_id"] == "id-1")
    assert (found["outcome"], found["error"]["code"]) == ("committed", "unavailable")
    await client.run("abort_weights_update", {"update_id": "id-2"})
    assert (await client.run("update_weights", body, "id-1"))["version"]["label"] == "step_1"


async def test_a_repeated_update_asks_the_workers_while_another_update_has_only_begun(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = await plane.client("one"), await plane.client("two")
    ids = plane.spawn_copies(2)
    body = update_of(plane.model(1), "step_1")
    with monkeypatch.context() as patch:
        ends_at(patch, "gate", CoordinatorDies())
        with pytest.raises(CoordinatorDies):
            await one.run("update_weights", body, "id-1")
    with pytest.raises(InvalidRequest):
        await two.run("update_weights", update_of(Path("/etc"), "bad"), "id-2")
    assert (await told(two))[1]["error"]["code"] == "unavailable", "noted by the update that has begun"
    again = await two.run("update_weights", body, "id-1")
    assert [(row["instance_id"], row["status"]) for row in again["workers"]] == [(key, "ok") for key in ids]
    entry = (await told(two))[0]
    assert (entry["update_id"], "error" in entry, sorted(entry["workers"])) == ("id-1", False, ids)


@pytest.mark.parametrize("decided", [True, False])
async def test_the_record_resolves_an_unknown_outcome(
    plane: Plane, monkeypatch: pytest.MonkeyPatch, decided: bool
) -> None:
    """The answer of the decision was lost, and with it the caller's: the same id finds out."""
    client = await plane.client()
    plane.spawn()
    real = Coordinator.carry_out

    async def lost(self: Coordinator, instruction: Instruction) -> Event:
        if instruction.phase == "resolve":
            raise BusUnreachable("still no answer")
        if isinstance(instruction, Write):
            if decided:
                await real(self, instruction)
            raise BusUnreachable("no answer")
        return await real(self, instruction)

    body = update_of(plane.model(1), "step_1")
    with monkeypatch.context() as patch:
        patch.setattr(Coordinator, "carry_out", lost)
        with pytest.raises(OutcomeUnknown):
            await client.run("update_weights", body, "id-1")
    assert (await told(client))[0]["outcome"] == ("committed" if decided else "aborted")
    assert (await client.run("update_weights", body, "id-1"))["version"]["sequence"] == 1
    assert [entry["outcome"] for entry in await told(client)] == ["committed", "committed"]


async def test_without_the_lock_nothing_is_written(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    client = await plane.client()
    plane.spawn()
    real = HeldLock.put

    async def lost(self: HeldLock, key: str, value: bytes, **more: Any) -> int:
        if key.startswith(HISTORY_PREFIX) and json.loads(value)["outcome"] != "running":
            raise StaleFence("taken over")
        return await real(self, key, value, **more)

    state = client.subjects().state
    # The entry of sequence 0 is made final by the first update, which is let through.
    await client.run("update_weights", update_of(plane.model(1), "step_1"), "id-1")
    with monkeypatch.context() as patch:
        patch.setattr(HeldLock, "put", lost)
        reply = await client.run("update_weights", update_of(plane.model(2), "step_2"), "id-2")
    assert reply["version"]["label"] == "step_2"
    stored = await client.bus.get(state, history_key("id-2"))
    assert stored is not None
    assert stored.value is not None
    assert json.loads(stored.value)["outcome"] == "running"
    newest = (await read_history(client.bus, state))[0]
    assert (newest.update_id, newest.outcome, newest.version and newest.version.label) == (
        "id-2",
        "committed",
        "step_2",
    )


async def test_an_update_of_two_calls_has_one_entry(plane: Plane) -> None:
    one, two = await plane.client("one"), await plane.client("two")
    ids = plane.spawn_copies(2)
    prepared = await one.run("prepare_weights_update", update_of(plane.model(1), "step_1"), "id-1")
    newest = (await told(two))[0]
    assert (newest["outcome"], newest["digest"], set(newest["workers"])) == (
        "prepared",
        prepared["digest"],
        set(ids),
    )
    done = await two.run("complete_weights_update", {"update_id": "id-1"})
    newest, initial = await told(one)
    assert (newest["outcome"], newest["version"], newest["who"]) == ("committed", done["version"], one.owner)
    assert newest["phases"].keys() == {"wait_s", "prepare_s", "receive_s", "gate_s", "commit_s", "open_s"}
    assert newest["phases"] == done["phases"], "the answer counts the call that prepared, too"
    assert sum(newest["phases"].values()) == pytest.approx(newest["ended_at"] - newest["began_at"], abs=1e-6)
    assert initial["label"] == "initial"
    again = await one.run("complete_weights_update", {"update_id": "id-1"})
    assert again["version"] == done["version"]
    with pytest.raises(Conflict):
        await one.run("prepare_weights_update", update_of(plane.model(1), "step_1"), "id-1")
    await one.run("prepare_weights_update", update_of(plane.model(2), "step_2"), "id-2")
    await two.run("abort_weights_update")
    assert [(entry["update_id"], entry["outcome"]) for entry in await told(two)] == [
        ("id-2", "aborted"),
        ("id-1", "committed"),
        ("", "committed"),
    ]


# ---- roll-backs ----


async def test_a_rollback_goes_by_label_by_sequence_or_to_the_first_version(plane: Plane) -> None:
    client = await plane.client()
    plane.spawn_copies(2)
    digests = [(await client.run("weight_version"))["version"]["digest"]]
    for step in (1, 2):
        reply = await client.run("update_weights", update_of(plane.model(step), f"step_{step}"))
        digests.append(reply["version"]["digest"])
    back = await client.run("update_weights", {"rollback": {"label": "step_1"}})
    assert back["version"] == {**back["version"], "sequence": 3, "label": "step_1", "digest": digests[1]}
    assert await served(client) == {(digests[1], True)}
    back = await client.run("update_weights", {"rollback": {"sequence": 2}, "version": "again_2"})
    assert (back["version"]["sequence"], back["version"]["label"]) == (4, "again_2")
    assert await served(client) == {(digests[2], True)}
    back = await client.run("update_weights", {"rollback": {"sequence": 0}}, "to-zero")
    assert (back["version"]["sequence"], back["version"]["label"]) == (5, "initial")
    assert await served(client) == {(digests[0], True)}
    newest = (await told(client))[0]
    assert (newest["rollback"], newest["outcome"], newest["digest"]) == ({"sequence": 0}, "committed", digests[0])
    again = await client.run("update_weights", {"rollback": {"sequence": 0}}, "to-zero")
    assert again["version"] == back["version"]


async def test_a_changed_source_fails_the_rollback_and_changes_nothing(plane: Plane) -> None:
    client = await plane.client()
    plane.spawn()
    directory = plane.model(1)
    await client.run("update_weights", update_of(directory, "step_1"))
    await client.run("update_weights", update_of(plane.model(2), "step_2"))
    before = await served(client)
    file = directory / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(InvalidWeights):
        await client.run("update_weights", {"rollback": {"label": "step_1"}})
    file.unlink()
    with pytest.raises(InvalidRequest):
        await client.run("update_weights", {"rollback": {"label": "step_1"}})
    assert await served(client) == before
    assert [entry["outcome"] for entry in await told(client)] == ["aborted", "aborted"] + ["committed"] * 3


async def test_a_rollback_to_an_unknown_or_ambiguous_version_is_refused(plane: Plane) -> None:
    client = await plane.client()
    one, two = plane.model(0), plane.tmp / "weights" / "copy"
    plane.spawn(model=one)
    await client.wait_for(1)
    await client.run("update_weights", update_of(plane.model(1), "step_1"))
    for rollback in ({"label": "step_9"}, {"sequence": 9}):
        with pytest.raises(NotFound) as caught:
            await client.run("update_weights", {"rollback": rollback})
        assert [version["label"] for version in caught.value.facts["versions"]] == ["step_1", "initial"]
    two.mkdir()
    (two / "model.safetensors").write_bytes((one / "model.safetensors").read_bytes())
    plane.spawn(model=two)
    await client.wait_for(2)
    with pytest.raises(Conflict) as refused:
        await client.run("update_weights", {"rollback": {"label": "initial"}})
    assert refused.value.facts["paths"] == sorted([str(one), str(two)])
    assert len(await told(client)) == 2, "what was refused before work began is in the history"

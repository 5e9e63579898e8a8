"""The fleet reports the running update, while its bytes stand still and between its trainer's calls, and ends it."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from rl_plane.bus.lock import LockTimings
from rl_plane.client import RlClient
from rl_plane.commit.coordinator import Coordinator
from rl_plane.commit.steps import Announce, Event, Instruction
from rl_plane.errors import Conflict, InvalidRequest, Locked, PlaneError, UpdateAborted
from tests.conftest import Plane
from tests.support.fleet_updates import all_serve, update_of

LARGE = 1 << 18
"""Bytes of each tensor: more than the first request of a file brings."""
SOON = LockTimings(renew_s=0.05)
"""Renewals of the lock carry the phase, so with these it is seen at once."""


async def running(client: RlClient) -> dict[str, Any] | None:
    found: dict[str, Any] | None = (await client.run("state"))["update"]
    return found


async def test_a_stalled_update_shows_its_caller_and_what_it_waits_for(
    plane: Plane, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rl_plane.commit.journal")
    trainer, operator = await plane.client("trainer", SOON), await plane.client("operator")
    server = plane.weight_server
    served, model = (plane.model(seed, tensors=4, nbytes=LARGE) for seed in (0, 1))
    await asyncio.to_thread(plane.spawn_many, 2, weight_urls=[server.url], model=served)
    assert await running(operator) is None
    server.behaviour.hold_after = LARGE
    body = {"transport": {"backend": "http", "url": f"{server.url}/{model.name}"}, "version": "one"}
    task = asyncio.create_task(trainer.run("update_weights", body, "the-id"))

    async def stands_still() -> dict[str, Any] | None:
        found = await running(operator)
        if found is None or found["phase"] != "prepare":
            return None
        return found if found["total_bytes"] == 2 * 4 * LARGE else None

    found = await plane.until(stands_still)
    assert (found["update_id"], found["label"], found["transport"]) == ("the-id", "one", "http")
    assert (found["caller"], found["who"], found["asked_by"]) == (trainer.owner, trainer.owner, "")
    assert found["waits_for"].startswith("the bytes of an HTTP server, since ")
    assert found["waits_for"].endswith("(2 of 2 workers)")
    assert 0 <= found["bytes"] < found["total_bytes"]
    assert 0 < found["deadline_in_s"] <= 300
    assert found["elapsed_s"] >= found["in_phase_s"] >= 0
    rows = (await operator.run("workers"))["workers"]
    assert {row["update"]["update_id"] for row in rows} == {"the-id"}
    assert {row["update"]["total_bytes"] for row in rows} == {4 * LARGE}
    server.behaviour.go.set()
    reply = await task
    assert sum(reply["phases"].values()) == pytest.approx(reply["elapsed_s"], abs=0.05)
    assert reply["phases"]["prepare_s"] > 0.9 * found["in_phase_s"]
    assert await running(operator) is None
    assert [row["update"] for row in (await operator.run("workers"))["workers"]] == [None, None]
    began, committed, ended = [record.getMessage() for record in caplog.records]
    for line in (began, committed, ended):
        assert line.startswith("update the-id (one) ")
        assert f"asked by {trainer.owner}" in line
    assert "began: by http" in began
    assert "is committed as sequence 1" in committed
    assert "ended: committed on 2 of 2 workers in " in ended
    assert all(f"{name.removesuffix('_s')} " in ended for name in reply["phases"])


async def test_a_prepared_update_waits_for_the_next_call_of_its_trainer(plane: Plane) -> None:
    trainer, operator = await plane.client("trainer"), await plane.client("operator")
    plane.spawn()
    await trainer.run("prepare_weights_update", update_of(plane.model(1), "one"), "the-id")
    found = await running(operator)
    assert found is not None
    assert (found["update_id"], found["phase"], found["caller"]) == ("the-id", "prepared", trainer.owner)
    assert found["bytes"] == found["total_bytes"] > 0
    assert found["idle_limit_s"] == 120
    assert "complete_weights_update" in found["waits_for"]
    (row,) = (await operator.run("state"))["workers"]
    assert row["update"]["waits_for"] == "the coordinator's decision"
    await operator.run("pause")  # holds the lock for a moment, and is no update
    await operator.run("resume")
    assert (await running(operator) or {})["update_id"] == "the-id"
    await trainer.run("complete_weights_update")
    assert await running(operator) is None


async def test_an_update_that_fails_logs_why_and_runs_no_more(
    plane: Plane, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rl_plane.commit.journal")
    client = await plane.client()
    plane.spawn()
    with pytest.raises(InvalidRequest):
        await client.run("update_weights", update_of(plane.tmp, "one"), "the-id")
    assert await running(client) is None
    began, ended = [record.getMessage() for record in caplog.records]
    assert began.startswith("update the-id (one) began: by filesystem")
    assert "ended: aborted on 0 of 1 workers in " in ended
    assert "invalid_request: " in ended


async def test_an_operator_or_one_workers_refusal_ends_an_update_whose_bytes_stand_still(plane: Plane) -> None:
    trainer, operator = await plane.client("trainer", SOON), await plane.client("operator")
    server = plane.weight_server
    served, model = (plane.model(seed, tensors=4, nbytes=LARGE) for seed in (0, 1))
    await asyncio.to_thread(plane.spawn_many, 2, weight_urls=[server.url], model=served)
    await trainer.wait_for(2)
    server.behaviour.hold_after = LARGE
    body = {
        "transport": {"backend": "http", "url": f"{server.url}/{model.name}"},
        "version": "one",
        "policy": {"on_prepare_failure": "exclude"},
    }
    task = asyncio.create_task(trainer.run("update_weights", body, "the-id"))

    async def receives() -> bool:
        found = await running(operator)
        return found is not None and found["workers"] == 2

    await plane.until(receives)
    with pytest.raises(Locked):
        await operator.run("abort_weights_update", {"update_id": "another"})
    done = await operator.run("abort_weights_update", {"by": "an operator on host a"})
    assert done["update_id"] == "the-id"
    with pytest.raises(UpdateAborted, match="aborted by an operator on host a"):
        await task
    assert await running(operator) is None
    (entry, *_) = (await operator.run("updates"))["updates"]
    assert (entry["outcome"], entry["error"]["message"]) == ("aborted", "aborted by an operator on host a")
    await _one_worker_refuses(plane, trainer, body, served)
    server.behaviour.go.set()
    again = await trainer.run("update_weights", update_of(model, "two"))
    assert again["version"]["sequence"] == 1, "the fleet is as it was"
    assert await all_serve(operator, "two")


async def _one_worker_refuses(plane: Plane, trainer: RlClient, body: dict[str, Any], served: Path) -> None:
    """A worker that may not fetch from this server refuses at once. The others stop in the middle of their receive."""
    held = [row["instance_id"] for row in (await trainer.run("workers"))["workers"]]
    refuses = (await asyncio.to_thread(plane.spawn, model=served)).instance_id
    await trainer.wait_for(3)
    assert (await trainer.run("state"))["ready"]
    with pytest.raises(PlaneError) as caught:
        await trainer.run("update_weights", {**body, "policy": {}})
    assert caught.value.http_status in (400, 501), "the refusal's own kind"
    rows = {row["instance_id"]: row["error"] for row in caught.value.facts["workers"]}
    assert "told to stop" not in rows.pop(refuses)["message"]
    assert rows.keys() == set(held)
    assert {row["code"] for row in rows.values()} <= {"update_aborted", "engine_failed"}

    async def dropped() -> bool:
        return [row["update"] for row in (await trainer.run("workers"))["workers"]] == [None] * 3

    await plane.until(dropped)


async def test_an_update_that_is_decided_meanwhile_is_committed_all_the_same(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, operator = await plane.client("trainer"), await plane.client("operator")
    plane.spawn()
    decided, go, real = asyncio.Event(), asyncio.Event(), Coordinator.carry_out

    async def held(self: Coordinator, instruction: Instruction) -> Event:
        if isinstance(instruction, Announce):
            decided.set()
            await go.wait()
        return await real(self, instruction)

    monkeypatch.setattr(Coordinator, "carry_out", held)
    task = asyncio.create_task(trainer.run("update_weights", update_of(plane.model(1), "one"), "the-id"))
    await decided.wait()
    abort = asyncio.create_task(operator.run("abort_weights_update", {"update_id": "the-id"}))

    async def written() -> bool:
        return await operator.bus.get(operator.subjects().state, "cancel") is not None

    await plane.until(written)
    go.set()
    assert (await task)["version"]["label"] == "one"
    with pytest.raises(Conflict, match="committed as one"):
        await abort


async def test_the_trainer_of_a_prepared_update_hears_who_has_aborted_it(plane: Plane) -> None:
    trainer, operator = await plane.client("trainer"), await plane.client("operator")
    plane.spawn()
    await trainer.run("prepare_weights_update", update_of(plane.model(1), "one"), "the-id")
    await operator.run("abort_weights_update", {"update_id": "the-id"})
    with pytest.raises(UpdateAborted, match=f"aborted by {operator.owner}"):
        await trainer.run("complete_weights_update", {"update_id": "the-id"})

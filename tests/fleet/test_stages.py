"""Workers beside stages of a pipeline that have no weights: they skip what engines do, and count for nothing."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from rl_plane.bus.state_store import read_pause, read_record
from rl_plane.cli.show import show
from rl_plane.client import RlClient
from rl_plane.commit.rules import evaluate_prepare
from rl_plane.errors import NoWorkers, PlaneError, Unsupported
from rl_plane.fleet.fleet_call import FleetCall, check_engines
from rl_plane.fleet.fleet_replies import group_places
from rl_plane.membership.core import Member, MembershipCore, Snapshot
from rl_plane.membership.worker_calls import select_members
from rl_plane.membership.worker_reply import WorkerReply, skipped_reply
from rl_plane.protocol.envelope import engine_replies
from rl_plane.protocol.fleet_ops import FLEET_OPS, Select
from rl_plane.protocol.subjects import ADMISSION_PREFIX, Entry
from rl_plane.protocol.update_requests import UpdatePolicy
from rl_plane.protocol.validation import Empty, parse_body
from rl_plane.protocol.worker_ops import OPS
from rl_plane.publish import WeightPublisher
from tests.support.dialect_facade import PROMPT, facade, fine
from tests.support.phase_hooks import VARIABLE
from worker.engines.fake.adapter import STAGE, fake_token
from worker.receive.staging import model_digest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Plane, Spawned

BOUND_S = 30.0


def spawn_stage(plane: Plane, model: Path | None = None) -> Spawned:
    return plane.spawn(pipeline_stage="true", model=model)


def row_of(stage: Spawned, reply: dict[str, Any]) -> dict[str, Any]:
    (row,) = [row for row in reply["workers"] if row["instance_id"] == stage.instance_id]
    return {key: row[key] for key in ("status", "reason")}


SKIPPED = {"status": "skipped", "reason": STAGE}


def update_of(plane: Plane, seed: int) -> dict[str, Any]:
    return {"transport": {"backend": "filesystem", "path": str(plane.model(seed))}, "version": f"step_{seed}"}


# ---- pure ----


def member(name: str, revision: int, stage: str | None = None, incarnation: str = "i0") -> Member:
    info = {"engine": "fake", "world_size": 2} if stage is None else {"world_size": 0, "pipeline_stage": stage}
    return Member(name, incarnation, "server", revision, revision, info)


def fed(*members: Member) -> Snapshot:
    core = MembershipCore()
    for one in members:
        core.feed(Entry(f"w.{one.instance_id}", one.to_record(), one.revision))
    return core.snapshot()


ENGINE, OTHER, STAGE_ID = "0" * 16, "1" * 16, "2" * 16


def test_a_snapshot_is_of_the_engines_and_knows_the_stages_beside_them() -> None:
    alone = fed(member(ENGINE, 1))
    mixed = fed(member(ENGINE, 1), member(STAGE_ID, 2, "vision"))
    assert [one.instance_id for one in mixed] == [ENGINE]
    assert [(one.instance_id, one.pipeline_stage) for one in mixed.pipeline_stages] == [(STAGE_ID, "vision")]
    assert mixed.fingerprint == alone.fingerprint
    assert mixed.epoch == 2
    assert [one.instance_id for one in select_members(mixed, [STAGE_ID, ENGINE])] == [ENGINE]


def test_a_stage_that_returns_as_an_engine_is_an_engine_and_the_reverse() -> None:
    was_engine = fed(member(ENGINE, 1), member(ENGINE, 2, "vision", "i1"))
    assert (was_engine.members, len(was_engine.pipeline_stages)) == ((), 1)
    was_stage = fed(member(ENGINE, 1, "vision"), member(ENGINE, 2, None, "i1"))
    assert (len(was_stage), was_stage.pipeline_stages) == (1, ())


def test_a_stage_has_no_place_in_a_group() -> None:
    mixed = fed(member(ENGINE, 1), member(STAGE_ID, 2, "vision"), member(OTHER, 3))
    places = group_places(mixed, {"world_size": 3})
    assert places == {"world_size": 3, "rank_offsets": {ENGINE: 1, OTHER: 2}}
    places = group_places(mixed, {"world_size": 5, "form": "torch"})
    assert places["rank_offsets"] == {ENGINE: 1, OTHER: 3}


def call_of(op: str, **select: Any) -> FleetCall[Empty]:
    view: Any = None
    parsed = parse_body(Select, select)
    assert isinstance(parsed, Select)
    return FleetCall(FLEET_OPS[op], parsed, Empty(), view, "", False, 0.0)


def test_a_call_that_only_stages_skipped_is_no_success() -> None:
    vision = member(STAGE_ID, 2, "vision")
    mixed, stages = fed(member(ENGINE, 1), vision), fed(member("3" * 16, 1, "sound"), vision)
    for op in FLEET_OPS:
        check_engines(call_of(op), mixed)
        check_engines(call_of(op, workers=[ENGINE, STAGE_ID]), mixed)
        check_engines(call_of(op), fed())
        with pytest.raises(Unsupported, match="vision") as named:
            check_engines(call_of(op, workers=[STAGE_ID]), mixed)
        assert named.value.facts["workers"] == [skipped_reply(vision).to_wire()]
        if op != "abort_requests":  # what waits in the frontends ends all the same
            with pytest.raises(NoWorkers, match="vision"):
                check_engines(call_of(op), stages)


def test_engine_replies_leave_out_skipped_stages() -> None:
    ok, failed = {"instance_id": ENGINE, "status": "ok"}, {"instance_id": OTHER, "status": "error"}
    skipped = skipped_reply(member(STAGE_ID, 1, "vision")).to_wire()
    assert skipped == {"instance_id": STAGE_ID, "incarnation": "i0", "status": "skipped", "reason": "vision"}
    assert engine_replies({"workers": [ok, skipped, failed]}) == [ok, failed]


def test_the_cli_shows_a_stage_as_skipped() -> None:
    ok = [
        {"instance_id": one, "status": "ok", "ranks": [{"rank": 0, "checksum": "aa"}]} for one in (ENGINE, OTHER)
    ]
    reply = {"workers": [*ok, skipped_reply(member(STAGE_ID, 1, "vision")).to_wire()], "elapsed_s": 0.0}
    assert show("check_weights", reply, {"action": "checksum"}).endswith("all workers have equal weights")
    assert show("resume", reply, {}).startswith("resumed 2 workers")
    assert show("state", reply, {}).endswith(f"{STAGE_ID}: skipped: vision")


def test_a_row_that_says_skipped_has_prepared_nothing() -> None:
    """The rule holds for every worker's row."""
    ok = WorkerReply(ENGINE, "i0", "ok", {"digest": "blake3:1", "refetchable": True})
    skipped = WorkerReply(OTHER, "i0", "skipped", {"reason": "it says so"})
    with pytest.raises(PlaneError):
        evaluate_prepare([ok, skipped], {ENGINE, OTHER}, UpdatePolicy(), None)
    with pytest.raises(PlaneError):
        evaluate_prepare([skipped], set(), UpdatePolicy(on_prepare_failure="exclude"), None)
    prepared = evaluate_prepare([ok, skipped], {ENGINE}, UpdatePolicy(on_prepare_failure="exclude"), None)
    assert (dict(prepared.ready), prepared.excluded) == ({ENGINE: "i0"}, [OTHER])


# ---- on the wire ----


async def test_a_stage_answers_that_it_skips_and_why(plane: Plane) -> None:
    client = await plane.client()
    stage = spawn_stage(plane)
    subject = client.subjects().rl_direct(stage.instance_id)
    bodies: dict[str, dict[str, Any]] = {
        "tokenize": {"prompt": "a"},
        "detokenize": {"tokens": [1]},
        "init_transport": {"backend": "filesystem"},
        "destroy_transport": {"backend": "filesystem"},
        "set_admission": {"open": True},
        "abort_update": {"update_id": "one"},
    }

    async def ask(op: str, body: dict[str, Any]) -> dict[str, Any]:
        message = await client.bus.nc.request(
            subject, json.dumps({"op": op, "body": body}).encode(), timeout=BOUND_S
        )
        answer: dict[str, Any] = json.loads(message.data)
        return answer

    asked = 0
    for op in OPS:
        answer = await ask(op, bodies.get(op, {}))
        if OPS[op].of_pipeline_stage:
            assert answer["status"] == "ok"
        elif answer["status"] != "error":  # an op whose body must say more
            assert (answer["status"], answer["body"]) == ("skipped", {"reason": STAGE})
            asked += 1
    assert asked >= 15
    assert (await ask("pause", {"mode": "sleep"}))["error"]["field"] == "mode"
    row = await client.call(stage.instance_id, "resume")
    assert (row.status, row.body) == ("skipped", {"reason": STAGE})


async def test_an_engine_that_skips_has_failed(plane: Plane) -> None:
    """Only a worker that has registered as a stage may skip: all others serve the model."""
    client = await plane.client()
    liar = plane.spawn(
        patch="import worker.worker as w\n"
        "init = w.Dispatcher.__init__\n"
        "w.Dispatcher.__init__ = lambda self, *given: init(self, *given[:-1], 'it says so')"
    )
    with pytest.raises(PlaneError) as refusal:
        await client.run("pause", {})
    (row,) = refusal.value.facts["workers"]
    assert (row["instance_id"], row["status"]) == (liar.instance_id, "error")
    assert "an engine answers 'skipped'" in row["error"]["message"]


# ---- a mixed pipeline ----


async def test_the_ops_of_the_fleet_succeed_beside_a_stage(plane: Plane) -> None:
    client = await plane.client()
    ids = plane.spawn_copies(2)
    stage = spawn_stage(plane, plane.model(7))  # its model would be another one
    before = (await client.run("weight_version"))["version"]
    assert before["digest"] == model_digest(plane.model(0))
    ops: list[tuple[str, dict[str, Any]]] = [
        ("pause", {}),
        ("flush_cache", {}),
        ("release_memory", {}),
        ("resume_memory", {}),
        ("update_weights", update_of(plane, 1)),
        ("resume", {}),
        ("abort_requests", {}),
        ("check_weights", {"action": "checksum"}),
        ("prepare_weights_update", {**update_of(plane, 2)}),
        ("complete_weights_update", {}),
        ("prepare_weights_update", {**update_of(plane, 3)}),
        ("abort_weights_update", {}),
        ("describe", {}),
        ("state", {}),
        ("liveness", {}),
        ("ready", {}),
        ("weight_version", {}),
        ("workers", {}),
    ]
    for op, body in ops:
        reply = await client.run(op, body)
        assert reply["status"] == "ok"
        assert row_of(stage, reply) == SKIPPED, op
        engines = engine_replies(reply)
        assert all(row["status"] == "ok" for row in engines)
        assert [row["instance_id"] for row in engines] == ([] if op == "abort_weights_update" else ids), op
        assert not reply.get("excluded"), op
    (listed,) = [row for row in reply["workers"] if row["instance_id"] == stage.instance_id]
    assert (listed["engine"], listed["pipeline_stage"], listed["component"]) == ("fake", STAGE, plane.component)
    assert sum(row["world_size"] for row in reply["workers"]) == 2
    state = await client.run("state")
    assert (state["ready"], state["applied_weight_version"], state["pause_state"]) == (True, "step_2", "running")
    updates = (await client.run("updates"))["updates"]
    assert [sorted(one["workers"]) for one in updates if one["version"] and one["workers"]] == [ids, ids]
    assert (await client.run("new_run", {}))["version"]["digest"] == before["digest"], "the engines' model alone"
    assert len(await client.list_workers()) == 2


async def test_an_op_on_a_stage_alone_is_refused(plane: Plane) -> None:
    client = await plane.client()
    engine, stage = plane.spawn(), spawn_stage(plane)
    both = [engine.instance_id, stage.instance_id]
    for op in ("pause", "resume", "flush_cache", "release_memory", "check_weights", "disable", "liveness"):
        with pytest.raises(Unsupported, match="means pipeline stages only") as refusal:
            await client.run(op, {"workers": [stage.instance_id]})
        assert refusal.value.http_status == 501
        assert row_of(stage, refusal.value.facts) == SKIPPED
    entry = await client.bus.get(client.subjects().state, ADMISSION_PREFIX + stage.instance_id)
    assert entry is None, "something was written for it"
    reply = await client.run("pause", {"workers": both})
    assert [row["status"] for row in reply["workers"]] == ["ok", "skipped"]
    assert (await client.run("state", {"workers": [stage.instance_id]}))["ready"] is False


async def test_trainers_see_the_engines_and_who_has_skipped(plane: Plane) -> None:
    ids = plane.spawn_copies(2)
    stage = spawn_stage(plane)
    told = {stage.instance_id: STAGE}
    async with facade(plane) as http:
        for path in ("/model_info", "/pause_generation", "/continue_generation"):
            assert fine(await http.post(path, json={}))["skipped"] == told
        reply = fine(await http.get("/server_info"))
        assert (reply["num_gpus"], reply["dp_size"], sorted(reply["engines"])) == (2, 2, ids)
        assert fine(await http.get("/get_world_size"))["world_size"] == 2
        assert "vllm_config" in fine(await http.get("/server_info?config_format=json"))
        for path in ("/flush_cache", "/abort_requests", "/release_memory_occupation", "/resume_memory_occupation"):
            fine(await http.post(path, json={}))
        body = {"model_path": str(plane.model(1)), "weight_version": "one"}
        reply = fine(await http.post("/update_weights_from_disk", json=body))
        assert f"{stage.instance_id}: skipped: {STAGE}" in reply["message"]
        for action in ("checksum", "snapshot", "compare"):
            reply = fine(await http.post("/weights_checker", json={"action": action}))
            assert sorted(rank["instance_id"] for rank in reply["ranks"]) == ids
        assert fine(await http.get("/get_weight_version"))["weight_version"] == "one"
        fine(await http.post("/sleep", json={}))
        assert fine(await http.post("/wake_up", json={}))["status"] == "awake"
        listed = fine(await http.get("/v1/rl/workers"))
        assert row_of(stage, listed) == SKIPPED

        # Requests go to engines.
        asked = {"prompt": "", "prompt_token_ids": PROMPT, "max_tokens": 2, "return_token_ids": True}
        replies = [await http.post("/v1/completions", json=asked) for _ in range(6)]
        digest = model_digest(plane.model(1))
        for reply in map(fine, replies):
            assert reply["choices"][0]["token_ids"] == [fake_token(digest, PROMPT, place) for place in range(2)]
            assert reply["nvext"]["instance_id"] in ids
        pinned = {**asked, "nvext": {"instance_id": stage.instance_id}}
        response = await http.post("/v1/completions", json=pinned)
        assert response.status_code == 404
        assert STAGE in response.json()["error"]["message"]


async def test_a_stage_joins_a_fleet_that_stands_still(plane: Plane) -> None:
    client = await plane.client()
    plane.spawn()
    await client.run("pause", {})
    await client.run("release_memory", {})
    stage = spawn_stage(plane)
    assert row_of(stage, await client.run("resume_memory", {})) == SKIPPED
    assert (await client.call(stage.instance_id, "liveness")).ok


@pytest.mark.parametrize("transport", ["auto", "gloo"])
async def test_a_published_version_goes_to_the_engines_only(plane: Plane, transport: str) -> None:
    """This also holds for a group, which every rank of the fleet has to join."""
    client = await plane.client()
    plane.spawn_copies(2)
    stage = spawn_stage(plane)
    root = plane.tmp / "weights" / "published"
    publisher = WeightPublisher(plane.model(1), client, root=root, workers=2, transport=transport)
    reply = (await publisher.publish_async("one")).result()
    assert row_of(stage, reply) == SKIPPED
    assert (reply["version"]["digest"], reply["excluded"]) == (model_digest(plane.model(1)), [])
    publisher.close()


class Held:
    """Engines whose ops wait while the test says so."""

    def __init__(self, plane: Plane) -> None:
        self.folder = plane.tmp / "holds"
        self.folder.mkdir()
        self.patch = f"import os; os.environ[{VARIABLE!r}] = {str(self.folder)!r}"

    def hold(self, point: str) -> None:
        (self.folder / point).touch()

    def let_go(self, point: str) -> None:
        (self.folder / point).unlink()

    async def reached(self, plane: Plane, point: str, workers: int) -> None:
        def all_there() -> bool:
            return len(list(self.folder.glob(f"reached.{point}.*"))) == workers

        await plane.until(all_there, BOUND_S)


@pytest.mark.parametrize("point", ["prepare_update.before", "gate.before", "commit_update.before"])
async def test_stages_that_die_join_or_stand_still_do_not_disturb_an_update(plane: Plane, point: str) -> None:
    client, held = await plane.client(), Held(plane)
    engines = plane.spawn_many(2, patch=held.patch)
    dying, still = spawn_stage(plane), spawn_stage(plane)
    pinned = await client.list_workers()
    held.hold(point)
    body = {**update_of(plane, 1), "fingerprint": pinned.fingerprint}
    update = asyncio.create_task(client.run("update_weights", body))
    await held.reached(plane, point, len(engines))
    still.stop()
    dying.kill()
    joining = spawn_stage(plane)
    await plane.until(lambda: _beside(client, still, joining), BOUND_S)
    assert not update.done()
    held.let_go(point)
    reply = await update
    assert (reply["version"]["label"], reply["excluded"]) == ("step_1", [])
    assert [row["instance_id"] for row in engine_replies(reply)] == sorted(one.instance_id for one in engines)
    assert all(row["status"] == "ok" for row in engine_replies(reply))
    assert row_of(joining, reply) == SKIPPED
    assert reply["fingerprint"] == pinned.fingerprint
    assert (await client.run("ready"))["ready"]
    still.go_on()


async def _beside(client: RlClient, *stages: Spawned) -> bool:
    """Are these the stages, or at least the stages that do not yet count as hung?"""
    there = {stage.instance_id for stage in (await client.list_workers()).pipeline_stages}
    return stages[-1].instance_id in there and there <= {stage.instance_id for stage in stages}


async def test_a_killed_stage_leaves_and_a_terminated_stage_leaves_too(plain_plane: Plane) -> None:
    """The server announces no death. The plane checks stages like engines."""
    plane = plain_plane
    client = await plane.client()
    plane.spawn()
    killed, ended = spawn_stage(plane), spawn_stage(plane)
    assert len((await client.list_workers()).pipeline_stages) == 2
    killed.kill()
    ended.signal(15)
    assert ended.process.wait(BOUND_S) == 0

    async def gone() -> bool:
        return not (await client.list_workers()).pipeline_stages

    await plane.until(gone)
    assert len((await client.run("pause", {}))["workers"]) == 1


async def test_a_stage_is_no_success_when_the_last_engine_dies_under_a_call(plane: Plane) -> None:
    client, held = await plane.client(), Held(plane)
    engine, stage = plane.spawn(patch=held.patch), spawn_stage(plane)
    held.hold("pause.before")
    pause = asyncio.create_task(client.run("pause", {}))
    await held.reached(plane, "pause.before", 1)
    engine.kill()
    with pytest.raises(NoWorkers, match="means pipeline stages only") as refusal:
        await pause
    assert row_of(stage, refusal.value.facts) == SKIPPED
    assert not (await read_pause(client.bus, client.subjects().state)).paused


# ---- stages alone ----


async def test_stages_alone_do_nothing_and_say_so(plane: Plane) -> None:
    client = await plane.client()
    one, two = spawn_stage(plane, plane.model(7)), spawn_stage(plane, plane.tmp)  # where no weights are to be read
    for op, body in (("pause", {}), ("update_weights", update_of(plane, 1)), ("ready", {}), ("state", {})):
        with pytest.raises(NoWorkers, match="and 2 pipeline stages"):
            await client.run(op, {**body, "wait_s": 0})
    for op in ("pause", "resume", "flush_cache", "release_memory", "check_weights", "liveness"):
        with pytest.raises(NoWorkers, match="means pipeline stages only") as refusal:
            await client.run(op, {"min_workers": 0})
        assert row_of(one, refusal.value.facts) == SKIPPED
    state = await client.run("state", {"min_workers": 0})
    assert (row_of(two, state), state["ready"]) == (SKIPPED, False)
    assert (await client.run("abort_requests", {}))["waiting"] == 0

    # They have fixed nothing: the first engine's model is sequence 0.
    assert await read_record(client.bus, client.subjects().state) is None
    plane.spawn()
    assert (await client.run("weight_version"))["version"]["digest"] == model_digest(plane.model(0))

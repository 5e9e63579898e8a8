"""Trainers of SGLang's dialect whose updates are disturbed: by a death, by another caller, by their own end."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest

from frontend.dialects.sglang import sglang_session
from frontend.dialects.sglang.open_sessions import Opened
from frontend.dialects.sglang.sglang_session import Updates
from frontend.frontend_limits import FrontendLimits
from rl_plane.bus.lock import DEFAULT_LOCK_WAIT_S, Holder, read_holder
from rl_plane.errors import BusUnreachable, EngineFailed, Locked
from tests.support.broadcast_trainer import HOST, BroadcastTrainer, parts_of
from tests.support.broadcast_updates import GLOO_S
from tests.support.dialect_facade import (
    HEAL_S,
    facade,
    fine,
    proven,
    refused,
    refused_before,
    served,
    taken_before,
)
from tests.support.free_port import free_port
from tests.support.hf_fleet import Witnesses
from tests.support.sglang_calls import aborts_what_runs
from tests.support.sglang_replay import Replay
from worker.engines.fake.fake_model import make_fake_adapter

if TYPE_CHECKING:
    from rl_plane.client import RlClient
    from tests.conftest import Plane

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
WORKERS = 2
BUCKETS = 4
ENDS_S = 30.0
"""Every side has its error by then."""


async def test_a_worker_killed_between_buckets_ends_only_the_running_update(plane: Plane) -> None:
    """The trainer gets an error, the fleet keeps the version it served, and the same trainer continues with the
    workers left."""
    witnesses = Witnesses(plane)
    ids = await asyncio.to_thread(witnesses.spawn, WORKERS)
    with BroadcastTrainer(plane) as trainer:
        async with facade(plane) as http:
            replay = Replay(http, trainer)
            assert fine(await replay.form("first"))["success"] is True
            await replay.post("/pause_generation")
            directory = witnesses.base(2)
            first, second, *_ = parts_of(directory, BUCKETS)
            fine(await replay.send("first", directory, first))
            doomed = plane.spawned[0]
            doomed.kill()
            told = {"group": "first", "directory": str(directory), "part": second}
            async with asyncio.timeout(ENDS_S):
                call = http.post("/update_weights_from_distributed", json={**second, "group_name": "first"})
                sent = asyncio.create_task(trainer.do("send", told))
                refused(await call, 409)
                with contextlib.suppress(EngineFailed):  # it may have had another child than the dead one
                    await sent
            error = refused(await http.post("/continue_generation", json={}), 409)
            assert "generation continues by the committed version" in error["message"]
            left = [one for one in ids if one != doomed.instance_id]
            await plane.until(lambda: _are(http, left), HEAL_S)
            await proven(http, left, 1)
            await replay.form("second")
            await replay.post("/pause_generation")
            for part in parts_of(directory, BUCKETS):
                fine(await replay.send("second", directory, part, weight_version="after"))
            await replay.post("/continue_generation")
            await proven(http, left, 2, "after")


async def test_each_end_call_reports_an_update_that_was_lost_after_its_last_part(plane: Plane) -> None:
    """The reason of the loss and the number of repeated calls make no difference: each call reports the loss."""
    for one in (plane.spawn(ready=False), plane.spawn(ready=False), plane.spawn(ready=False)):
        await asyncio.to_thread(one.wait_ready)
    with BroadcastTrainer(plane) as trainer:
        async with facade(plane) as http, facade(plane) as other:
            replay = Replay(http, trainer)
            groups = iter(f"g{number}" for number in range(9))

            async def send(seed: int, opening: str) -> None:
                group = next(groups)
                assert fine(await replay.form(group))["success"] is True
                fine(await http.post(opening, json={}))
                for part in parts_of(plane.model(seed), 2):
                    fine(await replay.send(group, plane.model(seed), part, weight_version=str(seed)))

            async def is_lost(label: str) -> None:
                for path in ("/end_weight_update", "/continue_generation") * 2:
                    for at in (http, other):
                        error = refused(await at.post(path, json={}), 409)
                        assert error["code"] == "update_aborted", (path, error)
                assert {*await served(http)} == {(True, label)}, "no worker waits for it"

            # Another client's call has committed it, as the trainer wanted.
            await send(1, "/pause_generation")
            fine(await http.post("/v1/rl/complete_weights_update", json={}))
            assert fine(await other.post("/continue_generation", json={}))["weight_version"] == "1"
            assert "nothing has changed" in fine(await http.post("/end_weight_update", json={}))["message"]
            assert await served(http) == [(True, "1")] * 3
            # Aborted, and dropped by a trainer that begins anew.
            await send(2, "/pause_generation")
            fine(await other.post("/v1/rl/abort_weights_update", json={}))
            await is_lost("1")
            await send(2, "/begin_weight_update")
            assert "not committed" in refused(await http.get("/flush_cache"), 400)["message"]
            assert fine(await replay.form(next(groups)))["success"] is True
            await is_lost("1")
            # By a worker that dies: the end says so, and says it again; or a change in between has cleared it away.
            for change in (False, True):
                await send(2, "/begin_weight_update")
                (doomed, *left) = [row["instance_id"] for row in fine(await http.get("/v1/rl/state"))["workers"]]
                next(one for one in plane.spawned if one.instance_id == doomed).kill()
                await plane.until(lambda left=left: _are(http, left), HEAL_S)
                if change:
                    adapter = str(make_fake_adapter(plane.tmp / "weights" / "adapter", 1, plane.model()))
                    await replay.post("/load_lora_adapter", {"lora_name": "a", "lora_path": adapter})
                await is_lost("1")
            # The next one is opened: nothing was sent of it.
            await replay.post("/pause_generation")
            assert "weight_version" not in await replay.post("/continue_generation")
            await send(2, "/pause_generation")
            assert (await replay.post("/continue_generation"))["weight_version"] == "2"
            assert {*await served(http)} == {(True, "2")}


async def test_a_trainer_that_begins_anew_does_not_join_what_it_has_left(plane: Plane) -> None:
    """An update that cannot be dropped while another caller has the fleet: its groups form after that, or not at
    all."""
    for one in (plane.spawn(ready=False), plane.spawn(ready=False)):
        await asyncio.to_thread(one.wait_ready)
    client = await plane.client()
    with BroadcastTrainer(plane) as trainer:
        async with facade(plane) as http:
            replay = Replay(http, trainer)

            async def send(group: str, seed: int, count: int) -> list[Any]:
                sent = [
                    fine(await replay.send(group, plane.model(seed), part, weight_version=str(seed)))
                    for part in parts_of(plane.model(seed), 2)[:count]
                ]
                return [one.get("weight_version") for one in sent]

            fine(await replay.form("first"))
            await send("first", 1, 1)
            async with taken_before(client, "abort_weights_update"):
                fine(await replay.form("second"))
            assert await send("second", 1, 2) == [None, "1"]
            await send("second", 2, 1)
            async with facade(plane, limits=FrontendLimits(drop_wait_s=0.0)) as hasty:
                asked = {"master_address": HOST, "master_port": free_port(), "rank_offset": 1, "world_size": 3}
                async with refused_before("abort_weights_update", Locked("taken", retry_after_s=1.0)):
                    error = refused(await hasty.post("/init_weights_update_group", json=asked), 503)
                assert error["code"] == "locked", "no worker has joined"
            fine(await replay.form("third"))
            assert await send("third", 2, 2) == [None, "2"]
            assert await served(http) == [(True, "2")] * 2


async def test_an_update_keeps_its_name_at_another_frontend(plane: Plane) -> None:
    """Given with a part, or between the last of them and the end."""
    await asyncio.to_thread(plane.spawn(ready=False).wait_ready)
    with BroadcastTrainer(plane) as trainer:
        async with facade(plane) as http, facade(plane) as other:
            replay = Replay(http, trainer)
            assert fine(await replay.form("g"))["success"] is True
            for seed, at in ((1, None), (2, http), (1, other)):
                await replay.post("/begin_weight_update")
                for number, part in enumerate(parts_of(plane.model(seed), 2)):
                    fine(await replay.send("g", plane.model(seed), part, weight_version=f"part {number}"))
                if at is not None:
                    named = {"new_version": "seven", "abort_all_requests": False}
                    fine(await at.post("/update_weight_version", json=named))
                label = "part 1" if at is None else "seven"
                assert fine(await other.post("/end_weight_update", json={}))["weight_version"] == label
                assert await served(http) == [(True, label)]


async def test_requests_are_aborted_if_any_broadcast_of_an_update_says_so(plane: Plane) -> None:
    await asyncio.to_thread(plane.spawn(ready=False, token_delay_s=0.01).wait_ready)
    with BroadcastTrainer(plane) as trainer:
        async with facade(plane) as http:
            replay = Replay(http, trainer)
            assert fine(await replay.form("g"))["success"] is True
            for seed, says in ((1, (True, False)), (2, (False, True))):
                async with aborts_what_runs(http):
                    for part, one in zip(parts_of(plane.model(seed), 2), says, strict=True):
                        fine(await replay.send("g", plane.model(seed), part, abort_all_requests=one))
                assert fine(await http.get("/v1/rl/state"))["sequence"] == seed


async def test_an_update_is_ended_by_its_own_dialect_alone(plane: Plane) -> None:
    """vLLM's trainer sends, and another caller resumes the fleet by SGLang's call, and the reverse."""
    for one in (plane.spawn(ready=False), plane.spawn(ready=False)):
        await asyncio.to_thread(one.wait_ready)
    with BroadcastTrainer(plane) as trainer:
        async with facade(plane) as http:
            replay = Replay(http, trainer)
            port = free_port()
            init = {"backend": "gloo", "group_name": "v", "master_address": HOST, "master_port": port}
            formed, _ = await asyncio.gather(
                http.post("/init_weight_transfer_engine", json={"init_info": {**init, "world_size": 3}}),
                trainer.do("form", {"group": "v", "port": port, "world_size": 3, "timeout_s": GLOO_S}),
            )
            fine(formed)
            fine(await http.post("/start_weight_update", json={}))
            for part in parts_of(plane.model(1), 2):
                info = {"names": part["names"], "dtype_names": part["dtypes"], "shapes": part["shapes"]}
                told = {"group": "v", "directory": str(plane.model(1)), "part": part}
                reply, _ = await asyncio.gather(
                    http.post("/update_weights", json={"update_info": info}), trainer.do("send", told)
                )
                fine(reply)
                assert "weight_version" not in await replay.post("/continue_generation")
                assert "nothing has changed" in (await replay.post("/end_weight_update"))["message"]
                fine(await http.get("/flush_cache"))
            fine(await http.post("/finish_weight_update", json={"weight_version": "vllm"}))
            assert await served(http) == [(True, "vllm")] * 2
            assert fine(await replay.form("s"))["success"] is True
            await replay.post("/begin_weight_update")
            (whole,) = parts_of(plane.model(2), 1)
            fine(await replay.send("s", plane.model(2), whole, weight_version="sglang"))
            refused(await http.post("/finish_weight_update", json={"weight_version": "vllm's next"}), 409)
            assert (await replay.post("/end_weight_update"))["weight_version"] == "sglang"
            assert await served(http) == [(True, "sglang")] * 2


async def test_an_update_outlasts_another_callers_change_of_the_fleet(plane: Plane) -> None:
    """An update is not lost when another caller changes the fleet in between: each call of an update waits for that,
    and says what has become of it."""
    for one in (plane.spawn(ready=False), plane.spawn(ready=False)):
        await asyncio.to_thread(one.wait_ready)
    client = await plane.client()
    with BroadcastTrainer(plane) as trainer:
        async with facade(plane) as http:
            replay = Replay(http, trainer)
            assert fine(await replay.form("g"))["success"] is True
            for step in (
                _taken_at_the_last_bucket,
                _taken_for_longer_than_a_silence,
                _taken_in_two_phases,
                _refused_at_the_end,
            ):
                print(step.__name__)
                await step(replay, plane, client)


async def _taken_at_the_last_bucket(replay: Replay, plane: Plane, client: RlClient) -> None:
    first, last = parts_of(plane.model(1), 2)
    fine(await replay.send("g", plane.model(1), first))
    async with taken_before(client, "receive_weights_part"), taken_before(client, "complete_weights_update"):
        told = fine(await replay.send("g", plane.model(1), last, weight_version="one"))
    assert told["weight_version"] == "one"
    # For too long: it is not sent again, and not lost.
    fine(await replay.send("g", plane.model(2), first))
    async with refused_before("complete_weights_update", Locked("taken", retry_after_s=1.0)):
        answer = await replay.send("g", plane.model(2), last, weight_version="two")
    error = refused(answer, 409)
    assert (error["cause"], "end_weight_update" in error["fix"]) == ("locked", True)
    assert (await replay.post("/end_weight_update"))["weight_version"] == "two"
    # Nor by a NATS that is away then: a 503 would bring its tensors twice.
    fine(await replay.send("g", plane.model(1), first))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Updates, "parts_standing", _unreachable)
        async with refused_before("complete_weights_update", Locked("taken", retry_after_s=1.0)):
            answer = await replay.send("g", plane.model(1), last, weight_version="one")
    assert refused(answer, 409)["cause"] == "locked"
    assert (await replay.post("/end_weight_update"))["weight_version"] == "one"


async def _taken_for_longer_than_a_silence(replay: Replay, plane: Plane, client: RlClient) -> None:
    """An update stays open while one of its calls waits, and is not committed before its end."""
    (whole,) = parts_of(plane.model(2), 1)
    async with facade(plane, limits=FrontendLimits(session_idle_s=int(DEFAULT_LOCK_WAIT_S))) as http:
        hasty = Replay(http, replay.trainer)
        await hasty.post("/begin_weight_update")
        async with taken_before(client, "receive_weights_part"):
            told = fine(await hasty.send("g", plane.model(2), whole, weight_version="two"))
    assert "0 are missing" in told["message"]
    assert (await served(replay.http))[0][1] == "one"
    assert (await replay.post("/end_weight_update"))["weight_version"] == "two"


async def _unreachable(*_: Any) -> Any:
    raise BusUnreachable("NATS was away for a moment")


async def _taken_in_two_phases(replay: Replay, plane: Plane, client: RlClient) -> None:
    """The answer `ready` comes only when every rank listens. If the caller does not get it, no rank still listens."""
    http, buckets = replay.http, parts_of(plane.model(1), 2)
    body = {"num_buckets": len(buckets), "buckets": buckets, "group_name": "g"}
    unknown = [{**one, "dtypes": ["fp4"] * len(one["dtypes"])} for one in buckets]
    refused(await http.post("/prepare_weights_update", json={**body, "buckets": unknown}), 400)
    refused(await http.post("/update_weights_from_distributed", json={**unknown[0], "group_name": "g"}), 400)
    fine(await http.post("/v1/rl/flush_cache", json={}))  # no update waits
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Opened, "takes_more", _unreachable)
        error = refused(await http.post("/prepare_weights_update", json=body), 409)
    assert error["cause"] == "bus_unreachable"
    fine(await http.post("/v1/rl/flush_cache", json={}))
    looks: list[object] = []

    async def once_unreachable(*asked: Any) -> Holder | None:
        looks.append(asked)
        return await (_unreachable() if len(looks) == 1 else read_holder(*asked))

    async with taken_before(client, "receive_weights_part", lambda body: not body.get("check_only")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sglang_session, "read_holder", once_unreachable)
            assert (await replay.post("/prepare_weights_update", body))["status"] == "ready"
        assert len(looks) > 1
        holder = await read_holder(client.bus, (await client.view()).subjects.state)
    assert holder is not None
    assert "update_id" in holder, "who has the fleet is its feed"
    for part in buckets:
        await replay.trainer.do("send", {"group": "g", "directory": str(plane.model(1)), "part": part})
    asked = {"group_name": "g", "weight_version": "three"}
    async with refused_before("complete_weights_update", Locked("taken", retry_after_s=1.0)):
        error = refused(await http.post("/complete_weights_update", json=asked), 409)
    assert error["cause"] == "locked"
    error = refused(await http.post("/prepare_weights_update", json=body), 409)
    assert "complete_weights_update" in error["fix"]
    async with taken_before(client, "complete_weights_update"):
        done = await replay.post("/complete_weights_update", asked)
    assert await replay.post("/complete_weights_update", asked) == done, "its answer was lost"
    error = refused(await http.post("/complete_weights_update", json={"weight_version": "x"}), 409)
    assert error["field"] == "weight_version"
    assert await replay.post("/complete_weights_update") == done, "it keeps its label"
    assert await served(http) == [(True, "three")] * 2
    # Named before it is sent, while its feed has the fleet.
    assert (await replay.post("/prepare_weights_update", body))["status"] == "ready"
    await replay.post("/update_weight_version", {"new_version": "early", "abort_all_requests": False})
    for part in buckets:
        await replay.trainer.do("send", {"group": "g", "directory": str(plane.model(1)), "part": part})
    done = await replay.post("/complete_weights_update")
    assert await replay.post("/complete_weights_update") == done
    assert await served(http) == [(True, "early")] * 2
    await replay.post("/update_weights_from_disk", {"model_path": str(plane.model(2))})
    error = refused(await http.post("/complete_weights_update", json=asked), 409)
    assert "no update is prepared" in error["message"], "another one has come since"


async def _refused_at_the_end(replay: Replay, plane: Plane, client: RlClient) -> None:
    """miles names its update before it ends it, and says that once."""
    (whole,) = parts_of(plane.model(1), 1)
    for path, label in (("/end_weight_update", "four"), ("/continue_generation", "five")):
        await replay.post("/pause_generation", {"mode": "retract"})
        await replay.post("/begin_weight_update", {"selector": "all"})
        fine(await replay.send("g", plane.model(1), whole))
        async with taken_before(client, "label_weights_update"):
            await replay.post("/update_weight_version", {"new_version": label, "abort_all_requests": False})
        async with refused_before("complete_weights_update", Locked("taken", retry_after_s=1.0)):
            error = refused(await replay.http.post(path, json={}), 409)
        assert error["cause"] == "locked"
        assert (await replay.post(path))["weight_version"] == label
        await replay.post("/continue_generation")
        assert await served(replay.http) == [(True, label)] * 2


async def test_a_part_sent_to_a_lost_fleet_is_a_409_and_no_503(plane: Plane) -> None:
    """The answer is no 503, because a trainer would send the part again."""
    plane.spawn()
    with BroadcastTrainer(plane) as trainer:
        async with facade(plane) as http:
            replay = Replay(http, trainer)
            assert fine(await replay.form("g"))["success"] is True
            first, last = parts_of(plane.model(1), 2)
            fine(await replay.send("g", plane.model(1), first))
            plane.kill_all()
            call = http.post("/update_weights_from_distributed", json={**last, "group_name": "g"})
            refused(await call, 409)


async def test_a_group_fails_if_its_trainer_miscounts_or_dies(plane: Plane) -> None:
    """A trainer with a wrong count gets an error at once. If a trainer dies while the group forms, the workers stay
    closed until they are enabled."""
    witnesses = Witnesses(plane)
    await asyncio.to_thread(witnesses.spawn, 1)
    worker = plane.spawned[0].process.pid
    async with facade(plane) as http:
        with BroadcastTrainer(plane) as trainer:
            replay = Replay(http, trainer)
            port = free_port()
            body = {
                "master_address": HOST,
                "rank_offset": 1,
                "group_name": "g",
                "backend": "gloo",
                "master_port": port,
            }
            error = refused(await http.post("/init_weights_update_group", json={**body, "world_size": 3}), 400)
            assert error["field"] == "world_size"
            # A rank of the trainer's own is missing, so no rank gets further than the store.
            held = asyncio.create_task(
                http.post("/init_weights_update_group", json={**body, "world_size": 3, "rank_offset": 2})
            )
            formed = asyncio.create_task(
                trainer.do("form", {"group": "g", "port": port, "world_size": 3, "timeout_s": GLOO_S})
            )
            await plane.until(lambda: _has_come(worker, port), HEAL_S)
            trainer.kill()
            async with asyncio.timeout(ENDS_S):
                refused(await held, 409)
            with pytest.raises(AssertionError):
                await formed
            assert [one[0] for one in await served(http)] == [False]
            (row,) = fine(await http.get("/v1/rl/state"))["workers"]
            assert row["admission"]["reasons"][0].startswith("disabled")
            fine(await http.post(f"/v1/rl/workers/{row['instance_id']}/enable"))
        with BroadcastTrainer(plane) as trainer:
            replay = Replay(http, trainer)
            assert fine(await replay.form("again"))["success"] is True
            assert [one[0] for one in await served(http)] == [True]


async def _are(http: httpx.AsyncClient, ids: list[str]) -> bool:
    return [row["instance_id"] for row in fine(await http.get("/v1/rl/state"))["workers"]] == ids


def _has_come(process: int, port: int) -> bool:
    """To the trainer's store: before, it would wait for a trainer that may be late."""
    lines = psutil.Process(process).net_connections("tcp")
    return any(line.raddr and line.raddr.port == port and line.status == "ESTABLISHED" for line in lines)

"""The calls of trainers that speak to SGLang, in their order and with their bodies: over real models, with a real torch
group of a trainer in another process. The tokens tell what is served."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest

pytest.importorskip("torch")
pytest.importorskip("peft")

from safetensors.torch import load_file, save_file

from frontend.dialects.sglang import sglang_session
from frontend.dialects.sglang.body_tensors import HeldTensors
from frontend.dialects.sglang.open_sessions import Opened
from frontend.dialects.sglang.sglang_session import Updates
from rl_plane.bus.lock import DEFAULT_LOCK_WAIT_S, Holder, read_holder
from rl_plane.errors import BusUnreachable, EngineFailed, Locked
from tests.support.broadcast_trainer import HOST, BroadcastTrainer, parts_of
from tests.support.broadcast_updates import GLOO_S, free_port
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
from tests.support.hf_fleet import START_S, Witnesses
from tests.support.sglang_calls import aborts_what_runs, one_by_one
from tests.support.sglang_replay import Replay
from worker.engines.fake.fake_model import make_fake_adapter
from worker.receive.staging import TIE_FIX
from worker.testing.tiny_model import make_tiny_model

if TYPE_CHECKING:
    from rl_plane.client import RlClient
    from tests.conftest import Plane
    from tests.support.commanded_process import CommandedProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

WORKERS = 2
BUCKETS = 4
ENDS_S = 30.0
"""Every side has its error by then."""


async def test_trainers_that_speak_to_sglang(plane: Plane) -> None:
    witnesses = Witnesses(plane)
    ids = await asyncio.to_thread(witnesses.spawn, WORKERS)
    with BroadcastTrainer(plane) as trainer:
        async with facade(plane) as http:
            replay = Replay(http, trainer)
            for one in (_slime, _miles, _areal, _two_phases, _without_a_pause, _from_disk, _verl, _nemo_rl):
                print(one.__name__)
                await one(replay, witnesses, ids)


async def _slime(replay: Replay, witnesses: Witnesses, ids: list[str]) -> None:
    """A group for each stage of the trainer's pipeline; each bucket by a call; one step after another."""
    http = replay.http
    info = fine(await http.get("/server_info"))
    assert (info["num_gpus"], info["tp_size"], info["disaggregation_mode"]) == (WORKERS, 1, "null")
    assert (await http.get("/health_generate", timeout=5)).status_code == 200
    groups = ("slime-pp_0", "slime-pp_1")
    for group in groups:
        assert fine(await replay.form(group))["success"] is True
    for step, seed in ((1, 2), (2, 3)):
        directory = witnesses.base(seed)
        assert (await replay.post("/pause_generation"))["status"] == "ok"
        await replay.flush()
        for number, part in enumerate(parts_of(directory, BUCKETS)):
            body = {"flush_cache": False, "weight_version": str(step)}
            reply = await replay.send(groups[number % 2], directory, part, **body)
            assert fine(reply)["success"] is True
            # Its answer was lost on the way, and a rollout's client came between: the same call, and no broadcast.
            await replay.http.post("/abort_request", json={"rid": "nobody"})
            again = {**part, "group_name": groups[number % 2], **body}
            assert await replay.post("/update_weights_from_distributed", again) == reply.json()
            assert (await served(http))[0][1] == ("initial" if step == 1 else "1"), "nothing has changed yet"
        await replay.post("/continue_generation")
        await proven(http, ids, seed, str(step))
    # An abort of what runs, as before an evaluation.
    (worker,) = fine(await http.get("/workers"))["workers"]
    assert (await http.post(f"{worker['url']}/abort_request", json={"abort_all": True})).status_code == 200
    loads = fine(await http.get(f"{worker['url']}/v1/loads?include=core"))["loads"]
    assert sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads) == 0
    for group in groups:
        await replay.leave(group)


async def _miles(replay: Replay, witnesses: Witnesses, ids: list[str]) -> None:
    """Within begin and end, named between them, in flattened buckets."""
    http, directory = replay.http, witnesses.base(1)
    assert (await http.get("/health_generate")).status_code == 200
    assert fine(await http.get("/get_server_info"))["num_gpus"] == WORKERS
    assert fine(await replay.form("miles"))["success"] is True
    await replay.post("/pause_generation", {"mode": "retract"})
    await replay.flush()
    assert (await replay.post("/begin_weight_update", {"selector": "all"}))["success"] is True
    for part in parts_of(directory, BUCKETS):
        body = {"load_format": "flattened_bucket", "flush_cache": False, "abort_all_requests": False}
        assert fine(await replay.send("miles", directory, part, **body))["success"] is True
    named = await replay.post("/update_weight_version", {"new_version": "7", "abort_all_requests": False})
    assert named["new_version"] == "7"
    assert (await replay.post("/end_weight_update"))["success"] is True
    assert fine(await http.get("/model_info"))["weight_version"] == "7"
    await replay.post("/continue_generation")
    await proven(http, ids, 1, "7")
    await replay.leave("miles")


async def _areal(replay: Replay, witnesses: Witnesses, ids: list[str]) -> None:
    """Replays AReaL's update. It sends the port as a text, and sends aborted requests again."""
    http, directory = replay.http, witnesses.base(2)
    assert (await http.get("/health")).status_code == 200
    assert fine(await replay.form("update_weight_group", port_type=str))["success"] is True
    await replay.post("/pause_generation")
    for part in parts_of(directory, BUCKETS):
        assert fine(await replay.send("update_weight_group", directory, part, abort_all_requests=True))["success"]
    await replay.post("/continue_generation")
    await proven(http, ids, 2)
    await replay.leave("update_weight_group")


async def _two_phases(replay: Replay, witnesses: Witnesses, ids: list[str]) -> None:
    """SGLang-Omni: all buckets are announced at once, and broadcast without a call."""
    http, directory = replay.http, witnesses.base(3)
    assert fine(await replay.form("weight_sync_group"))["success"] is True
    buckets = parts_of(directory, BUCKETS)
    body = {"num_buckets": len(buckets), "buckets": buckets, "group_name": "weight_sync_group"}
    # What is not the model's is told before anything is sent, and leaves the group as it is.
    first, *others = buckets
    for wrong, field, words in (
        ([{**first, "shapes": [[1], *first["shapes"][1:]]}, *others], "transport", first["names"][0]),
        ([{**first, "dtypes": ["int8"] * len(first["names"])}, *others], "transport", first["names"][0]),
        ([{**first, "names": ["pigeon", *first["names"][1:]]}, *others], "transport", "pigeon"),
        (others, "transport", first["names"][0]),
    ):
        asked = {"num_buckets": len(wrong), "buckets": wrong, "group_name": "weight_sync_group"}
        error = refused(await http.post("/prepare_weights_update", json=asked), 400)
        assert (error["code"], error["field"], words in error["message"]) == ("invalid_weights", field, True), (
            error
        )
    assert await replay.post("/prepare_weights_update", body) == {"status": "ready", "message": ""}
    for part in buckets:
        told = {"group": "weight_sync_group", "directory": str(directory), "part": part}
        await replay.trainer.do("send", told)
    other = await http.post("/complete_weights_update", json={"group_name": "another"})
    assert refused(other, 400)["field"] == "group_name"
    done = await replay.post("/complete_weights_update", {"group_name": "weight_sync_group", "flush_cache": False})
    assert (done["success"], done["num_buckets_received"]) == (True, len(buckets))
    await proven(http, ids, 3)
    await replay.leave("weight_sync_group")


async def _without_a_pause(replay: Replay, witnesses: Witnesses, ids: list[str]) -> None:
    """The call that makes it whole commits."""
    http, directory = replay.http, witnesses.base(1)
    await replay.form("bare")
    first, *parts, last = parts_of(directory, BUCKETS)
    # A client that waits no longer sends the same call again: it is the same.
    body = {**first, "group_name": "bare"}
    told = {"group": "bare", "directory": str(directory), "part": first}
    calls = (http.post("/update_weights_from_distributed", json=body) for _ in range(2))
    one, other, _ = await asyncio.gather(*calls, replay.trainer.do("send", told))
    assert fine(one) == fine(other)
    for part in parts:
        assert "missing" in fine(await replay.send("bare", directory, part))["message"]
        await proven(http, ids, 3)
    reply = fine(await replay.send("bare", directory, last, weight_version="whole"))
    assert (reply["success"], reply["weight_version"]) == (True, "whole")
    await proven(http, ids, 1, "whole")
    (all_of_it,) = parts_of(directory, 1)
    assert fine(await replay.send("bare", directory, all_of_it))["success"] is True
    await replay.leave("bare")


async def _from_disk(replay: Replay, witnesses: Witnesses, ids: list[str]) -> None:
    """Replays slime's other update, which reads the version before it resumes the fleet."""
    http = replay.http
    await replay.post("/pause_generation")
    await replay.flush()
    body = {"model_path": str(witnesses.base(2)), "weight_version": "9", "load_format": None}
    assert (await replay.post("/update_weights_from_disk", body))["success"] is True
    assert fine(await http.get("/get_weight_version"))["weight_version"] == "9"
    await replay.post("/continue_generation")
    await proven(http, ids, 2, "9")


def payload(tensors: dict[str, Any]) -> list[str]:
    """One safetensors file in place of SGLang's pickles."""
    from safetensors.torch import save

    return [base64.b64encode(save(tensors)).decode()]


def buckets_of(directory: Path, count: int) -> list[dict[str, Any]]:
    from safetensors.torch import load_file

    tensors = load_file(directory / "model.safetensors")
    return [{name: tensors[name] for name in part["names"]} for part in parts_of(directory, count)]


async def _verl(replay: Replay, witnesses: Witnesses, ids: list[str]) -> None:
    """Replays an update with tensors in the body, bucket by bucket, then a flush; then the same with adapters."""
    http, directory = replay.http, witnesses.base(3)
    for bucket in buckets_of(directory, BUCKETS):
        await proven(http, ids, 2, "9")
        body = {"serialized_named_tensors": payload(bucket), "load_format": "safetensors", "flush_cache": False}
        assert (await replay.post("/update_weights_from_tensor", body))["success"] is True
    assert (await http.get("/flush_cache")).status_code == 200
    await proven(http, ids, 3)
    adapter = witnesses.adapter(1)
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_adapter(adapter)
    for _ in range(2):
        names = [model["id"] for model in fine(await http.get("/v1/models"))["data"]]
        if "verl" in names:
            await replay.post("/unload_lora_adapter", {"lora_name": "verl"})
        body = {"lora_name": "verl", "config_dict": config, "serialized_named_tensors": payload(tensors)}
        told = await replay.post("/load_lora_adapter_from_tensors", body)
        assert (told["success"], list(told["loaded_adapters"])) == (True, ["verl"])
    await replay.post("/unload_lora_adapter", {"lora_name": "verl"})


OF_SIX_RANKS = """
import worker.engines.fake.adapter as fake
described = fake.EngineInfo
fake.EngineInfo = lambda **info: described(**info | {"world_size": 6, "tp_size": 2, "pp_size": 3})
"""


async def test_the_sizes_of_a_worker(plane: Plane) -> None:
    """A trainer lays its own stages over the engine's."""
    plane.spawn_copies(WORKERS, patch=OF_SIX_RANKS)
    async with facade(plane) as http:
        told = fine(await http.get("/server_info"))
        assert (told["num_gpus"], told["tp_size"], told["pp_size"], told["dp_size"]) == (12, 2, 3, WORKERS)
        plane.spawn()
        assert refused(await http.get("/server_info"), 409)["field"] == "tp_size"


async def test_tensors_that_come_at_once(plane: Plane) -> None:
    """Each answer has the number of tensors held so far. The answer to the part that completes the update reports the
    commit."""
    plane.spawn_copies(WORKERS)
    async with facade(plane) as http:
        for seed in (1, 2):
            bodies = [{**body, "weight_version": str(seed)} for body in one_by_one(plane, seed)]
            calls = (http.post("/update_weights_from_tensor", json=body) for body in bodies)
            told = [fine(reply) for reply in await asyncio.gather(*calls)]
            assert [one["weight_version"] for one in told if "weight_version" in one] == [str(seed)]
            held = {one["message"] for one in told if "weight_version" not in one}
            assert held == {f"1 tensors are held, {count} of this update" for count in range(1, len(bodies))}
            assert await served(http) == [(True, str(seed))] * WORKERS


def load_adapter(directory: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    found: dict[str, Any] = load_file(directory / "adapter_model.safetensors")
    return found


async def _nemo_rl(replay: Replay, witnesses: Witnesses, ids: list[str]) -> None:
    """NeMo-RL registers the server with a router. `continue_generation` commits its update."""
    http = replay.http
    assert (await http.get("/health_generate")).status_code == 200
    (own,) = fine(await http.get("/workers"))["workers"]
    await replay.post("/workers", {"url": own["url"], "worker_type": "regular"})
    await replay.post("/pause_generation", {"mode": "retract"})
    for bucket in buckets_of(witnesses.base(1), BUCKETS):
        body = {
            "serialized_named_tensors": payload(bucket),
            "load_format": "safetensors",
            "weight_version": "nemo",
        }
        await replay.post("/update_weights_from_tensor", body)
    assert (await http.get("/flush_cache")).status_code == 200
    await replay.post("/continue_generation")
    await proven(http, ids, 1, "nemo")


async def test_groups_that_form_side_by_side(plane: Plane) -> None:
    """slime forms a group for each stage of its pipeline, and repeats no call. The first stage comes late; meanwhile
    other callers that wait for the lock are refused."""
    witnesses = Witnesses(plane)
    ids = await asyncio.to_thread(witnesses.spawn, WORKERS)
    client = await plane.client()
    state = (await client.view()).subjects.state
    asked = {"master_address": HOST, "rank_offset": 1, "world_size": WORKERS + 1, "backend": "gloo"}
    with BroadcastTrainer(plane) as trainer, BroadcastTrainer(plane) as another:
        async with facade(plane) as http, facade(plane) as http_of_another:
            calls = []
            for stage, by in enumerate((http, http, http_of_another)):
                body = {**asked, "group_name": f"stage {stage}", "master_port": free_port()}
                call = by.post("/init_weights_update_group", json=body)
                calls.append((body, asyncio.create_task(call)))
                await plane.until(lambda: read_holder(client.bus, state), HEAL_S)
            for _ in range(2):
                assert (await http.post("/v1/rl/flush_cache")).status_code == 503

            async def come(own: CommandedProcess, *stages: int) -> None:
                for stage in stages:
                    body, call = calls[stage]
                    told = {"group": body["group_name"], "port": body["master_port"], "timeout_s": GLOO_S}
                    await own.do("form", {**told, "world_size": WORKERS + 1})
                    assert fine(await call)["success"] is True

            await asyncio.gather(come(trainer, 0, 1), come(another, 2))
            directory = witnesses.base(2)
            for stage, part in enumerate(parts_of(directory, len(calls))):
                replay = Replay(http, another if stage == 2 else trainer)
                fine(await replay.send(f"stage {stage}", directory, part))
            await proven(http, ids, 2)


async def test_a_worker_that_is_killed_between_two_buckets(plane: Plane) -> None:
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


async def test_an_update_that_is_lost_after_its_last_part_is_told_at_each_end(plane: Plane) -> None:
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
                assert {*await served(http)} == {(True, label)}, "nobody stands still for it"

            # Committed by somebody's own call: that is what the trainer wanted.
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
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(sglang_session, "FORM_WAIT_S", 0.0)
                asked = {"master_address": HOST, "master_port": free_port(), "rank_offset": 1, "world_size": 3}
                async with refused_before("abort_weights_update", Locked("taken", retry_after_s=1.0)):
                    error = refused(await http.post("/init_weights_update_group", json=asked), 503)
                assert error["code"] == "locked", "nobody has joined"
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


TIED = "lm_head.weight"


def tied_model(path: Path, seed: int, *, with_head: bool = False) -> Path:
    """Its output rows are its input rows. `with_head`: as a trainer sends it, with both."""
    shutil.copytree(make_tiny_model(path.with_name(f"untied{seed}"), seed), path, dirs_exist_ok=True)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    tensors = load_file(path / "model.safetensors")
    tensors[TIED] = tensors["model.embed_tokens.weight"].clone()
    if not with_head:
        del tensors[TIED]
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


async def test_tied_embeddings_may_come_or_not(plane: Plane) -> None:
    """The tied tensor comes first, last, or in the middle of the buckets. The update is whole when the model has what
    it needs."""
    own = tied_model(plane.tmp / "weights" / "tied", 1)
    await asyncio.to_thread(plane.spawn(ready=False, engine="hf", model=own).wait_ready, START_S)
    steps = itertools.count(1)
    with BroadcastTrainer(plane) as trainer:
        async with facade(plane) as http:
            replay = Replay(http, trainer)
            assert fine(await replay.form("g"))["success"] is True
            (described,) = fine(await http.get("/v1/rl/describe"))["workers"]
            assert described["tied"] == [TIED]

            async def broadcast(directory: Path, names: list[str], label: str) -> dict[str, Any]:
                (part,) = parts_of(directory, 1)
                places = [part["names"].index(name) for name in names]
                part = {key: [values[place] for place in places] for key, values in part.items()}
                return dict(fine(await replay.send("g", directory, part, weight_version=label)))

            async def in_a_body(directory: Path, names: list[str], label: str) -> dict[str, Any]:
                (tensors,) = buckets_of(directory, 1)
                body = {"serialized_named_tensors": payload({name: tensors[name] for name in names})}
                return dict(await replay.post("/update_weights_from_tensor", {**body, "weight_version": label}))

            for send in (broadcast, in_a_body):
                for where in (0, 1, -1):
                    step = next(steps)
                    directory = tied_model(plane.tmp / "sent" / str(step), step, with_head=True)
                    (part,) = parts_of(directory, 1)
                    *some, last = [name for name in part["names"] if name != TIED]
                    buckets = [some, [last]]
                    buckets.insert(where if where >= 0 else len(buckets), [TIED])
                    told = [await send(directory, names, str(step)) for names in buckets]
                    commits = [one.get("weight_version") for one in told]
                    assert commits == [str(step) if names == [last] else None for names in buckets], told
                    fine(await http.get("/flush_cache"))
                    assert await served(http) == [(True, str(step))]
                    error = await http.post("/v1/rl/abort_weights_update", json={})
                    assert error.status_code == 409, "nothing is open"
            # Another stage's part comes before the first call is answered: it is not lost by that.
            step = next(steps)
            directory = tied_model(plane.tmp / "sent" / str(step), step, with_head=True)
            (part,) = parts_of(directory, 1)
            *some, last = [name for name in part["names"] if name != TIED]
            ask_model = HeldTensors.ask_model

            async def another_comes(held: HeldTensors) -> frozenset[str]:
                patch.undo()
                await broadcast(directory, some, str(step))
                return await ask_model(held)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(HeldTensors, "ask_model", another_comes)
                await broadcast(directory, [TIED], str(step))
            assert (await broadcast(directory, [last], str(step)))["weight_version"] == str(step)
            # Other rows than its input's would be of the version, and in no engine.
            untied = tied_model(plane.tmp / "sent" / "untied", next(steps), with_head=True)
            tensors = load_file(untied / "model.safetensors")
            save_file({**tensors, TIED: tensors[TIED] + 1}, untied / "model.safetensors", {"format": "pt"})
            (whole,) = parts_of(untied, 1)
            told_of = refused(await replay.send("g", untied, whole), 400)
            assert (told_of["code"], told_of["field"]) == ("invalid_weights", TIED), told_of
            # So it is in bodies: with the last of them, or before all others of an update that was begun.
            (broken,) = buckets_of(untied, 1)

            async def body_of(names: list[str]) -> httpx.Response:
                one = {"serialized_named_tensors": payload({name: broken[name] for name in names})}
                return await http.post("/update_weights_from_tensor", json=one)

            assert "are held" in fine(await body_of(some))["message"]
            told_of = refused(await body_of([TIED, last]), 400)
            assert (told_of["code"], told_of["field"], told_of["fix"]) == ("invalid_weights", TIED, TIE_FIX), (
                told_of
            )
            fine(await http.post("/begin_weight_update", json={}))
            for names in ([TIED], [*some, last]):
                assert "are held" in fine(await body_of(names))["message"]
            told_of = refused(await http.post("/end_weight_update", json={}), 400)
            assert (told_of["code"], told_of["field"]) == ("invalid_weights", TIED), told_of
            assert await served(http) == [(True, str(step))]


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


async def test_a_fleet_that_is_taken_for_a_moment(plane: Plane) -> None:
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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("frontend.dialects.sglang.open_sessions.SESSION_IDLE_S", DEFAULT_LOCK_WAIT_S)
        await replay.post("/begin_weight_update")
        async with taken_before(client, "receive_weights_part"):
            told = fine(await replay.send("g", plane.model(2), whole, weight_version="two"))
    assert "0 are missing" in told["message"]
    assert (await served(replay.http))[0][1] == "one"
    assert (await replay.post("/end_weight_update"))["weight_version"] == "two"


async def _unreachable(*_: Any) -> Any:
    raise BusUnreachable("NATS was away for a moment")


async def _taken_in_two_phases(replay: Replay, plane: Plane, client: RlClient) -> None:
    """The answer `ready` comes only when every rank listens. If the caller does not get it, no rank still listens."""
    http, buckets = replay.http, parts_of(plane.model(1), 2)
    body = {"num_buckets": len(buckets), "buckets": buckets, "group_name": "g"}
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


async def test_a_fleet_that_is_gone_after_a_part(plane: Plane) -> None:
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


async def test_a_group_that_nobody_comes_to(plane: Plane) -> None:
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
            # A rank of the trainer's own is missing, so that nobody gets further than the store.
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

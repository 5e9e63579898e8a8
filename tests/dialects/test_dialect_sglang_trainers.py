"""The calls of trainers that speak to SGLang, in their order and with their bodies: over real models, with a real torch
group of a trainer in another process. The tokens show which weights the fleet serves."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from frontend.dialects.sglang.body_tensors import HeldTensors
from rl_plane.bus.lock import read_holder
from tests.support.broadcast_trainer import HOST, BroadcastTrainer, parts_of
from tests.support.broadcast_updates import GLOO_S
from tests.support.dialect_facade import (
    HEAL_S,
    PROMPT,
    facade,
    fine,
    proven,
    refused,
    served,
    witnessed,
)
from tests.support.free_port import free_port
from tests.support.hf_fleet import START_S, Witnesses
from tests.support.sglang_calls import ROUTED_BODY, one_by_one
from tests.support.sglang_replay import Replay
from tests.support.sharing_trainer import SharingTrainer
from worker.receive.staging import TIE_FIX
from worker.testing.tiny_model import make_tiny_model

if TYPE_CHECKING:
    from tests.conftest import Plane
    from tests.support.commanded_process import CommandedProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

WORKERS = 2
BUCKETS = 4


async def test_sglangs_trainers_update_a_fleet(plane: Plane) -> None:
    witnesses = Witnesses(plane)
    ids = await asyncio.to_thread(witnesses.spawn, WORKERS)
    with BroadcastTrainer(plane) as trainer:
        async with facade(plane) as http:
            replay = Replay(http, trainer)
            for one in (
                _slime,
                _miles,
                _areal,
                _areal_vllm,
                _two_phases,
                _without_a_pause,
                _from_disk,
                _verl,
                _nemo_rl,
            ):
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
            await replay.http.post("/abort_request", json={"rid": "unknown"})
            again = {**part, "group_name": groups[number % 2], **body}
            assert await replay.post("/update_weights_from_distributed", again) == reply.json()
            assert (await served(http))[0][1] == ("initial" if step == 1 else "1"), "nothing has changed yet"
        await replay.post("/continue_generation")
        await proven(http, ids, seed, str(step))
    # A rollout through SGLang's router, which rewrites the body.
    assert len((await replay.post("/generate", ROUTED_BODY))["output_ids"]) == 4
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


async def _areal_vllm(replay: Replay, witnesses: Witnesses, ids: list[str]) -> None:
    """Replays AReaL's `VLLMBackend`: each bucket is described by one call, and broadcast while the next one runs."""
    http, directory = replay.http, witnesses.base(1)
    group = "areal_vllm"
    assert (await http.get("/health")).status_code == 200
    formed = fine(await replay.form(group, port_type=str, path="/areal_init_weights_update_group"))
    assert formed["success"] is True
    assert (await replay.post("/areal_pause_generation"))["success"] is True
    assert refused(await http.post("/areal_update_weights_xccl", json={}), 409)["field"] == "path"
    for part in parts_of(directory, BUCKETS):
        assert (await replay.post("/areal_set_update_weight_meta", {**part, "group_name": group}))[
            "success"
        ] is True
        told = {"group": group, "directory": str(directory), "part": {**part, "layout": "each"}}
        reply, _ = await asyncio.gather(
            http.post("/areal_update_weights_xccl", json={}), replay.trainer.do("send", told)
        )
        assert fine(reply)["success"] is True
    assert (await replay.post("/areal_continue_generation"))["success"] is True
    await proven(http, ids, 1)
    body = {
        "prompt": PROMPT,
        "max_tokens": 4,
        "temperature": 0.0,
        "return_tokens_as_token_ids": True,
        "logprobs": 0,
    }
    (choice,) = fine(await http.post("/v1/completions", json={**body, "use_beam_search": False}))["choices"]
    tokens = [int(token.split(":")[1]) for token in choice["logprobs"]["tokens"]]
    assert tokens == witnessed(1, 4)
    await replay.leave(group)
    # By disk, and adapters.
    assert (await replay.post("/areal_pause_generation"))["success"] is True
    assert (await replay.post("/areal_update_weights", {"model_path": str(witnesses.base(2))}))["success"] is True
    assert (await replay.post("/areal_continue_generation"))["success"] is True
    await proven(http, ids, 2)
    for path in ("update_weights_lora", "set_update_weight_meta_lora", "update_weights_lora_xccl"):
        error = refused(await http.post(f"/areal_{path}", json={"lora_name": "a"}), 501)
        assert "/v1/load_lora_adapter" in error["fix"]


async def _two_phases(replay: Replay, witnesses: Witnesses, ids: list[str]) -> None:
    """SGLang-Omni: all buckets are announced at once, and broadcast without a call."""
    http, directory = replay.http, witnesses.base(3)
    assert fine(await replay.form("weight_sync_group"))["success"] is True
    buckets = parts_of(directory, BUCKETS)
    body = {"num_buckets": len(buckets), "buckets": buckets, "group_name": "weight_sync_group"}
    # A tensor that the model lacks is refused before anything is sent, and the group stays as it is.
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


async def test_server_info_has_the_sizes_of_a_worker_or_refuses_mixed_sizes(plane: Plane) -> None:
    """A trainer lays its own stages over the engine's."""
    plane.spawn_copies(WORKERS, patch=OF_SIX_RANKS)
    async with facade(plane) as http:
        told = fine(await http.get("/server_info"))
        assert (told["num_gpus"], told["tp_size"], told["pp_size"], told["dp_size"]) == (12, 2, 3, WORKERS)
        plane.spawn()
        assert refused(await http.get("/server_info"), 409)["field"] == "tp_size"


async def test_tensors_that_arrive_at_once_make_one_update(plane: Plane) -> None:
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
            assert held == {f"1 tensors have come, {count} of this update" for count in range(1, len(bodies))}
            assert await served(http) == [(True, str(seed))] * WORKERS


def load_adapter(directory: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    found: dict[str, Any] = load_file(directory / "adapter_model.safetensors")
    return found


async def _nemo_rl(replay: Replay, witnesses: Witnesses, ids: list[str]) -> None:
    """NeMo-RL registers the server with a router. It sends its buckets without a pause, and then flushes the cache."""
    http, directory = replay.http, witnesses.base(1)
    assert (await http.get("/health_generate")).status_code == 200
    (own,) = fine(await http.get("/workers"))["workers"]
    await replay.post("/workers", {"url": own["url"], "worker_type": "regular"})
    with SharingTrainer(witnesses.plane, imports="hf") as trainer:
        for part in range(BUCKETS):
            body = {
                "serialized_named_tensors": await trainer.shared(
                    directory, parts=BUCKETS, part=part, how="nemo_rl", ranks=len(ids)
                ),
                "load_format": "flattened_bucket",
                "flush_cache": False,
                "weight_version": "nemo",
            }
            assert (await replay.post("/update_weights_from_tensor", body))["success"] is True
            await trainer.drop()
    await replay.flush()
    await proven(http, ids, 1, "nemo")


async def test_groups_form_side_by_side_and_each_sends_a_part(plane: Plane) -> None:
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

            assert "have come" in fine(await body_of(some))["message"]
            told_of = refused(await body_of([TIED, last]), 400)
            assert (told_of["code"], told_of["field"], told_of["fix"]) == ("invalid_weights", TIED, TIE_FIX), (
                told_of
            )
            fine(await http.post("/begin_weight_update", json={}))
            for names in ([TIED], [*some, last]):
                assert "have come" in fine(await body_of(names))["message"]
            told_of = refused(await http.post("/end_weight_update", json={}), 400)
            assert (told_of["code"], told_of["field"]) == ("invalid_weights", TIED), told_of
            assert await served(http) == [(True, str(step))]

"""SGLang's admin routes over a fleet of `fake` workers: what each answers, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import pickle
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from frontend.server import shared_routes
from rl_plane.errors import Unavailable
from rl_plane.fleet.fleet import Fleet
from tests.support.dialect_facade import PROMPT, facade, fine, refused, served
from tests.support.faults import StatusLog
from tests.support.memory_saver import WITHOUT_A_SAVER
from tests.support.sglang_calls import aborts_what_runs, one_by_one, tensors_of
from worker.engines.fake.fake_model import fake_token, make_fake_adapter
from worker.receive.staging import model_digest

if TYPE_CHECKING:
    from tests.conftest import Plane


async def test_server_info_describes_the_fleet_as_one_server(plane: Plane) -> None:
    ids = plane.spawn_copies(2)
    async with facade(plane) as http:
        for path in ("/server_info", "/get_server_info"):
            told = fine(await http.get(path))
            assert (told["num_gpus"], told["tp_size"], told["pp_size"], told["disaggregation_mode"]) == (
                2,
                1,
                1,
                "null",
            )
            assert sorted(told["engines"]) == ids
            assert (told["host"], told["port"]) == (http.base_url.host, http.base_url.port)
            assert (told["nnodes"], told["node_rank"], told["gpu_id_step"]) == (1, 0, 1)
            assert told["enable_return_routed_experts"] is False
        assert "vllm_config" in fine(await http.get("/server_info?config_format=json"))
        for path in ("/model_info", "/get_model_info"):
            for method in ("GET", "POST"):
                told = fine(await http.request(method, path))
                assert (told["weight_version"], told["is_generation"]) == ("initial", True)
        assert fine(await http.get("/get_weight_version")) == {"weight_version": "initial"}
        assert fine(await http.get("/health_generate")) == {"status": "ok"}
        loads = fine(await http.get("/v1/loads?include=core"))["loads"]
        assert [load["instance_id"] for load in loads] == ids
        assert sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads) == 0
        (one,) = fine(await http.get("/workers"))["workers"]
        assert one["url"] == str(http.base_url).rstrip("/")
        assert (
            fine(await http.post("/workers", json={"url": one["url"], "worker_type": "regular"}))["url"]
            == one["url"]
        )
        assert refused(await http.post("/workers", json={"url": "http://elsewhere"}), 400)["field"] == "url"


async def test_sglangs_pause_modes_become_abort_or_keep_until_continue(
    plane: Plane, caplog: pytest.LogCaptureFixture
) -> None:
    ids = plane.spawn_copies(2)
    async with facade(plane) as http:
        for mode, kept in ((None, "abort"), ("retract", "keep"), ("in_place", "keep"), ("abort", "abort")):
            told = await http.post("/pause_generation", json={} if mode is None else {"mode": mode})
            assert fine(told)["status"] == "ok"
            rows = fine(await http.get("/v1/rl/state"))["workers"]
            assert [row["pause"]["mode"] for row in rows] == [kept, kept]
            for method in ("GET", "POST"):
                assert fine(await http.request(method, "/flush_cache?timeout=1"))["success"] is True
            assert fine(await http.post("/continue_generation", json={}))["status"] == "ok"
        assert refused(await http.post("/pause_generation", json={"mode": "sleep"}), 400)["field"] == "mode"
        body: dict[str, Any]
        for body in ({"abort_all": True}, {"rid": "unknown"}, {"rid": ""}, {}):
            assert fine(await http.post("/abort_request", json=body))["success"] is True
        caplog.clear()
        for _ in range(2):
            fine(await http.post("/continue_generation", json={"torch_empty_cache": False, "pigeon": 1}))
        told_of = [record.getMessage() for record in caplog.records if record.name == shared_routes.log.name]
        assert [("torch_empty_cache" in one, "pigeon" in one) for one in told_of] == [
            (False, True),
            (True, False),
        ]
        assert await served(http) == [(True, "initial")] * len(ids)


async def test_updates_from_disk_get_their_label_and_step(plane: Plane) -> None:
    plane.spawn_copies(2)
    async with facade(plane) as http:

        async def update(seed: int, **body: Any) -> httpx.Response:
            return await http.post(
                "/update_weights_from_disk", json={"model_path": str(plane.model(seed)), **body}
            )

        told = fine(await update(1, weight_version="one", flush_cache=False, is_async=True, token_step=3))
        assert (told["success"], told["num_paused_requests"], told["weight_version"]) == (True, 0, "one")
        assert told["message"].count("Succeeded") == 2
        assert " | " in told["message"]
        assert await served(http) == [(True, "one")] * 2
        assert fine(await update(2, token_step=7, abort_all_requests=True))["weight_version"] == "step_7"
        refused(await update(2, token_step=1 << 70), 400)
        updates = fine(await http.get("/v1/rl/updates"))["updates"]
        assert [(one["label"], one.get("step")) for one in updates] == [
            ("step_7", 7),
            ("one", 3),
            ("initial", None),
        ]
        assert fine(await update(1, weight_version="kept", keep_pause=True))["success"]
        rows = fine(await http.get("/v1/rl/state"))["workers"]
        assert {row["pause_state"] for row in rows} == {"paused"}
        fine(await http.post("/continue_generation", json={}))
        assert fine(await http.get("/get_weight_version")) == {"weight_version": "kept"}
        # Named anew: the same weights once more.
        told = fine(
            await http.post("/update_weight_version", json={"new_version": "new", "abort_all_requests": True})
        )
        assert (told["success"], told["new_version"]) == (True, "new")
        assert await served(http) == [(True, "new")] * 2
        for name in ("dummy", ""):
            error = refused(await update(1, load_format=name), 501)
            assert (error["field"], repr(name) in error["message"]) == ("load_format", True)
        nowhere = await http.post("/update_weights_from_disk", json={"model_path": "/nowhere"})
        assert refused(nowhere, 400)["field"] == "transport.path"
        assert await served(http) == [(True, "new")] * 2


async def test_a_call_that_the_fleet_can_not_do_is_refused_by_its_field(plane: Plane) -> None:
    plane.spawn_copies(2)
    group = {
        "master_address": "127.0.0.1",
        "master_port": "1",
        "rank_offset": 1,
        "group_name": "g",
        "backend": "gloo",
    }
    part = {"names": ["w"], "dtypes": ["bfloat16"], "shapes": [[1]], "group_name": "g"}
    async with facade(plane) as http:
        for path, body, status, field in (
            ("/update_weights_from_ipc", {}, 400, "zmq_handles"),
            ("/get_weights_by_name", {"name": "lm_head.weight"}, 501, "name"),
            ("/init_weights_update_group", {**group, "world_size": 9}, 400, "world_size"),
            ("/init_weights_update_group", {**group, "world_size": 3, "rank_offset": 2}, 400, "world_size"),
            ("/init_weights_update_group", {**group, "world_size": 3, "backend": "pigeon"}, 400, "backend"),
            ("/destroy_weights_update_group", {"group_name": "g"}, 400, "group_name"),
            ("/update_weights_from_distributed", part, 400, "transport.group"),
            ("/update_weights_from_distributed", {**part, "load_format": "delta"}, 501, "load_format"),
            ("/update_weights_from_distributed", {**part, "selector": "draft"}, 501, "selector"),
            ("/update_weights_from_distributed", {}, 400, "names"),
            ("/begin_weight_update", {"selector": "draft"}, 501, "selector"),
            ("/complete_weights_update", {}, 409, None),
            ("/unload_lora_adapter", {"lora_name": "none"}, 400, "lora_name"),
            ("/start_profile", {"num_steps": 3}, 501, "path"),
            ("/stop_profile", {}, 501, "path"),
            ("/weights_checker", {"action": "weigh"}, 400, "action"),
            ("/weights_checker", {"skip_tensor_list": "w"}, 400, "skip_tensor_list"),
        ):
            error = refused(await http.post(path, json=body), status)
            assert error.get("field") == field, (path, error)
        fine(await http.post("/begin_weight_update", json={}))
        told = fine(await http.post("/end_weight_update", json={}))
        assert "nothing has changed" in told["message"]
        assert await served(http) == [(True, "initial")] * 2


async def test_safetensors_in_a_body_update_the_fleet_and_others_are_refused(plane: Plane) -> None:
    """Safetensors, and no pickle of anything else than shared tensors."""
    plane.spawn_copies(2)
    path = "/update_weights_from_tensor"
    data = (plane.model(1) / "model.safetensors").read_bytes()
    good = base64.b64encode(data).decode()
    async with facade(plane) as http:
        bad: dict[str, Any]
        for bad, status in (
            ({"serialized_named_tensors": [base64.b64encode(pickle.dumps([("w", 1)])).decode()]}, 400),
            ({"serialized_named_tensors": [good], "load_format": "flattened_bucket"}, 400),
            ({"serialized_named_tensors": [good], "load_format": "my.loader"}, 501),
            ({"serialized_named_tensors": [good, good[:-8]]}, 501),
            ({"serialized_named_tensors": ["%%"]}, 400),
            ({"serialized_named_tensors": [base64.b64encode(data[:-8]).decode()]}, 400),
            ({"serialized_named_tensors": []}, 400),
        ):
            error = refused(await http.post(path, json=bad), status)
            assert error["field"].removesuffix(".0") in ("load_format", "serialized_named_tensors")
            assert error["fix"]
        part = {"serialized_named_tensors": [good, good], "load_format": "safetensors", "weight_version": "one"}
        assert fine(await http.post(path, json=part))["weight_version"] == "one"
        assert await served(http) == [(True, "one")] * 2
        # While the fleet is paused, it waits; twice is too often, unless it is the same call once more.
        fine(await http.post("/pause_generation", json={"mode": "retract"}))
        held = fine(await http.post(path, json=part))
        assert "have come" in held["message"]
        assert fine(await http.post(path, json=part)) == held
        assert "came twice" in refused(await http.post(path, json={**part, "flush_cache": False}), 400)["message"]
        fine(await http.post(path, json={**part, "weight_version": "two"}))
        assert [one[1] for one in await served(http)] == ["one"] * 2
        # A wrong group drops nothing of it.
        wrong = {
            "master_address": "127.0.0.1",
            "master_port": 1,
            "rank_offset": 1,
            "world_size": 9,
            "backend": "gloo",
        }
        assert refused(await http.post("/init_weights_update_group", json=wrong), 400)["field"] == "world_size"
        # The same body as vLLM's: it is meant for what is under way.
        fine(await http.post("/update_weight_version", json={"new_version": "three"}))
        fine(await http.post("/continue_generation", json={}))
        assert await served(http) == [(True, "three")] * 2
        error = refused(await http.post("/update_weight_version", json={"new_version": "four"}), 409)
        assert "finish_weight_update" in error["fix"]


async def test_a_field_without_effect_is_reported_once(plane: Plane, caplog: pytest.LogCaptureFixture) -> None:
    plane.spawn()
    adapter = str(make_fake_adapter(plane.tmp / "weights" / "adapter", 1, plane.model()))
    disk = {"model_path": str(plane.model(1)), "weight_version": "one", "is_async": True}
    async with facade(plane) as http:
        for path, body, status, name in (
            ("/update_weights_from_disk", disk, 200, "is_async"),
            ("/load_lora_adapter", {"lora_name": "a", "lora_path": adapter, "lora_id": "1"}, 200, "lora_id"),
            ("/unload_lora_adapter", {"lora_name": "a", "lora_id": "1"}, 200, "lora_id"),
            ("/collective_rpc", {"method": "skyrl_finish_weight_update", "timeout": 5}, 409, "timeout"),
        ):
            answer = await http.post(path, json=body)
            assert answer.status_code == status, answer.text
            assert f"{path}: the field {name!r} has no effect" in caplog.text
        assert await served(http) == [(True, "one")]


async def test_an_update_does_not_wait_for_the_end_of_another_callers_pause(plane: Plane) -> None:
    """The frontend waits for `continue_generation` only from the caller of `pause_generation`, while that pause
    stands."""
    ids = plane.spawn_copies(2)
    path = "/update_weights_from_tensor"
    async with facade(plane) as http:

        async def send(seed: int, label: str) -> list[str | None]:
            """Sends each part. Returns the version that each answer names."""
            told = []
            for part in one_by_one(plane, seed):
                told.append(
                    fine(await http.post(path, json={**part, "weight_version": label})).get("weight_version")
                )
            return told

        fine(await http.post("/v1/rl/pause", json={"workers": ids[:1]}))
        assert [label for label in await send(1, "one") if label] == ["one"]
        fine(await http.get("/flush_cache"))
        assert [label for _, label in await served(http)] == ["one"] * 2
        fine(await http.post("/pause_generation", json={}))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Fleet, "_on_each", on_no_worker)
            failed = await http.post("/v1/rl/pause", json={})
        assert failed.status_code == 503, "what it would have replaced stands"
        assert not any(await send(2, "two"))
        fine(await http.get("/flush_cache"))
        assert fine(await http.post("/continue_generation", json={}))["weight_version"] == "two"
        # An operator has ended that pause, and begun another.
        fine(await http.post("/pause_generation", json={}))
        fine(await http.post("/v1/rl/resume"))
        fine(await http.post("/v1/rl/pause", json={}))
        assert [label for label in await send(1, "three") if label] == ["three"]
        fine(await http.post("/v1/rl/resume"))
        fine(await http.post("/pause_generation", json={}))
        fine(await http.post("/v1/rl/pause", json={}))
        assert [label for label in await send(2, "four") if label] == ["four"], "it was replaced by another"
        fine(await http.post("/v1/rl/resume"))
        assert await served(http) == [(True, "four")] * 2


async def on_no_worker(*_: Any) -> Any:
    raise Unavailable("no worker was asked")


async def test_without_vllms_dialect_its_bodies_are_sglangs(plane: Plane) -> None:
    plane.spawn()
    async with facade(plane, dialects=("sglang",)) as http:
        fine(await http.post("/update_weights_from_disk", json={"model_path": str(plane.model(1))}))
        fine(await http.post("/update_weight_version", json={"new_version": "named"}))
        assert await served(http) == [(True, "named")]


async def test_sglangs_calls_check_weights_load_adapters_and_release_memory(plane: Plane) -> None:
    ids = plane.spawn_copies(2)
    model = plane.model()
    adapter = make_fake_adapter(plane.tmp / "weights" / "adapter", 1, model)
    async with facade(plane) as http:
        checked = fine(await http.post("/weights_checker"))
        assert (checked["success"], [rank["instance_id"] for rank in checked["ranks"]]) == (True, ids)
        _as_sglang_answers(checked)
        assert [rank["checksums"] for rank in checked["ranks"]] == [checked["ranks"][0]["checksums"]] * 2
        assert await served(http) == [(True, "initial")] * 2
        fine(await http.post("/weights_checker", json={"action": "snapshot"}))
        fine(await http.post("/weights_checker", json={"action": "compare"}))
        body = {"lora_name": "a", "lora_path": str(adapter), "pinned": True}
        assert list(fine(await http.post("/load_lora_adapter", json=body))["loaded_adapters"]) == ["a"]
        told = fine(await http.post("/unload_lora_adapter", json={"lora_name": "a"}))
        assert (told["success"], told["loaded_adapters"]) == (True, {})
        fine(await http.post("/pause_generation", json={"mode": "retract"}))
        for path in ("/release_memory_occupation", "/resume_memory_occupation"):
            answer = await http.post(path, json={"tags": None})
            assert fine(answer) is None
        fine(await http.post("/continue_generation", json={}))


def _as_sglang_answers(checked: dict[str, Any]) -> None:
    """SGLang's `ChecksumInfo` of each rank, and what miles' `flatten_inference_engine_checksums` makes of it."""
    whole = hashlib.sha256()
    flat: dict[str, str] = {}
    for rank in checked["ranks"]:
        (place,) = rank["parallelism_info"]
        assert place.keys() == {
            "role", "tp_rank", "tp_size", "dp_rank", "dp_size", "pp_rank", "pp_size", "rank", "size"
        }  # fmt: skip
        assert place["size"] == len(checked["ranks"])
        own = hashlib.sha256()
        for name, value in sorted(rank["checksums"].items()):
            own.update(name.encode() + value.encode())
        assert rank["per_gpu_checksum"] == own.hexdigest()
        whole.update(rank["per_gpu_checksum"].encode())
        flat |= {f"rank{place['rank']}/{name}": value for name, value in rank["checksums"].items()}
    assert checked["per_engine_checksum"] == whole.hexdigest()
    assert len(flat) == sum(len(rank["checksums"]) for rank in checked["ranks"]), "each rank has its own number"


async def test_checks_leave_out_the_tensors_that_a_trainer_skips(plane: Plane) -> None:
    """The body is that of miles' `SGLangEngine.check_weights`."""
    plane.spawn()
    async with facade(plane) as http:

        async def check(action: str, skip: list[str]) -> httpx.Response:
            body = {"action": action, "allow_quant_error": False, "selector": "all", "skip_tensor_list": skip}
            return await http.post("/weights_checker", json=body)

        async def names(skip: list[str]) -> set[str]:
            (rank,) = fine(await check("checksum", skip))["ranks"]
            return set(rank["checksums"])

        every = await names([])
        assert await names(["layers.0", "nowhere"]) == {name for name in every if "layers.0" not in name} < every
        fine(await check("snapshot", ["layers.0"]))
        fine(await http.post("/update_weights_from_disk", json={"model_path": str(plane.model(1))}))
        answer = await check("compare", ["layers.0"])
        refused(answer, 409)
        (rank,) = answer.json()["error"]["ranks"]
        assert set(rank["mismatches"]) == await names(["layers.0"])
        fine(await check("compare", sorted(every)))


async def test_a_checksum_takes_one_worker_after_another_out_of_routing(plane: Plane) -> None:
    ids = plane.spawn_copies(3)
    fleet = await plane.fleet()
    async with facade(plane) as http:
        for path, body in (("/weights_checker", {}), ("/weight_checker", {"action": "checksum"})):
            statuses = await StatusLog.follow(fleet.client)
            fine(await http.post(path, json=body))
            assert await served(http) == [(True, "initial")] * 3
            await plane.until(lambda statuses=statuses: {*_closed(statuses)} == statuses.admitted[-1] == {*ids})
            assert _closed(statuses) == ids, path


def _closed(statuses: StatusLog) -> list[str]:
    """The workers that left routing for a check, in that order."""
    those = [one["instance_id"] for one in statuses.events if one["admission"]["reasons"] == ["checking"]]
    return list(dict.fromkeys(those))


async def test_a_colocated_trainer_updates_while_the_kv_cache_is_released(plane: Plane) -> None:
    """verl's order, slime's, and verl's for adapters: memory goes after the rollout, the trainer resumes the memory
    of the weights, then sends new ones, and last the KV cache."""
    ids = plane.spawn_copies(2)
    adapter = make_fake_adapter(plane.tmp / "weights" / "adapter", 1, plane.model())
    async with facade(plane) as http:

        async def post(path: str, **body: Any) -> Any:
            return fine(await http.post(path, json=body))

        async def send(step: int) -> None:
            data = base64.b64encode((plane.model(step) / "model.safetensors").read_bytes()).decode()
            body = {"serialized_named_tensors": [data], "load_format": "safetensors", "weight_version": str(step)}
            await post("/update_weights_from_tensor", **body, flush_cache=False)

        async def makes(step: int) -> None:
            assert await served(http) == [(True, str(step))] * 2
            digest = model_digest(plane.model(step))
            body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 3, "temperature": 0}}
            for _ in ids:
                reply = await post("/generate", **body)
                assert reply["output_ids"] == [fake_token(digest, PROMPT, place) for place in range(3)]

        for step in (1, 2):  # verl: nothing is paused
            await post("/release_memory_occupation", tags=["kv_cache", "weights"])
            early = await http.post("/update_weights_from_disk", json={"model_path": str(plane.model())})
            refused(early, 409)
            assert [row["error"]["field"] for row in early.json()["workers"]] == ["memory"] * 2
            await post("/resume_memory_occupation", tags=["weights"])
            await send(step)
            assert (await http.get("/flush_cache")).status_code == 200
            assert await served(http) == [(False, str(step))] * 2
            await post("/resume_memory_occupation", tags=["kv_cache"])
            await makes(step)
        for step in (3, 4):  # slime: paused around the update, and on again before the KV cache is back
            assert (await http.get("/flush_cache")).status_code == 200
            await post("/release_memory_occupation")
            await post("/resume_memory_occupation", tags=["weights"])
            await post("/pause_generation")
            assert (await http.get("/flush_cache")).status_code == 200
            await send(step)
            told = await post("/continue_generation")
            assert told["weight_version"] == str(step)
            assert await served(http) == [(False, str(step))] * 2
            await post("/resume_memory_occupation", tags=["kv_cache"])
            await post("/resume_memory_occupation", tags=["cuda_graph"])
            await makes(step)
        await post("/release_memory_occupation", tags=["kv_cache"])
        await post("/load_lora_adapter", lora_name="a", lora_path=str(adapter))
        assert await served(http) == [(False, "4")] * 2
        await post("/resume_memory_occupation", tags=["kv_cache"])
        await makes(4)


async def test_areal_sends_aborted_requests_again(plane: Plane) -> None:
    """A pause ends what runs; its client sends each again, its tokens so far behind the prompt, until it is whole."""
    plane.spawn_copies(2, token_delay_s=0.01)
    tokens, requests = 400, 4
    digests = [model_digest(plane.model(seed)) for seed in (0, 1)]
    async with facade(plane) as http:

        async def generated(first: int) -> list[str]:
            """Generates in several requests. Returns the end of each."""
            prompt, made, ends = [first, 6, 7], 0, []
            while made < tokens and "length" not in ends:
                body = {
                    "input_ids": prompt,
                    "image_data": [],
                    "sampling_params": {"max_new_tokens": tokens - made, "temperature": 0, "ignore_eos": True},
                    "return_logprob": True,
                    "stream": False,
                }
                meta = fine(await http.post("/generate", json=body, timeout=3600))["meta_info"]
                new = [token for _, token, *_ in meta["output_token_logprobs"]]
                digest = digests[int(meta["weight_version"] == "1")] if new else ""
                assert new == [fake_token(digest, prompt, place) for place in range(len(new))]
                prompt, made = [*prompt, *new], made + len(new)
                ends.append(meta["finish_reason"]["type"])
            assert made == tokens
            return ends

        async def all_run() -> bool:
            loads = fine(await http.get("/v1/loads?include=core"))["loads"]
            return bool(sum(load["num_running_reqs"] for load in loads) == requests)

        assert (await http.get("/health")).status_code == 200
        running = [asyncio.create_task(generated(first)) for first in range(requests)]
        await plane.until(all_run, 30)
        fine(await http.post("/pause_generation", json={}))
        update = {"model_path": str(plane.model(1)), "abort_all_requests": True, "weight_version": "1"}
        fine(await http.post("/update_weights_from_disk", json=update))
        fine(await http.post("/continue_generation", json={}))
        for ends in await asyncio.gather(*running):
            assert (ends[0], ends[-1]) == ("abort", "length")


async def test_requests_are_aborted_if_any_call_of_an_update_says_so(plane: Plane) -> None:
    plane.spawn(token_delay_s=0.01)
    async with facade(plane) as http:
        for seed, whose in ((1, 0), (2, -1)):
            bodies = one_by_one(plane, seed)
            bodies[whose]["abort_all_requests"] = True
            async with aborts_what_runs(http):
                for body in bodies:
                    fine(await http.post("/update_weights_from_tensor", json=body))
            assert fine(await http.get("/v1/rl/state"))["sequence"] == seed


async def test_sglangs_call_releases_the_memory_of_all_workers_or_of_none(plane: Plane) -> None:
    plane.spawn()
    one = plane.spawn(patch=WITHOUT_A_SAVER)
    async with facade(plane) as http:
        error = refused(await http.post("/release_memory_occupation", json={"tags": ["kv_cache"]}), 501)
        assert error["lacking"] == {one.instance_id: "it has no saver"}
        assert await served(http) == [(True, "initial")] * 2


BUSY = """
import worker.engines.fake.adapter as fake
flush = fake.FakeEngine.flush_cache
async def flush_cache(self):
    return not Path({flag!r}).exists() and await flush(self)
fake.FakeEngine.flush_cache = flush_cache
"""


async def test_a_flush_that_was_not_done_is_a_400(plane: Plane) -> None:
    """SGLang's clients repeat the call on a 400."""
    flag = plane.tmp / "busy"
    flag.touch()
    one = plane.spawn(patch=BUSY.format(flag=str(flag)))
    async with facade(plane) as http:
        answer = await http.get("/flush_cache")
        assert "Flush cache failed" in refused(answer, 400)["message"]
        assert one.instance_id in answer.json()["message"]
        flag.unlink()
        assert fine(await http.get("/flush_cache"))["success"] is True


async def test_an_update_that_fails_at_its_end_leaves_no_worker_paused(plane: Plane) -> None:
    """`continue_generation` commits. If it fails, nothing of the update is left and the fleet continues as before. If
    it has not begun, the update remains, and the error says for how long the fleet stays paused."""
    plane.spawn_copies(2)
    part = tensors_of(plane, 1)
    async with facade(plane) as http:
        fine(await http.post("/pause_generation", json={}))
        wrong = tensors_of(plane, 1, nbytes=2048)
        fine(await http.post("/update_weights_from_tensor", json=wrong))
        error = refused(await http.post("/continue_generation", json={}), 400)
        assert "generation continues by the committed version" in error["message"]
        assert fine(await http.get("/is_paused")) == {"is_paused": False}
        assert await served(http) == [(True, "initial")] * 2
        # Another one holds the fleet.
        fine(await http.post("/pause_generation", json={}))
        fine(await http.post("/update_weights_from_tensor", json=part))
        other = {"transport": {"backend": "filesystem", "path": str(plane.model(2))}}
        prepared = fine(await http.post("/v1/rl/prepare_weights_update", json=other))
        error = refused(await http.post("/continue_generation", json={}), 503)
        assert (error["code"], len(error["paused_for_s"])) == ("locked", 2)
        fine(await http.post("/v1/rl/abort_weights_update", json={"update_id": prepared["update_id"]}))
        assert fine(await http.post("/continue_generation", json={}))["weight_version"] == "one"
        assert await served(http) == [(True, "one")] * 2
        assert fine(await http.get("/is_paused")) == {"is_paused": False}

"""vLLM's dialect, route by route, over a fleet of processes without torch; and SkyRL's calls in their order."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import pytest_asyncio

from frontend.frontend_limits import FrontendLimits
from rl_plane.bus.lock import DEFAULT_LOCK_WAIT_S
from rl_plane.protocol.worker_ops import DEFAULT_PAUSE_LEASE_S
from tests.support.dialect_facade import PROMPT, facade, fine, refused, served, taken_before
from tests.support.memory_saver import WITHOUT_A_SAVER
from worker.engines.fake.fake_model import fake_token, make_fake_adapter
from worker.receive.staging import model_digest

if TYPE_CHECKING:
    from tests.conftest import Plane

pytestmark = [pytest.mark.slow, pytest.mark.parallel]


@pytest_asyncio.fixture
async def http(plane: Plane) -> AsyncIterator[httpx.AsyncClient]:
    plane.spawn_copies(3, token_delay_s=0.01)
    async with facade(plane) as http:
        yield http


async def streaming(
    http: httpx.AsyncClient,
    begun: asyncio.Event,
    tokens: int = 4000,
    path: str = "/inference/v1/generate",
    body: dict[str, Any] | None = None,
    headers: dict[str, str] | None = None,
) -> list[dict[str, Any]]:
    """A long request; the events that came until it ended, each with a token or several."""
    body = body or {"token_ids": PROMPT, "sampling_params": {"max_tokens": tokens}}
    events = []
    async with http.stream("POST", path, json={**body, "stream": True}, headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                begun.set()
                events.append(json.loads(line.removeprefix("data: ")))
    return events


async def test_the_reading_routes_answer_before_the_first_update(plane: Plane, http: httpx.AsyncClient) -> None:
    assert fine(await http.request("GET", "/get_world_size", json={})) == {"world_size": 3}
    assert fine(await http.get("/get_world_size?include_dp=false")) == {"world_size": 3}
    assert fine(await http.get("/weight_info")) == {"weight_version": "initial"}
    assert fine(await http.get("/is_paused")) == {"is_paused": False}
    assert fine(await http.get("/is_sleeping")) == {"is_sleeping": False}
    (model,) = fine(await http.get("/v1/models"))["data"]
    config = fine(await http.get("/server_info?config_format=json"))["vllm_config"]
    assert config["model_config"]["model"] == model["id"]
    assert config["model_config"]["dtype"] == "torch.float32"
    assert config["model_config"]["max_model_len"] == model["max_model_len"]
    assert config["model_config"]["logprobs_mode"] == "raw_logprobs"
    assert config["parallel_config"]["data_parallel_size"] == 1
    assert config["parallel_config"]["world_size"] == 3
    assert config["weight_transfer_config"] == {"backend": "gloo"}
    # What a client compares before it brings adapters alone: of the workers that have least.
    assert config["lora_config"]["max_lora_rank"] == 512
    assert config["lora_config"]["max_loras"] == 512
    assert isinstance(fine(await http.get("/server_info?config_format=text"))["vllm_config"], str)


async def test_a_pause_ends_running_requests_unless_its_mode_is_keep(http: httpx.AsyncClient) -> None:
    begun = asyncio.Event()
    stream = asyncio.create_task(streaming(http, begun))
    await begun.wait()
    assert fine(await http.post("/pause")) == {"status": "paused"}
    assert 0 < len(await stream) < 4000
    assert fine(await http.get("/is_paused")) == {"is_paused": True}
    assert fine(await http.post("/resume")) == {"status": "resumed"}
    begun.clear()
    stream = asyncio.create_task(streaming(http, begun, 400))
    await begun.wait()
    assert fine(await http.post("/pause?mode=keep")) == {"status": "paused"}
    assert not stream.done()
    assert fine(await http.post("/resume", json={})) == {"status": "resumed"}
    assert sum(len(event["choices"][0]["token_ids"]) for event in await stream) == 400
    refused(await http.post("/pause?mode=hard"), 400)
    assert fine(await http.get("/is_paused")) == {"is_paused": False}


async def test_requests_are_ended_and_counted_over_the_fleet(http: httpx.AsyncClient) -> None:
    events = [asyncio.Event() for _ in range(3)]
    streams = [asyncio.create_task(streaming(http, event)) for event in events]
    for event in events:
        await event.wait()
    assert fine(await http.post("/abort_requests", json={})) == {"status": "aborted", "aborted": 3}
    for stream in streams:
        assert len(await stream) < 4000
    assert fine(await http.post("/abort_requests", json={"request_ids": ["unknown"]}))["aborted"] == 0


async def test_a_caller_ends_its_request_by_its_own_name(http: httpx.AsyncClient) -> None:
    """The name comes in vLLM's field, in SGLang's field, or in the header."""
    events = [asyncio.Event() for _ in range(4)]
    long, longs = {"max_tokens": 4000}, {"max_new_tokens": 4000}
    asked: list[tuple[str, dict[str, Any], dict[str, str]]] = [
        ("/inference/v1/generate", {"token_ids": PROMPT, "request_id": "mine", "sampling_params": long}, {}),
        ("/generate", {"input_ids": PROMPT, "rid": "yours", "sampling_params": longs}, {}),
        ("/v1/completions", {"prompt": "a", **long}, {"X-Request-Id": "theirs"}),
        ("/v1/completions", {"prompt": "a", **long}, {}),
    ]
    streams = [
        asyncio.create_task(streaming(http, event, path=path, body=body, headers=headers))
        for event, (path, body, headers) in zip(events, asked, strict=True)
    ]
    async with asyncio.timeout(30):
        for event in events:
            await event.wait()
    for name, path, body in (
        ("mine", "/v1/rl/abort_requests", {"request_ids": ["mine", "unknown"]}),
        ("yours", "/abort_request", {"rid": "yours"}),
        ("theirs", "/abort_requests", {"request_ids": ["theirs"]}),
    ):
        told = fine(await http.post(path, json=body))
        if path == "/abort_requests":
            assert told["aborted"] == 1, name
        elif path == "/v1/rl/abort_requests":
            assert sum(row["aborted"] for row in told["workers"]) == 1, name
        assert len(await streams.pop(0)) < 4000, name
    (other,) = streams
    assert not other.done()
    assert fine(await http.post("/abort_requests", json={}))["aborted"] == 1
    await other


async def test_vllms_cache_checker_and_sleep_calls_steer_the_fleet(http: httpx.AsyncClient) -> None:
    reply = fine(await http.post("/reset_prefix_cache", json={"reset_running_requests": False}))
    assert reply["success"] is True
    assert refused(await http.post("/reset_prefix_cache?reset_external=true"), 501)["field"] == "reset_external"
    checksums = fine(await http.post("/weight_checker", json={"action": "checksum"}))["checksums"]
    assert len(checksums) == 3
    assert len(set(checksums.values())) == 1
    same = {"action": "compare", "baseline": checksums}
    assert fine(await http.post("/weight_checker", json=same)) == {"match": True, "mismatches": []}
    one = sorted(checksums)[0]
    other = {"action": "compare", "baseline": {**checksums, one: "x"}}
    assert fine(await http.post("/weight_checker", json=other)) == {"match": False, "mismatches": [one]}
    refused(await http.post("/weight_checker", json={"action": "compare"}), 400)
    refused(await http.post("/weight_checker", json={"action": "guess"}), 400)
    # Sleeping engines serve nothing; their weights are not trusted when they wake up.
    assert fine(await http.post("/sleep?level=1")) == {"status": "sleeping", "level": 1}
    assert fine(await http.get("/is_sleeping")) == {"is_sleeping": True}
    assert not any(admitted for admitted, _ in await served(http))
    assert fine(await http.post("/wake_up?tags=weights"))["status"] == "sleeping"
    assert fine(await http.post("/wake_up?tags=kv_cache")) == {"status": "awake", "tags": ["kv_cache"]}
    assert fine(await http.get("/is_sleeping")) == {"is_sleeping": False}
    assert fine(await http.get("/is_paused")) == {"is_paused": False}
    # `scheduling` is not all of it while memory is released.
    fine(await http.post("/sleep?level=1"))
    assert fine(await http.post("/wake_up?tags=scheduling"))["status"] == "sleeping"
    assert fine(await http.get("/is_paused")) == {"is_paused": True}
    assert fine(await http.post("/wake_up"))["status"] == "awake"
    assert fine(await http.get("/is_paused")) == {"is_paused": False}
    refused(await http.post("/sleep?level=3"), 400)


HAS_REQUESTS = """
import worker.engines.fake.adapter as fake
async def flush_cache(self):
    return False
fake.FakeEngine.flush_cache = flush_cache
"""
BREAKS = HAS_REQUESTS.replace("return False", "raise fake.EngineFailed('it broke')")


async def test_a_cache_that_an_engine_keeps_is_no_success_and_no_error(plane: Plane) -> None:
    """vLLM's and SGLang's keep it while requests run. TRL raises at any status but 200."""
    plane.spawn()
    one = plane.spawn(patch=HAS_REQUESTS)
    async with facade(plane) as http:
        told = fine(await http.post("/reset_prefix_cache"))
        assert (told["success"], one.instance_id in told["message"]) == (False, True)
        plane.spawn(patch=BREAKS)
        answer = await http.post("/reset_prefix_cache")
        refused(answer, 409)
        assert "it broke" in answer.json()["message"]


DROPS_WHILE_FROZEN = HAS_REQUESTS.replace("return False", "return self.gate.is_paused")


async def test_running_requests_are_reset_with_the_cache(plane: Plane) -> None:
    """SkyRL sends JSON, vLLM's clients send a query. The requests continue, and so does a pause."""
    plane.spawn(patch=DROPS_WHILE_FROZEN, token_delay_s=0.01)
    async with facade(plane) as http:
        begun = asyncio.Event()
        stream = asyncio.create_task(streaming(http, begun, 400))
        await begun.wait()
        assert fine(await http.post("/reset_prefix_cache"))["success"] is False
        for path, body in (
            ("/reset_prefix_cache", {"reset_running_requests": True}),
            ("/reset_prefix_cache?reset_running_requests=true", None),
        ):
            assert fine(await http.post(path, json=body)) == {"success": True}
        assert sum(len(event["choices"][0]["token_ids"]) for event in await stream) == 400
        fine(await http.post("/pause?mode=keep"))
        assert (
            fine(await http.post("/reset_prefix_cache", json={"reset_running_requests": True}))["success"] is True
        )
        assert fine(await http.get("/is_paused")) == {"is_paused": True}
        fine(await http.post("/resume"))


async def test_a_sleep_that_only_paused_ends_where_no_memory_can_be_released(plane: Plane) -> None:
    """Level 0, as on every engine without a memory saver; `scheduling` is vLLM's own word for its end."""
    for _ in range(2):
        plane.spawn(patch=WITHOUT_A_SAVER)
    async with facade(plane) as http:
        for query in ("", "?tags=scheduling", "?tags=weights&tags=kv_cache", "?tags=scheduling&tags=weights"):
            fine(await http.post("/sleep?level=0"))
            assert fine(await http.get("/is_paused")) == {"is_paused": True}
            assert fine(await http.post("/wake_up" + query))["status"] == "awake", query
            assert fine(await http.get("/is_paused")) == {"is_paused": False}
            assert await served(http) == [(True, "initial")] * 2
        assert refused(await http.post("/sleep?level=1"), 501)["field"] == "op"
        refused(await http.post("/wake_up?tags=dreams"), 400)


async def test_a_sleeping_engine_needs_its_weights_for_an_update_and_serves_once_all_is_awake(
    plane: Plane, http: httpx.AsyncClient
) -> None:
    """SkyRL sends weights so when its trainer has the same GPU. The KV cache comes last."""
    update = {"update_info": {"weight_dir": str(plane.model(1))}}
    assert fine(await http.post("/sleep?level=2"))["level"] == 1, "as deep as it is"
    fine(await http.post("/start_weight_update"))
    assert refused(await http.post("/update_weights", json=update), 409)["message"]
    assert fine(await http.post("/wake_up?tags=weights"))["status"] == "sleeping"
    fine(await http.post("/pause?mode=keep&clear_cache=false"))
    fine(await http.post("/start_weight_update"))
    fine(await http.post("/update_weights", json=update))
    fine(await http.post("/finish_weight_update", json={"weight_version": "step_1"}))
    fine(await http.post("/resume"))
    assert await served(http) == [(False, "step_1")] * 3
    assert fine(await http.get("/is_sleeping")) == {"is_sleeping": True}
    assert fine(await http.post("/wake_up?tags=kv_cache"))["status"] == "awake"
    assert await served(http) == [(True, "step_1")] * 3
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 3}}
    (choice,) = fine(await http.post("/inference/v1/generate", json=body))["choices"]
    assert choice["token_ids"] == [fake_token(model_digest(plane.model(1)), PROMPT, place) for place in range(3)]


async def test_a_second_start_of_an_update_is_refused(plane: Plane, http: httpx.AsyncClient) -> None:
    """An update that was begun belongs to its trainer: a second start neither drops nor commits it, as in vLLM."""
    update = {"update_info": {"weight_dir": str(plane.model(1))}}
    fine(await http.post("/start_weight_update", headers={"Idempotency-Key": "one"}))
    assert "finish_weight_update" in refused(await http.post("/start_weight_update"), 409)["fix"]
    fine(await http.post("/start_weight_update", headers={"Idempotency-Key": "one"}))  # its answer was lost
    fine(await http.post("/update_weights", json=update))
    refused(await http.post("/start_weight_update"), 409)
    fine(await http.post("/finish_weight_update", json={"weight_version": "step_1"}))
    assert await served(http) == [(True, "step_1")] * 3
    # A failed update is over, and so is an update that another caller aborted.
    fine(await http.post("/start_weight_update"))
    refused(await http.post("/update_weights", json={"update_info": {"weight_dir": "/nowhere"}}), 400)
    error = refused(await http.post("/update_weight_version", json={"new_version": "step_2"}), 409)
    assert error["field"] == "new_version", "nothing is left that could be called so"
    fine(await http.post("/start_weight_update"))
    fine(await http.post("/update_weights", json={"update_info": {"weight_dir": str(plane.model(2))}}))
    fine(await http.post("/v1/rl/abort_weights_update", json={}))
    fine(await http.post("/start_weight_update"))
    fine(await http.post("/update_weights", json={"update_info": {"weight_dir": str(plane.model(2))}}))
    fine(await http.post("/finish_weight_update", json={"weight_version": "step_2"}))
    assert await served(http) == [(True, "step_2")] * 3


STUBBORN = """
import worker.engines.fake.adapter as fake
from rl_plane.errors import EngineFailed
go_on = fake.FakeEngine.resume
async def resume(self):
    if Path({flag!r}).exists():
        raise EngineFailed("it does not continue")
    await go_on(self)
fake.FakeEngine.resume = resume
"""


async def test_the_error_names_the_workers_that_stay_paused_and_for_how_long(plane: Plane) -> None:
    flag = plane.tmp / "stubborn"
    flag.touch()
    one = plane.spawn(patch=STUBBORN.format(flag=str(flag)))
    plane.spawn()
    async with facade(plane) as http:
        fine(await http.post("/pause"))
        error = refused(await http.post("/resume"), 409)
        assert list(error["paused_for_s"]) == [one.instance_id]
        assert 0 < error["paused_for_s"][one.instance_id] <= DEFAULT_PAUSE_LEASE_S
        flag.unlink()
        fine(await http.post("/resume"))
        assert fine(await http.get("/is_paused")) == {"is_paused": False}


FULL = """
import worker.engines.fake.adapter as fake
from rl_plane.errors import EngineFailed
async def release_memory(self, tags):
    raise EngineFailed("it can't release memory")
fake.FakeEngine.release_memory = release_memory
"""


async def test_a_sleep_that_only_paused_says_for_how_long(plane: Plane) -> None:
    one = plane.spawn(patch=FULL)
    async with facade(plane) as http:
        error = refused(await http.post("/sleep"), 500)
        assert list(error["paused_for_s"]) == [one.instance_id]
        assert fine(await http.get("/is_paused")) == {"is_paused": True}


async def test_vllms_adapter_calls_load_replace_and_unload(plane: Plane, http: httpx.AsyncClient) -> None:
    paths = [make_fake_adapter(plane.tmp / "weights" / f"adapter{seed}", seed, plane.model()) for seed in (1, 2)]
    body = {"lora_name": "a", "lora_path": str(paths[0])}
    assert "added" in fine(await http.post("/v1/load_lora_adapter", json=body))["message"]
    assert refused(await http.post("/v1/load_lora_adapter", json=body), 400)["field"] == "lora_name"
    again = {"lora_name": "a", "lora_path": str(paths[1]), "load_inplace": True}
    fine(await http.post("/v1/load_lora_adapter", json=again))
    assert [one["id"] for one in fine(await http.get("/v1/models"))["data"]][1:] == ["a"]
    missing = {"lora_name": "b", "lora_path": str(plane.tmp / "weights" / "none")}
    refused(await http.post("/v1/load_lora_adapter", json=missing), 404)
    fine(await http.post("/v1/unload_lora_adapter", json={"lora_name": "a", "lora_int_id": None}))
    refused(await http.post("/v1/unload_lora_adapter", json={"lora_name": "a"}), 404)


TWO_PLACES = """
import worker.engines.fake.adapter as fake
from dataclasses import replace
start = fake.FakeEngine.start
async def narrow(self):
    self.info = replace(await start(self), max_adapters=2)
    return self.info
fake.FakeEngine.start = narrow
"""


async def test_a_version_of_an_adapter_takes_the_place_of_the_oldest_where_none_is_left(plane: Plane) -> None:
    """AReaL loads each version under a name of its own, unloads none, and deletes the directory after the call."""
    for _ in range(2):
        plane.spawn(patch=TWO_PLACES)
    async with facade(plane) as http:
        for version, held in ((9, ["p-v9"]), (10, ["p-v10", "p-v9"]), (11, ["p-v10", "p-v11"])):
            path = make_fake_adapter(plane.tmp / "weights" / f"v{version}", version, plane.model())
            body = {"lora_name": f"p-v{version}", "lora_path": str(path)}
            fine(await http.post("/v1/load_lora_adapter", json=body))
            assert sorted(fine(await http.get("/v1/rl/weight_version"))["adapters"]) == held
            shutil.rmtree(path)
        path = make_fake_adapter(plane.tmp / "weights" / "another", 1, plane.model())
        for name in ("q-v12", "p-v8", "p"):
            body = {"lora_name": name, "lora_path": str(path)}
            assert "max_loras" in refused(await http.post("/v1/load_lora_adapter", json=body), 400)["fix"]
        assert sorted(fine(await http.get("/v1/rl/weight_version"))["adapters"]) == held


async def test_skyrls_adapter_calls_load_replace_and_unload(plane: Plane, http: httpx.AsyncClient) -> None:
    """SkyRL's `load_lora_adapter` and `unload_lora_adapter`: the same name with another directory, without a pause."""
    paths = [make_fake_adapter(plane.tmp / "weights" / f"adapter{seed}", seed, plane.model()) for seed in (1, 2)]
    answers, digests = [], []
    for path in paths:
        body = {"lora_name": "policy", "lora_path": str(path)}
        answers.append(fine(await http.post("/skyrl/v1/load_lora_adapter", json=body)))
        held = fine(await http.get("/v1/rl/weight_version"))["adapters"]
        assert list(held) == ["policy"]
        digests.append(held["policy"]["digest"])
    assert answers[0] == answers[1]
    assert answers[0].keys() == {"status", "lora_name", "lora_int_id"}
    assert (answers[0]["status"], answers[0]["lora_name"]) == ("ok", "policy")
    assert answers[0]["lora_int_id"] > 0
    assert digests[0] != digests[1]
    assert [one["id"] for one in fine(await http.get("/v1/models"))["data"]][1:] == ["policy"]
    missing = {"lora_name": "policy", "lora_path": str(plane.tmp / "weights" / "none")}
    refused(await http.post("/skyrl/v1/load_lora_adapter", json=missing), 404)
    assert (
        refused(await http.post("/skyrl/v1/load_lora_adapter", json={"lora_name": "a"}), 400)["field"]
        == "lora_path"
    )
    fine(await http.post("/v1/unload_lora_adapter", json={"lora_name": "policy"}))
    assert fine(await http.get("/v1/rl/weight_version"))["adapters"] == {}


async def test_three_calls_of_vllm_commit_an_update_from_a_directory(
    plane: Plane, http: httpx.AsyncClient
) -> None:
    """vLLM's session without a group: `update_info` names a directory."""
    fine(await http.post("/start_weight_update"))
    assert await served(http) == [(True, "initial")] * 3
    first = {"update_info": {"weight_dir": str(plane.model(1))}}
    told = fine(await http.post("/update_weights", json=first))
    fine(await http.post("/abort_requests", json={}))  # a rollout's client has nothing to do with it
    assert fine(await http.post("/update_weights", json=first)) == told, "its answer was lost"
    assert await served(http) == [(True, "initial")] * 3
    second = {"update_info": {"weight_dir": str(plane.model(2))}}
    refused(await http.post("/update_weights", json=second), 409)
    reply = fine(await http.post("/finish_weight_update", json={"weight_version": "step_1"}))
    assert reply["version"]["label"] == "step_1"
    assert await served(http) == [(True, "step_1")] * 3
    assert fine(await http.get("/weight_info")) == {"weight_version": "step_1"}
    # A repeated finish, whose first answer was lost, is answered again; nothing is committed twice.
    again = fine(await http.post("/finish_weight_update", json={"weight_version": "step_1"}))
    assert again["version"] == reply["version"]
    # Named between start and finish.
    fine(await http.post("/start_weight_update", json={"is_checkpoint_format": True}))
    fine(await http.post("/update_weights", json={"update_info": [{"weight_dir": str(plane.model(2))}] * 3}))
    named = fine(await http.post("/update_weight_version", json={"new_version": "step_2"}))
    assert named == {"success": True, "new_version": "step_2"}
    fine(await http.post("/finish_weight_update", content=b"null"))
    assert await served(http) == [(True, "step_2")] * 3
    fine(await http.post("/update_weight_version", json={"new_version": "step_2"}))
    error = refused(await http.post("/update_weight_version", json={"new_version": "other"}), 409)
    assert "'step_2'" in error["message"]


async def test_a_finish_by_way_of_another_frontend_is_of_the_update_that_waits(
    plane: Plane, http: httpx.AsyncClient
) -> None:
    """This also holds if the other frontend has finished an update before, whose answer would say that nothing is left
    to do."""

    async def begin(at: httpx.AsyncClient, seed: int) -> None:
        fine(await at.post("/start_weight_update"))
        fine(await at.post("/update_weights", json={"update_info": {"weight_dir": str(plane.model(seed))}}))

    async def finish(at: httpx.AsyncClient, label: str | None) -> httpx.Response:
        return await at.post("/finish_weight_update", json={"weight_version": label})

    async with facade(plane) as other:
        await begin(other, 1)
        fine(await finish(other, "step_1"))
        await begin(http, 2)
        done = fine(await finish(other, "step_2"))
        assert done["version"]["label"] == "step_2"
        assert await served(http) == [(True, "step_2")] * 3
        # Its answer was lost: either frontend knows it. Another label is of another update.
        for at, label in ((other, "step_2"), (other, None), (http, "step_2"), (http, None)):
            assert fine(await finish(at, label))["version"] == done["version"]
        for at in (other, http):
            assert refused(await finish(at, "step_3"), 409)["field"] == "weight_version"
        # A call about an update that has gone does not get the answer of the update before it.
        await begin(http, 1)
        fine(await http.post("/v1/rl/abort_weights_update", json={}))
        for at in (other, http):
            assert refused(await finish(at, None), 409)["field"] == "update_id"
        assert await served(http) == [(True, "step_2")] * 3


async def test_a_finish_waits_for_a_locked_fleet_and_reports_a_lost_fleet(plane: Plane) -> None:
    """The answer is no 503, because a client would send the weights again. The finish waits longer than its trainer
    may be silent."""
    plane.spawn()
    client = await plane.client()

    async def send(http: httpx.AsyncClient, seed: int) -> None:
        fine(await http.post("/start_weight_update"))
        info = {"weight_dir": str(plane.model(seed))}
        fine(await http.post("/update_weights", json={"update_info": info}))

    async with facade(plane, limits=FrontendLimits(session_idle_s=int(DEFAULT_LOCK_WAIT_S))) as http:
        await send(http, 1)
        async with taken_before(client, "complete_weights_update"):
            fine(await http.post("/finish_weight_update"))
    async with facade(plane) as http:
        await send(http, 2)
        plane.kill_all()
        assert refused(await http.post("/finish_weight_update"), 409)["cause"] == "no_workers"


async def test_an_update_while_another_one_holds_the_fleet_is_a_503_that_may_be_repeated(
    plane: Plane, http: httpx.AsyncClient
) -> None:
    fine(await http.post("/start_weight_update"))
    fine(await http.post("/update_weights", json={"update_info": {"weight_dir": str(plane.model(1))}}))
    other = {"weight_dir": str(plane.model(2))}
    response = await http.post("/update_weights", json=other)
    assert refused(response, 503)["code"] == "locked"
    assert int(response.headers["retry-after"]) >= 1
    fine(await http.post("/finish_weight_update"))
    fine(await http.post("/update_weights", json=other))
    assert await served(http) == [(True, "2")] * 3


async def test_a_call_out_of_order_or_impossible_is_refused_by_its_field(
    plane: Plane, http: httpx.AsyncClient
) -> None:
    tcp = {"master_address": "127.0.0.1", "master_port": 29500, "rank_offset": 1, "world_size": 4}
    for path, body, status, field in [
        ("/finish_weight_update", {}, 409, "update_id"),
        ("/update_weights", {"update_info": {"names": [], "dtype_names": [], "shapes": []}}, 409, "update_info"),
        ("/update_weights", {"update_info": {"names": []}}, 400, "update_info.dtype_names"),
        ("/update_weights", {"update_info": [{"names": ["a"]}, {"names": ["b"]}]}, 501, "update_info"),
        ("/update_weights", {"update_info": [{"weight_dir": str(plane.model(1))}] * 2}, 400, "update_info"),
        ("/update_weights", {"update_info": [{"weight_dir": str(plane.model(1))}] * 3}, 409, None),
        ("/update_weights", {"update_info": {"ipc_handles_pickled": "gASV"}}, 409, "update_info"),
        ("/update_weights", {"update_info": {"weight_dir": str(plane.model(1))}}, 409, None),
        ("/start_draft_weight_update", {}, 501, "path"),
        ("/init_weight_transfer_engine", {}, 400, "init_info"),
        ("/init_weight_transfer_engine", {"init_info": {"rank_offset": 1}}, 400, "init_info.world_size"),
        ("/init_weight_transfer_engine", {"init_info": tcp}, 501, "init_info.backend"),
        ("/init_weight_transfer_engine", {"init_info": {**tcp, "backend": "mooncake"}}, 501, None),
        (
            "/init_weight_transfer_engine",
            {"init_info": {**tcp, "backend": "gloo", "world_size": 5}},
            400,
            "world_size",
        ),
        ("/init_weight_transfer_engine", {"init_info": {**tcp, "nccl_unique_id_b64": "AA=="}}, 501, None),
        ("/collective_rpc", {"method": "reset_weights"}, 501, "method"),
        ("/engine/update_weights_from_distributed", {"engine_rpc": "update_weights"}, 400, "update_info"),
        ("/engine/update_weights_from_distributed", {"engine_rpc": "pull"}, 400, "engine_rpc"),
        (
            "/engine/update_weights_from_distributed",
            {"engine_rpc": "start_weight_update", "is_checkpoint_format": False},
            400,
            "is_checkpoint_format",
        ),
        ("/collective_rpc", {"method": "skyrl_wake_preserved", "kwargs": {"tags": ["weights"]}}, 501, "method"),
        ("/collective_rpc", {}, 400, "method"),
        ("/collective_rpc", {"method": "update_weights_nccl"}, 400, "kwargs.update_info"),
    ]:
        error = refused(await http.post(path, json=body), status)
        assert field in (None, error["field"]), (path, body, error)
        assert error["fix"], (path, body)
    assert await served(http) == [(True, "initial")] * 3
    assert len(fine(await http.get("/v1/rl/updates"))["updates"]) == 1


async def test_skyrls_calls_update_the_fleet_at_each_step(plane: Plane, http: httpx.AsyncClient) -> None:
    """SkyRL's client has no time-outs and does not repeat. It needs `Content-Length`, JSON, and a real bool."""
    assert fine(await http.request("GET", "/get_world_size", json={}))["world_size"] == 3
    for step in (1, 2):
        fine(await http.post("/pause?mode=keep&clear_cache=false"))
        try:
            assert fine(await http.post("/reset_prefix_cache", json={"reset_running_requests": False})) == {
                "success": True
            }
            start = {"method": "skyrl_start_weight_update", "kwargs": {"is_checkpoint_format": True}}
            assert fine(await http.post("/collective_rpc", json=start)) == {"results": [None] * 3}
            info = {"weight_dir": str(plane.model(step))}
            update = {"method": "update_weights_nccl", "kwargs": {"update_info": info}}
            fine(await http.post("/collective_rpc", json=update))
            fine(await http.post("/collective_rpc", json={"method": "skyrl_finish_weight_update"}))
        finally:
            fine(await http.post("/resume"))
        assert await served(http) == [(True, str(step))] * 3


async def test_versions_that_differ_are_an_error_that_names_them(plane: Plane, http: httpx.AsyncClient) -> None:
    """A hung worker makes reading answers say who it is, at once."""
    hung = plane.spawn()
    assert fine(await http.get("/get_world_size")) == {"world_size": 4}
    hung.stop()
    try:
        # Side by side, as the fleet forgets a worker that is silent for long. The reply has no version for it.
        paths = ("/get_world_size", "/weight_info", "/get_weight_version", "/model_info")
        for answer in await asyncio.gather(*(http.get(path) for path in paths)):
            error = refused(answer, 503)
            assert hung.instance_id in error["message"], answer.url
            rows = answer.json()["workers"]
            assert {row["instance_id"] for row in rows if row["status"] == "error"} == {hung.instance_id}
    finally:
        hung.go_on()
    await plane.until(lambda: _size(http, 4))


async def _size(http: httpx.AsyncClient, ranks: int) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        response = await http.get("/get_world_size")
        body: dict[str, Any] = response.json()
        return response.status_code == 200 and body["world_size"] == ranks
    return False

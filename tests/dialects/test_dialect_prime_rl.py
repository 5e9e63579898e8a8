"""prime-rl's dialect: the calls of its client in their order, with its bodies, time-outs and retries."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.support.dialect_facade import facade, fine, refused, served
from tests.support.prime_rl_calls import PrimeRl, http
from worker.engines.fake.fake_model import make_fake_adapter, make_fake_model

__all__ = ["http"]

if TYPE_CHECKING:
    from tests.conftest import Plane

pytestmark = [pytest.mark.slow, pytest.mark.parallel]


async def label_of(http: httpx.AsyncClient) -> str:
    reply = fine(await http.get("/v1/rl/weight_version"))
    return str(reply["version"]["label"])


@pytest.mark.parametrize("base", ["", "/v1/rl"])
async def test_an_orchestrators_calls_update_weights_and_adapters(
    plane: Plane, http: httpx.AsyncClient, base: str
) -> None:
    prime = PrimeRl(http, base)
    (model,) = [one["id"] for one in fine(await http.get("/v1/models"))["data"]]
    await prime.start(model)
    for step in (1, 2):
        await prime.update(plane.model(step))
        states = await served(http)
        assert states == [(True, str(step))] * 2
    assert prime.asked == 6
    rows = fine(await http.get("/v1/rl/state"))["workers"]
    assert {row["pause_state"] for row in rows} == {"running"}
    # An adapter, without a pause; its name again replaces it.
    for seed in (1, 2):
        waits = {"lora_name": "policy", "lora_path": (plane.tmp / "weights" / "none").as_posix()}
        assert (await http.post(base + "/load_lora_adapter", json=waits)).status_code == 404
        path = make_fake_adapter(plane.tmp / "weights" / f"adapter{seed}", seed, plane.model())
        await prime.admin("/load_lora_adapter", json={"lora_name": "policy", "lora_path": path.as_posix()})
    assert [one["id"] for one in fine(await http.get(base + "/v1/models"))["data"]] == [model, "policy"]
    await prime.admin("/v1/unload_lora_adapter", json={"lora_name": "policy"})
    refused(await http.post(base + "/v1/unload_lora_adapter", json={"lora_name": "policy"}), 404)


@pytest.mark.parametrize("base", ["", "/v1/rl"])
async def test_prime_rl_waits_for_a_fleet_that_starts_later(plane: Plane, base: str) -> None:
    """The orchestrator asks for `/health` each second, then once for its model. Beneath `/v1/rl`, `/health` is the
    frontend's own."""
    async with facade(plane) as http:
        prime, first = PrimeRl(http, base), "/v1/models" if base else "/health"
        waits = await http.get(base + first)
        assert (waits.status_code, waits.json()["error"]["code"]) == (503, "no_workers")
        assert waits.headers["retry-after"] == "1"
        assert fine(await http.get("/v1/rl/health")) == {"status": "ok"}
        worker = plane.spawn()
        await plane.until(lambda: _answers(http, base + first))
        await prime.start("seed0")
        worker.kill()
        await plane.until(lambda: _answers(http, base + first, 503))


async def _answers(http: httpx.AsyncClient, path: str, status: int = 200) -> bool:
    return (await http.get(path)).status_code == status


async def test_update_weights_takes_dynamos_older_body_and_its_own(plane: Plane, http: httpx.AsyncClient) -> None:
    body = {"weight_dir": str(plane.model(1)), "weight_version": "step_1", "reset_prefix_cache": False}
    reply = fine(await http.post("/v1/rl/update_weights", json=body))
    assert (reply["status"], reply["weight_version"]) == ("ok", "step_1")
    assert await label_of(http) == "step_1"
    body = {"weight_dir": str(plane.model(2)), "weight_version": "step_2", "skip_prefix_cache_reset": True}
    fine(await http.post("/update_weights", json=body))
    assert await label_of(http) == "step_2"
    # The facade's own body goes where it always went.
    own = {"transport": {"backend": "filesystem", "path": str(plane.model(3))}, "version": "step_3"}
    assert fine(await http.post("/v1/rl/update_weights", json=own))["version"]["label"] == "step_3"
    assert (await http.post("/v1/rl/update_weights")).json()["error"]["field"] == "transport"


@pytest.mark.parametrize("field", ["component", "workers", "epoch", "fingerprint"])
async def test_its_body_below_the_facades_prefix_takes_no_selection(
    plane: Plane, http: httpx.AsyncClient, field: str
) -> None:
    body = {"weight_dir": str(plane.model(1)), "weight_version": "step_1"}
    for more, query in (({field: "1"}, {}), ({}, {field: "1"})):
        reply = await http.post("/v1/rl/update_weights", json={**body, **more}, params=query)
        assert (reply.status_code, reply.json()["error"]["field"]) == (400, field)
    assert await label_of(http) != "step_1"


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"weight_dir": None},
        {"weight_dir": ""},
        {"weight_dir": None, "update_info": {"names": []}},
        {"weight_dir": "/any", "update_info": {"names": []}},
    ],
)
async def test_no_directory_means_the_broadcaster(http: httpx.AsyncClient, body: dict[str, Any]) -> None:
    before = await served(http)
    error = refused(await http.post("/update_weights", json=body), 409)
    assert error["field"] == "weight_dir"
    assert await served(http) == before


async def test_an_impossible_call_is_refused_without_5xx(plane: Plane, http: httpx.AsyncClient) -> None:
    """prime-rl's client repeats after every 5xx, so none of these errors is a 5xx."""
    before = fine(await http.get("/v1/rl/state"))["version"]
    nccl = {
        "host": "127.0.0.1",
        "port": 29501,
        "rank_offset": 0,
        "inference_world_size": 2,
        "timeout": 30,
        "quantize_in_weight_transfer": False,
    }
    for path, body, status, field in [
        ("/init_broadcaster", nccl, 400, "init_info.backend"),
        ("/init_broadcaster", {**nccl, "backend": "mpi"}, 400, "init_info.backend"),
        ("/init_broadcaster", {**nccl, "backend": "gloo", "inference_world_size": 3}, 400, "world_size"),
        ("/init_broadcaster", {**nccl, "backend": "gloo", "quantize_in_weight_transfer": True}, 400, None),
        ("/init_broadcaster", {"host": "x"}, 400, "port"),
        ("/update_weights", {"weight_dir": "/etc"}, 400, "transport.path"),
        ("/update_weights", {"weight_dir": 3}, 400, "weight_dir"),
        ("/update_weights", {"weight_dir": str(plane.tmp / "weights" / "none")}, 400, "transport.path"),
        ("/load_lora_adapter", {"lora_name": "a"}, 400, "lora_path"),
        # Not there yet: its client waits for the shared file system.
        ("/load_lora_adapter", {"lora_name": "a", "lora_path": str(plane.tmp / "weights" / "none")}, 404, None),
    ]:
        error = refused(await http.post(path, json=body), status)
        assert field in (None, error["field"]), (path, body)
        assert error["fix"]
    assert fine(await http.get("/v1/rl/state"))["version"] == before


WITHOUT_ADAPTERS = """
import worker.engines.fake.adapter as fake
described = fake.EngineInfo
lacking = {"prepare_update:lora": "it has none", "update_weights:lora": "it has none"}
fake.EngineInfo = lambda **info: described(**info | {"lacks": lacking})
"""


@pytest.mark.parametrize("dialects", [("prime-rl",), ("vllm", "sglang", "prime-rl")])
async def test_an_adapter_that_no_engine_takes_is_asked_for_once(plane: Plane, dialects: tuple[str, ...]) -> None:
    plane.spawn(patch=WITHOUT_ADAPTERS)
    path = make_fake_adapter(plane.tmp / "weights" / "adapter", 1, plane.model())
    body = {"lora_name": "policy", "lora_path": path.as_posix()}
    async with facade(plane, dialects=dialects) as http:
        for base in ("", "/v1/rl"):
            prime = PrimeRl(http, base)
            with pytest.raises(httpx.HTTPStatusError) as caught:
                await prime.admin("/load_lora_adapter", json=body)
            error = caught.value.response.json()["error"]
            assert (caught.value.response.status_code, prime.asked) == (400, 1)
            assert "it has none" in error["message"]
        # The facade's own call is refused as unsupported.
        own = await http.post("/v1/rl/load_lora_adapter", json={**body, "cast": False})
        assert (own.status_code, own.json()["error"]["code"]) == (501, "unsupported")


@pytest.mark.parametrize("dialects", [("prime-rl",), ("vllm", "sglang", "prime-rl")])
async def test_prime_rls_pool_of_dynamos_workers_updates_by_directory_only(
    plane: Plane, dialects: tuple[str, ...]
) -> None:
    """Dynamo's pool calls methods of prime-rl's own worker. The fleet carries out only the method that
    names a directory."""
    plane.spawn_copies(2)
    async with facade(plane, dialects=dialects) as http:
        for step, more in ((1, {}), (2, {"timeout": 720.0, "kwargs": {}})):
            await PrimeRl(http).update_by_method(plane.model(step), **more)
            assert await served(http) == [(True, str(step))] * 2
        broadcaster = {"host": "h", "port": 29501, "rank_offset": 0, "inference_world_size": 2, "timeout": 1200}
        for body, field in (
            (
                {"method": "init_broadcaster", "kwargs": {**broadcaster, "quantize_in_weight_transfer": False}},
                "method",
            ),
            ({"method": "init_broadcaster", "args": list(broadcaster.values())}, "method"),
            ({"method": "update_weights_from_path", "args": [None]}, "args"),
            ({"method": "update_weights_from_path"}, "args"),
            ({"method": "update_weights_from_path", "args": [3]}, "args"),
            ({"method": "update_weights_from_path", "args": [str(plane.model(1)), str(plane.model(2))]}, "args"),
            ({"method": "update_weights_from_path", "args": ["/etc"]}, "transport.path"),
        ):
            error = refused(await http.post("/collective_rpc", json=body), 400)
            assert (error["field"], bool(error["fix"])) == (field, True), body
        status = 501 if "vllm" in dialects else 400
        refused(await http.post("/collective_rpc", json={"method": "reload_weights"}), status)
        assert await served(http) == [(True, "2")] * 2


async def test_a_repeated_post_gets_the_first_ones_answer(plane: Plane) -> None:
    """The client repeats its call after 720 s, while the first call is still under way."""
    plane.spawn_copies(2, stage_delay_s=1.0)
    async with facade(plane) as http:
        body = {"weight_dir": str(plane.model(1))}
        replies = await asyncio.gather(*(http.post("/update_weights", json=body) for _ in range(3)))
        assert len({fine(reply)["version"]["sequence"] for reply in replies}) == 1
        assert fine(replies[0])["version"]["sequence"] == 1


async def test_an_update_repeated_after_its_end_reads_the_directory_again(
    plane: Plane, http: httpx.AsyncClient
) -> None:
    """The answer was lost. The update is not remembered, because a trainer may write each step to the same path."""
    directory = plane.model(1)

    async def version(path: str, body: dict[str, Any], request_id: str = "") -> tuple[int, str]:
        fine(await http.post(path, json=body, headers={"Idempotency-Key": request_id}))
        told = fine(await http.get("/v1/rl/weight_version"))["version"]
        return told["sequence"], told["digest"]

    asked: tuple[tuple[str, dict[str, Any]], ...] = (
        ("/update_weights", {"weight_dir": str(directory)}),
        ("/collective_rpc", {"method": "update_weights_from_path", "args": [str(directory)]}),
        ("/update_weights_from_disk", {"model_path": str(directory)}),  # SGLang's
    )
    before = 0
    for path, body in asked:
        (first, digest), (again, same) = [await version(path, body) for _ in range(2)]
        assert (first, again, same) == (before + 1, before + 2, digest)
        before = again
    make_fake_model(directory, 2)
    for path, body in asked:
        sequence, other = await version(path, body)
        assert (sequence, other != digest) == (before + 1, True)
        before = sequence
    # A caller that gives it a name is answered by that.
    named = [await version(*asked[0], "step 3") for _ in range(2)]
    assert named == [(before + 1, other)] * 2


async def test_a_worker_that_dies_in_an_update_fails_it_for_all_with_no_5xx(plane: Plane) -> None:
    doomed, _ = plane.spawn_many(2, stage_delay_s=5.0)
    async with facade(plane) as http:
        prime = PrimeRl(http)
        update = asyncio.create_task(prime.update(plane.model(1)))

        async def preparing() -> bool:
            updates = fine(await http.get("/v1/rl/updates"))["updates"]
            return bool(updates[0]["outcome"] == "running")

        await plane.until(preparing)
        doomed.kill()
        with pytest.raises(httpx.HTTPStatusError) as caught:
            await update
        assert refused(caught.value.response, 409)["code"] in ("update_aborted", "conflict")
        assert await served(http) == [(True, "initial")]


async def test_dynamos_clients_discover_the_workers_and_the_fleet(plane: Plane, http: httpx.AsyncClient) -> None:
    root = str(http.base_url).rstrip("/")
    found = fine(await http.get("/v1/rl/workers"))
    assert (found["protocol_version"], found["namespace"]) == (1, plane.namespace)
    for row in found["workers"]:
        assert (row["admin_base_url"], row["component"], row["transport"]) == (root, plane.component, "nats")
        assert row["request_plane_url"] == f"{plane.namespace}.{plane.component}.rl.{row['instance_id']}"
        assert {"pause", "resume", "update_weights"} <= set(row["routes"])
        assert row["world_size"] == 1
        assert len(row["instance_id"]) == 16, "our own fields stay"
    # A client that would steer each worker by itself takes the fleet for one.
    (one,) = fine(await http.get("/fleet/v1/rl/workers"))["workers"]
    assert (one["instance_id"], one["world_size"], one["admin_base_url"]) == (0, 2, root)
    assert one["model"] == fine(await http.get("/v1/models"))["data"][0]["id"]
    assert "error" not in one

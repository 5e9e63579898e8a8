"""The facade `/v1/rl/*` over real worker processes."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import pytest_asyncio
from starlette.requests import Request

from frontend.server.bodies import read_json
from frontend.server.options import FrontendOptions
from rl_plane.errors import InvalidRequest
from rl_plane.protocol.fleet_ops import FLEET_OPS
from rl_plane.weights.checkpoint import open_checkpoint
from tests.conftest import stop_process
from tests.support.adapter_updates import adapter
from tests.support.frontend_here import started
from tests.support.openapi_replies import reply_faults
from tests.support.phase_hooks import VARIABLE
from tests.support.plain_client import plain_client

if TYPE_CHECKING:
    from tests.conftest import Plane

KEY = "a key"
HEADERS = {"Authorization": f"Bearer {KEY}"}
UNKNOWN_ID = "0123456789abcdef"


@pytest_asyncio.fixture
async def rl(plane: Plane) -> AsyncIterator[httpx.AsyncClient]:
    """The facade of a fleet that has no worker yet."""
    options = FrontendOptions(
        plane.url, plane.namespace, plane.component, rl_port=0, http_port=None, admin_key=KEY, liveness_timeout_s=1
    )
    async with (
        started(options) as urls,
        plain_client(base_url=f"{urls['rl_url']}/v1/rl/", headers=HEADERS, timeout=30) as client,
    ):
        assert urls["http_url"] is None
        yield client


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["content-length"] == str(len(response.content))
    body = response.json()
    assert body["status"] == "error"
    assert body["elapsed_s"] >= 0
    assert body["error"]["code"]
    assert body["error"]["message"]
    found: dict[str, Any] = body["error"]
    return found


def update_of(plane: Plane, seed: int, **more: Any) -> dict[str, Any]:
    transport = {"backend": "filesystem", "path": str(plane.model(seed))}
    return {"transport": transport, "version": f"step_{seed}", **more}


# ---- who may ask ----


async def test_only_health_and_the_docs_are_open(rl: httpx.AsyncClient) -> None:
    root = str(rl.base_url).removesuffix("/v1/rl/")
    async with plain_client(base_url=root) as stranger:
        response = await stranger.get("/v1/rl/health")
        assert (response.status_code, response.json()) == (200, {"status": "ok"})
        for method, path in [
            ("GET", "/v1/rl/state"),
            ("POST", "/v1/rl/pause"),
            ("GET", "/v1/rl/nothing"),
            ("GET", "/v1/rl/health//"),
            ("GET", "/v1/rl/state/"),
            ("POST", "/v1/rl/pause/"),
            ("GET", "/metrics"),
        ]:
            response = await stranger.request(method, path)
            assert error_of(response, 401)["code"] == "unauthorized"
            assert response.headers["www-authenticate"] == "Bearer"
        # One slash too many has the rule of the path itself.
        response = await stranger.get("/v1/rl/health/")
        assert (response.status_code, response.headers["location"]) == (307, "/v1/rl/health")
        for value in ["", "Bearer", f"Basic {KEY}", f"Bearer {KEY}x", KEY, "Bearer a", "Bearer \xff"]:
            header = {b"Authorization": value.encode("latin-1")}
            error_of(await stranger.get("/v1/rl/state", headers=header), 401)
        twice = [("Authorization", f"Bearer {KEY}"), ("Authorization", f"Bearer {KEY}")]
        error_of(await stranger.get("/v1/rl/state", headers=twice), 401)
        assert (await stranger.get("/metrics", headers={"Authorization": f"bearer {KEY}"})).status_code == 200
        # A browser can send no key for a page, and the page and the document say nothing of this fleet.
        page = await stranger.get("/docs")
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert not re.search(r"(?:src|href)=.?https?:", page.text), "the page loads nothing from the network"
        document = (await stranger.get("/openapi.json")).json()
        assert document["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
        assert document["paths"]["/v1/rl/health"]["get"]["security"] == []


async def test_a_listener_that_can_not_be_had_ends_the_start(plane: Plane, rl: httpx.AsyncClient) -> None:
    taken = rl.base_url.port
    for options in (
        FrontendOptions(plane.url, plane.namespace, rl_port=taken, http_port=None),
        FrontendOptions(plane.url, plane.namespace, rl_port=None, http_port=taken),
        FrontendOptions(plane.url, plane.namespace, host="0.0.0.0", rl_port=0, http_port=0, admin_key="k"),
        FrontendOptions(plane.url, "not a name", rl_port=0, http_port=0),
    ):
        with pytest.raises(InvalidRequest):
            async with started(options):
                pass


async def test_the_docs_describe_every_op(rl: httpx.AsyncClient) -> None:
    schema = (await rl.get(str(rl.base_url).removesuffix("/v1/rl/") + "/openapi.json")).json()
    for op in FLEET_OPS.values():
        operation = schema["paths"][f"/v1/rl/{op.path}"][op.method.lower()]
        assert operation["summary"] == op.doc
        assert {"workers", "epoch", "wait_s"} <= {one["name"] for one in operation["parameters"]}
        assert ("requestBody" in operation) == (op.method == "POST")
        assert "steer" in operation["tags"]
        assert operation["responses"]["200"]["content"]["application/json"]["schema"]
    for path, fields in (("events", {"since_s", "follow", "component"}), ("requests", {"id", "component"})):
        parameters = schema["paths"][f"/v1/rl/{path}"]["get"]["parameters"]
        assert {one["name"] for one in parameters if one["in"] == "query"} == fields
    known = schema["components"]["schemas"]
    text = json.dumps(schema)
    for part in text.split('"#/components/schemas/')[1:]:
        assert part.split('"')[0] in known
    assert "#/$defs/" not in text


async def test_each_answer_has_the_fields_that_the_document_names(plane: Plane, rl: httpx.AsyncClient) -> None:
    document = (await rl.get(str(rl.base_url).removesuffix("/v1/rl/") + "/openapi.json")).json()
    first, _ = plane.spawn_copies(2)
    answered: dict[str, Any] = {}

    async def ask(name: str, **body: Any) -> dict[str, Any]:
        op = FLEET_OPS[name]
        path = op.path.format(id=first)
        params = {"min_workers": 2}
        response = await (rl.get(path, params=params) if op.method == "GET" else rl.post(path, json=body | params))
        assert response.status_code == 200, response.text
        reply: dict[str, Any] = response.json()
        assert reply_faults(document, op, reply) == [], name
        answered[name] = reply
        return reply

    for name in ("liveness", "ready", "workers", "weight_version", "describe", "pause", "flush_cache", "resume"):
        await ask(name)
    for name in ("abort_requests", "check_weights", "release_memory", "resume_memory", "disable", "enable"):
        await ask(name)
    for name in ("init_transport", "destroy_transport"):
        await ask(name, backend="filesystem")
    await ask("update_weights", **update_of(plane, 1))
    prepared = await ask("prepare_weights_update", **update_of(plane, 2))
    await ask("label_weights_update", version="two")
    await ask("state")
    await ask("complete_weights_update", update_id=prepared["update_id"])
    await ask("prepare_weights_update", **update_of(plane, 3))
    await ask("abort_weights_update")
    await ask("load_lora_adapter", lora_name="a", lora_path=str(adapter(plane, 1)))
    await ask("state")
    await ask("unload_lora_adapter", lora_name="a")
    await ask("new_run")
    await ask("updates")
    assert answered.keys() == FLEET_OPS.keys() - {"receive_weights_part"}, "a part needs a trainer's group"
    (stopped,) = [row for row in answered["workers"]["workers"] if row["instance_id"] == first]
    stop_process(stopped["pid"])
    rows = {row["instance_id"]: row["status"] for row in (await ask("state"))["workers"]}
    assert rows[first] == "error"


# ---- bad input ----


async def test_the_facade_names_bad_input_before_any_worker_changes(plane: Plane, rl: httpx.AsyncClient) -> None:
    worker = plane.spawn()
    before = (await rl.get("state")).json()["workers"]
    bodies: list[tuple[str, Any, str]] = [
        ("pause", "{", "body"),
        ("pause", "[]", "body"),
        ("pause", '{"lease_s": NaN}', "body"),
        ("pause", '{"lease_s": Infinity}', "body"),
        ("pause", '{"lease_s": -1}', "lease_s"),
        ("pause", '{"mode": "hard"}', "mode"),
        ("pause", '{"what": 1}', "what"),
        ("pause", '{"workers": ["zz"]}', "workers"),
        ("pause", '{"component": "a b"}', "component"),
        ("pause", '{"component": ""}', "component"),
        ("pause", '{"component": []}', "component"),
        ("pause?component=", "", "component"),
        ("pause?mode=hard", "", "mode"),
        ("pause?mode=keep&mode=wait", "", "mode"),
        ("pause?mode=wait", '{"mode": "keep"}', "mode"),
        ("pause?clear_cache=perhaps", "", "clear_cache"),
        ("pause?mode=in_place&clear_cache=true", "", "clear_cache"),
        ("pause", '{"mode": "retract", "clear_cache": false}', "clear_cache"),
        ("pause?lease_s=nan", "", "lease_s"),
        ("pause?wait_s=-1", "", "wait_s"),
        ("release_memory?tags=weights,other", "", "tags.1"),
        ("check_weights", '{"action": "guess"}', "action"),
        ("update_weights", "", "transport"),
        ("update_weights", '{"transport": {}}', "transport.backend"),
        ("update_weights", '{"transport": {"backend": "pigeon"}}', "transport.backend"),
        ("update_weights", '{"transport": {"backend": "filesystem", "path": "/etc"}}', "transport.path"),
        ("update_weights", f'{{"transport": {{"backend": "x"}}, "workers": ["{UNKNOWN_ID}"]}}', "workers"),
        ("workers/zz/disable", "", "workers"),
        (f"workers/{worker.instance_id}/disable", f'{{"workers": ["{UNKNOWN_ID}"]}}', "workers"),
    ]
    for path, body, field in bodies:
        error = error_of(await rl.post(path, content=body), 400)
        assert (path, error["field"]) == (path, field)
        assert error["fix"]
    for path, status in [
        (f"workers/{UNKNOWN_ID}/disable", 404),
        (f"pause?workers={UNKNOWN_ID}", 404),
        ("pause?component=unknown", 404),
        ("nothing", 404),
        ("pause//", 404),
        ("state", 405),
        ("health", 405),
    ]:
        error_of(await rl.post(path), status)
    assert (await rl.get("pause")).headers["allow"] == "POST"
    after = (await rl.get("state")).json()["workers"]
    for rows in (before, after):
        for row in rows:
            row.pop("fence")
            row.pop("in_state_s")
    assert before == after


async def test_a_body_over_its_limit_is_a_413(rl: httpx.AsyncClient) -> None:
    async def chunks(count: int) -> AsyncIterator[bytes]:
        for _ in range(count):
            yield b" " * 100_000

    assert error_of(await rl.post("pause", content=b" " * 1_000_001), 413)["field"] == "body"
    error_of(await rl.post("pause", content=chunks(11)), 413)
    assert await _status_before_the_body(rl, 2_000_000) == 413
    # At the limit it is read: only the empty fleet is wrong with these.
    error_of(await rl.post("pause?wait_s=0", content=b" " * 1_000_000), 503)
    error_of(await rl.post("pause?wait_s=0", content=chunks(10)), 503)


async def _status_before_the_body(rl: httpx.AsyncClient, size: int, expect: str = "100-continue") -> int:
    """Sends a head with `Expect: 100-continue`, as curl does before a long body."""
    reader, writer = await asyncio.open_connection(rl.base_url.host, rl.base_url.port)
    head = f"POST /v1/rl/pause HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {size}\r\n"
    writer.write(f"{head}Expect: {expect}\r\n\r\n".encode())
    async with asyncio.timeout(10):
        line = await reader.readline()
    writer.close()
    return int(line.split()[1])


async def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    pieces = [{"type": "http.request", "body": b"{", "more_body": True}]

    async def receive() -> dict[str, Any]:
        return pieces.pop() if pieces else await asyncio.get_running_loop().create_future()

    request = Request({"type": "http", "method": "POST", "headers": [(b"content-length", b"10")]}, receive)
    async with asyncio.timeout(10):
        with pytest.raises(InvalidRequest, match=r"the body was not there within 0\.1 s") as caught:
            await read_json(request, within_s=0.1)
    assert caught.value.facts["field"] == "body"


async def test_another_sites_page_may_not_steer_where_no_key_guards(plane: Plane) -> None:
    options = FrontendOptions(plane.url, plane.namespace, rl_port=0, http_port=None)
    async with started(options) as urls, plain_client(base_url=urls["rl_url"]) as http:
        for origin, status in [(None, 200), (urls["rl_url"], 200), ("https://example.org", 401), ("null", 401)]:
            headers = {"Origin": origin} if origin else {}
            response = await http.get("/v1/rl/state?min_workers=0", headers=headers)
            assert (origin, response.status_code) == (origin, status)
        # A name that an attacker's DNS points at this machine: Origin and Host agree, and neither is loopback.
        rebound = {"Origin": "http://evil.example:8002", "Host": "evil.example:8002"}
        assert (await http.get("/v1/rl/state?min_workers=0", headers=rebound)).status_code == 401


async def test_a_key_for_idempotency_is_bounded(rl: httpx.AsyncClient) -> None:
    for key in ("k" * 129, "a\tb"):
        error = error_of(await rl.post("update_weights", headers={"Idempotency-Key": key}), 400)
        assert error["field"] == "Idempotency-Key"


async def test_an_unexpected_error_is_a_500_without_its_insides(
    plane: Plane, rl: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(*args: object) -> None:
        raise RuntimeError("a secret path")

    monkeypatch.setattr("frontend.facade.op_runner.OpRunner.run", broken)
    response = await rl.get("state")
    assert error_of(response, 500)["code"] == "internal"
    assert "secret" not in response.text
    assert "a secret path" in caplog.text


# ---- what it does ----


async def test_an_empty_fleet_fails_calls_that_need_workers(rl: httpx.AsyncClient) -> None:
    for method, path in [("GET", "state"), ("POST", "pause"), ("POST", "update_weights")]:
        body = {"transport": {"backend": "filesystem", "path": "/x"}} if path == "update_weights" else None
        response = await rl.request(method, path, params={"wait_s": 0}, json=body)
        assert error_of(response, 503)["code"] == "no_workers"
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["epoch"] >= 0
    reply = (await rl.get("state?min_workers=0")).json()
    assert (reply["status"], reply["workers"], reply["ready"]) == ("ok", [], False)


async def test_reading_ops_answer_with_a_row_of_each_worker(plane: Plane, rl: httpx.AsyncClient) -> None:
    workers = plane.spawn_many(2)
    ids = sorted(worker.instance_id for worker in workers)
    for path in ("liveness", "ready", "state", "workers", "weight_version", "describe"):
        response = await rl.get(path, params={"min_workers": 2})
        assert response.status_code == 200, response.text
        assert response.headers["content-length"] == str(len(response.content))
        assert [row["instance_id"] for row in response.json()["workers"]] == ids
    row = (await rl.get("workers", params={"workers": ids[1]})).json()["workers"][0]
    assert {"instance_id", "incarnation", "engine", "model", "model_path", "host", "pid"} <= row.keys()
    assert {"world_size", "transports", "admission", "version"} <= row.keys()
    assert row["instance_id"] == ids[1]


async def test_describe_lists_the_model_tensor_by_tensor(plane: Plane, rl: httpx.AsyncClient) -> None:
    one, other = plane.spawn_copies(2)
    for asked in ("manifest_from=0", f"manifest_from=0&workers={one},{other}"):
        assert error_of(await rl.get(f"describe?{asked}"), 400)["field"] == "workers"
    error_of(await rl.get(f"describe?workers={one}&manifest_from=-1"), 400)
    (row,) = (await rl.get(f"describe?workers={one}")).json()["workers"]
    assert row["manifest"] is None
    pages = []
    for start in (0, 1, row["tensors"]):
        (told,) = (await rl.get(f"describe?workers={one}&manifest_from={start}")).json()["workers"]
        pages.append(told["manifest"])
    assert len(pages[0]) == row["tensors"]
    assert (pages[1], pages[2]) == (pages[0][1:], [])
    specs = open_checkpoint(plane.model()).specs
    assert {each["name"]: (each["dtype"], tuple(each["shape"])) for each in pages[0]} == {
        name: (spec.dtype, spec.shape) for name, spec in specs.items()
    }


async def test_pause_takes_its_fields_from_query_and_body(plane: Plane, rl: httpx.AsyncClient) -> None:
    plane.spawn()
    for path, body in [
        ("pause", None),
        ("pause?mode=abort&clear_cache=true", None),
        ("pause", {"mode": "wait", "clear_cache": True, "lease_s": 5}),
        ("pause?mode=keep&lease_s=5", {"clear_cache": False, "lease_s": 5}),
        ("pause?mode=retract", None),
        ("pause?mode=in_place&clear_cache=false", None),
    ]:
        response = await rl.post(path, json=body) if body else await rl.post(path)
        assert response.json()["workers"][0]["pause_state"] == "paused"
        assert (await rl.get("state")).json()["pause_state"] == "paused"
        assert (await rl.post("resume")).json()["workers"][0]["pause_state"] == "running"


async def test_a_call_that_names_another_fleet_is_a_409(plane: Plane, rl: httpx.AsyncClient) -> None:
    plane.spawn()
    now = (await rl.get("state")).json()
    same = {"epoch": now["epoch"], "fingerprint": now["fingerprint"]}
    assert (await rl.post("pause", json=same)).status_code == 200
    assert (await rl.post("resume", params=same)).status_code == 200
    error = error_of(await rl.post("pause", json={"epoch": now["epoch"] + 1}), 409)
    assert error["code"] == "membership_changed"
    assert (error["before_epoch"], error["after_epoch"]) == (now["epoch"] + 1, now["epoch"])
    error_of(await rl.get("state", params={"fingerprint": "0" * 16}), 409)
    assert (await rl.get("state")).json()["pause_state"] == "running"


async def test_a_worker_is_taken_out_and_put_back(plane: Plane, rl: httpx.AsyncClient) -> None:
    one, two = plane.spawn_many(2)

    async def closed() -> set[str]:
        rows = (await rl.get("workers")).json()["workers"]
        return {row["instance_id"] for row in rows if not row["admission"]["open"]}

    assert (await rl.post(f"workers/{one.instance_id}/disable")).status_code == 200
    assert await closed() == {one.instance_id}
    assert (await rl.get("ready?min_workers=2")).status_code == 503
    assert (await rl.post(f"workers/{one.instance_id}/enable")).status_code == 200
    assert await closed() == set()
    assert two.instance_id not in await closed()


async def test_the_facade_reports_a_hung_worker_and_delays_no_other(plane: Plane, rl: httpx.AsyncClient) -> None:
    one, two = plane.spawn_many(2)
    two.stop()
    try:
        # Side by side, as the fleet forgets a worker that is silent for long.
        response, state = await asyncio.gather(rl.get("liveness?min_workers=2"), rl.get("state"))
        error = error_of(response, 503)
        rows = {row["instance_id"]: row["status"] for row in response.json()["workers"]}
        assert rows == {one.instance_id: "ok", two.instance_id: "error"}
        assert error["alive"] is False
        reply = state.json()
        assert {row["status"] for row in reply["workers"]} == {"ok", "error"}
        assert (reply["status"], reply["ready"]) == ("ok", False)
    finally:
        two.go_on()


# ---- updates ----


async def test_equal_updates_at_once_are_one(plane: Plane, rl: httpx.AsyncClient) -> None:
    plane.spawn(stage_delay_s=0.5)
    body = update_of(plane, 1)
    first, second = await asyncio.gather(
        rl.post("update_weights", json=body), rl.post("update_weights", json=dict(reversed(body.items())))
    )
    assert first.status_code == 200, first.text
    assert first.json() == second.json()
    assert first.json()["version"]["sequence"] == 1
    key = {"Idempotency-Key": "k1"}
    body = update_of(plane, 2)
    third, fourth, other = await asyncio.gather(
        rl.post("update_weights", json=body, headers=key),
        rl.post("update_weights", json=body, headers=key),
        rl.post("update_weights", json=update_of(plane, 3), headers=key),
    )
    assert third.json() == fourth.json()
    assert third.json()["version"]["sequence"] == 2
    assert error_of(other, 400)["field"] == "Idempotency-Key"
    again = await rl.post("update_weights", json=body, headers=key)
    assert again.json()["version"] == third.json()["version"]


async def test_a_client_that_leaves_does_not_stop_its_update(plane: Plane, rl: httpx.AsyncClient) -> None:
    plane.spawn(stage_delay_s=0.5)
    with pytest.raises(httpx.ReadTimeout):
        await rl.post("update_weights", json=update_of(plane, 1), timeout=httpx.Timeout(30, read=0.2))

    async def applied() -> bool:
        return bool((await rl.get("state")).json()["applied_weight_version"] == "step_1")

    await plane.until(applied)


async def test_a_second_update_gets_a_503_that_says_when_to_try_again(
    plane: Plane, rl: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    holds = plane.tmp / "holds"
    holds.mkdir()
    monkeypatch.setenv(VARIABLE, str(holds))
    worker = plane.spawn()
    (holds / "prepare_update.after").touch()
    first = asyncio.create_task(rl.post("update_weights", json=update_of(plane, 1)))
    await plane.until((holds / f"reached.prepare_update.after.{worker.instance_id}").exists)
    response = await rl.post("update_weights", json=update_of(plane, 2))
    assert error_of(response, 503)["code"] == "locked"
    assert int(response.headers["retry-after"]) >= 1
    (holds / "prepare_update.after").unlink()
    assert (await first).json()["version"]["label"] == "step_1"


async def test_a_failed_update_names_each_worker_and_leaves_the_old_weights(
    plane: Plane, rl: httpx.AsyncClient
) -> None:
    good, bad = plane.spawn(), plane.spawn(fail_stage="true")
    await rl.get("state?min_workers=2")
    response = await rl.post("update_weights", json=update_of(plane, 1))
    assert error_of(response, 409)["code"] == "update_aborted"
    rows = {row["instance_id"]: row for row in response.json()["workers"]}
    stopped = rows[good.instance_id].get("error", {}).get("code")
    assert stopped in (None, "update_aborted"), "it had prepared, or the other one's failure came first"
    assert rows[bad.instance_id]["error"]["code"] == "engine_failed"
    assert (await rl.get("weight_version")).json()["version"]["sequence"] == 0


async def test_two_calls_prepare_and_complete_an_update(plane: Plane, rl: httpx.AsyncClient) -> None:
    plane.spawn()
    await rl.get("state?min_workers=1")
    prepared = (await rl.post("prepare_weights_update", json=update_of(plane, 1))).json()
    assert (await rl.get("weight_version")).json()["version"]["sequence"] == 0
    done = await rl.post("complete_weights_update", json={"update_id": prepared["update_id"]})
    assert done.json()["version"]["label"] == "step_1"
    assert error_of(await rl.post("complete_weights_update"), 409)["field"] == "update_id"


async def test_metrics_count_the_fleet(plane: Plane, rl: httpx.AsyncClient) -> None:
    plane.spawn_many(2)
    url = str(rl.base_url).removesuffix("/v1/rl/") + "/metrics"

    async def counted() -> bool:
        lines = (await rl.get(url)).text.splitlines()
        return 'rl_plane_workers{component="engine",state="open"} 2.0' in lines

    await plane.until(counted)
    assert 'rl_plane_committed_sequence{component="engine"} 0.0' in (await rl.get(url)).text.splitlines()

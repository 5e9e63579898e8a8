"""Trainers' dialects on the facade's listener: who may ask, which are on, and what they share."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import click
import httpx
import pytest

from frontend.dialects.common.fleet_as_one import NOT_POSSIBLE, begun, dialect_error, served_version
from frontend.server.api import Api, schema_of
from frontend.server.options import FrontendOptions
from frontend.server.shared_routes import (
    DialectRequest,
    FieldReports,
    Fields,
    NoFields,
    ParsedRequest,
    SharedRoutes,
)
from rl_plane.cli.settings import for_child
from rl_plane.errors import (
    Conflict,
    EngineFailed,
    InvalidRequest,
    Locked,
    NoWorkers,
    PlaneError,
    Unavailable,
    Unsupported,
    WorkerLost,
)
from rl_plane.protocol.dialects import DIALECTS
from tests.support.frontend_here import started
from tests.support.paths import ROOT
from tests.support.plain_client import plain_client
from tests.support.settings import values_of

if TYPE_CHECKING:
    from tests.conftest import Plane

KEY = "a-key"


@asynccontextmanager
async def facade(plane: Plane, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    own = FrontendOptions(
        plane.url, plane.namespace, plane.component, rl_port=0, http_port=None, admission_wait_s=5.0, **options
    )
    async with started(own) as urls, plain_client(base_url=urls["rl_url"], timeout=60) as client:
        yield client


# ---- the mount, over a real fleet ----


async def test_one_listener_is_a_whole_engine(plane: Plane) -> None:
    worker = plane.spawn()
    async with facade(plane) as http:
        assert (await http.get("/health")).json() == {"status": "ok"}
        models = (await http.get("/v1/models")).json()
        assert (await http.get("/v1/rl/v1/models")).json() == models
        body = {"prompt_token_ids": [1, 2, 3], "prompt": "", "max_tokens": 4, "return_token_ids": True}
        made = (await http.post("/v1/completions", json={**body, "model": models["data"][0]["id"]})).json()
        assert len(made["choices"][0]["token_ids"]) == 4
        assert made["nvext"]["instance_id"] == worker.instance_id
        schema = (await http.get("/openapi.json")).json()
        assert {"/pause", "/init_broadcaster", "/v1/rl/init_broadcaster", "/v1/completions"} <= schema[
            "paths"
        ].keys()
        # Each route shows its own body, also where two dialects have one of the same purpose.
        for path, name, value in (
            ("/pause", "mode", "keep"),
            ("/pause_generation", "mode", "retract"),
            ("/weight_checker", "action", "reset"),
            ("/weights_checker", "action", "snapshot"),
            ("/abort_requests", "request_ids", "array"),
            ("/abort_request", "rid", "array"),
            ("/init_broadcaster", "host", "string"),
        ):
            body = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
            named = schema["components"]["schemas"][body["$ref"].rpartition("/")[2]]
            assert value in json.dumps(named["properties"][name]), path
        (*each,) = schema["paths"]["/update_weights"]["post"]["requestBody"]["content"]["application/json"][
            "schema"
        ]["anyOf"]
        assert len({one["$ref"] for one in each}) == 3
        missing = {part.split('"')[0] for part in json.dumps(schema).split('"#/components/schemas/')[1:]} - schema[
            "components"
        ]["schemas"].keys()
        assert not missing


async def test_the_listeners_key_is_asked_for_in_every_dialect(plane: Plane) -> None:
    plane.spawn()
    async with facade(plane, admin_key=KEY) as http:
        assert (await http.get("/health")).status_code == 200
        for method, path in (
            ("POST", "/pause"),
            ("POST", "/update_weights"),
            ("GET", "/v1/models"),
            ("POST", "/v1/completions"),
            ("GET", "/get_world_size"),
            ("GET", "/v1/rl/v1/models"),
        ):
            assert (await http.request(method, path)).status_code == 401, path
        for auth in (None, httpx.BasicAuth("trainer", KEY)):
            headers = {"Authorization": f"Bearer {KEY}"} if auth is None else {}
            answer = await http.get("/get_world_size", headers=headers, auth=auth)
            assert (answer.status_code, answer.json()) == (200, {"world_size": 1})
        # A browser that knows the password does not lend it to another site's page.
        for header in ({"Origin": "https://example.org"}, {"Sec-Fetch-Site": "cross-site"}):
            answer = await http.get("/get_world_size", headers=header, auth=httpx.BasicAuth("", KEY))
            assert answer.status_code == 401
        own = {"Origin": str(http.base_url).rstrip("/"), "Sec-Fetch-Site": "same-origin"}
        assert (await http.get("/get_world_size", headers=own, auth=httpx.BasicAuth("", KEY))).status_code == 200
        for wrong in (httpx.BasicAuth(KEY, ""), httpx.BasicAuth("", KEY + "x")):
            assert (await http.get("/get_world_size", auth=wrong)).status_code == 401
        assert (await http.get("/get_world_size", headers={"Authorization": "Basic %%"})).status_code == 401


async def test_one_slash_too_many_leads_to_the_path_itself(plane: Plane) -> None:
    """Older clients of TRL ask for `/health/`, and follow what vLLM's server answers. Nothing leads to another host."""
    plane.spawn()
    key = {"Authorization": f"Bearer {KEY}"}
    async with facade(plane, admin_key=KEY) as http:
        base = str(http.base_url).rstrip("/")
        for path, headers in (("/health/", {}), ("/get_world_size/", key), ("/v1/models/", key)):
            found = await http.get(path, headers=headers)
            assert (found.status_code, found.content) == (307, b"")
            assert found.headers["location"] == path[:-1]
            assert (await http.get(path, headers=headers, follow_redirects=True)).status_code == 200, path
        sent = {"prompt": "hi"}
        found = await http.post("/tokenize/?a=1&b=%2F", json=sent, headers=key, follow_redirects=True)
        assert (found.status_code, found.url.raw_path) == (200, b"/tokenize?a=1&b=%2F")
        # The key is asked for first, and no path leads anywhere else.
        assert (await http.get("/get_world_size/")).status_code == 401
        for path in ("/health//", "//health/", "//elsewhere.example/", "/nowhere/", "/v1/"):
            assert (await http.get(base + path, headers=key)).status_code == 404, path
    async with facade(plane) as http:
        elsewhere = {"Host": "elsewhere.example"}
        assert (await http.get("/get_world_size/", headers=elsewhere)).status_code == 401
        assert (await http.get("/health/", headers=elsewhere)).headers["location"] == "/health"


@pytest.mark.parametrize(
    ("dialects", "there", "absent"),
    [
        ((), [], ["/pause", "/get_world_size", "/init_broadcaster", "/v1/models", "/health", "/generate"]),
        (("vllm",), ["/pause", "/get_world_size", "/v1/models"], ["/init_broadcaster", "/v1/rl/v1/models"]),
        (("prime-rl",), ["/pause", "/init_broadcaster", "/v1/load_lora_adapter"], ["/get_world_size", "/sleep"]),
    ],
)
async def test_each_dialect_can_be_switched_off(
    plane: Plane, dialects: tuple[str, ...], there: list[str], absent: list[str]
) -> None:
    plane.spawn()
    async with facade(plane, dialects=dialects) as http:
        for path in there:
            statuses = {(await http.request(method, path)).status_code for method in ("GET", "POST")}
            assert statuses - {404, 405}, path
        for path in absent:
            assert {(await http.request(method, path)).status_code for method in ("GET", "POST")} == {404}, path
        assert (await http.get("/v1/rl/state")).status_code == 200


def test_the_command_line_names_dialects() -> None:
    assert values_of(["dialects"])["dialects"] == tuple(DIALECTS) == FrontendOptions().dialects
    for text in ("vllm,prime-rl", "none"):
        values = values_of(["dialects"], RL_PLANE_DIALECTS=text)
        assert values["dialects"] == tuple(text.split(","))
        assert for_child(values, {})[0] == [f"--dialects={name}" for name in values["dialects"]]
    with pytest.raises(click.BadParameter, match="tgi"):
        values_of(["dialects"], ["--dialects=tgi"])


# ---- the table of routes ----


class Numbers(Fields):
    number: int = 0
    tags: list[str] | None = None


class Names(Fields):
    names: list[str]
    last: int


@pytest.fixture
def routes() -> SharedRoutes:
    return SharedRoutes(dialect_error)


@asynccontextmanager
async def speaking(routes: SharedRoutes) -> AsyncIterator[httpx.AsyncClient]:
    api = Api("test")
    routes.mount(api)
    transport = httpx.ASGITransport(api.app())
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        yield client
    await routes.close()


async def test_the_body_of_a_request_chooses_the_handler_of_a_shared_path(routes: SharedRoutes) -> None:
    def named(name: str) -> Any:
        async def answer(request: DialectRequest) -> Any:
            return name

        return answer

    routes.add(["POST"], "/x", named("rest"), summary="", fields=NoFields)
    routes.add(["POST"], "/x", named("a"), summary="", fields=NoFields, claims=lambda request: request.has("a"))
    routes.add(
        ["GET", "POST"], "/y", named("b"), summary="", fields=NoFields, claims=lambda request: request.has("b")
    )
    async with speaking(routes) as http:
        assert (await http.post("/x", json={"a": 1})).json() == "a"
        assert (await http.post("/x?a=1")).json() == "a"
        assert (await http.post("/x", json={"b": 1})).json() == "rest"
        assert (await http.post("/x")).json() == "rest"
        assert (await http.get("/y?b=1")).json() == "b"
        assert (await http.post("/y", json={})).status_code == 400


async def test_bodies_are_read_as_clients_send_them(routes: SharedRoutes) -> None:
    async def numbers(request: ParsedRequest[Numbers]) -> Any:
        return request.fields.model_dump()

    async def nothing(request: DialectRequest) -> Any:
        return None

    routes.add(["GET", "POST"], "/numbers", numbers, summary="", fields=Numbers)
    routes.add(["POST"], "/nothing", nothing, summary="", fields=NoFields)
    async with speaking(routes) as http:
        for content in (b"", b"{}", b"null", b" null\n"):
            assert (await http.post("/numbers", content=content)).json() == {"number": 0, "tags": None}
        assert (await http.request("GET", "/numbers", json={"number": 3})).json()["number"] == 3
        assert (await http.post("/numbers?number=3&tags=a&tags=b")).json() == {"number": 3, "tags": ["a", "b"]}
        for content in (b"[]", b"1", b"{", b'{"number": "x"}'):
            refused = await http.post("/numbers", content=content)
            assert refused.status_code == 400
            assert refused.json()["success"] is False
            assert refused.json()["message"] == refused.json()["error"]["message"]
            assert refused.headers["content-length"] == str(len(refused.content))
        assert (await http.post("/nothing%0A")).status_code in (200, 404)  # a path is matched by its route alone
        answer = await http.post("/nothing")
        assert (answer.content, answer.headers["content-length"]) == (b"null", "4")


async def test_a_route_warns_once_of_an_unknown_field(
    routes: SharedRoutes, caplog: pytest.LogCaptureFixture
) -> None:
    async def numbers(request: ParsedRequest[Numbers]) -> Any:
        return request.fields.number

    routes.add(["POST"], "/told", numbers, summary="", fields=Numbers)
    caplog.set_level(logging.WARNING, "frontend.server.shared_routes")
    async with speaking(routes) as http:
        for _ in range(3):
            assert (await http.post("/told", json={"number": 1, "colour": "red"})).json() == 1
    assert [
        record.getMessage() for record in caplog.records if record.name == "frontend.server.shared_routes"
    ] == ["/told: the field 'colour' has no effect: it is not known here, and is dropped"]


FOUND_BY = {"/v1/rl/update_weights": {"weight_dir": ""}, "/update_weight_version": {"abort_all_requests": "no"}}
"""The body that makes a request a dialect's, where the path alone does not."""


async def test_every_route_warns_of_an_unknown_field(plane: Plane, caplog: pytest.LogCaptureFixture) -> None:
    """The warning comes whatever else the route answers."""
    caplog.set_level(logging.WARNING, "frontend.server.shared_routes")
    plane.spawn()
    async with facade(plane) as http:
        paths = (await http.get("/openapi.json")).json()["paths"]
        asked = [
            (path, method)
            for path, operations in paths.items()
            for method, operation in operations.items()
            if operation["operationId"] == method + path.replace("/", "_")
        ]
        assert len({path for path, _ in asked}) > 50
        asked.remove(("/v1/rl/load_lora_adapter", "post"))  # with any other field it is the facade's own
        for path, method in asked:
            body = {"colour": "red", **FOUND_BY.get(path, {})}
            assert (await http.request(method, path, json=body)).status_code < 600
            told = f"{path}: the field 'colour' has no effect: it is not known here, and is dropped"
            assert [record.getMessage() for record in caplog.records].count(told) == 1, (method, path)
        bucket = {"names": [], "dtypes": [], "shapes": [], "colour": "red"}
        asked_for = {"num_buckets": 1, "buckets": [bucket] * 2}
        assert (await http.post("/prepare_weights_update", json=asked_for)).status_code == 400
        assert "/prepare_weights_update: the field 'buckets.colour' has no effect" in caplog.text
        # The facade's own body is refused for it.
        for path, own in (
            ("/v1/rl/update_weights", {"transport": {"backend": "filesystem"}}),
            ("/v1/rl/load_lora_adapter", {"lora_name": "a", "lora_path": "/a"}),
        ):
            answer = await http.post(path, json={**own, "tint": 1})
            assert (answer.status_code, answer.json()["error"]["field"]) == (400, "tint")
        assert "tint" not in caplog.text


def test_two_bodies_of_one_name_are_not_taken_for_each_other() -> None:
    class Same(Fields):
        one: int = 0

    schemas: dict[str, Any] = {}
    schema_of(Same, schemas)
    schema_of(Same, schemas)
    other = type("Same", (Fields,), {"__annotations__": {"other": int}, "__module__": __name__})
    with pytest.raises(ValueError, match="two models are called Same"):
        schema_of(other, schemas)
    assert list(schemas["Same"]["properties"]) == ["one"]


async def test_equal_calls_under_way_share_one_answer(routes: SharedRoutes) -> None:
    started_, let_go, runs = asyncio.Semaphore(0), asyncio.Event(), []

    async def slow(request: DialectRequest) -> Any:
        runs.append(request.body)
        started_.release()
        await let_go.wait()
        return len(runs)

    routes.add(["POST"], "/slow", slow, summary="", fields=NoFields, once=True)
    async with speaking(routes) as http:
        first = asyncio.create_task(http.post("/slow", json={"a": 1}))
        await started_.acquire()
        gone = asyncio.create_task(http.post("/slow", json={"a": 1}))
        await asyncio.sleep(0)
        gone.cancel()  # its caller disconnects; the call continues
        again = asyncio.create_task(http.post("/slow", json={"a": 1}))
        other = asyncio.create_task(http.post("/slow", json={"a": 2}))
        await started_.acquire()
        let_go.set()
        assert [(await one).json() for one in (first, again, other)] == [2, 2, 2]
        assert runs == [{"a": 1}, {"a": 2}]
        assert (await http.post("/slow", json={"a": 1})).json() == 3


async def test_a_repeated_part_runs_once_in_its_update(routes: SharedRoutes) -> None:
    update: list[str | None] = ["one"]
    runs = []

    async def part(request: DialectRequest) -> Any:
        runs.append(request.body)
        if request.has("wrong"):
            raise InvalidRequest("it can't be")
        return len(runs)

    async def other(request: DialectRequest) -> Any:
        return None

    async def standing() -> object:
        return update[0]

    routes.add(["POST"], "/part", part, summary="", fields=NoFields, once=True, standing=standing)
    routes.add(["GET", "POST"], "/other", other, summary="", fields=NoFields)
    async with speaking(routes) as http:

        async def told(**body: Any) -> Any:
            return (await http.post("/part", json=body)).json()

        assert [await told(a=1), await told(a=2), await told(a=1), await told(a=2)] == [1, 2, 1, 2]
        await http.get("/other")
        assert await told(a=1) == 1
        assert [(await told(wrong=1))["message"] for _ in range(3)] == ["it can't be"] * 3
        assert len(runs) == 5, "what failed is done again"
        update[0] = "two"
        assert [await told(a=1), await told(a=1)] == [6, 6]
        await http.post("/other")  # it may belong to another caller
        assert await told(a=1) == 6
        update[0] = None  # its update has ended with it: the next one may have the same body
        assert [await told(a=1), await told(a=1)] == [7, 8]
        # A request id is of one part of an update, and of another one in the next.
        name = {"Idempotency-Key": "first"}
        for update[0], run in (("three", 9), ("four", 10)):
            for _ in range(2):
                assert (await http.post("/part", json={"b": run}, headers=name)).json() == run
            error = (await http.post("/part", json={"c": run}, headers=name)).json()["error"]
            assert error["field"] == "Idempotency-Key"


# ---- the version that a route reports ----


class Rows:
    """A fleet whose workers report these versions."""

    def __init__(self, *rows: tuple[bool, str | None]) -> None:
        self.rows = [
            {
                "instance_id": f"w{number}",
                "status": "ok",
                "admission": {"open": is_open},
                "version": label and {"run": "r", "sequence": 1, "label": label, "digest": "d"},
            }
            for number, (is_open, label) in enumerate(rows)
        ]

    @property
    def calls(self) -> Rows:
        return self

    async def run(self, op: str, body: dict[str, Any]) -> dict[str, Any]:
        return {"version": {"label": "of the record"}, "workers": self.rows}


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        (((True, "one"), (True, "one")), "one"),
        (((True, "one"), (False, "healing")), "one"),
        (((False, "one"), (False, "one")), "one"),  # paused
        (((True, "one"), (True, "two")), Conflict),
        (((False, "one"), (False, "two")), Conflict),
        (((False, None), (False, None)), Unavailable),
    ],
)
async def test_the_facade_names_a_version_only_if_all_workers_serve_it(rows: Any, told: Any) -> None:
    fleet: Any = Rows(*rows)
    if isinstance(told, str):
        assert (await served_version(fleet))["label"] == told
        return
    with pytest.raises(told) as caught:
        await served_version(fleet)
    if told is Conflict:
        assert "'one' by w0; 'two' by w1" in caught.value.message


# ---- what may be repeated ----


@pytest.mark.parametrize(
    ("raised", "status"),
    [
        (EngineFailed("x"), 409),
        (WorkerLost("x", retry_after_s=1.0), 409),
        (Locked("x"), 503),
        (Unsupported("x"), 501),
        (InvalidRequest("x"), 400),
    ],
)
def test_an_error_after_a_transfer_began_does_not_ask_for_a_repeat(raised: Any, status: int) -> None:
    with pytest.raises(type(raised) if status != 409 else Conflict) as caught, begun():
        raise raised
    assert caught.value.http_status == status
    if status == 409:
        assert caught.value.facts == {"cause": raised.code}


@pytest.mark.parametrize(
    ("raised", "status"), [(Locked("x"), 409), (NoWorkers("x"), 409), (Unsupported("x"), 501)]
)
def test_a_call_that_began_fails_with_a_status_that_clients_do_not_retry(raised: Any, status: int) -> None:
    with pytest.raises(PlaneError) as caught, begun(NOT_POSSIBLE):
        raise raised
    assert caught.value.http_status == status


def test_reports_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    reports = FieldReports(most=2)
    for name in ("a", "b", "a", "c"):
        reports.report("/x", name, "it is dropped")
    assert [record.getMessage().split("'")[1] for record in caplog.records] == ["a", "b"]
    reports.clear()
    reports.report("/x", "c", "it is dropped")
    assert "'c'" in caplog.records[-1].getMessage()


# ---- the tables of conformance ----

DOCS = ROOT / "docs"
TRAINERS = {
    "vLLM",
    "TRL",
    "SkyRL",
    "prime-rl",
    "slime",
    "miles",
    "AReaL",
    "verl",
    "NeMo-RL",
    "SGLang-Omni",
    "Dynamo",
}


def rows_of(page: str, heading: str) -> list[list[str]]:
    """The cells of the table beneath a heading."""
    text = (DOCS / page).read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def test_every_row_names_a_test_that_there_is() -> None:
    rows = [
        *rows_of("conformance.md", "vLLM, TRL, SkyRL, prime-rl, Dynamo"),
        *rows_of("conformance.md", "SGLang's trainers"),
    ]
    for trainer, *_, named in rows:
        tests = named.split(", ")
        for test in tests:
            found = re.fullmatch(r"`(tests/[\w/]+\.py)::(\w+)`", test)
            assert found, f"{trainer}: {named!r} is not `tests/file.py::name`"
            text = (DOCS.parent / found[1]).read_text()
            assert re.search(rf"^(async )?def {found[2]}\(", text, re.MULTILINE), f"{trainer}: there is no {test}"
            # A step of a test is one only where the test takes it.
            assert found[2].startswith("test_") or len(re.findall(rf"\b{found[2]}\b", text)) > 1, test
    assert TRAINERS - {name for trainer, *_ in rows for name in re.split(r"[ ,(]+", trainer)} == set()

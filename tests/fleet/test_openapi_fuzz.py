"""Sends a real fleet requests that the two listeners' OpenAPI documents allow, and some that they do not: no answer is
a 500, each status is documented, and no worker is harmed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok

from frontend.server.options import FrontendOptions
from tests.support.dialect_facade import fine
from tests.support.frontend_here import started

if TYPE_CHECKING:
    from tests.conftest import Plane

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

EXAMPLES = 4
"""The examples of each operation and each mode: some thousand requests in all."""
SEED = 20_260
TIMEOUT_S = 30.0
HEAL_S = 30.0
ENDLESS = ("/v1/rl/events",)
"""Paths of streams that never end by themselves."""
ALLOWED = frozenset({501, 503, 504})
"""Statuses of 5xx that are answered on purpose: not here, not now, not in time."""
LAST = ("pause", "sleep", "release", "check", "disable", "memory")
"""Operations that stop the fleet come after those that need it."""


def bounded(schema: Any) -> Any:
    """Returns a copy of the schema in which every wait is short."""
    if isinstance(schema, list):
        return [bounded(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: bounded(value) for key, value in schema.items()}
    for waits in ("wait_s", "timeout_s"):
        if isinstance(found.get("properties"), dict) and waits in found["properties"]:
            found["properties"][waits] = {"type": "number", "minimum": 0.05, "maximum": 0.1}
    if found.get("name") == "wait_s":
        found["schema"] = {"type": "number", "minimum": 0, "maximum": 0.1}
    return found


def operations(document: dict[str, Any]) -> list[Any]:
    found = []
    for each in schemathesis.openapi.from_dict(bounded(document)).get_all_operations():
        assert isinstance(each, Ok), each
        found.append(each.ok())
    kept = [one for one in found if one.path not in ENDLESS]
    return sorted(kept, key=lambda one: (any(word in one.path for word in LAST), one.path))


def fuzz(url: str, document: dict[str, Any]) -> int:
    """Sends the requests and returns their number. Raises at the first bad answer, with a command that repeats it."""
    sent = 0
    for operation in operations(document):
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            with _possible():
                sent += _fuzz_one(url, operation, mode)
    return sent


def _fuzz_one(url: str, operation: Any, mode: GenerationMode) -> int:
    documented = {int(status) for status in operation.definition.raw["responses"] if status.isdigit()}
    sent = []

    @seed(SEED)
    @settings(max_examples=EXAMPLES, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def one(case: Case[Any]) -> None:
        sent.append(case)
        response = case.call(base_url=url, timeout=TIMEOUT_S)
        if response.status_code not in ALLOWED:
            case.validate_response(response, checks=[not_a_server_error])
        assert response.status_code in documented | {405}, case.as_curl_command()
        assert "content-length" in response.headers or "text/event-stream" in str(response.headers)

    one()
    return len(sent)


@contextmanager
def _possible() -> Iterator[None]:
    """An operation that takes anything has no wrong requests."""
    try:
        yield
    except schemathesis.errors.SchemathesisError as error:
        if "negative" not in str(error).lower():
            raise
    except Exception as error:
        if type(error).__name__ not in ("Unsatisfiable", "SkipTest", "Skipped"):
            raise


async def test_no_request_breaks_a_listener_or_a_worker(plane: Plane) -> None:
    ids = set(plane.spawn_copies(2))
    options = FrontendOptions(
        plane.url, plane.namespace, plane.component, rl_port=0, http_port=0, admission_wait_s=0.5
    )
    async with started(options) as urls, httpx.AsyncClient(base_url=urls["rl_url"], timeout=TIMEOUT_S) as http:
        before = fine(await http.get("/v1/rl/state"))
        for url in (urls["http_url"], urls["rl_url"]):
            document = fine(await http.get(f"{url}/openapi.json"))
            assert await asyncio.to_thread(fuzz, url, document) > 0
        # What was asked for is taken back; nothing else may be needed.
        fine(await http.post("/v1/rl/resume_memory"))
        fine(await http.post("/v1/rl/resume"))
        for one in ids:
            fine(await http.post(f"/v1/rl/workers/{one}/enable"))

        async def ready() -> bool:
            return (await http.get("/v1/rl/ready?min_workers=2")).status_code == 200

        await plane.until(ready, HEAL_S)
        after = fine(await http.get("/v1/rl/state"))
        assert {row["instance_id"] for row in after["workers"]} == ids
        assert {row["incarnation"] for row in after["workers"]} == {
            row["incarnation"] for row in before["workers"]
        }
        assert after["version"]["digest"] == before["version"]["digest"]
        assert after["adapters"] == before["adapters"] == {}

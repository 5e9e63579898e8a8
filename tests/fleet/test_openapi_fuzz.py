"""Sends a real fleet requests that the two listeners' OpenAPI documents allow, and some that they do not, in all
dialects, without keys, with the right key, with wrong ones, and with keys of roles that may not change anything.

No answer is a 500, each status is documented, nothing that needs a key is answered without it, and no worker is harmed.
`make fuzz` sends other requests until its time is over: `FUZZ_SECONDS`, from `FUZZ_SEED`.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, seed, settings, strategies
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok

from frontend.server.options import FrontendOptions
from rl_plane.protocol.http_keys import Role
from tests.support.dialect_facade import fine
from tests.support.frontend_here import started
from tests.support.key_files import write_keys
from tests.support.plain_client import plain_client

if TYPE_CHECKING:
    from tests.conftest import Plane

SECONDS = float(os.environ.get("FUZZ_SECONDS", 0))
"""The time that each test fuzzes. 0: one round of requests."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400 + 2 * SECONDS)]

EXAMPLES = 4
"""The examples of each operation and each mode: some thousand requests in all."""
REFUSED_EXAMPLES = 2
"""The examples of each operation without its key. The body hardly matters, because the key is checked first."""
SEED = int(os.environ.get("FUZZ_SEED", 20_260))
TIMEOUT_S = 30.0
HEAL_S = 30.0
ENDLESS = ("/v1/rl/events",)
"""Paths of streams that never end by themselves."""
ALLOWED = frozenset({501, 503, 504})
"""Statuses of 5xx that are answered on purpose: not here, not now, not in time."""
LAST = ("pause", "sleep", "release", "check", "disable", "memory")
"""Operations that stop the fleet come after the operations that need it."""


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
    """Returns the operations in the order of their requests. The keys are not left to the maker of the requests."""
    keyless = {name: value for name, value in bounded(document).items() if name != "security"}
    keyless["components"].pop("securitySchemes", None)
    found = []
    for each in schemathesis.openapi.from_dict(keyless).get_all_operations():
        assert isinstance(each, Ok), each
        found.append(each.ok())
    kept = [one for one in found if one.path not in ENDLESS]
    return sorted(kept, key=lambda one: (any(word in one.path for word in LAST), one.path))


def fuzz(url: str, document: dict[str, Any], key: str | None, round_seed: int) -> int:
    """Sends the requests and returns their number. Raises at the first bad answer, with a command that repeats it."""
    headers = {} if key is None else bearer(key)
    sent = 0
    for operation in operations(document):
        documented = statuses(operation)

        def check(case: Case[Any], documented: frozenset[int] = documented) -> None:
            response = call(case, url, headers)
            if response.status_code not in ALLOWED:
                case.validate_response(response, checks=[not_a_server_error])
            assert response.status_code in documented - {401}, case.as_curl_command()
            assert "content-length" in response.headers or "text/event-stream" in str(response.headers)

        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            with _possible():
                sent += _each_case(operation.as_strategy(generation_mode=mode), check, EXAMPLES, round_seed)
    return sent


def fuzz_refused(url: str, document: dict[str, Any], key: str, other_key: str, round_seed: int) -> int:
    """Sends requests with no key and with wrong ones, and returns their number. Raises at the first that is taken."""
    wrong = [{}, *({"Authorization": value} for value in wrong_values(key, other_key))]
    sent = 0
    for operation in operations(document):
        is_open = operation.definition.raw.get("security") == []
        allowed = statuses(operation) if is_open else {401}

        def check(pair: tuple[Case[Any], dict[str, str]], allowed: frozenset[int] | set[int] = allowed) -> None:
            response = call(pair[0], url, pair[1])
            assert response.status_code in allowed, (pair[1], pair[0].as_curl_command(), response.text[:200])

        cases = strategies.tuples(operation.as_strategy(), strategies.sampled_from(wrong))
        sent += _each_case(cases, check, REFUSED_EXAMPLES, round_seed)
    return sent


def fuzz_role(url: str, document: dict[str, Any], role: Role, round_seed: int) -> int:
    """Sends requests with a key of the role, and returns their number. Raises at the first that the role may not make,
    and that is taken all the same."""
    sent = 0
    for operation in operations(document):
        roles = [each for one in operation.definition.raw.get("security") or () for each in one["key"]]
        may = not roles or role in roles

        def check(
            case: Case[Any], allowed: frozenset[int] = statuses(operation) if may else frozenset({403})
        ) -> None:
            response = call(case, url, bearer(key_of(role)))
            assert response.status_code in allowed - {401}, (role, case.as_curl_command(), response.text[:200])

        sent += _each_case(operation.as_strategy(), check, REFUSED_EXAMPLES, round_seed)
    return sent


def key_of(role: Role) -> str:
    return f"key of {role}"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def wrong_values(key: str, other_key: str) -> list[str]:
    """Returns values of the header that come close to the right one. `other_key` opens the other listener."""
    bare = ["", key[:-1], f"{key}x", key.upper(), "\xff", "null", "x" * 5000, f"{key},{key}", other_key]
    return ["Bearer", "Basic", f"Basic {key}", f"Token {key}", *(f"Bearer {each}" for each in bare)]


def statuses(operation: Any) -> frozenset[int]:
    return frozenset({405, *(int(each) for each in operation.definition.raw["responses"] if each.isdigit())})


def call(case: Case[Any], url: str, headers: Mapping[str, str]) -> Any:
    encoded = {name: value.encode("latin-1") for name, value in headers.items()}
    return case.call(base_url=url, timeout=TIMEOUT_S, headers=encoded)


def _each_case(
    cases: strategies.SearchStrategy[Any], check: Callable[[Any], None], examples: int, round_seed: int
) -> int:
    sent = []

    @seed(round_seed)
    @settings(max_examples=examples, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(case=cases)
    def one(case: Any) -> None:
        sent.append(case)
        check(case)

    one()
    return len(sent)


def rounds() -> Iterator[int]:
    """Yields the seed of each round: one round, or as many as begin before the time of `make fuzz` is over."""
    end = time.monotonic() + SECONDS
    for round_seed in itertools.count(SEED):
        print(f"FUZZ_SEED={round_seed}")  # pytest shows it where the round fails
        yield round_seed
        if time.monotonic() >= end:
            return


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


@dataclass(frozen=True)
class FuzzedFleet:
    """Two workers and the listeners of one frontend, with a client that has the admin key."""

    plane: Plane
    ids: set[str]
    urls: dict[str, Any]
    http: httpx.AsyncClient

    async def document(self, url: str) -> dict[str, Any]:
        found: dict[str, Any] = fine(await self.http.get(f"{url}/openapi.json"))
        return found

    async def state(self) -> dict[str, Any]:
        found: dict[str, Any] = fine(await self.http.get("/v1/rl/state"))
        return found

    async def heal(self) -> None:
        """Takes back what requests have asked for. Nothing else may be needed."""
        fine(await self.http.post("/v1/rl/resume_memory"))
        fine(await self.http.post("/v1/rl/resume"))
        for one in self.ids:
            fine(await self.http.post(f"/v1/rl/workers/{one}/enable"))

        async def ready() -> bool:
            return (await self.http.get("/v1/rl/ready?min_workers=2")).status_code == 200

        await self.plane.until(ready, HEAL_S)


@asynccontextmanager
async def fuzzed_fleet(
    plane: Plane, admin_key: str | None, api_key: str | None, keys_file: Path | None = None
) -> AsyncIterator[FuzzedFleet]:
    """Starts the fleet. At the end it must have the same workers and the same weights."""
    ids = set(plane.spawn_copies(2))
    options = FrontendOptions(
        plane.url,
        plane.namespace,
        plane.component,
        rl_port=0,
        http_port=0,
        admission_wait_s=0.5,
        admin_key=admin_key,
        api_key=api_key,
        keys_file=keys_file,
    )
    headers = {} if admin_key is None else bearer(admin_key)
    async with (
        started(options) as urls,
        plain_client(base_url=urls["rl_url"], timeout=TIMEOUT_S, headers=headers) as http,
    ):
        fleet = FuzzedFleet(plane, ids, urls, http)
        before = await fleet.state()
        yield fleet
        await fleet.heal()
        after = await fleet.state()
        assert {row["instance_id"] for row in after["workers"]} == ids
        assert {row["incarnation"] for row in after["workers"]} == {
            row["incarnation"] for row in before["workers"]
        }
        assert after["version"]["digest"] == before["version"]["digest"]
        assert after["adapters"] == before["adapters"] == {}


def changeable(state: dict[str, Any]) -> dict[str, Any]:
    """Returns what a request can change, without counters and times."""
    rows = ("instance_id", "incarnation", "admission", "disabled")
    workers = [{name: row.get(name) for name in rows} for row in state["workers"]]
    by_id = sorted(workers, key=lambda row: str(row["instance_id"]))
    return {"workers": by_id, "version": state["version"], "adapters": state["adapters"]}


@pytest.mark.parametrize("keys", [(None, None), ("admin-key", "api-key")], ids=["without-keys", "with-keys"])
async def test_no_request_breaks_a_listener_or_a_worker(plane: Plane, keys: tuple[str | None, str | None]) -> None:
    admin_key, api_key = keys
    async with fuzzed_fleet(plane, admin_key, api_key) as fleet:
        for round_seed in rounds():
            for url, key in ((fleet.urls["http_url"], api_key), (fleet.urls["rl_url"], admin_key)):
                assert await asyncio.to_thread(fuzz, url, await fleet.document(url), key, round_seed) > 0
            await fleet.heal()


async def test_no_request_is_taken_without_the_right_key(plane: Plane) -> None:
    admin_key, api_key = "admin-key", "api-key"
    async with fuzzed_fleet(plane, admin_key, api_key) as fleet:
        listeners = (
            (fleet.urls["http_url"], api_key, admin_key),
            (fleet.urls["rl_url"], admin_key, api_key),
        )
        before = changeable(await fleet.state())
        for round_seed in rounds():
            for url, key, other in listeners:
                document = await fleet.document(url)
                assert await asyncio.to_thread(fuzz_refused, url, document, key, other, round_seed) > 0
        assert changeable(await fleet.state()) == before


async def test_a_key_that_may_not_change_the_fleet_does_not(plane: Plane, tmp_path: Path) -> None:
    roles: tuple[Role, ...] = ("read", "generate")
    file = write_keys(tmp_path / "keys.toml", {key_of(role): role for role in roles})
    async with fuzzed_fleet(plane, "admin-key", "api-key", file) as fleet:
        before = changeable(await fleet.state())
        for round_seed in rounds():
            for url in (fleet.urls["http_url"], fleet.urls["rl_url"]):
                for role in roles:
                    document = await fleet.document(url)
                    assert await asyncio.to_thread(fuzz_role, url, document, role, round_seed) > 0
        assert changeable(await fleet.state()) == before

"""A facade that speaks trainers' dialects, and what its fleet is seen to serve."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from frontend.facade.op_runner import OpRunner
from frontend.server.options import FrontendOptions
from rl_plane.bus.lock import DEFAULT_LOCK_WAIT_S
from rl_plane.protocol.dialects import DIALECTS
from tests.support.frontend_here import started
from tests.support.plain_client import plain_client
from worker.testing.tiny_model import witness_next_token

if TYPE_CHECKING:
    from rl_plane.client import RlClient
    from rl_plane.errors import PlaneError
    from tests.conftest import Plane

for _module in DIALECTS.values():  # later, the import would hold up the loop of a frontend that is connected
    importlib.import_module(_module)

PROMPT = [5, 6, 7]
TOKENS = 12
HEAL_S = 60.0


@asynccontextmanager
async def facade(plane: Plane, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """One listener for everything, as trainers' clients have one base URL."""
    own = FrontendOptions(
        plane.url, plane.namespace, plane.component, rl_port=0, http_port=None, admission_wait_s=HEAL_S, **options
    )
    async with started(own) as urls, plain_client(base_url=urls["rl_url"], timeout=180) as client:
        yield client


def refused(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error, in the shape that every dialect has."""
    assert response.status_code == status, response.text
    assert response.headers["content-length"] == str(len(response.content))
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert (body["status"], body["success"]) == ("error", False)
    assert body["message"].startswith(body["error"]["message"])
    found: dict[str, Any] = body["error"]
    return found


def fine(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    assert response.headers["content-length"] == str(len(response.content))
    assert "transfer-encoding" not in response.headers
    assert response.headers["content-type"] == "application/json"
    return response.json()


def witnessed(seed: int, count: int = TOKENS) -> list[int]:
    """The tokens that a witness generates after the prompt."""
    tokens, token = [], PROMPT[-1]
    for _ in range(count):
        token = witness_next_token(seed, token)
        tokens.append(token)
    return tokens


async def proven(http: httpx.AsyncClient, ids: Iterable[str], seed: int, label: str | None = None) -> None:
    """The tokens of each worker are those of this witness, under this label."""
    for one in ids:
        body = {
            "prompt": "",
            "prompt_token_ids": PROMPT,
            "max_tokens": TOKENS,
            "temperature": 0,
            "return_token_ids": True,
            "nvext": {"instance_id": one},
        }
        (choice,) = fine(await http.post("/v1/completions", json=body))["choices"]
        assert choice["token_ids"] == witnessed(seed), one
        (span,) = choice["weight_versions"]
        assert label in (None, span["version"])


async def served(http: httpx.AsyncClient) -> list[tuple[bool, str | None]]:
    """For each worker: whether it is open, and the label that it serves."""
    rows = fine(await http.get("/v1/rl/state"))["workers"]
    return [(row["admission"]["open"], row["applied_weight_version"]) for row in rows]


Answered = asyncio.Event


def _any(body: dict[str, Any]) -> bool:
    return True


@asynccontextmanager
async def just_before(
    op: str, happens: Callable[[Answered], Awaitable[None]], only: Callable[[dict[str, Any]], bool] = _any
) -> AsyncIterator[None]:
    """`happens`, once, as a frontend of this process is about to run this op of the fleet with a body like that. It is
    given what tells that the op was answered. Fails where it did not come to that."""
    run, answered, met = OpRunner.run, Answered(), False

    async def met_on_the_way(calls: OpRunner, name: str, body: dict[str, Any], *more: Any, **how: Any) -> Any:
        nonlocal met
        if met or name != op or not only(body):
            return await run(calls, name, body, *more, **how)
        met = True
        await happens(answered)
        try:
            return await run(calls, name, body, *more, **how)
        finally:
            answered.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OpRunner, "run", met_on_the_way)
        yield
    assert met, f"{op} was not run"


@asynccontextmanager
async def taken_before(
    client: RlClient, op: str, only: Callable[[dict[str, Any]], bool] = _any
) -> AsyncIterator[None]:
    """Makes another caller change the fleet just then, for longer than a repeatable call waits."""
    view, ended = await client.view(), []

    async def hold(held: asyncio.Event, answered: Answered) -> None:
        async with client.lock(view):
            held.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DEFAULT_LOCK_WAIT_S + 1):
                    await answered.wait()

    async def take(answered: Answered) -> None:
        held = asyncio.Event()
        ended.append(asyncio.create_task(hold(held, answered)))
        await held.wait()

    async with just_before(op, take, only):
        yield
    await asyncio.gather(*ended)


def refused_before(op: str, error: PlaneError) -> Any:
    """The fleet refuses this op, once."""

    async def fail(answered: Answered) -> None:
        raise error

    return just_before(op, fail)

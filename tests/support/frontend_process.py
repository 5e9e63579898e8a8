"""Helpers of `tests/fleet/test_frontend_generation.py` and of other tests."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest_asyncio

from frontend.server.options import FrontendOptions
from rl_plane.client import RlClient
from rl_plane.membership.worker_calls import BusConnector, WorkerCalls
from tests.conftest import Plane
from tests.support.frontend_here import started
from tests.support.plain_client import plain_client
from worker.engines.fake.adapter import fake_token

WAIT_S = 1.0
"""The longest wait for admission in these tests."""

PROMPT = [5, 6, 7]


@asynccontextmanager
async def frontend(
    plane: Plane, connect_bus: BusConnector | None = None, **more: Any
) -> AsyncIterator[httpx.AsyncClient]:
    given = {"rl_port": None, "http_port": 0, "admission_wait_s": WAIT_S, **more}
    options = FrontendOptions(plane.url, plane.namespace, plane.component, **given)
    async with (
        started(options, connect_bus) as urls,
        plain_client(base_url=urls["http_url"], timeout=30) as client,
    ):
        yield client


@pytest_asyncio.fixture
async def http(plane: Plane) -> AsyncIterator[httpx.AsyncClient]:
    async with frontend(plane) as client:
        yield client


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-length"] == str(len(response.content))
    body = response.json()
    assert body["status"] == "error"
    error: dict[str, Any] = body["error"]
    assert error["message"]
    assert error["code"]
    assert error["type"]
    return error


async def post(http: httpx.AsyncClient, path: str, **body: Any) -> Any:
    """The reply of a call that succeeds."""
    response = await http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def ask(http: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await http.post("/v1/completions", json={"prompt_token_ids": PROMPT, **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-length"] == str(len(response.content))
    reply: dict[str, Any] = response.json()
    return reply


def events_of(text: str) -> list[Any]:
    parts = text.split("\n\n")
    assert parts[-1] == ""
    assert all(part.startswith("data: ") for part in parts[:-1])
    found = [part.removeprefix("data: ") for part in parts[:-1]]
    return [part if part == "[DONE]" else json.loads(part) for part in found]


async def next_event(lines: AsyncIterator[str]) -> Any:
    async for line in lines:
        if line:
            data = line.removeprefix("data: ")
            return data if data == "[DONE]" else json.loads(data)
    return None


async def state_of(client: WorkerCalls, instance_id: str) -> dict[str, Any]:
    return dict((await client.call(instance_id, "state")).body)


async def until_running(plane: Plane, client: RlClient, instance_id: str, count: int) -> None:
    async def so_many() -> bool:
        state = await state_of(client, instance_id)
        return int(state["running"]) + int(state["waiting"]) == count

    await plane.until(so_many)


async def update(plane: Plane, seed: int, **policy: Any) -> dict[str, Any]:
    fleet = await plane.fleet()
    transport = {"backend": "filesystem", "path": str(plane.model(seed))}
    body = {"transport": transport, "version": f"step_{seed}", "policy": policy}
    version: dict[str, Any] = (await fleet.run("update_weights", body))["version"]
    return version


def tokens_under(digest: str, start: int, end: int) -> list[int]:
    return [fake_token(digest, PROMPT, position) for position in range(start, end)]

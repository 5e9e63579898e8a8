"""Helpers of `tests/dialects/test_dialect_prime_rl.py` and of other tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest_asyncio

from tests.conftest import Plane
from tests.support.dialect_facade import facade, fine

UPDATE_READ_S = 720.0

READ_S = 300.0

RETRIES = 10


@dataclass
class PrimeRl:
    """The calls of its orchestrator, which reads statuses only and repeats a call after any 5xx."""

    http: httpx.AsyncClient
    base: str = ""
    asked: int = 0

    async def admin(self, path: str, read_s: float = READ_S, **more: Any) -> httpx.Response:
        for _ in range(RETRIES):
            self.asked += 1
            timeout = httpx.Timeout(connect=10, read=read_s, write=60, pool=10)
            response = await self.http.post(self.base + path, timeout=timeout, **more)
            if response.status_code < 500:
                break
        response.raise_for_status()
        return response

    async def start(self, model: str) -> None:
        fine(await self.http.get(self.base + "/health"))
        models = fine(await self.http.get(self.base + "/v1/models"))
        assert any(one["id"] == model for one in models["data"])

    async def update(self, weight_dir: Path | None) -> None:
        await self.admin("/pause", params={"mode": "keep", "clear_cache": "false"})
        try:
            if weight_dir is not None:
                (weight_dir / "NCCL_READY").touch()
            directory = weight_dir.as_posix() if weight_dir is not None else None
            await self.admin("/update_weights", UPDATE_READ_S, json={"weight_dir": directory})
        finally:
            await self.admin("/resume")

    async def update_by_method(self, weight_dir: Path, **more: Any) -> None:
        """Updates the worker that Dynamo's discovery lists."""
        (worker,) = fine(await self.http.get("/fleet/v1/rl/workers"))["workers"]
        assert (worker["instance_id"], httpx.URL(worker["admin_base_url"]).path) == (0, "/")
        self.base = worker["admin_base_url"]
        await self.admin("/pause", params={"mode": "keep", "clear_cache": "false"})
        try:
            body = {"method": "update_weights_from_path", "args": [weight_dir.as_posix()], **more}
            assert (await self.admin("/collective_rpc", json=body)).json() == {
                "results": [None] * worker["world_size"]
            }
        finally:
            await self.admin("/resume")


@pytest_asyncio.fixture
async def http(plane: Plane) -> AsyncIterator[httpx.AsyncClient]:
    plane.spawn_copies(2)
    async with facade(plane) as http:
        yield http

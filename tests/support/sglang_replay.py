"""Helpers of `tests/dialects/test_dialect_sglang_trainers.py` and of other tests."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx

from tests.support.broadcast_trainer import HOST
from tests.support.broadcast_updates import GLOO_S
from tests.support.commanded_process import CommandedProcess
from tests.support.dialect_facade import (
    fine,
)
from tests.support.free_port import free_port


class Replay:
    """A trainer that takes the facade for one SGLang server."""

    def __init__(self, http: httpx.AsyncClient, trainer: CommandedProcess) -> None:
        self.http = http
        self.trainer = trainer

    async def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Posts like `requests.post(url, json=payload or {})`, then `raise_for_status` and `json`."""
        return fine(await self.http.post(path, json=body or {}))

    async def flush(self) -> None:
        """Flushes the cache like slime: once a second, at most sixty times."""
        for _ in range(60):
            if (await self.http.get("/flush_cache")).status_code == 200:
                return
            await asyncio.sleep(1)
        raise AssertionError("the cache was never flushed")

    async def form(
        self, group: str, port_type: type = int, path: str = "/init_weights_update_group"
    ) -> httpx.Response:
        ranks = fine(await self.http.get("/server_info"))["num_gpus"]
        port = free_port()
        asked = {
            "master_address": HOST,
            "master_port": port_type(port),
            "rank_offset": 1,
            "world_size": ranks + 1,
            "group_name": group,
            "backend": "gloo",
        }
        order = {"group": group, "port": port, "world_size": ranks + 1, "timeout_s": GLOO_S}
        reply, _ = await asyncio.gather(
            self.http.post(path, json=asked),
            self.trainer.do("form", order),
        )
        return reply

    async def leave(self, group: str) -> None:
        await self.post("/destroy_weights_update_group", {"group_name": group})
        await self.trainer.do("leave", group)

    async def send(self, group: str, directory: Path, part: dict[str, Any], **body: Any) -> httpx.Response:
        """The call and the broadcasts, side by side as trainers do it."""
        layout = "flat" if body.get("load_format") == "flattened_bucket" else "each"
        order = {"group": group, "directory": str(directory), "part": {**part, "layout": layout}}
        reply, _ = await asyncio.gather(
            self.http.post("/update_weights_from_distributed", json={**part, "group_name": group, **body}),
            self.trainer.do("send", order),
        )
        return reply

"""Helpers of `tests/transports/test_partwise_updates.py` and of other tests."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

from rl_plane.client import RlClient
from tests.support.broadcast_trainer import HOST
from tests.support.commanded_process import CommandedProcess
from tests.support.free_port import free_port

PARTS = 5

NUMBERS = itertools.count()
"""torch keeps the name of each group that a process has formed."""

GLOO_S = 20.0
"""A trainer's own bound in seconds for a broadcast that no worker takes."""


class Broadcasts:
    """A fleet, and a trainer that has groups of its own with it."""

    def __init__(self, client: RlClient, trainer: CommandedProcess) -> None:
        self.client = client
        self.trainer = trainer
        self.group = ""

    async def form(self, world_size: int, group: str = "", **body: Any) -> dict[str, Any]:
        self.group = group or f"group {next(NUMBERS)}"
        port = free_port()
        asked = {"backend": "gloo", "form": "torch", "group": self.group, "world_size": world_size, **body}
        reply = self.client.run("init_transport", {**asked, "master_address": HOST, "master_port": port})
        order = {"group": self.group, "port": port, "world_size": world_size, "timeout_s": GLOO_S}
        formed: dict[str, Any] = (await asyncio.gather(reply, self.trainer.do("form", order)))[0]
        return formed

    async def prepare(self, **body: Any) -> dict[str, Any]:
        transport = {"backend": "gloo", "group": self.group, "in_parts": True}
        return await self.client.run("prepare_weights_update", {"transport": transport, **body})

    async def feed(self, directory: Path, part: dict[str, Any]) -> dict[str, Any]:
        call = self.client.run("receive_weights_part", part)
        reply: dict[str, Any] = (await asyncio.gather(call, self.send(directory, part)))[0]
        return reply

    async def send(self, directory: Path, part: dict[str, Any]) -> None:
        order = {"group": part.get("group", self.group), "directory": str(directory), "part": part}
        await self.trainer.do("send", order)

    async def push(self, directory: Path, parts: list[dict[str, Any]], **body: Any) -> dict[str, Any]:
        await self.prepare(**body)
        for part in parts:
            await self.feed(directory, part)
        return await self.client.run("complete_weights_update")

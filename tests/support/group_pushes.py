"""Helpers of `tests/transports/test_group_transport.py` and of other tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rl_plane.client import RlClient
from tests.support.group_trainer import Trainer

BUCKET = 16_384
"""A witness model is some ten of them."""


class Pushing:
    """A fleet, and a trainer that has a group with it."""

    def __init__(self, client: RlClient, trainer: Trainer) -> None:
        self.client = client
        self.trainer = trainer

    async def prepare(self, directory: Path, version: str, **body: Any) -> dict[str, Any]:
        fingerprint = await self.trainer.do("form")
        transport = await self.trainer.do("open", [str(directory), BUCKET])
        asked = {"transport": transport, "version": version, "fingerprint": fingerprint, **body}
        return await self.client.run("prepare_weights_update", asked)

    async def push(self, directory: Path, version: str, **body: Any) -> dict[str, Any]:
        """Runs both phases of a pushed update, and returns the committed reply."""
        prepared = await self.prepare(directory, version, **body)
        last = await self.trainer.do("send")
        digest = await self.trainer.do("finish")
        await self.trainer.do("close")
        reply = await self.client.run("complete_weights_update", {"num_buckets": last + 1, "digest": digest})
        assert reply["num_buckets_received"] == last + 1
        assert reply["version"]["digest"] == digest
        assert reply["excluded"] == []
        return {**reply, "update_id": prepared["update_id"]}


async def send_all(trainer: Trainer) -> None:
    await trainer.do("send")
    await trainer.do("finish")

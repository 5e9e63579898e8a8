"""SkyRL's inference client, as far as it syncs weights, in front of a whole fleet on NATS.

Put it where SkyRL has its `RemoteInferenceClient`: the trainer's calls stay as they are. Its sender must form a torch
group (`backend: "gloo"` or `"nccl"` in `init_info`), or write an adapter to a directory that the workers read.
"""

from __future__ import annotations

import asyncio
from typing import Any

from rl_plane.publish.integrations.skyrl import LORA_DISK_LOAD, lora_disk_load
from rl_plane.publish.integrations.vllm_client import FleetWeightSyncClient
from rl_plane.sync import SyncRlClient


class FleetInferenceClient:
    def __init__(self, fleet: SyncRlClient, adapter: str = "policy") -> None:
        self._fleet = fleet
        self._sync = FleetWeightSyncClient(fleet)
        self._adapter = adapter

    async def get_world_size(self) -> tuple[int, int]:
        """The number of ranks of all servers, and of one server. SkyRL takes the fleet for one server."""
        rows = (await self._run("workers"))["workers"]
        ranks = sum(row["world_size"] for row in rows)
        return ranks, ranks

    async def pause_generation(self, clear_cache: bool = False) -> None:
        await self._run("pause", {"mode": "keep", "clear_cache": clear_cache})

    async def resume_generation(self) -> None:
        await self._run("resume")

    async def reset_prefix_cache(self) -> None:
        await self._run("flush_cache")

    async def init_weight_update_communicator(self, init_info: dict[str, Any]) -> None:
        await asyncio.to_thread(self._sync.init_weight_transfer_engine, init_info)

    async def start_weight_update(self) -> None:
        await asyncio.to_thread(self._sync.start_weight_update)

    async def update_named_weights(self, update_info: dict[str, Any]) -> None:
        if update_info.get("names") == [LORA_DISK_LOAD]:
            await self._run("load_lora_adapter", lora_disk_load(update_info, self._adapter))
        else:
            await asyncio.to_thread(self._sync.update_weights, update_info)

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        await asyncio.to_thread(self._sync.finish_weight_update, weight_version)

    async def _run(self, op: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return await asyncio.to_thread(self._fleet.run, op, body)

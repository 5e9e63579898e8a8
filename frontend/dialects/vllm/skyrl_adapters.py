"""SkyRL's own route for LoRA adapters. SkyRL adds it to vLLM's server, and unloads by vLLM's route."""

from __future__ import annotations

import zlib
from typing import Any

from frontend.dialects.common.context import DialectContext
from frontend.dialects.common.pause_and_adapters import AdapterPlaceFields, load_adapter
from frontend.server.shared_routes import ParsedRequest, SharedRoutes


def mount_skyrl_adapters(routes: SharedRoutes, context: DialectContext) -> None:
    @routes.post(
        "/skyrl/v1/load_lora_adapter",
        AdapterPlaceFields,
        "Load or replace an adapter on the whole fleet.",
        once=True,
    )
    async def load(request: ParsedRequest[AdapterPlaceFields]) -> Any:
        fields = request.fields
        await load_adapter(context, fields.lora_name, fields.lora_path, request.request_id)
        # A positive number, which stays the same when the adapter is replaced, as in SkyRL's server.
        number = zlib.crc32(fields.lora_name.encode()) or 1
        return {"status": "ok", "lora_name": fields.lora_name, "lora_int_id": number}

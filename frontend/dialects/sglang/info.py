"""The routes by which SGLang's clients read a server. The fleet answers as one server."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

from pydantic import Field

from frontend.dialects.common.context import DialectContext
from frontend.dialects.common.fleet_as_one import members, rows_of_all, same_of_all, served_version, skipped
from frontend.server.api import ANY_KEY
from frontend.server.shared_routes import Fields, NoFields, ParsedRequest, SharedRoutes
from rl_plane.errors import Conflict, InvalidRequest

SGLANG = "0.5.23"
"""The version of SGLang whose routes these are."""
DEFAULT_PORTS = {"http": 80, "https": 443}


class LoadsFields(Fields):
    """The body of `/v1/loads`."""

    include: str | None = None
    """Sections. Only `core` exists."""
    dp_rank: int | None = Field(None, ge=0)
    """Return only the load of this worker, by its place in the list."""
    format: str | None = None
    """The format of the reply. Only `json` is supported."""


class RegisterFields(Fields):
    """`POST /workers`, of a router"""

    url: str = Field(max_length=2048)
    worker_type: str = "regular"


def mount_info(routes: SharedRoutes, context: DialectContext) -> None:
    # vLLM's clients ask at the same path for a format.
    @routes.get(
        "/server_info",
        NoFields,
        "The fleet as one SGLang server.",
        claims=lambda raw: not raw.has("config_format"),
    )
    @routes.get("/get_server_info", NoFields, "The fleet as one SGLang server.")
    async def server_info(request: ParsedRequest[NoFields]) -> Any:
        return await _server_info(context, request.base_url)

    @routes.any("/model_info", NoFields, "The model, and the version that is served.", roles=ANY_KEY)
    @routes.any("/get_model_info", NoFields, "The model, and the version that is served.", roles=ANY_KEY)
    async def model_info(request: ParsedRequest[NoFields]) -> Any:
        rows = await members(context)
        return {
            "model_path": same_of_all(rows, "model_path"),
            "served_model_name": same_of_all(rows, "model"),
            "tokenizer_path": same_of_all(rows, "model_path"),
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": (await served_version(context))["label"],
            "has_image_understanding": False,
            "has_audio_understanding": False,
            **skipped(context),
        }

    @routes.get("/get_weight_version", NoFields, "The label of the version that is served.")
    async def weight_version(request: ParsedRequest[NoFields]) -> Any:
        return {"weight_version": (await served_version(context))["label"]}

    @routes.get("/health_generate", NoFields, "Each engine answers a real round trip, or 503.")
    async def health_generate(request: ParsedRequest[NoFields]) -> Any:
        await context.calls.run("liveness", {})
        return {"status": "ok"}

    @routes.get("/v1/loads", LoadsFields, "The workers' loads.")
    async def loads(request: ParsedRequest[LoadsFields]) -> Any:
        return await _loads(context, request.fields)

    _mount_router(routes, context)


def _mount_router(routes: SharedRoutes, context: DialectContext) -> None:
    @routes.get("/workers", NoFields, "This server, as a router lists one.")
    async def workers(request: ParsedRequest[NoFields]) -> Any:
        rows = await members(context)
        load = sum(int(row["running"]) + int(row["waiting"]) for row in rows)
        model = context.generation.list_models()["data"]
        one = {
            "id": request.base_url,
            "url": request.base_url,
            "model_id": model[0]["id"] if model else None,
            "worker_type": "regular",
            "is_healthy": bool(rows) and all(row["engine_alive"] for row in rows),
            "load": load,
            "connection_mode": "http",
        }
        return {"workers": [one], "total": 1, "stats": {"prefill_count": 0, "decode_count": 0, "regular_count": 1}}

    @routes.post("/workers", RegisterFields, "Registers this server, and no other.")
    async def register(request: ParsedRequest[RegisterFields]) -> Any:
        fields = request.fields
        if fields.url.rstrip("/") != request.base_url or fields.worker_type != "regular":
            raise InvalidRequest(
                f"{fields.url[:200]} ({fields.worker_type[:64]}) can't be registered: workers join by NATS",
                field="url",
                fix="start `rl-plane worker` beside the engine",
            )
        return {"status": "accepted", "worker_id": request.base_url, "url": request.base_url}


async def _server_info(context: DialectContext, base_url: str) -> dict[str, Any]:
    """miles and slime compare many of these with the arguments of the server that they would start."""
    rows = await rows_of_all(context, "describe")
    own = urlsplit(base_url)
    return {
        "host": own.netloc.rpartition("@")[2].removesuffix(f":{own.port}"),
        "port": own.port or DEFAULT_PORTS[own.scheme],
        "node_rank": 0,
        "gpu_id_step": 1,
        "num_gpus": sum(int(row["world_size"]) for row in rows),
        "tp_size": same_of_all(rows, "tp_size"),
        "pp_size": same_of_all(rows, "pp_size"),
        "dp_size": sum(int(row["dp_size"]) for row in rows),
        "ep_size": 1,
        "nnodes": 1,
        "disaggregation_mode": "null",
        "enable_memory_saver": all(row["memory_saver"] for row in rows),
        "enable_return_routed_experts": not any("generate:routed_experts" in row["lacks"] for row in rows),
        "model_path": same_of_all(rows, "model_path"),
        "tokenizer_path": same_of_all(rows, "model_path"),
        "served_model_name": same_of_all(rows, "model"),
        "dtype": same_of_all(rows, "dtype"),
        "context_length": min(int(row["max_model_len"]) for row in rows),
        "weight_version": (await served_version(context))["label"],
        "version": SGLANG,
        "internal_states": [],
        "engines": {row["instance_id"]: f"{row['engine']} {row['engine_version']}" for row in rows},
    }


async def _loads(context: DialectContext, fields: LoadsFields) -> dict[str, Any]:
    if fields.format not in (None, "json"):
        raise InvalidRequest("loads are JSON here", field="format", fix="json; GET /metrics has gauges")
    rows = await members(context)
    loads = [
        {
            "dp_rank": number,
            "timestamp": time.time(),
            "instance_id": row["instance_id"],
            "num_running_reqs": row["running"],
            "num_waiting_reqs": row["waiting"],
            "num_total_reqs": row["running"] + row["waiting"],
        }
        for number, row in enumerate(rows)
    ]
    if fields.dp_rank is not None:
        if fields.dp_rank >= len(loads):
            raise Conflict(f"there are {len(loads)} workers", field="dp_rank", fix="leave it out")
        loads = loads[fields.dp_rank : fields.dp_rank + 1]
    return {"timestamp": datetime.now(UTC).isoformat(), "version": SGLANG, "loads": loads}

"""What SGLang's clients read of a server: of the fleet as one."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

from pydantic import Field

from frontend.dialects.common.context import DialectContext
from frontend.dialects.common.fleet_as_one import members, rows_of_all, same_of_all, served_version, skipped
from frontend.server.shared_routes import DialectRequest, Fields, NoFields, SharedRoutes, take
from rl_plane.errors import Conflict, InvalidRequest

SGLANG = "0.5.23"
"""The version whose routes these are."""


class LoadsFields(Fields):
    """`/v1/loads`"""

    include: str | None = None
    """Sections; there is `core` only."""
    dp_rank: int | None = Field(None, ge=0)
    """Only the load of this worker, by its place in the list."""
    format: str | None = None
    """`json` only."""


class RegisterFields(Fields):
    """`POST /workers`, of a router"""

    url: str = Field(max_length=2048)
    worker_type: str = "regular"


def mount_info(routes: SharedRoutes, context: DialectContext) -> None:
    async def server_info(request: DialectRequest) -> Any:
        return await _server_info(context)

    async def model_info(request: DialectRequest) -> Any:
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

    async def weight_version(request: DialectRequest) -> Any:
        return {"weight_version": (await served_version(context))["label"]}

    async def health_generate(request: DialectRequest) -> Any:
        """A real round trip through each engine."""
        await context.calls.run("liveness", {})
        return {"status": "ok"}

    async def loads(request: DialectRequest) -> Any:
        return await _loads(context, take(LoadsFields, request))

    async def workers(request: DialectRequest) -> Any:
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

    async def register(request: DialectRequest) -> Any:
        fields = take(RegisterFields, request)
        if fields.url.rstrip("/") != request.base_url or fields.worker_type != "regular":
            raise InvalidRequest(
                f"{fields.url[:200]} ({fields.worker_type[:64]}) can't be registered: workers join by NATS",
                field="url",
                fix="start `rl-plane worker` beside the engine",
            )
        return {"status": "accepted", "worker_id": request.base_url, "url": request.base_url}

    for path in ("/server_info", "/get_server_info"):
        routes.add(
            ["GET"],
            path,
            server_info,
            summary="The fleet as one SGLang server.",
            # vLLM's clients ask at the same path for a format.
            claims=(lambda request: not request.has("config_format")) if path == "/server_info" else None,
        )
    for path in ("/model_info", "/get_model_info"):
        routes.add(["GET", "POST"], path, model_info, summary="The model, and the version that is served.")
    routes.add(["GET"], "/get_weight_version", weight_version, summary="The label of what is served.")
    routes.add(["GET"], "/health_generate", health_generate, summary="Each engine answers, or 503.")
    routes.add(["GET"], "/v1/loads", loads, summary="The workers' loads.", fields=LoadsFields)
    routes.add(["GET"], "/workers", workers, summary="This server, as a router lists one.", fields=NoFields)
    routes.add(["POST"], "/workers", register, summary="Registers this server; no other.", fields=RegisterFields)


async def _server_info(context: DialectContext) -> dict[str, Any]:
    rows = await rows_of_all(context, "describe")
    return {
        "num_gpus": sum(int(row["world_size"]) for row in rows),
        "tp_size": same_of_all(rows, "tp_size"),
        "pp_size": same_of_all(rows, "pp_size"),
        "dp_size": len(rows),
        "ep_size": 1,
        "nnodes": 1,
        "disaggregation_mode": "null",
        "enable_memory_saver": all(row["memory_saver"] for row in rows),
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
        raise InvalidRequest("loads are told as JSON here", field="format", fix="json; GET /metrics has gauges")
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

"""vLLM 0.32's routes for reinforcement learning. vLLM's own server has them in development mode only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from pydantic import Field

from frontend.dialects.common.context import DialectContext
from frontend.dialects.common.fleet_as_one import (
    MEMORY,
    checksum_each,
    failure,
    members,
    resume_fleet,
    rows_of_all,
    same_of_all,
    served_version,
    tell_paused,
    world_size,
)
from frontend.dialects.common.pause_and_adapters import mount_adapters, mount_pause
from frontend.dialects.common.transaction import Transactions
from frontend.dialects.vllm.collective_rpc import mount_rpc
from frontend.dialects.vllm.dynamo_engine import mount_dynamo_engine
from frontend.dialects.vllm.skyrl_adapters import mount_skyrl_adapters
from frontend.server.bodies import MAX_NAMES_BYTES
from frontend.server.shared_routes import Fields, NoFields, ParsedRequest, SharedRoutes
from rl_plane.errors import Conflict, InvalidRequest, PlaneError, Unavailable, Unsupported
from rl_plane.protocol.envelope import engine_replies
from rl_plane.protocol.record import PauseMode
from rl_plane.protocol.validation import Label
from rl_plane.protocol.vllm_bodies import GROUP

LARGEST_RANK = 512
"""The largest LoRA rank that vLLM itself takes. The reply has it where no engine of the fleet has a bound."""
MANY_ADAPTERS = 512
"""The number of adapters in a reply where no engine has a bound. Clients compare it, so it must be a number."""


class AbortFields(Fields):
    request_ids: list[str] | None = Field(None, max_length=10_000)
    """The ids of replies, or the ids that callers of this frontend chose (`request_id`, `X-Request-Id`). None: all."""


class InitFields(Fields):
    init_info: dict[str, Any]
    """`{master_address, master_port, rank_offset, world_size, backend, packed?, …}`"""


class UpdateFields(Fields):
    update_info: dict[str, Any] | list[dict[str, Any]]
    """`{names, dtype_names, shapes}` of the tensors that are broadcast now, or `{weight_dir}`."""


class FinishFields(Fields):
    weight_version: Label | None = None
    """The version's label."""


class VersionFields(Fields):
    new_version: Label


class CheckerFields(Fields):
    action: Literal["checksum", "reset", "compare"]
    baseline: dict[str, str] | None = None
    """The reply of an earlier checksum."""


class SizeFields(Fields):
    include_dp: bool = True
    """No effect: all ranks of a worker count."""


class CacheFields(Fields):
    reset_running_requests: bool = False
    """Running requests compute their KV again, so no engine keeps its cache for them."""
    reset_external: bool = False


class SleepFields(Fields):
    level: int = Field(1, ge=0, le=2)
    """0 only pauses. 1 and 2 release the memory, and the weights must be verified or sent again."""
    mode: PauseMode = "abort"


class WakeFields(Fields):
    tags: list[Literal["weights", "kv_cache", "scheduling"]] | None = None
    """`scheduling` resumes after level 0 in vLLM. Here the fleet resumes when all memory is back."""


class InfoFields(Fields):
    config_format: Literal["text", "json"] = "text"


def mount(routes: SharedRoutes, context: DialectContext) -> None:
    mount_pause(routes, context)
    mount_adapters(routes, context)
    mount_skyrl_adapters(routes, context)
    _mount_reading(routes, context)
    _mount_engine(routes, context)
    _mount_memory(routes, context)
    transactions = Transactions(context, GROUP)
    _mount_transfer(routes, context, transactions)
    mount_rpc(routes, context, transactions)
    mount_dynamo_engine(routes, context, transactions)


def _mount_reading(routes: SharedRoutes, context: DialectContext) -> None:
    @routes.get("/is_paused", NoFields, "Whether the fleet is paused.")
    async def is_paused(request: ParsedRequest[NoFields]) -> Any:
        return {"is_paused": await _unanimous(context, "paused", lambda row: row["pause_state"] == "paused")}

    @routes.get("/is_sleeping", NoFields, "Whether the fleet's memory is released.")
    async def is_sleeping(request: ParsedRequest[NoFields]) -> Any:
        return {"is_sleeping": await _unanimous(context, "asleep", _is_asleep)}

    @routes.get("/weight_info", NoFields, "The label of the one version that is served.")
    async def weight_info(request: ParsedRequest[NoFields]) -> Any:
        return {"weight_version": (await served_version(context))["label"]}

    @routes.get("/get_world_size", SizeFields, "The number of ranks of all workers.")
    async def get_world_size(request: ParsedRequest[SizeFields]) -> Any:
        return {"world_size": await world_size(context)}

    @routes.get("/server_info", InfoFields, "The fleet as one vLLM server.")
    async def server_info(request: ParsedRequest[InfoFields]) -> Any:
        config = await _config(context)
        shown = config if request.fields.config_format == "json" else str(config)
        return {"vllm_config": shown, "vllm_env": {}, "system_env": {}}


async def _unanimous(context: DialectContext, what: str, holds: Callable[[dict[str, Any]], bool]) -> bool:
    """Whether `holds` is true of every worker. Unavailable names the workers where it is true of some."""
    rows = await members(context)
    those = [row["instance_id"] for row in rows if holds(row)]
    if those and len(those) < len(rows):
        others = [row["instance_id"] for row in rows if row["instance_id"] not in those]
        raise Unavailable(
            f"{len(those)} of {len(rows)} workers are {what}", **{what: those, "others": others}, retry_after_s=1.0
        )
    return bool(those)


def _is_asleep(row: dict[str, Any]) -> bool:
    return any(reason.partition(":")[0] == "memory" for reason in row["admission"]["reasons"])


async def _config(context: DialectContext) -> dict[str, Any]:
    """The parts of a `VllmConfig` that clients read: one engine with the ranks of all workers."""
    rows = await rows_of_all(context, "describe")
    ranks = sum(int(row["world_size"]) for row in rows)
    shared = set.intersection(*(set(row["transports"]) for row in rows))
    models = context.generation.list_models()["data"]
    return {
        "model_config": {
            "model": models[0]["id"] if models else None,
            "dtype": f"torch.{same_of_all(rows, 'dtype')}",
            "max_model_len": min(int(row["max_model_len"]) for row in rows),
            "logprobs_mode": same_of_all(rows, "logprobs_mode"),
        },
        "parallel_config": {
            "world_size": ranks,
            "tensor_parallel_size": ranks,
            "pipeline_parallel_size": 1,
            "data_parallel_size": 1,
        },
        "weight_transfer_config": next(({"backend": one} for one in ("nccl", "gloo") if one in shared), None),
        "lora_config": _lora_config(rows),
    }


def _lora_config(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The adapters that every worker takes. None, as of a server without LoRA, unless all workers take some."""
    if any("prepare_update:lora" in row["lacks"] for row in rows):
        return None

    def least(name: str, unbounded: int) -> int:
        return min((int(row[name]) for row in rows if row[name] is not None), default=unbounded)

    places = least("max_adapters", MANY_ADAPTERS)
    return {
        "max_lora_rank": least("max_lora_rank", LARGEST_RANK),
        "max_loras": places,
        "max_cpu_loras": places,
        "fully_sharded_loras": False,
        "lora_dtype": "auto",
        "target_modules": None,
    }


def _mount_engine(routes: SharedRoutes, context: DialectContext) -> None:
    @routes.post("/abort_requests", AbortFields, "End requests now.")
    async def abort_requests(request: ParsedRequest[AbortFields]) -> Any:
        ids = request.fields.request_ids
        body = {"request_ids": ids} if ids else {}
        reply = await context.calls.run("abort_requests", body, request.request_id)
        count = sum(int(row["aborted"]) for row in engine_replies(reply))
        return {"status": "aborted", "aborted": count + reply["waiting"]}

    @routes.post("/reset_prefix_cache", CacheFields, "Drop the prefix caches.")
    async def reset_prefix_cache(request: ParsedRequest[CacheFields]) -> Any:
        if request.fields.reset_external:
            raise Unsupported(
                "no cache outside of the engines is known here", field="reset_external", fix="leave it out"
            )
        body = {"reset_running_requests": request.fields.reset_running_requests}
        try:
            await context.calls.run("flush_cache", body, request.request_id)
        except Conflict as error:
            codes = {row["error"]["code"] for row in error.facts.get("workers") or () if row.get("error")}
            if codes != {Conflict.code}:
                raise
            return {"success": False, "message": failure(error)}  # vLLM's answer where engines have requests
        return {"success": True}

    @routes.post("/weight_checker", CheckerFields, "Checksums by rank.")
    async def weight_checker(request: ParsedRequest[CheckerFields]) -> Any:
        action, known = request.fields.action, request.fields.baseline
        if action == "reset":
            await context.calls.run("check_weights", {"action": "reset_tensors"}, request.request_id)
            return {"status": "reset"}
        if action == "compare" and known is None:
            raise InvalidRequest("compare needs a baseline", field="baseline", fix="send an earlier checksum's")
        found = {
            f"{row['instance_id']}.rank{rank['rank']}": str(rank["checksum"])
            for row in await checksum_each(context)
            for rank in row["ranks"]
        }
        if known is None or action == "checksum":
            return {"checksums": found}
        differ = sorted(key for key in found.keys() | known.keys() if found.get(key) != known.get(key))
        return {"match": not differ, "mismatches": differ}


def _mount_memory(routes: SharedRoutes, context: DialectContext) -> None:
    @routes.post("/sleep", SleepFields, "Pause, and release memory.")
    async def sleep(request: ParsedRequest[SleepFields]) -> Any:
        fields = request.fields
        if fields.level > 0:
            await context.calls.fleet.check_memory("release_memory")  # before any worker is paused for it
        await context.calls.run("pause", {"mode": fields.mode}, request.request_id)
        if fields.level > 0:
            try:
                await context.calls.run("release_memory", {"tags": list(MEMORY)}, request.request_id)
            except PlaneError as error:
                await tell_paused(context, error)
                raise
        return {"status": "sleeping", "level": min(fields.level, 1)}

    @routes.post("/wake_up", WakeFields, "Take memory again, and resume.")
    async def wake_up(request: ParsedRequest[WakeFields]) -> Any:
        asked = request.fields.tags
        tags = [tag for tag in MEMORY if tag in (asked or MEMORY)]
        awake = await _take_back(context, tags, request.request_id)
        if awake:
            await resume_fleet(context)
        return {"status": "awake" if awake else "sleeping", "tags": asked}


async def _take_back(context: DialectContext, tags: list[str], request_id: str) -> bool:
    """Takes this memory again. Whether all memory is there then."""
    if not tags:
        return not any(_is_asleep(row) for row in await members(context))
    try:
        reply = await context.calls.run("resume_memory", {"tags": tags}, request_id)
    except Unsupported:
        return True  # no engine here can release memory
    return not any(row["tags"] for row in engine_replies(reply))


def _mount_transfer(routes: SharedRoutes, context: DialectContext, transactions: Transactions) -> None:
    @routes.post(
        "/init_weight_transfer_engine", InitFields, "Form a group of the trainer and every rank.", once=True
    )
    async def init(request: ParsedRequest[InitFields]) -> Any:
        await transactions.init(request.fields.init_info, request.path)
        return {"message": "Weight transfer initialized"}

    @routes.post("/shutdown_weight_transfer_engine", NoFields, "Leave the group.", once=True)
    async def shut_down(request: ParsedRequest[NoFields]) -> Any:
        await transactions.shut_down()
        return {"message": "Weight transfer shut down"}

    @routes.post("/start_weight_update", NoFields, "Begin an update of the whole fleet.", once=True)
    async def start(request: ParsedRequest[NoFields]) -> Any:
        await transactions.start(request.request_id)
        return {"message": "Weight update started"}

    @routes.post("/start_draft_weight_update", NoFields, "Refused: there is no draft model.", once=True)
    async def start_draft(request: ParsedRequest[NoFields]) -> Any:
        raise Unsupported("there is no draft model here", field="path", fix="start_weight_update")

    @routes.post(
        "/update_weights",
        UpdateFields,
        "Tensors that are broadcast now.",
        # With weight_dir, null or not, it is the request of prime-rl's broadcaster.
        claims=lambda raw: raw.has("update_info") and not raw.has("weight_dir"),
        once=True,
        standing=transactions.standing,
        max_body_bytes=MAX_NAMES_BYTES,
    )
    async def update(request: ParsedRequest[UpdateFields]) -> Any:
        await transactions.update(request.fields.update_info, request)
        return {"message": "Weights updated"}

    @routes.post("/finish_weight_update", FinishFields, "Commit the update, everywhere or nowhere.", once=True)
    async def finish(request: ParsedRequest[FinishFields]) -> Any:
        reply = await transactions.finish(request.fields.weight_version)
        return {"message": "Weight update finished", "version": reply["version"], "excluded": reply["excluded"]}

    @routes.post("/update_weight_version", VersionFields, "Label the update under way.")
    async def update_version(request: ParsedRequest[VersionFields]) -> Any:
        label = request.fields.new_version
        if not await transactions.name_next(label):
            served = (await served_version(context))["label"]
            if served != label:
                raise Conflict(
                    f"the fleet serves {served!r}; a version keeps the label that it was committed under",
                    field="new_version",
                    fix="name it in finish_weight_update, or between start and finish",
                )
        return {"success": True, "new_version": label}

"""vLLM 0.32's routes for reinforcement learning, which its server has in development mode only."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from frontend.dialects.common.context import DialectContext
from frontend.dialects.common.fleet_as_one import (
    MEMORY,
    checksum_each,
    failure,
    members,
    resume_fleet,
    same_of_all,
    served_version,
    tell_paused,
    world_size,
)
from frontend.dialects.common.pause_and_adapters import mount_adapters, mount_pause
from frontend.dialects.common.transaction import Transactions
from frontend.dialects.vllm.collective_rpc import mount_rpc
from frontend.server.bodies import MAX_NAMES_BYTES
from frontend.server.shared_routes import DialectRequest, Fields, NoFields, SharedRoutes, take
from rl_plane.errors import Conflict, InvalidRequest, PlaneError, Unavailable, Unsupported
from rl_plane.membership.worker_reply import engine_replies
from rl_plane.protocol.record import PauseMode
from rl_plane.protocol.validation import LABEL_CHARS, PRINTABLE
from rl_plane.protocol.vllm_bodies import GROUP

LARGEST_RANK = 512
"""That vLLM itself can be started for: told where no engine of the fleet has a bound."""
MANY_ADAPTERS = 512
"""Likewise of how many may be loaded: a number, since clients compare it."""


class AbortFields(Fields):
    request_ids: list[str] | None = Field(None, max_length=10_000)
    """As replies have them, or as callers of this frontend chose them (`request_id`, `X-Request-Id`); none: all."""


class InitFields(Fields):
    init_info: dict[str, Any]
    """`{master_address, master_port, rank_offset, world_size, backend, packed?, …}`"""


class UpdateFields(Fields):
    update_info: dict[str, Any] | list[dict[str, Any]]
    """`{names, dtype_names, shapes}` of what is broadcast now, or `{weight_dir}`."""


class FinishFields(Fields):
    weight_version: str | None = Field(None, min_length=1, max_length=LABEL_CHARS, pattern=PRINTABLE)
    """The version's label."""


class VersionFields(Fields):
    new_version: str = Field(min_length=1, max_length=LABEL_CHARS, pattern=PRINTABLE)


class CheckerFields(Fields):
    action: Literal["checksum", "reset", "compare"]
    baseline: dict[str, str] | None = None
    """Of an earlier checksum."""


class SizeFields(Fields):
    include_dp: bool = True
    """A worker's ranks are all of its ranks, either way."""


class CacheFields(Fields):
    reset_running_requests: bool = False
    reset_external: bool = False


class SleepFields(Fields):
    level: int = Field(1, ge=0, le=2)
    """0 only pauses. Beyond that memory is released, and the weights must be verified or sent anew, at 1 as at 2."""
    mode: PauseMode = "abort"


class WakeFields(Fields):
    tags: list[Literal["weights", "kv_cache", "scheduling"]] | None = None
    """`scheduling`: vLLM's word for going on after level 0. Here that comes with the last of the memory."""


class InfoFields(Fields):
    config_format: Literal["text", "json"] = "text"


def mount(routes: SharedRoutes, context: DialectContext) -> None:
    mount_pause(routes, context)
    mount_adapters(routes, context)
    _mount_reading(routes, context)
    _mount_engine(routes, context)
    transactions = Transactions(context, GROUP)
    _mount_transfer(routes, context, transactions)
    mount_rpc(routes, context, transactions)


def _mount_reading(routes: SharedRoutes, context: DialectContext) -> None:
    async def is_paused(request: DialectRequest) -> Any:
        return {"is_paused": await _unanimous(context, "paused", lambda row: row["pause_state"] == "paused")}

    async def is_sleeping(request: DialectRequest) -> Any:
        return {"is_sleeping": await _unanimous(context, "asleep", _asleep)}

    async def weight_info(request: DialectRequest) -> Any:
        return {"weight_version": (await served_version(context))["label"]}

    async def get_world_size(request: DialectRequest) -> Any:
        take(SizeFields, request)
        return {"world_size": await world_size(context)}

    async def server_info(request: DialectRequest) -> Any:
        fields = take(InfoFields, request)
        config = await _config(context)
        shown = config if fields.config_format == "json" else str(config)
        return {"vllm_config": shown, "vllm_env": {}, "system_env": {}}

    routes.add(["GET"], "/is_paused", is_paused, summary="Is the fleet paused?")
    routes.add(["GET"], "/is_sleeping", is_sleeping, summary="Is its memory released?")
    routes.add(["GET"], "/weight_info", weight_info, summary="The label of the one version that is served.")
    routes.add(["GET"], "/get_world_size", get_world_size, summary="Ranks of all workers.", fields=SizeFields)
    routes.add(["GET"], "/server_info", server_info, summary="The fleet as one vLLM server.", fields=InfoFields)


async def _unanimous(context: DialectContext, what: str, holds: Any) -> bool:
    rows = await members(context)
    those = [row["instance_id"] for row in rows if holds(row)]
    if those and len(those) < len(rows):
        others = [row["instance_id"] for row in rows if row["instance_id"] not in those]
        raise Unavailable(
            f"{len(those)} of {len(rows)} workers are {what}", **{what: those, "others": others}, retry_after_s=1.0
        )
    return bool(those)


def _asleep(row: dict[str, Any]) -> bool:
    return any(reason.partition(":")[0] == "memory" for reason in row["admission"]["reasons"])


async def _config(context: DialectContext) -> dict[str, Any]:
    """What clients read of a `VllmConfig`: one engine with the ranks of all workers."""
    rows = engine_replies(await context.calls.run("describe", {}))
    silent = [row["instance_id"] for row in rows if row["status"] != "ok"]
    if silent:
        raise Unavailable(f"{', '.join(silent[:8])} did not answer", workers=rows, retry_after_s=1.0)
    ranks = sum(int(row["world_size"]) for row in rows)
    shared = set.intersection(*(set(row["transports"]) for row in rows))
    models = context.generation.list_models()["data"]
    return {
        "model_config": {
            "model": models[0]["id"] if models else None,
            "dtype": f"torch.{same_of_all(rows, 'dtype')}",
            "max_model_len": min(int(row["max_model_len"]) for row in rows),
        },
        "parallel_config": {
            "world_size": ranks,
            "tensor_parallel_size": ranks,
            "pipeline_parallel_size": 1,
            "data_parallel_size": 1,
        },
        "weight_transfer_config": {"backend": "gloo"} if "gloo" in shared else None,
        "lora_config": _lora_config(rows),
    }


def _lora_config(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """What every worker can take; None as of a server without LoRA, unless all have it."""
    if any("prepare_update:lora" in row["capabilities"] for row in rows):
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
    async def abort_requests(request: DialectRequest) -> Any:
        fields = take(AbortFields, request)
        body = (
            {"request_ids": context.generation.caller_ids.made_of(fields.request_ids)}
            if fields.request_ids
            else {}
        )
        reply = await context.calls.run("abort_requests", body, request.request_id)
        count = sum(int(row["aborted"]) for row in engine_replies(reply))
        return {"status": "aborted", "aborted": count + reply["waiting"]}

    async def reset_prefix_cache(request: DialectRequest) -> Any:
        fields = take(CacheFields, request)
        for name in ("reset_running_requests", "reset_external"):
            if getattr(fields, name):
                raise Unsupported(f"{name} is not supported here", field=name, fix="leave it out; pause first")
        try:
            await context.calls.run("flush_cache", {}, request.request_id)
        except Conflict as error:
            codes = {row["error"]["code"] for row in error.facts.get("workers") or () if row.get("error")}
            if codes != {Conflict.code}:
                raise
            return {"success": False, "message": failure(error)}  # engines with requests refuse; vLLM says it so
        return {"success": True}

    async def weight_checker(request: DialectRequest) -> Any:
        fields = take(CheckerFields, request)
        if fields.action == "reset":
            await context.calls.run("check_weights", {"action": "reset_tensors"}, request.request_id)
            return {"status": "reset"}
        if fields.action == "compare" and fields.baseline is None:
            raise InvalidRequest("compare needs a baseline", field="baseline", fix="send an earlier checksum's")
        found = {
            f"{row['instance_id']}.rank{rank['rank']}": str(rank["checksum"])
            for row in await checksum_each(context)
            for rank in row["ranks"]
        }
        if fields.action == "checksum":
            return {"checksums": found}
        assert fields.baseline is not None
        known = fields.baseline
        differ = sorted(key for key in found.keys() | known.keys() if found.get(key) != known.get(key))
        return {"match": not differ, "mismatches": differ}

    async def sleep(request: DialectRequest) -> Any:
        fields = take(SleepFields, request)
        if fields.level > 0:
            await context.calls.fleet.check_memory("release_memory")  # before anybody is paused for it
        await context.calls.run("pause", {"mode": fields.mode}, request.request_id)
        if fields.level > 0:
            try:
                await context.calls.run("release_memory", {"tags": list(MEMORY)}, request.request_id)
            except PlaneError as error:
                await tell_paused(context, error)
                raise
        return {"status": "sleeping", "level": min(fields.level, 1)}

    async def wake_up(request: DialectRequest) -> Any:
        fields = take(WakeFields, request)
        tags = [tag for tag in MEMORY if tag in (fields.tags or MEMORY)]
        awake = await _take_back(context, tags, request.request_id)
        if awake:
            await resume_fleet(context)
        return {"status": "awake" if awake else "sleeping", "tags": fields.tags}

    routes.add(["POST"], "/abort_requests", abort_requests, summary="End requests now.", fields=AbortFields)
    routes.add(
        ["POST"],
        "/reset_prefix_cache",
        reset_prefix_cache,
        summary="Drop the prefix caches.",
        fields=CacheFields,
    )
    routes.add(["POST"], "/weight_checker", weight_checker, summary="Checksums by rank.", fields=CheckerFields)
    routes.add(["POST"], "/sleep", sleep, summary="Pause, and release memory.", fields=SleepFields)
    routes.add(["POST"], "/wake_up", wake_up, summary="Take memory again, and go on.", fields=WakeFields)


async def _take_back(context: DialectContext, tags: list[str], request_id: str) -> bool:
    """Is all memory there then?"""
    if not tags:
        return not any(_asleep(row) for row in await members(context))
    try:
        reply = await context.calls.run("resume_memory", {"tags": tags}, request_id)
    except Unsupported:
        return True  # no engine here can, so none has released any
    return not any(row["tags"] for row in engine_replies(reply))


def _mount_transfer(routes: SharedRoutes, context: DialectContext, transactions: Transactions) -> None:
    async def init(request: DialectRequest) -> Any:
        await transactions.init(take(InitFields, request).init_info, request.path)
        return {"message": "Weight transfer initialized"}

    async def shut_down(request: DialectRequest) -> Any:
        await transactions.shut_down()
        return {"message": "Weight transfer shut down"}

    async def start(request: DialectRequest) -> Any:
        take(NoFields, request)
        await transactions.start(request.request_id)
        return {"message": "Weight update started"}

    async def start_draft(request: DialectRequest) -> Any:
        raise Unsupported("there is no draft model here", field="path", fix="start_weight_update")

    async def update(request: DialectRequest) -> Any:
        await transactions.update(take(UpdateFields, request).update_info, request)
        return {"message": "Weights updated"}

    async def finish(request: DialectRequest) -> Any:
        reply = await transactions.finish(take(FinishFields, request).weight_version)
        told = {name: reply[name] for name in ("version", "excluded")}
        return {"message": "Weight update finished", **told}

    async def update_version(request: DialectRequest) -> Any:
        label = take(VersionFields, request).new_version
        if not await transactions.name_next(label):
            served = (await served_version(context))["label"]
            if served != label:
                raise Conflict(
                    f"the fleet serves {served!r}; a version keeps the label that it was committed under",
                    field="new_version",
                    fix="name it in finish_weight_update, or between start and finish",
                )
        return {"success": True, "new_version": label}

    for path, handler, summary, fields in (
        ("/init_weight_transfer_engine", init, "Form a group of the trainer and every rank.", InitFields),
        ("/shutdown_weight_transfer_engine", shut_down, "Leave it.", NoFields),
        ("/start_weight_update", start, "Begin an update of the whole fleet.", NoFields),
        ("/start_draft_weight_update", start_draft, "Refused: there is no draft model.", NoFields),
        ("/finish_weight_update", finish, "Commit it, everywhere or nowhere.", FinishFields),
    ):
        routes.add(["POST"], path, handler, summary=summary, fields=fields, once=True)
    routes.add(
        ["POST"],
        "/update_weights",
        update,
        summary="Tensors that are broadcast now.",
        fields=UpdateFields,
        # With weight_dir, null or not, it is what prime-rl's broadcaster sends.
        claims=lambda request: request.has("update_info") and not request.has("weight_dir"),
        once=True,
        standing=transactions.standing,
        max_body_bytes=MAX_NAMES_BYTES,
    )
    routes.add(
        ["POST"],
        "/update_weight_version",
        update_version,
        summary="Name the update that is under way.",
        fields=VersionFields,
    )

"""vLLM 0.32's routes for reinforcement learning, which its server has in development mode only."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import FastAPI
from pydantic import Field

from frontend.dialects import DialectPlane
from frontend.dialects.common import (
    MEMORY,
    checksum_each,
    let_go,
    members,
    same_of_all,
    served_version,
    tell_paused,
    world_size,
)
from frontend.dialects.dialect_routes import Ask, Fields, NoFields, add_route, failure, take
from frontend.dialects.steering import mount_adapters, mount_pause
from frontend.dialects.transaction import Transactions
from frontend.dialects.vllm.collective_rpc import mount_rpc
from frontend.server.http import MAX_NAMES_BYTES
from rl_plane.errors import Conflict, InvalidRequest, PlaneError, Unavailable, Unsupported
from rl_plane.protocol.envelope import engine_replies
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


def mount(app: FastAPI, plane: DialectPlane) -> None:
    mount_pause(app, plane)
    mount_adapters(app, plane)
    _mount_reading(app, plane)
    _mount_engine(app, plane)
    transactions = Transactions(plane, GROUP)
    _mount_transfer(app, plane, transactions)
    mount_rpc(app, plane, transactions)


def _mount_reading(app: FastAPI, plane: DialectPlane) -> None:
    async def is_paused(ask: Ask) -> Any:
        return {"is_paused": await _unanimous(plane, "paused", lambda row: row["pause_state"] == "paused")}

    async def is_sleeping(ask: Ask) -> Any:
        return {"is_sleeping": await _unanimous(plane, "asleep", _asleep)}

    async def weight_info(ask: Ask) -> Any:
        return {"weight_version": (await served_version(plane))["label"]}

    async def get_world_size(ask: Ask) -> Any:
        take(SizeFields, ask)
        return {"world_size": await world_size(plane)}

    async def server_info(ask: Ask) -> Any:
        fields = take(InfoFields, ask)
        config = await _config(plane)
        shown = config if fields.config_format == "json" else str(config)
        return {"vllm_config": shown, "vllm_env": {}, "system_env": {}}

    add_route(app, ["GET"], "/is_paused", is_paused, summary="Is the fleet paused?")
    add_route(app, ["GET"], "/is_sleeping", is_sleeping, summary="Is its memory released?")
    add_route(app, ["GET"], "/weight_info", weight_info, summary="The label of the one version that is served.")
    add_route(app, ["GET"], "/get_world_size", get_world_size, summary="Ranks of all workers.", fields=SizeFields)
    add_route(
        app, ["GET"], "/server_info", server_info, summary="The fleet as one vLLM server.", fields=InfoFields
    )


async def _unanimous(plane: DialectPlane, what: str, holds: Any) -> bool:
    rows = await members(plane)
    those = [row["instance_id"] for row in rows if holds(row)]
    if those and len(those) < len(rows):
        others = [row["instance_id"] for row in rows if row["instance_id"] not in those]
        raise Unavailable(
            f"{len(those)} of {len(rows)} workers are {what}", **{what: those, "others": others}, retry_after_s=1.0
        )
    return bool(those)


def _asleep(row: dict[str, Any]) -> bool:
    return any(reason.partition(":")[0] == "memory" for reason in row["admission"]["reasons"])


async def _config(plane: DialectPlane) -> dict[str, Any]:
    """What clients read of a `VllmConfig`: one engine with the ranks of all workers."""
    rows = engine_replies(await plane.calls.run("describe", {}))
    silent = [row["instance_id"] for row in rows if row["status"] != "ok"]
    if silent:
        raise Unavailable(f"{', '.join(silent[:8])} did not answer", workers=rows, retry_after_s=1.0)
    ranks = sum(int(row["world_size"]) for row in rows)
    shared = set.intersection(*(set(row["transports"]) for row in rows))
    models = plane.generation.list_models()["data"]
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


def _mount_engine(app: FastAPI, plane: DialectPlane) -> None:
    async def abort_requests(ask: Ask) -> Any:
        fields = take(AbortFields, ask)
        body = (
            {"request_ids": plane.generation.caller_ids.made_of(fields.request_ids)} if fields.request_ids else {}
        )
        reply = await plane.calls.run("abort_requests", body, ask.request_id)
        count = sum(int(row["aborted"]) for row in engine_replies(reply))
        return {"status": "aborted", "aborted": count + reply["waiting"]}

    async def reset_prefix_cache(ask: Ask) -> Any:
        fields = take(CacheFields, ask)
        for name in ("reset_running_requests", "reset_external"):
            if getattr(fields, name):
                raise Unsupported(f"{name} is not supported here", field=name, fix="leave it out; pause first")
        try:
            await plane.calls.run("flush_cache", {}, ask.request_id)
        except Conflict as error:
            codes = {row["error"]["code"] for row in error.facts.get("workers") or () if row.get("error")}
            if codes != {Conflict.code}:
                raise
            return {"success": False, "message": failure(error)}  # engines with requests refuse; vLLM says it so
        return {"success": True}

    async def weight_checker(ask: Ask) -> Any:
        fields = take(CheckerFields, ask)
        if fields.action == "reset":
            await plane.calls.run("check_weights", {"action": "reset_tensors"}, ask.request_id)
            return {"status": "reset"}
        if fields.action == "compare" and fields.baseline is None:
            raise InvalidRequest("compare needs a baseline", field="baseline", fix="send an earlier checksum's")
        found = {
            f"{row['instance_id']}.rank{rank['rank']}": str(rank["checksum"])
            for row in await checksum_each(plane)
            for rank in row["ranks"]
        }
        if fields.action == "checksum":
            return {"checksums": found}
        assert fields.baseline is not None
        known = fields.baseline
        differ = sorted(key for key in found.keys() | known.keys() if found.get(key) != known.get(key))
        return {"match": not differ, "mismatches": differ}

    async def sleep(ask: Ask) -> Any:
        fields = take(SleepFields, ask)
        if fields.level > 0:
            await plane.calls.fleet.check_memory("release_memory")  # before anybody is paused for it
        await plane.calls.run("pause", {"mode": fields.mode}, ask.request_id)
        if fields.level > 0:
            try:
                await plane.calls.run("release_memory", {"tags": list(MEMORY)}, ask.request_id)
            except PlaneError as error:
                await tell_paused(plane, error)
                raise
        return {"status": "sleeping", "level": min(fields.level, 1)}

    async def wake_up(ask: Ask) -> Any:
        fields = take(WakeFields, ask)
        tags = [tag for tag in MEMORY if tag in (fields.tags or MEMORY)]
        awake = await _take_back(plane, tags, ask.request_id)
        if awake:
            await let_go(plane)
        return {"status": "awake" if awake else "sleeping", "tags": fields.tags}

    add_route(app, ["POST"], "/abort_requests", abort_requests, summary="End requests now.", fields=AbortFields)
    add_route(
        app,
        ["POST"],
        "/reset_prefix_cache",
        reset_prefix_cache,
        summary="Drop the prefix caches.",
        fields=CacheFields,
    )
    add_route(app, ["POST"], "/weight_checker", weight_checker, summary="Checksums by rank.", fields=CheckerFields)
    add_route(app, ["POST"], "/sleep", sleep, summary="Pause, and release memory.", fields=SleepFields)
    add_route(app, ["POST"], "/wake_up", wake_up, summary="Take memory again, and go on.", fields=WakeFields)


async def _take_back(plane: DialectPlane, tags: list[str], request_id: str) -> bool:
    """Is all memory there then?"""
    if not tags:
        return not any(_asleep(row) for row in await members(plane))
    try:
        reply = await plane.calls.run("resume_memory", {"tags": tags}, request_id)
    except Unsupported:
        return True  # no engine here can, so none has released any
    return not any(row["tags"] for row in engine_replies(reply))


def _mount_transfer(app: FastAPI, plane: DialectPlane, transactions: Transactions) -> None:
    async def init(ask: Ask) -> Any:
        await transactions.init(take(InitFields, ask).init_info, ask.path)
        return {"message": "Weight transfer initialized"}

    async def shut_down(ask: Ask) -> Any:
        await transactions.shut_down()
        return {"message": "Weight transfer shut down"}

    async def start(ask: Ask) -> Any:
        take(NoFields, ask)
        await transactions.start(ask.request_id)
        return {"message": "Weight update started"}

    async def start_draft(ask: Ask) -> Any:
        raise Unsupported("there is no draft model here", field="path", fix="start_weight_update")

    async def update(ask: Ask) -> Any:
        await transactions.update(take(UpdateFields, ask).update_info, ask)
        return {"message": "Weights updated"}

    async def finish(ask: Ask) -> Any:
        reply = await transactions.finish(take(FinishFields, ask).weight_version)
        told = {name: reply[name] for name in ("version", "excluded")}
        return {"message": "Weight update finished", **told}

    async def update_version(ask: Ask) -> Any:
        label = take(VersionFields, ask).new_version
        if not await transactions.name_next(label):
            served = (await served_version(plane))["label"]
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
        add_route(app, ["POST"], path, handler, summary=summary, fields=fields, once=True)
    add_route(
        app,
        ["POST"],
        "/update_weights",
        update,
        summary="Tensors that are broadcast now.",
        fields=UpdateFields,
        # With weight_dir, null or not, it is what prime-rl's broadcaster sends.
        claims=lambda ask: ask.has("update_info") and not ask.has("weight_dir"),
        once=True,
        standing=transactions.standing,
        max_body_bytes=MAX_NAMES_BYTES,
    )
    add_route(
        app,
        ["POST"],
        "/update_weight_version",
        update_version,
        summary="Name the update that is under way.",
        fields=VersionFields,
    )

"""SGLang's pause and continue, cache, requests, memory and checker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from frontend.dialects.common.context import DialectContext
from frontend.dialects.common.fleet_as_one import MEMORY, checksum_each, joined, resume_fleet, skipped, tell_paused
from frontend.dialects.sglang.body_tensors import IDLE_S, HeldTensors
from frontend.dialects.sglang.sglang_session import Updates
from frontend.server.shared_routes import DialectRequest, Fields, SharedRoutes, report, take
from rl_plane.errors import Conflict, InvalidRequest, PlaneError
from rl_plane.membership.worker_reply import engine_replies

FLUSH_AGAIN_S = 0.2
MAX_FLUSH_S = 300.0
"""`timeout` of a flush: beyond it a client has gone."""

FLUSHED = {"success": True, "message": "Cache flushed."}
ABORTED = {"success": True, "message": "Requests aborted."}
PAUSED = {"message": "Generation paused successfully.", "status": "ok"}
CONTINUED = {"message": "Generation continued successfully.", "status": "ok"}


class SglangPauseFields(Fields):
    """`/pause_generation`"""

    mode: Literal["abort", "retract", "in_place"] = "abort"
    """`abort` ends running requests; `retract` has them computed anew afterwards; `in_place` freezes them."""


class ContinueFields(Fields):
    """`/continue_generation`"""

    torch_empty_cache: bool = True


class SglangAbortFields(Fields):
    """`/abort_request`"""

    rid: str | list[str] | None = None
    """As the caller chose it (`rid`, `X-Request-Id`) for a request to this frontend, or as its reply has it."""
    abort_all: bool = False


class FlushFields(Fields):
    """`/flush_cache`"""

    timeout: float = Field(0.0, ge=0, le=MAX_FLUSH_S)
    """Seconds to wait until the engines can."""


class MemoryFields(Fields):
    """`/release_memory_occupation` and `/resume_memory_occupation`"""

    tags: list[Literal["kv_cache", "weights", "cuda_graph"]] | None = None
    """None: all. `cuda_graph` says nothing: an engine's graphs go and come with its weights."""


class SglangCheckerFields(Fields):
    """`/weights_checker`"""

    action: Literal["checksum", "snapshot", "reset_tensors", "compare"] = "checksum"
    allow_quant_error: bool = False
    skip_tensor_list: list[str] | None = None
    selector: Literal["target", "draft", "all"] = "all"


def mount_control(routes: SharedRoutes, context: DialectContext, updates: Updates) -> None:
    async def pause(request: DialectRequest) -> Any:
        await context.calls.run("pause", {"mode": take(SglangPauseFields, request).mode}, request.request_id)
        await updates.pause()
        return {**PAUSED, **skipped(context)}

    async def go_on(request: DialectRequest) -> Any:
        """What was sent while the fleet was paused is committed first: nobody generates by a part of it."""
        if not take(ContinueFields, request).torch_empty_cache:
            report(request.path, "torch_empty_cache", "engines keep their allocators' memory as they do")
        try:
            committed = await updates.commit_open()
        except PlaneError as error:
            if await updates.is_open():
                await tell_paused(context, error)
                raise
            # It has ended, and nothing of it is left anywhere: that is no reason to stand still.
            try:
                await resume_fleet(context)
            except PlaneError:
                await tell_paused(context, error)
                raise error from None
            told = f"{error.message}; generation goes on by the committed version"
            raise type(error)(told, **error.facts) from error
        await resume_fleet(context, request.request_id)
        if committed is None:
            return {**CONTINUED, **skipped(context)}
        version = {"weight_version": committed["version"]["label"], "excluded": committed["excluded"]}
        return {**CONTINUED, **version, **skipped(context)}

    async def abort(request: DialectRequest) -> Any:
        fields = take(SglangAbortFields, request)
        ids = [fields.rid] if isinstance(fields.rid, str) else fields.rid or []
        if fields.abort_all:
            await context.calls.run("abort_requests", {}, request.request_id)
        elif any(ids):
            named = context.generation.caller_ids.made_of(one for one in ids if one)
            await context.calls.run("abort_requests", {"request_ids": named}, request.request_id)
        return ABORTED

    async def flush(request: DialectRequest) -> Any:
        fields = take(FlushFields, request)
        # verl flushes after its last bucket: without a word it would take the update for done.
        if await updates.is_open() and not await updates.opened.in_pause():
            await (_refuse_to_flush(updates.held) if updates.held else _refuse_to_flush_fed())
        return await _flush(context, fields.timeout)

    async def release(request: DialectRequest) -> Any:
        await _memory(context, "release_memory", request)

    async def resume(request: DialectRequest) -> Any:
        await _memory(context, "resume_memory", request)

    async def check(request: DialectRequest) -> Any:
        fields = take(SglangCheckerFields, request)
        if fields.selector == "draft" or fields.skip_tensor_list:
            field = "selector" if fields.selector == "draft" else "skip_tensor_list"
            raise InvalidRequest("all weights of the model are checked", field=field, fix="leave it out")
        if fields.allow_quant_error:
            report(request.path, "allow_quant_error", "weights are compared bit by bit")
        return await _check(context, fields.action)

    routes.add(["POST"], "/pause_generation", pause, summary="Stop generation.", fields=SglangPauseFields)
    routes.add(
        ["POST"],
        "/continue_generation",
        go_on,
        summary="Commit what was sent meanwhile, and go on.",
        fields=ContinueFields,
        once=True,
    )
    routes.add(["POST"], "/abort_request", abort, summary="End one request, or all.", fields=SglangAbortFields)
    routes.add(["GET", "POST"], "/flush_cache", flush, summary="Drop the prefix caches.", fields=FlushFields)
    for path, handler, summary in (
        ("/release_memory_occupation", release, "Give memory back."),
        ("/resume_memory_occupation", resume, "Take it again."),
    ):
        routes.add(["GET", "POST"], path, handler, summary=summary, fields=MemoryFields)
    routes.add(
        ["GET", "POST"],
        "/weights_checker",
        check,
        summary="Check the weights.",
        fields=SglangCheckerFields,
        once=True,
    )


async def _memory(context: DialectContext, op: str, request: DialectRequest) -> None:
    asked: Sequence[str] = take(MemoryFields, request).tags or MEMORY
    if "cuda_graph" in asked:
        report(request.path, "tags.cuda_graph", "an engine's graphs go and come with its weights")
    tags = [tag for tag in MEMORY if tag in asked]
    if tags:
        await context.calls.run(op, {"tags": tags}, request.request_id)


async def _flush(context: DialectContext, timeout_s: float) -> dict[str, Any]:
    give_up = time.monotonic() + timeout_s
    while True:
        try:
            await context.calls.run("flush_cache", {})
            return FLUSHED
        except Conflict as error:
            if time.monotonic() >= give_up:
                # SGLang's status for it, by which clients ask again.
                raise InvalidRequest(f"Flush cache failed. {error.message}", **error.facts) from error
        await asyncio.sleep(FLUSH_AGAIN_S)


async def _refuse_to_flush(held: HeldTensors) -> None:
    await held.ask_model()
    if held.is_whole:
        raise InvalidRequest(
            f"Flush cache failed. The update is whole, but not committed, as nobody has ended it: {held.told}",
            fix=f"end_weight_update commits it; what is held is dropped after {IDLE_S:g} s of silence",
        )
    missing = await held.missing()
    raise InvalidRequest(
        f"Flush cache failed. The update is not whole, so it is not committed: {held.told}; "
        f"missing: {', '.join(missing)}",
        missing=missing,
        fix=f"send the rest; what is held is dropped after {IDLE_S:g} s of silence",
    )


async def _refuse_to_flush_fed() -> None:
    raise InvalidRequest(
        "Flush cache failed. The update is not committed: tensors are missing, or nobody has ended it",
        fix="send the rest; where all is here, end_weight_update commits it",
    )


async def _check(context: DialectContext, action: str) -> Any:
    if action == "checksum":
        rows = await checksum_each(context)
    else:
        rows = engine_replies(await context.calls.run("check_weights", {"action": action}))
    ranks = [{"instance_id": row["instance_id"], **rank} for row in rows for rank in row["ranks"]]
    differing = [rank["instance_id"] for rank in ranks if rank.get("match") is False]
    if differing:
        raise Conflict(
            f"the weights of {', '.join(dict.fromkeys(differing))} differ from the snapshot",
            ranks=ranks,
            fix="each rank's mismatches name them",
        )
    body = {"success": True, "message": joined({"workers": rows}, f"{action} done"), "ranks": ranks}
    checksums = {str(rank["checksum"]) for rank in ranks if "checksum" in rank}
    return {**body, "per_engine_checksum": checksums.pop()} if len(checksums) == 1 else body

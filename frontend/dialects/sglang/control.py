"""SGLang's pause and continue, cache, requests, memory and checker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Literal

from fastapi import FastAPI
from pydantic import Field

from frontend.dialects import DialectPlane
from frontend.dialects.common import MEMORY, checksum_each, joined, let_go, skipped, tell_paused
from frontend.dialects.dialect_routes import Ask, Fields, add_route, report, take
from frontend.dialects.sglang.body_tensors import IDLE_S, HeldTensors
from frontend.dialects.sglang.sglang_session import Updates
from rl_plane.errors import Conflict, InvalidRequest, PlaneError
from rl_plane.protocol.envelope import engine_replies

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


def mount_control(app: FastAPI, plane: DialectPlane, updates: Updates) -> None:
    async def pause(ask: Ask) -> Any:
        await plane.calls.run("pause", {"mode": take(SglangPauseFields, ask).mode}, ask.request_id)
        await updates.pause()
        return {**PAUSED, **skipped(plane)}

    async def go_on(ask: Ask) -> Any:
        """What was sent while the fleet was paused is committed first: nobody generates by a part of it."""
        if not take(ContinueFields, ask).torch_empty_cache:
            report(ask.path, "torch_empty_cache", "engines keep their allocators' memory as they do")
        try:
            committed = await updates.commit_open()
        except PlaneError as error:
            if await updates.is_open():
                await tell_paused(plane, error)
                raise
            # It has ended, and nothing of it is left anywhere: that is no reason to stand still.
            try:
                await let_go(plane)
            except PlaneError:
                await tell_paused(plane, error)
                raise error from None
            told = f"{error.message}; generation goes on by the committed version"
            raise type(error)(told, **error.facts) from error
        await let_go(plane, ask.request_id)
        if committed is None:
            return {**CONTINUED, **skipped(plane)}
        version = {"weight_version": committed["version"]["label"], "excluded": committed["excluded"]}
        return {**CONTINUED, **version, **skipped(plane)}

    async def abort(ask: Ask) -> Any:
        fields = take(SglangAbortFields, ask)
        ids = [fields.rid] if isinstance(fields.rid, str) else fields.rid or []
        if fields.abort_all:
            await plane.calls.run("abort_requests", {}, ask.request_id)
        elif any(ids):
            named = plane.generation.caller_ids.made_of(one for one in ids if one)
            await plane.calls.run("abort_requests", {"request_ids": named}, ask.request_id)
        return ABORTED

    async def flush(ask: Ask) -> Any:
        fields = take(FlushFields, ask)
        # verl flushes after its last bucket: without a word it would take the update for done.
        if await updates.is_open() and not await updates.opened.in_pause():
            await (_refuse_to_flush(updates.held) if updates.held else _refuse_to_flush_fed())
        return await _flush(plane, fields.timeout)

    async def release(ask: Ask) -> Any:
        await _memory(plane, "release_memory", ask)

    async def resume(ask: Ask) -> Any:
        await _memory(plane, "resume_memory", ask)

    async def check(ask: Ask) -> Any:
        fields = take(SglangCheckerFields, ask)
        if fields.selector == "draft" or fields.skip_tensor_list:
            field = "selector" if fields.selector == "draft" else "skip_tensor_list"
            raise InvalidRequest("all weights of the model are checked", field=field, fix="leave it out")
        if fields.allow_quant_error:
            report(ask.path, "allow_quant_error", "weights are compared bit by bit")
        return await _check(plane, fields.action)

    add_route(app, ["POST"], "/pause_generation", pause, summary="Stop generation.", fields=SglangPauseFields)
    add_route(
        app,
        ["POST"],
        "/continue_generation",
        go_on,
        summary="Commit what was sent meanwhile, and go on.",
        fields=ContinueFields,
        once=True,
    )
    add_route(app, ["POST"], "/abort_request", abort, summary="End one request, or all.", fields=SglangAbortFields)
    add_route(app, ["GET", "POST"], "/flush_cache", flush, summary="Drop the prefix caches.", fields=FlushFields)
    for path, handler, summary in (
        ("/release_memory_occupation", release, "Give memory back."),
        ("/resume_memory_occupation", resume, "Take it again."),
    ):
        add_route(app, ["GET", "POST"], path, handler, summary=summary, fields=MemoryFields)
    add_route(
        app,
        ["GET", "POST"],
        "/weights_checker",
        check,
        summary="Check the weights.",
        fields=SglangCheckerFields,
        once=True,
    )


async def _memory(plane: DialectPlane, op: str, ask: Ask) -> None:
    asked: Sequence[str] = take(MemoryFields, ask).tags or MEMORY
    if "cuda_graph" in asked:
        report(ask.path, "tags.cuda_graph", "an engine's graphs go and come with its weights")
    tags = [tag for tag in MEMORY if tag in asked]
    if tags:
        await plane.calls.run(op, {"tags": tags}, ask.request_id)


async def _flush(plane: DialectPlane, timeout_s: float) -> dict[str, Any]:
    give_up = time.monotonic() + timeout_s
    while True:
        try:
            await plane.calls.run("flush_cache", {})
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


async def _check(plane: DialectPlane, action: str) -> Any:
    if action == "checksum":
        rows = await checksum_each(plane)
    else:
        rows = engine_replies(await plane.calls.run("check_weights", {"action": action}))
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

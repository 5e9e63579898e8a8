"""SGLang's routes for pause and continue, cache, requests, memory and checks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from frontend.dialects.common.context import DialectContext
from frontend.dialects.common.fleet_as_one import (
    MEMORY,
    resume_fleet,
    skipped,
    tell_paused,
)
from frontend.dialects.sglang.body_tensors import HeldTensors
from frontend.dialects.sglang.sglang_session import Updates
from frontend.server.shared_routes import Fields, NoFields, ParsedRequest, SharedRoutes, report
from rl_plane.errors import Conflict, InvalidRequest, PlaneError, Unsupported

FLUSH_AGAIN_S = 0.2
MAX_FLUSH_S = 300.0
"""The longest `timeout` of a flush. After that a client has disconnected."""

FLUSHED = {"success": True, "message": "Cache flushed."}
ABORTED = {"success": True, "message": "Requests aborted."}
PAUSED = {"message": "Generation paused successfully.", "status": "ok"}
CONTINUED = {"message": "Generation continued successfully.", "status": "ok"}


class SglangPauseFields(Fields):
    """The body of `/pause_generation`."""

    mode: Literal["abort", "retract", "in_place"] = "abort"
    """`abort` ends running requests. `retract` computes them again afterwards. `in_place` freezes them."""


class ContinueFields(Fields):
    """The body of `/continue_generation`."""

    torch_empty_cache: bool = True


class SglangAbortFields(Fields):
    """The body of `/abort_request`."""

    rid: str | list[str] | None = None
    """The id that the caller of this frontend chose (`rid`, `X-Request-Id`), or the id of the reply."""
    abort_all: bool = False


class FlushFields(Fields):
    """The body of `/flush_cache`."""

    timeout: float = Field(0.0, ge=0, le=MAX_FLUSH_S)
    """Seconds to wait until the engines can drop their caches."""


class MemoryFields(Fields):
    """The body of `/release_memory_occupation` and `/resume_memory_occupation`."""

    tags: list[Literal["kv_cache", "weights", "cuda_graph"]] | None = None
    """The default is all of them. `cuda_graph` has no effect: an engine releases its graphs with its weights."""


def mount_control(routes: SharedRoutes, context: DialectContext, updates: Updates) -> None:
    _mount_pause(routes, context, updates)
    for path in ("/start_profile", "/stop_profile"):
        _refuse_profile(routes, path)

    @routes.post("/abort_request", SglangAbortFields, "End one request, or all.")
    async def abort(request: ParsedRequest[SglangAbortFields]) -> Any:
        rid = request.fields.rid
        ids = [rid] if isinstance(rid, str) else rid or []
        if request.fields.abort_all:
            await context.calls.run("abort_requests", {}, request.request_id)
        elif any(ids):
            named = [one for one in ids if one]
            await context.calls.run("abort_requests", {"request_ids": named}, request.request_id)
        return ABORTED

    @routes.any("/flush_cache", FlushFields, "Drop the prefix caches.", roles=("steer",))
    async def flush(request: ParsedRequest[FlushFields]) -> Any:
        # verl flushes after its last bucket, and takes a success for a complete update.
        if await updates.is_open() and not await updates.opened.in_pause():
            await (_refuse_to_flush(updates.held) if updates.held else _refuse_to_flush_parts())
        return await _flush(context, request.fields.timeout)

    @routes.post("/release_memory_occupation", MemoryFields, "Release memory.")
    async def release(request: ParsedRequest[MemoryFields]) -> Any:
        await _memory(context, "release_memory", request)

    @routes.post("/resume_memory_occupation", MemoryFields, "Take memory again.")
    async def resume(request: ParsedRequest[MemoryFields]) -> Any:
        await _memory(context, "resume_memory", request)


def _refuse_profile(routes: SharedRoutes, path: str) -> None:
    @routes.any(path, NoFields, "Refused: engines are profiled on their own hosts.", roles=("steer",))
    async def refuse(request: ParsedRequest[NoFields]) -> Any:
        raise Unsupported(
            "a fleet has no one profile: an engine writes its profile on its own host",
            field="path",
            fix="profile one engine with its own tools; GET /metrics has the fleet's times",
        )


def _mount_pause(routes: SharedRoutes, context: DialectContext, updates: Updates) -> None:
    @routes.post("/pause_generation", SglangPauseFields, "Stop generation.")
    async def pause(request: ParsedRequest[SglangPauseFields]) -> Any:
        await pause_for_update(context, updates, request.fields.mode, request.request_id)
        return {**PAUSED, **skipped(context)}

    @routes.post("/continue_generation", ContinueFields, "Commit what was sent meanwhile, and resume.", once=True)
    async def resume(request: ParsedRequest[ContinueFields]) -> Any:
        if not request.fields.torch_empty_cache:
            report(request.path, "torch_empty_cache", "engines keep their allocators' memory as they do")
        committed = await commit_and_resume(context, updates, request.request_id)
        if committed is None:
            return {**CONTINUED, **skipped(context)}
        version = {"weight_version": committed["version"]["label"], "excluded": committed["excluded"]}
        return {**CONTINUED, **version, **skipped(context)}


async def pause_for_update(context: DialectContext, updates: Updates, mode: str, request_id: str) -> None:
    """Pauses the fleet. Parts that are sent from now on are committed by `commit_and_resume`."""
    await context.calls.run("pause", {"mode": mode}, request_id)
    await updates.pause()


async def commit_and_resume(context: DialectContext, updates: Updates, request_id: str) -> dict[str, Any] | None:
    """Commits the update that was sent during the pause before any worker generates. Returns the reply of the commit.
    None: nothing was sent."""
    try:
        committed = await updates.commit_open()
    except PlaneError as error:
        if await updates.is_open():
            await tell_paused(context, error)
            raise
        # The update has ended, and no worker has a part of it. So the fleet need not stay paused.
        try:
            await resume_fleet(context)
        except PlaneError:
            await tell_paused(context, error)
            raise error from None
        message = f"{error.message}; generation continues by the committed version"
        raise type(error)(message, **error.facts) from error
    await resume_fleet(context, request_id)
    return committed


async def _memory(context: DialectContext, op: str, request: ParsedRequest[MemoryFields]) -> None:
    asked: Sequence[str] = request.fields.tags or MEMORY
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
                # Clients retry on this status of SGLang's.
                raise InvalidRequest(f"Flush cache failed. {error.message}", **error.facts) from error
        await asyncio.sleep(FLUSH_AGAIN_S)


async def _refuse_to_flush(held: HeldTensors) -> None:
    await held.ask_model()
    if held.is_whole:
        raise InvalidRequest(
            f"Flush cache failed. The update is whole, but its trainer has not ended it: {held.summary}",
            fix=f"end_weight_update commits it; the update is dropped after {held.idle_s:g} s of silence",
        )
    missing = await held.missing()
    raise InvalidRequest(
        f"Flush cache failed. The update is not whole, so it is not committed: {held.summary}; "
        f"missing: {', '.join(missing)}",
        missing=missing,
        fix=f"send the rest; the update is dropped after {held.idle_s:g} s of silence",
    )


async def _refuse_to_flush_parts() -> None:
    raise InvalidRequest(
        "Flush cache failed. The update is not committed: tensors are missing, or its trainer has not ended it",
        fix="send the rest; if all tensors are here, end_weight_update commits it",
    )

"""SGLang's routes for weight updates. `sglang_session` says when the parts of an update are committed."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from frontend.dialects.common.context import DialectContext
from frontend.dialects.common.fleet_as_one import begun, joined
from frontend.dialects.common.parameter_server import from_checkpoint_engine
from frontend.dialects.sglang.sglang_session import (
    DistributedFields,
    PrepareFields,
    SglangUpdateFields,
    Updates,
    kv_policy,
    part_reply,
)
from frontend.server.bodies import MAX_NAMES_BYTES
from frontend.server.shared_routes import (
    DialectRequest,
    Fields,
    NoFields,
    ParsedRequest,
    SharedRoutes,
    report_given,
)
from rl_plane.errors import InvalidRequest, Locked, PlaneError, Unsupported
from rl_plane.protocol.transport_traits import directory_transport
from rl_plane.protocol.update_requests import MAX_STEP
from rl_plane.protocol.validation import Label

DISK_FORMATS = (None, "auto", "safetensors")


class DiskFields(SglangUpdateFields):
    """The body of `/update_weights_from_disk`."""

    model_path: str = Field(min_length=1)
    load_format: str | None = None
    is_async: bool = False
    keep_pause: bool = False
    """Leave the fleet paused."""
    recapture_cuda_graph: bool = False
    token_step: int = Field(0, ge=0, le=MAX_STEP)
    """The trainer's step. The history has it, and it is the version's label if `weight_version` is not given."""
    manifest: dict[str, Any] | None = None


class IpcFields(SglangUpdateFields):
    """The body of `/update_weights_from_ipc`."""

    zmq_handles: dict[str, str]
    """The address of each GPU's socket, by its UUID."""


class BeginFields(Fields):
    """The body of `/begin_weight_update`."""

    selector: Literal["target", "draft", "all"] = "all"


class SglangVersionFields(Fields):
    """The body of SGLang's `/update_weight_version`."""

    new_version: Label
    abort_all_requests: bool = True


class CompleteFields(Fields):
    """The body of SGLang-Omni's `/complete_weights_update`."""

    group_name: str | None = None
    """The group that was prepared, which is the default. Any other group is refused."""
    flush_cache: bool | None = None
    """False: running requests keep their KV. None: as true."""
    weight_version: Label | None = None


def mount_updates(routes: SharedRoutes, context: DialectContext, updates: Updates) -> None:
    @routes.post(
        "/update_weights_from_distributed",
        DistributedFields,
        "Tensors that are broadcast now.",
        once=True,
        standing=updates.parts_standing,
        max_body_bytes=MAX_NAMES_BYTES,
    )
    async def from_distributed(request: ParsedRequest[DistributedFields]) -> Any:
        fields = request.fields
        refuse_draft(fields.selector)
        if fields.load_format not in (None, "flattened_bucket"):
            raise Unsupported(
                f"load_format {fields.load_format[:64]!r} is not known here",
                field="load_format",
                fix="leave it out, or flattened_bucket",
            )
        report_unused(request, fields)
        return part_reply(await updates.take_broadcasts(fields, request.digest))

    @routes.post("/update_weights_from_disk", DiskFields, "New weights from a directory.", once=True)
    async def from_disk(request: ParsedRequest[DiskFields]) -> Any:
        reply = await _from_disk(context, request)
        await updates.note_commit()
        return reply

    @routes.post("/begin_weight_update", BeginFields, "Begin an update of several calls.", once=True)
    async def begin(request: ParsedRequest[BeginFields]) -> Any:
        refuse_draft(request.fields.selector)
        await updates.begin()
        return {"success": True, "message": "the update is open"}

    @routes.post("/end_weight_update", Fields, "Commit the update, everywhere or nowhere.", once=True)
    async def end(request: ParsedRequest[Fields]) -> Any:
        reply = await updates.commit_open()
        if reply is None:
            return {"success": True, "message": "nothing was sent since the last commit, so nothing has changed"}
        label = reply["version"]["label"]
        return {"success": True, "message": joined(reply, "committed"), "weight_version": label}

    def is_sglang(raw: DialectRequest) -> bool:
        """vLLM's clients send the same request. It is theirs unless something says SGLang."""
        return raw.has("abort_all_requests") or updates.under_way

    @routes.post(
        "/update_weight_version",
        SglangVersionFields,
        "Label the update that is sent now, or the version that is served.",
        claims=is_sglang if routes.has("POST", "/update_weight_version") else None,
    )
    async def rename(request: ParsedRequest[SglangVersionFields]) -> Any:
        label = request.fields.new_version
        if request.fields.abort_all_requests:
            await context.calls.run("abort_requests", {})
        await updates.name(label)
        return {"success": True, "message": f"Weight version updated to {label}", "new_version": label}

    @routes.post("/update_weights_from_ipc", IpcFields, "New weights from checkpoint-engine.", once=True)
    async def from_ipc(request: ParsedRequest[IpcFields]) -> Any:
        fields = request.fields
        report_unused(request, fields)
        reply = await from_checkpoint_engine(
            context, fields.zmq_handles, request.request_id, label=fields.weight_version, policy=fields.policy
        )
        await updates.note_commit()
        return {"success": True, "message": joined(reply, "Succeeded to update model weights.")}

    _mount_two_phases(routes, updates)
    _mount_refused(routes)


def _mount_two_phases(routes: SharedRoutes, updates: Updates) -> None:
    @routes.post(
        "/prepare_weights_update",
        PrepareFields,
        "Listen for all buckets of a group.",
        once=True,
        max_body_bytes=MAX_NAMES_BYTES,
    )
    async def prepare(request: ParsedRequest[PrepareFields]) -> Any:
        await updates.listen(request.fields, request.digest)
        return {"status": "ready", "message": ""}

    @routes.post("/complete_weights_update", CompleteFields, "Commit what the buckets brought.", once=True)
    async def complete(request: ParsedRequest[CompleteFields]) -> Any:
        fields = request.fields
        kv = None if fields.flush_cache is None else kv_policy(fields.flush_cache)
        count, reply = await updates.complete(fields.weight_version, fields.group_name, kv)
        return {"success": True, "num_buckets_received": count, "message": joined(reply, "committed")}


def _mount_refused(routes: SharedRoutes) -> None:
    @routes.any("/get_weights_by_name", NoFields, "Refused: engines hold weights fused and sharded.")
    async def by_name(request: ParsedRequest[NoFields]) -> Any:
        raise Unsupported(
            "engines hold weights fused and sharded, each in its own way, so the fleet has no one value of a tensor",
            field="name",
            fix="weights_checker compares them",
        )


def refuse_draft(selector: str) -> None:
    if selector == "draft":
        raise Unsupported("there is no draft model here", field="selector", fix="target, or all")


def report_unused(request: DialectRequest, fields: SglangUpdateFields) -> None:
    report_given(request.path, fields, torch_empty_cache="engines keep their allocators' memory as they do")


async def _from_disk(context: DialectContext, request: ParsedRequest[DiskFields]) -> dict[str, Any]:
    fields = request.fields
    if fields.load_format not in DISK_FORMATS:
        raise Unsupported(
            f"load_format {str(fields.load_format)[:64]!r} is not known here",
            field="load_format",
            fix="safetensors",
        )
    report_unused(request, fields)
    report_given(
        request.path,
        fields,
        is_async="weights are always staged beside generation",
        recapture_cuda_graph="an engine's graphs stay valid",
        manifest="names and shapes are checked against the model",
    )
    label = fields.weight_version or (f"step_{fields.token_step}" if fields.token_step else None)
    rows = (await context.calls.run("state", {}))["workers"]
    running = sum(int(row.get("running", 0)) + int(row.get("waiting", 0)) for row in rows)
    body = {
        "transport": directory_transport(fields.model_path),
        "policy": {**fields.policy, "keep_pause": fields.keep_pause},
        "version": label,
        "step": fields.token_step or None,
    }
    try:
        with begun():
            reply = await context.calls.run("update_weights", body, request.request_id)
    except (Locked, InvalidRequest):
        raise
    except PlaneError as error:
        error.facts["num_paused_requests"] = running
        raise
    return {
        "success": True,
        "message": joined(reply, "Succeeded to update model weights."),
        "num_paused_requests": running,
        "weight_version": reply["version"]["label"],
    }

"""SGLang's routes for weight updates. When parts of an update are committed: `sglang_session`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from frontend.dialects.common.context import DialectContext
from frontend.dialects.common.fleet_as_one import begun, joined
from frontend.dialects.sglang.body_tensors import ANOTHER_WAY
from frontend.dialects.sglang.sglang_session import DistributedFields, PrepareFields, Update, Updates
from frontend.server.bodies import MAX_BODY_BYTES, MAX_NAMES_BYTES
from frontend.server.shared_routes import DialectRequest, Fields, SharedRoutes, report, take
from rl_plane.errors import InvalidRequest, Locked, PlaneError, Unsupported
from rl_plane.protocol.update_requests import MAX_STEP
from rl_plane.protocol.validation import LABEL_CHARS, PRINTABLE

KEEPS_NO_CACHE = "no new request may reuse KV of older weights"
DISK_FORMATS = (None, "auto", "safetensors")


class DiskFields(Update):
    """`/update_weights_from_disk`"""

    model_path: str = Field(min_length=1)
    load_format: str | None = None
    is_async: bool = False
    keep_pause: bool = False
    """Leave the fleet paused."""
    recapture_cuda_graph: bool = False
    token_step: int = Field(0, ge=0, le=MAX_STEP)
    """The trainer's step: the history keeps it, and it is the version's label where `weight_version` is not given."""
    manifest: dict[str, Any] | None = None


class IpcFields(Update):
    """`/update_weights_from_ipc`"""

    zmq_handles: dict[str, str] | None = None


class BeginFields(Fields):
    """`/begin_weight_update`"""

    selector: Literal["target", "draft", "all"] = "all"


class SglangVersionFields(Fields):
    """`/update_weight_version`, of SGLang"""

    new_version: str = Field(min_length=1, max_length=LABEL_CHARS, pattern=PRINTABLE)
    abort_all_requests: bool = True


class ByNameFields(Fields):
    """`/get_weights_by_name`"""

    name: str = ""
    truncate_size: int = 100


class CompleteFields(Fields):
    """`/complete_weights_update`, of SGLang-Omni"""

    group_name: str | None = None
    """None: the one that was prepared; another one is refused."""
    flush_cache: bool = False
    """False changes nothing: no new request may reuse KV of older weights."""
    weight_version: str | None = Field(None, min_length=1, max_length=LABEL_CHARS, pattern=PRINTABLE)


def mount_updates(routes: SharedRoutes, context: DialectContext, updates: Updates) -> None:
    async def from_distributed(request: DialectRequest) -> Any:
        fields = take(DistributedFields, request)
        refuse_draft(fields.selector)
        if fields.load_format not in (None, "flattened_bucket"):
            raise Unsupported(
                f"load_format {fields.load_format[:64]!r} is not known here",
                field="load_format",
                fix="leave it out, or flattened_bucket",
            )
        report_unused(request, fields)
        reply = await updates.take_part(fields, request.digest)
        if "version" in reply:
            told = joined(reply, "Succeeded to update parameter online.")
            return {"success": True, "message": told, "weight_version": reply["version"]["label"]}
        told = joined(reply, f"{reply['tensors']} tensors are staged, {reply['missing']} are missing")
        return {"success": True, "message": told}

    async def from_disk(request: DialectRequest) -> Any:
        reply = await _from_disk(context, take(DiskFields, request), request)
        await updates.note_commit()
        return reply

    async def from_ipc(request: DialectRequest) -> Any:
        take(IpcFields, request)
        raise Unsupported(
            "checkpoint-engine's ZMQ handles lead to CUDA memory by a pickle, which is never opened here",
            field="zmq_handles",
            fix=ANOTHER_WAY,
        )

    async def by_name(request: DialectRequest) -> Any:
        take(ByNameFields, request)
        raise Unsupported(
            "engines hold weights fused and sharded, each in its own way: no one value can be told for the fleet",
            field="name",
            fix="weights_checker compares them",
        )

    async def begin(request: DialectRequest) -> Any:
        refuse_draft(take(BeginFields, request).selector)
        await updates.begin()
        return {"success": True, "message": "the update is open"}

    async def end(request: DialectRequest) -> Any:
        reply = await updates.commit_open()
        if reply is None:
            return {"success": True, "message": "nothing was sent since the last commit, so nothing has changed"}
        return {
            "success": True,
            "message": joined(reply, "committed"),
            "weight_version": reply["version"]["label"],
        }

    async def rename(request: DialectRequest) -> Any:
        fields = take(SglangVersionFields, request)
        if fields.abort_all_requests:
            await context.calls.run("abort_requests", {})
        await updates.name(fields.new_version)
        told = f"Weight version updated to {fields.new_version}"
        return {"success": True, "message": told, "new_version": fields.new_version}

    def is_ours(request: DialectRequest) -> bool:
        """vLLM's clients send the same; theirs is all that says nothing of SGLang."""
        return request.has("abort_all_requests") or updates.under_way

    async def prepare(request: DialectRequest) -> Any:
        await updates.listen(take(PrepareFields, request), request.digest)
        return {"status": "ready", "message": ""}

    async def complete(request: DialectRequest) -> Any:
        fields = take(CompleteFields, request)
        if "flush_cache" in fields.model_fields_set and not fields.flush_cache:
            report(request.path, "flush_cache", KEEPS_NO_CACHE)
        count, reply = await updates.complete(fields.weight_version, fields.group_name)
        return {"success": True, "num_buckets_received": count, "message": joined(reply, "committed")}

    table: tuple[tuple[str, Any, str, type[Fields]], ...] = (
        (
            "/update_weights_from_distributed",
            from_distributed,
            "Tensors that are broadcast now.",
            DistributedFields,
        ),
        ("/update_weights_from_disk", from_disk, "New weights from a directory.", DiskFields),
        ("/update_weights_from_ipc", from_ipc, "Refused: it would need a pickle.", IpcFields),
        ("/begin_weight_update", begin, "Begin an update of several calls.", BeginFields),
        ("/end_weight_update", end, "Commit it, everywhere or nowhere.", Fields),
        ("/prepare_weights_update", prepare, "Listen for all buckets of a group.", PrepareFields),
        ("/complete_weights_update", complete, "Commit what they brought.", CompleteFields),
    )
    for path, handler, summary, fields in table:
        standing = updates.fed_standing if handler is from_distributed else None
        routes.add(
            ["POST"],
            path,
            handler,
            summary=summary,
            fields=fields,
            once=True,
            standing=standing,
            max_body_bytes=MAX_NAMES_BYTES if fields in (DistributedFields, PrepareFields) else MAX_BODY_BYTES,
        )
    routes.add(["GET", "POST"], "/get_weights_by_name", by_name, summary="Refused, by name.", fields=ByNameFields)
    routes.add(
        ["POST"],
        "/update_weight_version",
        rename,
        summary="Name what is sent now, or what is served.",
        fields=SglangVersionFields,
        claims=is_ours if routes.has("POST", "/update_weight_version") else None,
    )


def refuse_draft(selector: str) -> None:
    if selector == "draft":
        raise Unsupported("there is no draft model here", field="selector", fix="target, or all")


def report_unused(request: DialectRequest, fields: Update) -> None:
    if not fields.flush_cache:
        report(request.path, "flush_cache", KEEPS_NO_CACHE)
    if fields.torch_empty_cache:
        report(request.path, "torch_empty_cache", "engines keep their allocators' memory as they do")


async def _from_disk(context: DialectContext, fields: DiskFields, request: DialectRequest) -> dict[str, Any]:
    if fields.load_format not in DISK_FORMATS:
        raise Unsupported(
            f"load_format {str(fields.load_format)[:64]!r} is not known here",
            field="load_format",
            fix="safetensors",
        )
    report_unused(request, fields)
    for name, why in (
        ("is_async", "weights are always staged beside generation"),
        ("recapture_cuda_graph", "an engine's graphs stay valid"),
        ("manifest", "names and shapes are checked against the model"),
    ):
        if getattr(fields, name):
            report(request.path, name, why)
    label = fields.weight_version or (f"step_{fields.token_step}" if fields.token_step else None)
    rows = (await context.calls.run("state", {}))["workers"]
    running = sum(int(row.get("running", 0)) + int(row.get("waiting", 0)) for row in rows)
    body = {
        "transport": {"backend": "filesystem", "path": fields.model_path},
        "policy": {**fields.policy, "keep_pause": fields.keep_pause},
        **({} if label is None else {"version": label}),
        **({"step": fields.token_step} if fields.token_step else {}),
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

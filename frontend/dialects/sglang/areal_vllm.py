"""The routes that AReaL adds to vLLM's server. Its update is the one of SGLang's routes, under other names.

AReaL describes the tensors by one call, and broadcasts them while the next one, whose body is empty, runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import Field

from frontend.dialects.common.context import DialectContext
from frontend.dialects.common.fleet_as_one import begun, joined
from frontend.dialects.sglang.control import commit_and_resume, pause_for_update
from frontend.dialects.sglang.groups import DEFAULT_GROUP, GroupFields, GroupText
from frontend.dialects.sglang.sglang_session import BucketFields, DistributedFields, Updates
from frontend.server.bodies import MAX_NAMES_BYTES
from frontend.server.shared_routes import Fields, NoFields, ParsedRequest, SharedRoutes, report_given
from rl_plane.errors import Conflict, Unsupported
from rl_plane.protocol.transport_traits import directory_transport

LORA_ROUTES = ("update_weights_lora", "set_update_weight_meta_lora", "update_weights_lora_xccl")


class ArealDiskFields(Fields):
    """The body of `/areal_update_weights`."""

    model_path: str = Field(min_length=1)
    load_format: str | None = None
    abort_all_requests: bool = False


class ArealTensorFields(BucketFields):
    """The body of `/areal_set_update_weight_meta`."""

    group_name: GroupText = DEFAULT_GROUP


@dataclass
class _Described:
    """The tensors of the next broadcast, as the trainer has described them to this frontend."""

    fields: ArealTensorFields | None = None
    digest: str = ""


def mount_areal_vllm(routes: SharedRoutes, context: DialectContext, updates: Updates) -> None:
    @routes.post("/areal_pause_generation", NoFields, "Stop generation, and end running requests.")
    async def pause(request: ParsedRequest[NoFields]) -> Any:
        await pause_for_update(context, updates, "abort", request.request_id)
        return {"success": True, "message": "Generation paused and all requests aborted"}

    @routes.post("/areal_continue_generation", NoFields, "Commit what was sent meanwhile, and resume.", once=True)
    async def resume(request: ParsedRequest[NoFields]) -> Any:
        await commit_and_resume(context, updates, request.request_id)
        return {"success": True, "message": "Generation continued"}

    @routes.post("/areal_update_weights", ArealDiskFields, "New weights from a directory.", once=True)
    async def from_disk(request: ParsedRequest[ArealDiskFields]) -> Any:
        fields = request.fields
        report_given(request.path, fields, load_format="weights are safetensors")
        # AReaL's server ends the running requests, whatever the field says.
        body = {
            "transport": directory_transport(fields.model_path),
            "policy": {"pause_mode": "abort"},
        }
        with begun():
            reply = await context.calls.run("update_weights", body, request.request_id)
        await updates.note_commit()
        return {"success": True, "message": joined(reply, "success")}

    @routes.post(
        "/areal_init_weights_update_group",
        GroupFields,
        "Form a torch group of the trainer and every rank.",
        once=True,
    )
    async def init(request: ParsedRequest[GroupFields]) -> Any:
        reply = await updates.form_group(request.fields, request.request_id)
        return {"success": True, "message": joined(reply, "success")}

    _mount_broadcasts(routes, updates)
    for name in LORA_ROUTES:
        _refuse_lora(routes, f"/areal_{name}")


def _mount_broadcasts(routes: SharedRoutes, updates: Updates) -> None:
    described = _Described()

    @routes.post(
        "/areal_set_update_weight_meta",
        ArealTensorFields,
        "Describe the tensors of the next broadcast.",
        max_body_bytes=MAX_NAMES_BYTES,
    )
    async def describe(request: ParsedRequest[ArealTensorFields]) -> Any:
        described.fields, described.digest = request.fields, request.digest
        return {"success": True, "message": f"{len(request.fields.names)} tensors are described"}

    @routes.post("/areal_update_weights_xccl", NoFields, "The described tensors are broadcast now.", once=True)
    async def receive(request: ParsedRequest[NoFields]) -> Any:
        fields, described.fields = described.fields, None
        if fields is None:
            raise Conflict(
                "no tensors are described to this frontend since the last broadcast",
                field="path",
                fix="areal_set_update_weight_meta first, at the same frontend",
            )
        # AReaL's server ends the running requests, also outside of a pause.
        part = DistributedFields(**fields.model_dump(), abort_all_requests=True)
        reply = await updates.take_broadcasts(part, described.digest)
        return {"success": True, "message": joined(reply, "success")}


def _refuse_lora(routes: SharedRoutes, path: str) -> None:
    @routes.post(path, NoFields, "Refused: adapters come from directories.", once=True)
    async def refuse(request: ParsedRequest[NoFields]) -> Any:
        raise Unsupported(
            "AReaL's broadcasts of adapters are not supported here",
            field="path",
            fix="weight_update_mode: disk, which loads adapters by /v1/load_lora_adapter",
        )

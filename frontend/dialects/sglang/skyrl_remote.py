"""The routes that SkyRL's older client of a remote engine posts (`RemoteInferenceEngine`, `NamedWeightsUpdateRequest`).
Its update is the one of SGLang's routes, under other names: no call ends it, so the last missing tensor commits.

Newer versions of SkyRL use vLLM's own routes and `/collective_rpc`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from frontend.dialects.sglang.groups import GroupFields, Groups, GroupText
from frontend.dialects.sglang.sglang_session import DistributedFields, Updates
from frontend.server.bodies import MAX_NAMES_BYTES
from frontend.server.shared_routes import DialectRequest, Fields, ParsedRequest, SharedRoutes, report_given
from rl_plane.errors import InvalidRequest, Unsupported
from rl_plane.protocol.update_requests import MAX_PART_TENSORS
from rl_plane.protocol.validation import PRINTABLE

DONE = {"status": "ok"}
IPC = "ipc_handles"


class SkyrlGroupFields(Fields):
    """The body of `/init_weight_update_communicator`."""

    master_address: str | None = Field(None, min_length=1, max_length=255, pattern=PRINTABLE)
    """The older name of `master_addr`."""
    master_addr: str | None = Field(None, min_length=1, max_length=255, pattern=PRINTABLE)
    master_port: int = Field(ge=1, le=65_535)
    rank_offset: int = Field(ge=1)
    world_size: int = Field(ge=2)
    group_name: GroupText = "skyrl"
    backend: Literal["nccl", "gloo"] = "nccl"
    override_existing: bool = False
    """No effect: a group of the same name is always replaced."""
    override_existing_receiver: bool = False
    """No effect: a group of the same name is always replaced."""
    model_dtype_str: str | None = None
    """No effect: each tensor has its dtype."""


class SkyrlTensorFields(Fields):
    """The body of `/update_weights` and `/update_weights_skyrl`: one tensor, or several."""

    name: str | None = None
    dtype: str | None = None
    shape: list[int] | None = None
    names: list[str] = Field(default_factory=list, max_length=MAX_PART_TENSORS)
    dtypes: list[str] = Field(default_factory=list)
    shapes: list[list[int]] = Field(default_factory=list)
    sizes: list[int] | None = None
    """The number of elements of each tensor. With it all tensors come as one broadcast, else each as its own."""
    packed: bool | None = None
    """Has the meaning of `sizes`, which it comes with."""
    extras: list[dict[str, Any]] | None = None
    """The frontend refuses an entry with CUDA IPC handles."""


def mount_skyrl_remote(routes: SharedRoutes, groups: Groups, updates: Updates) -> None:
    @routes.post(
        "/init_weight_update_communicator",
        SkyrlGroupFields,
        "Form a torch group of SkyRL's trainer and every rank.",
        once=True,
    )
    async def init(request: ParsedRequest[SkyrlGroupFields]) -> Any:
        fields = request.fields
        address = fields.master_addr or fields.master_address
        if address is None:
            raise InvalidRequest(
                "master_addr is missing", field="master_addr", fix="say where the trainer listens"
            )
        group = GroupFields(
            master_address=address,
            **fields.model_dump(include={"master_port", "rank_offset", "world_size", "group_name", "backend"}),
        )
        await updates.form_group(group, request.request_id)
        groups.unnamed = group.group_name
        return DONE

    for path in ("/update_weights", "/update_weights_skyrl"):
        _mount_update(routes, path, groups, updates)


def _mount_update(routes: SharedRoutes, path: str, groups: Groups, updates: Updates) -> None:
    @routes.post(
        path,
        SkyrlTensorFields,
        "Tensors that SkyRL broadcasts now.",
        claims=_is_skyrl if path == "/update_weights" else None,
        once=True,
        standing=updates.parts_standing,
        max_body_bytes=MAX_NAMES_BYTES,
    )
    async def update(request: ParsedRequest[SkyrlTensorFields]) -> Any:
        fields = request.fields
        report_given(request.path, fields, packed="sizes says how the tensors come")
        await updates.take_broadcasts(_part(fields, groups.unnamed), request.digest)
        return DONE


def _is_skyrl(raw: DialectRequest) -> bool:
    """No other client's body of `/update_weights` has these fields."""
    return raw.body.keys() >= {"name", "dtype", "shape"} or raw.body.keys() >= {"names", "dtypes", "shapes"}


def _part(fields: SkyrlTensorFields, group: str) -> DistributedFields:
    if any(IPC in one for one in fields.extras or ()):
        raise Unsupported(
            "SkyRL's older requests have no CUDA IPC handles for a remote engine",
            field="extras",
            fix="weight_sync_backend gloo or nccl; or a newer SkyRL, whose handles come by /collective_rpc",
        )
    one = fields.name is not None
    if one and (fields.dtype is None or fields.shape is None or fields.names):
        raise InvalidRequest("one tensor has name, dtype and shape", field="name", fix="send these three alone")
    return DistributedFields(
        names=[fields.name] if one else fields.names,
        dtypes=[fields.dtype] if one else fields.dtypes,
        shapes=[fields.shape] if one else fields.shapes,
        group_name=group,
        load_format="flattened_bucket" if fields.sizes else None,
    )

"""The routes of a Dynamo worker below `/engine`, by which NeMo-RL updates weights. They are vLLM's session by other
names: each body names the call of vLLM's that it stands for."""

from __future__ import annotations

from typing import Any, Literal

from frontend.dialects.common.context import DialectContext
from frontend.dialects.common.fleet_as_one import refuse_kernel_format, resume_fleet
from frontend.dialects.common.pause_and_adapters import PauseFields, pause_fleet
from frontend.dialects.common.transaction import Transactions
from frontend.server.bodies import MAX_NAMES_BYTES
from frontend.server.shared_routes import Fields, NoFields, ParsedRequest, SharedRoutes, report
from rl_plane.errors import InvalidRequest
from rl_plane.protocol.validation import Label

PREFIX = "/engine"
DONE = {"status": "ok"}


class EngineInitFields(Fields):
    """The body of `/engine/init_weights_update_group`."""

    engine_rpc: Literal["init_weight_transfer_engine"] = "init_weight_transfer_engine"
    init_info: dict[str, Any]
    """`{master_address, master_port, rank_offset, world_size, backend, …}`"""


class EngineUpdateFields(Fields):
    """The body of `/engine/update_weights_from_distributed`."""

    engine_rpc: Literal["start_weight_update", "update_weights", "finish_weight_update"]
    update_info: dict[str, Any] | None = None
    """`{names, dtype_names, shapes}` of the tensors that are broadcast now. For `update_weights`."""
    weight_version: Label | None = None
    """The version's label. For `finish_weight_update`."""
    reset_prefix_cache: bool = True
    """False has no effect: no new request may reuse KV of older weights."""
    is_checkpoint_format: bool = True
    """False is not supported."""
    allow_unpaused: bool = False
    """No effect: an update pauses the fleet by itself where it must."""


def mount_dynamo_engine(routes: SharedRoutes, context: DialectContext, transactions: Transactions) -> None:
    @routes.post(PREFIX + "/pause_generation", PauseFields, "Stop generation.")
    async def pause(request: ParsedRequest[PauseFields]) -> Any:
        await pause_fleet(context, request)
        return DONE

    @routes.post(PREFIX + "/resume_generation", NoFields, "Resume generation.")
    async def resume(request: ParsedRequest[NoFields]) -> Any:
        await resume_fleet(context, request.request_id)
        return DONE

    @routes.post(
        PREFIX + "/init_weights_update_group",
        EngineInitFields,
        "Form a group of the trainer and every rank.",
        once=True,
    )
    async def init(request: ParsedRequest[EngineInitFields]) -> Any:
        await transactions.init(request.fields.init_info, request.path)
        return DONE

    @routes.post(
        PREFIX + "/update_weights_from_distributed",
        EngineUpdateFields,
        "One step of an update of the whole fleet.",
        once=True,
        standing=transactions.standing,
        max_body_bytes=MAX_NAMES_BYTES,
    )
    async def update(request: ParsedRequest[EngineUpdateFields]) -> Any:
        fields = request.fields
        if not fields.is_checkpoint_format:
            refuse_kernel_format("is_checkpoint_format")
        if not fields.reset_prefix_cache:
            report(request.path, "reset_prefix_cache", "no new request may reuse KV of older weights")
        if fields.engine_rpc == "start_weight_update":
            await transactions.start(request.request_id)
        elif fields.engine_rpc == "finish_weight_update":
            await transactions.finish(fields.weight_version)
        elif fields.update_info is None:
            raise InvalidRequest("update_weights needs update_info", field="update_info", fix="add it")
        else:
            await transactions.update(fields.update_info, request)
        return DONE

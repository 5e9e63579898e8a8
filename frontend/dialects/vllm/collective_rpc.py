"""`/collective_rpc` for the methods by which SkyRL and checkpoint-engine update weights. vLLM's own route calls any
method of a worker."""

from __future__ import annotations

from typing import Any

from frontend.dialects.common.context import DialectContext
from frontend.dialects.common.fleet_as_one import world_size
from frontend.dialects.common.parameter_server import from_checkpoint_engine
from frontend.dialects.common.rpc import RpcFields
from frontend.dialects.common.transaction import Transactions
from frontend.server.bodies import MAX_NAMES_BYTES
from frontend.server.shared_routes import ParsedRequest, SharedRoutes
from rl_plane.errors import InvalidRequest, Unsupported

METHODS = {
    "skyrl_start_weight_update": (),
    "update_weights_nccl": ("update_info",),
    "update_weights_ipc": ("update_info",),
    "skyrl_finish_weight_update": (),
    "update_weights_from_ipc": ("zmq_handles",),
}
"""Method → the arguments that it reads, in their order."""


def mount_rpc(routes: SharedRoutes, context: DialectContext, transactions: Transactions) -> None:
    @routes.post(
        "/collective_rpc",
        RpcFields,
        "SkyRL's update, step by step; or checkpoint-engine's.",
        once=True,
        max_body_bytes=MAX_NAMES_BYTES,
    )
    async def rpc(request: ParsedRequest[RpcFields]) -> Any:
        fields = request.fields
        known = METHODS.get(fields.method)
        if known is None:
            raise Unsupported(
                f"the method {fields.method!r} can't be called here: only SkyRL's and checkpoint-engine's can",
                field="method",
                fix=f"one of {', '.join(METHODS)}; or a route of its own",
            )
        given = {**dict(zip(known, fields.args, strict=False)), **fields.named}
        fields.report_unused(request.path, given.keys() - set(known))
        for name in set(known) - given.keys():
            raise InvalidRequest(f"{fields.method} needs {name}", field=f"kwargs.{name}", fix="add it")
        ranks = await world_size(context)
        if fields.method == "skyrl_start_weight_update":
            await transactions.start(request.request_id)
        elif fields.method == "skyrl_finish_weight_update":
            await transactions.finish(None)
        elif fields.method == "update_weights_from_ipc":
            await from_checkpoint_engine(context, given["zmq_handles"], request.request_id)
        else:
            await transactions.update(given["update_info"], request)
        return {"results": [None] * ranks}

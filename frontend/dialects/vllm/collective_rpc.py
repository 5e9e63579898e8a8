"""`/collective_rpc` for the few methods by which SkyRL updates weights; vLLM's own calls any method of a worker."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fastapi import FastAPI
from pydantic import Field

from frontend.dialects import DialectPlane
from frontend.dialects.common import world_size
from frontend.dialects.dialect_routes import Ask, Fields, add_route, report, take
from frontend.dialects.transaction import Transactions
from frontend.server.http import MAX_NAMES_BYTES
from rl_plane.errors import InvalidRequest, Unsupported

METHODS = {
    "skyrl_start_weight_update": (),
    "update_weights_nccl": ("update_info",),
    "update_weights_ipc": ("update_info",),
    "skyrl_finish_weight_update": (),
}
"""Method → the arguments that are read, in their order."""


class RpcFields(Fields):  # type: ignore[no-redef]  # mypy's model of __init__ has a kwargs of its own
    method: str = Field(min_length=1, max_length=200)
    """One of SkyRL's: `skyrl_start_weight_update`, `update_weights_nccl`, `skyrl_finish_weight_update`; or prime-rl's
    `update_weights_from_path`."""
    args: list[Any] = Field(default_factory=list, max_length=8)
    named: dict[str, Any] = Field(default_factory=dict, alias="kwargs")
    timeout: float | None = None
    """Not read: each phase has its own."""

    def report_unused(self, path: str, unused: Iterable[str]) -> None:
        """`unused`: of `kwargs`."""
        if self.timeout is not None:
            report(path, "timeout", "each phase of an update has its own")
        for name in unused:
            report(path, f"kwargs.{name}")


def mount_rpc(app: FastAPI, plane: DialectPlane, transactions: Transactions) -> None:
    async def rpc(ask: Ask) -> Any:
        fields = take(RpcFields, ask)
        known = METHODS.get(fields.method)
        if known is None:
            raise Unsupported(
                f"the method {fields.method!r} can't be called here: only SkyRL's for an update can",
                field="method",
                fix=f"one of {', '.join(METHODS)}; or a route of its own",
            )
        given = {**dict(zip(known, fields.args, strict=False)), **fields.named}
        fields.report_unused(ask.path, given.keys() - set(known))
        for name in set(known) - given.keys():
            raise InvalidRequest(f"{fields.method} needs {name}", field=f"kwargs.{name}", fix="add it")
        ranks = await world_size(plane)
        if fields.method == "skyrl_start_weight_update":
            await transactions.start(ask.request_id)
        elif fields.method == "skyrl_finish_weight_update":
            await transactions.finish(None)
        else:
            await transactions.update(given["update_info"], ask)
        return {"results": [None] * ranks}

    add_route(
        app,
        ["POST"],
        "/collective_rpc",
        rpc,
        summary="SkyRL's update, step by step.",
        fields=RpcFields,
        once=True,
        max_body_bytes=MAX_NAMES_BYTES,
    )

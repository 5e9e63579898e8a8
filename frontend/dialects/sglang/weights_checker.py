"""SGLang's `/weights_checker`: checksums of every tensor of every rank, and a comparison with a snapshot."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from frontend.dialects.common.context import DialectContext
from frontend.dialects.common.fleet_as_one import checksum_each, joined, rows_of_all
from frontend.server.shared_routes import Fields, ParsedRequest, SharedRoutes, report
from rl_plane.errors import Conflict, InvalidRequest
from rl_plane.protocol.envelope import engine_replies
from rl_plane.protocol.worker_ops import MAX_SKIPPED


class SglangCheckerFields(Fields):
    """The body of `/weights_checker`."""

    action: Literal["checksum", "snapshot", "reset_tensors", "compare"] = "checksum"
    allow_quant_error: bool = False
    skip_tensor_list: list[str] | None = Field(None, max_length=MAX_SKIPPED)
    """Checksum and compare leave out the tensors whose names contain one of these texts."""
    selector: Literal["target", "draft", "all"] = "all"


def mount_checker(routes: SharedRoutes, context: DialectContext) -> None:
    @routes.post("/weights_checker", SglangCheckerFields, "Check the weights.", once=True)
    async def check(request: ParsedRequest[SglangCheckerFields]) -> Any:
        fields = request.fields
        if fields.selector == "draft":
            raise InvalidRequest("all weights of the model are checked", field="selector", fix="leave it out")
        if fields.allow_quant_error:
            report(request.path, "allow_quant_error", "weights are compared bit by bit")
        skip = fields.skip_tensor_list or []
        if skip and fields.action in ("snapshot", "reset_tensors"):
            report(request.path, f"skip_tensor_list of {fields.action}", "it concerns every tensor")
        if fields.action == "checksum":
            return await _checksum(context, skip)
        return await _act(context, {"action": fields.action, "skip_tensor_list": skip})


async def _checksum(context: DialectContext, skip: list[str]) -> Any:
    described = {row["instance_id"]: row for row in await rows_of_all(context, "describe")}
    rows = await checksum_each(context, per_tensor=True, skip_tensor_list=skip)
    ranks = ranks_of_one_engine(rows, described)
    whole = hashlib.sha256()
    for rank in ranks:
        whole.update(rank["per_gpu_checksum"].encode())
    return {
        "success": True,
        "message": joined({"workers": rows}, "checksum done"),
        "ranks": ranks,
        "per_engine_checksum": whole.hexdigest(),
    }


def ranks_of_one_engine(
    rows: list[dict[str, Any]], described: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """SGLang's `ChecksumInfo` of each rank. The fleet is one engine: each replica of each worker is a data parallel
    rank, and `rank` counts all ranks. `described`: instance id → the worker's row of `describe`."""
    found: list[dict[str, Any]] = []
    size = sum(len(row["ranks"]) for row in rows)
    parts = [tuple(int(described[row["instance_id"]][name]) for name in ("tp_size", "pp_size")) for row in rows]
    replicas = [len(row["ranks"]) // (tp * pp) for row, (tp, pp) in zip(rows, parts, strict=True)]
    for number, (row, (tp, pp)) in enumerate(zip(rows, parts, strict=True)):
        for each in row["ranks"]:
            place = {
                "role": "target",
                "tp_rank": each["rank"] % tp,
                "tp_size": tp,
                "dp_rank": sum(replicas[:number]) + each["rank"] // (tp * pp),
                "dp_size": sum(replicas),
                "pp_rank": each["rank"] // tp % pp,
                "pp_size": pp,
                "rank": len(found),
                "size": size,
            }
            found.append(
                {
                    "instance_id": row["instance_id"],
                    "checksums": each["checksums"],
                    "per_gpu_checksum": checksum_of_rank(each["checksums"]),
                    "parallelism_info": [place],
                }
            )
    return found


def checksum_of_rank(checksums: Mapping[str, str]) -> str:
    """One hash of all tensors' hashes, made as SGLang makes it."""
    whole = hashlib.sha256()
    for name in sorted(checksums):
        whole.update(name.encode())
        whole.update(checksums[name].encode())
    return whole.hexdigest()


async def _act(context: DialectContext, body: dict[str, Any]) -> Any:
    rows = engine_replies(await context.calls.run("check_weights", body))
    ranks = [{"instance_id": row["instance_id"], **rank} for row in rows for rank in row["ranks"]]
    differing = [rank["instance_id"] for rank in ranks if rank.get("match") is False]
    if differing:
        raise Conflict(
            f"the weights of {', '.join(dict.fromkeys(differing))} differ from the snapshot",
            ranks=ranks,
            fix="each rank's mismatches name them",
        )
    return {"success": True, "message": joined({"workers": rows}, f"{body['action']} done"), "ranks": ranks}

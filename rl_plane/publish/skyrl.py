"""SkyRL's settings of weight sync, as arguments of a WeightPublisher.

publisher = WeightPublisher(model, fleet, **publisher_options(weight_sync_backend="nccl", colocate_all=True))
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from rl_plane.bodies import parse_body
from rl_plane.errors import InvalidRequest
from rl_plane.update_bodies import LoraTarget

GIB = 1 << 30
LORA_DISK_LOAD = "lora_disk_load"


def publisher_options(
    *,
    weight_sync_backend: Literal["nccl", "gloo"] = "nccl",
    weight_transfer_threshold_cuda_ipc_GB: float = 1.0,
    colocate_all: bool = False,
    override_existing_update_group: Literal["auto", "enable", "disable"] = "auto",
    lora_sync_path: str | None = None,
) -> dict[str, Any]:
    """`nccl` with `colocate_all` is `ipc`, in buckets of the threshold. `override_existing_update_group` has nothing to
    say here: a group is made anew when the fleet has changed, and never otherwise. With `lora_sync_path` an adapter is
    written there, each version in a directory of its own."""
    if weight_sync_backend not in ("nccl", "gloo"):
        raise _refuse("weight_sync_backend", weight_sync_backend, "use nccl or gloo")
    if override_existing_update_group not in ("auto", "enable", "disable"):
        raise _refuse("override_existing_update_group", override_existing_update_group, "leave it out")
    threshold = weight_transfer_threshold_cuda_ipc_GB
    if not isinstance(threshold, (int, float)) or not 0 < threshold <= 1024:
        raise _refuse("weight_transfer_threshold_cuda_ipc_GB", threshold, "give GiB, above 0 and at most 1024")
    if lora_sync_path is not None:
        return {"transport": "filesystem", "root": lora_sync_path}
    if weight_sync_backend == "nccl" and colocate_all:
        return {"transport": "ipc", "bucket_bytes": max(1, int(threshold * GIB))}
    return {"transport": weight_sync_backend}


def lora_disk_load(
    request: Mapping[str, Any], adapter: str, op: Literal["load", "swap"] = "load"
) -> dict[str, Any]:
    """The body of `update_weights` for SkyRL's `{"names": ["lora_disk_load"], "extras": [{"lora_disk_path": DIR}]}`.
    The other shapes of its request carry handles and ranks of its own process groups: publish those weights."""
    names, extras = request.get("names"), request.get("extras")
    if names != [LORA_DISK_LOAD]:
        raise _refuse("names", names, "publish weights by a WeightPublisher; this takes lora_disk_load only")
    path = extras[0].get("lora_disk_path") if isinstance(extras, list) and len(extras) == 1 else None
    if not isinstance(path, str):
        raise _refuse("extras", extras, 'extras: [{"lora_disk_path": DIR}]')
    target = {"kind": "lora", "op": op, "name": adapter}
    parse_body(LoraTarget, target)
    return {"target": target, "transport": {"backend": "filesystem", "path": path}}


def _refuse(field: str, value: object, fix: str) -> InvalidRequest:
    return InvalidRequest(f"{field} is {str(value)[:200]!r}", field=field, fix=fix)

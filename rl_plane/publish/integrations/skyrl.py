"""Translates SkyRL's settings of weight sync into arguments of a WeightPublisher.

publisher = WeightPublisher(model, fleet, **publisher_options(weight_sync_backend="nccl", colocate_all=True))
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Literal

from rl_plane.errors import InvalidRequest
from rl_plane.protocol.fleet_ops import LoadLora
from rl_plane.protocol.validation import parse_body

log = logging.getLogger("rl_plane.publish.integrations.skyrl")

GIB = 1 << 30
LORA_DISK_LOAD = "lora_disk_load"


def publisher_options(
    *,
    weight_sync_backend: Literal["nccl", "gloo"] = "nccl",
    weight_transfer_threshold_cuda_ipc_GB: float | None = None,
    colocate_all: bool = False,
    override_existing_update_group: Literal["auto", "enable", "disable"] = "auto",
    lora_sync_path: str | None = None,
    lora: bool = False,
) -> dict[str, Any]:
    """The arguments of a WeightPublisher for SkyRL's settings. A setting without effect is named in a warning.

    Args:
        weight_sync_backend: the transport. `nccl` with `colocate_all` becomes `ipc`.
        weight_transfer_threshold_cuda_ipc_GB: the size of a bucket for `ipc`, in GiB. Default: 1.
        colocate_all: trainer and engines share the GPUs.
        override_existing_update_group: `auto` or `enable`. A publisher's group always replaces the workers' group, so
            `disable` is refused.
        lora_sync_path: with `lora`, the directory beneath which each version of the adapter is written.
        lora: an adapter is published.
    """
    if weight_sync_backend not in ("nccl", "gloo"):
        raise _refuse("weight_sync_backend", weight_sync_backend, "use nccl or gloo")
    given = weight_transfer_threshold_cuda_ipc_GB
    threshold = 1.0 if given is None else given
    if not isinstance(threshold, (int, float)) or not 0 < threshold <= 1024:
        raise _refuse("weight_transfer_threshold_cuda_ipc_GB", threshold, "give GiB, above 0 and at most 1024")
    options: dict[str, Any] = {"transport": weight_sync_backend}
    if lora and lora_sync_path is not None:
        options = {"transport": "filesystem", "root": lora_sync_path}
    elif weight_sync_backend == "nccl" and colocate_all:
        options = {"transport": "ipc", "bucket_bytes": max(1, int(threshold * GIB))}
    transport = options["transport"]
    _check_override(override_existing_update_group, transport)
    idle = {
        "weight_transfer_threshold_cuda_ipc_GB": given is not None and transport != "ipc",
        "colocate_all": colocate_all and transport != "ipc",
        "lora_sync_path": lora_sync_path is not None and transport != "filesystem",
    }
    if any(idle.values()):
        names = ", ".join(name for name, is_idle in idle.items() if is_idle)
        what = "an adapter" if lora else "full weights (lora=False)"
        log.warning("%s, by %s: %s has no effect", what, transport, names)
    return options


def _check_override(override: str, transport: str) -> None:
    field = "override_existing_update_group"
    if override not in ("auto", "enable", "disable"):
        raise _refuse(field, override, "use auto or enable, or leave it out")
    if override == "disable":
        raise _refuse(field, override, "leave it out: a publisher's group always replaces the workers' group")
    if override == "enable" and transport not in ("nccl", "gloo"):
        raise _refuse(field, override, f"leave it out: {transport} has no group")


def lora_disk_load(request: Mapping[str, Any], adapter: str) -> dict[str, Any]:
    """The body of `load_lora_adapter` for the request that SkyRL sends at each sync of an adapter.

    That is `{"names": ["lora_disk_load"], "extras": [{"lora_disk_path": DIR}]}`: the adapter is loaded, and swapped the
    next times. Other requests of SkyRL carry handles and ranks of its own process groups, and are refused.
    """
    names, extras = request.get("names"), request.get("extras")
    if names != [LORA_DISK_LOAD]:
        raise _refuse(
            "names", names, "publish these weights by a WeightPublisher: only lora_disk_load is supported here"
        )
    path = extras[0].get("lora_disk_path") if isinstance(extras, list) and len(extras) == 1 else None
    if not isinstance(path, str):
        raise _refuse("extras", extras, 'extras: [{"lora_disk_path": DIR}]')
    body = {"lora_name": adapter, "lora_path": path}
    parse_body(LoadLora, body)
    return body


def _refuse(field: str, value: object, fix: str) -> InvalidRequest:
    return InvalidRequest(f"{field} is {str(value)[:200]!r}", field=field, fix=fix)

"""A stand-in for two collectives that vLLM's CPU build lacks: by them, the replicas of a mixture of experts pass tokens
to each other's experts. It adds up in float32, and shows nothing about NCCL. It is a plugin that each process of vLLM
loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

NAME = "experts_over_gloo"


def install(site: Path) -> None:
    """Installs the stand-in for processes that have `site` in their sys.path."""
    installed = site / f"{NAME}-0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 0\n")
    (installed / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{NAME} = {__name__}:register\n")


def register() -> None:
    put_in(setattr)


def put_in(set_attribute: Callable[[Any, str, Any], None]) -> None:
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    set_attribute(CpuCommunicator, "all_gatherv", _all_gatherv)
    set_attribute(CpuCommunicator, "reduce_scatterv", _reduce_scatterv)


def _all_gatherv(communicator: Any, given: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """Gathers the rows of all ranks, of which each has another number."""
    import torch
    from torch import distributed as dist

    if isinstance(given, list):
        return [_all_gatherv(communicator, one, dim, sizes) for one in given]
    assert dim == 0
    sizes = sizes or [len(given)] * communicator.world_size
    padded = given.new_zeros((max(sizes), *given.shape[1:]))
    padded[: len(given)] = given
    found = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(found, padded, group=communicator.device_group)
    return torch.cat([rows[:size] for rows, size in zip(found, sizes, strict=True)])


def _reduce_scatterv(communicator: Any, given: Any, dim: int = -1, sizes: list[int] | None = None) -> Any:
    """Adds up the rows of all ranks. Each rank gets its own ones."""
    from torch import distributed as dist

    assert dim == 0
    sizes = sizes or [len(given) // communicator.world_size] * communicator.world_size
    total = given.float()
    dist.all_reduce(total, group=communicator.device_group)
    return total.to(given.dtype).split(sizes)[communicator.rank_in_group].clone()

"""A trainer in a process of its own that forms a torch group as slime, AReaL and SGLang's examples do, and broadcasts
its tensors on command. For tests of fed updates."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.commanded_process import CommandedProcess, serve

if TYPE_CHECKING:
    from tests.conftest import Plane

HOST = "127.0.0.1"


class BroadcastTrainer(CommandedProcess):
    """The handle of a trainer's process."""

    def __init__(self, plane: Plane) -> None:
        super().__init__(plane, "tests.support.broadcast_trainer")


def parts_of(directory: Path, count: int, dtype: str = "") -> list[dict[str, Any]]:
    """`{names, dtypes, shapes}` of about so many parts, as a trainer makes them, in the order of the model."""
    from safetensors import safe_open

    described = []
    with safe_open(directory / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 - it is no dict
            tensor = file.get_tensor(name)
            described.append((name, dtype or str(tensor.dtype).removeprefix("torch."), list(tensor.shape)))
    size = -(-len(described) // count)
    return [
        dict(zip(("names", "dtypes", "shapes"), map(list, zip(*some, strict=True)), strict=True))
        for some in (described[start : start + size] for start in range(0, len(described), size))
    ]


def form_group(group: str, port: int, world_size: int, timeout_s: float) -> Any:
    """Forms a group like `init_custom_process_group` of SGLang and slime."""
    from torch.distributed import PrefixStore, rendezvous
    from torch.distributed import distributed_c10d as c10d

    timeout = timedelta(seconds=timeout_s)
    store, rank, size = next(iter(rendezvous(f"tcp://{HOST}:{port}", 0, world_size, timeout=timeout)))
    store.set_timeout(timeout)
    made, _ = c10d._new_process_group_helper(
        size,
        rank,
        [],
        c10d.Backend("gloo"),
        PrefixStore(group, store),
        group_name=group,
        backend_options=None,
        timeout=timeout,
    )
    c10d._world.pg_group_ranks[made] = {each: each for each in range(size)}
    return made


def _send(group: Any, directory: str, part: dict[str, Any]) -> None:
    import torch
    from safetensors import safe_open
    from torch import distributed as dist

    from rl_plane.protocol.broadcast_plan import chunks
    from rl_plane.protocol.update_requests import ReceivePart

    with safe_open(Path(directory) / "model.safetensors", "pt") as file:
        dtypes = dict(zip(part["names"], part["dtypes"], strict=True))
        tensors = {
            name: file.get_tensor(name).to(getattr(torch, dtype.removeprefix("torch."))).contiguous()
            for name, dtype in dtypes.items()
        }
    if part.get("layout", "each") == "each":
        works = [dist.broadcast(tensors[name], src=0, group=group, async_op=True) for name in part["names"]]
        for work in works:
            work.wait()
        return
    for bucket in chunks(ReceivePart.model_validate({**part, "update_id": "any"})):
        flat = torch.cat([tensors[name].flatten().view(torch.uint8) for name, _ in bucket])
        dist.broadcast(flat, src=0, group=group)


def _serve() -> None:
    from torch import distributed as dist

    groups: dict[str, Any] = {}

    def do(what: str, argument: Any) -> Any:
        if what == "form":
            groups[argument["group"]] = form_group(**argument)
            return None
        if what == "leave":
            dist.destroy_process_group(groups.pop(argument))
            return None
        assert what == "send"
        _send(groups[argument["group"]], argument["directory"], argument["part"])
        return None

    serve(do)


if __name__ == "__main__":
    _serve()

"""Joins the NCCL group of a trainer that forms it as vLLM's `StatelessProcessGroup` and `PyNcclCommunicator` do.

The trainer listens with a TCPStore, waits there for every rank, and stores NCCL's id of the group. Each rank then joins
by the id, and all ranks reduce one number together. Here torch's own NCCL group joins: it finds the id in a store of
its own, where it looks for one. This has NOT yet run on a GPU.
"""

from __future__ import annotations

import pickletools
from datetime import timedelta
from typing import Any

from rl_plane.errors import InvalidRequest

ID_BYTES = 128
"""The length of NCCL's id (`NCCL_UNIQUE_ID_BYTES`)."""
ID_KEY = "broadcast_from/0/0"
"""The key of the first object that rank 0 of a StatelessProcessGroup gives to all."""
TORCH_KEY = "0"
"""The key of the id of a torch group's first communicator (`ProcessGroupNCCL::broadcastUniqueNCCLID`)."""
MAX_PICKLE_BYTES = 4096
"""The pickle of an id has some 250 bytes."""


def store_with_id(dist: Any, address: tuple[str, int], world_size: int, timeout_s: float) -> Any:
    """Waits for the trainer and every rank, and returns a store in which torch's NCCL group finds the trainer's id.

    Args:
        dist: the module torch.distributed.
        address: the host and port at which the trainer listens.
        world_size: the trainer's ranks and the fleet's together.
        timeout_s: the bound of the wait in seconds.

    Raises:
        InvalidRequest: the trainer has stored something else than an id.
        RuntimeError: torch's own errors, of a trainer that is not there or ranks that do not come.
    """
    rendezvous = dist.TCPStore(*address, world_size, False, timedelta(seconds=timeout_s), use_libuv=False)
    store = dist.HashStore()
    store.set(TORCH_KEY, nccl_id_of(rendezvous.get(ID_KEY)))
    return store


def nccl_id_of(pickled: bytes) -> bytes:
    """Takes the id out of a pickle of vLLM's `ncclUniqueId`, which is a structure of 128 bytes.

    The opcodes are listed, and nothing is run. The id is the pickle's only text of bytes. InvalidRequest: it has
    another one."""
    found: list[bytes] = []
    try:
        if len(pickled) > MAX_PICKLE_BYTES:
            raise ValueError(f"{len(pickled)} bytes")
        found = [argument for _, argument, _ in pickletools.genops(pickled) if isinstance(argument, bytes)]
    except Exception as error:  # of any kind, because the bytes are a stranger's
        why = f"{type(error).__name__}: {str(error)[:100]}"
    else:
        why = f"byte texts of the lengths {[len(one) for one in found][:8]}"
    if [len(one) for one in found] != [ID_BYTES]:
        raise InvalidRequest(
            f"the trainer has stored no NCCL id: {why}",
            field="rendezvous",
            fix="form the group by vLLM's StatelessProcessGroup and PyNcclCommunicator",
        )
    return found[0]

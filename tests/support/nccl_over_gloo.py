"""Stand-ins for NCCL and CUDA, so that vLLM's own NCCL trainer engine and our workers meet on CPUs. Their rendezvous,
the pickled id and the order of all operations are the real ones. They show nothing about NCCL itself."""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta
from typing import Any

TIMEOUT = timedelta(seconds=60)


def _gloo_of(nccl_id: bytes, store: Any, rank: int, size: int) -> Any:
    """The group of the ranks that have the same id."""
    from torch import distributed as dist

    return dist.ProcessGroupGloo(dist.PrefixStore(nccl_id.hex(), store), rank, size, TIMEOUT)


class PyNcclOverGloo:
    """A copy of vLLM's PyNcclCommunicator, as far as its trainer engine calls it."""

    def __init__(self, group: Any, device: Any) -> None:
        import torch
        from vllm.distributed.device_communicators.pynccl_wrapper import ncclUniqueId

        self.rank, self.world_size = group.rank, group.world_size
        nccl_id = os.urandom(128)
        given = group.broadcast_obj(ncclUniqueId.from_buffer_copy(nccl_id), src=0)
        assert bytes(given) == nccl_id
        self._gloo = _gloo_of(nccl_id, group.store, self.rank, self.world_size)
        self._gloo.allreduce([torch.zeros(1)]).wait()

    def broadcast(self, tensor: Any, src: int, stream: Any = None) -> None:
        from torch import distributed as dist

        options = dist.BroadcastOptions()
        options.rootRank = src
        self._gloo.broadcast([tensor.detach()], options).wait()

    def destroy(self) -> None:
        self._gloo = None


def put_into_trainer() -> None:
    """Replaces NCCL and CUDA for vLLM's trainer engine in this process."""
    import torch
    from vllm.distributed.device_communicators import pynccl
    from vllm.distributed.weight_transfer import packed_tensor

    class Stream:
        def synchronize(self) -> None:
            pass

    pynccl.PyNcclCommunicator = PyNcclOverGloo
    packed_tensor._get_streams = lambda device, count: [Stream() for _ in range(count)]
    torch.accelerator.current_device_index = lambda: 0
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.cuda.current_stream = lambda *_: Stream()


class _NcclOverGloo:
    """A copy of torch's NCCL group, as far as a worker calls it: it finds the id under the key `0` of its store."""

    def __init__(self, place: Any, store: Any) -> None:
        self._place, self._store = place, store
        self._gloo: Any = None

    def eager_connect_single_device(self, device: Any) -> None:
        from torch import distributed as dist

        place = self._place
        there = dist.TCPStore(
            place.master_address, place.master_port, None, False, TIMEOUT, wait_for_workers=False, use_libuv=False
        )
        self._gloo = _gloo_of(self._store.get("0"), there, place.rank, place.world_size)

    def broadcast(self, tensors: Any, options: Any) -> Any:
        return self._gloo.broadcast(tensors, options)

    def allreduce(self, tensors: Any, options: Any) -> Any:
        return self._gloo.allreduce(tensors, options)

    def abort(self) -> None:
        pass


def put_into_worker() -> None:
    """Replaces NCCL for the transport `nccl` of a worker in this process, whose GPU is the host."""
    from rl_plane.transports.group import receiver, torch_group

    vars(receiver)["gpu"] = lambda device: "cpu"
    torch_group.make_torch_group = lambda place, store, timeout_s: _NcclOverGloo(place, store)


WORKER_PATCH = "from tests.support.nccl_over_gloo import put_into_worker; put_into_worker()"

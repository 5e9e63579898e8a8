"""A colocated trainer in a process of its own that sends CUDA IPC handles: by vLLM's own `ipc` engine and client, or as
SkyRL's `cuda_ipc` strategy does. CUDA is a stand-in over shared memory, with one copy for each of two GPUs."""

from __future__ import annotations

import base64
import pickle
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tests.support.commanded_process import CommandedProcess, serve
from tests.support.shared_host_cuda import SharedMemory

if TYPE_CHECKING:
    from tests.conftest import Plane

GPUS = ("GPU-0", "GPU-1")


class IpcHandlesTrainer(CommandedProcess):
    """The handle of a trainer's process."""

    def __init__(self, plane: Plane) -> None:
        super().__init__(plane, "tests.support.ipc_handles_trainer", imports="vllm")


class _TorchOnHost:
    """The module torch, whose empty tensors on a GPU are shared memory."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory

    def __getattr__(self, name: str) -> Any:
        import torch

        return getattr(torch, name)

    def empty(self, nbytes: int, dtype: Any, device: str) -> Any:
        assert device == "cuda"
        return self._memory.empty(nbytes)


class _Trainer:
    def __init__(self) -> None:
        self._memory = SharedMemory()
        self._copies: dict[Any, Any] = {}
        self._engine: Any = None
        self._model: Any = None
        self._kept: list[Any] = []

    def init(self, argument: dict[str, Any]) -> None:
        """vLLM's trainer factory makes its own `ipc` engine."""
        import torch
        from transformers import AutoModelForCausalLM
        from vllm.distributed.weight_transfer import ipc_engine, packed_tensor
        from vllm.distributed.weight_transfer.base import ModuleSource
        from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        torch.accelerator.current_device_index = lambda: 0
        torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid=GPUS[0])
        torch.cuda.ipc_collect = lambda: None
        torch.cuda.current_stream = lambda *_: SimpleNamespace(synchronize=lambda: None)
        ipc_engine.reduce_tensor = packed_tensor.reduce_tensor = self._memory.reduce_tensor
        packed_tensor.torch = _TorchOnHost(self._memory)
        ipc_engine.IPCTrainerWeightTransferEngine._all_gather_and_merge_handles = lambda _, handles: [
            self._of_both(one) for one in handles
        ]
        self._model = AutoModelForCausalLM.from_pretrained(argument["directory"], dtype="auto")
        info = ipc_engine.IPCTrainerInitInfo(
            rank=0, packed=argument["packed"], packed_buffer_size_bytes=argument["bytes"]
        )
        client = HTTPVLLMWeightSyncClient(argument["url"])
        self._engine = WeightTransferTrainerFactory.trainer_init(
            info, client=client, source=ModuleSource(self._model)
        )

    def _of_both(self, handles: dict[str, Any]) -> dict[str, Any]:
        """The handles of the trainer's second rank too, which has shared the same once."""
        ((_, arguments),) = handles.items()
        if arguments not in self._copies:
            self._copies[arguments] = self._memory.again(arguments)
        return {GPUS[0]: arguments, GPUS[1]: self._copies[arguments]}

    def load(self, directory: str) -> None:
        from transformers import AutoModelForCausalLM

        self._model.load_state_dict(AutoModelForCausalLM.from_pretrained(directory, dtype="auto").state_dict())

    def send(self, argument: None) -> None:
        self._engine.send_weights()

    def skyrl(self, argument: dict[str, Any]) -> list[dict[str, Any]]:
        """The `update_info` of each chunk, as `CudaIpcWeightTransferSender` makes it.

        Args (in `argument`):
            directory: the checkpoint.
            chunks: the number of chunks.
            gpus: the GPUs. Absent: both.
            damaged: the GPU whose copy has a wrong bit.
            longer: the bytes by which each share claims to be longer than its memory.
        """
        import torch
        from safetensors.torch import load_file

        tensors = load_file(f"{argument['directory']}/model.safetensors")
        names = sorted(tensors)
        found = []
        for number in range(argument["chunks"]):
            some = names[number :: argument["chunks"]]
            whole = torch.cat([tensors[name].reshape(-1) for name in some])
            handles = {}
            for gpu in argument.get("gpus", GPUS):
                mine = whole.clone()
                if gpu == argument.get("damaged"):
                    mine[0] += 1
                rebuild, arguments = self._memory.reduce_tensor(mine)
                more = argument.get("longer", 0)
                handles[gpu] = (rebuild, (*arguments[:8], arguments[8] + more, *arguments[9:]))
            found.append(
                {
                    "names": some,
                    "dtype_names": [str(tensors[name].dtype).removeprefix("torch.") for name in some],
                    "shapes": [list(tensors[name].shape) for name in some],
                    "sizes": [tensors[name].numel() for name in some],
                    "ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode(),
                }
            )
        return found

    def held(self, argument: None) -> list[int]:
        return self._memory.held()

    def close(self, argument: None) -> None:
        self._memory.close()


def _serve() -> None:
    trainer = _Trainer()
    try:
        serve(lambda what, argument: getattr(trainer, what)(argument))
    finally:
        trainer.close(None)


if __name__ == "__main__":
    _serve()

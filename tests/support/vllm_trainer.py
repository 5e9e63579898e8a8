"""A trainer in a process of its own that drives a fleet by vLLM's public trainer factory and an unchanged client:
vLLM's own, TRL's, or ours by NATS. Its engine broadcasts over gloo, since vLLM's need GPUs; or it is vLLM's own engine
for NCCL, over a stand-in for NCCL.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from tests.support.broadcast_trainer import HOST, form_group
from tests.support.commanded_process import CommandedProcess, serve
from tests.support.nccl_over_gloo import put_into_trainer

if TYPE_CHECKING:
    from tests.conftest import Plane


class VllmTrainer(CommandedProcess):
    """The handle of a trainer's process."""

    def __init__(self, plane: Plane) -> None:
        super().__init__(plane, "tests.support.vllm_trainer", imports="vllm")


def _engine_types() -> Any:
    from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine

    @dataclass
    class GlooInitInfo(TrainerInitInfo):  # type: ignore[misc]
        backend: ClassVar[str] = "gloo"
        master_port: int
        world_size: int
        group_name: str
        timeout_s: float
        packed: bool
        packed_buffer_size_bytes: int

    class GlooEngine(TrainerWeightTransferEngine):  # type: ignore[misc]
        """A copy of vLLM's own engine for NCCL, call for call, over a torch group."""

        init_info_cls = GlooInitInfo
        group: Any
        info: GlooInitInfo

        @classmethod
        def trainer_init(cls, init_info: GlooInitInfo, *, client: Any, source: Any = None) -> Any:
            engine = cls(client=client, source=source, is_sender=init_info.is_sender)
            engine.info = init_info
            order = {
                "backend": "gloo",
                "group_name": init_info.group_name,
                "master_address": HOST,
                "master_port": init_info.master_port,
                "rank_offset": 1,
                "world_size": init_info.world_size,
                "timeout_s": init_info.timeout_s,
                "packed": init_info.packed,
                "packed_buffer_size_bytes": init_info.packed_buffer_size_bytes,
                "packed_num_buffers": 2,
            }
            with ThreadPoolExecutor(max_workers=1) as pool:
                future = pool.submit(client.init_weight_transfer_engine, order)
                engine.group = form_group(
                    init_info.group_name, init_info.master_port, init_info.world_size, init_info.timeout_s
                )
                future.result()
            return engine

        def send_weights(self) -> None:
            self.client.start_weight_update()
            for part in self.parts(1):
                self.send_part(part)
            self.client.finish_weight_update()

        def parts(self, count: int) -> list[list[str]]:
            assert self.source is not None
            names = [one.name for one in self.source.metadata()]
            size = -(-len(names) // count)
            return [names[start : start + size] for start in range(0, len(names), size)]

        def send_part(self, names: list[str]) -> None:
            assert self.source is not None
            parameters = {one.name: one for one in self.source.metadata() if one.name in names}
            info = {
                "names": list(parameters),
                "dtype_names": [str(one.dtype).split(".")[-1] for one in parameters.values()],
                "shapes": [list(one.shape) for one in parameters.values()],
            }
            pool = ThreadPoolExecutor(max_workers=1)
            try:
                future = pool.submit(self.client.update_weights, info)
                try:
                    self._broadcast([(name, tensor) for name, tensor in self.source if name in parameters])
                except RuntimeError:
                    future.result()  # why the others have left
                    raise
                future.result()
            finally:
                pool.shutdown(wait=False)

        def _broadcast(self, tensors: list[tuple[str, Any]]) -> None:
            import torch
            from torch import distributed as dist

            if not self.info.packed:
                for _, tensor in tensors:
                    dist.broadcast(tensor.detach().contiguous(), src=0, group=self.group)
                return
            # By vLLM's own packing, which the fleet must follow to the byte.
            from vllm.distributed.weight_transfer.packed_tensor import pack_tensors

            left = iter(tensors)
            while chunk := pack_tensors(
                left, lambda one: one[1].detach().contiguous(), self.info.packed_buffer_size_bytes
            ):
                assert chunk.packed_tensor.dtype == torch.uint8
                dist.broadcast(chunk.packed_tensor, src=0, group=self.group)

    return GlooInitInfo, GlooEngine


def _client_of(kind: str, url: str, **more: str) -> Any:
    if kind == "vllm":
        from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

        return HTTPVLLMWeightSyncClient(url)
    if kind == "trl":
        from accelerate import PartialState
        from trl.experimental.async_grpo.vllm_client import VLLMClient

        PartialState()  # as its trainer does; without one its log raises
        return VLLMClient(url)
    if kind == "trl, synchronous":
        from trl.generation.vllm_client import VLLMClient as Synchronous

        return Synchronous(url)
    assert kind == "nats"
    from rl_plane.publish.integrations.vllm_client import FleetWeightSyncClient
    from rl_plane.sync import SyncRlClient

    return FleetWeightSyncClient(SyncRlClient.connect(url, more["namespace"], more["component"]))


class _Served:
    """Does what the lines ask for."""

    def __init__(self) -> None:
        from vllm.distributed.weight_transfer.base import VLLMWeightSyncClient
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        self._protocol = VLLMWeightSyncClient
        self._factory = WeightTransferTrainerFactory
        self._info, engine = _engine_types()
        self._factory.register_engine("gloo", engine)
        self._client: Any = None
        self._model: Any = None
        self._engine: Any = None

    def client(self, argument: dict[str, Any]) -> None:
        self._client = _client_of(**argument)
        assert isinstance(self._client, self._protocol) or argument["kind"] == "trl, synchronous"

    def call(self, argument: list[Any]) -> Any:
        """A method of the client's."""
        name, *rest = argument
        return getattr(self._client, name)(*rest)

    def init(self, argument: dict[str, Any]) -> None:
        from transformers import AutoModelForCausalLM
        from vllm.distributed.weight_transfer.base import ModuleSource

        self._model = AutoModelForCausalLM.from_pretrained(argument.pop("directory"), dtype="auto")
        info = self._info(rank=0, **argument)
        self._engine = self._factory.trainer_init(info, client=self._client, source=ModuleSource(self._model))

    def init_nccl(self, argument: dict[str, Any]) -> None:
        """vLLM's own engine, over a stand-in for NCCL."""
        from transformers import AutoModelForCausalLM
        from vllm.distributed.weight_transfer.base import ModuleSource
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        put_into_trainer()
        self._model = AutoModelForCausalLM.from_pretrained(argument.pop("directory"), dtype="auto")
        info = NCCLTrainerInitInfo(rank=0, master_address=HOST, **argument)
        self._engine = self._factory.trainer_init(info, client=self._client, source=ModuleSource(self._model))

    def load(self, directory: str) -> None:
        """Loads the weights that the trainer has learnt."""
        from transformers import AutoModelForCausalLM

        self._model.load_state_dict(AutoModelForCausalLM.from_pretrained(directory, dtype="auto").state_dict())

    def send(self, argument: None) -> None:
        self._engine.send_weights()

    def part(self, argument: list[int]) -> None:
        number, count = argument
        self._engine.send_part(self._engine.parts(count)[number])


def _serve() -> None:
    served = _Served()
    serve(lambda what, argument: getattr(served, what)(argument))


if __name__ == "__main__":
    _serve()

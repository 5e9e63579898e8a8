"""A rank of a trainer whose weights are sharded: takes them by a source, and tells whether they are the whole ones.

Run by torchrun: `tests/sharded_sources.py KIND…`. Rank 0 prints a JSON line for each.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from rl_plane.manifest import Manifest, pack
from rl_plane.publish.packing import fill
from rl_plane.publish.sources import AdapterSource, ModuleSource, Source, StateDictSource


class Tied(torch.nn.Module):  # type: ignore[misc]
    """An odd number of rows, so that shards are uneven; the head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 6)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(3))
        self.narrow = torch.nn.Parameter(torch.randn(1, 6))  # rank 1 has nothing of it
        self.head = torch.nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor([0.5, 2.0]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens) + self.narrow
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def fresh() -> Any:
    torch.manual_seed(3)
    return Tied()


def lora() -> Any:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(fresh(), LoraConfig(r=2, target_modules=["0", "1", "2"]))
    torch.manual_seed(4)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight)
    return model


def fsdp2(model: Any) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name, module in model.named_modules():
        if name.rpartition(".")[0].endswith("layers"):
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp1(model: Any) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model.layers[0] = FullyShardedDataParallel(
        model.layers[0], device_id=torch.device("cpu"), use_orig_params=True
    )
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


def zero3(model: Any) -> Any:
    import deepspeed

    # It would compile an operator that nothing here needs. (`deepspeed.comm.torch` is torch itself, as an attribute.)
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    return engine


def made(kind: str) -> tuple[Source, Source]:
    """(sharded, the same of the whole model)"""
    half = torch.bfloat16
    if kind == "fsdp2":
        return ModuleSource(fsdp2(fresh())), ModuleSource(fresh())
    if kind == "fsdp2_bf16":
        return ModuleSource(fsdp2(fresh()), dtype=half), ModuleSource(fresh(), dtype=half)
    if kind == "fsdp2_state_dict":
        return StateDictSource(fsdp2(fresh()).state_dict()), StateDictSource(fresh().state_dict())
    if kind == "fsdp2_lora":
        return AdapterSource(fsdp2(lora())), AdapterSource(lora())
    if kind == "fsdp1":
        return ModuleSource(fsdp1(fresh())), ModuleSource(fresh())
    if kind == "fsdp1_lora":
        model = lora()
        model.base_model.model = fsdp1(model.base_model.model)
        return AdapterSource(model), AdapterSource(lora())
    if kind == "zero3":
        return ModuleSource(zero3(fresh())), ModuleSource(fresh())
    if kind == "zero3_lora":
        return AdapterSource(zero3(lora())), AdapterSource(lora())
    raise SystemExit(kind)


def digest_of(source: Source) -> tuple[list[str], str | None]:
    taken = source.take()
    manifest = Manifest(pack(taken.specs, 100), taken.adapter_config)
    digests: dict[str, str] = {}
    sizes = [bucket.nbytes for bucket in manifest.buckets]
    for _ in fill(manifest, taken.tensors, lambda number: memoryview(bytearray(sizes[number])), digests):
        pass
    return [name for name, _ in taken.specs], manifest.digested(digests).digest


def tell(kind: str) -> None:
    sharded, whole = made(kind)
    assert sharded.collective
    if dist.get_rank() == 0:
        names, digest = digest_of(sharded)
        same = (names, digest) == digest_of(whole)
        print(json.dumps({"kind": kind, "names": names, "same": same}), flush=True)
    else:
        for _ in sharded.take().tensors:
            pass
    dist.barrier()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for each in sys.argv[1:]:
        tell(each)
    # Everything is told. FSDP1's and DeepSpeed's threads may abort a process that ends in an orderly way.
    sys.stdout.flush()
    os._exit(0)

"""A rank of a trainer whose weights are sharded: takes them by a source, and reports whether they are whole.

`told_by_ranks` starts it with the kinds as arguments. Rank 0 prints a JSON line for each.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rl_plane.errors import InvalidRequest
from rl_plane.publish.sources.adapter import AdapterSource
from rl_plane.publish.sources.base import WeightSource
from rl_plane.publish.sources.module import ModuleSource
from rl_plane.publish.sources.source_choice import as_source
from rl_plane.publish.sources.state_dict import StateDictSource
from rl_plane.transports.packing import Tensor, fill
from rl_plane.weights.manifest import Manifest, pack


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


def fsdp2_after_forward() -> Any:
    """Its parameters are whole, since nothing comes after the root's forward that would shard them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model: Any = fully_shard(fresh(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    with torch.no_grad():
        model(torch.tensor([[1, 2]]))
    assert not any(hasattr(parameter, "full_tensor") for parameter in model.parameters())
    return model


def fsdp1(model: Any, **options: Any) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model.layers[0] = FullyShardedDataParallel(model.layers[0], device_id=torch.device("cpu"), **options)
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)


def hybrid(model: Any) -> Any:
    """Two replicas, each of half of the ranks."""
    from torch.distributed.fsdp import ShardingStrategy

    half = dist.get_world_size() // 2
    shards, _ = dist.new_subgroups(half)
    replicas, _ = dist.new_subgroups_by_enumeration([[rank, rank + half] for rank in range(half)])
    return fsdp1(model, process_group=(shards, replicas), sharding_strategy=ShardingStrategy.HYBRID_SHARD)


def sharded_state(model: Any) -> dict[str, Any]:
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state: dict[str, Any] = model.state_dict()
    del state["head.weight"]  # tied, and a tensor of its own here
    return state


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


def made_anew(model: Any) -> WeightSource:
    """For each version, on every rank: neither a copy of today nor a function of rank 0's will do."""
    with pytest.raises(InvalidRequest, match="is a copy"):
        StateDictSource(sharded_state(model))
    with pytest.raises(InvalidRequest, match="it is unknown whether"):
        StateDictSource(lambda: sharded_state(model))
    with pytest.raises(InvalidRequest, match="it is unknown whether"):
        as_source(model.named_parameters)
    return StateDictSource(lambda: sharded_state(model), collective=True)


def made(kind: str) -> tuple[WeightSource, WeightSource]:
    """(sharded, the same of the whole model)"""
    half = torch.bfloat16
    if kind == "fsdp2":
        return ModuleSource(fsdp2(fresh())), ModuleSource(fresh())
    if kind == "fsdp2_after_forward":
        return ModuleSource(fsdp2_after_forward()), ModuleSource(fresh())
    if kind == "fsdp2_bf16":
        return ModuleSource(fsdp2(fresh()), dtype=half), ModuleSource(fresh(), dtype=half)
    if kind == "fsdp2_state_dict":
        return StateDictSource(fsdp2(fresh()).state_dict()), StateDictSource(fresh().state_dict())
    if kind == "fsdp2_lora":
        return AdapterSource(fsdp2(lora())), AdapterSource(lora())
    if kind == "fsdp1":
        return ModuleSource(fsdp1(fresh())), ModuleSource(fresh())
    if kind == "fsdp1_orig_params":
        return ModuleSource(fsdp1(fresh(), use_orig_params=True)), ModuleSource(fresh())
    if kind == "fsdp1_mixed_precision":
        from torch.distributed.fsdp import MixedPrecision

        low = MixedPrecision(param_dtype=half, buffer_dtype=half)
        return ModuleSource(fsdp1(fresh(), mixed_precision=low)), ModuleSource(fresh())
    if kind == "fsdp1_state_dict":
        return made_anew(fsdp1(fresh())), ModuleSource(fresh())
    if kind == "fsdp1_hybrid":
        return ModuleSource(hybrid(fresh())), ModuleSource(fresh())
    if kind == "fsdp1_hybrid_state_dict":
        return made_anew(hybrid(fresh())), ModuleSource(fresh())
    if kind == "fsdp1_lora":
        model = lora()
        model.base_model.model = fsdp1(model.base_model.model, use_orig_params=True)
        return AdapterSource(model), AdapterSource(lora())
    if kind == "zero3":
        return ModuleSource(zero3(fresh())), ModuleSource(fresh())
    if kind == "zero3_lora":
        return AdapterSource(zero3(lora())), AdapterSource(lora())
    raise SystemExit(kind)


def one_unit_at_a_time(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    units = [one for one in gc.get_objects() if type(one) is FullyShardedDataParallel]
    for name, tensor in tensors:
        assert sum(unit.training_state.name == "SUMMON_FULL_PARAMS" for unit in units) <= 1
        yield name, tensor


def digest_of(source: WeightSource) -> tuple[list[str], str | None]:
    taken = source.take()
    manifest = Manifest(pack(taken.specs, 100), taken.adapter_config)
    digests: dict[str, str] = {}
    sizes = [bucket.nbytes for bucket in manifest.buckets]
    for _ in fill(
        manifest, one_unit_at_a_time(taken.tensors), lambda number: memoryview(bytearray(sizes[number])), digests
    ):
        pass
    return sorted(name for name, _ in taken.specs), manifest.digested(digests).digest


def tell(kind: str) -> None:
    sharded, whole = made(kind)
    assert sharded.collective
    if dist.get_rank() == 0:
        if not isinstance(sharded, StateDictSource):
            sharded.take()  # alone: nothing is gathered before a tensor is asked for
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
    # Everything is reported. FSDP1's and DeepSpeed's threads may abort a process that ends in an orderly way.
    sys.stdout.flush()
    os._exit(0)

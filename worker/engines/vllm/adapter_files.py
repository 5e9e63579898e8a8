"""Writes an adapter to files, for an engine that reads adapters from files only: exactly what was received and
checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_plane.protocol.versions import ADAPTER_CONFIG_NAME, TensorSpec
from rl_plane.weights.checkpoint import ADAPTER_NAME
from rl_plane.weights.safetensors_file import write_atomically, write_safetensors
from worker.engines.common.lora import LoraConfig
from worker.engines.common.torch_weights import NAME_OF_DTYPE


def write_adapter(path: Path, lora: LoraConfig, modules: list[str], tensors: Mapping[str, Any]) -> None:
    """`lora`: without patterns. `tensors`: torch tensors."""
    import torch

    path.mkdir(mode=0o700)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": lora.r,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.rslora,
        "target_modules": sorted({name.rpartition(".")[2] for name in modules}),
        "bias": "none",
    }
    write_atomically(path / ADAPTER_CONFIG_NAME, [json.dumps(config).encode()])
    write_safetensors(
        path / ADAPTER_NAME,
        {
            name: (
                TensorSpec(NAME_OF_DTYPE[tensor.dtype], tuple(tensor.shape)),
                tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(),
            )
            for name, tensor in tensors.items()
        },
    )

"""Makes small PEFT LoRA adapters for the models of `worker.testing.tiny_model`. Every byte follows from the seed.

`make_tiny_adapter` has random weights. `make_witness_adapter` has weights under which the greedy next token is a known
permutation, different for each seed, on top of any witness model. So the tokens show which adapter made them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from worker.testing.tiny_model import VOCAB_SIZE, permutation

TARGETS = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")
"""The modules of a tiny adapter: in the attention and in the MLP."""

_STD = 0.1
"""The standard deviation of a tiny adapter's weights: enough to change most greedy tokens."""

_WITNESS_GAIN = 30.0
"""The scale of a witness adapter's rows, ten times the base's: its greedy token leads by more than 90 nats."""


def make_tiny_adapter(
    model: Path,
    path: Path,
    seed: int,
    r: int = 4,
    targets: tuple[str, ...] = TARGETS,
    std: float = _STD,
    ranks: Mapping[str, int] = MappingProxyType({}),
) -> Path:
    """Writes a random adapter for a model directory to `path`, in the model's dtype, and returns `path`. `targets`:
    names of modules, or their endings. `ranks`: endings → the rank of these modules (PEFT's `rank_pattern`)."""
    import torch

    weights = _weights(Path(model))
    modules = [
        name.removesuffix(".weight")
        for name, weight in weights.items()
        if weight.dim() == 2 and f".{name}".removesuffix(".weight").endswith(tuple(f".{end}" for end in targets))
    ]
    source = torch.Generator().manual_seed(seed)
    tensors: dict[str, Any] = {}
    for module in sorted(modules):
        weight = weights[f"{module}.weight"]
        outputs, inputs = weight.shape
        rank = next((rank for end, rank in ranks.items() if module.endswith(f".{end}")), r)
        a, b = torch.randn(rank, inputs, generator=source), torch.randn(outputs, rank, generator=source)
        tensors |= _pair(module, a * std, b * std, weight.dtype)
    config = {"r": r, "lora_alpha": 2 * r, "target_modules": sorted(targets), "rank_pattern": dict(ranks)}
    return _write(path, tensors, **config)


def make_witness_adapter(model: Path, path: Path, seed: int) -> Path:
    """Writes an adapter whose greedy token after each `token` is `witness_adapter_next_token(seed, token)`, on top of
    any witness model of the same shape."""
    import torch

    weights = _weights(Path(model))
    rows = weights["model.embed_tokens.weight"].float()
    r = rows.shape[1] // 2
    # The output layer sees the input row of the last token, with a little noise. Half of its numbers identify it.
    seen = torch.nn.functional.normalize(rows[:, :r])
    b = torch.empty_like(seen)
    b[torch.tensor(permutation(f"adapter {seed}", len(seen)))] = _WITNESS_GAIN * seen
    tensors = _pair("lm_head", torch.eye(r, rows.shape[1]), b, weights["lm_head.weight"].dtype)
    return _write(path, tensors, r=r, lora_alpha=r, target_modules=["lm_head"])


def witness_adapter_next_token(seed: int, token: int, vocab_size: int = VOCAB_SIZE) -> int:
    """Returns the greedy next token after `token` under the witness adapter of `seed`."""
    return permutation(f"adapter {seed}", vocab_size)[token]


def _weights(model: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    weights: dict[str, Any] = load_file(model / "model.safetensors")
    return weights


def _pair(module: str, a: Any, b: Any, dtype: Any) -> dict[str, Any]:
    name = f"base_model.model.{module}"
    return {f"{name}.lora_A.weight": a.to(dtype).contiguous(), f"{name}.lora_B.weight": b.to(dtype).contiguous()}


def _write(path: Path, tensors: dict[str, Any], **config: Any) -> Path:
    from safetensors.torch import save_file

    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    common = {"base_model_name_or_path": None, "bias": "none", "peft_type": "LORA", "task_type": "CAUSAL_LM"}
    (path / "adapter_config.json").write_text(json.dumps(common | config, indent=2, sort_keys=True))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="worker.testing.tiny_adapter", description="Make a LoRA adapter of a tiny model."
    )
    parser.add_argument("model", type=Path, help="the directory that worker.testing.tiny_model made")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0, help="other seeds, other weights [0]")
    arguments = parser.parse_args()
    make_tiny_adapter(arguments.model, arguments.directory, arguments.seed)
    print(arguments.directory)


if __name__ == "__main__":
    main()

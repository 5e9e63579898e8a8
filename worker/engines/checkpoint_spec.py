"""What a checkpoint of a model must hold, for engines that keep its tensors in a form of their own.

An engine has loaded the model's own directory: what that holds is what it can load.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from rl_plane.checkpoint import open_checkpoint
from rl_plane.versions import TensorSpec

_ENGINE_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
"""What an engine converts to its own dtype as it loads."""

_HEAD = "lm_head.weight"
"""What an engine leaves out of a checkpoint if the model's config says `tie_word_embeddings`."""

_EMBEDDINGS = {"embed_tokens", "wte", "word_embeddings", "tok_embeddings", "embed_in", "embeddings"}
"""What it serves in its place, as models call it."""


@dataclass(frozen=True, slots=True)
class CheckpointSpec:
    tensors: dict[str, TensorSpec]
    """Every tensor that must be there, by its checkpoint name; floats in the engine's dtype."""
    tied: dict[str, str]
    """Names that may also be there → the tensor to which the model ties each."""


@dataclass(frozen=True, slots=True)
class LinearModules:
    """By their names in the checkpoint."""

    shapes: dict[str, tuple[int, int]]  # (inputs, outputs)
    others: frozenset[str]
    """Modules of other kinds that have parameters."""


def checkpoint_spec(model: Path, dtype: str) -> CheckpointSpec:
    """`dtype`: the engine's, by its safetensors name."""
    from transformers import AutoConfig

    checkpoint = open_checkpoint(model, field="model")
    try:
        specs = dict(checkpoint.specs)
    finally:
        checkpoint.close()
    ties = AutoConfig.from_pretrained(model, local_files_only=True).get_text_config().tie_word_embeddings
    tied = _ties(specs) if ties else {}
    return CheckpointSpec(
        {
            name: TensorSpec(dtype if spec.dtype in _ENGINE_FLOATS else spec.dtype, spec.shape)
            for name, spec in specs.items()
            if name not in tied
        },
        tied,
    )


def _ties(names: Collection[str]) -> dict[str, str]:
    """The head → the input embedding (empty: nothing is called as one). Of several the outermost, since a layer that
    predicts more tokens may have its own; the head may also be beside it, in a part of the model."""
    found = [name for name in names if name.removesuffix(".weight").rpartition(".")[2] in _EMBEDDINGS]
    embedding = min(found, key=lambda name: (name.count("."), name), default="")
    around = list(itertools.accumulate(embedding.split(".")[:-2], lambda outer, inner: f"{outer}.{inner}"))
    heads = [_HEAD, *(head for part in around if (head := f"{part}.{_HEAD}") in names)]
    return dict.fromkeys(heads, embedding)


def linear_modules(model: Path) -> LinearModules:
    """Of the model as transformers builds it, by whose names adapters are saved; without its weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model, local_files_only=True)
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config)
    linear = {name: module for name, module in built.named_modules() if type(module) is torch.nn.Linear}
    return LinearModules(
        {name: (module.in_features, module.out_features) for name, module in linear.items()},
        frozenset(
            name
            for name, module in built.named_modules()
            if name not in linear and next(module.parameters(recurse=False), None) is not None
        ),
    )

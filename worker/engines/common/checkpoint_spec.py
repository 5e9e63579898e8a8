"""What a checkpoint of a model must hold, for engines that keep its tensors in a form of their own.

An engine has loaded the model's own directory: what that holds is what it can load.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from rl_plane.protocol.versions import TensorSpec
from rl_plane.weights.checkpoint import open_checkpoint

_ENGINE_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
"""What an engine converts to its own dtype as it loads."""

_HEAD = "lm_head.weight"
"""What an engine leaves out of a checkpoint if the model's config says `tie_word_embeddings`."""

_EMBEDDINGS = {"embed_tokens", "wte", "word_embeddings", "tok_embeddings", "embed_in", "embeddings"}
"""What it serves in its place, as models call it."""


@dataclass(frozen=True, slots=True)
class CheckpointSpec:
    tensors: dict[str, TensorSpec]
    """Every tensor that must be there, by its checkpoint name. Its type is accepted as it is: the model's dtype, or
    another one that the engine keeps the tensor in."""
    tied: dict[str, str]
    """Names that may also be there → the tensor to which the model ties each."""
    own: dict[str, str]
    """Names → the type in which the engine keeps the tensor, where that differs from its type in `tensors`. `cast`
    converts to this type."""


@dataclass(frozen=True, slots=True)
class LinearModules:
    """By their names in the checkpoint."""

    shapes: dict[str, tuple[int, int]]  # (inputs, outputs)
    others: frozenset[str]
    """Modules of other kinds that have parameters."""


def saved_specs(model: Path) -> dict[str, TensorSpec]:
    """The tensors of the checkpoint in the directory `model`, as they are saved."""
    checkpoint = open_checkpoint(model, field="model")
    try:
        return dict(checkpoint.specs)
    finally:
        checkpoint.close()


def checkpoint_spec(model: Path, dtype: str, engine: Mapping[str, str]) -> CheckpointSpec:
    """What the engine takes after it has loaded the directory `model`. `dtype`: the model's, by its safetensors name.
    `engine`: the engine's own tensors, by their names in the engine, with the type of each. A model may keep some of
    its tensors in another type than its dtype, such as the bias of a router in float32."""
    from transformers import AutoConfig

    specs = saved_specs(model)
    ties = AutoConfig.from_pretrained(model, local_files_only=True).get_text_config().tie_word_embeddings
    tied = _ties(specs) if ties else {}
    floats = {name: spec.dtype for name, spec in specs.items() if spec.dtype in _ENGINE_FLOATS}
    types = Counter(floats.values())
    as_saved = types[dtype] == max(types.values(), default=0)
    tensors, own = {}, {}
    for name, spec in specs.items():
        if name in tied:
            continue
        kept = taken = spec.dtype
        if name in floats:
            # The engine may have renamed or joined it. Of a directory that is saved in the model's dtype, a tensor of
            # another type is meant to be so.
            kept = engine.get(name, spec.dtype if as_saved else dtype)
            taken = dtype if spec.dtype == dtype else kept
        tensors[name] = TensorSpec(taken, spec.shape)
        if kept != taken:
            own[name] = kept
    return CheckpointSpec(tensors, tied, own)


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

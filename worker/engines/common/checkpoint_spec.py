"""Lists the tensors that a checkpoint of a model must hold, for engines that keep their tensors in a form of their own.

An engine has loaded the model's own directory, so it can load the tensors of that directory.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from rl_plane.errors import InvalidRequest
from rl_plane.protocol.pooling import Task
from rl_plane.protocol.versions import TensorSpec
from rl_plane.weights.checkpoint import open_checkpoint
from worker.receive.staging import FLOAT_DTYPES

_HEAD = "lm_head.weight"
_OF_NO_EMBEDDING = re.compile(rf"{re.escape(_HEAD)}$|(.+\.)?pooler\.")
"""Tensors that an embedding model may lack: the head for tokens, and BERT's layer over the first token, which vLLM and
SGLang don't compute for embeddings."""
"""The tensor that an engine leaves out of a checkpoint if the model's config says `tie_word_embeddings`."""

_EMBEDDINGS = {"embed_tokens", "wte", "word_embeddings", "tok_embeddings", "embed_in", "embeddings"}
"""The names that models use for the input embedding, which then serves as the head."""


@dataclass(frozen=True, slots=True)
class CheckpointSpec:
    """The tensors of a checkpoint, as an engine takes them."""

    tensors: dict[str, TensorSpec]
    """Every tensor that must be there, by its checkpoint name. Its type is taken unchanged: the model's dtype, or
    another type in which the engine keeps the tensor."""
    tied: dict[str, str]
    """Names that may also be there → the tensor that the model ties each to."""
    own: dict[str, str]
    """Names → the type in which the engine keeps the tensor, if it differs from the type in `tensors`. `cast` converts
    to this type."""


@dataclass(frozen=True, slots=True)
class LinearModules:
    """The modules of a model, by their names in the checkpoint."""

    shapes: dict[str, tuple[int, int]]  # (inputs, outputs)
    others: frozenset[str]
    """Modules of other kinds that have parameters."""


def saved_specs(model: Path) -> dict[str, TensorSpec]:
    """The tensors of the checkpoint in the directory `model`, as they are saved."""
    with closing(open_checkpoint(model, field="model")) as checkpoint:
        return dict(checkpoint.specs)


def checkpoint_spec(model: Path, dtype: str, engine: Mapping[str, str]) -> CheckpointSpec:
    """The tensors that the engine takes after it has loaded the directory `model`. `dtype`: the model's dtype, by its
    safetensors name. `engine`: the type of each of the engine's own tensors, by its name in the engine. A model may
    keep some tensors in another type than its dtype, such as the bias of a router in float32."""
    from transformers import AutoConfig

    specs = saved_specs(model)
    ties = AutoConfig.from_pretrained(model, local_files_only=True).get_text_config().tie_word_embeddings
    tied = _ties(specs) if ties else {}
    floats = {name: spec.dtype for name, spec in specs.items() if spec.dtype in FLOAT_DTYPES}
    types = Counter(floats.values())
    as_saved = types[dtype] == max(types.values(), default=0)
    tensors, own = {}, {}
    for name, spec in specs.items():
        if name in tied:
            continue
        kept = taken = spec.dtype
        if name in floats:
            # The engine may have renamed or joined the tensor. If the directory is saved in the model's dtype, a tensor
            # of another type is so on purpose.
            kept = engine.get(name, spec.dtype if as_saved else dtype)
            taken = dtype if spec.dtype == dtype else kept
        tensors[name] = TensorSpec(taken, spec.shape)
        if kept != taken:
            own[name] = kept
    return CheckpointSpec(tensors, tied, own)


def _ties(names: Collection[str]) -> dict[str, str]:
    """Maps the head to the input embedding (empty: no tensor has a name of one). If there are several embeddings, the
    outermost counts, since a layer that predicts more tokens may have its own. The head may also be beside it, in a
    part of the model."""
    found = [name for name in names if name.removesuffix(".weight").rpartition(".")[2] in _EMBEDDINGS]
    embedding = min(found, key=lambda name: (name.count("."), name), default="")
    around = list(itertools.accumulate(embedding.split(".")[:-2], lambda outer, inner: f"{outer}.{inner}"))
    heads = [_HEAD, *(head for part in around if (head := f"{part}.{_HEAD}") in names)]
    return dict.fromkeys(heads, embedding)


def refuse_lacking(names: Collection[str], task: Task) -> None:
    """Raises InvalidRequest if there are `names`: tensors that a model for this task needs, and its files lack."""
    if names:
        others = f" and {len(names) - 1} other tensors" if len(names) > 1 else ""
        raise InvalidRequest(
            f"the files of the model lack {min(names)}{others}",
            field="model",
            fix=f"give a complete checkpoint of a model for --task {task}",
        )


def check_tensors(model: Path, task: Task) -> None:
    """Raises InvalidRequest if the model's files surely lack tensors: vLLM and SGLang would compute with memory that
    nothing has filled. An embedding model needs no head for tokens, and no pooler."""
    lacking = _lacking_tensors(model)
    refuse_lacking([name for name in lacking if task != "embed" or not _OF_NO_EMBEDDING.match(name)], task)


def _lacking_tensors(model: Path) -> list[str]:
    """The tensors that transformers saves with such a model, and the model's files surely lack.

    Empty if the files have tensors that transformers would not save: these may be the same ones in another form, such
    as quantised. Empty also if transformers does not have the model's class."""
    import torch
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    saved = saved_specs(model).keys()
    try:
        config = transformers.AutoConfig.from_pretrained(model, local_files_only=True)
        with torch.device("meta"):
            built = getattr(transformers, config.architectures[0])(config)
        needed = revert_weight_conversion(built, built.state_dict()).keys()
    except Exception:  # the class may be the engine's own
        return []
    ties = built.all_tied_weights_keys
    ignored = [re.compile(pattern) for pattern in built._keys_to_ignore_on_load_unexpected or ()]
    others = saved - needed - ties.keys()
    if any(not any(pattern.search(name) for pattern in ignored) for name in others):
        return []
    optional = [re.compile(pattern) for pattern in built._keys_to_ignore_on_load_missing or ()]
    tied = {*ties, *(to for name, to in ties.items() if name in saved)}
    lacking = needed - saved - tied
    return [name for name in lacking if not any(pattern.search(name) for pattern in optional)]


def linear_modules(model: Path) -> LinearModules:
    """The modules of the model as transformers builds it, without its weights: adapters use these names."""
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

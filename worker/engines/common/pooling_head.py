"""The head of a pooling model, as the model's directory describes it.

Every engine gives the raw numbers. `PoolingHead.finish` makes the reply of them that vLLM makes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rl_plane.errors import EngineFailed, InvalidRequest, Unsupported
from rl_plane.protocol.pooling import MAX_DIMENSION, Pooling, PoolingTask, packed

Activation = Literal["softmax", "sigmoid", "identity"]
Position = Literal["last", "mean", "cls"]

_POSITIONS: dict[str, Position] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
}
_POSITION_NAMES: dict[str, Position] = {"lasttoken": "last", "last": "last", "mean": "mean", "cls": "cls"}
_KNOWN_MODULES = ("Transformer", "Pooling", "Normalize")
"""The modules of sentence-transformers that every engine here computes."""


@dataclass(frozen=True, slots=True)
class PoolingHead:
    """Says what vector one model makes of an input, and finishes the reply."""

    task: PoolingTask
    dimension: int
    labels: tuple[str, ...] = ()
    activation: Activation = "softmax"
    position: Position = "last"
    """`embed`: the tokens whose hidden states make the vector."""
    dimensions: tuple[int, ...] | None = ()
    """`embed`: the shorter lengths that the model was trained for. None: any. Empty: none."""
    token_types: bool = False
    """`classify`: the model distinguishes the two texts of a pair by token types. The engines get token ids only."""

    def check(self, pooling: Pooling) -> None:
        """Raises InvalidRequest or Unsupported if the model can't give what the request asks for."""
        if pooling.text_pair is not None and self.token_types:
            raise Unsupported(
                "the model distinguishes the two texts of a pair by token types, which no engine gets here",
                field="model",
                fix="serve a model whose config has a type_vocab_size of at most 1",
            )
        asked = pooling.dimensions
        if asked is None or (asked == self.dimension and self.task == "embed"):
            return
        if self.task != "embed" or self.dimensions == ():
            raise InvalidRequest(
                f"the model gives {self.dimension} numbers, and was not trained for fewer (Matryoshka)",
                field="dimensions",
                fix="leave it out",
            )
        if asked > self.dimension or (self.dimensions is not None and asked not in self.dimensions):
            known = "1 to " + str(self.dimension) if self.dimensions is None else list(self.dimensions)
            raise InvalidRequest(f"dimensions is {asked}", field="dimensions", fix=f"give one of {known}")

    def finish(self, raw: Any, pooling: Pooling) -> bytes:
        """Returns the packed reply. `raw`: the logits, or the pooled hidden state, as a tensor or a list. Raises
        EngineFailed if there are too few or too many, or if one is not finite."""
        import torch

        numbers = torch.as_tensor(raw, dtype=torch.float32).reshape(-1)
        if numbers.numel() != self.dimension:
            raise EngineFailed(f"the engine gave {numbers.numel()} numbers in place of {self.dimension}")
        if not bool(torch.isfinite(numbers).all()):
            raise EngineFailed("the engine computes NaN or infinity: the weights may have diverged")
        if pooling.dimensions is not None:
            numbers = numbers[: pooling.dimensions]
        if pooling.activation:
            numbers = self._activated(numbers)
        return packed(numbers.tolist())

    def _activated(self, numbers: Any) -> Any:
        import torch

        if self.task == "embed":
            return torch.nn.functional.normalize(numbers, dim=0)
        if self.activation == "softmax":
            return torch.softmax(numbers, dim=0)
        return torch.sigmoid(numbers) if self.activation == "sigmoid" else numbers


def read_head(model: Path, task: PoolingTask) -> PoolingHead:
    """Returns the head of the model in this directory. Raises Unsupported for a head that the engines would compute in
    different ways."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model, local_files_only=True)
    return _classifier(config) if task == "classify" else _embedder(model, config)


def _classifier(config: Any) -> PoolingHead:
    names = getattr(config, "id2label", None) or getattr(config.get_text_config(), "id2label", None) or {}
    labels = tuple(str(names[number]) for number in sorted(names))
    if not any("Classification" in name or "Reward" in name for name in config.architectures or ()):
        raise Unsupported(
            f"{', '.join(config.architectures or ['the model'])} is no classifier",
            field="task",
            fix="give a model such as LlamaForSequenceClassification, or use --task embed or generate",
        )
    return PoolingHead(
        "classify",
        _checked_dimension(len(labels)),
        labels,
        _activation_of(config, len(labels)),
        token_types=(getattr(config.get_text_config(), "type_vocab_size", None) or 0) > 1,
    )


def _activation_of(config: Any, labels: int) -> Activation:
    """Returns the activation that vLLM chooses for the model."""
    problem = getattr(config, "problem_type", None)
    if problem == "regression":
        return "identity"
    if problem == "multi_label_classification":
        return "sigmoid"
    named = (getattr(config, "sentence_transformers", None) or {}).get("activation_fn") or getattr(
        config, "sbert_ce_default_activation_function", None
    )
    if named and problem is None:
        last = str(named).rpartition(".")[2]
        if last == "Identity":
            return "identity"
        if last not in ("Sigmoid", "Softmax"):
            raise Unsupported(
                f"the model's activation is {named}",
                field="model",
                fix="only Identity, Sigmoid and Softmax are known",
            )
    return "softmax" if labels > 1 else "sigmoid"


def _embedder(model: Path, config: Any) -> PoolingHead:
    modules = _json(model / "modules.json", [])
    for module in modules:
        if (kind := str(module.get("type")).rpartition(".")[2]) not in _KNOWN_MODULES:
            raise Unsupported(
                f"modules.json has {kind} behind the transformer, whose weights no update would reach",
                field="model",
                fix=f"give a model with {', '.join(_KNOWN_MODULES)} only",
            )
    text = config.get_text_config()
    lengths = getattr(config, "matryoshka_dimensions", None)
    is_any = bool(getattr(config, "is_matryoshka", False)) and not lengths
    return PoolingHead(
        "embed",
        _checked_dimension(text.hidden_size),
        position=_position(model, modules),
        dimensions=None if is_any else tuple(lengths or ()),
    )


def _position(model: Path, modules: list[dict[str, Any]]) -> Position:
    """Reads the model's files for sentence-transformers. vLLM's default for models that generate is the last token."""
    folder = next((one.get("path", "") for one in modules if str(one.get("type")).endswith("Pooling")), None)
    if folder is None:
        return "last"
    found = _json(model / folder / "config.json", {})
    given = {position for key, position in _POSITIONS.items() if found.get(key)}
    if named := found.get("pooling_mode"):
        given = {_POSITION_NAMES[name] for name in (named,) if name in _POSITION_NAMES}
    if len(given) != 1:
        raise Unsupported(
            f"{folder}/config.json names no pooling that is known here",
            field="model",
            fix=f"one of {', '.join(_POSITIONS)}",
        )
    return given.pop()


def _checked_dimension(count: int) -> int:
    if not 1 <= count <= MAX_DIMENSION:
        raise Unsupported(f"a vector has {count} numbers", field="model", fix=f"serve 1 to {MAX_DIMENSION}")
    return count


def _json(path: Path, otherwise: Any) -> Any:
    try:
        return json.loads(path.read_text()) if path.is_file() else otherwise
    except ValueError as error:
        raise InvalidRequest(f"{path} is not JSON: {error}", field="model", fix="correct the file") from error

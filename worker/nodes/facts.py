"""The facts in which all nodes of one engine must agree before any of them starts a process."""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_plane.errors import Conflict, InvalidRequest
from rl_plane.weights.checkpoint import open_checkpoint

SHOWN_CHARS = 64
"""A message shows so much of a value."""

PACKAGES = ("rl-plane", "torch", "transformers", "numpy", "nixl")
"""Packages whose versions must be the same, beside the engine's own. A package that is missing has the version None."""

CONFIG_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
"""The model's files that the engine reads beside the weights."""


def node_facts(engine: str, model: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the facts of this node. `settings`: the options and engine arguments that the nodes share. The weights
    count by their names, types and shapes; their bytes are compared when the engine has loaded them."""
    return {
        **{f"version of {name}": _version(name) for name in dict.fromkeys((engine, *PACKAGES))},
        **{f"the model's {name}": _file_digest(model / name) for name in CONFIG_FILES},
        "the model's tensors": _specs_digest(model),
        **dict(settings),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _file_digest(file: Path) -> str | None:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InvalidRequest(
            f"{file}: {error.strerror}", field="model", fix="give a Hugging Face model directory"
        ) from error


def _specs_digest(model: Path) -> str:
    checkpoint = open_checkpoint(model, field="model")
    try:
        lines = [f"{name} {spec.dtype} {list(spec.shape)}" for name, spec in sorted(checkpoint.specs.items())]
    finally:
        checkpoint.close()
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def check_facts(node: str, theirs: Mapping[str, Any], head: Mapping[str, Any]) -> None:
    """Raises Conflict if a node's facts are not those of the head. The error names the first facts that differ."""
    differing = [key for key in {**head, **theirs} if theirs.get(key) != head.get(key)]
    if differing:
        shown = "; ".join(
            f"{key}: {_shown(theirs.get(key))} there, {_shown(head.get(key))} at the head" for key in differing[:3]
        )
        more = f"; and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise Conflict(
            f"{node} does not fit the head: {shown}{more}",
            field="node_rank",
            fix="start every node with the same packages, model and arguments",
        )


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}…"

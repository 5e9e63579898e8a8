"""The names under which tensors are sent."""

from __future__ import annotations

from collections.abc import Iterable

from rl_plane.errors import InvalidRequest
from rl_plane.protocol.versions import TensorSpec, checked_name
from rl_plane.publish.sources.base import Names

WRAPPER_PARTS = ("_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module.")
"""Parts of names that FSDP1, torch.compile and activation checkpointing add."""
PEFT_PREFIX = "base_model.model."
"""The prefix that PEFT gives each name of an adapter."""


def without_wrappers(name: str) -> str:
    """The name without the parts that wrappers add."""
    for part in WRAPPER_PARTS:
        name = name.replace(part, "")
    return name


def engine_name(name: str, names: Names) -> str | None:
    """The engine's name of a tensor; None leaves the tensor out."""
    if names is None:
        if not isinstance(name, str):
            raise InvalidRequest(f"a tensor is called {name!r}", field="source", fix="give each a str as its name")
        return name
    new_name = names(name) if callable(names) else names.get(name, name)
    if new_name is not None and not isinstance(new_name, str):
        raise InvalidRequest(f"{name!r} becomes {new_name!r}", field="names", fix="map it to a str, or to None")
    return new_name


def check_specs(specs: Iterable[tuple[str, TensorSpec]]) -> list[tuple[str, TensorSpec]]:
    """Returns the specs as a list. Raises InvalidRequest if a name is unusable or occurs twice, or if there are
    none."""
    found = dict[str, TensorSpec]()
    for name, spec in specs:
        if not checked_name(name):
            raise InvalidRequest(
                f"{name[:200]!r} can't be the name of a tensor", field="names", fix="map it to another"
            )
        if name in found:
            raise InvalidRequest(f"two tensors are called {name!r}", field="names", fix="map each to its own name")
        found[name] = spec
    if not found:
        raise InvalidRequest("there are no tensors", field="source", fix="give weights, and names that keep some")
    return list(found.items())

"""The seam through which weights arrive: the contract of a WeightTransport.

A transport knows how bytes arrive and nothing of engines. Its receiving half runs in the process that holds
the model, on a thread, and yields `(name, tensor)`. Life of one update: `open(request)` checks everything that
can be checked without receiving and gives a Delivery; `delivery.specs` says what will come; iterating
`delivery.tensors()` brings it, once; `delivery.close()` frees what it held, on every path, twice included.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from rl_plane.versions import HostTensor, TensorSpec


class Delivery(Protocol):
    specs: Mapping[str, TensorSpec]
    """Every tensor that will arrive. Known before a byte is read."""

    digest: str | None
    """The version's digest, when the publisher stated one (a manifest); the worker checks it either way."""

    tensor_digests: Mapping[str, str] | None
    """Per tensor, blake3 hex, when the publisher stated them."""

    adapter_config: Mapping[str, Any] | None
    """Of an adapter: its PEFT config, as published; None: base weights."""

    adapter_config_raw: bytes | None
    """The same before it was parsed: the version's digest covers these bytes."""

    refetchable: bool
    """May the same bytes be fetched again later (by a worker that heals)?"""

    def tensors(self) -> Iterator[tuple[str, HostTensor]]:
        """Yields each tensor once, in any order. A buffer is valid until the next one is asked for.
        Raises InvalidWeights when what arrives is not what `specs` said."""

    def close(self) -> None: ...


class WeightTransport(Protocol):
    backend: str

    def __init__(self, weight_roots: list[Path]) -> None:
        """`weight_roots`: the only directories that may be read, symlinks resolved."""

    def init(self, config: Mapping[str, Any]) -> None:
        """Sets up what outlives one update (a group, a registration). Idempotent."""

    def destroy(self) -> None: ...

    def open(self, request: Mapping[str, Any], kind: Literal["base", "lora"]) -> Delivery:
        """`request`: the `transport` object of the body, `backend` included. Read-only. `kind`: what it must be.
        InvalidRequest for its fields, InvalidWeights for what it finds there."""

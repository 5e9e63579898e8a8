"""The seam through which weights arrive: the contract of a WeightTransport.

A transport knows how bytes arrive and nothing of engines. Its receiving half runs in the process that holds
the model, on a thread, and yields `(name, tensor)`. Life of one update: `open(request)` checks everything that
can be checked without receiving and gives a Delivery; `delivery.specs` says what will come; iterating
`delivery.tensors(cancelled)` brings it, once; `delivery.close()` frees what it held, on every path, twice included.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from rl_plane.errors import InvalidRequest
from rl_plane.protocol.canary import Canary
from rl_plane.protocol.subjects import DEFAULT_COMPONENT, DEFAULT_NAMESPACE, DEFAULT_NATS_URL
from rl_plane.protocol.update_requests import ReceivePart
from rl_plane.protocol.versions import HostTensor, TensorSpec
from rl_plane.transports.reception import Cancelled
from rl_plane.weights.rooted_files import listed


@dataclass(frozen=True, slots=True)
class Places:
    """Where weights may come from, as the operator has said; and where they go."""

    weight_roots: tuple[Path, ...] = ()
    """The only directories that may be read, symlinks resolved."""
    nats_url: str = DEFAULT_NATS_URL
    namespace: str = DEFAULT_NAMESPACE
    component: str = DEFAULT_COMPONENT
    """The only ones whose stored objects may be read."""
    device: str = "cpu"
    """Of the model in this process, as torch calls it."""

    def to_wire(self) -> dict[str, Any]:
        return {**asdict(self), "weight_roots": [str(root.absolute()) for root in self.weight_roots]}

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Places:
        return cls(**{**wire, "weight_roots": tuple(map(Path, wire["weight_roots"]))})


class Delivery(Protocol):
    specs: Mapping[str, TensorSpec]
    """Every tensor that will arrive. Known before a byte is read."""

    digest: str | None
    """The version's digest, when the publisher stated one (a manifest); the worker checks it either way. A publisher
    that sends while it computes states it at the end: None until all tensors were taken."""

    tensor_digests: Mapping[str, str] | None
    """Per tensor, blake3 hex, when the publisher stated them: each by the time at which its tensor is yielded."""

    adapter_config: Mapping[str, Any] | None
    """Of an adapter: its PEFT config, as published; None: base weights."""

    adapter_config_raw: bytes | None
    """The same before it was parsed: the version's digest covers these bytes."""

    refetchable: bool
    """May the same bytes be fetched again later (by a worker that heals)?"""

    def tensors(self, cancelled: Cancelled, /) -> Iterator[tuple[str, HostTensor]]:
        """Yields each tensor once, in any order. A buffer that is not `owned` is valid until the caller asks for the
        next one. Raises InvalidWeights when what arrives is not what `specs` said.

        `cancelled()` becomes true, on another thread, when the update is aborted. A delivery that waits for bytes asks
        it at least once a second, and raises EngineFailed. Between two tensors the receiver asks it."""

    def close(self) -> None: ...


@runtime_checkable
class CanaryDelivery(Delivery, Protocol):
    """A Delivery whose publisher may have stored a numeric canary beside the weights."""

    canary: Canary | InvalidRequest | None
    """What the publisher stored, or what is wrong with it. None: nothing."""


@runtime_checkable
class FedDelivery(Delivery, Protocol):
    """A Delivery whose tensors are announced part by part, while `tensors` waits for them. Its `specs` begin as the
    model's own, and each part's take their places before its bytes come."""

    def expect(self, wanted: Mapping[str, TensorSpec], tied: Mapping[str, str], cast: bool) -> None:
        """What a full checkpoint must and may hold. Called once, before anything else."""

    def feed(self, part: ReceivePart, cancelled: Cancelled) -> int:
        """On another thread than `tensors`: receives these, and returns when all were taken, how many are still to
        come. What it raises, `tensors` raises too: the update is over."""


class WeightTransport(Protocol):
    backend: str

    def __init__(self, places: Places) -> None:
        """Unsupported where it can't work for the model of this process: the worker then does without it."""

    def init(self, config: Mapping[str, Any]) -> None:
        """Sets up what outlives one update (a group, a registration). Idempotent."""

    def destroy(self) -> None: ...

    def open(self, request: Mapping[str, Any], kind: Literal["base", "lora"]) -> Delivery:
        """`request`: the `transport` object of the body, `backend` included. Read-only. `kind`: what it must be.
        InvalidRequest for its fields, InvalidWeights for what it finds there."""


@runtime_checkable
class GroupedTransport(WeightTransport, Protocol):
    """A transport that can be in several groups at once, each under a name."""

    def leave(self, group: str, /) -> None:
        """Leaves this group only. Without such a group: nothing."""


@runtime_checkable
class OfferingTransport(WeightTransport, Protocol):
    """By which others may fetch what this process keeps: see `Receiver.kept`."""

    def offer(self, tensors: Mapping[str, HostTensor]) -> Mapping[str, Any]:
        """The `transport` of their request. These tensors' memory is lent, and does not change, until `withdraw`."""

    def withdraw(self) -> None:
        """Nobody reads them any more when it returns. Without an offer: nothing."""


def check_fields(backend: str, given: Mapping[str, Any], *known: str) -> None:
    """InvalidRequest for a field that the backend doesn't know; every one has `backend`."""
    unknown = sorted(str(key)[:64] for key in given if key not in ("backend", *known))
    if unknown:
        raise InvalidRequest(
            f"the {backend} transport has no field {listed(unknown)}",
            field=f"transport.{unknown[0]}",
            fix=f"use only {', '.join(sorted(('backend', *known)))}",
        )

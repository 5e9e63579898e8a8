"""Weights that tests offer and pull by `nixl`, and fixtures of the two ends."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from rl_plane.protocol.versions import HostTensor, TensorSpec
from rl_plane.transports.base import TransportContext
from rl_plane.transports.nixl.sender import NixlSender
from rl_plane.transports.packing import fill
from rl_plane.weights.manifest import Manifest, pack

if TYPE_CHECKING:
    from rl_plane.transports.nixl.receiver import NixlTransport

needs_nixl = pytest.mark.engines("nixl")

BOUND_S = 30.0


SPECS = {f"layer.{number}": TensorSpec("U8", (100 + 30 * number,)) for number in range(12)}
CONFIG = b'{"r": 4}'
MANIFEST = Manifest(pack(SPECS.items(), 512))
TOTAL_BYTES = sum(bucket.nbytes for bucket in MANIFEST.buckets)


def tensors(seed: int = 1) -> dict[str, HostTensor]:
    chance = random.Random(seed)
    return {name: HostTensor(spec, memoryview(chance.randbytes(spec.nbytes))) for name, spec in SPECS.items()}


def data_of(named: dict[str, HostTensor]) -> dict[str, bytes]:
    return {name: bytes(tensor.data) for name, tensor in named.items()}


def offer(sender: NixlSender, seed: int, manifest: Manifest = MANIFEST) -> dict[str, Any]:
    transport, digests = sender.open(manifest), dict[str, str]()
    for number in fill(manifest, tensors(seed).items(), sender.buffer, digests):
        sender.send(number)
    sender.finish(digests)
    return transport


def pull(
    puller: NixlTransport, transport: dict[str, Any], kind: Any = "base"
) -> tuple[dict[str, bytes], str | None]:
    delivery = puller.open(transport, kind)
    try:
        return {name: bytes(tensor.data) for name, tensor in delivery.tensors()}, delivery.digest
    finally:
        delivery.close()
        delivery.close()


@pytest.fixture
def puller() -> NixlTransport:
    from rl_plane.transports.nixl.receiver import NixlTransport

    return NixlTransport(TransportContext())


@pytest.fixture
def sender() -> Iterator[NixlSender]:
    with NixlSender() as sender:
        yield sender


def writable(seed: int) -> dict[str, HostTensor]:
    return {name: HostTensor(one.spec, memoryview(bytearray(one.data))) for name, one in tensors(seed).items()}

"""Versions of a few small tensors, and a transport by which they come."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

from rl_plane.protocol.versions import HostTensor, TensorSpec
from rl_plane.transports.base import Delivery, WeightTransport
from rl_plane.transports.packed_delivery import PackedDelivery
from rl_plane.transports.packing import fill
from rl_plane.weights import delta_codec
from rl_plane.weights.manifest import Manifest, pack
from worker.engines.common.torch_weights import DTYPE_OF_NAME

Tensors = dict[str, torch.Tensor]


def weights(seed: int = 0) -> Tensors:
    torch.manual_seed(seed)
    return {
        "a": torch.randn(7, 3).to(torch.bfloat16),
        "b": torch.randn(5),
        "n": torch.tensor(seed, dtype=torch.int64),
        "none": torch.empty(0, dtype=torch.bfloat16),
    }


def step(tensors: Tensors, seed: int) -> Tensors:
    """A few bits of it are others."""
    torch.manual_seed(seed)
    after = {name: tensor.clone() for name, tensor in tensors.items()}
    after["a"].view(-1)[torch.randint(21, (2,))] += 1
    after["n"] += 1
    return after


def same(tensors: Mapping[str, HostTensor], version: Tensors) -> bool:
    return {name: bytes(tensor.data) for name, tensor in tensors.items()} == {
        name: raw(tensor) for name, tensor in version.items()
    }


class RoadDelivery(PackedDelivery):
    on_close: Callable[[], None]

    def close(self) -> None:
        self.on_close()
        super().close()


class Road(WeightTransport):
    """A WeightTransport: what is put under a path comes."""

    backend = "road"

    def __init__(self) -> None:
        self.states_digests = True
        """Deliveries say the digests of what comes."""
        self.there: dict[str, Tensors] = {}
        self.opened: list[str] = []
        self.closed: list[str] = []

    def put(self, path: str, tensors: Tensors) -> str:
        """The digest."""
        self.there[path] = tensors
        return self._packed(path)[0].digest or ""

    def put_delta(self, path: str, old: Tensors, new: Tensors) -> None:
        blobs = {}
        for name, tensor in old.items():
            blob = delta_codec.encode(raw(tensor), raw(new[name]), tensor.element_size())
            if blob is not None:
                blobs[name] = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
        self.put(path, blobs)

    def put_partial(self, path: str, old: Tensors, new: Tensors) -> None:
        self.put(path, {name: tensor for name, tensor in new.items() if raw(tensor) != raw(old[name])})

    def _packed(self, path: str) -> tuple[Manifest, list[memoryview]]:
        tensors = self.there[path]
        plain = Manifest(pack([(name, spec_of(tensor)) for name, tensor in tensors.items()], 64))
        data = [memoryview(bytearray(bucket.nbytes)) for bucket in plain.buckets]
        digests: dict[str, str] = {}
        for _ in fill(plain, tensors.items(), data.__getitem__, digests):
            pass
        return plain.digested(digests), data

    def open(self, request: Mapping[str, Any], kind: Literal["base", "lora"]) -> Delivery:
        self.opened.append(request["path"])
        manifest, data = self._packed(request["path"])
        delivery = RoadDelivery(manifest, iter(data), refetchable=True)
        delivery.on_close = lambda: self.closed.append(request["path"])
        if not self.states_digests:
            delivery.digest = delivery.tensor_digests = None
        return delivery


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    dtype = next(name for name, one in DTYPE_OF_NAME.items() if one == tensor.dtype)
    return TensorSpec(dtype, tuple(tensor.shape))


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.reshape(-1).view(torch.uint8).numpy())

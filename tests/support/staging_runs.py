"""A delivery from memory and an engine that keeps what it receives, for tests of staging."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from blake3 import blake3
from xxhash import xxh3_128

from rl_plane._util.tasks import Cancelled, never
from rl_plane.protocol.versions import DigestAlgorithm, HostTensor, TensorSpec, tensors_digest
from rl_plane.transports.base import Delivery
from worker.engines.fake.adapter import FakeWeights
from worker.receive.staging import (
    overwrite,
)
from worker.receive.weight_holder import Staged, TensorStream

F32, BF16, I64 = TensorSpec("F32", (2, 3)), TensorSpec("BF16", (2, 3)), TensorSpec("I64", (2, 3))
NONE: Mapping[str, str] = {}


NO_DIGEST = "xxh3:" + "0" * 32
"""The digest of no weights."""


def hexed(data: bytes, algorithm: DigestAlgorithm = "xxh3") -> str:
    return str((blake3 if algorithm == "blake3" else xxh3_128)(data).hexdigest())


class Memory(Delivery):
    """A Delivery from memory, which may send other tensors than it states."""

    def __init__(self, tensors: Mapping[str, bytes], shape: tuple[int, ...] | None = None) -> None:
        self.specs: Mapping[str, TensorSpec] = {
            name: TensorSpec("U8", shape or (len(data),)) for name, data in tensors.items()
        }
        self.tensor_digests: Mapping[str, str] | None = None
        self.digest: str | None = None
        self.adapter_config_raw: bytes | None = None
        self.refetchable = False
        self.sent = [(name, HostTensor(self.specs[name], memoryview(data))) for name, data in tensors.items()]
        self.taken = 0
        self.closed = 0

    def tensors(self, cancelled: Cancelled = never) -> Iterator[tuple[str, HostTensor]]:
        for item in self.sent:
            self.taken += 1
            yield item

    def close(self) -> None:
        self.closed += 1

    def true_digests(self, algorithm: DigestAlgorithm = "xxh3") -> dict[str, str]:
        return {name: hexed(bytes(tensor.data), algorithm) for name, tensor in self.sent}

    def true_digest(self, algorithm: DigestAlgorithm = "xxh3") -> str:
        digests = self.true_digests(algorithm)
        return tensors_digest((name, tensor.spec, digests[name]) for name, tensor in self.sent)


class Engine:
    """A WeightHolder that wants the tensors of a Memory, and stages them by `take`."""

    def __init__(self, delivery: Memory, take: Callable[[TensorStream], Any] = list) -> None:
        self.begun = False
        self.wanted = dict(delivery.specs)
        self.tied = NONE
        self.take = take

    def weight_spec(self) -> Mapping[str, TensorSpec]:
        return self.wanted

    def tied_tensors(self) -> Mapping[str, str]:
        return self.tied

    def stage(self, tensors: TensorStream, cancelled: Callable[[], bool]) -> Staged:
        self.take(tensors)
        return FakeWeights({})

    def overwrite(self, tensors: TensorStream, cancelled: Callable[[], bool]) -> None:
        self.begun = True
        self.take(tensors)

    def adapter_spec(self, config: Mapping[str, Any]) -> Mapping[str, TensorSpec]:
        assert config == json.loads(CONFIG)
        return self.wanted

    def stage_adapter(
        self, config: Mapping[str, Any], tensors: TensorStream, cancelled: Callable[[], bool]
    ) -> Staged:
        assert config == json.loads(CONFIG)
        return self.stage(tensors, cancelled)


def two() -> Memory:
    return Memory({"a": b"aaaa", "b": b"bb"})


# adapters

CONFIG = b'{"peft_type": "LORA",\n "r": 1}'


# overwriting


def write(engine: Engine, delivery: Memory, expected: str | None = None) -> str:
    return overwrite(engine, delivery, cast=False, expected_digest=expected, cancelled=lambda: False)

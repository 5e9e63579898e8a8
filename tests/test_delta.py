"""Deltas, and the copy of a version that a worker keeps to apply them to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import pytest
import torch

from rl_plane.errors import InvalidRequest
from rl_plane.manifest import Manifest, pack
from rl_plane.ops import UpdateWeights, parse_body
from rl_plane.publish.packing import fill
from rl_plane.tasks import never
from rl_plane.versions import HostTensor, TensorSpec
from worker.engines.hf_weights import DTYPE_OF_NAME, StagedTensors, host_copies
from worker.receiver import Receiver
from worker.reception import Reception, Staged, TensorStream
from worker.transports.base import Delivery
from worker.transports.packed import PackedDelivery

Tensors = dict[str, torch.Tensor]


class Road:
    """A WeightTransport: what is put under a path comes."""

    backend = "road"

    def __init__(self) -> None:
        self.there: dict[str, Tensors] = {}
        self.opened: list[str] = []

    def put(self, path: str, tensors: Tensors) -> str:
        """The digest."""
        self.there[path] = tensors
        return self._packed(path)[0].digest or ""

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
        return PackedDelivery(manifest, iter(data), refetchable=True)

    def init(self, config: Mapping[str, Any]) -> None: ...

    def destroy(self) -> None: ...


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    dtype = next(name for name, one in DTYPE_OF_NAME.items() if one == tensor.dtype)
    return TensorSpec(dtype, tuple(tensor.shape))


class Holder:
    """A WeightHolder of the tensors `wanted`; `tied` may come too."""

    def __init__(self, wanted: Mapping[str, TensorSpec], tied: frozenset[str] = frozenset()) -> None:
        self.wanted = wanted
        self.tied = tied

    def weight_spec(self) -> Mapping[str, TensorSpec]:
        return self.wanted

    def optional_tensors(self) -> frozenset[str]:
        return self.tied

    def stage(self, tensors: TensorStream, cast: bool, cancelled: Callable[[], bool]) -> StagedTensors:
        return StagedTensors(dict(host_copies(tensors, self.wanted, self.tied, cast, cancelled)))

    def overwrite(self, tensors: TensorStream, cast: bool, cancelled: Callable[[], bool]) -> None:
        self.stage(tensors, cast, cancelled)

    def adapter_spec(self, config: Mapping[str, Any]) -> Mapping[str, TensorSpec]:
        raise NotImplementedError

    def stage_adapter(self, config: Any, tensors: TensorStream, cast: bool, cancelled: Any) -> Staged:
        raise NotImplementedError


def weights(seed: int = 0) -> Tensors:
    torch.manual_seed(seed)
    return {
        "a": torch.randn(7, 3).to(torch.bfloat16),
        "b": torch.randn(5),
        "n": torch.tensor(seed, dtype=torch.int64),
        "none": torch.empty(0, dtype=torch.bfloat16),
    }


class Worker:
    """A Receiver, and what reaches it."""

    def __init__(self, tied: frozenset[str] = frozenset()) -> None:
        self.road = Road()
        spec = {name: spec_of(tensor) for name, tensor in weights().items()}
        self.receiver = Receiver(Holder(spec, tied), {"road": self.road})

    def stage(self, path: str, **more: Any) -> str:
        reception = Reception(path, {"backend": "road", "path": path}, **{"keep": True, **more})
        self.receiver.open(reception)
        return self.receiver.receive(path, never)["digest"]

    def swap(self, path: str) -> Tensors:
        staged = self.receiver.take(path)
        assert isinstance(staged, StagedTensors)
        return staged.tensors

    def kept(self) -> Iterator[tuple[str, HostTensor]]:
        assert self.receiver.kept is not None
        yield from self.receiver.kept.tensors.items()


def test_what_was_swapped_in_is_kept() -> None:
    worker = Worker()
    digest = worker.road.put("one", weights())
    assert worker.stage("one") == digest
    assert worker.receiver.kept is None, "it may still be discarded"
    swapped = worker.swap("one")
    assert worker.receiver.kept is not None
    assert worker.receiver.kept.digest == digest
    for name, tensor in worker.kept():
        assert tensor.spec == spec_of(weights()[name])
        assert bytes(tensor.data) == bytes(weights()[name].reshape(-1).view(torch.uint8).numpy())
        assert not tensor.data.readonly
    assert isinstance(worker.receiver.kept.staged, StagedTensors)
    assert worker.receiver.kept.staged.tensors is swapped, "one copy"


@pytest.mark.parametrize("how", ["full", "in place", "discarded"])
def test_other_base_weights_take_the_place_of_what_was_kept(how: str) -> None:
    worker = Worker()
    worker.road.put("one", weights())
    worker.road.put("two", weights(2))
    worker.stage("one")
    worker.swap("one")
    worker.stage("two", in_place=how == "in place", keep=how == "discarded")
    assert worker.receiver.kept is None
    if how == "discarded":
        worker.receiver.discard("two")
    elif how == "full":
        worker.swap("two")
    assert worker.receiver.kept is None


@pytest.mark.parametrize("why", ["cast", "tied"])
def test_what_differs_from_what_was_published_is_not_kept(why: str) -> None:
    worker = Worker(frozenset({"tied"}))
    tensors = weights()
    if why == "cast":
        tensors["b"] = tensors["b"].double()
    else:
        tensors["tied"] = torch.ones(3)
    worker.road.put("one", tensors)
    worker.stage("one", cast=True)
    worker.swap("one")
    assert worker.receiver.kept is None, "its digest is not the version's"


def test_what_is_not_staged_can_not_be_kept() -> None:
    body = {"transport": {"backend": "ipc"}, "policy": {"staging": "none", "keep_staged": True}}
    with pytest.raises(InvalidRequest) as caught:
        parse_body(UpdateWeights, body)
    assert caught.value.facts["field"] == "policy.keep_staged"

"""Tests partial versions: tensors that replace tensors of the copy in host memory, alone and in chains with deltas."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal

import pytest
import torch

from rl_plane._util.tasks import never
from rl_plane.errors import EngineFailed, InvalidWeights, NotAtBase
from rl_plane.protocol.update_requests import DeltaChainEntry, Transport
from rl_plane.protocol.versions import HostTensor, TensorSpec, tensor_digest, tensors_digest
from tests.support.receive_requests import NamedRequest, named_request
from tests.support.small_versions import Road, Tensors, raw, same, spec_of, weights
from worker.engines.common.torch_weights import StagedTensors, host_copies
from worker.receive import kept_copy
from worker.receive.kept_copy import EXCHANGE_BYTES, KeptCopy, Replacement
from worker.receive.weight_holder import Staged, TensorStream
from worker.receive.weight_receiver import Receiver

WRONG = "xxh3:" + "0" * 32


class Holder:
    """A WeightHolder for the tensors of `weights()`. Those in `tied` may come too."""

    def __init__(self, tied: Mapping[str, str]) -> None:
        self.tied = tied

    def weight_spec(self) -> Mapping[str, Any]:
        return {name: spec_of(tensor) for name, tensor in weights().items()}

    def tied_tensors(self) -> Mapping[str, str]:
        return self.tied

    def stage(self, tensors: TensorStream, cancelled: Callable[[], bool]) -> StagedTensors:
        return dict(host_copies(tensors, self.weight_spec(), self.tied, cancelled))

    def overwrite(self, tensors: TensorStream, cancelled: Callable[[], bool]) -> None:
        raise NotImplementedError

    def adapter_spec(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        raise NotImplementedError

    def stage_adapter(self, config: Any, tensors: TensorStream, cancelled: Any) -> Staged:
        raise NotImplementedError


class Worker:
    """A Receiver, and the versions that can be fetched: version 0 in full, each further one as `encodings` say."""

    def __init__(
        self,
        *encodings: Literal["delta", "partial"],
        changes: Mapping[int, str] = MappingProxyType({}),
        tied: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`changes`: version → the tensor that it changes, instead of `a` and `n`."""
        self.road = Road()
        self.receiver = Receiver(Holder(tied), {"road": self.road})
        self.encodings = ("full", *encodings)
        self.versions = [weights()]
        for number, encoding in enumerate(encodings, 1):
            before = self.versions[-1]
            after = {name: tensor.clone() for name, tensor in before.items()}
            for name in (changes[number],) if number in changes else ("a", "n"):
                after[name] += 1
            self.versions.append(after)
            (self.road.put_delta if encoding == "delta" else self.road.put_partial)(f"c{number}", before, after)
        self.digests = [
            self.road.put(f"c{0 if not n else f'{n} whole'}", one) for n, one in enumerate(self.versions)
        ]

    def request(self, number: int, *, onto: int | None = None, **more: Any) -> NamedRequest:
        """The request of a version, built on version `onto`. Default: the one before."""
        path, base = f"c{number}", number - 1 if onto is None else onto
        fields: dict[str, Any] = {"digest": self.digests[number], "encoding": self.encodings[number]}
        if number:
            fields |= {"base": self.digests[base], "base_chain": [self.link(each) for each in range(base + 1)]}
        return named_request(path, {"backend": "road", "path": path}, keep=True, **{**fields, **more})

    def link(self, number: int, refetchable: bool = True) -> DeltaChainEntry:
        transport = Transport.model_validate({"backend": "road", "path": f"c{number}"})
        return DeltaChainEntry(
            digest=self.digests[number],
            transport=transport,
            refetchable=refetchable,
            encoding=self.encodings[number],
        )

    def stage(self, number: int, **more: Any) -> str:
        request = self.request(number, **more)
        self.receiver.open(*request)
        return self.receiver.receive(request.staging, never)["digest"]

    def serve(self, *numbers: int, **more: Any) -> None:
        for number in numbers:
            assert self.stage(number, **more) == self.digests[number]
            staged = self.receiver.take(f"c{number}")
            assert {name: raw(one) for name, one in staged.items()} == {
                name: raw(one) for name, one in self.versions[number].items()
            }

    def keeps(self, number: int) -> bool:
        kept = self.receiver.kept
        return (
            kept is not None and kept.digest == self.digests[number] and same(kept.tensors, self.versions[number])
        )


@pytest.mark.parametrize("encodings", list(itertools.product(("delta", "partial"), repeat=3)))
def test_versions_of_each_encoding_follow_one_another(encodings: tuple[Literal["delta", "partial"], ...]) -> None:
    worker = Worker(*encodings)
    worker.serve(0)
    kept = worker.receiver.kept
    assert kept is not None
    memory = {name: tensor.data for name, tensor in kept.tensors.items()}
    worker.serve(1, 2, 3)
    assert worker.keeps(3)
    assert {name: bytes(data) for name, data in memory.items()} == {
        name: raw(tensor) for name, tensor in worker.versions[3].items()
    }, "in place"
    assert worker.road.opened == ["c0", "c1", "c2", "c3"], "nothing else was fetched"


@pytest.mark.parametrize("encodings", list(itertools.product(("delta", "partial"), repeat=3)))
def test_a_worker_without_the_base_fetches_it(encodings: tuple[Literal["delta", "partial"], ...]) -> None:
    worker = Worker(*encodings)
    worker.serve(3)
    assert worker.keeps(3)
    assert worker.road.opened == ["c3", "c0", "c1", "c2"]
    worker.receiver.kept = None
    worker.stage(3)
    worker.receiver.discard("c3")
    assert worker.keeps(2), "the base, for the next try"


def test_an_unchanged_tensor_is_not_hashed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker("partial", "delta", changes={1: "b", 2: "n"})
    worker.serve(0)
    hashed: list[int] = []

    def counted(data: memoryview, *more: Any) -> str:
        hashed.append(data.nbytes)
        return tensor_digest(data, *more)

    monkeypatch.setattr(kept_copy, "tensor_digest", counted)
    worker.serve(1)
    assert hashed == [], "a tensor that comes is hashed on its way, and the others are known"
    worker.serve(2)
    assert hashed == [spec_of(weights()["n"]).nbytes], "only what the delta has changed"


@pytest.mark.parametrize("encoding", ["delta", "partial"])
def test_an_engine_loads_only_what_differs_from_the_version_that_it_serves(
    encoding: Literal["delta", "partial"],
) -> None:
    worker = Worker(encoding, encoding, encoding, changes={1: "a", 2: "b", 3: "n"})
    worker.serve(0, 1)
    worker.stage(3)  # by way of version 2
    changed = worker.receiver.changed_since
    assert changed("c3", worker.digests[2]) == {"n"}
    assert changed("c3", worker.digests[1]) == {"b", "n"}
    for served in (worker.digests[0], worker.digests[3], WRONG, None):
        assert changed("c3", served) is None
    assert changed("another", worker.digests[2]) is None
    worker.receiver.take("c3")
    assert changed("c3", worker.digests[2]) is None
    # A version that is there already is loaded whole: the engine may have to be repaired.
    worker.stage(3)
    assert changed("c3", worker.digests[3]) is None
    worker.receiver.take("c3")


def test_a_copy_that_differs_only_in_tensors_that_come_needs_no_base() -> None:
    """A trainer that sends the same tensors each time builds on the last full version, which no worker keeps any more.
    The way back to an earlier version needs no base either."""
    worker = Worker("partial", "partial", "partial")
    worker.serve(0, 1)
    gone = [worker.link(0, refetchable=False)]
    worker.serve(2, onto=0, base_chain=gone)
    worker.serve(3, onto=0, base_chain=gone)
    worker.serve(1, onto=0, base_chain=gone)
    assert worker.keeps(1)
    assert worker.road.opened == ["c0", "c1", "c2", "c3", "c1"]


@pytest.mark.parametrize("stated", [True, False])
def test_a_copy_that_differs_in_another_tensor_needs_the_base(stated: bool) -> None:
    worker = Worker("partial", "partial", changes={1: "b"})
    worker.serve(0, 1)
    worker.road.states_digests = stated
    # It is called a version that was built on version 0, but it was built on version 1.
    worker.digests[2] = worker.road.put("other", {**worker.versions[2], "b": worker.versions[0]["b"]})
    worker.versions[2]["b"] = worker.versions[0]["b"]
    with pytest.raises(NotAtBase, match="source_gone"):
        worker.stage(2, onto=0, base_chain=[worker.link(0, refetchable=False)])
    assert worker.keeps(1)
    worker.serve(2, onto=0)
    assert worker.keeps(2)
    assert worker.road.opened[-2:] == ["c2", "c0"]


@pytest.mark.parametrize("at", range(8))
@pytest.mark.parametrize("encoding", ["delta", "partial"])
def test_a_cancelled_update_leaves_the_copy(encoding: Literal["delta", "partial"], at: int) -> None:
    worker = Worker(encoding)
    worker.serve(0)
    looks = itertools.count()
    worker.receiver.open(*worker.request(1))
    with pytest.raises(EngineFailed, match="cancelled"):
        worker.receiver.receive("c1", lambda: next(looks) >= at)
    assert worker.keeps(0)
    worker.serve(1)
    assert worker.keeps(1)


def test_a_discarded_partial_version_leaves_the_copy() -> None:
    worker = Worker("partial")
    worker.serve(0)
    for _ in range(2):
        worker.stage(1)
        assert worker.receiver.kept is None, "it is being changed"
        worker.receiver.discard("c1")
        worker.receiver.discard("c1")
        assert worker.keeps(0)
    worker.serve(1)
    worker.receiver.discard("c1")  # too late
    assert worker.keeps(1)


def test_a_partial_version_that_does_not_fit_leaves_the_copy() -> None:
    worker = Worker("partial", tied={"tied": "b"})
    worker.serve(0)
    good = worker.road.there["c1"]
    cases: list[tuple[Tensors, dict[str, Any], str]] = [
        ({**good, "other": torch.zeros(3)}, {}, "unknown to the model"),
        ({**good, "b": torch.zeros(6)}, {}, "of another shape"),
        ({**good, "b": torch.zeros(5, dtype=torch.float64)}, {}, "of another dtype"),
        ({**good, "tied": torch.zeros(5)}, {}, "no such tensor"),
        ({**good, "b": torch.zeros(5)}, {}, "the partial update makes"),
        (good, {"digest": WRONG}, "the partial update makes"),
    ]
    for tensors, how, words in cases:
        worker.road.put("c1", tensors)
        with pytest.raises(InvalidWeights, match=words):
            worker.stage(1, **how)
        assert worker.keeps(0), words
    worker.road.put("c1", good)
    worker.serve(1)


@pytest.mark.parametrize("more", [0, 7])
def test_a_large_tensor_is_exchanged_in_pieces(more: int) -> None:
    before, after = os.urandom(2 * EXCHANGE_BYTES + more), os.urandom(2 * EXCHANGE_BYTES + more)
    here, brought = bytearray(before), bytearray(after)
    change = Replacement(HostTensor(TensorSpec("U8", (len(after),)), memoryview(brought)), "its digest")
    change.apply(memoryview(here))
    assert (bytes(here), bytes(brought)) == (after, before)
    change.apply(memoryview(here))
    assert (bytes(here), bytes(brought)) == (before, after)


def test_a_link_of_the_chain_that_does_not_fit_is_named() -> None:
    worker = Worker("partial", "partial")
    worker.road.put("c1", {"other": torch.zeros(3)})
    with pytest.raises(NotAtBase, match="unknown to the model"):
        worker.stage(2)
    assert worker.receiver.kept is None


@pytest.mark.parametrize("encoding", ["delta", "partial"])
def test_a_version_may_have_a_digest_of_another_algorithm(encoding: Literal["delta", "partial"]) -> None:
    worker = Worker(encoding, encoding)
    worker.serve(0)
    lines = [
        (name, spec_of(one), tensor_digest(memoryview(raw(one)), "blake3"))
        for name, one in worker.versions[1].items()
    ]
    worker.digests[1] = tensors_digest(lines)
    worker.serve(1, 2)
    assert worker.keeps(2)


def test_a_damaged_copy_is_found_where_the_digest_is_wrong() -> None:
    worker = Worker("partial")
    worker.serve(0)
    kept: KeptCopy | None = worker.receiver.kept
    assert kept is not None
    kept.tensors["b"].data[0] ^= 1
    with pytest.raises(NotAtBase, match="damaged"):
        worker.stage(1, digest=WRONG)
    assert worker.receiver.kept is None
    worker.serve(1)
    assert worker.keeps(1)

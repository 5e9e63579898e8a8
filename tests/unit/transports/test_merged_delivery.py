"""A version whose shares come from several ranks of a trainer."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from rl_plane._util.tasks import Cancelled, never
from rl_plane.errors import EngineFailed, InvalidRequest, InvalidWeights, Unavailable
from rl_plane.protocol.versions import HostTensor, TensorSpec, tensor_digest
from rl_plane.transports.merged_delivery import MergedDelivery, open_shares
from rl_plane.transports.packed_delivery import PackedDelivery
from rl_plane.weights.manifest import Manifest, PackedBucket, pack

BOUND_S = 30.0


def manifest_of(*names: str, digested: bool = False) -> Manifest:
    made = Manifest(pack([(name, TensorSpec("U8", (3,))) for name in names], 64))
    return made.digested({name: tensor_digest(data_of(name)) for name in names}) if digested else made


def data_of(name: str) -> memoryview:
    return memoryview(name.encode().ljust(3, b"."))


class Share(PackedDelivery):
    """A share that comes from memory. It fails before the bucket `fails`, and waits there for `go`."""

    def __init__(self, *names: str, digested: bool = False, fails: int = 99, refetchable: bool = True) -> None:
        self.fails = fails
        self.closed = 0
        self.go = threading.Event()
        self.go.set()
        super().__init__(
            manifest_of(*names, digested=digested), self._coming(), refetchable=refetchable, close=self._end
        )

    def _coming(self) -> Iterator[memoryview]:
        for number, bucket in enumerate(self.manifest.buckets):
            while not self.go.wait(0.02):
                if self.cancelled():
                    raise EngineFailed("staging was cancelled")
            if number == self.fails:
                raise Unavailable("the trainer is gone")
            data = memoryview(bytearray(bucket.nbytes))
            for placed in bucket.tensors:
                data[placed.offset :][:3] = data_of(placed.name)
            yield data

    def _end(self) -> None:
        self.closed += 1


def taken(delivery: MergedDelivery) -> Mapping[str, bytes]:
    found: dict[str, bytes] = {}
    for name, tensor in delivery.tensors():
        assert name not in found
        found[name] = bytes(tensor.data)
    return found


@pytest.mark.parametrize("lanes", [1, 2, 9])
def test_the_tensors_of_all_shares_come_once(lanes: int) -> None:
    shares = {0: Share("a", "b"), 1: Share("c"), 5: Share("d", "e", "f")}
    delivery = MergedDelivery(shares, lanes)
    assert taken(delivery) == {name: bytes(data_of(name)) for name in "abcdef"}
    assert delivery.specs.keys() == set("abcdef")
    delivery.close()
    assert [share.closed for share in shares.values()] == [1, 1, 1]


def test_the_tensors_of_each_share_go_into_their_places() -> None:
    class Placing(Share):
        def tensors(self, cancelled: Cancelled = never) -> Iterator[tuple[str, HostTensor]]:
            assert self.algorithm == "blake3"
            for bucket in self.manifest.buckets:
                places = self.find_places(bucket)
                assert places is not None
                for placed in bucket.tensors:
                    places[placed.name][:] = data_of(placed.name)
                    yield placed.name, HostTensor(placed.spec, places[placed.name], owned=True)

    memory = {name: memoryview(bytearray(3)) for name in "abc"}
    delivery = MergedDelivery({0: Placing("a"), 1: Placing("b", "c")}, 4)
    delivery.algorithm, delivery.places = "blake3", lambda name, spec: memory[name]
    assert (
        taken(delivery)
        == {name: bytes(memory[name]) for name in "abc"}
        == {name: bytes(data_of(name)) for name in "abc"}
    )
    delivery.close()


def test_places_that_do_not_fit_are_not_used() -> None:
    share = Share("a", "b")
    bucket = PackedBucket.of(share.specs.items())
    assert share.find_places(bucket) is None
    for wrong in (None, memoryview(bytearray(2))):
        share.places = lambda name, spec, wrong=wrong: wrong if name == "b" else memoryview(bytearray(3))
        assert share.find_places(bucket) is None


def test_the_version_has_a_digest_if_each_share_states_those_of_its_tensors() -> None:
    whole = manifest_of("a", "b", "c", digested=True)
    delivery = MergedDelivery({0: Share("b", digested=True), 1: Share("a", "c", digested=True)}, 4)
    assert delivery.digest == whole.digest
    assert delivery.tensor_digests == whole.tensor_digests
    assert MergedDelivery({0: Share("b", digested=True), 1: Share("a")}, 4).digest is None


def test_a_version_is_refetchable_if_each_share_is() -> None:
    assert MergedDelivery({0: Share("a"), 1: Share("b")}, 4).refetchable
    assert not MergedDelivery({0: Share("a"), 1: Share("b", refetchable=False)}, 4).refetchable


def test_an_error_names_the_rank_and_ends_the_other_shares() -> None:
    waits, fails = Share("a", "b"), Share("c", fails=0)
    waits.go.clear()
    delivery = MergedDelivery({0: waits, 3: fails}, 4)
    with pytest.raises(Unavailable, match=r"^the share of the trainer's rank 3: the trainer is gone"):
        taken(delivery)
    delivery.close()
    assert not any(thread.name == "share" for thread in threading.enumerate())


def test_a_cancelled_update_ends_every_share() -> None:
    shares = {0: Share("a"), 1: Share("b")}
    for share in shares.values():
        share.go.clear()
    delivery = MergedDelivery(shares, 4)
    with pytest.raises(EngineFailed, match="cancelled"):
        list(delivery.tensors(lambda: True))
    delivery.close()


def test_a_tensor_of_two_owners_is_refused() -> None:
    shares = {0: Share("a", "b"), 1: Share("b")}
    with pytest.raises(InvalidWeights, match="two ranks"):
        MergedDelivery(shares, 4)
    assert [share.closed for share in shares.values()] == [1, 1]


def test_a_share_that_does_not_open_closes_the_others_and_is_named() -> None:
    first = Share("a")
    answers = iter([first, Unavailable("it has closed the connection")])

    def open_one(request: Mapping[str, Any]) -> PackedDelivery:
        assert request == {"backend": "nixl", "port": 7}
        answer = next(answers)
        if isinstance(answer, Share):
            return answer
        assert isinstance(answer, Exception)
        raise answer

    request = {"backend": "nixl", "shares": [{"rank": 0, "port": 7}, {"rank": 2, "port": 7}]}
    with pytest.raises(Unavailable, match="rank 2: it has closed"):
        open_shares("nixl", request, 4, open_one)
    assert first.closed == 1


@pytest.mark.parametrize(
    ("shares", "more"),
    [
        ([], {}),
        ({}, {}),
        ("ab", {}),
        ([{"rank": 0}, {"rank": 0}], {}),
        ([{"rank": -1}], {}),
        ([{"rank": True}], {}),
        ([{"port": 1}], {}),
        ([7], {}),
        ([{"rank": 0, "shares": []}], {}),
        ([{"rank": 0}], {"port": 1}),
        ([{"rank": number} for number in range(1025)], {}),
    ],
)
def test_a_request_that_is_not_of_shares_is_refused(shares: Any, more: Mapping[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"shares|port"):
        open_shares("nixl", {"backend": "nixl", "shares": shares, **more}, 4, lambda share: Share("a"))

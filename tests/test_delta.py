"""Deltas, and the copy of a version that a worker keeps to apply them to."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType, SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch

from rl_plane import delta
from rl_plane.bodies import parse_body
from rl_plane.errors import EngineFailed, InvalidRequest, InvalidWeights, NotAtBase
from rl_plane.manifest import Manifest, pack
from rl_plane.publish.host_copy import HostCopy
from rl_plane.publish.packing import fill
from rl_plane.publish.sources import Taken
from rl_plane.tasks import never
from rl_plane.update_bodies import PreparedReply, UpdateWeights
from rl_plane.versions import HostTensor, TensorSpec
from worker.engines.hf_weights import DTYPE_OF_NAME, StagedTensors, host_copies
from worker.receiver import Receiver
from worker.reception import Link, Reception, Staged, TensorStream
from worker.transports.base import Delivery
from worker.transports.packed import PackedDelivery
from worker.updates import Wanted, WeightUpdates

Tensors = dict[str, torch.Tensor]

# ---- the encoding ----


def changed(old: bytes, at: Iterable[int], width: int) -> bytes:
    """Each of these elements gets another value."""
    data = bytearray(old)
    for index in at:
        data[index * width + index % width] ^= 1 + index % 255
    return bytes(data)


@pytest.mark.parametrize("width", sorted(delta.WIDTHS))
@pytest.mark.parametrize("elements", [1, 7, 8, 1000, delta.REACH * 3 + 5])
def test_a_delta_brings_the_new_version_and_again_the_old_one(width: int, elements: int) -> None:
    source = random.Random(f"{width} {elements}")
    old = source.randbytes(elements * width)
    last = elements - 1
    for at in ([0], [last], {0, last}, range(elements), source.sample(range(elements), -(-elements // 100))):
        new = changed(old, at, width)
        blob = delta.encode(old, new, width)
        assert blob is not None
        assert len(blob) <= delta.max_nbytes(len(old), width)
        buffer = bytearray(old)
        delta.apply(blob, buffer, width)
        assert buffer == new
        delta.apply(blob, buffer, width)
        assert buffer == old


def test_long_ways_between_two_changes() -> None:
    part = delta.PART_WORDS * delta.WORD // 2
    reaches = (delta.REACH - 1, delta.REACH, delta.REACH + 1, 2 * delta.REACH, 5 * delta.REACH + 3)
    for gap in (1, *reaches, part - 1, part, part + delta.REACH, 2 * part + 7):
        for at in ([gap], [0, gap], [3, 3 + gap, 4 + gap, 4 + 2 * gap]):
            old = bytes(2 * (at[-1] + 2))
            new = changed(old, at, 2)
            buffer = bytearray(old)
            delta.apply(delta.encode(old, new, 2) or b"", buffer, 2)
            assert buffer == new


def test_large_tensors_are_compared_by_threads() -> None:
    elements = delta.PARALLEL_BYTES // 2 + 3
    source = np.random.default_rng(1)
    old = source.integers(0, 1 << 16, elements, dtype=np.uint16)
    new = old.copy()
    at = source.choice(elements, elements // 100, replace=False)
    new[at] ^= source.integers(1, 1 << 16, len(at), dtype=np.uint16)
    with ThreadPoolExecutor() as threads:
        blob = delta.encode(old.data.cast("B"), new.data.cast("B"), 2, threads)
    assert blob is not None
    assert blob == delta.encode(old.data.cast("B"), new.data.cast("B"), 2)
    assert len(blob) <= 0.03 * old.nbytes
    delta.apply(blob, old.data.cast("B"), 2)
    assert np.array_equal(old, new)


def test_memory_may_begin_anywhere_and_be_read_only() -> None:
    old = random.Random(7).randbytes(4097)
    new = changed(old, [1, 600, 4096], 1)
    for start in (0, 1, 3):
        before, after = memoryview(old)[start:], memoryview(bytearray(new))[start:]
        buffer = bytearray(before)
        delta.apply(delta.encode(before, after, 1) or b"", buffer, 1)
        assert buffer == after


def test_nothing_has_changed() -> None:
    assert delta.encode(b"same", b"same", 2) is None
    assert delta.encode(b"", b"", 8) is None
    buffer = bytearray(b"same")
    delta.apply(delta.nothing(4, 2), buffer, 2)
    assert buffer == b"same"


GOOD = delta.encode(bytes(400), changed(bytes(400), [3, 50, 199], 2), 2) or b""


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        GOOD[:23],
        GOOD[:-1],
        GOOD + b"\0",
        b"XLD1" + GOOD[4:],
        GOOD[:4] + b"\4" + GOOD[5:],
        GOOD[:8] + (201).to_bytes(8, "little") + GOOD[16:],
        GOOD[:16] + (4).to_bytes(8, "little") + GOOD[24:],
        GOOD[:16] + (1 << 63).to_bytes(8, "little") + GOOD[24:],
        GOOD[:24] + b"\xff\xff" + GOOD[26:],
        delta.nothing(398, 2),
        delta.nothing(400, 1),
    ],
)
def test_what_is_no_delta_of_the_tensor_changes_nothing(blob: bytes) -> None:
    buffer = bytearray(400)
    with pytest.raises(InvalidWeights, match="the delta of 'w'"):
        delta.apply(blob, buffer, 2, "w")
    assert buffer == bytes(400)


def test_random_bytes_end_in_an_error_or_are_taken_back() -> None:
    """Whatever the bytes are, nothing beyond the tensor is touched, and twice is nothing."""
    source = random.Random(5)
    for _ in range(2000):
        blob = bytearray(GOOD)
        for _ in range(source.randint(1, 6)):
            blob[source.randrange(len(blob))] = source.randrange(256)
        buffer = bytearray(400)
        try:
            delta.apply(blob, buffer, 2)
        except InvalidWeights:
            assert buffer == bytes(400)
        else:
            delta.apply(blob, buffer, 2)
            assert buffer == bytes(400)


# ---- the copy that is kept ----


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

    def put_delta(self, path: str, old: Tensors, new: Tensors) -> None:
        blobs = {}
        for name, tensor in old.items():
            blob = delta.encode(raw(tensor), raw(new[name]), tensor.element_size())
            if blob is not None:
                blobs[name] = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
        self.put(path, blobs)

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


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.reshape(-1).view(torch.uint8).numpy())


class Holder:
    """A WeightHolder of the tensors `wanted`; `tied` may come too."""

    def __init__(self, wanted: Mapping[str, TensorSpec], tied: Mapping[str, str] = MappingProxyType({})) -> None:
        self.wanted = wanted
        self.tied = tied

    def weight_spec(self) -> Mapping[str, TensorSpec]:
        return self.wanted

    def tied_tensors(self) -> Mapping[str, str]:
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

    def __init__(self, tied: Mapping[str, str] = MappingProxyType({})) -> None:
        self.road = Road()
        spec = {name: spec_of(tensor) for name, tensor in weights().items()}
        self.receiver = Receiver(Holder(spec, tied), {"road": self.road})

    def reception(self, path: str, **more: Any) -> Reception:
        return Reception(path, **{"transport": {"backend": "road", "path": path}, "keep": True, **more})

    def stage(self, path: str, **more: Any) -> str:
        self.receiver.open(self.reception(path, **more))
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
        assert bytes(tensor.data) == raw(weights()[name])
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
    worker = Worker({"tied": "b"})
    tensors = weights()
    if why == "cast":
        tensors["b"] = tensors["b"].double()
    else:
        tensors["tied"] = tensors["b"]
    worker.road.put("one", tensors)
    worker.stage("one", cast=True)
    worker.swap("one")
    assert worker.receiver.kept is None, "its digest is not the version's"


def step(tensors: Tensors, seed: int) -> Tensors:
    """A few bits of it are others."""
    torch.manual_seed(seed)
    after = {name: tensor.clone() for name, tensor in tensors.items()}
    after["a"].view(-1)[torch.randint(21, (2,))] += 1
    after["n"] += 1
    return after


class Chain:
    """Versions on a Road: `v0` is full, each `d<n>` the delta from the one before, `v<n>` the same whole."""

    def __init__(self, road: Road, length: int) -> None:
        self.versions = [weights()]
        for number in range(1, length):
            self.versions.append(step(self.versions[-1], number))
            road.put_delta(f"d{number}", *self.versions[-2:])
        self.digests = [road.put(f"v{number}", tensors) for number, tensors in enumerate(self.versions)]

    def delta(self, number: int, **more: Any) -> dict[str, Any]:
        before = [self.link(0), *(self.link(each) for each in range(1, number))]
        base, digest = self.digests[number - 1], self.digests[number]
        return {"base": base, "digest": digest, "before": before, **more}

    def link(self, number: int, refetchable: bool = True) -> Link:
        path = f"d{number}" if number else "v0"
        return Link(self.digests[number], {"backend": "road", "path": path}, refetchable)


def same(tensors: Mapping[str, HostTensor], version: Tensors) -> bool:
    return {name: bytes(tensor.data) for name, tensor in tensors.items()} == {
        name: raw(tensor) for name, tensor in version.items()
    }


def test_a_delta_changes_what_is_kept() -> None:
    worker = Worker()
    chain = Chain(worker.road, 3)
    worker.stage("v0")
    worker.swap("v0")
    memory = dict(worker.kept())["a"].data
    for number in (1, 2):
        assert worker.stage(f"d{number}", **chain.delta(number)) == chain.digests[number]
        assert worker.receiver.kept is None
        swapped = worker.swap(f"d{number}")
        assert all(torch.equal(tensor, chain.versions[number][name]) for name, tensor in swapped.items())
        assert worker.receiver.kept is not None
        assert worker.receiver.kept.digest == chain.digests[number]
    assert bytes(memory) == raw(chain.versions[2]["a"]), "in place"
    assert worker.road.opened == ["v0", "d1", "d2"], "no more was fetched"


def test_a_delta_that_is_discarded_leaves_what_was_kept() -> None:
    worker = Worker()
    chain = Chain(worker.road, 2)
    worker.stage("v0")
    worker.swap("v0")
    for _ in range(2):
        worker.stage("d1", **chain.delta(1))
        worker.receiver.discard("d1")
        worker.receiver.discard("d1")
        assert worker.receiver.kept is not None
        assert worker.receiver.kept.digest == chain.digests[0]
        assert same(worker.receiver.kept.tensors, chain.versions[0])
    worker.stage("d1", **chain.delta(1))
    worker.swap("d1")
    worker.receiver.discard("d1")  # too late
    assert worker.receiver.kept is not None
    assert same(worker.receiver.kept.tensors, chain.versions[1])


def test_a_delta_that_fails_leaves_what_was_kept() -> None:
    worker = Worker()
    chain = Chain(worker.road, 2)
    worker.stage("v0")
    worker.swap("v0")
    good = worker.road.there["d1"]
    fitting = chain.delta(1)
    cases: list[tuple[Tensors, dict[str, Any], type[Exception], str]] = [
        (good, {**fitting, "digest": "blake3:" + "0" * 64}, InvalidWeights, "the delta makes"),
        ({**good, "other": torch.zeros(24, dtype=torch.uint8)}, fitting, InvalidWeights, "unknown to the model"),
        ({**good, "b": torch.zeros(24)}, fitting, InvalidWeights, "not the delta"),
        ({**good, "b": torch.zeros(5000, dtype=torch.uint8)}, fitting, InvalidWeights, "not too long"),
        ({**good, "b": torch.zeros(24, dtype=torch.uint8)}, fitting, InvalidWeights, "'b' does not begin"),
    ]
    for blobs, how, error, words in cases:
        worker.road.put("d1", blobs)
        with pytest.raises(error, match=words):
            worker.stage("d1", **how)
        assert worker.receiver.kept is not None
        assert worker.receiver.kept.digest == chain.digests[0]
        assert same(worker.receiver.kept.tensors, chain.versions[0])


@pytest.mark.parametrize("after", range(6))
def test_a_delta_that_is_cancelled_leaves_what_was_kept(after: int) -> None:
    worker = Worker()
    chain = Chain(worker.road, 2)
    worker.stage("v0")
    worker.swap("v0")
    looks = itertools.count()
    worker.receiver.open(worker.reception("d1", **chain.delta(1)))
    with pytest.raises(EngineFailed, match="cancelled"):
        worker.receiver.receive("d1", lambda: next(looks) >= after)
    assert worker.receiver.kept is not None
    assert same(worker.receiver.kept.tensors, chain.versions[0])


@pytest.mark.parametrize("at", [None, 0, 2])
def test_a_worker_that_is_behind_fetches_the_way_up_to_the_base(at: int | None) -> None:
    worker = Worker()
    chain = Chain(worker.road, 5)
    if at is not None:
        worker.stage("v0")
        worker.swap("v0")
        for number in range(1, at + 1):
            worker.stage(f"d{number}", **chain.delta(number))
            worker.swap(f"d{number}")
    worker.road.opened.clear()
    assert worker.stage("d4", **chain.delta(4)) == chain.digests[4]
    way = {None: ["v0", "d1", "d2", "d3"], 0: ["d1", "d2", "d3"], 2: ["d3"]}
    assert worker.road.opened == ["d4", *way[at]]
    worker.receiver.discard("d4")
    assert worker.receiver.kept is not None
    assert same(worker.receiver.kept.tensors, chain.versions[3]), "the base, for the next try"
    worker.road.opened.clear()
    worker.stage("d4", **chain.delta(4))
    worker.swap("d4")
    assert worker.road.opened == ["d4"]
    assert worker.stage("again", transport={"backend": "road", "path": "d4"}, **chain.delta(4)) == chain.digests[4]
    assert worker.road.opened == ["d4", "d4"], "what it makes is there already"


def test_a_way_that_went_wrong_is_begun_anew() -> None:
    worker = Worker()
    chain = Chain(worker.road, 4)
    good = worker.road.there["d2"]
    worker.road.put_delta("d2", chain.versions[1], step(chain.versions[1], 77))
    with pytest.raises(InvalidWeights, match="the delta makes"):
        worker.stage("d3", **chain.delta(3))
    assert worker.receiver.kept is None
    worker.road.put("d2", good)
    assert worker.stage("d3", **chain.delta(3)) == chain.digests[3]


def test_a_copy_that_was_damaged_is_not_kept() -> None:
    worker = Worker()
    chain = Chain(worker.road, 2)
    worker.stage("v0")
    worker.swap("v0")
    (place,) = (tensor.data for name, tensor in worker.kept() if name == "b")
    place[3] ^= 1
    with pytest.raises(NotAtBase, match="damaged"):
        worker.stage("d1", **chain.delta(1))
    assert worker.receiver.kept is None
    assert worker.stage("d1", **chain.delta(1)) == chain.digests[1], "from where the base came"


def test_what_lies_on_the_way_must_be_deltas() -> None:
    worker = Worker()
    chain = Chain(worker.road, 4)
    for tensors, words in (
        ({"other": torch.zeros(24, dtype=torch.uint8)}, "unknown to the model"),
        ({"b": torch.zeros(5000, dtype=torch.uint8)}, "not too long"),
    ):
        worker.road.put("d2", tensors)
        with pytest.raises(NotAtBase, match=words):
            worker.stage("d3", **chain.delta(3))
    assert worker.receiver.kept is None


def test_a_staging_that_nobody_discarded_is_taken_back_before_the_next() -> None:
    worker = Worker()
    chain = Chain(worker.road, 2)
    worker.stage("v0")
    worker.swap("v0")
    worker.stage("left", transport={"backend": "road", "path": "d1"}, **chain.delta(1))
    assert worker.stage("d1", **chain.delta(1)) == chain.digests[1]
    worker.swap("d1")
    assert same(dict(worker.kept()), chain.versions[1])
    with pytest.raises(EngineFailed, match="nothing is staged"):
        worker.receiver.take("left")


class Engine:
    """Of an adapter what WeightUpdates calls, and in which order."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def open(self, reception: Reception) -> None:
        self.called.append("open")

    def receive(self, staging: str, cancelled: Callable[[], bool]) -> PreparedReply:
        self.called.append("cancelled" if cancelled() else "receive")
        if cancelled():
            raise EngineFailed("staging was cancelled")
        return PreparedReply(digest="d", tensors=1, bytes=1, refetchable=True)

    def kept(self) -> None:
        return None

    async def discard(self, staging: str) -> None:
        self.called.append("discard")

    async def run(self, work: Any) -> Any:
        return await work


async def test_a_delta_waits_until_no_swap_reads_what_it_changes() -> None:
    engine: Any = Engine()
    info: Any = SimpleNamespace(transports=("road",))
    updates = WeightUpdates(engine, info, engine, lambda staging: None, lambda: None)
    road = {"backend": "road"}
    await updates.prepare(Wanted("full", road, keep=True))
    assert updates.take("full") is not None
    given_up = asyncio.create_task(updates.prepare(Wanted("given up", road, base="b", digest="d", fence=1)))
    await asyncio.to_thread(wait_for, lambda: engine.called[-1] == "open")
    assert await updates.drop("given up")
    with pytest.raises(EngineFailed, match="cancelled"):
        await given_up
    delta_ = asyncio.create_task(updates.prepare(Wanted("delta", road, base="b", digest="d", fence=2)))
    await asyncio.to_thread(wait_for, lambda: engine.called[-1] == "open")
    updates.exchanged()
    await delta_
    assert engine.called == ["open", "receive", "open", "cancelled", "open", "receive"]


def wait_for(holds: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 10.0
    while not holds():
        assert time.monotonic() < give_up
        time.sleep(0.01)


def test_a_base_that_can_not_be_had_is_told_before_a_byte_comes() -> None:
    worker = Worker({"tied": "b"})
    chain = Chain(worker.road, 3)
    gone = [chain.link(0), chain.link(1, refetchable=False)]
    for before in ([], gone):
        with pytest.raises(NotAtBase, match="source_gone"):
            worker.receiver.open(worker.reception("d2", **{**chain.delta(2), "before": before}))
    worker.stage("v0")
    worker.swap("v0")
    with pytest.raises(NotAtBase, match=f"keeps {chain.digests[0]}"):
        worker.receiver.open(worker.reception("d2", **{**chain.delta(2), "before": gone}))
    tied = {**chain.versions[0], "tied": chain.versions[0]["b"]}
    link = Link(worker.road.put("v0", tied), {"backend": "road", "path": "v0"}, True)
    with pytest.raises(NotAtBase, match="differs from what was published"):
        worker.stage("d1", base=link.digest, digest=chain.digests[1], before=[link])


# ---- the trainer's copy ----


def taken(tensors: Tensors) -> Taken:
    return Taken([(name, spec_of(tensor)) for name, tensor in tensors.items()], iter(tensors.items()))


def test_the_trainers_copy_tells_what_has_changed() -> None:
    """Of torch's tensors, however they lie in memory."""
    wide = torch.arange(64, dtype=torch.float32).reshape(8, 8)
    one = {**weights(), "slanted": wide.t(), "yes": torch.tensor([True, False])}
    two = {**step(weights(), 1), "slanted": wide.clone().t(), "yes": torch.tensor([True, True])}
    road, copy = Road(), HostCopy()
    digests = [road.put(path, tensors) for path, tensors in (("one", one), ("two", two))]
    first = copy.read(taken(one))
    assert (first.digest, first.base, first.deltas) == (digests[0], None, None)
    change = copy.read(taken(two))
    assert (change.digest, change.base, copy.digest) == (digests[1], digests[0], digests[1])
    assert change.deltas is not None
    assert change.deltas.keys() == {"a", "n", "yes"}
    assert same({name: tensor for name, tensor in copy.whole().tensors if isinstance(tensor, HostTensor)}, two)
    copy.take_back(change)
    assert copy.digest == digests[0]
    assert copy.read(taken(two)).deltas == change.deltas
    unchanged = copy.read(taken(two))
    assert unchanged.deltas is not None
    assert len(unchanged.deltas) == 1, "a version is never of no tensors"
    # What does not pay goes whole, and there is no way back from it.
    other = copy.read(taken({**two, "slanted": torch.randn(8, 8), "b": torch.randn(5), "a": weights(3)["a"]}))
    assert other.deltas is None
    copy.take_back(other)
    assert copy.digest is None
    assert copy.read(taken(one)).deltas is None


DIGEST = "blake3:" + "ab" * 32
DELTA = {"transport": {"backend": "ipc"}, "encoding": "delta", "base": DIGEST, "digest": DIGEST}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"base": None}, "base"),
        ({"digest": None}, "digest"),
        ({"encoding": "full"}, "base"),
        ({"cast": True}, "cast"),
        ({"policy": {"staging": "none"}}, "policy.staging"),
        ({"target": {"kind": "lora", "op": "load", "name": "a"}}, "encoding"),
    ],
)
def test_what_is_no_delta_names_the_field(change: dict[str, Any], field: str) -> None:
    parse_body(UpdateWeights, DELTA)
    with pytest.raises(InvalidRequest) as caught:
        parse_body(UpdateWeights, {**DELTA, **change})
    assert caught.value.facts["field"] == field


def test_what_is_not_staged_can_not_be_kept() -> None:
    body = {"transport": {"backend": "ipc"}, "policy": {"staging": "none", "keep_staged": True}}
    with pytest.raises(InvalidRequest) as caught:
        parse_body(UpdateWeights, body)
    assert caught.value.facts["field"] == "policy.keep_staged"

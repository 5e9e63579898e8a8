"""Tests the copy of a version in host memory, and the deltas that change it."""

from __future__ import annotations

import asyncio
import itertools
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rl_plane._util.tasks import never
from rl_plane.errors import EngineFailed, InvalidRequest, InvalidWeights, NotAtBase, UpdateAborted
from rl_plane.protocol.record import VersionSource
from rl_plane.protocol.update_requests import (
    CanaryLimits,
    DeltaChainEntry,
    PreparedReply,
    ReceiveRequest,
    Transport,
    UpdateWeights,
)
from rl_plane.protocol.validation import parse_body
from rl_plane.protocol.versions import HostTensor, TensorSpec, WeightVersion, tensors_digest
from tests.support.receive_requests import NamedRequest, named_request
from tests.support.small_versions import Road, Tensors, raw, same, spec_of, step, weights
from worker.engines.common.torch_weights import StagedTensors, host_copies
from worker.receive.host_room import MemoryFiles
from worker.receive.weight_holder import Staged, TensorStream
from worker.receive.weight_receiver import Receiver
from worker.reconcile.follower import RecordFollower
from worker.reconcile.instructions import Fetch, Wait
from worker.reconcile.staged_updates import WeightUpdates


class Holder:
    """A WeightHolder for the tensors `wanted`. Those in `tied` may come too."""

    def __init__(self, wanted: Mapping[str, TensorSpec], tied: Mapping[str, str] = MappingProxyType({})) -> None:
        self.wanted = wanted
        self.tied = tied

    def weight_spec(self) -> Mapping[str, TensorSpec]:
        return self.wanted

    def tied_tensors(self) -> Mapping[str, str]:
        return self.tied

    def stage(self, tensors: TensorStream, cancelled: Callable[[], bool]) -> StagedTensors:
        return dict(host_copies(tensors, self.wanted, self.tied, cancelled))

    def overwrite(self, tensors: TensorStream, cancelled: Callable[[], bool]) -> None:
        self.stage(tensors, cancelled)

    def adapter_spec(self, config: Mapping[str, Any]) -> Mapping[str, TensorSpec]:
        raise NotImplementedError

    def stage_adapter(self, config: Any, tensors: TensorStream, cancelled: Any) -> Staged:
        raise NotImplementedError


class Worker:
    """A Receiver with a transport and a holder."""

    def __init__(self, tied: Mapping[str, str] = MappingProxyType({}), **more: Any) -> None:
        self.road = Road()
        spec = {name: spec_of(tensor) for name, tensor in weights().items()}
        self.receiver = Receiver(Holder(spec, tied), {"road": self.road}, **more)

    def reception(self, path: str, **more: Any) -> NamedRequest:
        return named_request(path, **{"transport": {"backend": "road", "path": path}, "keep": True, **more})

    def stage(self, path: str, **more: Any) -> str:
        self.receiver.open(*self.reception(path, **more))
        return self.receiver.receive(path, never)["digest"]

    def swap(self, path: str) -> Tensors:
        staged: Tensors = self.receiver.take(path)
        return staged

    def kept(self) -> Iterator[tuple[str, HostTensor]]:
        assert self.receiver.kept is not None
        yield from self.receiver.kept.tensors.items()


def test_the_receiver_keeps_a_copy_of_swapped_weights() -> None:
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
    for name, tensor in worker.kept():
        at = np.frombuffer(tensor.data, np.uint8).ctypes.data
        assert not tensor.data.nbytes or swapped[name].data_ptr() == at, "one copy"


@pytest.mark.parametrize("how", ["full", "in place", "discarded"])
def test_other_base_weights_replace_the_copy(how: str) -> None:
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


@pytest.mark.parametrize("ends", ["discarded", "swapped"])
def test_equal_base_weights_take_the_place_of_the_copy(ends: str) -> None:
    """A worker that serves them already discards what is staged."""
    worker = Worker()
    digest = worker.road.put("one", weights())
    worker.road.put("again", weights())
    worker.stage("one")
    worker.swap("one")
    assert worker.stage("again") == digest
    if ends == "discarded":
        worker.receiver.discard("again")
    else:
        worker.swap("again")
    assert worker.receiver.kept is not None
    assert worker.receiver.kept.digest == digest
    assert {name: bytes(tensor.data) for name, tensor in worker.kept()} == {
        name: raw(tensor) for name, tensor in weights().items()
    }


def test_the_receiver_keeps_no_copy_with_a_repeated_tied_tensor() -> None:
    worker = Worker({"tied": "b"})
    worker.road.put("one", {**weights(), "tied": weights()["b"]})
    worker.stage("one")
    worker.swap("one")
    assert worker.receiver.kept is None, "a delta could change one of the two"


def test_the_copy_has_the_published_bytes_after_a_cast_and_takes_no_delta() -> None:
    worker = Worker()
    chain = Chain(worker.road, 2)
    wide = {**chain.versions[0], "b": chain.versions[0]["b"].double()}
    digest = worker.road.put("wide", wide)
    assert worker.stage("wide", cast=True) == digest
    assert all(torch.equal(tensor, chain.versions[0][name]) for name, tensor in worker.swap("wide").items())
    assert worker.receiver.kept is not None
    assert worker.receiver.kept.digest == digest
    assert same(worker.receiver.kept.tensors, wide)
    with pytest.raises(NotAtBase, match="no copy"):
        worker.receiver.open(*worker.reception("d1", **{**chain.delta(1), "base": digest, "base_chain": []}))


class Chain:
    """Versions on a Road: `v0` is full, each `d<n>` is the delta from the version before, `v<n>` the full version."""

    def __init__(self, road: Road, length: int) -> None:
        self.versions = [weights()]
        for number in range(1, length):
            self.versions.append(step(self.versions[-1], number))
            road.put_delta(f"d{number}", *self.versions[-2:])
        self.digests = [road.put(f"v{number}", tensors) for number, tensors in enumerate(self.versions)]

    def delta(self, number: int, **more: Any) -> dict[str, Any]:
        before = [self.link(0), *(self.link(each) for each in range(1, number))]
        base, digest = self.digests[number - 1], self.digests[number]
        return {"base": base, "digest": digest, "base_chain": before, **more}

    def link(self, number: int, refetchable: bool = True) -> DeltaChainEntry:
        path = f"d{number}" if number else "v0"
        transport = Transport.model_validate({"backend": "road", "path": path})
        encoding = "delta" if number else "full"
        return DeltaChainEntry(
            digest=self.digests[number], transport=transport, refetchable=refetchable, encoding=encoding
        )


def test_a_delta_changes_the_copy() -> None:
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


def test_a_discarded_delta_leaves_the_copy() -> None:
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


def test_a_failed_delta_leaves_the_copy() -> None:
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
def test_a_cancelled_delta_leaves_the_copy(after: int) -> None:
    worker = Worker()
    chain = Chain(worker.road, 2)
    worker.stage("v0")
    worker.swap("v0")
    looks = itertools.count()
    worker.receiver.open(*worker.reception("d1", **chain.delta(1)))
    with pytest.raises(EngineFailed, match="cancelled"):
        worker.receiver.receive("d1", lambda: next(looks) >= after)
    assert worker.receiver.kept is not None
    assert same(worker.receiver.kept.tensors, chain.versions[0])


@pytest.mark.parametrize("at", [None, 0, 2])
def test_a_worker_that_is_behind_fetches_the_chain_up_to_the_base(at: int | None) -> None:
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


def test_a_chain_that_failed_is_fetched_from_its_beginning() -> None:
    worker = Worker()
    chain = Chain(worker.road, 4)
    good = worker.road.there["d2"]
    worker.road.put_delta("d2", chain.versions[1], step(chain.versions[1], 77))
    with pytest.raises(InvalidWeights, match="the delta makes"):
        worker.stage("d3", **chain.delta(3))
    assert worker.receiver.kept is None
    worker.road.put("d2", good)
    assert worker.stage("d3", **chain.delta(3)) == chain.digests[3]


def test_a_full_version_of_a_chain_is_fetched_only_if_there_is_room(tmp_path: Path) -> None:
    """A copy that is no version of the chain makes room for it."""
    files = MemoryFiles(tmp_path, tmp_path)

    def available(kib: int) -> None:
        (tmp_path / "meminfo").write_text(f"MemAvailable: {kib} kB\n")

    worker = Worker(shared=True, memory_files=files)
    chain = Chain(worker.road, 2)
    available(1)
    worker.receiver.open(*worker.reception("d1", **chain.delta(1)))
    available(0)
    with pytest.raises(NotAtBase, match="staging needs 1 MiB"):
        worker.receiver.receive("d1", never)
    assert worker.road.opened == worker.road.closed == ["d1", "v0"]
    available(1)
    worker.road.put("other", weights(2))
    worker.stage("other")
    worker.swap("other")
    worker.receiver.loaded("other")
    worker.receiver.open(*worker.reception("d1", **chain.delta(1)))
    available(0)
    assert worker.receiver.receive("d1", never)["digest"] == chain.digests[1]


def test_a_copy_that_is_no_version_of_a_chain_is_gone_when_the_full_one_comes() -> None:
    worker = Worker()
    chain = Chain(worker.road, 2)
    worker.road.put("other", weights(2))
    worker.stage("other")
    worker.swap("other")
    assert worker.receiver.kept is not None
    area = weakref.ref(worker.receiver.kept.area)
    seen = set()

    def look() -> bool:
        seen.add((worker.road.opened[-1], area() is not None))
        return False

    worker.receiver.open(*worker.reception("d1", **chain.delta(1)))
    worker.receiver.receive("d1", look)
    assert seen == {("d1", True), ("v0", False)}


def test_the_receiver_drops_a_damaged_copy() -> None:
    worker = Worker()
    chain = Chain(worker.road, 2)
    worker.stage("v0")
    worker.swap("v0")
    damaged(worker)
    with pytest.raises(NotAtBase, match="damaged"):
        worker.stage("d1", **chain.delta(1))
    assert worker.receiver.kept is None
    assert worker.stage("d1", **chain.delta(1)) == chain.digests[1], "from where the base came"


def own_copy(worker: Worker, staging: str, digest: str) -> NamedRequest:
    """The request for the worker's own copy."""
    return NamedRequest(staging, worker.reception(staging, digest=digest).request.full_from(None))


@pytest.mark.parametrize("ends", ["discarded", "swapped"])
@pytest.mark.parametrize("after", ["full", "delta"])
def test_the_copy_is_staged_again_and_stays(after: str, ends: str) -> None:
    worker = Worker()
    chain, number = Chain(worker.road, 3), 1 if after == "delta" else 0
    worker.stage("v0")
    worker.swap("v0")
    if after == "delta":
        worker.stage("d1", **chain.delta(1))
        worker.swap("d1")
    opened, copy = list(worker.road.opened), worker.receiver.kept
    worker.receiver.open(*own_copy(worker, "own", chain.digests[number]))
    assert worker.receiver.receive("own", never)["digest"] == chain.digests[number]
    assert worker.receiver.kept is copy
    if ends == "discarded":
        worker.receiver.discard("own")
    else:
        swapped = worker.swap("own")
        assert all(torch.equal(tensor, chain.versions[number][name]) for name, tensor in swapped.items())
    assert worker.receiver.kept is copy
    assert worker.road.opened == opened, "nothing came"
    worker.stage(f"d{number + 1}", **chain.delta(number + 1))
    worker.swap(f"d{number + 1}")
    assert same(dict(worker.kept()), chain.versions[number + 1])


def damaged(worker: Worker) -> None:
    (place,) = (tensor.data for name, tensor in worker.kept() if name == "n")
    place[3] ^= 1


def test_a_damaged_copy_is_not_staged_again() -> None:
    worker = Worker()
    digest = worker.road.put("one", weights())
    worker.stage("one")
    worker.swap("one")
    damaged(worker)
    worker.receiver.open(*own_copy(worker, "own", digest))
    with pytest.raises(NotAtBase, match="damaged"):
        worker.receiver.receive("own", never)
    assert worker.receiver.kept is None
    with pytest.raises(EngineFailed, match="nothing is staged"):
        worker.receiver.take("own")
    with pytest.raises(NotAtBase, match="keeps no copy"):
        worker.receiver.open(*own_copy(worker, "own", digest))


def test_a_copy_of_another_version_is_not_staged() -> None:
    worker = Worker()
    worker.road.put("one", weights())
    other = worker.road.put("two", weights(2))
    worker.stage("one")
    worker.swap("one")
    copy = worker.receiver.kept
    with pytest.raises(NotAtBase, match="keeps no copy"):
        worker.receiver.open(*own_copy(worker, "own", other))
    assert worker.receiver.kept is copy


@pytest.mark.parametrize("is_damaged", [False, True])
async def test_a_worker_heals_from_its_own_copy_before_it_asks_peers(is_damaged: bool) -> None:
    """The recorded source can't be fetched again. The worker asks peers only if its own copy is damaged."""
    worker = Worker()
    digest = worker.road.put("one", weights())
    worker.stage("one")
    worker.swap("one")
    if is_damaged:
        damaged(worker)
    asked: list[str] = []

    class PeersOfRoad:
        async def bring(self, digest: str, take: Callable[[Mapping[str, Any]], Awaitable[object]]) -> bool:
            asked.append(digest)
            await take({"backend": "road", "path": "one"})
            return True

    async def read() -> None:
        pass

    version = WeightVersion("run", 1, "one", digest)
    source = VersionSource({"backend": "ipc"}, refetchable=False, keep_staged=True)
    fetch = Fetch("heal-1", None, version, source)
    engine: Any = SimpleNamespace(receiver=worker.receiver)
    info: Any = SimpleNamespace(transports=("road",), vocab_size=512, max_model_len=512)
    updates = WeightUpdates(engine, info, lambda staging: None, lambda: None)
    core: Any = SimpleNamespace(
        state=SimpleNamespace(instance_id="w0", digest=digest),
        in_place=False,
        next=lambda now: fetch if updates.staged is None else Wait(),
    )
    unused: Any = None
    record: Any = SimpleNamespace(read=read)
    peers: Any = PeersOfRoad()
    model = Transport.model_validate({"backend": "filesystem"})
    follower = RecordFollower(
        unused, unused, core, engine, unused, record, unused, updates, peers, model, lambda: None
    )
    await follower.settle()
    assert asked == [digest] * is_damaged
    name = updates.take("heal-1")
    assert name is not None
    swapped = worker.swap(name)
    assert all(torch.equal(tensor, weights()[name]) for name, tensor in swapped.items())
    assert worker.receiver.cached_digest() == digest


def test_the_versions_of_a_chain_must_be_deltas() -> None:
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


def test_an_old_staging_is_taken_back_before_the_next() -> None:
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
    """Records which methods of its receiver WeightUpdates calls, in order."""

    def __init__(self) -> None:
        self.receiver = self
        self.called: list[str] = []

    def open(self, staging: str, request: ReceiveRequest, limits: CanaryLimits | None) -> None:
        self.called.append("open")

    def receive(self, staging: str, cancelled: Callable[[], bool]) -> PreparedReply:
        self.called.append("cancelled" if cancelled() else "receive")
        if cancelled():
            raise EngineFailed("staging was cancelled")
        return PreparedReply(digest="d", tensors=1, bytes=1, refetchable=True)

    def cached_digest(self) -> None:
        return None

    def received(self) -> None:
        return None

    def discard(self, staging: str) -> None:
        self.called.append("discard")


async def test_a_delta_waits_until_no_swap_reads_the_copy() -> None:
    engine: Any = Engine()
    info: Any = SimpleNamespace(transports=("road",), vocab_size=512, max_model_len=512)
    updates = WeightUpdates(engine, info, lambda staging: None, lambda: None)
    road = {"backend": "road"}
    await updates.prepare(named_request("full", road, keep=True).request)
    assert updates.take("full") is not None
    digests: dict[str, Any] = {"base": tensors_digest([]), "digest": tensors_digest([])}
    given_up = asyncio.create_task(updates.prepare(named_request("given up", road, **digests).request, 1))
    await asyncio.to_thread(wait_for, lambda: engine.called[-1] == "open")
    assert await updates.drop("given up")
    with pytest.raises(UpdateAborted, match="aborted while it was received"):
        await given_up
    delta_ = asyncio.create_task(updates.prepare(named_request("delta", road, **digests).request, 2))
    await asyncio.to_thread(wait_for, lambda: engine.called[-1] == "open")
    updates.exchanged()
    await delta_
    assert engine.called == ["open", "receive", "open", "cancelled", "open", "receive"]


def wait_for(holds: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 10.0
    while not holds():
        assert time.monotonic() < give_up
        time.sleep(0.01)


def test_a_missing_base_is_refused_before_a_byte_comes() -> None:
    worker = Worker({"tied": "b"})
    chain = Chain(worker.road, 3)
    gone = [chain.link(0), chain.link(1, refetchable=False)]
    for before in ([], gone):
        with pytest.raises(NotAtBase, match="source_gone"):
            worker.receiver.open(*worker.reception("d2", **{**chain.delta(2), "base_chain": before}))
    worker.stage("v0")
    worker.swap("v0")
    with pytest.raises(NotAtBase, match=f"has a copy of {chain.digests[0]}"):
        worker.receiver.open(*worker.reception("d2", **{**chain.delta(2), "base_chain": gone}))
    tied = {**chain.versions[0], "tied": chain.versions[0]["b"]}
    link = DeltaChainEntry(
        digest=worker.road.put("v0", tied),
        transport=Transport.model_validate({"backend": "road", "path": "v0"}),
    )
    with pytest.raises(NotAtBase, match="ties tensors that were published twice"):
        worker.stage("d1", base=link.digest, digest=chain.digests[1], base_chain=[link])


def test_an_update_in_place_can_not_leave_a_kept_copy() -> None:
    body = {"transport": {"backend": "ipc"}, "policy": {"staging": "none", "keep_staged": True}}
    with pytest.raises(InvalidRequest) as caught:
        parse_body(UpdateWeights, body)
    assert caught.value.facts["field"] == "policy.keep_staged"

"""A group of a trainer and the ranks of engines: over stand-ins for torch's groups, and formed within one process."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from rl_plane._util.own_address import own_address
from rl_plane.errors import DeadlineExceeded, EngineFailed, InvalidRequest, Unavailable, Unsupported
from rl_plane.protocol.versions import TensorSpec
from rl_plane.transports.base import TransportContext
from rl_plane.transports.group import torch_group
from rl_plane.transports.group.peer_liveness import PeerLiveness, hello
from rl_plane.transports.group.rank_layout import Place
from rl_plane.transports.group.receiver import GlooTransport
from rl_plane.transports.group.sender import GroupSender
from rl_plane.transports.group.streamed_delivery import received
from rl_plane.transports.group.torch_group import (
    CHUNK_BYTES,
    Group,
    MakeGroup,
    formed_together,
    make_torch_group,
)
from rl_plane.transports.torch_calls import import_torch
from rl_plane.weights.manifest import Manifest, pack
from tests.support.listeners import listeners

pytestmark = [pytest.mark.slow, pytest.mark.parallel]

BOUND_S = 10.0
PLACE = Place("gloo", "g", "127.0.0.1", 1, world_size=2, rank=1)


@pytest.mark.parametrize("interface", ["", "lo"])
def test_gloo_is_reached_where_the_trainer_is(interface: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of the machine often resolves to an address of the loopback, so gloo must not take that."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)  # if there is one, torch takes it
    dist = import_torch().distributed
    make, made = dist.ProcessGroupGloo.create_device, []

    def create_device(**how: Any) -> Any:
        made.append(how)
        return make(**how)

    monkeypatch.setattr(dist.ProcessGroupGloo, "create_device", create_device)
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    place = replace(PLACE, master_port=store.port, world_size=1, rank=0)
    make_torch_group(place, store, BOUND_S).abort()
    assert made == ([] if interface else [{"hostname": "127.0.0.1"}])


def test_this_machines_address_is_of_the_network_that_is_meant() -> None:
    assert own_address("127.0.0.1", 1) == "127.0.0.1"
    assert own_address("localhost", 1) in ("127.0.0.1", "::1")
    with pytest.raises(OSError, match=r".+"):
        own_address("unknown.invalid", 1)


class Nccl:
    """A stand-in for torch's nccl group, over gloo. Its ranks connect by the store's `0`, when they are asked to or
    else in the first collective, and its errors are torch's."""

    connecting: Callable[[Nccl], None] = staticmethod(lambda group: None)
    """Called when the ranks begin to connect."""

    def __init__(self, place: Place, store: Any, timeout_s: float) -> None:
        self.store, self.rank, self.size = store, place.rank, place.world_size
        self.timeout = timedelta(seconds=timeout_s)
        self.gloo: Any = None
        self.threads: list[threading.Thread] = []
        """The thread of each collective."""

    def eager_connect_single_device(self, device: Any) -> None:
        self.connecting(self)
        if self.rank == 0:
            self.store.set("0", "id")
        else:
            try:
                self.store.get("0")
            except RuntimeError as error:
                raise import_torch().distributed.DistBackendError(
                    f"[{self.rank}] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d "
                    f"key-value store by key '0', but store->get('0') got error: {error}. This may indicate a "
                    "possible application crash on rank 0 or a network set up issue."
                ) from error
        dist = import_torch().distributed
        self.gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", self.store), self.rank, self.size, self.timeout)

    def broadcast(self, tensors: Any, options: Any) -> Any:
        if self.gloo is None:
            self.eager_connect_single_device(None)
        self.threads.append(threading.current_thread())
        return self.gloo.broadcast(tensors, options)

    def allreduce(self, tensors: Any, options: Any) -> Any:
        return self.gloo.allreduce(tensors, options)

    def abort(self) -> None:
        pass


@pytest.fixture
def nccl() -> type[Nccl]:
    class Made(Nccl):
        pass

    return Made


@pytest.fixture
def store() -> Any:
    """The store of a trainer."""
    return import_torch().distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


def nccl_place(store: Any, rank: int, timeout_s: float = BOUND_S, **more: Any) -> Place:
    return replace(
        PLACE, backend="nccl", master_port=store.port, rank=rank, timeout_s=timeout_s, device="cpu", **more
    )


def trainers_own(store: Any, rank: int, make: MakeGroup, timeout_s: float = BOUND_S) -> Group:
    """A group that the trainer has formed itself. Its ranks connect in the first broadcast."""
    return Group(nccl_place(store, rank, timeout_s, form="torch", fleet_ranks=1), BOUND_S, make=make)


def test_nccl_connects_as_it_forms_and_writes_into_receivers_alone(store: Any) -> None:
    torch = import_torch()
    trainers: list[Group] = []
    made: list[Nccl] = []

    def make(place: Place, there: Any, timeout_s: float) -> Nccl:
        made.append(Nccl(place, there, timeout_s))
        return made[-1]

    lifelines = PeerLiveness.of_trainer("127.0.0.1")
    joining = threading.Thread(
        target=lambda: trainers.append(Group(nccl_place(store, 0), BOUND_S, lifelines, make)), daemon=True
    )
    joining.start()
    rank = Group(nccl_place(store, 1, lifeline_port=lifelines.port, secret=lifelines.secret), BOUND_S, make=make)
    joining.join(BOUND_S)
    (trainer,) = trainers
    assert all(group.gloo is not None for group in made), "they are connected"
    given, taken = torch.arange(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
    coming, going = rank.broadcast(taken), trainer.broadcast(given)
    assert coming.there is not taken
    assert going.there is not given
    given.fill_(9)
    until = time.monotonic() + BOUND_S
    coming.wait("it", until)
    going.wait("it", until)
    assert taken.tolist() == list(range(8))
    assert given.tolist() == [9] * 8, "what was sent is not written to"
    ends = rank.barrier(), trainer.barrier()
    for end in ends:
        end.wait("the end", until)
    copies = [weakref.ref(one.there) for one in (coming, going)]
    del coming, going
    gc.collect()
    assert [copy() for copy in copies] == [None, None], "the groups free what has come"
    assert [group.threads for group in made] == [[threading.current_thread()]] * 2
    trainer.drop("it is enough")
    for group in (rank, trainer):
        group.await_end(BOUND_S)
    assert rank.why_dropped == "it is enough"


@pytest.mark.parametrize("form", ["plane", "torch"])
def test_nccls_own_message_is_in_the_error(form: str, store: Any, nccl: type[Nccl]) -> None:
    said = "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000"

    def connecting(group: Nccl) -> None:
        raise import_torch().distributed.DistBackendError(
            "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:93, invalid usage (run with "
            "NCCL_DEBUG=WARN for details), NCCL version 2.27.5\nncclInvalidUsage: This usually reflects invalid "
            f"usage of NCCL library.\nLast error:\n{said}\nException raised from create (most recent call first):"
        )

    nccl.connecting = staticmethod(connecting)
    if form == "plane":
        with pytest.raises(Unsupported, match=f"(?m)NCCLUtils.*; {said}$") as refused:
            Group(nccl_place(store, 1), BOUND_S, make=nccl)
        assert refused.value.facts["field"] == "transport.backend"
        assert "ipc" in refused.value.facts["fix"]
    else:
        group = trainers_own(store, 1, nccl)
        with pytest.raises(Unavailable, match=f"(?m)NCCLUtils.*; {said}$"):
            group.broadcast(import_torch().zeros(4))
        group.await_end(BOUND_S)


def test_a_trainer_does_not_wait_for_ranks_that_have_died_while_they_connect(store: Any, nccl: type[Nccl]) -> None:
    connects, go_on, made = threading.Event(), threading.Event(), list[Nccl]()

    def connecting(group: Nccl) -> None:
        made.append(group)
        connects.set()
        assert go_on.wait(BOUND_S)
        raise RuntimeError("it has no peers")

    nccl.connecting = staticmethod(connecting)
    trainer = PeerLiveness.of_trainer("127.0.0.1")
    line = socket.create_connection(("127.0.0.1", trainer.port))
    line.sendall(hello(trainer.secret, "g", 1))

    def die() -> None:
        assert connects.wait(BOUND_S)
        line.close()

    dying = threading.Thread(target=die)
    dying.start()
    with pytest.raises(Unavailable, match="rank 1 is gone"):
        Group(nccl_place(store, 0), BOUND_S, trainer, nccl)
    go_on.set()
    dying.join(BOUND_S)


def test_a_trainer_does_not_wait_for_ranks_that_have_died_on_their_way_into_gloo(store: Any) -> None:
    trainer = PeerLiveness.of_trainer("127.0.0.1")
    line = socket.create_connection(("127.0.0.1", trainer.port))
    line.sendall(hello(trainer.secret, "g", 1))
    line.close()
    place = replace(PLACE, master_port=store.port, rank=0)
    with pytest.raises(Unavailable, match="rank 1 is gone"):
        Group(place, BOUND_S, trainer)


def test_a_trainers_own_group_waits_for_its_first_broadcast_as_long_as_for_any(
    store: Any, nccl: type[Nccl]
) -> None:
    waits: list[float] = []
    nccl.connecting = staticmethod(lambda group: waits.append(group.store.timeout.total_seconds()))
    groups = [trainers_own(store, rank, nccl, 300.0) for rank in (1, 0)]
    data = [import_torch().zeros(4) for _ in groups]
    sending = threading.Thread(target=lambda: groups[1].broadcast(data[1]))
    sending.start()
    groups[0].broadcast(data[0]).wait("it", time.monotonic() + BOUND_S)
    sending.join(BOUND_S)
    assert waits == [300.0, 300.0]
    for group in groups:
        group.drop("it is enough")
        group.await_end(BOUND_S)


class Unconnected:
    """A stand-in for nccl's group while a rank is missing: its first collective begins when the rank comes. An abort
    has no effect before."""

    def __init__(self) -> None:
        self.waits, self.go_on, self.aborted = threading.Event(), threading.Event(), threading.Event()
        self.happened: list[str] = []
        self.threads: list[threading.Thread] = []
        """The thread of each broadcast."""

    def eager_connect_single_device(self, device: Any) -> None:
        pass

    def broadcast(self, tensors: Any, options: Any) -> Any:
        self.threads.append(threading.current_thread())
        self.waits.set()
        assert self.go_on.wait(BOUND_S)
        self.happened.append("posted")
        return SimpleNamespace(is_completed=lambda: True, wait=lambda: True)

    def abort(self) -> None:
        self.happened.append("aborted")
        self.aborted.set()


def test_a_worker_takes_the_place_of_several_ranks_and_receives_once(store: Any) -> None:
    torch = import_torch()
    own: dict[str, Any] = {"world_size": 4, "timeout_s": BOUND_S, "form": "torch", "fleet_ranks": 3}
    places = [Place("gloo", "g", "127.0.0.1", store.port, rank=rank, **own) for rank in range(4)]
    with ThreadPoolExecutor(1) as threads:
        forming = threads.submit(formed_together, places[1:], BOUND_S)
        trainer = Group(places[0], BOUND_S)
        worker = forming.result()
    assert [one.place.rank for one in (worker, *worker.silent)] == [1, 2, 3]
    deadline = time.monotonic() + BOUND_S
    for number in range(4):
        given, taken = torch.full((1 << 20,), number, dtype=torch.uint8), torch.zeros(1 << 20, dtype=torch.uint8)
        coming, sent = worker.broadcast(taken), trainer.broadcast(given)
        sent.wait("the receivers", deadline)
        coming.wait("the bytes", deadline)
        assert torch.equal(given, taken)
    worker.silent[1].drop("the third rank fell")
    with pytest.raises(Unavailable, match="the third rank fell"):
        worker.check()
    worker.drop("it is over")
    assert [one.why_dropped for one in worker.silent] == ["it is over", "the third rank fell"]
    trainer.drop("it is over")
    for group in (worker, trainer):
        group.await_end(BOUND_S)


def test_ranks_of_one_worker_form_all_or_none(store: Any) -> None:
    own: dict[str, Any] = {"world_size": 3, "timeout_s": 1.0, "form": "torch", "fleet_ranks": 2}
    places = [Place("gloo", "g", "127.0.0.1", store.port, rank=rank, **own) for rank in (1, 2)]
    with pytest.raises(Unavailable):  # the trainer does not come
        formed_together(places, 1.0)


def unconnected_group(store: Any, timeout_s: float = BOUND_S) -> tuple[Group, Unconnected]:
    there = Unconnected()
    return trainers_own(store, 1, lambda *_: there, timeout_s), there


def test_ranks_that_do_not_connect_are_waited_for_within_the_bound(store: Any) -> None:
    data = import_torch().zeros(4)
    group, there = unconnected_group(store, 0.1)
    with pytest.raises(DeadlineExceeded, match="did not connect"):
        group.broadcast(data)
    assert there.aborted.wait(BOUND_S)
    there.go_on.set()
    group.await_end(BOUND_S)
    assert there.happened == ["aborted", "posted", "aborted"], "what is posted later is aborted too"
    group, there = unconnected_group(store)
    waiting = there

    def drop() -> None:
        assert waiting.waits.wait(BOUND_S)
        group.drop("rank 2 is gone")

    dropping = threading.Thread(target=drop)
    dropping.start()
    with pytest.raises(Unavailable, match="rank 2 is gone"):
        group.broadcast(data)
    dropping.join(BOUND_S)
    there.go_on.set()
    group.await_end(BOUND_S)
    group, there = unconnected_group(store)
    there.go_on.set()
    for posted in (1, 2):
        group.broadcast(data).wait("it", time.monotonic() + BOUND_S)
        assert there.happened == ["posted"] * posted
    here = threading.current_thread()
    assert [thread is here for thread in there.threads] == [False, True], "on a thread while it connects"
    group.drop("it is enough")
    group.await_end(BOUND_S)


def test_an_abort_is_heeded_while_the_ranks_connect(store: Any) -> None:
    group, there = unconnected_group(store)
    coming = received(group, [4], str, time.monotonic() + BOUND_S, there.waits.is_set)
    with pytest.raises(EngineFailed, match="cancelled"):
        next(coming)
    assert "gave up" in group.why_dropped
    there.go_on.set()
    group.await_end(BOUND_S)


@pytest.mark.parametrize("ends", ["before it is posted", "while it connects", "on its way"])
def test_memory_that_may_be_written_stays_until_the_group_is_aborted(store: Any, ends: str) -> None:
    wanted, connects, aborts, go_on = (threading.Event() for _ in range(4))
    held: list[weakref.ref[Any]] = []

    class Posting(Unconnected):
        def broadcast(self, tensors: Any, options: Any) -> Any:
            held.append(weakref.ref(tensors[0]))
            wanted.set()
            if ends == "while it connects":
                assert connects.wait(BOUND_S)
            if ends == "before it is posted":
                raise RuntimeError("unhandled system error")
            return SimpleNamespace(is_completed=lambda: False, wait=lambda: True)

        def abort(self) -> None:
            aborts.set()
            assert go_on.wait(BOUND_S)

    there = Posting()
    if ends == "while it connects":
        group = trainers_own(store, 1, lambda *_: there)
    else:
        group = Group(nccl_place(store, 1), BOUND_S, make=lambda *_: there)
    with pytest.raises((EngineFailed, Unavailable)):
        group.broadcast(import_torch().zeros(4), wanted.is_set).wait(
            "it", time.monotonic() + BOUND_S, wanted.is_set
        )
    assert aborts.wait(BOUND_S)
    gc.collect()
    assert held[0]() is not None, "its kernels may still write"
    go_on.set()
    connects.set()
    group.await_end(BOUND_S)
    gc.collect()
    assert held[0]() is None


def test_an_error_of_cuda_drops_the_group_and_is_raised(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = import_torch()

    def fails(*args: Any, **how: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 32.00 MiB.")

    def broken() -> bool:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    class Broken(Unconnected):
        def broadcast(self, tensors: Any, options: Any) -> Any:
            return SimpleNamespace(is_completed=broken, wait=lambda: True)

    group = Group(nccl_place(store, 1), BOUND_S, make=lambda *_: Broken())
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "to", lambda *args, **how: pytest.fail("an empty lane is copied"))
        coming = group.broadcast(torch.zeros(4))
    with pytest.raises(Unavailable, match="illegal memory access") as told:
        coming.wait("it", time.monotonic() + BOUND_S)
    assert told.value.facts["field"] == "transport.group"
    assert group.why_dropped
    group.await_end(BOUND_S)
    group = Group(nccl_place(store, 1), BOUND_S, make=lambda *_: Broken())
    monkeypatch.setattr(torch, "empty_like", fails)
    with pytest.raises(Unavailable, match="out of memory") as told:
        group.broadcast(torch.zeros(4))
    assert told.value.facts["field"] == "transport.group"
    group.await_end(BOUND_S)


def test_a_group_of_nccl_has_no_watchdog_and_the_environment_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, str]] = []

    class Nccl:
        class Options:
            pass

        def __init__(self, *given: Any) -> None:
            seen.append({name: os.environ[name] for name in torch_group.NCCL_ENVIRONMENT})
            raise RuntimeError("no GPUs found")

    monkeypatch.setattr(import_torch().distributed, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "0")
    monkeypatch.delenv("TORCH_NCCL_DUMP_ON_TIMEOUT", raising=False)
    before = dict(os.environ)
    with pytest.raises(RuntimeError, match="no GPUs"):
        make_torch_group(replace(PLACE, backend="nccl"), None, 1.0)
    assert seen == [torch_group.NCCL_ENVIRONMENT]
    assert seen[0]["TORCH_NCCL_BLOCKING_WAIT"] == "1"
    assert dict(os.environ) == before


def test_a_store_that_can_not_be_read_while_the_group_forms_is_an_error() -> None:
    lifelines: list[tuple[str, int]] = []

    def init(body: dict[str, Any]) -> dict[str, Any]:
        address = body["master_address"], body["master_port"]
        lifelines.append((body["master_address"], body["lifeline_port"]))
        store = import_torch().distributed.TCPStore(*address, None, False, wait_for_workers=False)
        store.set(f"{body['group']}/world_size", "many")
        return {"fingerprint": "f"}

    sender = GroupSender(join_timeout_s=BOUND_S)
    with pytest.raises(Unavailable, match="can't be read"):
        sender.form(init)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(lifelines[0])
    sender.destroy()


class Posting(SimpleNamespace):
    """A stand-in for torch's group that allows weak references."""


@pytest.mark.parametrize("fails", [False, True])
def test_a_broadcast_does_not_wait_for_the_release_of_its_dropped_group(store: Any, fails: bool) -> None:
    """Releasing torch's group last may take as long as an update, so another thread does it."""
    ended, released = threading.Event(), threading.Event()
    by: list[threading.Thread] = []

    def gone() -> None:
        by.append(threading.current_thread())
        released.set()

    def post(data: Any, options: Any) -> Any:
        group.drop("rank 2 is gone")
        ended.wait(0.2)  # it would come now
        if fails:
            raise RuntimeError("not connected")
        return SimpleNamespace(is_completed=lambda: True, wait=lambda *_: None)

    def make(*_: Any) -> Posting:
        there = Posting(broadcast=post, abort=ended.set)
        weakref.finalize(there, gone)
        return there

    group = Group(replace(PLACE, master_port=store.port), BOUND_S, make=make)
    failed = False
    try:
        group.broadcast(import_torch().zeros(4))
    except Unavailable:
        failed = True
    assert released.wait(BOUND_S)
    assert failed == fails
    assert by[0] is not threading.current_thread()
    group.await_end(BOUND_S)


def test_long_data_is_removed_from_the_store_in_whole(store: Any) -> None:
    group = Group(replace(PLACE, master_port=store.port), BOUND_S, make=lambda *_: Unconnected())
    group.put("long", bytes(CHUNK_BYTES + 1))
    assert group.take("long") == bytes(CHUNK_BYTES + 1)
    group.remove("long")
    group.remove("never there")
    there = import_torch().distributed.PrefixStore("g", store)
    assert not any(there.check([name]) for name in ("long", "long/0", "long/1"))
    group.drop("it is enough")
    group.await_end(BOUND_S)


Formed = tuple[GroupSender, GlooTransport, dict[str, Any]]


def joined(transport: GlooTransport, body: dict[str, Any]) -> dict[str, Any]:
    transport.init({**body, "world_size": 2, "rank_offset": 1})
    return {"fingerprint": "f"}


def reads_stored_manifest(sender: GroupSender, transport: GlooTransport) -> None:
    """Asserts that the rank is in the sender's group, and that both reach the group's store."""
    stored = sender.open(Manifest(pack([("a", TensorSpec("F32", (1,)))], 64)))
    digest = stored["manifest_digest"]
    with pytest.raises(InvalidRequest, match=f"the stored manifest has {digest}"):
        transport.open({**stored, "manifest_digest": "another"}, "base")


@pytest.fixture
def formed() -> Iterator[Formed]:
    """A trainer's sender and the transport of one rank in a group, and what the trainer has announced."""
    sender, transport = GroupSender(join_timeout_s=BOUND_S), GlooTransport(TransportContext())
    announced: dict[str, Any] = {}

    sender.form(lambda body: announced.update(body) or joined(transport, body))
    yield sender, transport, announced
    sender.destroy()
    transport.destroy()


def test_the_manifest_of_an_update_that_failed_is_not_left_in_the_store(formed: Formed) -> None:
    sender, _, announced = formed
    store = import_torch().distributed.PrefixStore(announced["group"], sender._store)
    key = sender.open(Manifest(pack([("a", TensorSpec("F32", (1,)))], 64)))["manifest_key"]
    assert store.get(key) == b"1"
    assert store.get(f"{key}/0")
    sender.close()
    assert not any(store.check([name]) for name in (key, f"{key}/0"))


def test_a_stranger_finds_neither_the_store_nor_the_lifelines_of_a_formed_group(formed: Formed) -> None:
    """New connections to the store are dropped, those of the group stay, and the next group lets its ranks in."""
    sender, transport, announced = formed
    host = announced["master_address"]
    found = {(one.address, one.port) for one in listeners([os.getpid()])}
    assert (host, announced["master_port"]) in found
    assert not any(announced["master_port"] == port for address, port in found if address != host)
    with pytest.raises(TimeoutError):
        socket.create_connection((host, announced["master_port"]), 0.3)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, announced["lifeline_port"]), BOUND_S)
    reads_stored_manifest(sender, transport)
    before = dict(announced)
    sender.leave()
    sender.form(lambda body: announced.update(body) or joined(transport, body))
    assert announced["master_port"] == before["master_port"]
    assert announced["secret"] != before["secret"]
    with pytest.raises(TimeoutError):
        socket.create_connection((host, announced["master_port"]), 0.3)
    sender.destroy()
    assert announced["master_port"] not in {one.port for one in listeners([os.getpid()])}


def test_a_check_refuses_what_a_rank_can_not_join_and_joins_nothing(store: Any) -> None:
    class Full(GlooTransport):
        max_groups = 0

    transport = Full(TransportContext())
    here: dict[str, Any] = {
        "group": "g",
        "master_address": "127.0.0.1",
        "master_port": store.port,
        "world_size": 2,
    }
    here |= {"rank_offset": 1, "check_only": True}
    with socket.create_server(("127.0.0.1", 0)) as gone:
        unused_port = gone.getsockname()[1]
    for wrong, field in (
        ({"master_port": unused_port}, "master_port"),
        ({"rank_offset": 2}, "rank_offset"),
        ({"form": "torch", "fleet_ranks": 1}, "group"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            transport.init({**here, **wrong})
        assert refused.value.facts["field"] == field
    transport.init(here)
    with pytest.raises(InvalidRequest, match="there is no gloo group 'g': this worker has none"):
        transport.open({"backend": "gloo", "group": "g"}, "base")


def test_a_rank_that_is_in_a_group_already_does_not_look_for_its_trainer(formed: Formed) -> None:
    """The first call's answer may be lost. The trainer's store takes no connections to a formed group."""
    sender, transport, announced = formed
    for more in ({"check_only": True}, {}):
        joined(transport, {**announced, **more})
        reads_stored_manifest(sender, transport)


def test_the_digest_of_a_manifest_that_is_not_stored_is_refused(formed: Formed) -> None:
    request = {"manifest": {"buckets": [[["a", "F32", [1]]]]}, "manifest_digest": "blake3:" + "0" * 64}
    with pytest.raises(InvalidRequest) as refused:
        formed[1].open(request, "base")
    assert refused.value.facts["field"] == "transport.manifest_digest"


@pytest.mark.parametrize("host", ["192.0.2.1", "a..b"])
def test_an_address_of_another_machine_is_refused_before_the_fleet_is_asked(host: str) -> None:
    sender = GroupSender(host=host, join_timeout_s=1.0)
    with pytest.raises(InvalidRequest, match="can't listen") as refused:
        sender.form(lambda body: pytest.fail("the fleet was asked"))
    assert refused.value.facts["field"] == "options.host"


def test_a_port_in_use_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        sender = GroupSender(port=taken.getsockname()[1])
        with pytest.raises(InvalidRequest, match="can't listen") as refused:
            sender.form(lambda body: pytest.fail("the fleet was asked"))
    assert refused.value.facts["field"] == "options.port"


def test_a_trainers_address_that_is_no_name_is_an_error() -> None:
    with pytest.raises(InvalidRequest, match=r"does not answer at a\.\.b:1") as refused:
        GlooTransport(TransportContext()).init(
            {
                "backend": "gloo",
                "group": "g",
                "master_address": "a..b",
                "master_port": 1,
                "world_size": 2,
                "rank_offset": 1,
            }
        )
    assert refused.value.facts["field"] == "master_port"

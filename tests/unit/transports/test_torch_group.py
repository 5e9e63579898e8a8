"""A group's parts, without a group: lifelines, the store, what a request may say of it."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from rl_plane._util.own_address import own_address
from rl_plane.errors import DeadlineExceeded, EngineFailed, InvalidRequest, Unavailable, Unsupported
from rl_plane.protocol.versions import TensorSpec
from rl_plane.transports.base import TransportContext
from rl_plane.transports.group import peer_liveness as lifelines
from rl_plane.transports.group import torch_group
from rl_plane.transports.group.peer_liveness import PeerLiveness
from rl_plane.transports.group.rank_layout import Place
from rl_plane.transports.group.receiver import GlooTransport
from rl_plane.transports.group.sender import GroupSender
from rl_plane.transports.group.streamed_delivery import received
from rl_plane.transports.group.torch_group import CHUNK_BYTES, Group, import_torch
from rl_plane.weights.manifest import Manifest, pack
from tests.support.commanded_process import forked

BOUND_S = 10.0
PLACE = Place("gloo", "g", "127.0.0.1", 1, world_size=2, rank=1)


def group_with(store: Any) -> Group:
    group = Group.__new__(Group)
    group._store = store
    group._lanes = []
    group.place = PLACE
    group.why_dropped = ""
    return group


@pytest.mark.parametrize("interface", ["", "lo"])
def test_gloo_is_reached_where_the_trainer_is(interface: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at what the machine's name resolves to, often an address of the loopback."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)  # if there is one, torch takes it
    dist = import_torch().distributed
    make, made = dist.ProcessGroupGloo.create_device, []

    def create_device(**how: Any) -> Any:
        made.append(how)
        return make(**how)

    monkeypatch.setattr(dist.ProcessGroupGloo, "create_device", create_device)
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    place = replace(PLACE, master_port=store.port, world_size=1, rank=0)
    torch_group._make(place, store, BOUND_S).abort()
    assert made == ([] if interface else [{"hostname": "127.0.0.1"}])


def test_this_machines_address_is_of_the_network_that_is_meant() -> None:
    assert own_address("127.0.0.1", 1) == "127.0.0.1"
    assert own_address("localhost", 1) in ("127.0.0.1", "::1")
    with pytest.raises(OSError, match=r".+"):
        own_address("nobody.invalid", 1)


def is_closed(line: socket.socket) -> bool:
    line.settimeout(BOUND_S)
    return line.recv(1) == b""


@pytest.mark.parametrize("bound", ["HELLO_S", "STRANGERS"])
def test_a_connection_that_does_not_name_its_rank_is_closed(monkeypatch: pytest.MonkeyPatch, bound: str) -> None:
    monkeypatch.setattr(lifelines, bound, 0)
    trainer = PeerLiveness.of_trainer("127.0.0.1")
    done = threading.Event()
    watching = threading.Thread(target=trainer.watch, args=("g", done.is_set))
    with socket.create_connection(("127.0.0.1", trainer.port)) as stranger:
        watching.start()
        assert is_closed(stranger)
    done.set()
    watching.join(BOUND_S)
    assert trainer._lines == []
    trainer.close()


def test_the_connection_of_a_known_rank_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = PeerLiveness.of_trainer("127.0.0.1")
    address = ("127.0.0.1", trainer.port)
    looks = iter(range(10))
    with contextlib.ExitStack() as lines:
        rank = lines.enter_context(socket.create_connection(address))
        rank.sendall(b"g 1\n")
        assert trainer.watch("g", lambda: next(looks) >= 2) == ""  # it comes, and says who it is
        monkeypatch.setattr(lifelines, "HELLO_S", 0.0)
        lines.enter_context(socket.create_connection(address))
        looks = iter(range(10))
        assert trainer.watch("g", lambda: next(looks) >= 2) == ""
        assert len(trainer._lines) == 1
    assert trainer.watch("g", lambda: False) == "rank 1 is gone"
    trainer.close()


def test_a_rank_says_once_who_it_is() -> None:
    trainer = PeerLiveness.of_trainer("127.0.0.1")
    address = ("127.0.0.1", trainer.port)
    done = threading.Event()
    why: list[str] = []

    def watch() -> None:
        why.append(trainer.watch("g", done.is_set, world_size=2))

    watching = threading.Thread(target=watch)
    with socket.create_connection(address) as rank:
        rank.sendall(b"g 1\n")
        assert trainer.watch("g", lambda: trainer._ranks) == ""
        watching.start()
        for said in (
            b"g 1\n",
            b"g 1\nI give up",
            b"g 0\n",
            b"g 01\n",
            b"g 2\n",
            b"g x\n",
            b"g " + b"9" * 4000 + b"\n",
        ):
            with socket.create_connection(address) as again:
                again.sendall(said)
                assert is_closed(again), said
        assert watching.is_alive()
    watching.join(BOUND_S)
    assert why == ["rank 1 is gone"]
    trainer.close()


@pytest.mark.parametrize("ends", ["its trainer", "rank 1"])
def test_a_lifeline_ends_with_its_process_and_not_with_a_child_of_it(ends: str) -> None:
    trainer = PeerLiveness.of_trainer("127.0.0.1")
    rank = PeerLiveness.of_rank(replace(PLACE, lifeline_port=trainer.port))
    assert rank is not None
    assert trainer.watch("g", lambda: trainer._ranks) == ""
    child = forked()
    try:
        ending, staying = (rank, trainer) if ends == "rank 1" else (trainer, rank)
        ending.close()  # as the kernel does, for this process
        until = time.monotonic() + BOUND_S
        assert staying.watch("g", lambda: time.monotonic() > until) == f"{ends} is gone"
        staying.close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_an_accept_that_fails_is_not_tried_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("rl_plane.transports.group.peer_liveness.time.sleep", slept.append)
    trainer = PeerLiveness.of_trainer("127.0.0.1")

    def accept() -> Any:
        raise OSError(24, "Too many open files")

    listener: Any = SimpleNamespace(accept=accept)
    trainer._accept(listener)
    assert slept == [lifelines.ACCEPT_AGAIN_S]
    trainer.close()


class Nccl:
    """A stand-in for torch's nccl group, over gloo. Its ranks connect by the store's `0`, when they are asked to or
    else in the first collective, and its errors are torch's."""

    class Options:
        _timeout: timedelta

    connecting: Callable[[Nccl], None] = staticmethod(lambda group: None)
    """The events of the stand-in, in order."""

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        self.store, self.rank, self.size, self.timeout = store, rank, size, options._timeout
        self.gloo: Any = None
        self.happened: list[str] = []

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
        self.happened.append("broadcast")
        return self.gloo.broadcast(tensors, options)

    def allreduce(self, tensors: Any, options: Any) -> Any:
        return self.gloo.allreduce(tensors, options)

    def abort(self) -> None:
        self.happened.append("abort")


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> type[Nccl]:
    class Made(Nccl):
        pass

    monkeypatch.setattr(import_torch().distributed, "ProcessGroupNCCL", Made, raising=False)
    return Made


@pytest.fixture
def store() -> Any:
    """A trainer's."""
    return import_torch().distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


def nccl_place(store: Any, rank: int, timeout_s: float = BOUND_S, **more: Any) -> Place:
    return replace(
        PLACE, backend="nccl", master_port=store.port, rank=rank, timeout_s=timeout_s, device="cpu", **more
    )


def trainers_own(store: Any, rank: int, timeout_s: float = BOUND_S, join_timeout_s: float = BOUND_S) -> Group:
    """Its ranks connect in the first broadcast."""
    return Group(nccl_place(store, rank, timeout_s, form="torch", fleet_ranks=1), join_timeout_s)


def test_nccl_connects_as_it_forms_and_writes_into_receivers_alone(store: Any, nccl: type[Nccl]) -> None:
    torch = import_torch()
    trainers: list[Group] = []
    lifelines = PeerLiveness.of_trainer("127.0.0.1")
    joining = threading.Thread(
        target=lambda: trainers.append(Group(nccl_place(store, 0), BOUND_S, lifelines)), daemon=True
    )
    joining.start()
    rank = Group(nccl_place(store, 1, lifeline_port=lifelines.port), BOUND_S)
    joining.join(BOUND_S)
    (trainer,) = trainers
    assert all(group._torch_group.gloo is not None for group in (trainer, rank)), "they are connected"
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
    assert rank._under_way == trainer._under_way == {}, "what has come is let go of"
    assert len(rank._threads) == 2, "nothing was begun on a thread"
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
            Group(nccl_place(store, 1), BOUND_S)
        assert refused.value.facts["field"] == "transport.backend"
        assert "ipc" in refused.value.facts["fix"]
    else:
        group = trainers_own(store, 1)
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
    line.sendall(b"g 1\n")

    def die() -> None:
        assert connects.wait(BOUND_S)
        line.close()

    dying = threading.Thread(target=die)
    dying.start()
    with pytest.raises(Unavailable, match="rank 1 is gone"):
        Group(nccl_place(store, 0), BOUND_S, trainer)
    go_on.set()
    dying.join(BOUND_S)


def test_a_trainers_own_group_waits_for_its_first_broadcast_as_long_as_for_any(
    store: Any, nccl: type[Nccl]
) -> None:
    waits: list[float] = []
    nccl.connecting = staticmethod(lambda group: waits.append(group.store.timeout.total_seconds()))
    groups = [trainers_own(store, rank, 300.0) for rank in (1, 0)]
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

    def broadcast(self, tensors: Any, options: Any) -> Any:
        self.waits.set()
        assert self.go_on.wait(BOUND_S)
        self.happened.append("posted")
        return SimpleNamespace(is_completed=lambda: True, wait=lambda: True)

    def abort(self) -> None:
        self.happened.append("aborted")
        self.aborted.set()


def nccl_group(timeout_s: float) -> tuple[Group, Unconnected]:
    group, there = group_with(None), Unconnected()
    group.place = replace(PLACE, timeout_s=timeout_s)
    group._threads, group._dropping, group._posting = [], threading.Lock(), threading.Lock()
    group._lifelines, group._torch_group, group._under_way = None, there, {}
    group._device, group._connected = import_torch().device("cpu"), False
    return group, there


def test_ranks_that_do_not_connect_are_waited_for_within_the_bound() -> None:
    data = import_torch().zeros(4)
    group, there = nccl_group(0.1)
    with pytest.raises(DeadlineExceeded, match="did not connect"):
        group.broadcast(data)
    assert there.aborted.wait(BOUND_S)
    there.go_on.set()
    group.await_end(BOUND_S)
    assert there.happened == ["aborted", "posted", "aborted"], "what is posted later is aborted too"
    group, there = nccl_group(BOUND_S)
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
    group, there = nccl_group(BOUND_S)
    there.go_on.set()
    for posted in (1, 2):
        group.broadcast(data).wait("it", time.monotonic() + BOUND_S)
        assert (there.happened, len(group._threads)) == (["posted"] * posted, 1), "on a thread while it connects"


def test_an_abort_is_heeded_while_the_ranks_connect() -> None:
    group, there = nccl_group(BOUND_S)
    coming = received(group, [4], str, time.monotonic() + BOUND_S, there.waits.is_set)
    with pytest.raises(EngineFailed, match="cancelled"):
        next(coming)
    assert "gave up" in group.why_dropped
    there.go_on.set()
    group.await_end(BOUND_S)


@pytest.mark.parametrize("ends", ["before it is posted", "while it connects", "on its way"])
def test_memory_that_may_be_written_stays_until_the_group_is_aborted(ends: str) -> None:
    group, there = nccl_group(BOUND_S)
    aborts, go_on = threading.Event(), threading.Event()
    held: list[weakref.ref[Any]] = []
    placed = group._placed

    def seen(data: Any) -> Any:
        held.append(weakref.ref(placed(data)))
        return held[-1]()

    def abort() -> None:
        aborts.set()
        assert go_on.wait(BOUND_S)

    group._placed, there.abort = seen, abort  # type: ignore[method-assign]
    group._connected = ends != "while it connects"
    work = SimpleNamespace(is_completed=lambda: False, wait=lambda: True)
    wanted = there.waits.is_set

    def post(tensors: Any, options: Any) -> Any:
        there.waits.set()
        if ends == "while it connects":
            assert there.go_on.wait(BOUND_S)
        if ends == "before it is posted":
            raise RuntimeError("unhandled system error")
        return work

    there.broadcast = post  # type: ignore[method-assign]
    with pytest.raises((EngineFailed, Unavailable)):
        group.broadcast(import_torch().zeros(4), wanted).wait("it", time.monotonic() + BOUND_S, wanted)
    assert aborts.wait(BOUND_S)
    gc.collect()
    assert held[0]() is not None, "its kernels may still write"
    go_on.set()
    there.go_on.set()
    group.await_end(BOUND_S)
    gc.collect()
    assert held[0]() is None


def test_an_error_of_cuda_drops_the_group_and_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = import_torch()

    def fails(*args: Any, **how: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 32.00 MiB.")

    def broken() -> bool:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    group, there = nccl_group(BOUND_S)
    group._connected = True
    work = SimpleNamespace(is_completed=broken, wait=lambda: True)
    there.broadcast = lambda tensors, options: work  # type: ignore[method-assign]
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "to", lambda *args, **how: pytest.fail("an empty lane is copied"))
        coming = group.broadcast(torch.zeros(4))
    with pytest.raises(Unavailable, match="illegal memory access") as told:
        coming.wait("it", time.monotonic() + BOUND_S)
    assert told.value.facts["field"] == "transport.group"
    assert group.why_dropped
    group.await_end(BOUND_S)
    group, _ = nccl_group(BOUND_S)
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
        torch_group._make(replace(PLACE, backend="nccl"), None, 1.0)
    assert seen == [torch_group.NCCL_ENVIRONMENT]
    assert seen[0]["TORCH_NCCL_BLOCKING_WAIT"] == "1"
    assert dict(os.environ) == before


@pytest.mark.parametrize("said", [RuntimeError("Connection reset"), b"many"])
def test_a_store_that_breaks_while_the_group_forms_is_an_error(said: Any) -> None:
    def get(key: str) -> Any:
        if isinstance(said, Exception):
            raise said
        return said

    sender = GroupSender(join_timeout_s=BOUND_S)
    sender._store = SimpleNamespace(check=lambda keys: True, get=get, port=1)
    lifelines = PeerLiveness.of_trainer("127.0.0.1")
    with pytest.raises(Unavailable, match="can't be read"):
        sender._join("g", lifelines, threading.Event())
    assert lifelines._listener is not None
    assert lifelines._listener.fileno() == -1


def test_a_lifeline_that_breaks_at_once_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = threading.Event()

    def sendall(data: bytes) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    line = SimpleNamespace(sendall=sendall, close=closed.set)
    monkeypatch.setattr(lifelines, "connected", lambda *args: line)
    with pytest.raises(Unavailable, match="lifeline broke"):
        PeerLiveness.of_rank(Place("gloo", "g", "127.0.0.1", 1, 2, 1, lifeline_port=1))
    assert closed.is_set()


class Posting(SimpleNamespace):
    """A stand-in for torch's group that allows weak references."""


@pytest.mark.parametrize("fails", [False, True])
def test_a_broadcast_does_not_wait_for_the_release_of_its_dropped_group(fails: bool) -> None:
    """Releasing torch's group last may take as long as an update, so another thread does it."""
    group, _ = nccl_group(BOUND_S)
    group._device = None
    there, ended, let_go = Posting(), threading.Event(), threading.Event()
    by: list[threading.Thread] = []

    def gone() -> None:
        by.append(threading.current_thread())
        let_go.set()

    def post(data: Any, options: Any) -> Any:
        group.drop("rank 2 is gone")
        ended.wait(0.2)  # it would come now
        if fails:
            raise RuntimeError("not connected")
        return SimpleNamespace(is_completed=lambda: True, wait=lambda *_: None)

    weakref.finalize(there, gone)
    there.broadcast, there.abort = post, ended.set
    group._torch_group = there
    del there
    failed: list[BaseException] = []
    try:
        group.broadcast(import_torch().zeros(4))
    except Unavailable as error:
        failed.append(error)
    assert let_go.wait(BOUND_S)
    assert bool(failed) == fails
    assert by == group._threads
    group.await_end(BOUND_S)


def test_the_manifest_of_an_update_that_failed_is_not_left_in_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    store = import_torch().distributed.HashStore()
    monkeypatch.setattr(Group, "drop", lambda self, why: None)
    group = group_with(store)
    sender = GroupSender()
    sender._group = group
    told = sender.open(Manifest(pack([("a", TensorSpec("F32", (1,)))], 64)))
    before = group.take(told["manifest_key"])
    assert before
    sender.close()
    with pytest.raises(Unavailable):
        group.take(told["manifest_key"])
    group.put("long", bytes(CHUNK_BYTES + 1))
    group.remove("long")
    group.remove("never there")
    assert store.num_keys() == 0


def test_the_digest_of_a_manifest_that_is_not_stored_is_refused() -> None:
    transport = GlooTransport(TransportContext())
    transport._group = group_with(None)
    request = {"manifest": {"buckets": [[["a", "F32", [1]]]]}, "manifest_digest": "blake3:" + "0" * 64}
    with pytest.raises(InvalidRequest) as refused:
        transport.open(request, "base")
    assert refused.value.facts["field"] == "transport.manifest_digest"


@pytest.mark.parametrize("host", ["192.0.2.1", "a..b"])
def test_an_address_of_another_machine_is_refused_before_a_group_is_left(host: str) -> None:
    sender = GroupSender(host=host, join_timeout_s=1.0)
    there = sender._group = group_with(None)
    with pytest.raises(InvalidRequest, match="can't listen") as refused:
        sender.form(lambda body: pytest.fail("the fleet was asked"))
    assert refused.value.facts["field"] == "options.host"
    assert sender._group is there
    assert not there.why_dropped


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

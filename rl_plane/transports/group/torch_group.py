"""A process group of a trainer (rank 0) and the workers of engines, in which packed buckets are broadcast.

Both halves use it. It is never torch's default group. gloo can't take back what was posted, so a group in which
anything fails is dropped, and a new one is formed with the processes that are left. `PeerLiveness` reports who dies or
gives up.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rl_plane._util.own_address import own_address
from rl_plane._util.tasks import never
from rl_plane.errors import DeadlineExceeded, EngineFailed, PlaneError, Unavailable, Unsupported
from rl_plane.protocol.trainer_groups import FORM_MARGIN_S
from rl_plane.protocol.versions import DigestAlgorithm
from rl_plane.transports.group.peer_liveness import STORE_SILENT, PeerLiveness, connected
from rl_plane.transports.group.rank_layout import FORM_AGAIN, Place
from rl_plane.transports.group.vllm_rendezvous import store_with_id
from rl_plane.transports.torch_calls import LOOK_S, first_line, gloo_options, has_ended, import_torch
from rl_plane.weights.read_ahead import host_memory

if TYPE_CHECKING:
    import torch

JOIN_TIMEOUT_S = 60.0
"""The time to form a group, in seconds. Its ranks come within a second or two, unless one has died or hangs."""
TAKE_S = 30.0
"""The time to read from the trainer's store, in seconds: a few MB."""
REMOVE_S = 5.0
"""The time to remove it from the store, in seconds. Only a store that hangs takes longer."""
CHUNK_BYTES = 4 << 20
"""The length of a chunk in the store, whose values may have 8 MB."""
MAX_CHUNKS = 64
AHEAD = 2
"""Buckets in memory on each side: one is packed or unpacked while the other is on its way."""
NCCL_ENVIRONMENT = {
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DESYNC_DEBUG": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
"""torch reads these when a group is made, so they apply to this group only.

The first makes a group without a watchdog. When a broadcast fails or exceeds the group's time-out, any group's watchdog
tells the heartbeat monitor of the process's first group, which is the engine's own, and that ends the process. This
module looks for errors and time itself. The other variables are for versions of torch whose watchdog runs all the same.
"""
_environment = threading.Lock()
ONE_GPU = "Duplicate GPU"
"""nccl's own words for two ranks on one GPU."""
DIGEST_BYTES = 80
"""The bytes after the last bucket if the manifest has no digests: the version's digest as ASCII, and then zeros. Only
zeros: there is no digest. A digest has at most 71 characters."""
MANIFEST_ALGORITHM: DigestAlgorithm = "blake3"
"""The hash of a stored manifest. A stranger who reaches the store could change it, so XXH3 would not do."""
MANIFEST_PREFIX = f"{MANIFEST_ALGORITHM}:"


MakeGroup = Callable[[Place, Any, float], Any]
"""Makes torch's process group of a place, a store and a time-out in seconds."""


class Group:
    """A group that is formed when it is made: the constructor blocks until every rank has joined, or until a time-out.

    Methods block, and are called one at a time. `drop` may be called from any thread, more than once.
    """

    def __init__(
        self,
        place: Place,
        join_timeout_s: float = JOIN_TIMEOUT_S,
        lifelines: PeerLiveness | None = None,
        make: MakeGroup | None = None,
    ) -> None:
        """Forms the group.

        Args:
            place: the rank's place in the group.
            join_timeout_s: the time in which every rank must join.
            lifelines: those of the trainer. They are closed with the group, and if no group is formed.
            make: makes torch's group; None for `make_torch_group`.
        """
        self.place = place
        self._make = make or make_torch_group
        self.why_dropped = ""
        """The reason why the group was dropped; empty while it is whole."""
        self._threads: list[threading.Thread] = []
        self._dropping = threading.Lock()
        self._posting = threading.Lock()
        """Held while an operation is posted, so that only the thread of `_bury` releases torch's group: that may take
        as long as an update."""
        self._lanes: list[torch.Tensor] = []
        self.silent: list[Group] = []
        """Further ranks of the same group in this process. They take part in each broadcast, into the same memory: it
        gets the same bytes from each."""
        self._under_way: dict[int, torch.Tensor] = {}
        """For nccl: memory by id to which a kernel may still write. torch would reuse released memory at once."""
        self._connected = False
        """True once nccl's ranks are connected: see `_connect`."""
        self._lifelines = PeerLiveness.of_rank(place, join_timeout_s) if lifelines is None else lifelines
        try:
            self._form_within(place, join_timeout_s)
        except BaseException:
            if self._lifelines is not None:
                self._lifelines.close()
            raise
        if self._lifelines is not None:
            self._start(self._watch)

    def _form_within(self, place: Place, join_timeout_s: float) -> None:
        """Forms the group on a thread of its own, since torch waits there without a bound.

        torch waits for a store that hangs, nccl for the ranks, and torch tries for the whole time to reach a trainer
        that has died.
        """
        ended = threading.Event()
        errors: list[Exception] = []

        def form() -> None:
            try:
                self._form(place, join_timeout_s)
            except Exception as error:
                errors.append(error)
            with self._dropping:
                ended.set()
            if self.why_dropped and not errors:
                self._bury()  # the constructor has given up

        self._start(form)
        bound_s, why = join_timeout_s + FORM_MARGIN_S, ""
        until = time.monotonic() + bound_s
        if self._lifelines is None:
            ended.wait(bound_s)
        else:
            why = self._lifelines.watch(
                place.group, lambda: ended.is_set() or time.monotonic() > until, LOOK_S, place.world_size
            )
        with self._dropping:
            if not ended.is_set():
                self.why_dropped = why or f"it was not formed within {bound_s:g} s"
        if self.why_dropped:
            raise self._broke()
        if errors:
            raise errors[0]

    def _form(self, place: Place, join_timeout_s: float) -> None:
        self._device = None if place.device is None else import_torch().device(place.device)
        try:
            self._store = connect_store(place, join_timeout_s)
            if place.rank and place.form == "plane":
                self._store.set("world_size", str(place.world_size))  # the trainer waits for this number
            self._torch_group: Any = self._make(place, self._store, join_timeout_s)
            if self._device is not None:
                self._connect(place)
        except RuntimeError as error:
            why = _said(error)
            if ONE_GPU in why:
                raise Unsupported(
                    f"nccl can't put two ranks on one GPU: {why}",
                    field="transport.backend",
                    fix="use ipc, or give each rank, the trainer's too, a GPU of its own",
                ) from error
            raise Unavailable(
                f"the group {place.group} was not formed within {join_timeout_s:g} s: {why}",
                field="transport.group",
                fix="look for a dead worker (rl-plane state), then call init_transport with a new group",
            ) from error

    def _connect(self, place: Place) -> None:
        """Connects nccl's ranks now, as gloo does.

        If the ranks connected in the first broadcast, a slow rank would look like a trainer that is slow to send. In a
        trainer's own group the ranks may connect in the first broadcast. Then nccl waits for rank 0 as long as the
        store's time-out, so this sets it to the update's time-out.
        """
        if place.form == "torch" and place.rendezvous == "torch":
            self._store.set_timeout(timedelta(seconds=place.timeout_s))
            return
        self._torch_group.eager_connect_single_device(self._device)
        self._connected = True
        if place.rendezvous == "vllm":  # its communicator does this once when it is made
            torch = import_torch()
            one = torch.zeros(1, device=self._device)
            self._torch_group.allreduce([one], torch.distributed.AllreduceOptions()).wait()

    # ---- long data that is no tensor ----

    def put(self, key: str, data: bytes) -> None:
        """Stores data under a key, for the other ranks to `take`."""
        chunks = [data[start : start + CHUNK_BYTES] for start in range(0, len(data), CHUNK_BYTES)]
        for number, chunk in enumerate(chunks):
            self._store.set(f"{key}/{number}", chunk)
        self._store.set(key, str(len(chunks)))

    def take(self, key: str) -> bytes:
        """Reads what was stored. Uses a thread of its own, since torch waits without a bound for a store that hangs."""
        taken: list[bytes] = []
        why = [f"it has not answered within {TAKE_S:g} s"]

        def take() -> None:
            try:
                store = self._store
                count = int(store.get(key)) if store.check([key]) else 0
                if not 0 < count <= MAX_CHUNKS:
                    raise ValueError(f"{count} chunks are stored, not 1 to {MAX_CHUNKS}")
                taken.append(b"".join(store.get(f"{key}/{number}") for number in range(count)))
            except (RuntimeError, ValueError) as error:
                why[0] = first_line(error)

        thread = threading.Thread(target=take, name="weight group", daemon=True)
        thread.start()
        thread.join(TAKE_S)
        if not taken:
            raise Unavailable(f"the trainer's store does not give {key!r}: {why[0]}", fix=FORM_AGAIN)
        return taken[0]

    def remove(self, key: str) -> None:
        """Removes what was stored, as far as that is possible within REMOVE_S."""

        def remove() -> None:
            with contextlib.suppress(RuntimeError, ValueError):
                if self._store.check([key]):
                    for number in range(int(self._store.get(key))):
                        self._store.delete_key(f"{key}/{number}")
                    self._store.delete_key(key)

        thread = threading.Thread(target=remove, name="weight group", daemon=True)
        thread.start()
        thread.join(REMOVE_S)

    # ---- broadcasting ----

    def lanes(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Host memory for buckets of these sizes, in turns. It stays for the next update, since touching new memory
        takes longer than filling it."""
        for number in range(min(AHEAD, len(sizes))):
            needed = max(sizes[number::AHEAD])
            if number == len(self._lanes):
                self._lanes.append(_bytes(needed))
            elif self._lanes[number].numel() < needed:
                self._lanes[number] = _bytes(needed)
        return self._lanes[: len(sizes)]

    def broadcast(self, data: torch.Tensor, cancelled: Callable[[], bool] = never) -> Broadcast:
        """Begins to send the trainer's bytes to every rank. `data` must not be touched before the Broadcast has ended.
        `cancelled` is called while the ranks of a trainer's own group connect."""
        import torch.distributed as dist

        options = dist.BroadcastOptions()
        options.rootRank = 0
        if not self.silent:
            return self._begin("broadcast", data, options, cancelled)
        # At the same time: nccl's first broadcast waits for all ranks.
        with ThreadPoolExecutor(len(self.silent), "weight group") as threads:
            others = [threads.submit(one.broadcast, data, cancelled) for one in self.silent]
            sent = self._begin("broadcast", data, options, cancelled)
            sent.others = [other.result() for other in others]
        return sent

    def barrier(self) -> Broadcast:
        """Begins a barrier. It ends when every rank has come to it, and so has everything."""
        import torch
        import torch.distributed as dist

        return self._begin("allreduce", torch.zeros(1, dtype=torch.uint8), dist.AllreduceOptions(), never)

    def _begin(self, what: str, data: torch.Tensor, options: Any, cancelled: Callable[[], bool]) -> Broadcast:
        options.asyncOp = True
        options.timeout = timedelta(seconds=self.place.timeout_s)
        with self._posting:
            if self._torch_group is None:
                raise self._broke()
            there, work = data, None
            try:
                if data.numel():
                    there = self._placed(data)
                    work = self._post(what, there, options, cancelled)
            except RuntimeError as error:
                self.drop(f"rank {self.place.rank} could not begin a {what}: {_said(error)}")
                raise self._broke() from error
        return Broadcast(self, work, data, there)

    def _placed(self, data: torch.Tensor) -> torch.Tensor:
        """The memory from or into which torch moves the bytes: a copy on the GPU for nccl, else `data` itself."""
        if self._device is None:
            return data
        if self.place.rank == 0:
            there = data.to(self._device, copy=True)
        else:
            there = import_torch().empty_like(data, device=self._device)
        self._under_way[id(there)] = there
        return there

    def _post(self, what: str, there: torch.Tensor, options: Any, cancelled: Callable[[], bool]) -> Any:
        """Posts an operation. While nccl still has to connect the ranks it runs on a thread, since nccl waits without a
        bound for a rank that does not come."""
        if self._device is None or self._connected:
            return getattr(self._torch_group, what)([there], options)
        torch_group, ended = self._torch_group, threading.Event()
        begun: list[Any] = []
        errors: list[Exception] = []

        def work() -> None:
            try:
                begun.append(getattr(torch_group, what)([there], options))
            except Exception as error:
                errors.append(error)
            ended.set()
            if self.why_dropped:
                _abort(torch_group)  # an abort has no effect before the ranks are connected

        self._start(work)
        until = time.monotonic() + self.place.timeout_s
        while not ended.wait(LOOK_S):
            self.check()
            if cancelled():
                raise self._given_up("the connecting of the ranks")
            if time.monotonic() > until:
                self.drop(f"rank {self.place.rank} has waited for the ranks to connect for too long")
                raise DeadlineExceeded(
                    f"the ranks did not connect within the update's {self.place.timeout_s:g} s", fix=FORM_AGAIN
                )
        self.check()
        if errors:
            raise errors[0]
        self._connected = True
        return begun[0]

    def wait(self, sent: Broadcast, what: str, deadline: float, cancelled: Callable[[], bool]) -> None:
        """Blocks until a broadcast has ended. After any error the group is dropped. `deadline`: monotonic seconds."""
        try:
            while not has_ended(sent.work, on_gpu=self._device is not None):
                self.check()
                if cancelled():
                    raise self._given_up(what)
                if time.monotonic() > deadline:
                    self.drop(f"rank {self.place.rank} has waited for {what} for too long")
                    raise DeadlineExceeded(
                        f"{what} did not come within the update's {self.place.timeout_s:g} s", fix=FORM_AGAIN
                    )
            sent.work.wait()
            if sent.there is not sent.data and self.place.rank:
                sent.data.copy_(sent.there)
        except RuntimeError as error:
            self.drop(f"rank {self.place.rank} broke off at {what}: {_said(error)}")
            raise self._broke() from error
        self._under_way.pop(id(sent.there), None)

    def _given_up(self, what: str) -> PlaneError:
        self.drop(f"rank {self.place.rank} gave up at {what}")
        return EngineFailed("staging was cancelled")

    def check(self) -> None:
        """Raises Unavailable if the group was dropped."""
        for one in (self, *self.silent):
            if one.why_dropped:
                raise one._broke()

    def _broke(self) -> PlaneError:
        return Unavailable(
            f"the group {self.place.group} broke: {self.why_dropped}", field="transport.group", fix=FORM_AGAIN
        )

    # ---- the end of the group ----

    def drop(self, why: str) -> None:
        """Ends the group, and sends the other ranks the reason. Returns at once."""
        with self._dropping:
            if self.why_dropped:
                return
            self.why_dropped = why
        if self._lifelines is not None:
            self._lifelines.end(why)
        self._start(self._bury)
        for one in self.silent:
            one.drop(why)

    def await_end(self, timeout_s: float) -> None:
        """Waits after `drop`, before the process ends: torch aborts a process whose group is still being taken down."""
        until = time.monotonic() + timeout_s
        for thread in [thread for one in (self, *self.silent) for thread in one._threads]:
            thread.join(max(0.0, until - time.monotonic()))

    def _start(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name="weight group", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _bury(self) -> None:
        """Releases torch's group. gloo's waits until what was posted has ended or timed out, which only this thread
        does. nccl's kernels may write until it is aborted."""
        with self._posting:
            torch_group, self._torch_group = self._torch_group, None
        _abort(torch_group)
        self._under_way.clear()
        del torch_group

    def _watch(self) -> None:
        assert self._lifelines is not None
        if why := self._lifelines.watch(
            self.place.group, lambda: self.why_dropped, world_size=self.place.world_size
        ):
            self.drop(why)
        self._lifelines.close()


class Broadcast:
    """An operation of the group that is under way."""

    def __init__(self, group: Group, work: Any, data: torch.Tensor, there: torch.Tensor) -> None:
        """`there`: the copy of `data` on nccl's device, or `data` itself. `work`: torch's handle; None if there are no
        bytes."""
        self._group = group
        self.work = work
        self.data = data
        self.there = there
        self.others: list[Broadcast] = []
        """This broadcast for the silent ranks of the group."""

    def wait(self, what: str, deadline: float, cancelled: Callable[[], bool] = never) -> None:
        if self.work is not None:
            self._group.wait(self, what, deadline, cancelled)
        try:
            for other in self.others:
                other.wait(what, deadline, cancelled)
        except PlaneError as error:
            self._group.drop(error.message)
            raise


def formed_together(places: Sequence[Place], join_timeout_s: float) -> Group:
    """Forms a group in which this process has several ranks. Returns the first one, with the others as its silent
    ranks."""
    if len(places) == 1:
        return Group(places[0], join_timeout_s)
    with ThreadPoolExecutor(len(places), "weight group") as threads:
        joining = [threads.submit(Group, place, join_timeout_s) for place in places]
        errors = [error for one in joining if (error := one.exception()) is not None]
    groups = [one.result() for one in joining if one.exception() is None]
    if errors:
        for group in groups:
            group.drop(f"rank {group.place.rank} is alone: another one of this worker did not join")
        raise errors[0]
    groups[0].silent = groups[1:]
    return groups[0]


# ---- torch ----


def gpu(device: str | None) -> str:
    """Returns the device if nccl can use it, else raises Unsupported."""
    if device is None or not device.startswith("cuda"):
        raise Unsupported(
            "nccl needs the weights on a GPU, in every rank", field="transport.backend", fix="use gloo"
        )
    if not import_torch().distributed.is_nccl_available():
        raise Unsupported("this torch is built without nccl", field="transport.backend", fix="use gloo")
    return device


def _bytes(nbytes: int) -> Any:
    torch = import_torch()
    return (
        torch.frombuffer(host_memory(nbytes), dtype=torch.uint8) if nbytes else torch.empty(0, dtype=torch.uint8)
    )


def digest_tensor() -> torch.Tensor:
    """Memory for the version's digest."""
    made: torch.Tensor = _bytes(DIGEST_BYTES)
    return made


def make_torch_group(place: Place, store: Any, timeout_s: float) -> Any:
    """Makes torch's process group, which for gloo connects every rank, within the time-out."""
    dist = import_torch().distributed
    timeout = timedelta(seconds=timeout_s)
    if place.backend == "gloo":
        how: Any = timeout
        if not os.environ.get("GLOO_SOCKET_IFNAME"):
            how = gloo_options(own_address(place.master_address, place.master_port), timeout)
        return dist.ProcessGroupGloo(store, place.rank, place.world_size, how)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    with _environment:
        before = {name: os.environ.get(name) for name in NCCL_ENVIRONMENT}
        os.environ.update(NCCL_ENVIRONMENT)
        try:
            return dist.ProcessGroupNCCL(store, place.rank, place.world_size, options)
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def connect_store(place: Place, timeout_s: float) -> Any:
    """Connects to the trainer's store, within the prefix of the group."""
    dist = import_torch().distributed
    address = (place.master_address, place.master_port)
    if place.rendezvous == "vllm":
        return store_with_id(dist, address, place.world_size, timeout_s)
    if place.form == "torch":
        # Built as in torch's rendezvous and `_new_process_group_helper`, which wait for all ranks and add two prefixes.
        store = dist.TCPStore(*address, place.world_size, False, timedelta(seconds=timeout_s))
        for prefix in (place.group, f"{place.group}/", "cpu/" if place.backend == "gloo" else "cuda/"):
            store = dist.PrefixStore(prefix, store)
        return store
    connected(address, "master_port", STORE_SILENT).close()  # torch would try for long
    store = dist.TCPStore(*address, None, False, timedelta(seconds=timeout_s), wait_for_workers=False)
    return dist.PrefixStore(place.group, store)


def _abort(torch_group: Any) -> None:
    with contextlib.suppress(RuntimeError):
        torch_group.abort()


def _said(error: Exception) -> str:
    """The first line of torch's message, and nccl's own message, which is further down."""
    words = str(error).partition("Last error:")[2].strip()
    return "; ".join(line for line in (first_line(error), words.split("\n")[0][:300]) if line)

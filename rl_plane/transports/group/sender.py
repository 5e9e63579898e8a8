"""The sending half of `gloo` and `nccl`: rank 0 of a group with every rank of the fleet.

sender = GroupSender(host="10.0.0.1")
sender.form(lambda body: client.run("init_transport", body))   # again if the fleet has changed
transport = sender.open(manifest)
client.run("prepare_weights_update", {"transport": transport, "fingerprint": sender.fingerprint})
for number in fill(manifest, tensors, sender.buffer, digests):
    sender.send(number)
sender.finish(digests)
client.run("complete_weights_update", {"num_buckets": len(manifest.buckets)})
sender.close()
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Literal

from rl_plane.errors import DeadlineExceeded, InvalidRequest, PlaneError, Unavailable
from rl_plane.protocol.hashers import hex_digest
from rl_plane.protocol.versions import HostTensor
from rl_plane.transports.base import Sender, SenderContext, SharingSender
from rl_plane.transports.group.peer_liveness import PeerLiveness
from rl_plane.transports.group.rank_layout import FORM_AGAIN, RECEIVE_TIMEOUT_S, Place
from rl_plane.transports.group.store_listener import StoreListener
from rl_plane.transports.group.torch_group import (
    AHEAD,
    DIGEST_BYTES,
    JOIN_TIMEOUT_S,
    MANIFEST_ALGORITHM,
    MANIFEST_PREFIX,
    Broadcast,
    Group,
    digest_tensor,
    gpu,
)
from rl_plane.transports.packing import Tensor, raw_bytes
from rl_plane.transports.torch_calls import LOOK_S, import_torch
from rl_plane.weights.manifest import Manifest

if TYPE_CHECKING:
    import torch

END_S = 5.0
"""Seconds to wait for the end of a group. Operations that a dead peer left posted take longer, and are not awaited."""


class Joining:
    """The trainer's own rank on its way into a group."""

    def __init__(
        self,
        body: dict[str, Any],
        join: Callable[[], Group],
        withdrawn: threading.Event,
        join_timeout_s: float,
    ) -> None:
        """`body`: that of `init_transport`. `join` runs on a thread, until `withdrawn` is set."""
        self.body = body
        self._withdrawn = withdrawn
        self._bound_s = 2 * join_timeout_s
        self._joined: list[Group | PlaneError] = []

        def work() -> None:
            try:
                self._joined.append(join())
            except PlaneError as error:
                self._joined.append(error)

        self._thread = threading.Thread(target=work, name="weight group", daemon=True)
        self._thread.start()

    def group(self) -> Group:
        """Waits for the group."""
        self._thread.join(self._bound_s)
        if not self._joined:
            raise DeadlineExceeded("the trainer's own rank has not joined the group", fix=FORM_AGAIN)
        if isinstance(self._joined[0], PlaneError):
            raise self._joined[0]
        return self._joined[0]

    def withdraw(self) -> None:
        """Gives the group up."""
        self._withdrawn.set()
        self._thread.join(self._bound_s)
        for one in self._joined:
            if isinstance(one, Group):
                one.drop("some rank did not join")


class GroupSender(Sender):
    """Sends by a group that `form` has formed. The store by which a group forms lives until `destroy`, and takes new
    connections only while a group forms."""

    bucket_bytes = 32 << 20
    """Each side has two buckets in memory. Larger ones are not faster."""

    def __init__(
        self,
        backend: Literal["gloo", "nccl"] = "gloo",
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        timeout_s: float = RECEIVE_TIMEOUT_S,
        join_timeout_s: float = JOIN_TIMEOUT_S,
        device: str = "cuda:0",
    ) -> None:
        """Makes the sender.

        Args:
            backend: the kind of group.
            host: the address at which workers reach this process.
            port: the port of the group's store; 0 takes any free one.
            timeout_s: the time for a whole update, in seconds.
            join_timeout_s: the time to form a group, in seconds.
            device: the trainer's own GPU, for nccl.

        Raises:
            Unsupported: torch is missing, or nccl can't be used.
        """
        import_torch()
        self.backend = backend
        self._device = gpu(_here(device)) if backend == "nccl" else None
        self.slow = False if backend == "nccl" else None
        """With nccl weights go from GPU to GPU. To compare them they would have to come to the host first."""
        self.fingerprint = ""
        """The fingerprint of the fleet that is in the group; empty before."""
        self._host = host
        self._port = port
        self._timeout_s = timeout_s
        self._join_timeout_s = join_timeout_s
        self._store: Any = None
        self._listener: StoreListener | None = None
        self._group: Group | None = None
        self._manifest: Manifest | None = None
        self._manifest_key = ""
        self._places: list[torch.Tensor] = []
        self._lent: dict[int, torch.Tensor] = {}
        self._under_way: dict[int, Broadcast] = {}
        self._deadline = 0.0

    @property
    def port(self) -> int:
        """The port of the store, once a group was formed."""
        return int(self._store.port)

    @property
    def formed(self) -> bool:
        """True if there is a group, and it was not dropped."""
        return self._group is not None and not self._group.why_dropped

    # ---- the group ----

    def form(self, init: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
        """Forms a group, and blocks until every rank has joined. `init(body)` runs the op `init_transport`."""
        joining = self.begin_joining()
        try:
            reply = init(joining.body)
            self._join_with(joining)
        except BaseException:
            self._withdraw(joining)
            raise
        self.fingerprint = str(reply["fingerprint"])

    def begin_joining(self) -> Joining:
        """Lets the store listen, and the trainer's own rank join a new group, on a thread."""
        lifelines = PeerLiveness.of_trainer(self._host)
        try:
            body = {**self._announce(), "lifeline_port": lifelines.port, "secret": lifelines.secret}
        except BaseException:
            lifelines.close()
            raise
        assert self._listener is not None, "it was announced"
        self._listener.open()
        withdrawn = threading.Event()
        return Joining(
            body, lambda: self._join(body["group"], lifelines, withdrawn), withdrawn, self._join_timeout_s
        )

    def _join_with(self, joining: Joining) -> None:
        """Waits until the group is formed, and sends by it from now on."""
        self._group = joining.group()
        if self._listener is not None:
            self._listener.shut()

    def _withdraw(self, joining: Joining) -> None:
        joining.withdraw()
        if self._listener is not None:
            self._listener.shut()

    def _announce(self) -> dict[str, Any]:
        """Lets the store listen, drops the group before, and returns the body of `init_transport`."""
        self.leave()
        if self._listener is None:
            self._listener = StoreListener(self._host, self._port, self._join_timeout_s)
            self._store = self._listener.store
        return {
            "backend": self.backend,
            "group": f"weights-{secrets.token_hex(4)}",
            "master_address": self._host,
            "master_port": self._listener.port,
            "timeout_s": self._timeout_s,
        }

    def _join(self, name: str, lifelines: PeerLiveness, withdrawn: threading.Event) -> Group:
        try:
            size = self._world_size(name, withdrawn)
            place = Place(
                self.backend, name, self._host, self._store.port, size, 0, self._timeout_s, device=self._device
            )
            return Group(place, self._join_timeout_s, lifelines)
        except BaseException:
            lifelines.close()
            raise

    def _world_size(self, name: str, withdrawn: threading.Event) -> int:
        """The group's size, which the first worker writes into the store."""
        key, until = f"{name}/world_size", time.monotonic() + self._join_timeout_s
        try:
            while not self._store.check([key]):
                if withdrawn.wait(LOOK_S) or time.monotonic() > until:
                    raise DeadlineExceeded(f"no worker has joined the group {name}", fix=FORM_AGAIN)
            return int(self._store.get(key))
        except (RuntimeError, ValueError) as error:
            raise Unavailable(
                f"the store of the group {name} can't be read: {str(error)[:300]}", fix=FORM_AGAIN
            ) from error

    def leave(self) -> None:
        """Drops the group. The store continues to listen."""
        group, self._group = self._group, None
        if group is not None:
            group.drop("the trainer left it")

    def destroy(self) -> None:
        group = self._group
        self.close()
        self.leave()
        if group is not None:
            group.await_end(END_S)
        listener, self._listener, self._store = self._listener, None, None
        if listener is not None:
            listener.close()

    # ---- one update ----

    def open(self, manifest: Manifest) -> dict[str, Any]:
        group = self._whole()
        sizes = [bucket.nbytes for bucket in manifest.buckets]
        self._manifest = manifest
        raw = json.dumps(manifest.to_wire()).encode()
        self._manifest_key = f"manifest-{secrets.token_hex(4)}"
        group.put(self._manifest_key, raw)
        self._places = group.lanes(sizes)
        self._lent, self._under_way = {}, {}
        self._deadline = time.monotonic() + self._timeout_s
        return {
            "backend": self.backend,
            "group": group.place.group,
            "manifest_key": self._manifest_key,
            "manifest_digest": MANIFEST_PREFIX + hex_digest(raw, MANIFEST_ALGORITHM),
            "num_buckets": len(sizes),
        }

    def lend(self, tensors: Mapping[str, Tensor]) -> Collection[int]:
        """Sends a tensor in host memory that fills a bucket from where it lies."""
        assert self._manifest is not None, "open comes first"
        for number, bucket in enumerate(self._manifest.buckets):
            tensor = tensors.get(bucket.tensors[0].name) if len(bucket.tensors) == 1 else None
            if isinstance(tensor, HostTensor) or (tensor is not None and tensor.device.type == "cpu"):
                data = raw_bytes(tensor)
                if not data.readonly and 0 < data.nbytes == bucket.nbytes:
                    self._lent[number] = import_torch().frombuffer(data, dtype=import_torch().uint8)
        return set(self._lent)

    def buffer(self, number: int) -> memoryview:
        self._wait(number - AHEAD)
        return memoryview(self._place(number).numpy())

    def send(self, number: int) -> None:
        self._wait(number - AHEAD)  # for a lent bucket `buffer` is not called
        self._under_way[number] = self._whole().broadcast(self._place(number))

    def finish(self, digests: Mapping[str, str] | None) -> None:
        group, manifest = self._whole(), self._manifest
        assert manifest is not None, "open comes first"
        for number in sorted(self._under_way):
            self._wait(number)
        if manifest.tensor_digests is None:
            self._state_digest(group, None if digests is None else manifest.digested(digests).digest)
        group.barrier().wait("the last receiver", self._deadline)
        group.remove(self._manifest_key)
        self._forget()

    def _state_digest(self, group: Group, digest: str | None) -> None:
        data = digest_tensor()
        if digest is not None:
            memoryview(data.numpy())[:] = digest.encode().ljust(DIGEST_BYTES, b"\0")
        group.broadcast(data).wait("the digest", self._deadline)

    def close(self) -> None:
        """Ends the update. If it was not finished, the group is dropped, since what was posted can't be taken back."""
        if self._manifest is not None:
            if self._group is not None:
                self._group.remove(self._manifest_key)
            self._forget()
            self.leave()

    def _forget(self) -> None:
        self._manifest, self._places, self._lent, self._under_way = None, [], {}, {}

    def _place(self, number: int) -> torch.Tensor:
        assert self._manifest is not None, "open comes first"
        if number in self._lent:
            return self._lent[number]
        return self._places[number % AHEAD][: self._manifest.buckets[number].nbytes]

    def _wait(self, number: int) -> None:
        sent = self._under_way.pop(number, None)
        if sent is not None:
            assert self._manifest is not None
            sent.wait(f"bucket {number + 1} of {len(self._manifest.buckets)}", self._deadline)

    def _whole(self) -> Group:
        if self._group is None:
            raise Unavailable("there is no group with the fleet", fix="form it with sender.form")
        self._group.check()
        return self._group


class FleetGroupSender(GroupSender, SharingSender):
    """A GroupSender that forms its group when it must, before each update. For shares there is a group for each rank of
    the trainer that owns tensors, in which that rank is rank 0."""

    def __init__(self, backend: Literal["gloo", "nccl"], context: SenderContext) -> None:
        device = ("device",) if backend == "nccl" else ()
        context.check_options(backend, "host", "port", "timeout_s", *device)
        host, port = context.address()
        timeout_s = context.options.get("timeout_s", RECEIVE_TIMEOUT_S)
        if not isinstance(timeout_s, (int, float)) or not timeout_s > 0:
            raise InvalidRequest(
                f"timeout_s is {timeout_s!r}", field="options.timeout_s", fix="give seconds, above 0"
            )
        at = context.options.get("device", _own_gpu() if context.rank else "cuda:0")
        super().__init__(backend, host=host, port=port, timeout_s=timeout_s, device=at)
        self._run = context.run
        self._joining: Joining | None = None
        self._owners: frozenset[int] = frozenset()
        """The trainer's ranks whose groups were formed together with this one. Known on rank 0."""

    def open(self, manifest: Manifest) -> dict[str, Any]:
        now = self._run("workers", {})["fingerprint"]  # ask first: another trainer may form its group meanwhile
        if not self.formed or self.fingerprint != now:
            self._owners = frozenset()
            self.form(lambda body: self._run("init_transport", body))
        return super().open(manifest)

    def plan_shares(self, manifests: Mapping[int, Manifest]) -> dict[str, Any]:
        now, owners = self._run("workers", {})["fingerprint"], frozenset(manifests)
        whole = self.formed and self.fingerprint == now and self._owners == owners
        self._owners = owners
        return {"form": not whole}

    def announce(self, plan: Mapping[str, Any]) -> dict[str, Any]:
        if not plan["form"]:
            return {}
        if self._joining is not None:
            self._withdraw(self._joining)
        self._joining = self.begin_joining()
        return self._joining.body

    def assemble(self, plan: Mapping[str, Any], offers: Mapping[int, dict[str, Any]]) -> None:
        if plan["form"]:
            common = {"backend": self.backend, "timeout_s": self._timeout_s}
            shares = [{key: value for key, value in one.items() if key not in common} for one in offers.values()]
            self.fingerprint = str(self._run("init_transport", {**common, "shares": shares})["fingerprint"])

    def open_share(self, rank: int, manifest: Manifest, plan: Mapping[str, Any]) -> dict[str, Any]:
        joining = self._joining
        if joining is not None:
            self._join_with(joining)
            self._joining = None
        if not self.formed:
            raise InvalidRequest("the group of this share broke", field="transport.group", fix=FORM_AGAIN)
        return super().open(manifest)

    def close(self) -> None:
        joining, self._joining = self._joining, None
        if joining is not None:
            self._withdraw(joining)
        super().close()


def _own_gpu() -> str:
    """The current GPU of this rank, by torch's notation."""
    torch = import_torch()
    return f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cuda:0"


def _here(device: object) -> str | None:
    """Returns the device if it is one of this machine's GPUs; None if there is no GPU."""
    torch = import_torch()
    known = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    if known and device not in known:
        raise InvalidRequest(
            f"device is {str(device)[:64]!r}", field="options.device", fix=f"use one of {', '.join(known)}"
        )
    return str(device) if known else None


def build_gloo(context: SenderContext) -> FleetGroupSender:
    """Makes the gloo sender. Options: `host`, `port` (see `SenderContext.address`), `timeout_s` (a whole update)."""
    return FleetGroupSender("gloo", context)


def build_nccl(context: SenderContext) -> FleetGroupSender:
    """Makes the nccl sender. Options: those of gloo, and `device`, the trainer's GPU (default `cuda:0`)."""
    return FleetGroupSender("nccl", context)

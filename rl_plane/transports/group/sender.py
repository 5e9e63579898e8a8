"""The trainer's half of `gloo` and `nccl`: rank 0 of a group with every rank of the fleet.

sender = GroupSender(host="10.0.0.1")
await ensure_group(sender, client)          # again before each update: it forms the group anew when it must
transport = sender.open(manifest)
await client.run("prepare_weights_update", {"transport": transport, "fingerprint": sender.fingerprint})
for number in fill(manifest, tensors, sender.buffer, digests):
    sender.send(number)
sender.finish(digests)
await client.run("complete_weights_update", {"num_buckets": len(manifest.buckets)})
sender.close()
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from blake3 import blake3

from rl_plane.errors import DeadlineExceeded, InvalidRequest, PlaneError, Unavailable
from rl_plane.protocol.versions import DIGEST_PREFIX, HostTensor
from rl_plane.transports.base import LendingSender, PushingSender, SenderContext
from rl_plane.transports.group.peer_liveness import PeerLiveness
from rl_plane.transports.group.rank_layout import FORM_AGAIN, RECEIVE_TIMEOUT_S, Place
from rl_plane.transports.group.torch_group import (
    AHEAD,
    JOIN_TIMEOUT_S,
    LOOK_S,
    Broadcast,
    Group,
    digest_tensor,
    gpu,
    import_torch,
)
from rl_plane.transports.packing import Tensor, raw_bytes
from rl_plane.weights.manifest import Manifest

if TYPE_CHECKING:
    import torch

END_S = 5.0
"""For a group to be taken down. What a dead peer left posted takes longer, and is not waited for."""


class GroupSender(PushingSender, LendingSender):
    """A Sender. The store by which a group forms listens at `host`:`port` (0: any) for as long as this lives."""

    bucket_bytes = 32 << 20
    """Each side keeps two of them; larger ones are no faster."""

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
        """`host`: as the workers reach this process. `timeout_s`: of a whole update. `device`: the trainer's own, for
        nccl."""
        import_torch()  # or it is Unsupported
        self.backend = backend
        self._device = gpu(_here(device)) if backend == "nccl" else None
        self.slow = False if backend == "nccl" else None
        """From GPU to GPU: to be compared, weights would have to come to the host first."""
        self.fingerprint = ""
        """Of the fleet that is in the group."""
        self._host = host
        self._port = port
        self._timeout_s = timeout_s
        self._join_timeout_s = join_timeout_s
        self._store: Any = None
        self._group: Group | None = None
        self._manifest: Manifest | None = None
        self._manifest_key = ""
        self._places: list[torch.Tensor] = []
        self._lent: dict[int, torch.Tensor] = {}
        self._under_way: dict[int, Broadcast] = {}
        self._deadline = 0.0

    @property
    def port(self) -> int:
        """Of the store, once a group was formed."""
        return int(self._store.port)

    @property
    def formed(self) -> bool:
        return self._group is not None and not self._group.why_dropped

    # ---- the group ----

    def form(self, init: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
        """`init(body)` asks the fleet for `init_transport`, and returns its reply. Blocks until all have joined."""
        lifelines = PeerLiveness.of_trainer(self._host)
        try:
            body = {**self._announce(), "lifeline_port": lifelines.port}
        except BaseException:
            lifelines.close()
            raise
        withdrawn = threading.Event()
        joined: list[Group | PlaneError] = []

        def join() -> None:
            try:
                joined.append(self._join(body["group"], lifelines, withdrawn))
            except PlaneError as error:
                joined.append(error)

        joining = threading.Thread(target=join, name="weight group", daemon=True)
        joining.start()
        try:
            reply = init(body)
        except BaseException:
            withdrawn.set()
            joining.join(2 * self._join_timeout_s)
            for one in joined:
                if isinstance(one, Group):
                    one.drop("it was not formed by all")
            raise
        joining.join(2 * self._join_timeout_s)
        group = joined[0] if joined else DeadlineExceeded("this process has not joined the group", fix=FORM_AGAIN)
        if isinstance(group, PlaneError):
            raise group
        self._group, self.fingerprint = group, str(reply["fingerprint"])

    def _announce(self) -> dict[str, Any]:
        """The store listens from here on. A group that there was is dropped."""
        dist = import_torch().distributed
        self.leave()
        if self._store is None:
            timeout = timedelta(seconds=self._join_timeout_s)
            try:
                self._store = dist.TCPStore(self._host, self._port, None, True, timeout, wait_for_workers=False)
            except RuntimeError as error:
                raise InvalidRequest(
                    f"can't listen at {self._host}:{self._port}: {str(error)[:300]}",
                    field="options.port",
                    fix="give an address of this machine (options.host), and a free port or 0 (options.port)",
                ) from error
        return {
            "backend": self.backend,
            "group": f"weights-{secrets.token_hex(4)}",
            "master_address": self._host,
            "master_port": self._store.port,
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
        """Once a worker says how many ranks there are."""
        key, until = f"{name}/world_size", time.monotonic() + self._join_timeout_s
        try:
            while not self._store.check([key]):
                if withdrawn.wait(LOOK_S) or time.monotonic() > until:
                    raise DeadlineExceeded(f"no worker came to the group {name}", fix=FORM_AGAIN)
            return int(self._store.get(key))
        except (RuntimeError, ValueError) as error:
            raise Unavailable(
                f"the store of the group {name} can't be read: {str(error)[:300]}", fix=FORM_AGAIN
            ) from error

    def leave(self) -> None:
        """Drops the group; the store goes on listening."""
        group, self._group = self._group, None
        if group is not None:
            group.drop("the trainer left it")

    def destroy(self) -> None:
        group = self._group
        self.close()
        self.leave()
        if group is not None:
            group.await_end(END_S)
        self._store = None

    # ---- one update ----

    def open(self, manifest: Manifest) -> dict[str, Any]:
        group = self._whole()
        sizes = [bucket.nbytes for bucket in manifest.buckets]
        self._manifest = manifest
        told = json.dumps(manifest.to_wire()).encode()
        self._manifest_key = f"manifest-{secrets.token_hex(4)}"
        group.put(self._manifest_key, told)
        self._places = group.lanes(sizes)
        self._lent, self._under_way = {}, {}
        self._deadline = time.monotonic() + self._timeout_s
        return {
            "backend": self.backend,
            "group": group.place.group,
            "manifest_key": self._manifest_key,
            "manifest_digest": DIGEST_PREFIX + blake3(told).hexdigest(),
            "num_buckets": len(sizes),
        }

    def lend(self, tensors: Mapping[str, Tensor]) -> Collection[int]:
        """In host memory, a tensor that fills a bucket is sent from where it lies."""
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
        self._wait(number - AHEAD)  # what is lent asks for no buffer
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
            memoryview(data.numpy())[:] = bytes.fromhex(digest.removeprefix(DIGEST_PREFIX))
        group.broadcast(data).wait("the digest", self._deadline)

    def close(self) -> None:
        """What was not finished can't be taken back: the group is formed anew for the next update."""
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
            raise Unavailable(
                "there is no group with the fleet", fix="form it: await ensure_group(sender, client)"
            )
        self._group.check()
        return self._group


class FleetGroupSender(GroupSender):
    """Forms its group by itself."""

    def __init__(self, backend: Literal["gloo", "nccl"], context: SenderContext) -> None:
        device = ("device",) if backend == "nccl" else ()
        context.check_options(backend, "host", "port", "timeout_s", *device)
        host, port = context.address()
        timeout_s = context.options.get("timeout_s", RECEIVE_TIMEOUT_S)
        if not isinstance(timeout_s, (int, float)) or not timeout_s > 0:
            raise InvalidRequest(f"timeout_s is {timeout_s!r}", field="options.timeout_s", fix="give some seconds")
        at = context.options.get("device", "cuda:0")
        super().__init__(backend, host=host, port=port, timeout_s=timeout_s, device=at)
        self._run = context.run

    def open(self, manifest: Manifest) -> dict[str, Any]:
        now = self._run("workers", {})["fingerprint"]  # first: another trainer may form its group meanwhile
        if not self.formed or self.fingerprint != now:
            self.form(lambda body: self._run("init_transport", body))
        return super().open(manifest)


def _here(device: object) -> str | None:
    """If it is one of this machine's."""
    torch = import_torch()
    known = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    if known and device not in known:
        raise InvalidRequest(
            f"device is {str(device)[:64]!r}", field="options.device", fix=f"use one of {', '.join(known)}"
        )
    return str(device) if known else None


def build_gloo(context: SenderContext) -> FleetGroupSender:
    """Options: see `SenderContext.address`; `timeout_s`, of a whole update."""
    return FleetGroupSender("gloo", context)


def build_nccl(context: SenderContext) -> FleetGroupSender:
    """As `build_gloo`; `device`, the trainer's: `cuda:0`."""
    return FleetGroupSender("nccl", context)

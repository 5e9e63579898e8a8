"""The sending half of `nixl`: weights stay in the trainer's memory, and engines pull them.

The sender keeps the committed version in registered memory. Receivers pull the next version from the trainer's own
tensors, if these stay unchanged during the update; else it is packed beside the committed one. A slow or dead receiver
costs the others nothing. A worker that comes late, to heal, finds the committed version as long as the trainer lives.
"""

from __future__ import annotations

import ctypes
import logging
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from rl_plane.errors import InvalidRequest
from rl_plane.protocol.versions import HostTensor
from rl_plane.transports.base import SenderContext, SharingSender
from rl_plane.transports.nixl.metadata_server import LEAVE_S, MetadataServer
from rl_plane.transports.nixl.tcp_reads import Region
from rl_plane.transports.nixl.wire import BACKEND, RegisteredMemory, is_ours, make_agent
from rl_plane.transports.packing import Tensor, raw_bytes, spec_of
from rl_plane.weights.manifest import Manifest, PackedBucket

log = logging.getLogger("rl_plane.transports.nixl.sender")


@dataclass(frozen=True, slots=True)
class _Loan:
    """Memory of the trainer, registered as long as the trainer lends the same tensors."""

    tensors: Mapping[str, HostTensor]
    regions: Sequence[Region]
    registered: Any


@dataclass(slots=True)
class _Version:
    """One version, and the memory from which it is pulled."""

    manifest: Manifest
    secret: str
    lent: Mapping[int, Sequence[Region]] = field(default_factory=dict)
    """For each bucket that is read in place, the memory of its tensors."""
    area: RegisteredMemory | None = None
    """The memory of the other buckets. None: no bucket is packed yet."""
    offered: Manifest | None = None
    """The manifest with its digests, once the version can be pulled."""

    @property
    def offsets(self) -> Mapping[int, int]:
        """The offset of each packed bucket in `area`."""
        found, end = {}, 0
        for number, bucket in enumerate(self.manifest.buckets):
            if number not in self.lent:
                found[number] = end
                end += bucket.nbytes
        return found

    @property
    def packed_bytes(self) -> int:
        return sum(bucket.nbytes for number, bucket in enumerate(self.manifest.buckets) if number not in self.lent)

    def view(self, number: int) -> memoryview:
        assert self.area is not None
        return self.area.view(self.offsets[number], self.manifest.buckets[number].nbytes)

    def places(self) -> list[Sequence[Region]]:
        offsets = self.offsets
        at = self.area.address if self.area is not None else 0
        return [
            self.lent[number] if number in self.lent else [(at + offsets[number], bucket.nbytes)]
            for number, bucket in enumerate(self.manifest.buckets)
        ]


class NixlSender(SharingSender):
    """Lets receivers pull a version once it is finished, and keeps what is committed."""

    backend = BACKEND
    receivers_from = "finish"
    bucket_bytes = 32 << 20
    """A receiver has two buckets in memory."""

    def __init__(
        self, host: str = "127.0.0.1", port: int = 0, *, keep_copy: bool = True, leave_s: float = LEAVE_S
    ) -> None:
        """Makes the sender.

        Args:
            host: this machine's address, as the workers reach it.
            port: the port at which receivers ask; 0 takes any free one.
            keep_copy: False keeps no committed version, so workers that come late heal from one another.
            leave_s: the time in seconds for receivers to leave memory that is used again.
        """
        self._agent = make_agent(host)
        self._server = MetadataServer(host, port, leave_s=leave_s)
        self._keep_copy = keep_copy
        self._free: list[RegisteredMemory] = []
        self._kept: dict[str | None, list[_Version]] = {}
        """For each target (None: base weights), the full version and its deltas."""
        self._loan: _Loan | None = None
        self._opened: _Version | None = None

    @property
    def lent_bytes(self) -> int:
        """The trainer's memory that is registered, in bytes."""
        return sum(nbytes for _, nbytes in self._loan.regions) if self._loan is not None else 0

    @property
    def kept_bytes(self) -> int:
        """The memory of the committed versions, which workers can fetch, in bytes."""
        return sum(one.nbytes for one in self._kept_areas())

    @property
    def own_bytes(self) -> int:
        """All memory that the sender has allocated, in bytes: kept, of the open version, or free for the next."""
        opened = self._opened.area if self._opened is not None else None
        areas = [*self._free, *([] if opened is None else [opened])]
        return self.kept_bytes + sum(one.nbytes for one in areas)

    def open(self, manifest: Manifest) -> dict[str, Any]:
        self._live_agent()
        self.close()
        self._opened = _Version(manifest, secrets.token_hex(16))
        return self._server.transport(self._opened.secret)

    def lend(self, tensors: Mapping[str, Tensor]) -> Collection[int]:
        version = self._open_version()
        tensors = _in_host_memory(tensors)
        whole = {
            number: bucket
            for number, bucket in enumerate(version.manifest.buckets)
            if all(placed.name in tensors and not tensors[placed.name].data.readonly for placed in bucket.tensors)
        }
        lent = {number: _regions(bucket, tensors) for number, bucket in whole.items()}
        regions = [region for bucket in lent.values() for region in bucket if region[1]]
        if not regions:
            return ()
        if self._loan is not None and self._loan.regions == regions:
            registered = self._loan.registered
        else:
            self._return_loan()
            try:
                registered = self._live_agent().register_memory(_described(regions), "DRAM")
            except Exception as error:  # nixl's errors have no common base
                log.warning("the tensors are packed, because their memory can't be registered: %s", error)
                return ()
        named = {placed.name: tensors[placed.name] for bucket in whole.values() for placed in bucket.tensors}
        self._loan = _Loan(named, regions, registered)
        version.lent = lent
        return lent.keys()

    def buffer(self, number: int) -> memoryview:
        version = self._open_version()
        if not version.lent:
            self._return_loan()  # first, to make room in memory
        return self._with_area(version).view(number)

    def send(self, number: int) -> None:
        """Does nothing: receivers pull once all buckets are packed."""
        self._open_version()

    def finish(self, digests: Mapping[str, str] | None) -> None:
        version = self._with_area(self._open_version())
        version.offered = version.manifest if digests is None else version.manifest.digested(digests)
        self._offer(version)

    def keep(self, adapter: str | None = None, onto_previous: bool = False, earlier: int | None = None) -> None:
        """Keeps the version, as in the contract. Lent tensors are copied first, since the trainer changes them next."""
        version = self._open_version()
        if not self._keep_copy:
            return  # `close` withdraws it
        kept = self._kept.pop(adapter, [])
        needed = (len(kept) if earlier is None else earlier) if onto_previous else 0
        for old in kept[needed:]:  # first, to make room in memory
            self._withdraw(old)
        self._kept[adapter] = kept[:needed]
        self._copy_lent(version)
        self._kept[adapter].append(version)
        self._opened = None
        self._trim()

    def close(self) -> None:
        """Withdraws a version that was not kept. In a forked child it does nothing."""
        if not is_ours(self._agent):
            return
        version, self._opened = self._opened, None
        if version is not None:
            self._withdraw(version)
            self._trim()

    def destroy(self) -> None:
        """Withdraws every version, and ends the agent. In a forked child it does nothing."""
        if not is_ours(self._agent):
            return
        self._server.close()
        self._agent = None  # before the memory that it has registered is freed
        self._opened = self._loan = None
        self._kept.clear()
        self._free.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.destroy()

    def _return_loan(self) -> None:
        """Deregisters the tensors of an earlier version, which no receiver reads now."""
        loan, self._loan = self._loan, None
        if loan is not None:
            self._live_agent().deregister_memory(loan.registered)

    def _offer(self, version: _Version) -> None:
        assert version.offered is not None, "finish comes first"
        places = version.places()
        area = version.area
        regions = [region for number in version.lent for region in version.lent[number] if region[1]]
        regions += [(area.address, area.nbytes)] if area is not None else []
        agent = self._live_agent()
        metadata = agent.get_partial_agent_metadata(
            agent.get_reg_descs(_described(regions), "DRAM"), True, ["UCX"]
        )
        self._server.offer(version.secret, metadata, version.offered, places, refetchable=self._keep_copy)

    def _copy_lent(self, version: _Version) -> None:
        """Copies lent tensors into memory of the sender, and offers the version from there."""
        if not version.lent:
            return
        assert self._loan is not None
        packed, lent, tensors = version.area, version.lent, self._loan.tensors
        owned = self._with_area(_Version(version.manifest, version.secret))
        for number, bucket in enumerate(version.manifest.buckets):
            data = owned.view(number)
            if number not in lent:
                data[:] = version.view(number)
                continue
            for placed in bucket.tensors:
                data[placed.offset : placed.offset + placed.spec.nbytes] = tensors[placed.name].data
        version.lent, version.area = owned.lent, owned.area
        self._offer(version)
        if packed is not None:
            self._free.append(packed)

    def _withdraw(self, version: _Version) -> None:
        """Withdraws a version. Its memory is free when no receiver reads it."""
        self._server.withdraw(version.secret)
        if version.area is not None:
            self._free.append(version.area)

    def _trim(self) -> None:
        """Releases free memory, except memory of the size of a kept version: the next version may fit into it."""
        kept = [one.nbytes for one in self._kept_areas()]
        for memory in [one for one in self._free if one.nbytes not in kept]:
            self._free.remove(memory)
            if self._agent is not None:
                self._agent.deregister_memory(memory.registered)

    def _kept_areas(self) -> list[RegisteredMemory]:
        return [one.area for versions in self._kept.values() for one in versions if one.area is not None]

    def _with_area(self, version: _Version) -> _Version:
        """Gives the version memory for the buckets that have to be packed, and returns it."""
        if version.area is None and len(version.lent) < len(version.manifest.buckets):
            version.area = self._area(version.packed_bytes)
        return version

    def _area(self, nbytes: int) -> RegisteredMemory:
        for number, memory in enumerate(self._free):
            if memory.nbytes == max(nbytes, 1):
                return self._free.pop(number)
        return RegisteredMemory(self._live_agent(), nbytes)

    def _live_agent(self) -> Any:
        if self._agent is None:
            raise InvalidRequest("this sender was destroyed", field="sender", fix="make another one")
        if not is_ours(self._agent):
            raise InvalidRequest(
                "this sender belongs to the parent of this forked process",
                field="sender",
                fix="publish from the parent",
            )
        return self._agent

    def _open_version(self) -> _Version:
        self._live_agent()
        if self._opened is None:
            raise InvalidRequest("no version is open", field="sender", fix="open one first")
        return self._opened


def _in_host_memory(tensors: Mapping[str, Tensor]) -> Mapping[str, HostTensor]:
    return {
        name: one if isinstance(one, HostTensor) else HostTensor(spec_of(one), raw_bytes(one))
        for name, one in tensors.items()
        if isinstance(one, HostTensor) or one.device.type == "cpu"
    }


def _regions(bucket: PackedBucket, tensors: Mapping[str, HostTensor]) -> list[Region]:
    return [(address_of_tensor(tensors[placed.name]), placed.spec.nbytes) for placed in bucket.tensors]


def address_of_tensor(tensor: HostTensor) -> int:
    """The address of the tensor's first byte; 0 for an empty tensor."""
    return ctypes.addressof(ctypes.c_char.from_buffer(tensor.data)) if tensor.data.nbytes else 0


def _described(regions: Sequence[Region]) -> list[tuple[int, int, int, str]]:
    return [(address, nbytes, 0, "") for address, nbytes in regions]


def build(context: SenderContext) -> NixlSender:
    """Makes the sender. Options: `host`, `port` (see `SenderContext.address`), `keep_copy` (default: the trainer
    stays)."""
    context.check_options(BACKEND, "host", "port", "keep_copy")
    keep_copy = context.options.get("keep_copy", context.trainer_stays)
    if not isinstance(keep_copy, bool):
        raise InvalidRequest(
            f"keep_copy is {str(keep_copy)[:64]!r}", field="options.keep_copy", fix="give True or False"
        )
    return NixlSender(*context.address(), keep_copy=keep_copy)

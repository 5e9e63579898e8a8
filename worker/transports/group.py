"""The `gloo` and `nccl` transports: buckets that a trainer broadcasts to every rank of the fleet.

`init_transport {backend, group, master_address, master_port, lifeline_port?, timeout_s?}` forms the group; the plane
adds `world_size` and each worker's `rank_offset`. Then one update is received in it. Its manifest is in the group's
store, as JSON, in chunks (see `Group.put`): `{backend, group?, manifest_key, manifest_digest, num_buckets}`; a short
one may be in the request: `{backend, group?, manifest, num_buckets?}`.
A receive that does not end well drops the group: what was posted to it can't be taken back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from blake3 import blake3

from rl_plane.errors import Conflict, InvalidRequest
from rl_plane.manifest import Manifest
from rl_plane.safetensors_file import load_json_object
from rl_plane.torch_group import AHEAD, FORM_AGAIN, Group, Place, digest_tensor, gpu, import_torch
from rl_plane.versions import DIGEST_PREFIX
from worker.transports.base import Places, check_fields
from worker.transports.packed import PackedDelivery

_FIELDS = ("group", "manifest", "manifest_key", "manifest_digest", "num_buckets")


class GroupTransport:
    """In one rank. Keeps one group."""

    backend: str
    _device: str | None = None

    def __init__(self, places: Places) -> None:
        self._group: Group | None = None
        self._receiving: GroupDelivery | None = None
        self._forming = threading.Lock()

    def init(self, config: Mapping[str, Any]) -> None:
        import_torch()
        place = Place.of_worker(config, self.backend, self._device)
        with self._forming:
            group = self._group
            if group is not None and group.place == place and not group.why_dropped:
                return
            formed = Group(place)
            self.destroy()
            self._group = formed

    def destroy(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.drop(f"rank {group.place.rank} left it")

    def open(self, request: Mapping[str, Any], kind: Literal["base", "lora"]) -> GroupDelivery:
        check_fields(self.backend, request, *_FIELDS)
        group = self._formed(request.get("group"))
        manifest = _manifest(group, request)
        count = request.get("num_buckets", len(manifest.buckets) if "manifest" in request else None)
        if type(count) is not int or count != len(manifest.buckets):
            raise InvalidRequest(
                f"num_buckets is {count!r}, but the manifest lists {len(manifest.buckets)}",
                field="transport.num_buckets",
                fix="say how many buckets the manifest lists",
            )
        if self._receiving is not None and not self._receiving.ended:
            raise Conflict(f"the group {group.place.group} receives another update", fix="abort that one first")
        self._receiving = GroupDelivery(manifest, group)
        return self._receiving

    def _formed(self, name: Any) -> Group:
        group = self._group
        if group is None or name not in (None, group.place.group):
            there = "none" if group is None else group.place.group
            raise InvalidRequest(
                f"no such {self.backend} group is formed: {str(name)[:64]!r}; there is {there}",
                field="transport.group",
                fix=FORM_AGAIN,
            )
        group.check()
        return group


def _manifest(group: Group, request: Mapping[str, Any]) -> Manifest:
    key, digest = request.get("manifest_key"), request.get("manifest_digest")
    if key is None:
        if digest is not None:
            raise InvalidRequest(
                "manifest_digest is of a stored manifest, and there is no manifest_key",
                field="transport.manifest_digest",
                fix="leave it out, or store the manifest and give its manifest_key",
            )
        return Manifest.from_wire(request.get("manifest"))
    if not isinstance(key, str) or "manifest" in request:
        raise InvalidRequest(
            "manifest_key must be a text, and there is no manifest beside it",
            field="transport.manifest_key",
            fix="put the manifest into the group's store, or into the request",
        )
    told = group.take(key)
    found = DIGEST_PREFIX + blake3(told).hexdigest()
    if digest != found:
        raise InvalidRequest(
            f"manifest_digest is {str(digest)[:80]!r}, the stored manifest's is {found}",
            field="transport.manifest_digest",
            fix="store each manifest under a key of its own, and state its digest",
        )
    try:
        wire = load_json_object(told)
    except ValueError as error:
        raise InvalidRequest(
            f"the stored manifest can't be read: {str(error)[:200]}",
            field="transport.manifest_key",
            fix="store JSON",
        ) from error
    return Manifest.from_wire(wire, "transport.manifest_key")


class GroupDelivery(PackedDelivery):
    """One update's buckets, as the group broadcasts them."""

    def __init__(self, manifest: Manifest, group: Group) -> None:
        super().__init__(manifest, self._received(), refetchable=False, close=self._end)
        self.ended = False
        self._group = group
        self._deadline = time.monotonic() + group.place.timeout_s

    def _end(self) -> None:
        if not self.ended:
            self.ended = True
            self._group.drop(f"rank {self._group.place.rank} did not take the whole update")

    def _received(self) -> Iterator[memoryview]:
        group, sizes = self._group, [bucket.nbytes for bucket in self._manifest.buckets]
        places = group.lanes(sizes)
        views = [memoryview(place.numpy()) for place in places]

        def begin(number: int) -> Any:
            return group.broadcast(places[number % AHEAD][: sizes[number]])

        coming = [begin(number) for number in range(len(places))]
        for number, size in enumerate(sizes):
            coming[number % AHEAD].wait(f"bucket {number + 1} of {len(sizes)}", self._deadline, self.cancelled)
            yield views[number % AHEAD][:size]
            if number + AHEAD < len(sizes):
                coming[number % AHEAD] = begin(number + AHEAD)
        if self.digest is None:
            self.digest = self._stated()
        group.barrier().wait("the last rank", self._deadline, self.cancelled)
        self.ended = True

    def _stated(self) -> str | None:
        """The version's digest, which its trainer knows only now."""
        data = digest_tensor()
        self._group.broadcast(data).wait("the digest", self._deadline, self.cancelled)
        told = bytes(data.numpy())
        return f"blake3:{told.hex()}" if any(told) else None


class GlooTransport(GroupTransport):
    backend = "gloo"


class NcclTransport(GroupTransport):
    backend = "nccl"

    def __init__(self, places: Places) -> None:
        super().__init__(places)
        self._device = gpu(places.device)

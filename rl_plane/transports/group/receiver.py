"""The `gloo` and `nccl` transports: buckets that a trainer broadcasts to every rank of the fleet.

`init_transport {backend, group, master_address, master_port, lifeline_port?, timeout_s?}` forms the group; the plane
adds `world_size` and each worker's `rank_offset`. Then one update is received in it. Its manifest is in the group's
store, as JSON, in chunks (see `Group.put`): `{backend, group?, manifest_key, manifest_digest, num_buckets}`; a short
one may be in the request: `{backend, group?, manifest, num_buckets?}`.
A receive that does not end well drops the group: what was posted to it can't be taken back.

A trainer that has a group of its own forms it with `init_transport {backend, form: "torch", group, master_address,
master_port, timeout_s?}`; there may be several. `{backend, group, in_parts: true}` then receives what it announces call
by call (see `streamed_delivery.py`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from blake3 import blake3

from rl_plane.errors import Conflict, InvalidRequest
from rl_plane.protocol.strict_json import load_json_object
from rl_plane.protocol.versions import DIGEST_PREFIX
from rl_plane.transports.group.rank_layout import FORM_AGAIN, Place
from rl_plane.transports.group.streamed_delivery import GroupFedDelivery, received
from rl_plane.transports.group.torch_group import (
    JOIN_TIMEOUT_S,
    JOIN_TORCH_S,
    Group,
    digest_tensor,
    gpu,
    import_torch,
)
from rl_plane.transports.packed_delivery import PackedDelivery
from rl_plane.transports.receiver_base import Places, check_fields
from rl_plane.weights.manifest import Manifest

_FIELDS = ("group", "manifest", "manifest_key", "manifest_digest", "num_buckets")
MAX_GROUPS = 64
"""Of a trainer's own: one for each of its pipeline's stages."""


class GroupTransport:
    """In one rank. Keeps one group of the plane's form, and those that a trainer has formed by itself."""

    backend: str
    _device: str | None = None

    def __init__(self, places: Places) -> None:
        self._group: Group | None = None
        self._own: dict[str, Group] = {}
        """Of form `torch`, by name."""
        self._receiving: GroupDelivery | GroupFedDelivery | None = None
        self._forming = threading.Lock()

    def init(self, config: Mapping[str, Any]) -> None:
        import_torch()
        place = Place.of_worker(config, self.backend, self._device)
        with self._forming:
            if place.form == "torch":
                self._form_own(place)
                return
            group = self._group
            if group is not None and group.place == place and not group.why_dropped:
                return
            formed = Group(place, JOIN_TIMEOUT_S)
            self._leave(self._group)
            self._group = formed

    def _form_own(self, place: Place) -> None:
        self._own = {name: group for name, group in self._own.items() if not group.why_dropped}
        there = self._own.get(place.group)
        if there is not None and there.place == place:
            return
        if there is None and len(self._own) >= MAX_GROUPS:
            raise InvalidRequest(
                f"there are {MAX_GROUPS} groups already", field="group", fix="destroy those that are not needed"
            )
        self._leave(self._own.pop(place.group, None))
        self._own[place.group] = Group(place, min(place.timeout_s, JOIN_TORCH_S))

    def destroy(self) -> None:
        self._leave(self._group)
        self._group = None
        self._drop_own("it was destroyed")

    def leave(self, name: str) -> None:
        """One of a trainer's own."""
        self._leave(self._own.pop(name, None))

    @staticmethod
    def _leave(group: Group | None) -> None:
        if group is not None:
            group.drop(f"rank {group.place.rank} left it")

    def _drop_own(self, why: str) -> None:
        for group in list(self._own.values()):
            group.drop(why)

    def open(self, request: Mapping[str, Any], kind: Literal["base", "lora"]) -> GroupDelivery | GroupFedDelivery:
        if "in_parts" in request:
            return self._open_fed(request)
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
        self._check_free(group)
        delivery = GroupDelivery(manifest, group)
        self._receiving = delivery
        return delivery

    def _open_fed(self, request: Mapping[str, Any]) -> GroupFedDelivery:
        check_fields(self.backend, request, "group", "in_parts", "fleet_ranks")
        name = request.get("group")
        if request["in_parts"] is not True or not isinstance(name, str):
            raise InvalidRequest(
                "what is fed is fed by a trainer's own group",
                field="transport.group",
                fix="name it; in_parts: true",
            )
        group = self._own_group(name)
        formed, now = group.place.fleet_ranks, request.get("fleet_ranks")
        if now not in (None, formed):
            raise InvalidRequest(
                f"the group {name!r} was formed with {formed} ranks of the fleet, which has {now} now",
                field="transport.group",
                fix=FORM_AGAIN,
            )
        self._check_free(group)
        delivery = GroupFedDelivery(group, self._own_group, self._drop_own)
        self._receiving = delivery
        return delivery

    def _own_group(self, name: str) -> Group:
        group = self._own.get(name)
        if group is None:
            raise _not_formed(self.backend, name, ", ".join(sorted(self._own)) or "none")
        group.check()
        return group

    def _check_free(self, group: Group) -> None:
        if self._receiving is not None and not self._receiving.ended:
            raise Conflict(f"the group {group.place.group} receives another update", fix="abort that one first")

    def _formed(self, name: Any) -> Group:
        group = self._group
        if group is None or name not in (None, group.place.group):
            raise _not_formed(self.backend, name, "none" if group is None else group.place.group)
        group.check()
        return group


def _not_formed(backend: str, name: Any, there: str) -> InvalidRequest:
    return InvalidRequest(
        f"no such {backend} group is formed: {str(name)[:64]!r}; there is {there}",
        field="transport.group",
        fix=FORM_AGAIN,
    )


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

        def name(number: int) -> str:
            return f"bucket {number + 1} of {len(sizes)}"

        yield from received(group, sizes, name, self._deadline, lambda: self.cancelled())
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

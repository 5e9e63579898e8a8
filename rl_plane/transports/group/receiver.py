"""The receiving half of `gloo` and `nccl`: buckets that a trainer broadcasts to every worker of the fleet.

`init_transport {backend, group, master_address, master_port, lifeline_port?, secret?, timeout_s?}` forms the group, in
which each host of each worker is one rank. The plane adds `world_size` and each worker's `rank_offset`. It asks every
worker with `check_only: true` first: no rank joins unless every rank can. A request for an update is one of these:

    {backend, group?, manifest_key, manifest_digest, num_buckets}   the manifest is in the group's store
    {backend, group?, manifest, num_buckets?}                       the manifest is short
    {backend, shares: [{rank, group, manifest_key, …}, …]}          each rank of the trainer sends its own share
    {backend, group, in_parts: true}                                the trainer announces it part by part
    {backend, group, format: "prime-rl"}                            the trainer describes it in the group itself

For shares `init_transport` has `shares: [{group, master_address, …}, …]`: a group for each rank of the trainer that
owns tensors. The last two need a group that the trainer has formed itself, with `init_transport {backend,
form: "torch", rendezvous?, group, master_address, master_port, timeout_s?}`; there may be several (see
`streamed_delivery.py` and `described_delivery.py`; for the store see `Group.put`). With `rendezvous: "vllm"` the
trainer has formed it as vLLM's own NCCL engine does. In such a group a worker takes one rank for each rank of its
engine. The first one receives, and the bytes of the others are dropped. A receive that fails drops the group, since
what was posted to it can't be taken back.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rl_plane.errors import Conflict, InvalidRequest, InvalidWeights
from rl_plane.protocol.hashers import hex_digest
from rl_plane.protocol.strict_json import load_json_object
from rl_plane.protocol.trainer_groups import JOIN_TORCH_S, PRIME_RL_FORMAT
from rl_plane.protocol.versions import DIGEST_PATTERN
from rl_plane.transports.base import TransportContext, WeightTransport, check_fields
from rl_plane.transports.group.described_delivery import DescribedDelivery
from rl_plane.transports.group.peer_liveness import check_reach
from rl_plane.transports.group.rank_layout import FORM_AGAIN, Place
from rl_plane.transports.group.streamed_delivery import GroupPartwiseDelivery, received
from rl_plane.transports.group.torch_group import (
    JOIN_TIMEOUT_S,
    MANIFEST_ALGORITHM,
    MANIFEST_PREFIX,
    Group,
    digest_tensor,
    formed_together,
    gpu,
)
from rl_plane.transports.merged_delivery import MAX_SHARES, SHARES, MergedDelivery, open_shares
from rl_plane.transports.packed_delivery import PackedDelivery
from rl_plane.transports.torch_calls import import_torch
from rl_plane.weights.checkpoint import Kind
from rl_plane.weights.manifest import Manifest

_FIELDS = ("group", "manifest", "manifest_key", "manifest_digest", "num_buckets")
MAX_GROUPS = 64
"""The most groups that a trainer may form itself: one for each stage of its pipeline."""


OwnGroupDelivery = GroupPartwiseDelivery | DescribedDelivery
"""The deliveries by groups that a trainer has formed itself."""


class GroupTransport(WeightTransport):
    """The transport of one worker. Holds one trainer's groups of the form `plane`, and the groups that a trainer has
    formed itself."""

    _devices: tuple[str, ...] = ()
    """The devices of nccl's buckets, for each rank of the engine."""
    max_groups = MAX_GROUPS

    def __init__(self, context: TransportContext) -> None:
        self._groups: dict[str, Group] = {}
        """The group of the form `plane`, or one for each share, by name."""
        self._own: dict[str, Group] = {}
        """Groups of the form `torch`, by name."""
        self._receiving: list[GroupDelivery | OwnGroupDelivery] = []
        self._forming = threading.Lock()

    def init(self, config: Mapping[str, Any]) -> None:
        import_torch()
        joined = [Place.of_worker(one, self.backend, self._devices) for one in _each_share(config)]
        places = [place for place, *_ in joined]
        if config.get("check_only"):
            if not self._is_in(places):
                self._check(places)
            return
        with self._forming:
            if self._is_in(places):
                return
            self._check(places)
            if places[0].form == "torch":
                self._form_own(places[0], joined[0][1:])
                return
            formed = self._formed_groups(places)
            self._leave_all()
            self._groups = formed

    def _is_in(self, places: Sequence[Place]) -> bool:
        """True if this worker has joined these groups, and they are whole."""
        own = places[0].form == "torch"
        groups = dict(self._own if own else self._groups)
        there = {name: group.place for name, group in groups.items() if not group.why_dropped}
        wanted = {place.group: place for place in places}
        return wanted.items() <= there.items() if own else wanted == there

    def _check(self, places: Sequence[Place]) -> None:
        """Refuses what this worker can't join, before any rank waits for it."""
        for place in places:
            check_reach(place)
        others = {name for name, group in dict(self._own).items() if not group.why_dropped} - {places[0].group}
        if places[0].form == "torch" and len(others) >= self.max_groups:
            raise InvalidRequest(
                f"there are {self.max_groups} groups already",
                field="group",
                fix="destroy groups that are not needed",
            )

    def _formed_groups(self, places: Sequence[Place]) -> dict[str, Group]:
        """Forms one group after another: every rank of the fleet does so in the same order."""
        formed: dict[str, Group] = {}
        try:
            for place in places:
                formed[place.group] = Group(place, JOIN_TIMEOUT_S)
        except BaseException:
            for group in formed.values():
                self._leave(group)
            raise
        return formed

    def _form_own(self, place: Place, silent: Sequence[Place]) -> None:
        self._own = {name: group for name, group in self._own.items() if not group.why_dropped}
        self._leave(self._own.pop(place.group, None))
        self._own[place.group] = formed_together([place, *silent], min(place.timeout_s, JOIN_TORCH_S))

    def destroy(self) -> None:
        self._leave_all()
        self._drop_own("it was destroyed")

    def _leave_all(self) -> None:
        groups, self._groups = self._groups, {}
        for group in groups.values():
            self._leave(group)

    def leave(self, name: str) -> None:
        """Leaves one of the groups that the trainer has formed itself."""
        self._leave(self._own.pop(name, None))

    @staticmethod
    def _leave(group: Group | None) -> None:
        if group is not None:
            group.drop(f"rank {group.place.rank} left it")

    def _drop_own(self, why: str) -> None:
        for group in list(self._own.values()):
            group.drop(why)

    def open(self, request: Mapping[str, Any], kind: Kind) -> GroupDelivery | OwnGroupDelivery | MergedDelivery:
        if "in_parts" in request:
            return self._open_in_parts(request)
        if "format" in request:
            return self._open_described(request)
        if SHARES in request:  # all at once, since each rank of the trainer waits until its buckets are taken
            return open_shares(self.backend, request, MAX_SHARES, self._open_whole)
        return self._open_whole(request)

    def _open_whole(self, request: Mapping[str, Any]) -> GroupDelivery:
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
        self._receiving.append(delivery)
        return delivery

    def _open_in_parts(self, request: Mapping[str, Any]) -> GroupPartwiseDelivery:
        check_fields(self.backend, request, "group", "in_parts", "fleet_ranks")
        name = request.get("group")
        if request["in_parts"] is not True or not isinstance(name, str):
            raise InvalidRequest(
                "in_parts needs the name of a group that the trainer has formed",
                field="transport.group",
                fix="name it, with in_parts: true",
            )
        group = self._whole_own_group(name, request.get("fleet_ranks"))
        delivery = GroupPartwiseDelivery(group, self._own_group, self._drop_own)
        self._receiving.append(delivery)
        return delivery

    def _open_described(self, request: Mapping[str, Any]) -> DescribedDelivery:
        check_fields(self.backend, request, "group", "format", "fleet_ranks")
        name = request.get("group")
        if request["format"] != PRIME_RL_FORMAT or not isinstance(name, str):
            raise InvalidRequest(
                f"a format is {PRIME_RL_FORMAT!r}, with the name of a group that the trainer has formed",
                field="transport.format",
                fix="name the group, or leave the format out",
            )
        delivery = DescribedDelivery(self._whole_own_group(name, request.get("fleet_ranks")), self._drop_own)
        self._receiving.append(delivery)
        return delivery

    def _whole_own_group(self, name: str, fleet_ranks: Any) -> Group:
        """A group that the trainer has formed, if it is free and has all ranks that the fleet has now."""
        group = self._own_group(name)
        formed = group.place.fleet_ranks
        if fleet_ranks not in (None, formed):
            raise InvalidRequest(
                f"the group {name!r} was formed with {formed} ranks of the fleet, which has {fleet_ranks} now",
                field="transport.group",
                fix=FORM_AGAIN,
            )
        self._check_free(group)
        return group

    def _own_group(self, name: str) -> Group:
        group = self._own.get(name)
        if group is None:
            raise _not_formed(self.backend, name, ", ".join(sorted(self._own)) or "none")
        group.check()
        return group

    def _check_free(self, group: Group) -> None:
        self._receiving = [one for one in self._receiving if not one.ended]
        if any(isinstance(one, OwnGroupDelivery) or one.group is group for one in self._receiving):
            raise Conflict(f"the group {group.place.group} receives another update", fix="abort that one first")

    def _formed(self, name: Any) -> Group:
        group = self._groups.get(name) if isinstance(name, str) else None
        if name is None and len(self._groups) == 1:
            group = next(iter(self._groups.values()))
        if group is None:
            raise _not_formed(self.backend, name, ", ".join(sorted(self._groups)) or "none")
        group.check()
        return group


def _each_share(config: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The body of `init_transport` for each group that it describes."""
    if SHARES not in config:
        return [config]
    shares = config[SHARES]
    fits = isinstance(shares, list) and all(isinstance(one, Mapping) for one in shares)
    if not fits or not 0 < len(shares) <= MAX_SHARES:
        raise InvalidRequest(
            f"{SHARES} must be a list of 1 to {MAX_SHARES} groups", field=SHARES, fix="give each group its fields"
        )
    rest = {key: value for key, value in config.items() if key != SHARES}
    return [{**rest, **one} for one in shares]


def _not_formed(backend: str, name: Any, there: str) -> InvalidRequest:
    return InvalidRequest(
        f"there is no {backend} group {str(name)[:64]!r}: this worker has {there}",
        field="transport.group",
        fix=FORM_AGAIN,
    )


def _manifest(group: Group, request: Mapping[str, Any]) -> Manifest:
    key, digest = request.get("manifest_key"), request.get("manifest_digest")
    if key is None:
        if digest is not None:
            raise InvalidRequest(
                "manifest_digest is given without manifest_key",
                field="transport.manifest_digest",
                fix="leave it out, or store the manifest and give its manifest_key",
            )
        return Manifest.from_wire(request.get("manifest"))
    if not isinstance(key, str) or "manifest" in request:
        raise InvalidRequest(
            "manifest_key must be a text, and excludes manifest",
            field="transport.manifest_key",
            fix="put the manifest into the group's store, or into the request",
        )
    raw = group.take(key)
    found = MANIFEST_PREFIX + hex_digest(raw, MANIFEST_ALGORITHM)
    if digest != found:
        raise InvalidRequest(
            f"manifest_digest is {str(digest)[:80]!r}, but the stored manifest has {found}",
            field="transport.manifest_digest",
            fix="store each manifest under a key of its own, and state its digest",
        )
    try:
        wire = load_json_object(raw)
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
        self.group = group
        self._deadline = time.monotonic() + group.place.timeout_s

    def _end(self) -> None:
        if not self.ended:
            self.ended = True
            self.group.drop(f"rank {self.group.place.rank} did not take the whole update")

    def _received(self) -> Iterator[memoryview]:
        group, sizes = self.group, [bucket.nbytes for bucket in self._manifest.buckets]

        def name(number: int) -> str:
            return f"bucket {number + 1} of {len(sizes)}"

        yield from received(group, sizes, name, self._deadline, lambda: self.cancelled())
        if self.digest is None:
            self.digest = self._stated()
        group.barrier().wait("the last rank", self._deadline, self.cancelled)
        self.ended = True

    def _stated(self) -> str | None:
        """The version's digest, which the trainer broadcasts after the last bucket."""
        data = digest_tensor()
        self.group.broadcast(data).wait("the digest", self._deadline, self.cancelled)
        text = bytes(data.numpy()).rstrip(b"\0").decode("ascii", "replace")
        if text and not re.fullmatch(DIGEST_PATTERN, text):
            raise InvalidWeights(
                f"the trainer broadcast {text!r} as the version's digest",
                field="digest",
                fix="broadcast the digest as ASCII, padded with zeros, or only zeros",
            )
        return text or None


class GlooTransport(GroupTransport):
    backend = "gloo"


class NcclTransport(GroupTransport):
    backend = "nccl"

    def __init__(self, context: TransportContext) -> None:
        super().__init__(context)
        self._devices = tuple(gpu(device) for device in context.rank_devices or (context.device,))

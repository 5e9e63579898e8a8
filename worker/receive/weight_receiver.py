"""Receives weights in the process that holds the model: from a transport into the engine's WeightHolder."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from rl_plane._util.plugins import TRANSPORTS, plugins
from rl_plane._util.tasks import Cancelled
from rl_plane.errors import EngineFailed, InvalidRequest, InvalidWeights, NotAtBase, PlaneError, Unsupported
from rl_plane.protocol.canary import CANARY_NAME, Canary, check_vocabulary
from rl_plane.protocol.record import Encoding
from rl_plane.protocol.relay import RelayPlan
from rl_plane.protocol.update_requests import (
    CanaryLimits,
    DeltaChainEntry,
    PreparedReply,
    ReceivePart,
    ReceiveRequest,
    Transport,
)
from rl_plane.protocol.versions import TensorSpec, algorithm_of
from rl_plane.transports.base import (
    Delivery,
    PartwiseDelivery,
    RelayingTransport,
    TransportContext,
    WeightTransport,
)
from rl_plane.weights.checkpoint import Kind
from worker.receive.area_pool import AreaPool
from worker.receive.host_room import MEMORY_FILES, MemoryFiles, check_room
from worker.receive.kept_copy import (
    Changes,
    KeptAdapter,
    KeptCopy,
    as_kept,
    digests_of,
    missing_links,
    taken_changes,
)
from worker.receive.lacking_transports import LACKING
from worker.receive.received_bytes import ByteCount, ReceivedBytes
from worker.receive.receives_weights import ReceivesWeights
from worker.receive.staging import (
    FLOAT_DTYPES,
    check_deltas,
    check_fits,
    check_overwrite,
    check_some,
    check_specs,
    overwrite,
    receive,
)
from worker.receive.staging_area import StagingArea
from worker.receive.weight_holder import Staged, WeightHolder

log = logging.getLogger("worker.receive.weight_receiver")


@cache
def _installed() -> dict[str, type[WeightTransport]]:
    """Returns the installed transports, without transports whose packages are missing."""
    found = {}
    for point in plugins(TRANSPORTS).values():
        try:
            found[point.name] = point.load()
        except ModuleNotFoundError as error:
            log.info("there is no %s transport: %s", point.name, error)
            LACKING[point.name] = str(error)
    return found


def load_transports(places: TransportContext, device: str = "cpu") -> dict[str, WeightTransport]:
    """Makes each installed transport that can work here. `device`: the device of the model."""
    here, found = replace(places, device=device), {}
    for name, kind in _installed().items():
        try:
            found[name] = kind(here)
        except Unsupported as error:
            log.info("there is no %s transport: %s", name, error)
            LACKING[name] = str(error)
    return found


class Receiver(ReceivesWeights):
    """Receives one update at a time into a `WeightHolder`: `open`, `receive`, then `take` or `discard`.

    The methods block, so they run on a thread. Only `take` may run on an engine's loop."""

    def __init__(
        self,
        holder: WeightHolder,
        transports: Mapping[str, WeightTransport],
        *,
        shared: bool = False,
        received: ReceivedBytes | None = None,
        host_number: int = 0,
        memory_files: MemoryFiles = MEMORY_FILES,
    ) -> None:
        """`shared`: other processes map the staging areas. `received`: counts that another process reads.
        `host_number`: of this host among those of the engine. `memory_files`: they bound what can be staged."""
        self.holder = holder
        self._count = received or ReceivedBytes()
        """Counts the bytes of the update that came last, or is being received."""
        self.transports = transports
        self._host_number = host_number
        self._memory_files = memory_files
        self._pool = AreaPool(shared=shared)
        self.opened: dict[str, tuple[ReceiveRequest, Delivery | None]] = {}
        """The open deliveries by the name of their staging. None: the kept copy is asked for."""
        self._partwise: dict[str, PartwiseDelivery] = {}
        """The partwise deliveries that are open, by staging name."""
        self._staged: dict[str, Staged] = {}
        self.areas: dict[str, StagingArea] = {}
        """The areas of what is staged, by staging name. A delta changes the area of the copy, which is not here."""
        self._to_keep: dict[str, KeptCopy] = {}
        self._undo: dict[str, tuple[KeptCopy, Changes]] = {}
        """The copy and the changes that were made in it, by staging name: `discard` takes them back."""
        self._kept: KeptCopy | None = None
        self._place: dict[str, Any] | None = None
        self._adapters: dict[str, KeptAdapter] = {}
        """The copies of adapters whose source may end, by digest, from the swap on."""
        self._adapters_to_keep: dict[str, tuple[str, KeptAdapter]] = {}
        """The digests and the copies of such adapters that are staged, by staging name."""
        self._last_adapter: str | None = None
        """The digest of the adapter that was taken last. It may be on its way into the engine."""
        self._offering = threading.Lock()
        self._taking = threading.Lock()
        """Held for a moment, to add an adapter or to take one away."""

    @property
    def kept(self) -> KeptCopy | None:
        """The copy of the served version in host memory, which an update leaves here if it has `keep_staged` or is no
        full version.

        None when other base weights are received, and until `take` uses them. Equal weights take its place at once."""
        return self._kept

    @kept.setter
    def kept(self, kept: KeptCopy | None) -> None:
        with self._offering:
            if self._relaying is not None and self._place is not None and kept is not self._kept:
                self._relaying.withdraw(self._place["transport"])
                self._place = None
            self._kept = kept

    def offer(self, adapters: Collection[str] = ()) -> list[dict[str, Any]]:
        """Offers the copies of the base and of the adapters with these digests to other workers. Returns `{digest,
        transport}` of each. It drops the copies of other adapters. It keeps the newest copy until this method has
        offered it, because the engine may not have loaded that adapter yet.

        An offer ends when the copy does."""
        if (transport := self._relaying) is None:
            return []
        self._drop_adapters(adapters)  # before an offer, which may fail each time
        with self._offering:
            if self._kept is not None and self._place is None:
                place = dict(transport.offer(self._kept.tensors))
                self._place = {"digest": self._kept.digest, "transport": place}
            found = [] if self._place is None else [self._place]
            for digest, copy in list(self._adapters.items()):
                if digest in adapters:
                    copy.place = copy.place or transport.offer(copy.area.tensors(), copy.config)
                    found.append({"digest": digest, "transport": dict(copy.place)})
        return found

    def _drop_adapters(self, loaded: Collection[str]) -> None:
        """Drops the copies of adapters that the engine has not loaded any more. `loaded`: the digests of the others."""
        ended: list[KeptAdapter] = []
        with self._offering:
            for digest in list(self._adapters):
                with self._taking:
                    is_last = digest == self._last_adapter
                    if is_last and digest in loaded:
                        self._last_adapter = None  # it has come into the engine
                    elif not is_last and digest not in loaded:
                        ended.append(self._adapters.pop(digest))
        for copy in ended:  # without the lock, for which a swap may wait: a peer may need a second to leave
            if self._relaying is not None and copy.place is not None:
                self._relaying.withdraw(copy.place)
            copy.area.close()

    @property
    def _relaying(self) -> RelayingTransport | None:
        """The transport by which other workers fetch from this process. None: there is none."""
        return next((one for one in self.transports.values() if isinstance(one, RelayingTransport)), None)

    def _keep_adapter(
        self, staging: str, digest: str, request: ReceiveRequest, delivery: Delivery, area: StagingArea
    ) -> None:
        """Keeps an adapter whose source ends with its sender, for workers that come later, if it is taken. Of an engine
        over several hosts the first one keeps it."""
        assert request.transport is not None, "an unload receives nothing"
        config = delivery.adapter_config_raw
        ends = not delivery.refetchable or request.transport.traits.relayed
        if ends and config is not None and not self._host_number and self._relaying is not None:
            self._adapters_to_keep[staging] = digest, KeptAdapter(config, area)

    def _is_kept(self, area: StagingArea) -> bool:
        base = self._kept is not None and self._kept.area is area
        return base or any(one.area is area for one in list(self._adapters.values()))

    @property
    def backends(self) -> tuple[str, ...]:
        return tuple(sorted(self.transports))

    def weight_spec(self) -> Mapping[str, TensorSpec]:
        return self.holder.weight_spec()

    def received(self) -> ByteCount:
        return self._count.now()

    def cached_digest(self) -> str | None:
        return self.kept.digest if self.kept is not None else None

    def open(self, staging: str, request: ReceiveRequest, limits: CanaryLimits | None = None) -> None:
        """Opens the delivery, and checks everything that needs no byte of it. `receive` or `discard` closes it.
        `staging`: a name that this engine has not used before. `limits`: what a `canary.json` has to fit."""
        if request.adapter is None:
            for left in [*self._to_keep, *self._undo]:  # of a receive that ended after its cancellation
                self.discard(left)
        if request.transport is None:
            assert request.adapter is None, "an unload receives nothing"
            self._kept_as(request.digest)
            self._count.begin(0)
            self.opened[staging] = (request, None)
            return
        if request.adapter is None:
            self._end_relays()
        at = self._host_number
        plan = request.relay[at] if at < len(request.relay) else None
        delivery = self._open(request.transport, _kind(request), plan)
        try:
            _check_canary(request, delivery, limits)
            if isinstance(delivery, PartwiseDelivery):
                wanted, tied = self.holder.weight_spec(), self.holder.tied_tensors()
                delivery.expect(wanted, tied, lambda needed, part: check_specs(needed, tied, part, request.cast))
                self._partwise = {staging: delivery}
            if request.base is not None:
                self._check_changes(request, request.base, delivery)
            elif request.in_place:
                check_overwrite(self.holder, delivery, cast=request.cast, expected_digest=request.digest)
            else:
                check_fits(self.holder, delivery, _kind(request), request.cast)
                spare_bytes = 0 if request.adapter is not None else self._spare_bytes()
                check_room(_nbytes(delivery), spare_bytes, self._memory_files)
        except BaseException:
            delivery.close()
            raise
        self._count.begin(_nbytes(delivery))
        self.opened[staging] = (request, delivery)

    def receive(self, staging: str, cancelled: Cancelled) -> PreparedReply:
        """Receives what is open, into staging or over the served weights. When it raises, nothing is staged."""
        opened = self.opened.pop(staging, None)
        if opened is None:
            raise EngineFailed(f"nothing is open as {staging!r}")
        request, delivery = opened
        if delivery is None:
            return self._stage_kept(staging, request, cancelled)
        refetchable = delivery.refetchable
        how: dict[str, Any] = {
            "cast": request.cast,
            "expected_digest": request.digest,
            "algorithm": request.digest_algorithm,
            "cancelled": cancelled,
            "progress": self._count,
        }
        if request.adapter is not None:
            area, self._staged[staging], digest = self._received(delivery, kind="lora", **how)
            self.areas[staging] = area
            self._keep_adapter(staging, digest, request, delivery, area)
        elif request.base is not None:
            digest = self._receive_changes(staging, request, request.base, delivery, cancelled)
        else:
            before = self._drop_copy()  # memory has room for one copy
            if request.in_place:
                digest = overwrite(self.holder, delivery, **how)
            else:
                digests: dict[str, str] = {}
                area, self._staged[staging], digest = self._received(delivery, **how, digests=digests)
                self.areas[staging] = area
                kept = as_kept(digest, area, self.holder.tied_tensors(), digests) if request.keeps_copy else None
                if kept is not None:
                    self._to_keep[staging] = kept
                    if digest == before:  # the worker may serve this version, and then discards what is staged
                        self.kept = kept
        self._partwise.pop(staging, None)
        size = _nbytes(delivery)  # a partwise delivery knows it only now
        reply = PreparedReply(digest=digest, tensors=len(delivery.specs), bytes=size, refetchable=refetchable)
        if (after := self._to_keep.get(staging)) is not None:
            reply["model_bytes"] = after.nbytes
        if delivery.sources:
            reply["sources"] = list(delivery.sources)
        if isinstance(delivery.canary, Canary):
            reply["canary"] = delivery.canary.model_dump()
        return reply

    def receive_part(self, staging: str, part: Mapping[str, Any], cancelled: Cancelled) -> int:
        """Receives one part into the running `receive` of this name. Returns how many tensors are still missing."""
        delivery = self._partwise.get(staging)
        if delivery is None:
            raise EngineFailed(f"no update in parts is open as {staging!r}")
        return delivery.receive_part(ReceivePart.model_validate(part), cancelled)

    def changed_since(self, staging: str, digest: str | None) -> Collection[str] | None:
        """Returns the names of the staged tensors that differ from the version that the engine serves. None: this is
        unknown, so the engine loads all tensors. Call it before `take`. `digest`: the digest of the served version;
        None: the engine's weights are of no version."""
        after = self._to_keep.get(staging)
        return after.changed.get(digest) if after is not None and digest is not None else None

    def take(self, staging: str) -> Staged:
        """Returns the staged weights for the swap. They belong to the caller from now on.

        This never waits. It replaces the copy only if the update makes a new one, and then `receive` has dropped the
        old copy before."""
        staged = self._staged.pop(staging, None)
        if staged is None:
            raise EngineFailed(f"nothing is staged as {staging!r}: it was swapped or discarded before")
        area = self.areas.pop(staging, None)
        # On a thread, because a peer may need a second to leave. No update still needs it: all have prepared.
        threading.Thread(target=self._end_relays, name="end of the relay", daemon=True).start()
        if (adapter := self._adapters_to_keep.pop(staging, None)) is not None:
            with self._taking:
                self._last_adapter, copy = adapter
                self._adapters.setdefault(self._last_adapter, copy)
        to_keep = self._to_keep.pop(staging, None)
        area = to_keep.area if to_keep is not None else area
        if area is not None:
            self._pool.lend(staging, area)
        if to_keep is not None and to_keep is not self._kept:
            self.kept = replace(to_keep, changed={})
        self._undo.pop(staging, None)
        return staged

    def loaded(self, staging: str) -> None:
        """Notes that every rank has loaded what `take` returned, and maps it no more."""
        area = self._pool.returned(staging)
        if area is not None and not self._is_kept(area):
            self._pool.give_back(area)

    def staged_area(self, staging: str) -> tuple[Staged, StagingArea]:
        """Returns what is staged under this name, which stays staged, and the area in which it lies."""
        staged, kept = self._staged.get(staging), self._to_keep.get(staging)
        area = self.areas.get(staging) or (None if kept is None else kept.area)
        if staged is None or area is None:
            raise EngineFailed(f"nothing is staged as {staging!r}: it was swapped or discarded before")
        return staged, area

    def discard(self, staging: str) -> None:
        """Frees what is staged or open under this name, and takes changes of the copy back. Does nothing for an unknown
        name."""
        if staging in self._staged:
            self._end_relays()
        self._staged.pop(staging, None)
        self._adapters_to_keep.pop(staging, None)
        area = self.areas.pop(staging, None)
        if area is not None and not self._is_kept(area):
            self._pool.give_back(area)
        self._partwise.pop(staging, None)
        self._to_keep.pop(staging, None)
        undo = self._undo.pop(staging, None)
        if undo is not None:
            before, changes = undo
            before.take_back(changes)
            self.kept = before
        _, delivery = self.opened.pop(staging, (None, None))
        if delivery is not None:
            delivery.close()

    # ---- memory ----

    def _received(self, delivery: Delivery, **how: Any) -> tuple[StagingArea, Staged, str]:
        """Receives into a new area. The area is gone when this raises."""
        area: StagingArea | None = None
        try:
            area = self._area(delivery)
            return area, *receive(self.holder, delivery, area=area, **how)
        except BaseException:
            delivery.close()
            self._end_relays()
            if area is not None:
                area.close()
            raise

    def _area(self, delivery: Delivery) -> StagingArea:
        """Makes the area of what is to come. A tensor of a delivery in parts may come in another dtype. It may not come
        at all, because it is tied to another tensor. So the area has room for each, and what does not come takes no
        memory."""
        specs = delivery.specs
        if isinstance(delivery, PartwiseDelivery):
            wanted, tied = self.holder.weight_spec(), self.holder.tied_tensors()
            specs = {**{name: wanted[to] for name, to in tied.items()}, **wanted}
            specs = {name: _widest(spec) for name, spec in specs.items()}
        return self._pool.make(specs)

    def _drop_copy(self) -> str | None:
        """Drops the kept copy. Returns its digest."""
        kept, self.kept = self._kept, None
        if kept is None:
            return None
        self._pool.give_back(kept.area)
        return kept.digest

    def _kept_as(self, digest: str | None) -> KeptCopy:
        """Returns the kept copy. NotAtBase if it has another digest, or if there is none."""
        kept = self.kept
        if kept is None or kept.digest != digest:
            raise NotAtBase(f"this worker keeps no copy of {digest}", field="transport", fix="name a transport")
        return kept

    def _stage_kept(self, staging: str, request: ReceiveRequest, cancelled: Cancelled) -> PreparedReply:
        """Stages the kept copy after it has hashed all its bytes. The copy stays, and so does its offer."""
        kept = self._kept_as(request.digest)
        hashed = self._checked(kept, cancelled)
        self._staged[staging] = self.holder.stage(hashed.with_digests().items(), cancelled)
        self._to_keep[staging] = kept
        return PreparedReply(digest=kept.digest, tensors=0, bytes=0, model_bytes=kept.nbytes, refetchable=False)

    def _checked(self, copy: KeptCopy, cancelled: Cancelled) -> KeptCopy:
        """Returns the copy with the digests that its bytes have now. A damaged copy is dropped, and the error is
        NotAtBase."""
        hashed = replace(copy, digests={}).hashed(cancelled)
        if hashed.digest != copy.digest:
            self._drop_copy()
            raise NotAtBase(
                f"this worker's copy of {copy.digest} was damaged in memory",
                field="base",
                fix="publish the full version",
            )
        return hashed

    def _spare_bytes(self) -> int:
        """The memory that base weights take over from earlier ones."""
        return self._pool.spare_bytes + (0 if self._kept is None else self._kept.area.resident_bytes)

    # ---- deltas and partial versions ----

    def _check_changes(self, request: ReceiveRequest, base: str, delivery: Delivery) -> None:
        """Checks that changes fit this model, and that their base can be had."""
        self._check_specs(request.encoding, delivery)
        kept = self._changeable()
        is_there = kept is not None and kept.digest == request.digest  # for example because the swap failed
        if not (is_there or self._may_fit(request, delivery)):
            missing_links(kept, request.base_chain, base)
        check_room(_nbytes(delivery), files=self._memory_files)

    def _check_specs(self, encoding: Encoding, delivery: Delivery) -> None:
        if encoding == "partial":
            check_some(self.holder.weight_spec(), self.holder.tied_tensors(), delivery.specs)
        else:
            check_deltas(self.holder.weight_spec(), delivery.specs)

    def _changeable(self) -> KeptCopy | None:
        """Returns the kept copy, if a delta or a partial version can change it."""
        kept = self.kept
        return kept if kept is not None and kept.fits(self.holder.weight_spec()) else None

    def _may_fit(self, request: ReceiveRequest, delivery: Delivery) -> bool:
        """Returns whether the tensors of a partial version may make the wanted version of this worker's copy, although
        the copy may be another one than the base: it differs from the base only in tensors that come."""
        kept, stated = self._changeable(), delivery.tensor_digests
        if request.encoding != "partial" or kept is None or not delivery.specs.keys() <= kept.tensors.keys():
            return False
        # Without digests of the same algorithm only the bytes will tell.
        return not stated or kept.digest_with(stated) in (None, request.digest)

    def _receive_changes(
        self, staging: str, request: ReceiveRequest, base: str, delivery: Delivery, cancelled: Cancelled
    ) -> str:
        """Applies changes to the copy, in place. Returns the digest of the full version."""
        wanted = request.digest
        assert wanted is not None, "the request has it"
        algorithm = algorithm_of(wanted)
        specs = self.holder.weight_spec()
        changes = taken_changes(delivery, request.encoding, specs, algorithm, cancelled, self._count)
        before, changes = self._before(request, base, changes, cancelled)
        before.check_fits(changes)
        known, self.kept = self.kept, None
        try:
            after = before.change(changes, wanted, cancelled)
        except EngineFailed:
            self.kept = known
            raise
        try:
            after = after.hashed(cancelled)
        except BaseException:
            before.take_back(changes)
            self.kept = known  # not a version that was fetched on the way: its own digest was never compared
            raise
        if after.digest != wanted:
            before.take_back(changes)
            self._blame(known, cancelled)
            what = "delta" if request.encoding == "delta" else "partial update"
            raise InvalidWeights(
                f"the {what} makes version digest {after.digest}, but {wanted} is wanted",
                field="transport",
                fix="make it from the version that `base` names, or publish the full one",
                digest=after.digest,
                expected_digest=wanted,
            )
        try:
            self._staged[staging] = self.holder.stage(after.with_digests().items(), cancelled)
        except BaseException:
            before.take_back(changes)
            self.kept = known
            raise
        self._to_keep[staging] = after
        self._undo[staging] = (before, changes)
        return wanted

    def _before(
        self, request: ReceiveRequest, base: str, changes: Changes, cancelled: Cancelled
    ) -> tuple[KeptCopy, Changes]:
        """Returns the copy to change, and the changes that it needs."""
        kept = self._changeable()
        if kept is not None and kept.digest == request.digest:
            return kept, {}
        if kept is not None and kept.digest_with(digests_of(changes)) == request.digest:
            return kept, changes
        del kept  # the full version that may be fetched needs its memory
        return self._at_base(request, base, cancelled), changes

    def _blame(self, known: KeptCopy | None, cancelled: Cancelled) -> None:
        """Finds out whether the update or the copy is wrong. A damaged copy is dropped, and the error is NotAtBase."""
        if known is not None:
            self._checked(known, cancelled)
            self.kept = known

    def _at_base(self, request: ReceiveRequest, base: str, cancelled: Cancelled) -> KeptCopy:
        """Brings the copy to the version that the update changes."""
        kept, links = missing_links(self._changeable(), request.base_chain, base)
        if not links:
            assert kept is not None
            return kept
        if kept is None:
            self._drop_copy()  # memory has room for one copy
        self.kept = None  # a copy that is half changed is of no version
        for link in links:
            try:
                kept = self._follow(kept, link, cancelled)
            except EngineFailed:
                raise  # for example, the receive was cancelled
            except PlaneError as error:
                raise NotAtBase(
                    f"{base}, which the update changes, can't be fetched: {error.message}",
                    field="base",
                    fix="publish the full version",
                ) from error
        assert kept is not None
        return kept

    def _follow(self, kept: KeptCopy | None, link: DeltaChainEntry, cancelled: Cancelled) -> KeptCopy:
        """Fetches the next version of the chain, the full one first. The digest of a change's result is not checked:
        the digest of the last result covers all of them."""
        assert link.transport is not None, "the worker has filled in its own model"
        delivery = self._open(link.transport, "base")
        self._count.expect(_nbytes(delivery))
        try:
            if kept is not None:
                self._check_specs(link.encoding, delivery)
            else:
                check_room(_nbytes(delivery), self._spare_bytes(), self._memory_files)
        except BaseException:
            delivery.close()
            raise
        if kept is not None:
            algorithm = algorithm_of(link.digest)
            specs = self.holder.weight_spec()
            changes = taken_changes(delivery, link.encoding, specs, algorithm, cancelled, self._count)
            kept.check_fits(changes)
            return kept.change(changes, link.digest, cancelled)
        digests: dict[str, str] = {}
        area, _, digest = self._received(
            delivery,
            cast=False,
            expected_digest=link.digest,
            cancelled=cancelled,
            digests=digests,
            progress=self._count,
        )
        kept = as_kept(digest, area, self.holder.tied_tensors(), digests)
        if kept is None:
            raise NotAtBase(
                "this engine ties tensors that were published twice, so no change of them fits",
                field="base",
                fix="publish the full version",
            )
        return kept

    # ---- transports ----

    def _open(self, transport: Transport, kind: Kind, plan: RelayPlan | None = None) -> Delivery:
        by, request = self.transports[transport.backend], transport.model_dump()
        if plan is not None and isinstance(by, RelayingTransport):
            return by.open_relayed(request, kind, plan)
        return by.open(request, kind)

    def relay_addresses(self) -> list[tuple[str, int]]:
        return [] if self._relaying is None else [self._relaying.relay_address()]

    def _end_relays(self) -> None:
        """Ends what is served to peers. When this returns, none of them reads a staging area."""
        if self._relaying is not None:
            self._relaying.end_relay()

    def init_transport(self, config: Mapping[str, Any]) -> list[dict[str, Any]]:
        self.transports[config["backend"]].init(config)
        return [{"rank": 0}]

    def destroy_transport(self, backend: str, group: str | None = None) -> list[dict[str, Any]]:
        transport = self.transports[backend]
        if group is None:
            transport.destroy()
        else:
            transport.leave(group)
        return [{"rank": 0}]


def _kind(request: ReceiveRequest) -> Kind:
    return "base" if request.adapter is None else "lora"


def _nbytes(delivery: Delivery) -> int:
    return sum(spec.nbytes for spec in delivery.specs.values())


def _widest(spec: TensorSpec) -> TensorSpec:
    return TensorSpec("F64", spec.shape) if spec.dtype in FLOAT_DTYPES else spec


def _check_canary(request: ReceiveRequest, delivery: Delivery, limits: CanaryLimits | None) -> None:
    """InvalidRequest for a `canary.json` that is broken, or that the engine can't score. An update that gives its own
    canary, or `off`, does not look at the file."""
    if delivery.canary is None:
        return
    if not request.canary_file:
        delivery.canary = None
        return
    if isinstance(delivery.canary, InvalidRequest):
        raise delivery.canary
    if limits is not None:
        check_vocabulary(delivery.canary, limits["vocab_size"], limits["max_model_len"], CANARY_NAME)

"""Rank 0's part of a publication in which each rank of the trainer owns some of the tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rl_plane.errors import InvalidRequest, PlaneError
from rl_plane.protocol.versions import TensorSpec, tensors_digest
from rl_plane.publish.host_copy import Change, HostCopy, as_tensors
from rl_plane.publish.publish_options import PublishOptions
from rl_plane.publish.ranks.gather_group import GatherGroup
from rl_plane.publish.ranks.link import BEGIN, BEGUN, LeadLink, wire_of
from rl_plane.publish.ranks.meeting import MeetingPoint, agreed_specs
from rl_plane.publish.ranks.ownership import own_specs, owners_of, shares_of
from rl_plane.publish.sources.base import Taken
from rl_plane.transports.base import Sender, SharingSender
from rl_plane.transports.packing import Buffer, Tensor
from rl_plane.weights.manifest import Manifest, PackedBucket


class Lead:
    """Directs the other ranks: one version at a time, from `begin` to `end`. If rank 0 sends a version alone, it only
    tells them the outcome."""

    def __init__(self, meeting: MeetingPoint, options: PublishOptions) -> None:
        self.owners: Mapping[str, int] | None = None
        """The owner of each tensor, while a version is open on all ranks. None: rank 0 gets all tensors."""
        self.reading = False
        """The ranks gather the tensors of the version."""
        self._meeting = meeting
        self._limits = options.limits
        self._algorithm = options.digest
        self._link: LeadLink | None = None
        self._version = 0
        self._taken: Taken | None = None
        self._group: GatherGroup | None = None
        self._groups = itertools.count()
        self._numbers = itertools.count(BEGIN + 1)
        self._calls: dict[str, int] = {}
        """The number of the last command of each kind."""
        self._senders: dict[int, Sender] = {}
        """Rank 0's own senders, by the number under which the other ranks know theirs."""
        self.filled_by = "read"
        """The command by which the ranks pack their shares."""
        self._into: Mapping[str, Any] = {}
        """Fields of `read`, by which the ranks do something else with the tensors than to pack them."""
        self._used: int | None = None
        """The number of the sender that sends this version on all ranks."""

    @property
    def link(self) -> LeadLink:
        if self._link is None:
            self._link = LeadLink(self._meeting.host(), self._meeting.ranks, self._limits)
            self._meeting.announce(self._link.address, self._link.secret)
        return self._link

    def teller(self, number: int) -> Callable[[BaseException | None], None]:
        """Returns what tells each rank the outcome of the version with this number, if rank 0 sends it alone. The other
        ranks find this one from now on, and nothing waits for them."""
        link = self.link

        def tell(error: BaseException | None) -> None:
            body = _outcome(error, sender=None, committed=error is None, keeps_copy=False)
            for rank in range(1, link.ranks):
                link.tell(rank, {"version": number, "call": next(self._numbers), "op": "end", "body": body})

        return tell

    def begin(self, taken: Taken, number: int) -> Taken:
        """Waits until each rank has begun the version with this number, and checks that all have the same tensors.

        Returns the version with tensors that are gathered at their owners: at rank 0, unless a sender of `shared` is
        open by then.
        """
        self._version = number
        self.owners, self.reading, self._taken, self._used = None, False, taken, None
        self.filled_by, self._into = "read", {}
        self.tell_all(BEGUN)
        begun = self.link.replies(self._version, BEGIN)
        self._check_agreed(taken, begun)
        if self._group is None or self._group.broken or any(one["broken"] for one in begun.values()):
            self._drop_group()
            name = f"{self._meeting.name}/gather{next(self._groups)}"
            self._group = GatherGroup(
                0,
                self.link.ranks,
                name,
                self.link.address,
                bound_s=self._limits.ranks_s,
                check=self._check_gather,
                step=self.step,
            )
        return replace(taken, tensors=self._tensors(taken), held={})

    def _check_agreed(self, taken: Taken, begun: Mapping[int, Any]) -> None:
        own = agreed_specs(taken, self._algorithm)
        other = next((rank for rank, one in begun.items() if one["specs"] != own), None)
        if other is None:
            return
        self.tell_all("describe")
        theirs = [(name, dtype, tuple(shape)) for name, dtype, shape in self.replies("describe")[other]]
        ours = [(name, spec.dtype, spec.shape) for name, spec in taken.specs]
        pairs = itertools.zip_longest(ours, theirs)
        what = next(
            (f"{here} on rank 0, {there} there" for here, there in pairs if here != there),
            "how they lie, or `digest`",
        )
        raise InvalidRequest(
            f"rank {other} of the trainer has other tensors than rank 0: {what}",
            field="source",
            fix="give every rank the same model, names and dtype",
        )

    def _tensors(self, taken: Taken) -> Iterator[tuple[str, Tensor]]:
        group, owners = self._group, self.owners
        assert group is not None
        assert taken.owned is not None
        self.reading = True
        self.tell_all("read", {"group": group.name, "shared": owners is not None, **self._into})
        try:
            yield from taken.owned(owners or dict.fromkeys((name for name, _ in taken.specs), 0), group)
        except BaseException as error:
            if group.broken:
                self.tell_all("abort", {"error": wire_of(error, "rank 0: ")})
            raise

    def _check_gather(self, since: float, what: str) -> None:
        self.link.check_step(since, what, self._version)

    def shared(self, sender: Sender, workers: Callable[[], Sequence[Mapping[str, Any]]]) -> Sender:
        """A sender that sends each tensor from its owner; `sender` itself if its transport can't. `workers`: asks for
        the rows of the fleet's engines."""
        taken = self._taken
        assert taken is not None
        if not isinstance(sender, SharingSender):
            return sender
        number = next((number for number, one in self._senders.items() if one is sender), None)
        if number is None:
            number = max(self._senders, default=0) + 1
            self._senders[number] = sender
        facts = ("instance_id", "namespace", "component", "host", "transports")
        rows = [{key: row.get(key) for key in facts} for row in workers()]
        self._used = number
        self.tell_all("sender", {"backend": sender.backend, "number": number, "workers": rows})
        self.replies("sender")
        return SharedSender(sender, self, self._owners_of(taken))

    def _owners_of(self, taken: Taken) -> Mapping[str, int]:
        return owners_of(taken.specs, taken.shared, self.link.ranks)

    # ---- copies, for deltas ----

    def has_room(self, copy: HostCopy, taken: Taken) -> bool:
        """True if each rank has made room for a copy of the tensors that it owns. `copy`: rank 0's."""
        copy.make_room(replace(taken, specs=own_specs(taken.specs, self._owners_of(taken), 0)))
        self.tell_all("room")
        return all(self.replies("room").values())

    def read_copies(self, copy: HostCopy, taken: Taken) -> Change:
        """Reads the tensors into the copies of their owners. Returns how the version differs from the one before.

        The `deltas` are those of rank 0, and the `sizes` those of all ranks.

        Args:
            copy: rank 0's copy. Its digest is that of the whole version.
            taken: the version, as `begin` has returned it.
        """
        self.owners = owners = self._owners_of(taken)
        self._into = {"into": "copy", "compare": copy.digest is not None}
        change = copy.read(replace(taken, specs=own_specs(taken.specs, owners, 0)))
        digests, sizes = dict(copy.tensor_digests), change.sizes
        for reply in self.replies("read").values():
            digests.update(reply["digests"])
            sizes = None if sizes is None or reply["sizes"] is None else {**sizes, **reply["sizes"]}
        copy.digest = tensors_digest([(name, spec, digests[name]) for name, spec in taken.specs])
        return replace(change, digest=copy.digest, sizes=sizes)

    def from_copies(self, copy: HostCopy, change: Change, deltas: bool) -> Taken:
        """Returns the version in full, or its deltas. Each owner sends its part from its copy."""
        assert self._taken is not None, "begin comes first"
        sizes, taken = change.sizes, self._taken
        if not deltas:
            specs, own = list(taken.specs), copy.whole()
        else:
            assert sizes is not None
            assert change.deltas is not None
            own = as_tensors(change.deltas)
            specs = [(name, TensorSpec("U8", (sizes[name],))) for name, _ in taken.specs if name in sizes]

        def tensors() -> Iterator[tuple[str, Tensor]]:
            self.tell_all("send", {"deltas": deltas})
            self.filled_by = "send"
            yield from own.tensors

        return Taken(specs, tensors())

    def tell(self, op: str, bodies: Mapping[int, Any]) -> None:
        """Sends a command of this version to some ranks, to each its own body."""
        call = self._calls[op] = next(self._numbers)
        for rank, body in bodies.items():
            self.link.tell(rank, {"version": self._version, "call": call, "op": op, "body": body})

    def tell_all(self, op: str, body: Mapping[str, Any] | None = None) -> None:
        """Sends a command of this version to all ranks."""
        self.tell(op, dict.fromkeys(range(1, self.link.ranks), body or {}))

    def replies(self, op: str, ranks: Collection[int] | None = None) -> dict[int, Any]:
        """Waits for the replies of these ranks (None: all) to the last command of this kind. Raises the first error."""
        return self.link.replies(self._version, self._calls[op], ranks)

    def step(self) -> None:
        """Counts a tensor that was gathered."""
        self.link.step += 1

    def failure(self) -> PlaneError | None:
        """The error of another rank that explains why this version has failed here. A broken group explains nothing:
        it breaks on all ranks."""
        try:
            self.link.check()
        except PlaneError as error:
            return error
        reported = self.link.reported(self._version)
        return None if reported is None or reported.facts.get("field") == "transport.group" else reported

    def end(self, error: BaseException | None, committed: bool, keeps_copy: bool) -> None:
        """Tells each rank the outcome of the version.

        Args:
            error: what `publish` raises on all ranks.
            committed: the version was committed, perhaps in spite of the error.
            keeps_copy: rank 0 has a copy for the next delta, so the other ranks keep theirs.
        """
        if self._taken is None:
            return
        self._taken = None
        sender = self._used if error is None else None
        if error is None:  # workers heal from the last sender alone
            self._senders = {number: one for number, one in self._senders.items() if number == sender}
        self.tell_all("end", _outcome(error, sender, committed, keeps_copy))

    def _drop_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.drop()

    def close(self) -> None:
        self._drop_group()
        if self._link is not None:
            self._link.close()


def _outcome(error: BaseException | None, sender: int | None, committed: bool, keeps_copy: bool) -> dict[str, Any]:
    """The body of `end`. `sender`: the number of the sender from which workers heal now."""
    return {
        "error": None if error is None else wire_of(error, "rank 0: "),
        "sender": sender,
        "committed": committed,
        "keeps_copy": keeps_copy,
    }


class SharedSender(Sender):
    """Opens, finishes, keeps and closes a version on all ranks. `buffer` and `send` are for rank 0's own share."""

    def __init__(self, inner: SharingSender, others: Lead, owners: Mapping[str, int]) -> None:
        """`inner`: rank 0's own sender."""
        self.backend = inner.backend
        self.receivers_from = inner.receivers_from
        self.bucket_bytes = inner.bucket_bytes
        self.slow = inner.slow
        self.own_share = Manifest(())
        """The tensors that rank 0 sends itself. It always owns some."""
        self._inner = inner
        self._others = others
        self._owners = owners
        self._manifests: dict[int, Manifest] = {}
        self._open = False

    def pack(self, specs: Iterable[tuple[str, TensorSpec]], bucket_bytes: int) -> tuple[PackedBucket, ...]:
        """Packs the share of each owner for itself."""
        shares = shares_of(list(specs), self._owners)
        self._manifests = {rank: Manifest(self._inner.pack(share, bucket_bytes)) for rank, share in shares.items()}
        return tuple(bucket for manifest in self._manifests.values() for bucket in manifest.buckets)

    def open(self, manifest: Manifest) -> dict[str, Any]:
        inner, ranks = self._inner, [rank for rank in self._manifests if rank]
        own = self.own_share = self._manifests[0]
        inner.device = self.device
        self._open = True
        plan = inner.plan_shares(self._manifests)
        offers = self._on_each("announce", lambda: inner.announce(plan), dict.fromkeys(ranks, plan))
        inner.assemble(plan, offers)
        shares = {rank: {"manifest": self._manifests[rank].to_wire(), "plan": plan} for rank in ranks}
        parts = self._on_each("open", lambda: inner.open_share(0, own, plan), shares)
        self._others.owners = self._owners
        self.fingerprint = inner.fingerprint
        return inner.joined(parts)

    def _on_each(
        self, op: str, own: Callable[[], dict[str, Any]], bodies: Mapping[int, Any]
    ) -> dict[int, dict[str, Any]]:
        """Runs an op on each rank that has a share. Returns the results by rank."""
        self._others.tell(op, bodies)
        first = {0: own()}
        replies = self._others.replies(op, bodies)
        return {**first, **{rank: replies[rank] for rank in sorted(bodies)}}

    def buffer(self, number: int) -> Buffer:
        return self._inner.buffer(number)

    def send(self, number: int) -> None:
        self._inner.send(number)

    def collect(self, digests: Mapping[str, str]) -> dict[str, str]:
        """Waits until each rank has packed and hashed its share. Returns the digests of all tensors."""
        found = dict(digests)
        for reply in self._others.replies(self._others.filled_by).values():
            found.update(reply["digests"])
        return found

    def finish(self, digests: Mapping[str, str] | None) -> None:
        assert digests is not None, "every rank hashes its share"
        self._others.tell_all("finish")
        self._inner.finish({name: digests[name] for name in self.own_share.specs})
        self._others.replies("finish")
        self._inner.seal(digests)

    def keep(self, adapter: str | None = None, onto_previous: bool = False, earlier: int | None = None) -> None:
        if type(self._inner).keep is Sender.keep:
            return  # it keeps nothing, so no rank has to be asked
        self._others.tell_all("keep", {"onto_previous": onto_previous, "earlier": earlier})
        self._inner.keep(adapter, onto_previous, earlier)
        self._others.replies("keep")

    def close(self) -> None:
        if self._open:
            self._open = False
            self._others.owners = None
            self._others.tell_all("close")
        self._inner.close()

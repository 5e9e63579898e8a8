"""The part of a rank other than 0: it obeys rank 0, gathers with all ranks, and sends the tensors that it owns."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from rl_plane.errors import OutcomeUnknown, PlaneError, Unavailable, error_from_wire
from rl_plane.publish.host_copy import Change, HostCopy, as_tensors
from rl_plane.publish.publication import RunningPublication
from rl_plane.publish.publish_options import PublishOptions
from rl_plane.publish.ranks.gather_group import GatherGroup
from rl_plane.publish.ranks.link import BEGIN, FollowingRankLink
from rl_plane.publish.ranks.meeting import MeetingPoint, agreed_specs
from rl_plane.publish.ranks.ownership import own_specs, owners_of
from rl_plane.publish.send_plan import SenderFactory
from rl_plane.publish.sources.base import Taken, drain
from rl_plane.transports.base import SenderContext, SharingSender
from rl_plane.transports.packing import Tensor, fill
from rl_plane.weights.manifest import Manifest

log = logging.getLogger("rl_plane.publish")


class Follower:
    """A rank other than 0, from one version to the next."""

    def __init__(
        self, meeting: MeetingPoint, options: PublishOptions, make_sender: SenderFactory, copy: HostCopy
    ) -> None:
        """`copy`: takes the tensors that this rank owns, where deltas are sent."""
        self.copy = copy
        self.meeting = meeting
        self.options = options
        self.group: GatherGroup | None = None
        self._make_sender = make_sender
        self._link: FollowingRankLink | None = None
        self._senders: dict[int, SharingSender] = {}
        """The senders of this rank. The key is the number that rank 0 has given the sender."""

    @property
    def link(self) -> FollowingRankLink:
        if self._link is None:
            address, secret = self.meeting.find(self.options.limits.ranks_s)
            self._link = FollowingRankLink(address, secret, self.meeting.rank, self.options.limits)
            self._address = address
        return self._link

    def begin(self, publication: RunningPublication, taken: Taken) -> Following:
        """Begins the next version."""
        return Following(self, publication, taken)

    def sender(self, number: int, backend: str, workers: list[Mapping[str, Any]]) -> SharingSender:
        """Returns this rank's sender with rank 0's number, and makes it if the number is new."""
        if number not in self._senders:
            options = self.options
            sender = self._make_sender(
                backend,
                SenderContext(
                    run=lambda op, body: {"workers": workers},
                    root=options.root,
                    options=options.transport_options,
                    trainer_stays=options.trainer_stays,
                    rank=self.meeting.rank,
                ),
            )
            assert isinstance(sender, SharingSender), "as on rank 0"
            self._senders[number] = sender
        return self._senders[number]

    def keep_only(self, number: int | None) -> None:
        """Ends all senders but one, since the version that they sent is replaced."""
        for other in [one for one in self._senders if one != number]:
            self._senders.pop(other).destroy()

    def gather_group(self, name: str, check: Callable[[float, str], None]) -> GatherGroup:
        """The group of this name."""
        if self.group is None or self.group.name != name:
            self.drop_group()
            self.group = GatherGroup(
                self.meeting.rank,
                self.meeting.ranks,
                name,
                self._address,
                bound_s=self.options.limits.ranks_s,
                check=check,
                step=self.step,
            )
        self.group.check = check
        return self.group

    def step(self) -> None:
        """Counts a tensor that was gathered."""
        self.link.step += 1

    def drop_group(self) -> None:
        group, self.group = self.group, None
        if group is not None:
            group.drop()

    def close(self) -> None:
        self.keep_only(None)
        self.drop_group()
        if self._link is not None:
            self._link.close()


class Following:
    """One version on a rank other than 0: `read` gathers and packs, or `gather` only gathers. `end` waits for the
    outcome."""

    def __init__(self, follower: Follower, publication: RunningPublication, taken: Taken) -> None:
        self._follower = follower
        self._publication = publication
        self._taken = taken
        self._version = publication.number
        self._sender: SharingSender | None = None
        self._manifest: Manifest | None = None
        """This rank's share; None if it owns nothing, or if rank 0 sends all."""
        self._digests: dict[str, str] = {}
        self._change: Change | None = None
        """The difference from the version before, if the tensors were read into the copy."""
        self._error: BaseException | None = None
        self._aborted: PlaneError | None = None
        self._ended = False

    def read(self) -> None:
        """Obeys rank 0 until the tensors are read. Never raises: `end` reports the error."""
        try:
            link, group = self._follower.link, self._follower.group
            link.interrupt = self._interrupt
            broken = group is not None and group.broken
            link.reply(
                self._version,
                BEGIN,
                {"specs": agreed_specs(self._taken, self._follower.options.digest), "broken": broken},
            )
            self._obey(until="read", begins_within_s=self._follower.options.limits.ranks_s)
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):  # Ctrl-C on this rank: the others must not wait for it
                self._follower.link.reply(self._version, BEGIN, error=error, broken=True)
                self._close_sender()
                self._publication.end(error=error)
                raise
        finally:
            self._taken.close()
            self._publication.finish_reading()

    def gather(self) -> None:
        """Gathers with the other ranks for rank 0, which sends all. Raises only Ctrl-C: `end` reports the error. A rank
        that can't reach rank 0 gathers too, and does not learn the outcome."""
        try:
            try:
                self._follower.link.interrupt = self._interrupt
            except Unavailable as error:
                self._ended = True
                log.warning(
                    "this rank does not learn whether %s is committed: %s; %s",
                    self._publication.version,
                    error,
                    error.facts["fix"],
                )
            finally:  # the other ranks gather in any case
                drain(self._taken.tensors)
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):
                self._publication.end(error=error)
                raise
        finally:
            self._taken.close()
            self._publication.finish_reading()

    def end(self) -> None:
        """Obeys rank 0 until it tells the outcome, and sets the publication's."""
        try:
            if not self._ended and self._error is None:
                self._obey(until="end")
        except BaseException as error:
            self._fail(error)
        if self._error is not None and not isinstance(self._error, OutcomeUnknown):  # rank 0 closes it later
            self._close_sender()
        self._publication.end({} if self._error is None else None, self._error)

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or self._publication.given_up or error
        if self._change is not None:  # this rank may never learn whether the copy has the committed version
            self._follower.copy.forget()

    def _obey(self, until: str, begins_within_s: float | None = None) -> None:
        link = self._follower.link
        while not self._ended:
            command = link.next_command(self._version, begins_within_s)
            op, body, call = command["op"], command["body"], command["call"]
            if op == "end":
                self._take_outcome(body)
                return
            try:
                value = getattr(self, f"_on_{op}")(body)
            except Exception as error:
                group = self._follower.group
                link.reply(self._version, call, error=error, broken=group is not None and group.broken)
            else:
                link.reply(self._version, call, value)
            if op == until:
                return

    def _take_outcome(self, body: Mapping[str, Any]) -> None:
        self._ended = True
        copy = self._follower.copy
        if self._change is not None and not body["committed"]:
            copy.take_back(self._change)
        if not body["keeps_copy"]:
            copy.drop()
        if body["error"] is not None:
            self._error = error_from_wire(body["error"])
        else:
            self._follower.keep_only(body["sender"])

    def _interrupt(self, command: dict[str, Any]) -> None:
        """Obeys `close` and `abort`, on the link's thread."""
        if command["version"] != self._version:
            return
        if command["op"] == "abort":
            self._aborted = error_from_wire(command["body"]["error"])
        self._close_sender()

    def _close_sender(self) -> None:
        if self._sender is not None:
            try:
                self._sender.close()
            except Exception:
                log.exception("the sender of %s does not close", self._publication.version)

    # ---- the commands of rank 0 ----

    def _on_describe(self, body: Mapping[str, Any]) -> list[Any]:
        return [[name, spec.dtype, list(spec.shape)] for name, spec in self._taken.specs]

    def _on_sender(self, body: Mapping[str, Any]) -> None:
        self._manifest = None
        self._sender = self._follower.sender(body["number"], body["backend"], body["workers"])
        self._sender.device = self._taken.device

    def _on_announce(self, plan: Mapping[str, Any]) -> dict[str, Any]:
        assert self._sender is not None, "it was named before"
        return self._sender.announce(plan)

    def _on_open(self, body: Mapping[str, Any]) -> dict[str, Any]:
        assert self._sender is not None, "it was named before"
        self._manifest = Manifest.from_wire(body["manifest"])
        return self._sender.open_share(self._follower.meeting.rank, self._manifest, body["plan"])

    def _on_read(self, body: Mapping[str, Any]) -> dict[str, Any]:
        taken, ranks = self._taken, self._follower.meeting.ranks
        assert taken.owned is not None
        owners = owners_of(taken.specs, taken.shared if body["shared"] else (), ranks)
        gather = self._follower.gather_group(body["group"], self._check)
        tensors = taken.owned(owners, gather)
        try:
            if body.get("into") == "copy":
                return self._read_copy(owners, self._publication.readable(tensors), body["compare"])
            self._follower.copy.drop()
            return self._fill(self._publication.readable(tensors))
        finally:
            drain(tensors)

    def _read_copy(
        self, owners: Mapping[str, int], tensors: Iterator[tuple[str, Tensor]], compare: bool
    ) -> dict[str, Any]:
        """Reads the tensors that this rank owns into its copy. `compare`: rank 0's copy has a version to compare."""
        copy, own = self._follower.copy, own_specs(self._taken.specs, owners, self._follower.meeting.rank)
        if not compare:
            copy.forget()
        if not own:
            drain(tensors)
            return {"digests": {}, "sizes": {}}
        self._change = copy.read(replace(self._taken, specs=own, tensors=tensors))
        return {"digests": dict(copy.tensor_digests), "sizes": self._change.sizes}

    def _on_room(self, body: Mapping[str, Any]) -> bool:
        """True if there is room for a copy of the tensors that this rank owns."""
        taken, meeting = self._taken, self._follower.meeting
        own = own_specs(taken.specs, owners_of(taken.specs, taken.shared, meeting.ranks), meeting.rank)
        try:
            self._follower.copy.make_room(replace(taken, specs=own))
        except (MemoryError, OSError) as error:
            log.info("rank %d has no room for a copy: %s", meeting.rank, error)
            return False
        return True

    def _on_send(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Packs this rank's share out of its copy: in full, or the deltas."""
        self._digests = {}
        if self._manifest is None:
            return {"digests": {}}
        if not body["deltas"]:
            return self._fill(self._follower.copy.whole().tensors)
        assert self._change is not None
        assert self._change.deltas is not None
        return self._fill(as_tensors(self._change.deltas).tensors)

    def _fill(self, tensors: Iterator[tuple[str, Tensor]]) -> dict[str, Any]:
        manifest, sender = self._manifest, self._sender
        if manifest is None:
            drain(tensors)
            return {"digests": {}}
        assert sender is not None
        algorithm = self._follower.options.digest
        for number in fill(manifest, tensors, sender.buffer, self._digests, algorithm=algorithm):
            sender.send(number)
        return {"digests": self._digests}

    def _check(self, since: float, what: str) -> None:
        if self._aborted is not None:
            raise self._aborted
        if self._publication.given_up is not None:
            raise self._publication.given_up
        self._follower.link.check()

    def _on_finish(self, body: Mapping[str, Any]) -> None:
        if self._manifest is not None and self._sender is not None:
            self._sender.finish(self._digests)

    def _on_keep(self, body: Mapping[str, Any]) -> None:
        if self._manifest is not None and self._sender is not None:
            self._sender.keep(None, body["onto_previous"], body["earlier"])

"""Chooses and owns the sender of one publisher, and asks the fleet what is committed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from rl_plane.errors import DeadlineExceeded, PlaneError, Unavailable
from rl_plane.publish.fleet_access import BlockingFleet
from rl_plane.publish.publish_options import PublishOptions
from rl_plane.transports.base import Sender, SenderContext, members
from rl_plane.transports.registry import candidates, installed, is_passed_over, none_can_be_made

log = logging.getLogger("rl_plane.publish")

SenderFactory = Callable[[str, SenderContext], Sender]
"""Makes the sender of the transport with this name."""


class SendPlan:
    """The fleet of one publisher, and the sender by which its versions go. Lives on rank 0."""

    def __init__(self, fleet: BlockingFleet, options: PublishOptions, make_sender: SenderFactory) -> None:
        self.fleet = fleet
        self._make_sender = make_sender
        self.options = options
        self.backend: str | None = None
        """The transport of the last version."""
        self.slow = False
        """True if sending bytes takes longer than comparing them with the version before, so that deltas pay."""
        self._sender: Sender | None = None
        self._colocated = True
        """All workers were on this machine when the sender was made."""
        self._replaced: Sender | None = None
        """The sender before. Workers heal from it until a version by the new one is committed."""
        self.unsettled: Sender | None = None
        """The sender of a version that may be committed, because no answer has come. Workers can fetch that version
        until the next one is opened."""
        self._to_withdraw = ""
        """The id of a prepared update that the fleet could not be asked to abort."""

    @property
    def changes_sender(self) -> bool:
        """True if the next commit ends the sender before, and with it what workers could fetch from there."""
        return self._replaced is not None

    def workers(self) -> list[Mapping[str, Any]]:
        """The rows of the fleet's engines, once as many are there as the options ask for."""
        options = self.options
        return members(self.fleet.run("workers", {"min_workers": options.workers, "wait_s": options.wait_s}))

    def digest_of(self, label: str) -> str | None:
        """The digest of the committed version, if an update has brought it under this label and every worker serves it.

        A worker that does not serve it may have no source to fetch it from. None too if the fleet gives no answer: the
        `publish` that follows reports the reason.
        """
        try:
            self.workers()
            state = self.fleet.run("state", {})
        except PlaneError:
            return None
        adapter = self.options.adapter
        version = state["version"] if adapter is None else state["adapters"].get(adapter)
        brought = state["ready"] and version is not None and version["label"] == label and version["sequence"] > 0
        return str(version["digest"]) if brought else None

    def is_refetchable(self, digest: str | None) -> bool:
        """True if the fleet says that a worker can fetch the committed version of this digest again."""
        updates = self.fleet.run("updates", {})["updates"]
        found = (
            one["refetchable"] for one in updates if one["digest"] == digest and one["outcome"] == "committed"
        )
        return bool(next(found, False))

    def is_kept(self, base: str | None) -> bool:
        """True if every worker keeps the version of this digest, or some do and the others can fetch it. A delta or a
        partial version can then be built on it.

        A worker that serves the version without keeping it never will: its model may tie tensors, for example. It would
        be left out of the update.
        """
        self.ready_sender()
        if self.changes_sender:
            return False  # the base would end with the sender before
        workers = self.workers()
        lacking = [row for row in workers if row.get("kept") != base]
        if any((row.get("version") or {}).get("digest") == base for row in lacking):
            return False
        return not lacking or (len(lacking) < len(workers) and self.is_refetchable(base))

    def ready_sender(self) -> Sender:
        """The sender of the best transport that this trainer and the fleet of this moment both have."""
        workers, options = self.workers(), self.options
        backends = candidates(
            options.transport,
            workers,
            installed(),
            with_root=options.root is not None,
            trainer_stays=options.trainer_stays,
        )
        context = SenderContext(
            run=self.fleet.run,
            root=options.root,
            options=options.transport_options,
            nats_url=self.fleet.nats_url,
            credentials=self.fleet.credentials,
            adapter=options.adapter,
            trainer_stays=options.trainer_stays,
        )
        colocated = context.colocated(workers)
        # A sender that was made for this machine alone can't be reached from another, unless the trainer gave an
        # address.
        too_far = self._colocated and not colocated and "host" not in options.transport_options
        refused: dict[str, PlaneError] = {}
        for backend in backends:
            if self._sender is not None and backend == self.backend and not too_far:
                self.slow = _is_slow(self._sender, colocated)
                return self._sender
            try:
                sender = self._make_sender(backend, context)  # an error leaves the sender before in its place
            except PlaneError as error:
                if not is_passed_over(error):
                    raise
                refused[backend] = error
                continue
            if self._replaced is None:
                self._replaced = self._sender
            elif self._sender is not None:
                self._sender.destroy()  # no version of this sender was committed
            self._sender, self.backend, self._colocated = sender, backend, colocated
            self.slow = _is_slow(sender, colocated)
            return sender
        raise none_can_be_made(refused)

    def withdraw(self, update_id: str) -> None:
        """Aborts a prepared update, so that no worker waits for it. If no answer comes, `withdraw_left` repeats it."""
        self._to_withdraw = update_id
        self.withdraw_left()

    def withdraw_left(self) -> None:
        """Aborts the prepared update that `withdraw` could not abort, if there is one."""
        if not self._to_withdraw:
            return
        try:
            self.fleet.run("abort_weights_update", {"update_id": self._to_withdraw})
        except (Unavailable, DeadlineExceeded) as error:
            log.info("%s is not aborted yet: %s", self._to_withdraw, error)
            return
        except PlaneError as error:  # it has ended. If it was committed after all, the fleet says so
            log.info("%s: %s", self._to_withdraw, error)
        self._to_withdraw = ""

    def close_unsettled(self) -> None:
        """Closes the sender of the version before, if that may be committed."""
        sender, self.unsettled = self.unsettled, None
        if sender is None:
            return
        try:
            sender.close()
        except Exception as error:  # it is no failure of what comes next
            log.warning("the sender of the version before could not be closed: %s", error)

    def committed(self) -> None:
        """Ends the sender before: from here on no worker heals from it."""
        replaced, self._replaced = self._replaced, None
        if replaced is not None:
            replaced.destroy()

    def close(self) -> None:
        """Ends all senders and the connection to the fleet."""
        self.close_unsettled()
        for sender in (self._sender, self._replaced):
            if sender is not None:
                sender.destroy()
        self._sender = self._replaced = None
        self.fleet.close()


def _is_slow(sender: Sender, colocated: bool) -> bool:
    return not colocated if sender.slow is None else sender.slow

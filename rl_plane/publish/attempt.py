"""Publishes one version, on rank 0: reads the tensors, sends them, and has the fleet commit the update."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from rl_plane.errors import (
    BusUnreachable,
    Conflict,
    DeadlineExceeded,
    FrontendEnding,
    InvalidRequest,
    Locked,
    MembershipChanged,
    NotAtBase,
    OutcomeUnknown,
    PlaneError,
    StaleFence,
    Unavailable,
    UpdateAborted,
)
from rl_plane.publish.publication import RunningPublication
from rl_plane.publish.ranks.lead import Lead, SharedSender
from rl_plane.publish.send_plan import SendPlan
from rl_plane.publish.sources.base import Taken, WeightSource, drain
from rl_plane.publish.threads import on_thread
from rl_plane.transports.base import Sender
from rl_plane.transports.packing import Buffer, fill
from rl_plane.weights.manifest import Manifest

log = logging.getLogger("rl_plane.publish")

ATTEMPTS = 3
"""The number of times that an op is called, with the same id, if its answer is a temporary error, or it lost its
lock."""
JOINS = 1
"""The number of times that a version is sent again because a worker has joined that can't fetch what was pushed."""

T = TypeVar("T")


class _SendFailed(Exception):
    """The transport's own failure. The fleet's error, if there is one, says more."""


class Attempt:
    """One publication on rank 0: `read` takes the tensors out of the source, `end` waits for the fleet."""

    def __init__(
        self,
        plan: SendPlan,
        source: WeightSource,
        publication: RunningPublication,
        previous: RunningPublication | None,
        fields: Mapping[str, Any] | None = None,
        *,
        lends: bool = False,
        joins: int = 0,
        earlier: int | None = None,
        make_lead: Callable[[], Lead] | None = None,
        lead: Lead | None = None,
    ) -> None:
        """Makes the attempt.

        Args:
            fields: further fields of the update's body.
            lends: the tensors stay unchanged until the publication ends, so receivers may read them in place.
            joins: how often the source may be read again.
            earlier: how many of the versions that the sender keeps the new one is built on, the full one first. None:
                all. For a delta or a partial version.
            make_lead: finds what directs the other ranks, for a source of which each rank can own tensors.
            lead: directs the other ranks, which have begun the version already.
        """
        self._make_lead = make_lead
        self._lead = lead
        """Directs the other ranks, once they have to take part."""
        self._earlier = earlier
        self._fields = fields or {}
        self._lends = lends
        self._joins = joins
        self._lent: Collection[int] = ()
        """Numbers of the buckets that receivers read in place."""
        self._plan = plan
        self._fleet = plan.fleet
        self._source = source
        self._publication = publication
        self._previous = previous
        self._sender: Sender | None = None
        self._update: Future[dict[str, Any]] | None = None
        self._prepared = ""
        """The id of the update for which receivers listen. Empty: they need not."""
        self._update_id = ""
        """The id under which the fleet has the update in its history."""
        self._body: dict[str, Any] = {}
        self._manifest: Manifest | None = None
        self._digests: dict[str, str] = {}
        self._error: BaseException | None = None
        self.committed = False
        """True if the version was committed although the publication has failed."""

    def read(self) -> None:
        """Takes the tensors out of the source, and sends them. Never raises: `end` reports the error.

        A collective source is used up even after an error, since the other ranks take part in the gathering.
        """
        taken: Taken | None = None
        late: PlaneError | None = None
        try:
            if self._previous is not None:
                try:
                    self._publication.wait_for(self._previous, self._plan.options.bound_s())
                except Locked as error:
                    late = error
            self._publication.begin_reading()
            taken = self._take()
            self._publication.pause_reading()
            if taken.owned is not None and self._make_lead is not None:
                self._lead = self._make_lead()
                taken = self._lead.begin(taken, self._publication.number)
            if late is not None:
                raise late
            if not taken.specs:
                raise InvalidRequest("there are no tensors", field="source", fix="give weights")
            self._send(replace(taken, tensors=self._publication.readable(taken.tensors)))
        except BaseException as error:
            self._error = self._publication.given_up or error
        finally:
            if taken is not None:
                if self._source.collective and (self._lead is None or self._lead.reading):
                    self._do_anyway(partial(drain, taken.tensors))
                self._do_anyway(taken.close)
            if not self._lent and not self._joins:  # else they may be read until the end
                self._publication.finish_reading()
            elif not self._lent:
                self._publication.pause_reading()

    def _take(self) -> Taken:
        return self._source.take()

    @property
    def manifest(self) -> Manifest | None:
        """The tensors that were sent. None: nothing was sent."""
        return self._manifest

    @property
    def digests(self) -> Mapping[str, str]:
        """The digests of the tensors that were read."""
        return self._digests

    def _do_anyway(self, act: Callable[[], object]) -> None:
        """Runs `act`. Its error is recorded only if there is none yet, or if it is Ctrl-C."""
        try:
            act()
        except BaseException as error:
            if self._error is None or not isinstance(error, Exception):
                self._error = error

    def _send(self, taken: Taken) -> None:
        publication = self._publication
        sender, manifest = self._open_with_retries(taken)
        if self._lends and taken.held:
            held = taken.held
            self._lent = _transport_call(lambda: sender.lend(held))
        if isinstance(sender, SharedSender):
            manifest = sender.own_share
        sizes = [bucket.nbytes for bucket in manifest.buckets]
        publication.report("sending", buckets=0, of_buckets=len(sizes), nbytes=0, of_nbytes=sum(sizes))

        def buffer(number: int) -> Buffer:
            return _transport_call(lambda: sender.buffer(number))

        for number in fill(manifest, taken.tensors, buffer, self._digests, self._lent, self._plan.options.digest):
            _transport_call(lambda number=number: sender.send(number))  # type: ignore[misc]
            publication.report("sending", buckets=number + 1, nbytes=sum(sizes[: number + 1]))

    def _open_with_retries(self, taken: Taken) -> tuple[Sender, Manifest]:
        """Opens the update, again if a worker joins meanwhile, or if another trainer's group has replaced this one's.

        No tensor has been read yet, so every kind of source allows it.
        """
        for _ in range(self._plan.options.limits.openings - 1):
            try:
                return self._open(taken)
            except (MembershipChanged, InvalidRequest) as error:
                if isinstance(error, InvalidRequest) and error.facts.get("field") != "transport.group":
                    raise
                log.info("%s is opened once more: %s", self._publication.version, error)
            if self._prepared:
                self._plan.withdraw(self._prepared)  # its answer may have been lost
                self._prepared = ""
            if self._sender is not None:
                self._sender.close()
        return self._open(taken)

    def _open(self, taken: Taken) -> tuple[Sender, Manifest]:
        plan = self._plan
        self._body = {**plan.options.body(self._publication.version), **self._fields}
        self._body["policy"] = {**self._body["policy"], **self._publication.policy}
        sender = self._sender = plan.ready_sender()
        if self._fields.get("base") is not None and plan.changes_sender:
            raise NotAtBase(
                "the version that this one changes ends with the sender before",
                field="encoding",
                fix="send the full version",
            )
        bucket_bytes = plan.options.bucket_bytes
        if bucket_bytes is None:
            bucket_bytes = sender.bucket_bytes
        if self._lead is not None:
            sender = self._sender = self._lead.shared(sender, plan.workers)
        packed = sender.pack(taken.specs, bucket_bytes)
        manifest = self._manifest = Manifest(packed, taken.adapter_config)
        sender.device = taken.device

        def opened() -> dict[str, Any]:
            plan.withdraw_left()  # an update that still waits keeps every other one out
            plan.close_unsettled()
            return sender.open(manifest)

        self._body["transport"] = self._retry_while_locked(opened)
        if sender.fingerprint is not None:
            self._swap_if_loaded()
            self._prepared = uuid.uuid4().hex
            body = {**self._body, "fingerprint": sender.fingerprint}
            self._retry_while_locked(lambda: self._run("prepare_weights_update", body, self._prepared))
        elif sender.receivers_from == "open":
            self._check_not_given_up()
            self._update = self._start_update()
        return sender, manifest

    def _check_not_given_up(self) -> None:
        """Raises UpdateAborted if the publication was given up. If it is given up later, the sender is closed."""
        assert self._sender is not None
        self._publication.on_give_up(partial(self._close, self._sender))

    def _retry_while_locked(self, act: Callable[[], T]) -> T:
        """Returns what `act` returns. While another trainer's update makes it raise Locked, it is called again.

        The first Locked after `others_s` is raised. If the publication is given up, UpdateAborted is raised.
        """
        until = time.monotonic() + self._plan.options.limits.others_s
        while True:
            self._check_not_given_up()
            try:
                return act()
            except Locked:
                if time.monotonic() > until or self._wants_only_the_reason:
                    raise
            time.sleep(self._plan.options.limits.again_s)

    @property
    def _wants_only_the_reason(self) -> bool:
        """True if the sending has failed, so that the fleet's answer is wanted only for its reason."""
        return self._error is not None and not self._prepared

    @property
    def interrupted(self) -> bool:
        """True if Ctrl-C came while the source was read."""
        return self._error is not None and not isinstance(self._error, Exception)

    def give_up(self, error: BaseException) -> None:
        """Ends the publication with this error, however far it has come."""
        self._error = self._error or error
        self.end()

    def read_and_end(self) -> None:
        self.read()
        self.end()

    def end(self) -> None:
        """Waits for the fleet, and sets the publication's outcome, on all ranks."""
        try:
            reply = self.committed_by_all()
        except BaseException as error:
            named = _with_worker_named(error)
            self._tell_ranks(named)
            self._publication.end(error=named)
        else:
            self._tell_ranks(None)
            self._publication.end(reply)

    def _tell_ranks(self, error: BaseException | None) -> None:
        if self._lead is not None:
            self._lead.end(error, committed=error is None or self.committed, keeps_copy=self._keeps_copy())
        else:
            self._publication.tell_ranks(error)

    def _keeps_copy(self) -> bool:
        """True if the publisher has a copy of this version, for the next delta."""
        return False

    def committed_by_all(self) -> dict[str, Any]:
        """Returns the update's reply. Sends the version again for workers that have joined and can't fetch it."""
        try:
            return self._committed()
        except MembershipChanged as error:
            if not self._joins or _failed_rows(error):
                raise
            log.info("%s is sent once more: %s", self._publication.version, error)
        return self._sent(
            self._source,
            self._fields,
            lends=self._lends,
            joins=self._joins - 1,
            earlier=self._earlier,
            lead=self._lead,
        )[1]

    def _sent(
        self,
        source: WeightSource,
        fields: Mapping[str, Any],
        *,
        lends: bool,
        joins: int = JOINS,
        earlier: int | None = None,
        lead: Lead | None = None,
    ) -> tuple[Attempt, dict[str, Any]]:
        """Sends a source for this publication by an attempt of its own. Returns the attempt, and the update's reply."""
        attempt = Attempt(
            self._plan,
            source,
            self._publication,
            None,
            fields,
            lends=lends,
            joins=joins,
            earlier=earlier,
            lead=lead,
        )
        attempt.read()
        try:
            return attempt, attempt.committed_by_all()
        finally:
            self.committed = attempt.committed

    def _committed(self) -> dict[str, Any]:
        """The update's reply. If both fail, the fleet's error is raised, since it explains the transport's."""
        try:
            if self._error is None:
                self._finish()
        except BaseException as error:
            self._error = self._publication.given_up or error
        try:
            reply = self._reply()
            self._keep()
            return reply
        except BaseException as error:
            if self.committed:
                self._keep()  # few workers serve the version so far: the others will fetch it
            elif self._prepared:
                self._plan.withdraw(self._prepared)
            elif self._sender is not None and self._stays_open(self._sender, error):
                self._plan.unsettled, self._sender = self._sender, None
            raise
        finally:
            if self._sender is not None:
                self._close(self._sender)  # it ends the update, if that still runs
            if self._update is not None:
                self._update.exception()

    def _stays_open(self, sender: Sender, error: BaseException) -> bool:
        """True if workers may still have to fetch the version after this error, and can."""
        may_be_committed = isinstance(error, OutcomeUnknown) and sender.receivers_from == "finish"
        return may_be_committed and not self._lent  # the trainer changes lent tensors next

    def _close(self, sender: Sender) -> None:
        """Closes the sender. An error does not change the outcome, so it is only logged."""
        try:
            sender.close()
        except Exception:
            log.exception("the sender of %s does not close", self._publication.version)

    def _was_committed(self) -> bool:
        """True if the fleet has committed the update although its call has failed."""
        try:
            updates = self._fleet.run("updates", {})["updates"]
        except Exception as error:  # not only PlaneError: the client's loop or connection may have ended
            log.info("%s: %s", self._publication.version, error)
            return False
        return any(one["update_id"] == self._update_id and one["outcome"] == "committed" for one in updates)

    def _keep(self) -> None:
        """Lets the sender keep the committed version. An error here is no failure of the publication."""
        self._publication.on_give_up(None)
        try:
            if self._sender is not None and self._error is None:
                base = self._fields.get("base")
                if base is not None:
                    if base != self._fields["digest"]:  # else workers fetch what they fetched before
                        self._sender.keep(onto_previous=True, earlier=self._earlier)
                else:
                    self._sender.keep(self._plan.options.adapter)
            self._plan.committed()
        except Exception:
            log.exception("workers that come late can't fetch %s from here", self._publication.version)

    def _reply(self) -> dict[str, Any]:
        error, update = self._error, self._update
        if error is not None and self._lead is not None and (failure := self._lead.failure()) is not None:
            raise failure
        if isinstance(error, _SendFailed):
            return self._fleet_reply(error.__cause__ or error)
        if error is not None:
            raise error
        assert update is not None
        return update.result()

    def _fleet_reply(self, failed: BaseException) -> dict[str, Any]:
        """Asks the fleet about a failure of the transport: the workers that listened know what was wrong."""
        update = self._update
        if update is None or not update.done():
            if not isinstance(failed, (Unavailable, DeadlineExceeded)):
                raise failed  # the trainer itself has failed
            assert self._sender is not None
            self._close(self._sender)  # it ends the receiving, too
        if update is not None:
            return update.result()
        if not self._prepared:
            raise failed
        try:
            return self._start_update().result()
        except PlaneError as error:
            if _failed_rows(error) or isinstance(error, UpdateAborted):
                raise
            raise failed from error

    def _finish(self) -> None:
        sender, manifest = self._sender, self._manifest
        assert sender is not None
        assert manifest is not None
        self._check_not_given_up()
        if isinstance(sender, SharedSender):
            self._digests = sender.collect(self._digests)
        if self._update is None:
            self._body.setdefault("digest", manifest.digested(self._digests).digest)
        _transport_call(lambda: sender.finish(self._digests))
        self._check_not_given_up()
        self._publication.report("committing")
        if self._update is None:
            self._update = self._start_update()

    def _start_update(self) -> Future[dict[str, Any]]:
        """Runs the update on a thread. If the update fails, the sender is closed."""
        update: Future[dict[str, Any]] = Future()
        sender = self._sender
        assert sender is not None
        self._update_id = self._prepared or uuid.uuid4().hex

        def work() -> None:
            try:
                update.set_result(self._retry_while_locked(self._run_update))
            except BaseException as error:
                try:
                    self.committed = isinstance(error, (Conflict, *_NO_ANSWER)) and self._was_committed()
                    if not self.committed and not self._stays_open(sender, error):
                        self._close(sender)
                finally:
                    update.set_exception(error)

        on_thread(work)
        return update

    def _run_update(self) -> dict[str, Any]:
        """The update's reply. OutcomeUnknown: no answer has come, so the version may be committed."""
        if self._prepared:
            assert self._manifest is not None
            op, request_id = "complete_weights_update", ""
            body = {"update_id": self._prepared, "num_buckets": len(self._manifest.buckets)}
            if "digest" in self._body:  # it is missing if not everything was sent
                body["digest"] = self._body["digest"]
        else:
            self._swap_if_loaded()
            op, request_id, body = "update_weights", self._update_id, self._body
        try:
            return self._run(op, body, request_id)
        except _NO_ANSWER as error:
            if not _is_no_answer(error) or self._wants_only_the_reason:
                raise
            raise OutcomeUnknown(
                f"{self._publication.version} may be committed: no answer has come to {op}: {error.message}",
                fix="ask the fleet's weight_version once it answers",
            ) from error

    def _run(self, op: str, body: dict[str, Any], request_id: str) -> dict[str, Any]:
        """Runs an op of an update. While no answer comes, it is repeated under the same id for `others_s`."""
        limits = self._plan.options.limits
        left, until = ATTEMPTS - 1, 0.0
        while True:
            try:
                return self._fleet.run(op, body, request_id)
            except Locked:
                raise  # see `_retry_while_locked`
            except (Unavailable, StaleFence) as error:
                if self._wants_only_the_reason:
                    raise
                if _is_no_answer(error):
                    until = until or time.monotonic() + limits.others_s
                    if time.monotonic() > until:
                        raise
                elif left == 0:
                    raise
                else:
                    left -= 1
            time.sleep(limits.again_s)
            self._check_not_given_up()

    def _swap_if_loaded(self) -> None:
        target = self._body.get("target")
        if target is not None and target["name"] in self._fleet.run("state", {})["adapters"]:
            target["op"] = "swap"


_NO_ANSWER = (Unavailable, DeadlineExceeded)
"""The kinds of errors that may not say how a call has ended."""


def _is_no_answer(error: PlaneError) -> bool:
    """True if the error does not say how the call has ended: no frontend or no NATS server answers, or it is ending."""
    unanswered = (BusUnreachable, FrontendEnding, OutcomeUnknown, DeadlineExceeded)
    return type(error) is Unavailable or isinstance(error, unanswered)


def _transport_call(act: Callable[[], T]) -> T:
    try:
        return act()
    except Exception as error:
        raise _SendFailed(str(error)) from error


def _with_worker_named(error: BaseException) -> BaseException:
    """Returns the error with a message that names the worker and its reason."""
    if not isinstance(error, PlaneError):
        return error
    failed = _failed_rows(error)
    if not failed or any(row["instance_id"] in error.message for row in failed):
        return error
    reasons = [(row["instance_id"], (row.get("error") or {}).get("message", "")) for row in failed]
    who, reason = next((one for one in reasons if one[1] and one[1] in error.message), reasons[0])
    words = f"on {who}" if reason in error.message else f"{who}: {reason}"
    named = type(error)(f"{error.message} ({words})", **error.facts)
    named.__cause__ = error
    return named


def _failed_rows(error: PlaneError) -> list[dict[str, Any]]:
    rows = error.facts.get("workers")
    return [row for row in rows if row.get("status") == "error"] if isinstance(rows, list) else []

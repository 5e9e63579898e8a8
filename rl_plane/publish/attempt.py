"""One version, on rank 0: the tensors out of the source, by the way's sender, into a committed update."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from rl_plane.errors import (
    Conflict,
    DeadlineExceeded,
    InvalidRequest,
    Locked,
    MembershipChanged,
    NotAtBase,
    PlaneError,
    StaleFence,
    Unavailable,
    UpdateAborted,
)
from rl_plane.publish.publication import Publication
from rl_plane.publish.send_plan import Way
from rl_plane.publish.sources.model_sources import Source, Taken
from rl_plane.publish.threads import on_thread
from rl_plane.transports.packing import Place, Tensor, fill
from rl_plane.transports.sender_base import DeviceSender, KeepingSender, LendingSender, PushingSender, Sender
from rl_plane.weights.manifest import DEFAULT_BUCKET_BYTES, Manifest, pack

log = logging.getLogger("rl_plane.publish")

ATTEMPTS = 3
"""An update whose answer was lost, which found the fleet locked, or which lost the lock on its way, is asked again
under its id."""
AGAIN_S = 1.0
OTHERS_S = 30.0
"""How long another trainer's update, which is prepared and waits, is waited for."""
JOINS = 1
"""So often all is sent again, since a worker has joined that can't get what was pushed: each time takes as long."""
OPENINGS = 8
"""So often receivers are gathered while workers join, as in a fleet that comes up: a second or so each time, in which
other ranks may wait."""

T = TypeVar("T")


class _SendFailed(Exception):
    """The transport's failure: what the fleet answers says more."""


class Attempt:
    """One publication on rank 0: `read` brings the tensors out of the source, `end` waits for the fleet."""

    def __init__(
        self,
        way: Way,
        source: Source,
        publication: Publication,
        previous: Publication | None,
        more: Mapping[str, Any] | None = None,
        *,
        lends: bool = False,
        joins: int = 0,
    ) -> None:
        """`more`: fields of the update's body. `lends`: the tensors stay as they are until the publication ends, so
        they may be read where they are. `joins`: the source may be read so often again."""
        self._more = more or {}
        self._lends = lends
        self._joins = joins
        self._lent: Collection[int] = ()
        """Buckets."""
        self._way = way
        self._fleet = way.fleet
        self._source = source
        self._publication = publication
        self._previous = previous
        self._sender: Sender | None = None
        self._update: Future[dict[str, Any]] | None = None
        self._prepared = ""
        """The update that a PushingSender's receivers listen for."""
        self._body: dict[str, Any] = {}
        self._manifest: Manifest | None = None
        self._digests: dict[str, str] = {}
        self._error: BaseException | None = None
        self.committed = False
        """Though it has failed."""

    def read(self) -> None:
        """Never raises: `end` tells. Whatever fails, a gather goes on to its end: the other ranks are in it."""
        taken: Taken | None = None
        late: PlaneError | None = None
        try:
            if self._previous is not None:
                try:
                    self._publication.wait_for(self._previous, self._way.told.bound_s())
                except Locked as error:
                    late = error
            self._publication.begins_to_read()
            taken = self._source.take()
            self._publication.pauses_reading()
            if late is not None:
                raise late
            if not taken.specs:
                raise InvalidRequest("there are no tensors", field="source", fix="give weights")
            self._send(replace(taken, tensors=self._publication.reading(taken.tensors)))
        except BaseException as error:
            self._error = self._publication.given_up or error
        finally:
            if taken is not None:
                if self._source.collective:
                    self._do_too(partial(drain, taken.tensors))
                self._do_too(taken.close)
            if not self._lent and not self._joins:  # else they are read until the end
                self._publication.tensors_were_read()
            elif not self._lent:
                self._publication.pauses_reading()

    def _do_too(self, act: Callable[[], object]) -> None:
        """What fails after a failure tells less than that, but for Ctrl-C."""
        try:
            act()
        except BaseException as error:
            if self._error is None or not isinstance(error, Exception):
                self._error = error

    def _send(self, taken: Taken) -> None:
        publication = self._publication
        sender, manifest = self._opened(taken)
        if self._lends and taken.held and isinstance(sender, LendingSender):
            held = taken.held
            self._lent = _sent(lambda: sender.lend(held))
        sizes = [bucket.nbytes for bucket in manifest.buckets]
        publication.tell("sending", buckets=0, of_buckets=len(sizes), nbytes=0, of_nbytes=sum(sizes))

        def buffer(number: int) -> Place:
            return _sent(lambda: sender.buffer(number))

        for number in fill(manifest, taken.tensors, buffer, self._digests, self._lent):
            _sent(lambda number=number: sender.send(number))  # type: ignore[misc]
            publication.tell("sending", buckets=number + 1, nbytes=sum(sizes[: number + 1]))

    def _opened(self, taken: Taken) -> tuple[Sender, Manifest]:
        """For a worker that joins meanwhile, or where another trainer's group has taken the place of this one's, it is
        opened anew: nothing was read yet, whatever the source."""
        for _ in range(OPENINGS - 1):
            try:
                return self._open(taken)
            except (MembershipChanged, InvalidRequest) as error:
                if isinstance(error, InvalidRequest) and error.facts.get("field") != "transport.group":
                    raise
                log.info("%s is opened once more: %s", self._publication.version, error)
            if self._prepared:
                self._withdraw()  # whose answer was lost, say
                self._prepared = ""
            if self._sender is not None:
                self._sender.close()
        return self._open(taken)

    def _open(self, taken: Taken) -> tuple[Sender, Manifest]:
        way = self._way
        self._body = {**way.told.body(self._publication.version), **self._more}
        self._body["policy"] = {**self._body["policy"], **self._publication.policy}
        sender = self._sender = way.ready_sender()
        if self._more.get("encoding") == "delta" and way.changes_sender:
            raise NotAtBase(
                "what it is a delta of goes with the sender before", field="encoding", fix="send the full version"
            )
        bucket_bytes = way.told.bucket_bytes
        if bucket_bytes is None:
            bucket_bytes = getattr(sender, "bucket_bytes", DEFAULT_BUCKET_BYTES)
        packed = getattr(sender, "pack", pack)(taken.specs, bucket_bytes)
        manifest = self._manifest = Manifest(packed, taken.adapter_config)
        if isinstance(sender, DeviceSender):
            sender.device = taken.device
        self._body["transport"] = self._when_free(lambda: sender.open(manifest))
        if isinstance(sender, PushingSender):
            self._swap_if_loaded()
            self._prepared = uuid.uuid4().hex
            body = {**self._body, "fingerprint": sender.fingerprint}
            self._when_free(lambda: self._run("prepare_weights_update", body, self._prepared))
        elif sender.receivers_from == "open":
            self._check_wanted()
            self._update = self._ask()
        return sender, manifest

    def _check_wanted(self) -> None:
        """Or raises, if it was given up; if it is from here on, the sender is closed."""
        assert self._sender is not None
        self._publication.goes_by(partial(self._close, self._sender))

    def _when_free(self, act: Callable[[], T]) -> T:
        """What `act` returns. While another trainer's update is under way, or is prepared and waits, that is refused as
        Locked, and done again each AGAIN_S; the first refusal after OTHERS_S is raised. Who gives the publication up
        meanwhile is heard before the next time, and that is raised."""
        until = time.monotonic() + OTHERS_S
        while True:
            self._check_wanted()
            try:
                return act()
            except Locked:
                if time.monotonic() > until:
                    raise
            time.sleep(AGAIN_S)

    @property
    def interrupted(self) -> bool:
        """By Ctrl-C, while it gathered."""
        return self._error is not None and not isinstance(self._error, Exception)

    def give_up(self, error: BaseException) -> None:
        """Ends it here, whatever it has come to."""
        self._error = self._error or error
        self.end()

    def read_and_end(self) -> None:
        self.read()
        self.end()

    def end(self) -> None:
        try:
            reply = self.committed_by_all()
        except BaseException as error:
            self._publication.end(error=_named(error))
        else:
            self._publication.end(reply)

    def committed_by_all(self) -> dict[str, Any]:
        """The update's reply, perhaps of another attempt, for workers that have joined meanwhile too."""
        try:
            return self._committed()
        except MembershipChanged as error:
            if not self._joins or _failed_rows(error):
                raise
            log.info("%s is sent once more: %s", self._publication.version, error)
        again = Attempt(
            self._way,
            self._source,
            self._publication,
            None,
            self._more,
            lends=self._lends,
            joins=self._joins - 1,
        )
        again.read()
        try:
            return again.committed_by_all()
        finally:
            self.committed = again.committed

    def _committed(self) -> dict[str, Any]:
        """The update's reply. The fleet's own error is told rather than the transport's, which it explains."""
        try:
            if self._error is None:
                self._finish()
        except BaseException as error:
            self._error = self._publication.given_up or error
        try:
            reply = self._answered()
            self._keep()
            return reply
        except BaseException:
            if self.committed:
                self._keep()  # hardly anybody serves it yet, say: the others will fetch it
            elif self._prepared:
                self._withdraw()
            raise
        finally:
            if self._sender is not None:
                self._close(self._sender)  # ends the update, if it still runs
            if self._update is not None:
                self._update.exception()

    def _close(self, sender: Sender) -> None:
        """What fails now changes nothing of the outcome, which is still to be told."""
        try:
            sender.close()
        except Exception:
            log.exception("the sender of %s does not close", self._publication.version)

    def _withdraw(self) -> None:
        """Nobody is to wait for what does not come any more, or to complete what was called a failure. Where it was
        committed all the same, the fleet says so."""
        try:
            self._fleet.run("abort_weights_update", {"update_id": self._prepared})
        except PlaneError as error:
            log.info("%s: %s", self._publication.version, error)

    def _was_committed(self) -> bool:
        """Though the update has failed: does the fleet say so?"""
        digest = self._body.get("digest")
        if digest is None:
            return False
        try:
            state = self._fleet.run("state", {})
        except Exception as error:  # no PlaneError where its loop or its connection has ended, say
            log.info("%s: %s", self._publication.version, error)
            return False
        versions = [state["version"], *state["adapters"].values()]
        return any(version is not None and version["digest"] == digest for version in versions)

    def _keep(self) -> None:
        """It is committed: what fails now is no failure of the publication."""
        self._publication.goes_by(None)
        try:
            if isinstance(self._sender, KeepingSender) and self._error is None:
                if self._more.get("encoding") == "delta":
                    self._sender.keep(onto_previous=True)
                else:
                    self._sender.keep(self._way.told.adapter)
            self._way.committed()
        except Exception:
            log.exception("workers that come late can't fetch %s from here", self._publication.version)

    def _answered(self) -> dict[str, Any]:
        error, update = self._error, self._update
        if isinstance(error, _SendFailed):
            return self._explained(error.__cause__ or error)
        if error is not None:
            raise error
        assert update is not None
        return update.result()

    def _explained(self, failed: BaseException) -> dict[str, Any]:
        """Who listens for what does not come any more knows what was wrong there."""
        update = self._update
        if update is None or not update.done():
            if not isinstance(failed, (Unavailable, DeadlineExceeded)):
                raise failed  # the trainer's own
            assert self._sender is not None
            self._close(self._sender)  # with it ends who listens
        if update is not None:
            return update.result()
        if not self._prepared:
            raise failed
        try:
            return self._ask().result()
        except PlaneError as error:
            if _failed_rows(error) or isinstance(error, UpdateAborted):
                raise
            raise failed from error

    def _finish(self) -> None:
        sender, manifest = self._sender, self._manifest
        assert sender is not None
        assert manifest is not None
        self._check_wanted()
        if self._update is None:
            self._body.setdefault("digest", manifest.digested(self._digests).digest)
        _sent(lambda: sender.finish(self._digests))
        self._check_wanted()
        self._publication.tell("committing")
        if self._update is None:
            self._update = self._ask()

    def _ask(self) -> Future[dict[str, Any]]:
        """The update, on a thread; a failure ends the sending."""
        update: Future[dict[str, Any]] = Future()
        sender = self._sender
        assert sender is not None

        def work() -> None:
            try:
                update.set_result(self._asked())
            except BaseException as error:
                try:
                    self.committed = isinstance(error, (Conflict, Unavailable)) and self._was_committed()
                    if not self.committed:
                        self._close(sender)
                finally:
                    update.set_exception(error)

        on_thread(work)
        return update

    def _asked(self) -> dict[str, Any]:
        if self._prepared:
            assert self._manifest is not None
            op, request_id = "complete_weights_update", ""
            body = {"update_id": self._prepared, "num_buckets": len(self._manifest.buckets)}
            if "digest" in self._body:  # else not everything was sent
                body["digest"] = self._body["digest"]
        else:
            self._swap_if_loaded()
            op, request_id, body = "update_weights", uuid.uuid4().hex, self._body
        return self._run(op, body, request_id)

    def _run(self, op: str, body: dict[str, Any], request_id: str) -> dict[str, Any]:
        for _ in range(ATTEMPTS - 1):
            try:
                return self._fleet.run(op, body, request_id)
            except (Unavailable, StaleFence):
                if self._error is not None and not self._prepared:
                    raise  # of what was pushed in vain it is only asked why
                time.sleep(AGAIN_S)
        return self._fleet.run(op, body, request_id)

    def _swap_if_loaded(self) -> None:
        target = self._body.get("target")
        if target is not None and target["name"] in self._fleet.run("state", {})["adapters"]:
            target["op"] = "swap"


def _sent(act: Callable[[], T]) -> T:
    try:
        return act()
    except Exception as error:
        raise _SendFailed(str(error)) from error


def _named(error: BaseException) -> BaseException:
    """The same error, whose message says which worker and why."""
    if not isinstance(error, PlaneError):
        return error
    failed = _failed_rows(error)
    if not failed or any(row["instance_id"] in error.message for row in failed):
        return error
    told = [(row["instance_id"], (row.get("error") or {}).get("message", "")) for row in failed]
    who, reason = next((one for one in told if one[1] and one[1] in error.message), told[0])
    words = f"on {who}" if reason in error.message else f"{who}: {reason}"
    named = type(error)(f"{error.message} ({words})", **error.facts)
    named.__cause__ = error
    return named


def _failed_rows(error: PlaneError) -> list[dict[str, Any]]:
    rows = error.facts.get("workers")
    return [row for row in rows if row.get("status") == "error"] if isinstance(rows, list) else []


def drain(tensors: Iterator[tuple[str, Tensor]]) -> None:
    for _ in tensors:
        pass

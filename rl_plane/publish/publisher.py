"""WeightPublisher: a training loop says `publisher.publish(version="step_17")`, and the fleet serves these weights.

    with WeightPublisher(model, "http://127.0.0.1:8002", root="/shared/weights") as publisher:
        publisher.publish("step_0")
        for step in range(1, 100):
            ...
            publisher.publish(f"step_{step}")

Overlapped with the next step: `publish(…, wait=False)` gives the Publication at once. Its tensors must not change until
`wait_read` returns: call that before `optimizer.step()`. With several ranks every rank makes a publisher and calls
`publish` at the same point; only rank 0 talks to the fleet and learns the outcome.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from rl_plane.client import DEFAULT_NAMESPACE
from rl_plane.errors import (
    Conflict,
    DeadlineExceeded,
    InvalidRequest,
    Locked,
    NotAtBase,
    PlaneError,
    StaleFence,
    Unavailable,
)
from rl_plane.fleet_ops import DEFAULT_WAIT_S
from rl_plane.manifest import DEFAULT_BUCKET_BYTES, Manifest, pack
from rl_plane.ops import UpdateWeights, parse_body
from rl_plane.publish.fleets import BlockingFleet, FleetLike
from rl_plane.publish.host_copy import Change, HostCopy, as_tensors
from rl_plane.publish.packing import Place, Tensor, fill
from rl_plane.publish.sender import DeviceSender, KeepingSender, PushingSender, Sender, Surroundings, members
from rl_plane.publish.senders import AUTO, choose, installed, make_sender
from rl_plane.publish.sources import Names, Taken, as_source
from rl_plane.sync import call_bound_s

log = logging.getLogger("rl_plane.publish")

ATTEMPTS = 3
"""An update whose answer was lost, which found the fleet locked, or which lost the lock on its way, is asked again
under its id."""
AGAIN_S = 1.0
DRAIN_S = 600.0
"""How long `close` and the next `publish` wait for the one under way, beside its update's own bounds: a large model on
a slow way."""

Encoding = Literal["full", "auto"]
Stage = Literal["waiting", "sending", "committing", "committed", "failed"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a publication is."""

    stage: Stage
    buckets: int = 0
    """Handed to the transport so far."""
    of_buckets: int = 0
    nbytes: int = 0
    of_nbytes: int = 0
    elapsed_s: float = 0.0


class Publication:
    """One version on its way to the fleet. Its methods may be called from any thread."""

    def __init__(self, version: str | None, tell: Callable[[Progress], None] | None = None) -> None:
        self.version = version
        self.progress = Progress("waiting")
        self._tell = tell
        self._start = time.monotonic()
        self._read = threading.Event()
        self._asked = False
        self._outcome: Future[dict[str, Any] | None] = Future()

    @property
    def read(self) -> bool:
        """Have all tensors been read? Then they may change."""
        return self._read.is_set()

    @property
    def done(self) -> bool:
        return self._outcome.done()

    def wait_read(self, timeout_s: float | None = None) -> None:
        """Until all tensors have been read, or the publication has failed: after it they may change."""
        if not self._read.wait(timeout_s):
            raise DeadlineExceeded(f"the tensors were not read within {timeout_s:g} s")

    def result(self, timeout_s: float | None = None) -> dict[str, Any]:
        """The update's reply (`version`, `workers`, `excluded`, `phases`), or its error; the fleet is as before then.
        On other ranks than 0: empty, once the rank's part is done."""
        self._asked = True
        try:
            return self._outcome.result(timeout_s) or {}
        except TimeoutError:
            raise DeadlineExceeded(f"{self.version} was not committed within {timeout_s:g} s") from None

    def _tells(self, stage: Stage, **facts: int) -> None:
        self.progress = replace(self.progress, stage=stage, elapsed_s=time.monotonic() - self._start, **facts)
        if self._tell is not None:
            self._tell(self.progress)

    def _ends(self, reply: dict[str, Any] | None = None, error: BaseException | None = None) -> None:
        self._read.set()
        try:
            self._tells("committed" if error is None else "failed")
        except Exception:  # a callback of the trainer's, which changes nothing of the outcome
            log.exception("progress of %s", self.version)
        if error is None:
            self._outcome.set_result(reply)
        else:
            self._outcome.set_exception(error)


class _SendFailed(Exception):
    """The transport's failure: what the fleet answers says more."""


class WeightPublisher:
    """One source, one fleet, one way between them; versions are published one after another."""

    def __init__(
        self,
        source: Any,
        fleet: FleetLike,
        *,
        transport: str = AUTO,
        root: Path | str | None = None,
        options: Mapping[str, Any] | None = None,
        adapter: str | None = None,
        dtype: Any = None,
        names: Names = None,
        policy: Mapping[str, Any] | None = None,
        cast: bool = False,
        encoding: Encoding = "full",
        bucket_bytes: int | None = None,
        workers: int = 1,
        wait_s: float = DEFAULT_WAIT_S,
        progress: Callable[[Progress], None] | None = None,
        admin_key: str | None = None,
        namespace: str = DEFAULT_NAMESPACE,
        component: str | None = None,
        rank: int | None = None,
    ) -> None:
        """`source`: what `as_source` takes, with `dtype` and `names`. `fleet`: a client, or a URL (`http://…` of the
        facade, with `admin_key`; `nats://…`, with `namespace`), and of which `component`, if there are several.
        `transport`: a backend, or `auto`; `root`: a directory that trainer and workers share, for filesystem;
        `options`: the transport's own. `adapter`: under which name a LoRA adapter is served. `policy`, `cast`: of the
        update. `encoding` `auto`: only what has changed, where that is less than half and the workers keep the version
        before (they are told to); for it the publisher keeps a copy of the base weights in host memory, and the tensors
        may change as soon as they are in it. `bucket_bytes` None: what is best for the transport. `workers`, `wait_s`:
        for how many to wait, and how long. `progress`: called on the publisher's threads. `rank` None: that of
        torch.distributed, if it is initialised by now."""
        self._source = as_source(source, dtype=dtype, names=names)
        if self._source.adapter != (adapter is not None):
            raise InvalidRequest(
                "an adapter is published under a name" if self._source.adapter else "the source is no adapter",
                field="adapter",
                fix="adapter='policy'" if self._source.adapter else "leave adapter out",
            )
        if bucket_bytes is not None and bucket_bytes < 1:
            raise InvalidRequest(f"bucket_bytes is {bucket_bytes}", field="bucket_bytes", fix="give at least 1")
        if encoding not in ("full", "auto"):
            raise InvalidRequest(f"encoding is {str(encoding)[:64]!r}", field="encoding", fix="use full or auto")
        if encoding == "auto" and (cast or (policy or {}).get("staging") == "none"):
            raise InvalidRequest(
                "what changes bits in a staged copy goes with neither cast nor staging none",
                field="encoding",
                fix="leave encoding out, or those",
            )
        self._copy = HostCopy() if encoding == "auto" and adapter is None else None
        self._adapter = adapter
        self._told = transport
        self._root = Path(os.path.abspath(os.path.expanduser(root))) if root is not None else None
        self._options = dict(options or {})
        self._policy = dict(policy or {})
        self._cast = cast
        self._bucket_bytes = bucket_bytes
        self._select = {"min_workers": workers, "wait_s": wait_s}
        self._progress = progress
        self._previous: Publication | None = None
        self._backend: str | None = None
        self._sender: Sender | None = None
        self._colocated = True
        """Were all workers on this machine when it was made?"""
        self._replaced: Sender | None = None
        """The one before, from which workers heal until a version by the new one is committed."""
        self._fleet: BlockingFleet | None = None
        self.rank = _rank() if rank is None else rank
        if self.rank == 0:
            self._fleet = BlockingFleet(fleet, admin_key=admin_key, namespace=namespace, component=component)

    @property
    def backend(self) -> str | None:
        """What the last version went by; None before the first."""
        return self._backend

    def publish(self, version: str | None = None, *, wait: bool = True) -> Publication:
        """Sends the weights as they are now. `wait`: until they are committed, and with their error.

        One at a time: while another is under way, this waits for it. A source that gathers among ranks is read before
        this returns, on the calling thread, whatever `wait` says."""
        publication = Publication(version, self._progress if self.rank == 0 else None)
        if self.rank != 0:
            self._take_part(publication)
            return publication
        assert self._fleet is not None
        blocks = wait or self._source.collective
        if blocks and self._fleet.loop is not None and _running_loop() is self._fleet.loop:
            raise InvalidRequest(
                "the fleet's client runs in this loop, which this would block",
                field="wait",
                fix="await publisher.publish_async(…)",
            )
        previous, self._previous = self._previous, publication
        if self._copy is None:
            attempt = _Attempt(self, self._fleet, publication, previous)
        else:
            attempt = _ByCopy(self, self._fleet, publication, previous, self._copy)
        if self._source.collective:
            attempt.read()
            _thread(attempt.end)
        else:
            _thread(attempt.read_and_end)
        if wait or attempt.interrupted:
            publication.result()
        return publication

    async def publish_async(self, version: str | None = None) -> Publication:
        """`publish` for asyncio: waits without blocking the loop."""
        publication = await asyncio.to_thread(self.publish, version, wait=False)
        publication._asked = True
        await asyncio.wrap_future(publication._outcome)
        return publication

    def close(self) -> None:
        """Waits for what is under way, then frees what the transport held."""
        if self._previous is not None:
            _ended(self._previous, self._bound_s())
        for sender in (self._sender, self._replaced):
            if sender is not None:
                sender.destroy()
        self._sender = self._replaced = None
        if self._fleet is not None:
            self._fleet.close()

    def __enter__(self) -> WeightPublisher:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _take_part(self, publication: Publication) -> None:
        """Of a rank that only gathers."""
        try:
            if self._source.collective:
                taken = self._source.take()
                try:
                    _drain(taken.tensors)
                finally:
                    taken.close()
        except BaseException as error:
            publication._ends(error=error)
            raise
        publication._ends()

    def _bound_s(self) -> float:
        return DRAIN_S + call_bound_s("update_weights", {"policy": self._policy})

    def _body(self, version: str | None) -> dict[str, Any]:
        """The update, but for its transport. InvalidRequest for what is wrong in it."""
        policy = self._policy if self._copy is None else {**self._policy, "keep_staged": True}
        body: dict[str, Any] = {"cast": self._cast, "policy": policy}
        if version is not None:
            body["version"] = version
        if self._adapter is not None:
            body["target"] = {"kind": "lora", "op": "load", "name": self._adapter}
        parse_body(UpdateWeights, {**body, "transport": {"backend": "any"}})
        return body

    def _ready_sender(self, fleet: BlockingFleet) -> Sender:
        """Of the way that the fleet of this moment can take."""
        workers = members(fleet.run("workers", self._select))
        backend = choose(self._told, workers, installed(), with_root=self._root is not None)
        around = Surroundings(
            fleet.run,
            self._root,
            self._options,
            fleet.nats_url,
            fleet.namespace,
            fleet.component,
            self._adapter,
        )
        colocated = around.colocated(workers)
        # One that was made for this machine alone can't be reached from another, unless its address was told.
        far = self._colocated and not colocated and "host" not in self._options
        if self._sender is None or backend != self._backend or far:
            sender = make_sender(backend, around)  # what it refuses leaves the one before
            if self._replaced is None:
                self._replaced = self._sender
            elif self._sender is not None:
                self._sender.destroy()  # nothing that it brought was committed
            self._sender, self._backend, self._colocated = sender, backend, colocated
        return self._sender

    def _committed(self) -> None:
        """From here on nobody heals from the sender before."""
        replaced, self._replaced = self._replaced, None
        if replaced is not None:
            replaced.destroy()


class _Attempt:
    """One publication on rank 0: `read` brings the tensors out of the source, `end` waits for the fleet."""

    def __init__(
        self,
        publisher: WeightPublisher,
        fleet: BlockingFleet,
        publication: Publication,
        previous: Publication | None,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        """`more`: fields of the update's body."""
        self._more = more or {}
        self._publisher = publisher
        self._fleet = fleet
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
        source = self._publisher._source
        try:
            before = self._previous
            late = before is not None and not _ended(before, self._publisher._bound_s())
            taken = source.take()
            if before is not None and late:
                self._publisher._previous = before
                raise Locked(
                    f"{before.version} is still under way", fix="wait for its result before the next publish"
                )
            self._send(taken)
        except BaseException as error:
            self._error = error
            if source.collective and taken is not None:
                _drain(taken.tensors)
        finally:
            if taken is not None:
                taken.close()
            self._publication._read.set()

    def _send(self, taken: Taken) -> None:
        publisher, publication = self._publisher, self._publication
        if not taken.specs:
            raise _no_tensors()
        self._body = {**publisher._body(publication.version), **self._more}
        sender = self._sender = publisher._ready_sender(self._fleet)
        if self._more.get("encoding") == "delta" and publisher._replaced is not None:
            raise NotAtBase(
                "what it is a delta of goes with the sender before", field="encoding", fix="send the full version"
            )
        bucket_bytes = publisher._bucket_bytes
        if bucket_bytes is None:
            bucket_bytes = getattr(sender, "bucket_bytes", DEFAULT_BUCKET_BYTES)
        manifest = self._manifest = Manifest(pack(taken.specs, bucket_bytes), taken.adapter_config)
        if isinstance(sender, DeviceSender):
            sender.device = taken.device
        self._body["transport"] = sender.open(manifest)
        if isinstance(sender, PushingSender):
            self._swap_if_loaded()
            self._prepared = uuid.uuid4().hex
            body = {**self._body, "fingerprint": sender.fingerprint}
            self._run("prepare_weights_update", body, self._prepared)
        elif sender.receivers_from == "open":
            self._update = self._ask()
        sizes = [bucket.nbytes for bucket in manifest.buckets]
        publication._tells("sending", of_buckets=len(sizes), of_nbytes=sum(sizes))

        def buffer(number: int) -> Place:
            return _sent(lambda: sender.buffer(number))

        for number in fill(manifest, taken.tensors, buffer, self._digests):
            _sent(lambda number=number: sender.send(number))  # type: ignore[misc]
            publication._tells("sending", buckets=number + 1, nbytes=sum(sizes[: number + 1]))

    @property
    def interrupted(self) -> bool:
        """By Ctrl-C, while it gathered."""
        return self._error is not None and not isinstance(self._error, Exception)

    def read_and_end(self) -> None:
        self.read()
        self.end()

    def end(self) -> None:
        try:
            reply = self._committed()
        except BaseException as error:
            self._publication._ends(error=_named(error))
        else:
            self._publication._ends(reply)

    def _committed(self) -> dict[str, Any]:
        """The update's reply. The fleet's own error is told rather than the transport's, which it explains."""
        try:
            if self._error is None:
                self._finish()
        except BaseException as error:
            self._error = error
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
                self._sender.close()  # ends the update, if it still runs
            if self._update is not None:
                self._update.exception()

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
        except PlaneError:
            return False
        versions = [state["version"], *state["adapters"].values()]
        return any(version is not None and version["digest"] == digest for version in versions)

    def _keep(self) -> None:
        """It is committed: what fails now is no failure of the publication."""
        try:
            if isinstance(self._sender, KeepingSender) and self._error is None:
                if self._more.get("encoding") == "delta":
                    self._sender.keep(onto_previous=True)
                else:
                    self._sender.keep(self._publisher._adapter)
            self._publisher._committed()
        except Exception:
            log.exception("workers that come late can't fetch %s from here", self._publication.version)

    def _answered(self) -> dict[str, Any]:
        if self._error is not None and (self._update is None or not isinstance(self._error, _SendFailed)):
            raise self._error.__cause__ or self._error if isinstance(self._error, _SendFailed) else self._error
        assert self._update is not None
        return self._update.result()

    def _finish(self) -> None:
        sender, manifest = self._sender, self._manifest
        assert sender is not None
        assert manifest is not None
        _sent(lambda: sender.finish(self._digests))
        self._publication._tells("committing")
        if self._update is None:
            self._body.setdefault("digest", manifest.digested(self._digests).digest)
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
                self.committed = isinstance(error, (Conflict, Unavailable)) and self._was_committed()
                if not self.committed:
                    sender.close()
                update.set_exception(error)

        _thread(work)
        return update

    def _asked(self) -> dict[str, Any]:
        if self._prepared:
            assert self._manifest is not None
            op, request_id = "complete_weights_update", ""
            body = {"update_id": self._prepared, "num_buckets": len(self._manifest.buckets)}
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
                if self._error is not None:
                    raise
                time.sleep(AGAIN_S)
        return self._fleet.run(op, body, request_id)

    def _swap_if_loaded(self) -> None:
        target = self._body.get("target")
        if target is not None and target["name"] in self._fleet.run("state", {})["adapters"]:
            target["op"] = "swap"


class _ByCopy(_Attempt):
    """By way of the publisher's copy: `read` brings the tensors into it, `end` sends what pays from there."""

    def __init__(
        self,
        publisher: WeightPublisher,
        fleet: BlockingFleet,
        publication: Publication,
        previous: Publication | None,
        copy: HostCopy,
    ) -> None:
        super().__init__(publisher, fleet, publication, previous)
        self._copy = copy
        self._change: Change | None = None

    def _send(self, taken: Taken) -> None:
        if not taken.specs:
            raise _no_tensors()
        self._change = self._copy.read(taken)

    def _committed(self) -> dict[str, Any]:
        if self._error is not None:
            raise self._error
        change = self._change
        assert change is not None
        try:
            if change.deltas is not None and self._is_kept(change.base):
                try:
                    delta = {"encoding": "delta", "base": change.base, "digest": change.digest}
                    return self._sent(as_tensors(change.deltas), delta)
                except PlaneError as error:
                    if not _not_at_base(error):
                        raise
                    log.info("%s is sent whole: %s", self._publication.version, error)
            return self._sent(self._copy.whole(), {"digest": change.digest})
        except BaseException:
            if not self.committed:
                self._copy.take_back(change)
            raise

    def _is_kept(self, base: str | None) -> bool:
        """By any worker; one that lacks it fetches it, where that is possible."""
        self._publisher._ready_sender(self._fleet)
        if self._publisher._replaced is not None:
            return False  # what it is a delta of would go with the sender before
        rows = members(self._fleet.run("workers", self._publisher._select))
        return any(row.get("kept") == base for row in rows)

    def _sent(self, taken: Taken, more: Mapping[str, Any]) -> dict[str, Any]:
        attempt = _Attempt(self._publisher, self._fleet, self._publication, None, more)
        try:
            attempt._send(taken)
        except BaseException as error:
            attempt._error = error
        try:
            return attempt._committed()
        finally:
            self.committed = attempt.committed


def _not_at_base(error: PlaneError) -> bool:
    """Does it say that a delta can't be applied, there or on some worker?"""
    rows = error.facts.get("workers")
    codes = [(row.get("error") or {}).get("code") for row in rows] if isinstance(rows, list) else []
    return isinstance(error, NotAtBase) or NotAtBase.code in codes


def _no_tensors() -> InvalidRequest:
    return InvalidRequest("there are no tensors", field="source", fix="give weights")


def _sent(act: Callable[[], T]) -> T:
    try:
        return act()
    except Exception as error:
        raise _SendFailed(str(error)) from error


def _named(error: BaseException) -> BaseException:
    """The same error, whose message says which worker and why."""
    if not isinstance(error, PlaneError):
        return error
    rows = error.facts.get("workers")
    failed = [row for row in rows if row.get("status") == "error"] if isinstance(rows, list) else []
    if not failed or any(row["instance_id"] in error.message for row in failed):
        return error
    reason = (failed[0].get("error") or {}).get("message", "")
    who = failed[0]["instance_id"]
    words = f"on {who}" if reason in error.message else f"{who}: {reason}"
    named = type(error)(f"{error.message} ({words})", **error.facts)
    named.__cause__ = error
    return named


def _ended(publication: Publication, bound_s: float) -> bool:
    """Has it ended within the bound? An error that nobody has asked for is logged."""
    try:
        error = publication._outcome.exception(bound_s)
    except TimeoutError:
        return False
    if error is not None and not publication._asked:
        log.warning("%s was not published: %s", publication.version, error)
    return True


def _drain(tensors: Iterator[tuple[str, Tensor]]) -> None:
    for _ in tensors:
        pass


def _thread(work: Callable[[], object]) -> None:
    threading.Thread(target=work, name="rl-plane-publish", daemon=True).start()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _rank() -> int:
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        return int(torch.distributed.get_rank())
    return 0

"""WeightPublisher: a training loop calls `publisher.publish(version="step_17")`, and the fleet serves these weights.

    with WeightPublisher(model, "http://127.0.0.1:8002", root="/shared/weights") as publisher:
        publisher.publish("step_0")
        for step in range(1, 100):
            ...
            publisher.publish(f"step_{step}")

To overlap a publication with the next step, call `publish(…, wait=False)`: it returns the Publication at once. Its
tensors must not change until `wait_read` returns, so call that before `optimizer.step()`. With several ranks every rank
makes a publisher and calls `publish` at the same point. Only rank 0 talks to the fleet. Where the weights are sharded,
each rank sends the tensors that it owns, and learns the outcome.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rl_plane.bus.credentials import NO_CREDENTIALS, NatsCredentials
from rl_plane.errors import DeadlineExceeded, InvalidRequest
from rl_plane.protocol.canary import OnCanaryFailure
from rl_plane.protocol.fleet_ops import DEFAULT_WAIT_S
from rl_plane.protocol.subjects import DEFAULT_NAMESPACE
from rl_plane.protocol.update_requests import UpdatePolicy, update_arguments
from rl_plane.protocol.versions import DEFAULT_ALGORITHM, DigestAlgorithm
from rl_plane.publish.attempt import JOINS, Attempt
from rl_plane.publish.delta_attempt import DeltaAttempt
from rl_plane.publish.fleet_access import BlockingFleet, FleetLike
from rl_plane.publish.host_copy import HostCopy
from rl_plane.publish.partial_attempt import Baseline, PartialAttempt, TrainableSource, agree, taken_of
from rl_plane.publish.publication import Progress, Publication, RunningPublication
from rl_plane.publish.publish_options import PUBLISH_LIMITS, Encoding, PublishOptions, absolute_root
from rl_plane.publish.ranks.following import Follower
from rl_plane.publish.ranks.lead import Lead
from rl_plane.publish.ranks.meeting import MeetingPoint, is_rank_of_torch
from rl_plane.publish.send_plan import SendPlan
from rl_plane.publish.sources.base import Names, drain
from rl_plane.publish.sources.source_choice import as_source
from rl_plane.publish.threads import at_callers_gpu, on_thread
from rl_plane.publish.trainer_canary import CanarySource, PublishedCanary
from rl_plane.transports.base import Sender, SenderContext
from rl_plane.transports.registry import AUTO, make_sender

log = logging.getLogger("rl_plane.publish")

GIVE_UP_S = 30.0
"""Seconds that Ctrl-C waits until no thread reads a tensor: the gathering or copying of one tensor, or the end of
workers that read the trainer's memory. A second Ctrl-C does not wait."""


class WeightPublisher:
    """Publishes the weights of one source to one fleet, one version after another."""

    limits = PUBLISH_LIMITS
    """Limits of its waits and retries. A subclass may set others."""

    def __init__(
        self,
        source: Any,
        fleet: FleetLike | BlockingFleet,
        *,
        transport: str = AUTO,
        root: Path | str | None = None,
        options: Mapping[str, Any] | None = None,
        bucket_bytes: int | None = None,
        encoding: Encoding = "auto",
        trainable_only: bool = False,
        base: Path | str | None = None,
        digest: DigestAlgorithm = DEFAULT_ALGORITHM,
        trainer_stays: bool = True,
        adapter: str | None = None,
        dtype: Any = None,
        names: Names = None,
        policy: UpdatePolicy | Mapping[str, Any] | None = None,
        cast: bool = False,
        canary: PublishedCanary = None,
        on_canary_failure: OnCanaryFailure | None = None,
        tolerance: float | None = None,
        admin_key: str | None = None,
        namespace: str = DEFAULT_NAMESPACE,
        component: str | None = None,
        credentials: NatsCredentials = NO_CREDENTIALS,
        workers: int = 1,
        wait_s: float = DEFAULT_WAIT_S,
        rank: int | None = None,
        initial: str | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> None:
        """Makes a publisher. With `initial` it blocks until the fleet serves that version.

        Args:
            source: the weights: a module, a PEFT model, a state dict, a function that returns an iterator of
                (name, tensor), a path, or a WeightSource (see `as_source`).
            fleet: an RlClient, a Fleet, a SyncRlClient, the frontend's URL (`http://…`), or NATS's URL (`nats://…`).

            transport: the name of a transport, or `auto`: the best that this trainer and all workers have.
            root: a directory that trainer and workers share. The filesystem transport needs it. Default: none.
            options: the transport's own options, such as `host` and `port`. Default: none.
            bucket_bytes: the size at which a bucket is full, in bytes. Default: what is best for the transport.
            encoding: `full` sends every tensor. `delta` sends what has changed, if that is less than half, and if the
                workers keep the version before; the publisher tells them to. It keeps a copy of the base weights in
                host memory, and the tensors may change as soon as they are in that copy. `auto` does so where a worker
                is on another machine or the transport is `object_store`, while the machine has the memory and deltas
                pay; it is `full` with `cast`, `staging` `none`, `keep_staged` False, an adapter, or nccl. `partial`
                sends the tensors that differ from the version before, whole. It keeps only the digests of that version,
                and the workers keep a copy of it.
            trainable_only: True reads and sends only parameters that have, or once had, `requires_grad`, after a full
                first version. It implies `encoding` `partial`. Only a module can be the source. Default: False.
            base: the checkpoint that the fleet serves, if it is at hand: the first version, too, is sent as what
                differs from it. It implies `encoding` `partial`. Default: the first version is sent in full.
            digest: the algorithm of the versions' digests. `xxh3` finds corruption, at the speed of memory. `blake3` is
                for a digest that someone compares outside of the fleet, and for weights from a source that is not
                trusted; hashing then takes several times as long. Default: `xxh3`.
            trainer_stays: False if this process ends soon. `auto` then prefers transports whose weights outlive it, and
                `nixl` keeps no copy for workers that heal. Default: True.

            adapter: the name under which a LoRA adapter is served. Needed if the source is an adapter. Default: none.
            dtype: the torch dtype to which floating tensors are converted. Default: each keeps its own.
            names: maps the trainer's tensor names to the engine's: a mapping, or a function that returns None to leave
                a tensor out. Default: unchanged.

            policy: how each update is carried out: an `UpdatePolicy`, or a mapping of its fields. Default: the fleet's.
            cast: True lets the engine convert dtypes. Default: False.
            canary: the token sequences that every worker scores before it serves a version. None: sequences made from
                the vocabulary, with the fleet's own values. A list of token id lists: each `publish` first asks the
                trainer's model for their log probabilities, on the calling thread. A function `canary(model, version)`
                that returns `{sequences, expected}`: every rank calls it; a sharded model needs it. `off`: no scores.
            on_canary_failure: what happens if every worker fails the canary. Default: the policy's, `rollback`.
            tolerance: the largest difference from the canary's log probabilities, in nats. Default: 0.05, or 1/80 of
                each value if that is more.

            admin_key: the frontend's admin key, if it has one. For an `http://` URL.
            namespace: the fleet's namespace, for a `nats://` URL. Default: `demo`.
            component: the fleet's component, for either kind of URL. Default: the only one.
            credentials: the files by which the publisher connects to NATS, for a `nats://` or `tls://` URL, and for the
                transport object_store. Default: none.
            workers: how many workers must be there before a version is sent. Default: 1.
            wait_s: how long to wait for them, in seconds. Default: 5.

            rank: this process's rank. Default: that of torch.distributed if it is initialised, else 0.
            initial: a label. The fleet serves the source under it when the constructor returns. If every worker serves
                an update of that label already, the source is only read into host memory and compared; it is sent if it
                differs, or if the fleet has changed meanwhile. Default: nothing is published.
            progress: called with each Progress, on the publisher's threads.

        Raises:
            InvalidRequest: an option is wrong; the error's `field` names it.
            Unsupported: a package is missing; the error's `fix` names the extra to install.
            PlaneError: with `initial`, the update failed.
        """
        self._source = as_source(source, dtype=dtype, names=names)
        if self._source.adapter != (adapter is not None):
            raise InvalidRequest(
                "the source is an adapter, and has no name"
                if self._source.adapter
                else "the source is no adapter",
                field="adapter",
                fix="adapter='policy'" if self._source.adapter else "leave adapter out",
            )
        policy_fields = update_arguments(policy=policy).get("policy", {})
        canary_policy = {} if on_canary_failure is None else {"on_canary_failure": on_canary_failure}
        self._options = PublishOptions(
            transport=transport,
            root=absolute_root(root),
            transport_options=dict(options or {}),
            adapter=adapter,
            policy={**policy_fields, **canary_policy},
            cast=cast,
            encoding=encoding,
            trainable_only=trainable_only,
            with_base=base is not None,
            digest=digest,
            bucket_bytes=bucket_bytes,
            workers=workers,
            wait_s=wait_s,
            trainer_stays=trainer_stays,
            limits=self.limits,
        )
        if trainable_only and not isinstance(self._source, TrainableSource):
            raise InvalidRequest(
                f"a {type(self._source).__name__} does not know which tensors are trained",
                field="trainable_only",
                fix="give the module, or leave trainable_only out and use encoding='partial'",
            )
        if canary is not None and policy_fields.get("canary") is not None:
            raise InvalidRequest(
                "canary is given twice: by canary= and in policy", field="canary", fix="leave policy's canary out"
            )
        self._copy = HostCopy(digest)
        self._baseline = Baseline()
        self._canary = CanarySource(canary, tolerance, self._source, source, adapter is not None)
        self._progress = progress
        self._previous: RunningPublication | None = None
        self._lead: Lead | None = None
        """Directs the other ranks. None on any rank but 0, and before the ranks have published together."""
        self._follower: Follower | None = None
        """Does on this rank what rank 0 directs. None on rank 0, and before the ranks have published together."""
        self._number = 0
        """The number of the last version. Every rank counts the calls of `publish`."""
        self._plan: SendPlan | None = None
        self.rank = _rank() if rank is None else rank
        if self.rank == 0:
            if base is not None:
                self._baseline.set_checkpoint(Path(base), digest)
            reached = (
                fleet
                if isinstance(fleet, BlockingFleet)
                else BlockingFleet(
                    fleet, admin_key=admin_key, namespace=namespace, component=component, credentials=credentials
                )
            )
            self._plan = SendPlan(reached, self._options, self.make_sender)
        if initial is not None:
            try:
                self._publish_first(initial)
            except Exception:
                self.close()
                raise
            except BaseException:  # Ctrl-C must not wait for all that `close` waits for
                on_thread(self.close)
                raise

    @property
    def backend(self) -> str | None:
        """The transport of the last version; None before the first."""
        return self._plan.backend if self._plan is not None else None

    @property
    def latest(self) -> Publication | None:
        """The publication that was begun last; None before the first. It is the handle of a `publish` that Ctrl-C has
        ended."""
        return self._previous

    @property
    def copy_bytes(self) -> int:
        """The host memory that this rank's copy for deltas takes, in bytes; 0 if there is no copy."""
        return self._copy.nbytes

    def make_sender(self, backend: str, context: SenderContext) -> Sender:
        """Makes the sender of a transport. A subclass may return an adapted sender."""
        return make_sender(backend, context)

    def publish(self, version: str | None = None, *, wait: bool = True) -> Publication:
        """Sends the weights as they are now.

        One version at a time: while another is under way, this waits for it. A source that gathers among ranks is read
        on the calling thread before this returns, whatever `wait` says. Ctrl-C gives the version up; KeyboardInterrupt
        is raised once no thread reads a tensor.

        Args:
            version: the version's label. Default: the fleet makes one.
            wait: True blocks until the version is committed; the tensors must not change before. False returns at once.

        Raises:
            PlaneError: with `wait`, the update failed; or the version before is still under way after its bounds.
        """
        return self._publish(version, wait, lends=wait)

    def _publish(
        self, version: str | None, wait: bool, lends: bool, unless_digest: str | None = None
    ) -> RunningPublication:
        """`lends`: the caller leaves the tensors alone until the publication ends. `unless_digest`: a version of this
        digest is not sent."""
        publication = RunningPublication(version, self._progress if self.rank == 0 else None)
        self._number += 1
        publication.number = self._number
        publication.policy = self._canary.policy(version, self.rank)
        told = self._source.collective and is_rank_of_torch(self.rank)
        if self.rank != 0:
            self._follow(publication, wait, told)
            return publication
        assert self._plan is not None
        if told:
            publication.tell_ranks = self._make_lead().teller(publication.number)
        blocks = wait or self._source.collective
        if blocks and self._runs_in_fleets_loop():
            blocked = InvalidRequest(
                "the fleet's client runs in this event loop, which publish would block",
                field="wait",
                fix="await publisher.publish_async(…)",
            )
            publication.tell_ranks(blocked)
            raise blocked
        if self._options.mode == "partial":
            unless_digest = None  # the digests of the first version have to be known in any case
        previous, self._previous = self._previous, publication
        # A collective source can't be read again: the other ranks would not take part.
        joins = JOINS if lends and not self._source.collective else 0
        attempt: Attempt
        if self._options.mode == "partial":
            attempt = PartialAttempt(
                self._plan,
                self._source,
                publication,
                previous,
                baseline=self._baseline,
                trainable_only=self._options.trainable_only,
                lends=lends,
                joins=joins,
            )
        elif self._options.mode == "full" and unless_digest is None:
            attempt = Attempt(
                self._plan,
                self._source,
                publication,
                previous,
                lends=lends,
                joins=joins,
                make_lead=self._make_lead,
            )
        else:
            attempt = DeltaAttempt(
                self._plan,
                self._source,
                publication,
                previous,
                copy=self._copy,
                encoding=self._options.mode,
                unless_digest=unless_digest,
                lends=lends,
                joins=joins,
                make_lead=self._make_lead,
            )
        publication.begin()
        try:
            self._start(attempt, previous)
            if wait or attempt.interrupted:
                publication.result()
        except BaseException as error:
            if not publication.done:  # Ctrl-C: the caller has no handle of the publication
                _give_up(publication, error)
            publication.mark_watched()
            raise
        return publication

    def _start(self, attempt: Attempt, previous: RunningPublication | None) -> None:
        if self._source.collective:
            try:
                attempt.read()
            finally:  # Ctrl-C may come when `read` returns
                _begin(attempt, attempt.end)
        else:
            try:
                _begin(attempt, attempt.read_and_end)
            except RuntimeError:
                self._previous = previous  # the attempt has not waited for that one
                raise

    def _publish_first(self, label: str) -> None:
        if self._plan is not None and self._plan.fleet.loop is not None:
            raise InvalidRequest(
                "the fleet's client runs in this event loop, which initial would block",
                field="initial",
                fix=f"leave it out, and begin with: await publisher.publish_async({label!r})",
            )
        served = self._plan.digest_of(label) if self._plan is not None else None
        self._publish(label, wait=True, lends=True, unless_digest=served)

    async def publish_async(self, version: str | None = None) -> Publication:
        """`publish` for asyncio: waits without blocking the loop. The tensors must not change meanwhile.

        If the caller is cancelled, the publication continues, and reads tensors until it ends: wait for the next
        publication, or for `aclose`.
        """
        publish = partial(self._publish, version, wait=False, lends=True)
        publication = await asyncio.to_thread(at_callers_gpu(publish))
        await publication.wait()
        return publication

    def close(self) -> None:
        """Waits for the version under way, then ends the sender. In the fleet client's event loop use `aclose`."""
        if self._waits_for_this_loop():
            raise InvalidRequest(
                "a version is under way, and the fleet's client runs in this event loop, which close would block",
                field="close",
                fix="await publisher.aclose(), or: async with WeightPublisher(…) as publisher",
            )
        if self._previous is not None:
            self._previous.settle(self._options.bound_s())
        self._copy = HostCopy(self._options.digest)  # an attempt that is still under way has its own reference
        for one in (self._follower, self._lead, self._plan):
            if one is not None:
                one.close()

    async def aclose(self) -> None:
        """`close` for asyncio. If the caller is cancelled, closing continues."""
        await asyncio.to_thread(self.close)

    def __enter__(self) -> WeightPublisher:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self._waits_for_this_loop():
            log.warning("a version is under way, so the publisher is closed later, on a thread: use `async with`")
            on_thread(self.close)  # an error of `close` would hide the error that ends the block
        else:
            self.close()

    async def __aenter__(self) -> WeightPublisher:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    def _runs_in_fleets_loop(self) -> bool:
        return (
            self._plan is not None
            and self._plan.fleet.loop is not None
            and _running_loop() is self._plan.fleet.loop
        )

    def _waits_for_this_loop(self) -> bool:
        return self._runs_in_fleets_loop() and self._previous is not None and self._previous.under_way

    def _make_lead(self) -> Lead:
        if self._lead is None:
            self._lead = Lead(MeetingPoint(self._options.transport_options), self._options)
        return self._lead

    def _make_follower(self) -> Follower:
        if self._follower is None:
            meeting = MeetingPoint(self._options.transport_options)
            self._follower = Follower(meeting, self._options, self.make_sender, self._copy)
        return self._follower

    def _follow(self, publication: RunningPublication, wait: bool, told: bool) -> None:
        """The part of a rank other than 0. `told`: rank 0 tells the outcome of a version that it sends alone."""
        if not self._source.collective:
            publication.end()
            return
        previous, self._previous = self._previous, publication
        publication.begin()
        try:
            if previous is not None:
                publication.wait_for(previous, self._options.bound_s())
            partial_version = self._options.trainable_only and agree(False)
            taken = taken_of(self._source, partial_version)
            # Rank 0 sends all, and this rank only gathers.
            only_gathers = taken.owned is None or self._options.mode == "partial"
            if only_gathers and not told:
                try:
                    drain(taken.tensors)
                finally:
                    taken.close()
                publication.end()
                return
            following = self._make_follower().begin(publication, taken)
            if only_gathers:
                following.gather()
            else:
                following.read()
            if wait:
                following.end()
                publication.result()
            else:
                on_thread(following.end)
        except BaseException as error:
            if not publication.done:
                publication.end(error=error)
            publication.mark_watched()
            raise


def _begin(attempt: Attempt, work: Callable[[], object]) -> None:
    try:
        on_thread(work)
    except RuntimeError as error:  # no thread can be started; the next version must not wait for this one
        attempt.give_up(error)
        raise


def _give_up(publication: RunningPublication, error: BaseException) -> None:
    publication.give_up(error)
    try:
        publication.wait_read(GIVE_UP_S)
    except DeadlineExceeded as late:
        log.warning("%s was given up, but %s", publication.version, late)


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

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
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, get_args

from rl_plane.errors import DeadlineExceeded, InvalidRequest
from rl_plane.protocol.canary import OnCanaryFailure
from rl_plane.protocol.fleet_ops import DEFAULT_WAIT_S
from rl_plane.protocol.subjects import DEFAULT_NAMESPACE
from rl_plane.publish.attempt import JOINS, Attempt, drain
from rl_plane.publish.delta_attempt import AttemptByCopy
from rl_plane.publish.fleet_access import BlockingFleet, FleetLike
from rl_plane.publish.host_copy import HostCopy
from rl_plane.publish.publication import Progress, Publication
from rl_plane.publish.send_plan import Encoding, Told, Way
from rl_plane.publish.sources.model_sources import Names, as_source
from rl_plane.publish.threads import at_callers_gpu, on_thread
from rl_plane.publish.trainer_canary import CanarySource, PublishedCanary
from rl_plane.transports.registry import AUTO
from rl_plane.weights.delta_codec import import_numba

log = logging.getLogger("rl_plane.publish")

GIVE_UP_S = 30.0
"""How long Ctrl-C waits until no tensor is read any more: one is gathered or copied at a time, or workers that read
them where they are have to end. A second Ctrl-C does not wait."""


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
        canary: PublishedCanary = None,
        on_canary_failure: OnCanaryFailure | None = None,
        tolerance: float | None = None,
        cast: bool = False,
        encoding: Encoding = "auto",
        bucket_bytes: int | None = None,
        workers: int = 1,
        wait_s: float = DEFAULT_WAIT_S,
        progress: Callable[[Progress], None] | None = None,
        admin_key: str | None = None,
        namespace: str = DEFAULT_NAMESPACE,
        component: str | None = None,
        rank: int | None = None,
        initial: str | None = None,
        stays: bool = True,
    ) -> None:
        """`source`: what `as_source` takes, with `dtype` and `names`. `fleet`: a client, or a URL (`http://…` of the
        facade, with `admin_key`; `nats://…`, with `namespace`), and of which `component`, if there are several.
        `transport`: a backend, or `auto`; `root`: a directory that trainer and workers share, for filesystem;
        `options`: the transport's own. `adapter`: under which name a LoRA adapter is served. `policy`, `cast`: of the
        update. `encoding` `delta`: only what has changed, where that is less than half and the workers keep the version
        before (they are told to); for it the publisher keeps a copy of the base weights in host memory, and the tensors
        may change as soon as they are in it. `auto`: that where some worker is on another machine, or the way is
        `object_store`, and this one has memory for it; but `full` with `cast`, `staging` `none`, `keep_staged`
        False, or `nccl`, and where it was in vain. `bucket_bytes` None: what is best for the transport. `workers`,
        `wait_s`: for how many to wait, and how long. `progress`: called on the publisher's threads. `rank` None: that
        of torch.distributed, if it is initialised by now. `initial`: this blocks until the fleet serves the source as
        it is now under that label. Where every worker serves an update of that label already, the source is read into
        host memory, and sent from there only if it is another version, or if the fleet has changed meanwhile. `stays`
        False: this process ends soon, so `auto` first takes what lasts without it, and `nixl` promises no copy.

        `canary`: the token sequences that every worker scores before it serves a version. None: sequences that follow
        from the vocabulary, with the values of the fleet and its history. A list of token id lists: each `publish`
        first asks the trainer's own model for their log probabilities (`expected_logprobs`), on the calling thread. A
        function `canary(model, version)`: it returns `{sequences, expected}`, and every rank calls it at each
        `publish`; it is what a sharded model needs. `off`: no worker scores anything.
        `on_canary_failure`: what happens if every worker fails it, as in `policy`; default `rollback`.
        `tolerance`: the largest difference from these log probabilities, in nats; default 0.05, or 1/80 of each if that
        is more."""
        self._source = as_source(source, dtype=dtype, names=names)
        if self._source.adapter != (adapter is not None):
            raise InvalidRequest(
                "an adapter is published under a name" if self._source.adapter else "the source is no adapter",
                field="adapter",
                fix="adapter='policy'" if self._source.adapter else "leave adapter out",
            )
        if bucket_bytes is not None and bucket_bytes < 1:
            raise InvalidRequest(f"bucket_bytes is {bucket_bytes}", field="bucket_bytes", fix="give at least 1")
        if encoding not in get_args(Encoding):
            raise InvalidRequest(
                f"encoding is {str(encoding)[:64]!r}", field="encoding", fix="use auto, full, or delta"
            )
        asked = policy or {}
        whole = cast or asked.get("staging") == "none" or asked.get("keep_staged") is False
        if encoding == "delta" and whole:
            raise InvalidRequest(
                "what changes a staged copy that is kept goes with neither cast, staging none nor keep_staged false",
                field="encoding",
                fix="leave encoding out, or those",
            )
        if encoding == "delta" and adapter is not None:
            raise InvalidRequest("adapters go whole", field="encoding", fix="leave it out")
        if encoding == "delta":
            import_numba()
        if encoding == "auto" and (whole or adapter is not None or not stays):
            encoding = "full"
        self._encoding: Encoding = encoding
        self._copy = HostCopy()
        self._told = Told(
            transport,
            Path(os.path.abspath(os.path.expanduser(root))) if root is not None else None,
            dict(options or {}),
            adapter,
            dict(asked) if on_canary_failure is None else {**asked, "on_canary_failure": on_canary_failure},
            cast,
            bucket_bytes,
            workers,
            wait_s,
            stays,
        )
        if canary is not None and asked.get("canary") is not None:
            raise InvalidRequest(
                "canary is given twice: by canary= and in policy", field="canary", fix="leave policy's canary out"
            )
        self._canary = CanarySource(canary, tolerance, self._source, source, adapter is not None)
        self._progress = progress
        self._previous: Publication | None = None
        self._way: Way | None = None
        self.rank = _rank() if rank is None else rank
        if self.rank == 0:
            reached = BlockingFleet(fleet, admin_key=admin_key, namespace=namespace, component=component)
            self._way = Way(reached, self._told)
        if initial is not None:
            try:
                self._publish_first(initial)
            except Exception:
                self.close()
                raise
            except BaseException:  # Ctrl-C, which is not to wait for all that its end takes
                on_thread(self.close)
                raise

    @property
    def backend(self) -> str | None:
        """What the last version went by; None before the first."""
        return self._way.backend if self._way is not None else None

    def publish(self, version: str | None = None, *, wait: bool = True) -> Publication:
        """Sends the weights as they are now. `wait`: until they are committed, and with their error; the tensors must
        not change before. Ctrl-C gives the version up: it is raised once no tensor is read any more.

        One at a time: while another is under way, this waits for it. A source that gathers among ranks is read before
        this returns, on the calling thread, whatever `wait` says."""
        return self._publish(version, wait, lends=wait)

    def _publish(self, version: str | None, wait: bool, lends: bool, unless: str | None = None) -> Publication:
        """`lends`: the caller goes on with the tensors only when the publication has ended. `unless`: nothing is sent
        if the version has this digest."""
        publication = Publication(version, self._progress if self.rank == 0 else None)
        publication.policy = self._canary.policy(version, self.rank)
        if self.rank != 0:
            self._take_part(publication)
            return publication
        assert self._way is not None
        blocks = wait or self._source.collective
        if blocks and self._runs_in_fleets_loop():
            raise InvalidRequest(
                "the fleet's client runs in this loop, which this would block",
                field="wait",
                fix="await publisher.publish_async(…)",
            )
        previous, self._previous = self._previous, publication
        # Other ranks, with which it gathers, would not take part in it once more.
        how: dict[str, Any] = {"lends": lends, "joins": JOINS if lends and not self._source.collective else 0}
        attempt: Attempt
        if self._encoding == "full" and unless is None:
            attempt = Attempt(self._way, self._source, publication, previous, **how)
        else:
            by = (self._copy, self._encoding, unless)
            attempt = AttemptByCopy(self._way, self._source, publication, previous, *by, **how)
        publication.begins()
        try:
            self._start(attempt, previous)
            if wait or attempt.interrupted:
                publication.result()
        except BaseException as error:
            if not publication.done:  # Ctrl-C: nobody has a handle of it
                _give_up(publication, error)
            publication.is_asked()
            raise
        return publication

    def _start(self, attempt: Attempt, previous: Publication | None) -> None:
        if self._source.collective:
            try:
                attempt.read()
            finally:  # also when Ctrl-C comes on its way out
                _begin(attempt, attempt.end)
        else:
            try:
                _begin(attempt, attempt.read_and_end)
            except RuntimeError:
                self._previous = previous  # it has not waited for that one
                raise

    def _publish_first(self, label: str) -> None:
        if self._way is not None and self._way.fleet.loop is not None:
            raise InvalidRequest(
                "the fleet's client runs in this loop, which this would block",
                field="initial",
                fix=f"leave it out, and begin with: await publisher.publish_async({label!r})",
            )
        known = self._way.digest_of(label) if self._way is not None else None
        self._publish(label, wait=True, lends=True, unless=known)

    async def publish_async(self, version: str | None = None) -> Publication:
        """`publish` for asyncio: waits without blocking the loop, and the tensors must not change meanwhile.

        Cancelled, the publication goes on: its tensors are still being read, until the next one ends, or `aclose`."""
        publish = partial(self._publish, version, wait=False, lends=True)
        publication = await asyncio.to_thread(at_callers_gpu(publish))
        await publication.wait()
        return publication

    def close(self) -> None:
        """Waits for what is under way, then frees what the transport held. In the loop of the fleet's own client: see
        `aclose`."""
        if self._waits_for_this_loop():
            raise InvalidRequest(
                "a version is under way, and the fleet's client runs in this loop, which this would block",
                field="close",
                fix="await publisher.aclose(), or: async with WeightPublisher(…) as publisher",
            )
        if self._previous is not None:
            self._previous.settle(self._told.bound_s())
        self._copy = HostCopy()  # what is under way yet has its own reference
        if self._way is not None:
            self._way.close()

    async def aclose(self) -> None:
        """`close` for asyncio. Cancelled, it goes on."""
        await asyncio.to_thread(self.close)

    def __enter__(self) -> WeightPublisher:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self._waits_for_this_loop():
            log.warning("the publisher is closed later, since a version is under way: use `async with`")
            on_thread(self.close)  # an error of its own would hide that one
        else:
            self.close()

    async def __aenter__(self) -> WeightPublisher:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    def _runs_in_fleets_loop(self) -> bool:
        return (
            self._way is not None and self._way.fleet.loop is not None and _running_loop() is self._way.fleet.loop
        )

    def _waits_for_this_loop(self) -> bool:
        return self._runs_in_fleets_loop() and self._previous is not None and self._previous.under_way

    def _take_part(self, publication: Publication) -> None:
        """Of a rank that only gathers."""
        try:
            if self._source.collective:
                taken = self._source.take()
                try:
                    drain(taken.tensors)
                finally:
                    taken.close()
        except BaseException as error:
            publication.end(error=error)
            raise
        publication.end()


def _begin(attempt: Attempt, work: Callable[[], object]) -> None:
    try:
        on_thread(work)
    except RuntimeError as error:  # no thread can be had; the next version is not to wait for this one
        attempt.give_up(error)
        raise


def _give_up(publication: Publication, error: BaseException) -> None:
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

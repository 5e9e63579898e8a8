"""Carries one choice to a worker, and to another one if that worker is lost. Checks what comes against the demands."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace

from frontend.frontend_limits import LIMITS, FrontendLimits
from frontend.routing.aborts import Aborts
from frontend.routing.attempts import Accepted, Attempts
from frontend.routing.committed import Committed
from frontend.routing.demands import NO_DEMANDS, Demands, Unmet, at_delivery, point_of, point_of_span
from frontend.routing.fleet_status import FleetStatus, WorkerStatus
from frontend.routing.prefixes import beginnings, beginnings_of
from frontend.routing.progress import GenerationProgress
from frontend.routing.retry import (
    Fail,
    FindRoom,
    Finish,
    StaleStop,
    Standing,
    Tries,
    TryAgain,
    after_error,
    after_unmet,
)
from frontend.routing.router import Affinity, Router
from frontend.routing.routing_lease import FrontendLease
from frontend.routing.running_requests import RunningRequests
from frontend.routing.worker_selector import WorkerRequirements, WorkerSelector
from rl_plane._util.tracing import OFF, Span, within
from rl_plane.bus.token_stream import StreamReceiver
from rl_plane.errors import DemandUnmet, PlaneError
from rl_plane.membership.core import Changed, Member
from rl_plane.membership.view import MembershipView
from rl_plane.protocol.generation import GenerateDelta, GenerateRequest, names_of

Event = Accepted | GenerateDelta | StaleStop


class EngineClient:
    """Opens streams to workers. `generate` may run any number of times at once."""

    def __init__(
        self,
        receiver: StreamReceiver,
        view: MembershipView,
        status: FleetStatus,
        committed: Committed,
        lease: FrontendLease,
        admission_wait_s: float,
        limits: FrontendLimits = LIMITS,
    ) -> None:
        self.router = Router(limits)
        self.aborts = Aborts()
        self.running = RunningRequests()
        self.moves: Counter[str] = Counter()
        """Choices that were tried elsewhere (`retried`), continued elsewhere (`migrated`), begun anew for other weights
        (`rerun`) or stopped (`cut`). The caller that delivers a choice counts `cut`, as it may stop one itself."""
        self._view = view
        self._status = status
        self._committed = committed
        self._attempts = Attempts(receiver, view, status, committed, self.router, limits)
        self._selector = WorkerSelector(self.router, view, status, committed, lease, admission_wait_s, limits)
        status.on_status.append(self._on_load)

    def start(self) -> None:
        self._view.listen(self._on_member_change)
        # The version that a request demands may be committed now.
        self._view.listen_record(lambda record: self._status.wake())

    @property
    def logprobs_modes(self) -> frozenset[str | None]:
        """The modes of logprobs of the workers. None is in it if a worker makes no tokens."""
        return self._selector.logprobs_modes

    def give_up(self, error: Callable[[], PlaneError]) -> None:
        """Ends all choices under way, and tries none of them elsewhere. `error` makes the error of each choice."""
        self.aborts.give_up(error)
        self._attempts.give_up(error)

    def _on_load(self, instance_id: str, status: WorkerStatus) -> None:
        self.router.on_report(instance_id, status.load, (status.incarnation, status.sequence))

    def _on_member_change(self, change: Changed) -> None:
        before, after = change.before, change.after
        if after is not None:
            self._selector.on_return(after.instance_id)
        if before is None or (after is not None and after.incarnation == before.incarnation):
            return
        if after is None:
            self._selector.on_leave(before)
            self.router.on_leave(before.instance_id)
        self._attempts.on_lost(before.instance_id)

    async def generate(
        self,
        request: GenerateRequest,
        pinned: str | None = None,
        demands: Demands = NO_DEMANDS,
        session: str | None = None,
        any_length: bool = False,
        span: Span = OFF,
    ) -> AsyncGenerator[Event, None]:
        """Yields Accepted, then deltas with checked spans; the last delta has `finish_reason`. Closing it aborts the
        request.

        Accepted may come again: its `at` says whether another worker has begun anew or continues. A request that is
        aborted before a worker has it yields only the last delta. `any_length`: the caller did not choose
        `max_tokens`, so fewer tokens will do where there is no room for so many. `span`: the call's own."""
        loop = asyncio.get_running_loop()
        progress = GenerationProgress(request)
        affinity = Affinity(session, beginnings_of(request) if pinned is None else None)
        needs = asked = WorkerRequirements(request, pinned, demands, affinity, any_length=any_length)
        fixed_demands, since, tries = demands, loop.time(), Tries()
        with self.aborts.of(*names_of(request.id)) as ending, self.running.of(progress) as running:
            for attempt in itertools.count():
                running.worker = None
                if progress.token_ids:
                    needs = replace(needs, made_by=point_of_span(progress.spans[-1]), demands=fixed_demands)
                try:
                    with within(span.child("route", request_id=request.id, attempt=attempt)):
                        member = await ending.unless_aborted(self._selector.select(needs, since, tries))
                except DemandUnmet as error:
                    if not progress.token_ids or demands.on_stale != "cut":
                        raise
                    yield StaleStop(error.facts["field"], error.message)
                    member = None
                if member is None:
                    yield progress.end("abort")
                    return
                running.sent_to(member.instance_id, self.running.clock())
                # Nothing is awaited from here until the request is sent: the lease and the record hold for it.
                tried = needs
                fixed_demands = self._selector.by_sequence(needs.demands, request.adapter)
                if any_length:
                    needs = asked  # the room that was found is this worker's alone
                # A stream's id is used once: a worker takes the second use for a repetition of the first.
                stream_id = f"{request.id}.{attempt}" if attempt else request.id
                unmet: Unmet | None = None
                failure: PlaneError | None = None
                has_token = False
                trying = span.child("attempt", request_id=stream_id, attempt=attempt, worker=member.instance_id)
                try:
                    rest = progress.rest(tried.most)
                    tries_of = self._attempts.run(rest, stream_id, member, affinity, trying)
                    async with aclosing(tries_of) as events:
                        async for event in events:
                            if isinstance(event, Accepted):
                                trying.event("accepted")
                                trying.set(label=event.version.label, sequence=event.version.sequence)
                                yield replace(event, at=len(progress.token_ids))
                                continue
                            delta = progress.shifted(event)
                            unmet = self._unmet(fixed_demands, progress, delta)
                            if unmet is not None:
                                break
                            progress.take(delta)
                            if not has_token and delta.token_ids:
                                has_token = True
                                trying.event("first token")
                            running.last_at = self.running.clock()
                            yield delta
                except PlaneError as error:
                    failure = error
                finally:
                    _end_attempt(trying, progress, failure, unmet)
                if failure is None and unmet is None:
                    self._on_computed(member, progress)
                    return
                decision = self._decide(failure, unmet, tried, member, tries, since, progress)
                if isinstance(decision, WorkerRequirements):
                    needs = decision
                elif isinstance(decision, Finish):
                    if decision.stop is not None:
                        yield decision.stop
                    yield progress.end(decision.reason)
                    return
                elif isinstance(decision, Fail):
                    if decision.error is failure:
                        raise failure
                    raise decision.error from failure
                else:
                    tries = decision.tries
                    await self._before_next(decision, member, since)
                    if decision.how in ("retried", "migrated"):
                        since = loop.time()

    def _decide(
        self,
        failure: PlaneError | None,
        unmet: Unmet | None,
        tried: WorkerRequirements,
        member: Member,
        tries: Tries,
        since: float,
        progress: GenerationProgress,
    ) -> TryAgain | Finish | Fail | WorkerRequirements:
        """Decides what follows a try that ended with `failure` or `unmet`. Requirements mean another try with these."""
        made = len(progress.token_ids)
        is_pinned = tried.pinned is not None
        standing = Standing(made, progress.fresh, progress.full, progress.can_move, is_pinned, tried.demands)
        if failure is None:
            assert unmet is not None
            return after_unmet(unmet, tries, standing, self._selector.may_wait(since))
        decision = after_error(failure, member, tries, standing)
        if not isinstance(decision, FindRoom):
            return decision
        prompt = failure.facts.get("prompt_tokens")
        fitting = self._selector.with_room(tried, member, tries.lost, since, prompt, made)
        return fitting if fitting is not None else Fail(decision.otherwise)

    async def _before_next(self, decision: TryAgain, member: Member, since: float) -> None:
        """Counts the move to another try. After a refusal, learns whether the worker or this frontend was behind."""
        if decision.how == "rerun":
            self._status.on_refusal(member.instance_id)
        if decision.how != "refused":
            self.moves[decision.how] += 1
            return
        before = self._committed.record
        await self._committed.try_read()
        # If this frontend was behind, the worker may take the request now. Else its status says when it opens.
        if self._committed.record == before:
            self._status.on_refusal(member.instance_id)
        refusal = decision.tries.refusal
        if refusal is not None and not self._selector.may_ask_again(since):
            raise refusal

    def _unmet(self, demands: Demands, progress: GenerationProgress, delta: GenerateDelta) -> Unmet | None:
        """The demand that these tokens do not meet, by what is committed now."""
        record, spans = self._committed.record, delta.spans or progress.spans
        if record is None or not spans or not demands.of_versions:
            return None
        return at_delivery(demands, spans, point_of(record.held, progress.request.adapter))

    def _on_computed(self, member: Member, progress: GenerationProgress) -> None:
        """The next turn of a conversation begins with all of these tokens, and the worker has them in its cache."""
        request, prompt = progress.request, progress.prompt_token_ids
        if request.prompt_token_ids is not None and prompt is not None:
            known = beginnings([*prompt, *progress.token_ids], (request.adapter, request.cache_salt))
            if known is not None:
                self.router.on_computed(member.instance_id, known)


def _end_attempt(
    span: Span, progress: GenerationProgress, failure: PlaneError | None, unmet: Unmet | None
) -> None:
    """Ends the span of a try with its tokens. `unmet`: the demand that they did not meet."""
    made = progress.spans[-1] if progress.spans else None
    span.set(
        tokens=progress.fresh,
        label=made.version if made is not None else None,
        sequence=made.sequence if made is not None else None,
        unmet=unmet.demand if unmet is not None else None,
    )
    span.end(failure)

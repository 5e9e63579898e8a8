"""One generation request, carried to a worker, and to another one if that is lost: while it has no token yet, or, on
request, with the tokens so far. What comes is held to what the request demands of the weights."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace

from frontend.routing.aborts import Aborts
from frontend.routing.attempts import Accepted, Attempts
from frontend.routing.committed import Committed
from frontend.routing.continuation import SoFar
from frontend.routing.demands import NO_DEMANDS, Demands, Unmet, at_delivery, point_of, point_of_span
from frontend.routing.fleet_status import FleetStatus, WorkerStatus
from frontend.routing.prefixes import beginnings, beginnings_of
from frontend.routing.router import Router, Wish
from frontend.routing.routing_lease import FrontendLease
from frontend.routing.worker_selector import Aim, Picker
from rl_plane.bus.token_stream import StreamReceiver
from rl_plane.errors import (
    DemandUnmet,
    EngineDied,
    EngineFailed,
    InvalidRequest,
    NotAdmitted,
    Overloaded,
    PayloadTooLarge,
    PlaneError,
    StaleWeights,
    Unavailable,
    Unsupported,
    WorkerLost,
    WrongIncarnation,
    WrongNumerics,
)
from rl_plane.membership.core import Changed, Member
from rl_plane.membership.view import MembershipView
from rl_plane.protocol.generation import GenerateDelta, GenerateRequest, names_of
from rl_plane.protocol.record import DecisionRecord

MAX_LOST = 4
"""Workers that may die under one request, one after the other and without a token, before its caller is told."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The choice ends with its tokens so far: weights that are as demanded make no more of them."""

    demand: str
    message: str


Event = Accepted | GenerateDelta | Cut


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
    ) -> None:
        self.router = Router()
        self.aborts = Aborts()
        self.moves: Counter[str] = Counter()
        """What befell choices: tried elsewhere, continued elsewhere, begun anew for other weights; cut, which whoever
        delivers them counts, as it may cut one itself."""
        self._view = view
        self._status = status
        self._committed = committed
        self._attempts = Attempts(receiver, view, status, committed, self.router)
        self._picker = Picker(self.router, view, status, committed, lease, admission_wait_s)
        self._stop_listening: list[Callable[[], None]] = []
        status.on_load = self._told

    def start(self) -> None:
        self._stop_listening = [
            self._view.listen(self._member_changed),
            self._view.listen_record(self._record_changed),
        ]

    def stop(self) -> None:
        for stop in self._stop_listening:
            stop()
        self._stop_listening = []

    def give_up(self, error: Callable[[], PlaneError]) -> None:
        """Ends all that is under way. `error`: of each choice; none that is tried again elsewhere."""
        self.aborts.give_up(error)
        self._attempts.give_up(error)

    def _told(self, instance_id: str, status: WorkerStatus) -> None:
        self.router.told(instance_id, status.load, (status.incarnation, status.sequence))

    def _member_changed(self, change: Changed) -> None:
        before, after = change.before, change.after
        if after is not None:
            self._picker.back(after.instance_id)
        if before is None or (after is not None and after.incarnation == before.incarnation):
            return
        if after is None:
            self._picker.left(before)
            self.router.forget(before.instance_id)
        self._attempts.lost(before.instance_id)

    def _record_changed(self, record: DecisionRecord) -> None:
        self._status.wake()  # what is demanded may be committed now

    async def generate(
        self,
        request: GenerateRequest,
        pinned: str | None = None,
        demands: Demands = NO_DEMANDS,
        session: str | None = None,
        any_length: bool = False,
    ) -> AsyncGenerator[Event, None]:
        """Accepted, then deltas with checked spans, of which the last has `finish_reason`. Accepted may come again: by
        its `at` another worker has begun anew, or goes on. Of one that is aborted while no worker has it, only the
        last delta comes. Closing it aborts the request. `any_length`: `max_tokens` is no caller's choice, and fewer
        will do where there is no room for so many."""
        loop = asyncio.get_running_loop()
        so_far = SoFar(request)
        wish = Wish(session, beginnings_of(request) if pinned is None else None)
        aim = asked = Aim(request, pinned, demands, wish, any_length=any_length)
        held_to, since = demands, loop.time()
        lost: list[Member] = []
        refusal: Unavailable | None = None
        failure: EngineFailed | StaleWeights | None = None
        with self.aborts.of(*names_of(request.id)) as ending:
            for attempt in itertools.count():
                if so_far.made:
                    aim = replace(aim, made_by=point_of_span(so_far.spans[-1]), demands=held_to)
                try:
                    member = await ending.unless_aborted(self._picker.pick(aim, lost, since, refusal, failure))
                except DemandUnmet as error:
                    if not so_far.made or demands.on_stale != "cut":
                        raise
                    yield Cut(error.facts["field"], error.message)
                    yield so_far.end("abort")
                    return
                if member is None:
                    yield so_far.end("abort")
                    return
                # Nothing is awaited from here until the request is sent: the lease and the record hold for it.
                unmet, tried = None, aim
                held_to = self._picker.by_sequence(aim.demands, request.adapter)  # for good, once there are tokens
                if any_length:
                    aim = asked  # how much room there is holds for this worker alone
                # A stream's id is used once: a worker takes the second one for a repetition of the first.
                stream_id = f"{request.id}.{attempt}" if attempt else request.id
                try:
                    async with aclosing(
                        self._attempts.run(so_far.rest(tried.most), stream_id, member, wish)
                    ) as events:
                        async for event in events:
                            if isinstance(event, Accepted):
                                yield replace(event, at=len(so_far.made)) if so_far.made else event
                                continue
                            delta = so_far.shifted(event)
                            unmet = self._unmet(held_to, so_far, delta)
                            if unmet is not None:
                                break
                            so_far.take(delta)
                            yield delta
                    if unmet is None:
                        self._computed(member, so_far)
                        return
                except (WorkerLost, WrongIncarnation, EngineFailed, StaleWeights) as error:
                    lost = [member] if so_far.fresh else [*lost, member]
                    if not self._may_go_on(aim, so_far, lost):
                        raise _told_to_caller(error, member) from error
                    if so_far.full:
                        yield so_far.end("length")
                        return
                    self.moves["migrated" if so_far.made else "retried"] += 1
                    if isinstance(error, (EngineFailed, StaleWeights)) and not isinstance(error, EngineDied):
                        failure = error  # its worker lives: the caller hears the cause, if nobody else can
                    elif so_far.fresh:
                        failure = None
                    since, refusal = loop.time(), None
                    continue
                except Unavailable as error:
                    # Full or closed; what else is unavailable (NATS, a label) is no better on another worker.
                    moves = isinstance(error, WrongNumerics) and self._may_go_on(aim, so_far, [])
                    if (so_far.fresh and not moves) or not (
                        isinstance(error, (NotAdmitted, Overloaded)) or type(error) is Unavailable
                    ):
                        raise
                    if so_far.fresh:
                        # The worker is closed until it has other weights: those of the version before, perhaps.
                        if so_far.full:
                            yield so_far.end("length")
                            return
                        self.moves["migrated"] += 1
                        since, lost, failure = loop.time(), [], None
                    refusal = error
                    await self._refused(member)
                    if not self._picker.may_ask_again(since):
                        raise
                    continue
                except (InvalidRequest, Unsupported, PayloadTooLarge) as error:
                    made, prompt = len(so_far.made), error.facts.get("prompt_tokens")
                    if error.facts.get("field") == "max_tokens" and (
                        fitting := self._picker.with_room(tried, member, lost, since, prompt, made)
                    ):
                        aim = fitting
                        continue
                    if not so_far.made:
                        raise
                    raise WorkerLost(f"no other worker can go on: {error.message}", retry_after_s=1.0) from error
                if so_far.made and demands.on_stale == "cut":
                    yield Cut(unmet.demand, unmet.message)
                    yield so_far.end("abort")
                    return
                if so_far.made or demands.on_stale == "refuse" or not self._picker.may_wait(since):
                    raise unmet.error()
                self.moves["rerun"] += 1
                self._status.refused(member.instance_id)

    def _unmet(self, demands: Demands, so_far: SoFar, delta: GenerateDelta) -> Unmet | None:
        """By what is committed now."""
        record, spans = self._committed.record, delta.spans or so_far.spans
        if record is None or not spans or not demands.of_versions:
            return None
        return at_delivery(demands, spans, point_of(record.held, so_far.request.adapter))

    @staticmethod
    def _may_go_on(aim: Aim, so_far: SoFar, lost: list[Member]) -> bool:
        """At another worker."""
        if aim.pinned is not None or len(lost) >= MAX_LOST:
            return False
        return not so_far.made or (aim.demands.migrate and so_far.can_move)

    async def _refused(self, member: Member) -> None:
        before = self._committed.record
        await self._committed.try_read()
        # Refused because we were behind: it may take the request now. Else it says when it opens.
        if self._committed.record == before:
            self._status.refused(member.instance_id)

    def _computed(self, member: Member, so_far: SoFar) -> None:
        """The next turn of a conversation begins with all of these tokens."""
        request = so_far.request
        if request.prompt_token_ids is not None and so_far.prompt is not None:
            known = beginnings([*so_far.prompt, *so_far.made], (request.adapter, request.cache_salt))
            if known is not None:
                self.router.computed(member.instance_id, known)


def _told_to_caller(error: PlaneError, member: Member) -> PlaneError:
    if not isinstance(error, (WorkerLost, WrongIncarnation, EngineDied)):
        return error
    fix = "send it again; if error.partial has tokens, after those (migrate: true does so)"
    facts = {"instance_id": member.instance_id, "retry_after_s": 1.0, "fix": fix, **error.facts}
    return WorkerLost(error.message, **facts)

"""Waits until a worker may take a choice, and names that worker.

The worker must be admitted, must support the fields of the request, and must serve weights that meet the request's
demands. The router picks one of the workers for which all three are true."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from frontend.frontend_limits import LIMITS, FrontendLimits
from frontend.routing.committed import LABELS_INTERVAL_S, Committed
from frontend.routing.demands import NO_DEMANDS, Demands, Point, Unmet, at_admission, not_known, point_of
from frontend.routing.fleet_status import FleetStatus, WorkerStatus
from frontend.routing.retry import Tries
from frontend.routing.router import NO_AFFINITY, Affinity, Router, lacks_of, refused_by
from frontend.routing.routing_lease import FrontendLease
from rl_plane.errors import (
    Conflict,
    InvalidRequest,
    NotAdmitted,
    NotFound,
    NoWorkers,
    Overloaded,
    PlaneError,
    Unavailable,
    Unsupported,
    WorkerLost,
)
from rl_plane.membership.core import Member
from rl_plane.membership.view import MembershipView
from rl_plane.protocol.generation import MAX_PROMPT_TOKENS, TOGETHER, GenerateRequest
from rl_plane.protocol.pooling import TASKS, task_field
from rl_plane.protocol.subjects import check_instance_id

TOPS = "prompt_top_logprobs"
MAX_EXAMPLES = 3
"""Closed workers that an error names."""

DEFAULTS = {
    name: described.get_default(call_default_factory=True)
    for name, described in GenerateRequest.model_fields.items()
}


@dataclass(frozen=True, slots=True)
class WorkerRequirements:
    """The requirements of a choice on its worker."""

    request: GenerateRequest
    pinned: str | None = None
    demands: Demands = NO_DEMANDS
    affinity: Affinity = NO_AFFINITY
    room: int = 0
    """The smallest `max_model_len` that may suffice. It grows when a worker says that its own is too small."""
    any_length: bool = False
    """The caller did not choose `max_tokens`, so fewer tokens will do where no worker has room for so many."""
    most: int | None = None
    """The number of tokens to make in all, if it is below `max_tokens` because of `any_length`."""
    made_by: Point | None = None
    """The version that made the tokens so far. It is None without tokens, and for an unknown version."""

    def given(self, names: Collection[str]) -> set[str]:
        """The fields among `names` that ask for something."""
        given = {name for name in names if name in DEFAULTS and getattr(self.request, name) != DEFAULTS[name]}
        return given.union(self.demands.named(), {task_field(self.request.task)}.intersection(names))


def _lacks(member: Member, needs: WorkerRequirements) -> tuple[str, str] | None:
    """The first field that the member does not support, and why."""
    lacks = lacks_of(member.info)
    found = refused_by(lacks, needs.given(_fields_of(lacks))) if lacks else None
    return found or _too_many_tops(member, needs.request)


def _too_many_tops(member: Member, request: GenerateRequest) -> tuple[str, str] | None:
    """The field that asks for more of a prompt's likeliest tokens than the member returns, and why that is too many."""
    wanted, most = request.prompt_top_logprobs, _most_tops(member)
    if wanted <= most:
        return None
    return (
        TOPS,
        f"{wanted} of the likeliest tokens beside each token of the prompt: {member.instance_id} has at most {most}",
    )


def _fields_of(lacks: Collection[str]) -> set[str]:
    return {name for each in lacks for name in each.split(TOGETHER)}


@dataclass(slots=True)
class Lacking:
    """The members that do not support some field of a request, as of one epoch."""

    epoch: int = -1
    fields: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """instance id → field → reason."""
    names: Collection[str] = ()
    """All fields that a member lacks."""
    modes: frozenset[str | None] = frozenset()
    """The modes of logprobs of the members. None is in it if a member makes no tokens."""


class WorkerSelector:
    """Selects workers. `select` waits at most until `admission_wait_s` after its `since`. If workers are open and only
    a demand is not met, it waits until `limits.stale_wait_s` after `since`."""

    def __init__(
        self,
        router: Router,
        view: MembershipView,
        status: FleetStatus,
        committed: Committed,
        lease: FrontendLease,
        admission_wait_s: float,
        limits: FrontendLimits = LIMITS,
    ) -> None:
        self._limits = limits
        self.router = router
        self._view = view
        self._status = status
        self._committed = committed
        self._lease = lease
        self._wait_s = admission_wait_s
        self._lacking = Lacking()
        self._away: dict[str, tuple[Member, float]] = {}
        """instance id → a member that has left, and when."""

    @property
    def logprobs_modes(self) -> frozenset[str | None]:
        """The modes of logprobs of the workers. None is in it if a worker makes no tokens."""
        return self._lacking_now().modes

    def on_leave(self, member: Member) -> None:
        now = asyncio.get_running_loop().time()
        longest_s = max(self._wait_s, self._limits.stale_wait_s)
        since = now - self._limits.away_s - longest_s  # no request waits for an older one any more
        self._away = {key: (one, at) for key, (one, at) in self._away.items() if at > since}
        if member.pipeline_stage is None:
            self._away[member.instance_id] = member, now

    def on_return(self, instance_id: str) -> None:
        self._away.pop(instance_id, None)

    async def select(self, needs: WorkerRequirements, since: float, tries: Tries) -> Member:
        """Returns the worker for a choice. It checks the serving lease, and awaits nothing after that check.

        If it finds no worker in time, it raises `tries.refusal`, if there is one. If no other worker supports the
        request, it raises `tries.failure` at once, because waiting would not help."""
        lost, refusal, failure = tries.lost, tries.refusal, tries.failure
        loop = asyncio.get_running_loop()
        if needs.pinned is not None:
            await self._lease.wait(since + self._wait_s)
            await self._check_pin(needs.pinned)
        unmet: Unmet | None = None
        while True:
            await self._lease.wait(since + self._bound_s(unmet))
            await self._learn(needs.demands, needs.request.adapter)
            if not self._lease.holds():
                continue  # the lease ended meanwhile
            if failure is not None and not self._any_other(needs, since, lost):
                raise failure
            self._check_logprobs_modes(needs.request, lost)
            fit, unmet = self._fit(needs, self._able(needs, since, lost))
            if (chosen := self.router.pick(fit, needs.affinity)) is not None:
                member = self._view.member(chosen)
                if member is not None:
                    return member
            elif fit:
                raise Overloaded(
                    f"each of {len(fit)} workers has as many requests as it takes",
                    workers=len(fit),
                    retry_after_s=1.0,
                )
            if unmet is not None and self._is_final(needs):
                raise unmet.error()
            left = since + self._bound_s(unmet) - loop.time()
            if left <= 0:
                raise failure or (
                    unmet.error() if unmet is not None else refusal or self._no_worker(needs, since, lost)
                )
            # No event says that the history can be read again.
            unread = unmet is not None and self._committed.labels_unread
            await self._status.wait_changed(min(left, LABELS_INTERVAL_S) if unread else left)

    def with_room(
        self,
        needs: WorkerRequirements,
        short: Member,
        lost: Sequence[Member],
        since: float,
        prompt: int | None,
        made: int,
    ) -> WorkerRequirements | None:
        """Returns the requirements of the next try, after the worker `short` had too little room for the prompt and
        `max_tokens`. It returns None if no other worker helps.

        Only a worker can count the tokens of a text. The next try is the first of these that is possible:

        - an open worker with more room
        - this worker with fewer tokens, if the caller did not choose `max_tokens` and `min_tokens` still fits
        - a closed or absent worker with more room, which is worth waiting for

        Raises InvalidRequest if no worker has room for the prompt alone. `prompt`: its tokens, with the `made` ones."""
        room = _room(short)
        longer = replace(needs, room=room + 1, most=None)
        if needs.pinned is None:
            able = self._able(longer, since, lost)
            if any(self.router.takes_more(key) for key in able) or (able and not needs.any_length):
                return longer
        if needs.any_length and prompt is not None:
            most = made + room - prompt
            if max(made, needs.request.min_tokens - 1) < most < (needs.most or needs.request.max_tokens):
                return replace(needs, room=room, most=most)
        waits = needs.pinned is None and (self._any_other(longer, since) or self._may_be_back(longer, since))
        if waits:
            return longer
        if needs.any_length and prompt is not None and not made and prompt >= room:
            raise InvalidRequest(
                f"{prompt} prompt tokens leave no room for a new one: at most {room} together",
                field="prompt" if needs.request.prompt_token_ids is None else "prompt_token_ids",
                fix=f"send at most {room - 1}",
                prompt_tokens=prompt,
            )
        return None

    def may_ask_again(self, since: float) -> bool:
        """Whether there is time to try another worker after a refusal."""
        return asyncio.get_running_loop().time() < since + self._wait_s

    def may_wait(self, since: float) -> bool:
        """Whether there is time to wait for weights that meet the demands."""
        return asyncio.get_running_loop().time() < since + self._limits.stale_wait_s

    def _bound_s(self, unmet: Unmet | None) -> float:
        return self._wait_s if unmet is None else max(self._wait_s, self._limits.stale_wait_s)

    # ---- candidates ----

    def _able(self, needs: WorkerRequirements, since: float, lost: Sequence[Member]) -> Mapping[str, WorkerStatus]:
        """The workers that are admitted, support the request, and were not lost under it."""
        admitted = self._status.admitted(self._needed(needs.request.adapter))
        unable = self._unable(needs, since)
        if needs.pinned is not None:
            if needs.pinned in unable:
                raise self._refusal(needs, {needs.pinned: unable[needs.pinned]})
            return {key: status for key, status in admitted.items() if key == needs.pinned}
        out = self._out(needs, since, lost)
        return {key: status for key, status in admitted.items() if key not in out} if out else admitted

    def _any_other(self, needs: WorkerRequirements, since: float, lost: Sequence[Member] = ()) -> bool:
        """Whether any other worker supports the request. A closed worker counts, because it may open soon."""
        out = self._out(needs, since, lost)
        return any(member.instance_id not in out for member in self._view.snapshot())

    def _may_be_back(self, needs: WorkerRequirements, since: float) -> bool:
        """Whether a worker that supports the request left shortly before it came, or since."""
        return any(
            at > since - self._limits.away_s and _room(member) >= needs.room and _lacks(member, needs) is None
            for member, at in self._away.values()
        )

    def _out(self, needs: WorkerRequirements, since: float, lost: Sequence[Member]) -> Collection[str]:
        """The workers that do not support the request, or were lost under it."""
        gone = {member.instance_id for member in lost if self.is_current(member)}
        return gone | self._unable(needs, since).keys() | self._short(needs)

    def _fit(self, needs: WorkerRequirements, able: Mapping[str, WorkerStatus]) -> tuple[set[str], Unmet | None]:
        """Returns the workers whose weights meet the demands. If there are none, it also returns the demand that no
        worker meets. Without a record it returns neither: the record follows, because an open worker has confirmed
        it."""
        if not needs.demands.of_versions:
            return set(able), None
        record = self._committed.record
        if record is None:
            return set(), None
        adapter = needs.request.adapter
        demands = self.by_sequence(needs.demands, adapter)
        if isinstance(demands.min_version, str):
            return set(), not_known(demands.min_version, adapter, self._committed.labels_unread)
        committed, unmet, fit = point_of(record.held, adapter), None, set()
        for key, status in able.items():
            serves = committed if record.rolling_from is None else status.serves(adapter)
            found = None
            if serves is not None:
                found = at_admission(demands, serves, committed, needs.made_by)
            if found is None:
                fit.add(key)
            unmet = found or unmet
        return fit, None if fit else unmet

    def _is_final(self, needs: WorkerRequirements) -> bool:
        """Whether it is useless to wait for other weights. It is if the caller refuses to wait, or if the demand allows
        only the version of the tokens so far, because a version that was replaced never returns."""
        demands, record = needs.demands, self._committed.record
        if demands.on_stale == "refuse" or needs.made_by is None or record is None:
            return demands.on_stale == "refuse"
        states = [state for state in (record.held, record.rolling_from) if state is not None]
        return demands.on_stale == "cut" or (
            demands.one_version
            and needs.made_by not in [point_of(state, needs.request.adapter) for state in states]
        )

    async def _learn(self, demands: Demands, adapter: str | None) -> None:
        """Reads the record and the label that the demands refer to, where they are unknown here."""
        if demands.of_versions and self._committed.record is None:
            await self._committed.try_read()
        if isinstance(demands.min_version, str) and self._committed.record is not None:
            await self._committed.learn_label(demands.min_version, adapter)

    def by_sequence(self, demands: Demands, adapter: str | None) -> Demands:
        """The demands, with the sequence in place of a label in `min_version` if it is known."""
        label = demands.min_version
        found = self._committed.sequence_of(label, adapter) if isinstance(label, str) else None
        return demands if found is None else replace(demands, min_version=found)

    def _unable(self, needs: WorkerRequirements, since: float) -> Mapping[str, tuple[str, str]]:
        """Maps the id of each worker that cannot serve the request to the field that it does not support, and why.
        Raises Unsupported if no worker that is there or may return supports the request."""
        members, lacking = self._view.snapshot(), self._lacking_now()
        given = needs.given(lacking.names)
        if not given and not needs.request.prompt_top_logprobs:
            return {}
        unable = {
            one.instance_id: found
            for one in members
            if needs.request.prompt_top_logprobs and (found := _too_many_tops(one, needs.request)) is not None
        } | {
            key: found for key, lacks in lacking.fields.items() if (found := refused_by(lacks, given)) is not None
        }
        if unable and len(unable) == len(members) and not self._may_be_back(needs, since):
            raise self._refusal(needs, unable)
        return unable

    def _lacking_now(self) -> Lacking:
        members = self._view.snapshot()
        if self._lacking.epoch != members.epoch:
            lacks_by_id = {one.instance_id: lacks_of(one.info) for one in members}
            fields = {key: lacks for key, lacks in lacks_by_id.items() if lacks}
            named = {name for lacks in fields.values() for name in _fields_of(lacks)}
            modes = frozenset(one.logprobs_mode for one in members)
            self._lacking = Lacking(members.epoch, fields, named, modes)
        return self._lacking

    def _check_logprobs_modes(self, request: GenerateRequest, lost: Sequence[Member]) -> None:
        """Raises Conflict for a request for logprobs whose workers differ in what logprobs are of. `lost`: the workers
        that may have made its tokens so far."""
        every = self.logprobs_modes.union(one.logprobs_mode for one in lost)
        modes = sorted(one for one in every if one is not None)
        if request.logprobs and len(modes) > 1:
            raise Conflict(
                f"the workers differ in logprobs_mode ({', '.join(modes)})",
                field="logprobs",
                fix="start all with the same --logprobs-mode (`rl-plane doctor` names them), or ask for no logprobs",
            )

    def _refusal(self, needs: WorkerRequirements, unable: Mapping[str, tuple[str, str]]) -> PlaneError:
        """Why no worker serves the request. It is a limit if one of them would serve a smaller number."""
        field, reason = min(unable.values(), key=lambda found: found[0] != TOPS)
        task = needs.request.task
        if field == task_field(task):
            return Unsupported(
                f"no worker here {TASKS[task]}: {reason}",
                field="model",
                fix=f"name the model of workers that were started with --task {task}",
            )
        if field != TOPS:
            return Unsupported(reason, field=field, fix="leave it out, or start a worker of an engine that can")
        asked = [one for one in self._view.snapshot() if needs.pinned in (None, one.instance_id)]
        most = max((_most_tops(one) for one in asked if unable[one.instance_id][0] == TOPS), default=0)
        return InvalidRequest(
            f"{needs.request.prompt_top_logprobs} of a prompt's likeliest tokens: the engines return at most {most} "
            "beside each token",
            field=TOPS,
            fix=f"send at most {most}",
            limit=most,
        )

    def _short(self, needs: WorkerRequirements) -> set[str]:
        if not needs.room:
            return set()
        return {member.instance_id for member in self._view.snapshot() if _room(member) < needs.room}

    def _needed(self, adapter: str | None) -> str | None:
        """The adapter that a worker must have reported. It matters only while the fleet serves two states, because some
        workers lack the adapter then."""
        record = self._committed.record
        if adapter is None or record is None:
            return None
        if adapter not in record.adapters:
            raise NotFound(
                f"the adapter {adapter[:200]!r} is not loaded any more",
                field="model",
                fix="list them: GET /v1/models",
            )
        return adapter if record.rolling_from is not None else None

    def is_current(self, member: Member) -> bool:
        """Whether the member is still this process. A new process of the same instance id may take the request."""
        now = self._view.member(member.instance_id)
        return now is not None and now.incarnation == member.incarnation

    async def _check_pin(self, pinned: str) -> None:
        check_instance_id("nvext.instance_id", pinned)
        if self._view.member(pinned) is None:
            await self._view.barrier()
        member = self._view.member(pinned)
        if member is None or member.pipeline_stage is not None:
            raise NotFound(
                f"no worker {pinned} is in the fleet"
                if member is None
                else f"{pinned} is a pipeline stage: {member.pipeline_stage}",
                field="nvext.instance_id",
                fix="leave it out, or name one of GET /v1/rl/workers",
            )

    def _no_worker(self, needs: WorkerRequirements, since: float, lost: Sequence[Member]) -> Unavailable:
        waited, pinned = f"after {self._wait_s:g} s", needs.pinned
        if not len(self._view.snapshot()):
            subjects = self._view.subjects
            return NoWorkers(
                f"no worker of {subjects.component} is there {waited}",
                fix=f"start one: {subjects.start_worker}",
                retry_after_s=1.0,
            )
        if lost:
            return WorkerLost(
                f"{len(lost)} workers were lost, and no other was there {waited}",
                lost=[member.instance_id for member in lost],
                retry_after_s=1.0,
            )
        closed = dict(self._status.why_closed(self._needed(needs.request.adapter)))
        if pinned:
            closed = {key: why for key, why in closed.items() if key == pinned}
        else:
            closed |= {key: f"it has no {name}" for key, (name, _) in self._unable(needs, since).items()}
            closed |= dict.fromkeys(self._short(needs), "it has too little room for the prompt and max_tokens")
        examples = "; ".join(f"{key}: {why}" for key, why in list(closed.items())[:MAX_EXAMPLES])
        return NotAdmitted(
            f"{f'worker {pinned} takes' if pinned else 'no worker takes'} "
            f"{'no ' if pinned else ''}requests {waited} ({examples})",
            fix="GET /v1/rl/workers says why each worker is closed",
            retry_after_s=1.0,
        )


def _most_tops(member: Member) -> int:
    """The number of likeliest tokens that the worker returns beside each token of a prompt."""
    most = member.info.get("max_prompt_top_logprobs")
    return most if isinstance(most, int) else 0


def _room(member: Member) -> int:
    """The room for a prompt and a choice together, in tokens."""
    length = member.info.get("max_model_len")
    return length if isinstance(length, int) else MAX_PROMPT_TOKENS

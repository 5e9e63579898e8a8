"""Waits until a worker may take a request, and names it: who is admitted, can do what is asked, and serves what is
demanded; of those the router has the choice."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from frontend.routing.committed import LABELS_INTERVAL_S, Committed
from frontend.routing.demands import NO_DEMANDS, Demands, Point, Unmet, at_admission, not_known, point_of
from frontend.routing.fleet_status import FleetStatus, WorkerStatus
from frontend.routing.router import NO_WISH, Router, Wish, lacks_of, refused_by
from frontend.routing.routing_lease import FrontendLease
from rl_plane.errors import (
    EngineFailed,
    InvalidRequest,
    NotAdmitted,
    NotFound,
    NoWorkers,
    Overloaded,
    StaleWeights,
    Unavailable,
    Unsupported,
    WorkerLost,
)
from rl_plane.membership.core import Member
from rl_plane.membership.view import MembershipView
from rl_plane.protocol.generation import MAX_PROMPT_TOKENS, TOGETHER, GenerateRequest
from rl_plane.protocol.subjects import check_instance_id

STALE_WAIT_S = 60.0
"""For a version that is demanded and still to be committed: a trainer's step and its update; what takes longer is to
be told."""
AWAY_S = 60.0
"""A worker that left so short ago may be back, as may one that left while somebody waits: started anew it loads its
engine and its weights. Until then what it alone can do waits, and is to be asked again rather than changed."""
MAX_EXAMPLES = 3
"""Closed workers that an error names."""

DEFAULTS = {
    name: described.get_default(call_default_factory=True)
    for name, described in GenerateRequest.model_fields.items()
}


@dataclass(frozen=True, slots=True)
class Aim:
    """What a choice needs of its worker."""

    request: GenerateRequest
    pinned: str | None = None
    demands: Demands = NO_DEMANDS
    wish: Wish = NO_WISH
    room: int = 0
    """The least `max_model_len` that will do, as far as workers have said that theirs is too small."""
    any_length: bool = False
    """`max_tokens` is no caller's choice: where nobody has room for so many, fewer will do."""
    most: int | None = None
    """So many tokens at most, in all, for that reason. None: `max_tokens`."""
    made_by: Point | None = None
    """What made the tokens so far. None: there are none, or nobody knows."""

    def given(self, names: Collection[str]) -> set[str]:
        """Those of these fields that ask for something."""
        given = {name for name in names if name in DEFAULTS and getattr(self.request, name) != DEFAULTS[name]}
        return given.union(self.demands.named())


def _lacks(member: Member, aim: Aim) -> tuple[str, str] | None:
    """The field that it can't do, and why."""
    lacks = lacks_of(member.info)
    return refused_by(lacks, aim.given(_fields_of(lacks))) if lacks else None


def _fields_of(lacks: Collection[str]) -> set[str]:
    return {name for each in lacks for name in each.split(TOGETHER)}


@dataclass(slots=True)
class Lacking:
    """The members that can't do some field of a request, as of one epoch."""

    epoch: int = -1
    fields: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """instance id → field → why not."""
    names: Collection[str] = ()
    """The fields that are meant."""


class Picker:
    """Its waits end by `admission_wait_s` after the time that `pick` is given, or by STALE_WAIT_S where only a demand
    stands against those that are there."""

    def __init__(
        self,
        router: Router,
        view: MembershipView,
        status: FleetStatus,
        committed: Committed,
        lease: FrontendLease,
        admission_wait_s: float,
    ) -> None:
        self.router = router
        self._view = view
        self._status = status
        self._committed = committed
        self._lease = lease
        self._wait_s = admission_wait_s
        self._lacking = Lacking()
        self._away: dict[str, tuple[Member, float]] = {}
        """By instance id those that have left, and when."""

    def left(self, member: Member) -> None:
        now = asyncio.get_running_loop().time()
        since = now - AWAY_S - max(self._wait_s, STALE_WAIT_S)  # whoever waits for an older one has ended
        self._away = {key: (one, at) for key, (one, at) in self._away.items() if at > since}
        if member.stage is None:
            self._away[member.instance_id] = member, now

    def back(self, instance_id: str) -> None:
        self._away.pop(instance_id, None)

    async def pick(
        self,
        aim: Aim,
        lost: Sequence[Member],
        since: float,
        refusal: Unavailable | None = None,
        failure: EngineFailed | StaleWeights | None = None,
    ) -> Member:
        """Under the serving lease, and nothing is awaited after it was looked at. `refusal`: the last worker's word,
        which is raised where no other one is found. `failure`: of a worker that is still there; it is raised at once
        where no other one can do what is asked, open or closed, as waiting mends nothing."""
        loop = asyncio.get_running_loop()
        if aim.pinned is not None:
            await self._lease.wait(since + self._wait_s)
            await self._check_pin(aim.pinned)
        unmet: Unmet | None = None
        while True:
            await self._lease.wait(since + self._bound_s(unmet))
            await self._learn(aim.demands, aim.request.adapter)
            if not self._lease.holds():
                continue  # it ended meanwhile
            if failure is not None and not self._anybody(aim, since, lost):
                raise failure
            fit, unmet = self._fit(aim, self._able(aim, since, lost))
            if (chosen := self.router.pick(fit, aim.wish)) is not None:
                member = self._view.member(chosen)
                if member is not None:
                    return member
            elif fit:
                raise Overloaded(
                    f"each of {len(fit)} workers has as many requests as it takes",
                    workers=len(fit),
                    retry_after_s=1.0,
                )
            if unmet is not None and self._is_final(aim):
                raise unmet.error()
            left = since + self._bound_s(unmet) - loop.time()
            if left <= 0:
                raise failure or (
                    unmet.error() if unmet is not None else refusal or self._nobody(aim, since, lost)
                )
            # That the history can be read again, nobody tells.
            unread = unmet is not None and self._committed.labels_unread
            await self._status.wait_changed(min(left, LABELS_INTERVAL_S) if unread else left)

    def with_room(
        self, aim: Aim, short: Member, lost: Sequence[Member], since: float, prompt: int | None, made: int
    ) -> Aim | None:
        """After this one had too little room for the prompt and `max_tokens`, as only a worker can tell of a text. Who
        is open and has more is next; else, where nobody chose that length, as many tokens as fit here, if those are
        `min_tokens`; else it is worth waiting for who is closed, or away. None: nobody has more. InvalidRequest where
        it is the prompt alone that nobody has room for. `prompt`: its tokens, with the `made` ones."""
        room = _room(short)
        longer = replace(aim, room=room + 1, most=None)
        if aim.pinned is None:
            able = self._able(longer, since, lost)
            if any(self.router.takes_more(key) for key in able) or (able and not aim.any_length):
                return longer
        if aim.any_length and prompt is not None:
            most = made + room - prompt
            if max(made, aim.request.min_tokens - 1) < most < (aim.most or aim.request.max_tokens):
                return replace(aim, room=room, most=most)
        waits = aim.pinned is None and (self._anybody(longer, since) or self._may_be_back(longer, since))
        if waits:
            return longer
        if aim.any_length and prompt is not None and not made and prompt >= room:
            raise InvalidRequest(
                f"{prompt} prompt tokens leave no room for a new one: at most {room} together",
                field="prompt" if aim.request.prompt_token_ids is None else "prompt_token_ids",
                fix=f"send at most {room - 1}",
                prompt_tokens=prompt,
            )
        return None

    def may_ask_again(self, since: float) -> bool:
        """Another worker, where one has refused?"""
        return asyncio.get_running_loop().time() < since + self._wait_s

    def may_wait(self, since: float) -> bool:
        """For weights that are as demanded, once more?"""
        return asyncio.get_running_loop().time() < since + STALE_WAIT_S

    def _bound_s(self, unmet: Unmet | None) -> float:
        return self._wait_s if unmet is None else max(self._wait_s, STALE_WAIT_S)

    # ---- who may have it ----

    def _able(self, aim: Aim, since: float, lost: Sequence[Member]) -> Mapping[str, WorkerStatus]:
        """Those that are admitted, can do what is asked, and were not lost under this request."""
        admitted = self._status.admitted(self._needed(aim.request.adapter))
        unable = self._unable(aim, since)
        if aim.pinned is not None:
            if aim.pinned in unable:
                raise _unsupported(*unable[aim.pinned])
            return {key: status for key, status in admitted.items() if key == aim.pinned}
        out = self._out(aim, since, lost)
        return {key: status for key, status in admitted.items() if key not in out} if out else admitted

    def _anybody(self, aim: Aim, since: float, lost: Sequence[Member] = ()) -> bool:
        """Who is closed counts too: it may open soon."""
        out = self._out(aim, since, lost)
        return any(member.instance_id not in out for member in self._view.snapshot())

    def _may_be_back(self, aim: Aim, since: float) -> bool:
        """Somebody who could do it, and left a short while before the request came, or since."""
        return any(
            at > since - AWAY_S and _room(member) >= aim.room and _lacks(member, aim) is None
            for member, at in self._away.values()
        )

    def _out(self, aim: Aim, since: float, lost: Sequence[Member]) -> Collection[str]:
        """Those that can't do what is asked, or were lost under this request."""
        gone = {member.instance_id for member in lost if self.is_current(member)}
        return gone | self._unable(aim, since).keys() | self._short(aim)

    def _fit(self, aim: Aim, able: Mapping[str, WorkerStatus]) -> tuple[set[str], Unmet | None]:
        """Those whose weights are as demanded; if there are none, why not. Without a record nobody can tell: it
        is on its way, as an open worker has confirmed it."""
        if not aim.demands.of_versions:
            return set(able), None
        record = self._committed.record
        if record is None:
            return set(), None
        adapter = aim.request.adapter
        demands = self.by_sequence(aim.demands, adapter)
        if isinstance(demands.min_version, str):
            return set(), not_known(demands.min_version, adapter, self._committed.labels_unread)
        committed, unmet, fit = point_of(record.held, adapter), None, set()
        for key, status in able.items():
            serves = committed if record.rolling_from is None else status.serves(adapter)
            found = None
            if serves is not None:
                found = at_admission(demands, serves, committed, aim.made_by)
            if found is None:
                fit.add(key)
            unmet = found or unmet
        return fit, None if fit else unmet

    def _is_final(self, aim: Aim) -> bool:
        """Is nothing waited for where weights won't do? As was asked; or since those of the tokens so far, which alone
        would do, were left and do not come again."""
        demands, record = aim.demands, self._committed.record
        if demands.on_stale == "refuse" or aim.made_by is None or record is None:
            return demands.on_stale == "refuse"
        states = [state for state in (record.held, record.rolling_from) if state is not None]
        return demands.on_stale == "cut" or (
            demands.one_version and aim.made_by not in [point_of(state, aim.request.adapter) for state in states]
        )

    async def _learn(self, demands: Demands, adapter: str | None) -> None:
        """What the demands are held to, where it is not known here."""
        if demands.of_versions and self._committed.record is None:
            await self._committed.try_read()
        if isinstance(demands.min_version, str) and self._committed.record is not None:
            await self._committed.learn_label(demands.min_version, adapter)

    def by_sequence(self, demands: Demands, adapter: str | None) -> Demands:
        """With the sequence that a label in `min_version` has now, if that is known."""
        label = demands.min_version
        found = self._committed.sequence_of(label, adapter) if isinstance(label, str) else None
        return demands if found is None else replace(demands, min_version=found)

    def _unable(self, aim: Aim, since: float) -> Mapping[str, tuple[str, str]]:
        """instance id → the field that it can't do, and why. Unsupported if nobody can who is there or may be
        back."""
        members = self._view.snapshot()
        if self._lacking.epoch != members.epoch:
            told = {one.instance_id: lacks_of(one.info) for one in members}
            fields = {key: lacks for key, lacks in told.items() if lacks}
            named = {name for lacks in fields.values() for name in _fields_of(lacks)}
            self._lacking = Lacking(members.epoch, fields, named)
        given = aim.given(self._lacking.names)
        if not given:
            return {}
        unable = {
            key: found
            for key, lacks in self._lacking.fields.items()
            if (found := refused_by(lacks, given)) is not None
        }
        if unable and len(unable) == len(members) and not self._may_be_back(aim, since):
            raise _unsupported(*next(iter(unable.values())))
        return unable

    def _short(self, aim: Aim) -> set[str]:
        if not aim.room:
            return set()
        return {member.instance_id for member in self._view.snapshot() if _room(member) < aim.room}

    def _needed(self, adapter: str | None) -> str | None:
        """The adapter that a worker must have told us of: while two states are served, not each worker has it."""
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
        """Is it still this process? A new one under the same instance id may well take the request."""
        now = self._view.member(member.instance_id)
        return now is not None and now.incarnation == member.incarnation

    async def _check_pin(self, pinned: str) -> None:
        check_instance_id("nvext.instance_id", pinned)
        if self._view.member(pinned) is None:
            await self._view.barrier()
        member = self._view.member(pinned)
        if member is None or member.stage is not None:
            raise NotFound(
                f"no worker {pinned} is in the fleet"
                if member is None
                else f"{pinned} is a stage: {member.stage}",
                field="nvext.instance_id",
                fix="leave it out, or take one from GET /v1/rl/workers",
            )

    def _nobody(self, aim: Aim, since: float, lost: Sequence[Member]) -> Unavailable:
        waited, pinned = f"after {self._wait_s:g} s", aim.pinned
        if not len(self._view.snapshot()):
            return NoWorkers(f"no worker is there {waited}", fix="start one: `rl-plane worker`", retry_after_s=1.0)
        if lost:
            return WorkerLost(
                f"{len(lost)} workers were lost, and no other was there {waited}",
                lost=[member.instance_id for member in lost],
                retry_after_s=1.0,
            )
        closed = dict(self._status.why_closed(self._needed(aim.request.adapter)))
        if pinned:
            closed = {key: why for key, why in closed.items() if key == pinned}
        else:
            closed |= {key: f"it has no {name}" for key, (name, _) in self._unable(aim, since).items()}
            closed |= dict.fromkeys(self._short(aim), "it has too little room for the prompt and max_tokens")
        examples = "; ".join(f"{key}: {why}" for key, why in list(closed.items())[:MAX_EXAMPLES])
        return NotAdmitted(
            f"{f'worker {pinned} takes' if pinned else 'no worker takes'} "
            f"{'no ' if pinned else ''}requests {waited} ({examples})",
            fix="GET /v1/rl/workers tells why each one is closed",
            retry_after_s=1.0,
        )


def _unsupported(field: str, reason: str) -> Unsupported:
    return Unsupported(reason, field=field, fix="leave it out, or start a worker of an engine that can")


def _room(member: Member) -> int:
    """Tokens of a prompt and a choice together."""
    told = member.info.get("max_model_len")
    return told if isinstance(told, int) else MAX_PROMPT_TOKENS

"""Picks the worker for a request. Pure. `fleet_status.py` says which workers are admitted, and `demands.py` what a
request demands of the weights.

The weight of a worker is in tokens: the tokens of its requests, and REQUEST_TOKENS for each request. The lightest
worker gets the request, unless another worker has the request's session (`X-Session-ID`) or has computed most of its
prompt before, and is not much heavier."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from frontend.frontend_limits import LIMITS, FrontendLimits
from frontend.routing.demands import OF_VERSIONS
from frontend.routing.prefixes import Beginnings, PrefixTable
from rl_plane.protocol.generation import TOGETHER

REQUEST_TOKENS = 1024
"""The weight of a request beside its tokens: each step of an engine costs something, and the answer is still to
come."""
SESSION_RATIO = 2.0
SESSION_SLACK = 4 * REQUEST_TOKENS
"""A session leaves its worker when the worker weighs more than the ratio times the lightest, plus the slack. The
worker's cache has a whole conversation, so the session stays long."""
PREFIX_RATIO = 1.25
PREFIX_SLACK = REQUEST_TOKENS
"""Bounds for a prompt that a worker has computed before. The tokens that it need not compute again add to the
slack."""

NO_WITNESS = "the engine can't tell which weights make its tokens"

NOTHING = 0, 0

Why = Literal["session", "prefix", "load"]


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of all frontends at one worker."""

    running: int = 0
    waiting: int = 0
    """Requests without a token yet."""
    running_tokens: int = 0
    """The prompts and tokens of the running requests."""
    waiting_tokens: int = 0
    """The prompts that are still to be computed."""

    @property
    def requests(self) -> int:
        return self.running + self.waiting

    @property
    def weight(self) -> int:
        """A waiting request counts twice: the next request waits for its prompt too."""
        return REQUEST_TOKENS * (self.running + 2 * self.waiting) + self.running_tokens + self.waiting_tokens


@dataclass(frozen=True, slots=True)
class Affinity:
    """The facts that make one worker better than another for a request."""

    session: str | None = None
    beginnings: Beginnings | None = None


NO_AFFINITY = Affinity()


@dataclass(eq=False, slots=True)
class OpenRequest:
    """A request that this frontend has open at a worker."""

    instance_id: str
    tokens: int
    begun: bool = False

    @property
    def weight(self) -> int:
        return self.tokens + REQUEST_TOKENS * (1 if self.begun else 2)


class Router:
    """Weighs the workers. Workers report their load (`on_report`), and this frontend counts its own requests
    (`on_start` to `on_end`).

    A report includes this frontend's own requests. The router subtracts the requests that were open when the report
    came, and adds the requests that are open now. So the load of other frontends is as new as the report, and the own
    load is exact."""

    def __init__(self, limits: FrontendLimits = LIMITS) -> None:
        self._limits = limits
        self.picks: Counter[str] = Counter()
        self._own_weight: Counter[str] = Counter()
        self._own_requests: Counter[str] = Counter()
        self._others: dict[str, tuple[int, int]] = {}
        """instance id → (weight, requests)."""
        self._weights: dict[str, Hashable] = {}
        self._last_turn: dict[str, int] = {}
        self._turns = 0
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._prefixes = PrefixTable()

    # ---- reports ----

    def on_report(self, instance_id: str, load: Load, weights: Hashable = None) -> None:
        """`weights`: names the weights that the worker holds. When they change, its prefix cache is empty."""
        if self._weights.get(instance_id) != weights:
            self._weights[instance_id] = weights
            self._prefixes.forget(instance_id)
        weight = max(0, load.weight - self._own_weight[instance_id])
        self._others[instance_id] = weight, max(0, load.requests - self._own_requests[instance_id])

    def on_leave(self, instance_id: str) -> None:
        """The worker left the fleet. `on_end` still follows for its requests."""
        self._last_turn.pop(instance_id, None)
        self._others.pop(instance_id, None)
        self._weights.pop(instance_id, None)
        self._prefixes.forget(instance_id)

    def weight(self, instance_id: str) -> int:
        return self._others.get(instance_id, NOTHING)[0] + self._own_weight[instance_id]

    def requests(self, instance_id: str) -> int:
        return self._others.get(instance_id, NOTHING)[1] + self._own_requests[instance_id]

    def takes_more(self, instance_id: str) -> bool:
        return self.requests(instance_id) < self._limits.worker_streams

    # ---- choosing ----

    def pick(self, admitted: Collection[str], affinity: Affinity = NO_AFFINITY) -> str | None:
        """The chosen worker. None: no worker is admitted, or none has room."""
        others, own_weight, own_requests = self._others, self._own_weight, self._own_requests
        least: tuple[int, int, str] | None = None
        most = self._limits.worker_streams
        for instance_id in admitted:
            weight, requests = others.get(instance_id, NOTHING)
            if requests + own_requests.get(instance_id, 0) >= most:
                continue
            rank = weight + own_weight.get(instance_id, 0), self._last_turn.get(instance_id, 0), instance_id
            if least is None or rank < least:
                least = rank
        if least is None:
            return None
        chosen, why = self._preferred(affinity, admitted, least[0]) or (least[2], "load")
        self.picks[why] += 1
        return chosen

    def _preferred(self, affinity: Affinity, admitted: Collection[str], least: int) -> tuple[str, Why] | None:
        if affinity.session is not None:
            kept = self._sessions.get(affinity.session)
            if kept is not None and self._near(kept, admitted, SESSION_RATIO * least + SESSION_SLACK):
                return kept, "session"
        if affinity.beginnings is not None:
            known, holders = self._prefixes.holders(affinity.beginnings)
            most = PREFIX_RATIO * least + PREFIX_SLACK + known
            near = [one for one in holders if self._near(one, admitted, most)]
            if near:
                return min(near, key=self.weight), "prefix"
        return None

    def _near(self, instance_id: str, admitted: Collection[str], most: float) -> bool:
        is_there = instance_id in admitted and self.takes_more(instance_id)
        return is_there and self.weight(instance_id) <= most

    # ---- requests of this frontend ----

    def on_start(self, instance_id: str, tokens: int = 0, affinity: Affinity = NO_AFFINITY) -> OpenRequest:
        """`tokens`: the size of the prompt."""
        opened = OpenRequest(instance_id, tokens)
        self._turns += 1
        self._last_turn[instance_id] = self._turns
        self._own_requests[instance_id] += 1
        self._own_weight[instance_id] += opened.weight
        if affinity.session is not None:
            self._sessions[affinity.session] = instance_id
            self._sessions.move_to_end(affinity.session)
            if len(self._sessions) > self._limits.sessions:
                self._sessions.popitem(last=False)
        if affinity.beginnings is not None:
            self._prefixes.note(affinity.beginnings, instance_id)
        return opened

    def on_tokens(self, opened: OpenRequest, tokens: int) -> None:
        before = opened.weight
        opened.tokens += tokens
        opened.begun = True
        self._own_weight[opened.instance_id] += opened.weight - before

    def on_computed(self, instance_id: str, beginnings: Beginnings) -> None:
        """The worker's cache has all of these tokens now."""
        self._prefixes.note(beginnings, instance_id)

    def on_end(self, opened: OpenRequest) -> None:
        self._own_weight[opened.instance_id] -= opened.weight
        self._own_requests[opened.instance_id] -= 1
        if not self._own_requests[opened.instance_id]:
            del self._own_requests[opened.instance_id], self._own_weight[opened.instance_id]


def lacks_of(info: Mapping[str, Any]) -> dict[str, str]:
    """The fields of a request that a worker does not support, and why."""
    lacks: dict[str, str] = dict(info.get("refused_fields") or {})
    return lacks if info.get("witnesses", True) else lacks | dict.fromkeys(OF_VERSIONS, NO_WITNESS)


def refused_by(lacks: Mapping[str, str], given: Collection[str]) -> tuple[str, str] | None:
    """The first of the given fields that an engine does not support, and why. `lacks`: as `lacks_of` returns it. Of
    fields that exclude each other, joined by TOGETHER, it names the first."""
    for fields, reason in lacks.items():
        field, *others = fields.split(TOGETHER)
        if field in given and all(other in given for other in others):
            return field, reason
    return None

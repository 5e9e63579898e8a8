"""Which worker gets a request: the pure router. Who may get one at all is `fleet_status.py`'s word, and what a request
demands of the weights `demands.py`'s.

The weight of a worker is in tokens: those of the requests that it has, and REQUEST_TOKENS for each of them. It gets
the request that weighs least, unless the request belongs to a session that another worker has (`X-Session-ID`), or
another one has computed most of its prompt before, and that one is not much heavier.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from frontend.routing.demands import OF_VERSIONS
from frontend.routing.prefixes import Beginnings, PrefixTable
from rl_plane.protocol.generation import MAX_STREAMS, TOGETHER

REQUEST_TOKENS = 1024
"""What a request weighs beside its tokens: each step of an engine costs something for it, and its answer is to come."""
SESSION_RATIO = 2.0
SESSION_SLACK = 4 * REQUEST_TOKENS
"""A session leaves its worker when that weighs more than the ratio times the least, and the slack: what it has in the
cache is a whole conversation, so it stays long."""
PREFIX_RATIO = 1.25
PREFIX_SLACK = REQUEST_TOKENS
"""Likewise for a prompt that a worker has computed before; what need not be computed again is added to the slack."""
MAX_SESSIONS = 65_536
"""Conversations that are remembered, the latest ones: some 20 MB."""

NO_WITNESS = "the engine can't tell which weights make its tokens"

NOTHING = 0, 0

Why = Literal["session", "prefix", "load"]


@dataclass(frozen=True, slots=True)
class Load:
    """What a worker has of all frontends' requests."""

    running: int = 0
    waiting: int = 0
    """Without a token yet."""
    running_tokens: int = 0
    """Prompts and what was made, of the running ones."""
    waiting_tokens: int = 0
    """Prompts that are still to be computed."""

    @property
    def requests(self) -> int:
        return self.running + self.waiting

    @property
    def weight(self) -> int:
        """A waiting one counts twice: whoever comes after it waits for its prompt too."""
        return REQUEST_TOKENS * (self.running + 2 * self.waiting) + self.running_tokens + self.waiting_tokens


@dataclass(frozen=True, slots=True)
class Wish:
    """What a request would like of its worker."""

    session: str | None = None
    beginnings: Beginnings | None = None


NO_WISH = Wish()


@dataclass(eq=False, slots=True)
class Turn:
    """A request that this frontend has open at a worker."""

    instance_id: str
    tokens: int
    begun: bool = False

    @property
    def weight(self) -> int:
        return self.tokens + REQUEST_TOKENS * (1 if self.begun else 2)


class Router:
    """`told` is what workers report, `started` to `ended` what this frontend has open there.

    A report has this frontend's own requests in it. What was its own when it came is taken off, and what is its own
    now is added: so the load of the other frontends is as new as the report, and the own is as new as can be."""

    def __init__(self) -> None:
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

    # ---- what is known ----

    def told(self, instance_id: str, load: Load, weights: Hashable = None) -> None:
        """`weights`: names those that it holds. When they change, its prefix cache is empty."""
        if self._weights.get(instance_id) != weights:
            self._weights[instance_id] = weights
            self._prefixes.forget(instance_id)
        weight = max(0, load.weight - self._own_weight[instance_id])
        self._others[instance_id] = weight, max(0, load.requests - self._own_requests[instance_id])

    def forget(self, instance_id: str) -> None:
        """It left the fleet; its requests still say `ended`."""
        self._last_turn.pop(instance_id, None)
        self._others.pop(instance_id, None)
        self._weights.pop(instance_id, None)
        self._prefixes.forget(instance_id)

    def weight(self, instance_id: str) -> int:
        return self._others.get(instance_id, NOTHING)[0] + self._own_weight[instance_id]

    def requests(self, instance_id: str) -> int:
        return self._others.get(instance_id, NOTHING)[1] + self._own_requests[instance_id]

    def takes_more(self, instance_id: str) -> bool:
        return self.requests(instance_id) < MAX_STREAMS

    def in_flight(self, instance_id: str | None = None) -> int:
        """Of this frontend."""
        return self._own_requests.total() if instance_id is None else self._own_requests[instance_id]

    # ---- choosing ----

    def pick(self, admitted: Collection[str], wish: Wish = NO_WISH) -> str | None:
        """None: nobody is there, or nobody has room."""
        others, own_weight, own_requests = self._others, self._own_weight, self._own_requests
        least: tuple[int, int, str] | None = None
        for instance_id in admitted:
            weight, requests = others.get(instance_id, NOTHING)
            if requests + own_requests.get(instance_id, 0) >= MAX_STREAMS:
                continue
            rank = weight + own_weight.get(instance_id, 0), self._last_turn.get(instance_id, 0), instance_id
            if least is None or rank < least:
                least = rank
        if least is None:
            return None
        chosen, why = self._wished(wish, admitted, least[0]) or (least[2], "load")
        self.picks[why] += 1
        return chosen

    def _wished(self, wish: Wish, admitted: Collection[str], least: int) -> tuple[str, Why] | None:
        if wish.session is not None:
            kept = self._sessions.get(wish.session)
            if kept is not None and self._near(kept, admitted, SESSION_RATIO * least + SESSION_SLACK):
                return kept, "session"
        if wish.beginnings is not None:
            known, holders = self._prefixes.holders(wish.beginnings)
            most = PREFIX_RATIO * least + PREFIX_SLACK + known
            near = [one for one in holders if self._near(one, admitted, most)]
            if near:
                return min(near, key=self.weight), "prefix"
        return None

    def _near(self, instance_id: str, admitted: Collection[str], most: float) -> bool:
        is_there = instance_id in admitted and self.takes_more(instance_id)
        return is_there and self.weight(instance_id) <= most

    # ---- what this frontend has open ----

    def started(self, instance_id: str, tokens: int = 0, wish: Wish = NO_WISH) -> Turn:
        """`tokens`: of the prompt."""
        turn = Turn(instance_id, tokens)
        self._turns += 1
        self._last_turn[instance_id] = self._turns
        self._own_requests[instance_id] += 1
        self._own_weight[instance_id] += turn.weight
        if wish.session is not None:
            self._sessions[wish.session] = instance_id
            self._sessions.move_to_end(wish.session)
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
        if wish.beginnings is not None:
            self._prefixes.note(wish.beginnings, instance_id)
        return turn

    def grew(self, turn: Turn, tokens: int) -> None:
        """It made so many."""
        before = turn.weight
        turn.tokens += tokens
        turn.begun = True
        self._own_weight[turn.instance_id] += turn.weight - before

    def computed(self, instance_id: str, beginnings: Beginnings) -> None:
        """Its cache has all of these tokens now."""
        self._prefixes.note(beginnings, instance_id)

    def ended(self, turn: Turn) -> None:
        self._own_weight[turn.instance_id] -= turn.weight
        self._own_requests[turn.instance_id] -= 1
        if not self._own_requests[turn.instance_id]:
            del self._own_requests[turn.instance_id], self._own_weight[turn.instance_id]


def lacks_of(info: Mapping[str, Any]) -> dict[str, str]:
    """The fields of a request that a worker can't do, and why not, as its member tells."""
    lacks: dict[str, str] = dict(info.get("lacks") or {})
    return lacks if info.get("witnesses", True) else lacks | dict.fromkeys(OF_VERSIONS, NO_WITNESS)


def refused_by(lacks: Mapping[str, str], given: Collection[str]) -> tuple[str, str] | None:
    """The first of the fields that were given that an engine can't do, and why. `lacks`: as its member tells; of fields
    that it can't do together, joined by TOGETHER, the first is named."""
    for fields, reason in lacks.items():
        field, *others = fields.split(TOGETHER)
        if field in given and all(other in given for other in others):
            return field, reason
    return None

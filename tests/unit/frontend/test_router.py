"""The router's choice of a worker, without a loop or a fleet."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from frontend.frontend_limits import LIMITS, FrontendLimits
from frontend.routing import prefixes
from frontend.routing.demands import Demands
from frontend.routing.prefixes import LENGTHS, MAX_HOLDERS, Beginnings, PrefixTable, beginnings, beginnings_of
from frontend.routing.router import (
    NO_WITNESS,
    REQUEST_TOKENS,
    SESSION_SLACK,
    Affinity,
    Load,
    Router,
    lacks_of,
    refused_by,
)
from frontend.routing.worker_selector import WorkerRequirements
from rl_plane.protocol.generation import GenerateRequest

ABC = ("a", "b", "c")


def router(limits: FrontendLimits = LIMITS, **running: int) -> Router:
    made = Router(limits)
    for instance_id, count in running.items():
        made.on_report(instance_id, Load(running=count))
    return made


# ---- load ----


def test_the_least_loaded_worker_gets_the_request() -> None:
    one = router(a=2, b=1, c=3)
    assert one.pick(ABC) == "b"
    assert one.pick(("a", "c")) == "a"
    assert one.pick(()) is None
    turns = [one.on_start("b"), one.on_start("b")]
    assert one.pick(ABC) == "a"
    for turn in turns:
        one.on_end(turn)
    assert one.pick(ABC) == "b"
    assert one.requests("b") == 1  # the request of another frontend
    assert one.picks["load"] == 4


def test_tokens_weigh_and_what_waits_weighs_twice() -> None:
    one = Router()
    one.on_report("a", Load(running=2, running_tokens=10 * REQUEST_TOKENS))
    one.on_report("b", Load(running=3))
    assert one.pick(("a", "b")) == "b"
    one.on_report("b", Load(running=3, waiting=5))
    assert one.pick(("a", "b")) == "a"
    one.on_report("b", Load(running=2, waiting_tokens=11 * REQUEST_TOKENS))
    assert one.pick(("a", "b")) == "a"


def test_equals_take_turns() -> None:
    one, turns = Router(), []
    for _ in range(6):
        chosen = one.pick(ABC)
        assert chosen is not None
        turns.append(chosen)
        one.on_end(one.on_start(chosen))
    assert turns == ["a", "b", "c"] * 2
    one.on_leave("b")
    assert one.pick(ABC) == "b"


def test_many_at_once_are_spread() -> None:
    one, open_ = Router(), []
    for _ in range(30):
        chosen = one.pick(ABC)
        assert chosen is not None
        open_.append(one.on_start(chosen, tokens=7))
    assert [one.requests(key) for key in "abc"] == [10, 10, 10]
    one.on_leave("a")
    one.on_end(next(turn for turn in open_ if turn.instance_id == "a"))  # it ends after its worker left
    assert one.requests("a") == 9


def test_a_report_has_our_own_requests_in_it_and_they_count_once() -> None:
    one = Router()
    turn = one.on_start("a", tokens=100)
    one.on_tokens(turn, 20)
    assert one.weight("a") == 120 + REQUEST_TOKENS
    one.on_report("a", Load(running=3, running_tokens=420))
    assert one.weight("a") == 420 + 3 * REQUEST_TOKENS
    one.on_tokens(turn, 5)
    assert one.weight("a") == 425 + 3 * REQUEST_TOKENS
    one.on_end(turn)
    assert one.weight("a") == 300 + 2 * REQUEST_TOKENS  # of other frontends
    assert one.requests("a") == 2
    one.on_report("a", Load())
    assert one.weight("a") == one.requests("a") == 0


def test_several_frontends_share_a_fleet_by_what_workers_report() -> None:
    fleet = {key: Load() for key in "abcd"}
    frontends = [Router() for _ in range(3)]
    for round_ in range(40):
        mine = frontends[round_ % 3]
        chosen = mine.pick(fleet)
        assert chosen is not None
        mine.on_start(chosen)
        fleet[chosen] = Load(waiting=fleet[chosen].waiting + 1)
        if round_ % 4 == 3:  # a report every few requests
            for one in frontends:
                for key, load in fleet.items():
                    one.on_report(key, load)
    counts = [load.requests for load in fleet.values()]
    assert max(counts) - min(counts) <= 3, counts


def test_weights_never_drift() -> None:
    one, rng, open_ = Router(), random.Random(1), []
    for _ in range(3000):
        action = rng.randrange(4)
        if action == 0:
            open_.append(one.on_start(rng.choice(ABC), rng.randrange(5000)))
        elif action == 1 and open_:
            one.on_tokens(rng.choice(open_), rng.randrange(50))
        elif action == 2 and open_:
            one.on_end(open_.pop(rng.randrange(len(open_))))
        else:
            one.on_report(rng.choice(ABC), Load(rng.randrange(9), rng.randrange(9), rng.randrange(9999)))
        for key in ABC:
            mine = [turn for turn in open_ if turn.instance_id == key]
            assert one.requests(key) >= len(mine)
            assert one.weight(key) >= sum(turn.weight for turn in mine)
    for turn in open_:
        one.on_end(turn)
    for key in ABC:
        one.on_report(key, Load())
        assert one.weight(key) == one.requests(key) == 0


def test_a_worker_with_all_that_it_takes_gets_no_more() -> None:
    one = router(FrontendLimits(worker_streams=3), a=2, b=3)
    assert one.pick(("a", "b"), Affinity(session="s")) == "a"
    one.on_start("a", affinity=Affinity(session="s"))
    assert one.pick(("a", "b"), Affinity(session="s")) is None


# ---- sessions ----


def test_a_session_stays_while_its_worker_is_there_and_not_much_busier() -> None:
    one, affinity = router(a=5, b=4), Affinity(session="s")
    assert one.pick(("a", "b"), affinity) == "b"
    one.on_end(one.on_start("b", affinity=affinity))
    one.on_report("b", Load(running=9))
    assert one.pick(("a", "b"), affinity) == "b"
    assert one.pick(("a", "b"), Affinity(session="other")) == "a"
    assert one.picks["session"] == 1
    one.on_report("b", Load(running=2 * 5 + SESSION_SLACK // REQUEST_TOKENS + 1))
    assert one.pick(("a", "b"), affinity) == "a", "overloaded"
    one.on_report("b", Load())
    assert one.pick(("a",), affinity) == "a", "closed or gone"


def test_a_session_that_has_left_stays_where_it_went() -> None:
    one, affinity = router(a=0, b=0), Affinity(session="s")
    one.on_end(one.on_start("a", affinity=affinity))
    assert one.pick(("b",), affinity) == "b"
    one.on_end(one.on_start("b", affinity=affinity))
    assert one.pick(("a", "b"), affinity) == "b"


def test_the_router_remembers_a_bounded_number_of_the_latest_sessions() -> None:
    one = router(FrontendLimits(sessions=2), a=0, b=1)
    for session in ("1", "2", "1", "3"):
        one.on_end(one.on_start("b", affinity=Affinity(session=session)))
    picked = {session: one.pick(("a", "b"), Affinity(session=session)) for session in "123"}
    assert picked == {"1": "b", "2": "a", "3": "b"}


# ---- prefixes ----


def tokens(seed: int, count: int) -> list[int]:
    return [random.Random(f"{seed} {at}").randrange(1000) for at in range(count)]


def of(ids: list[int], **more: str) -> Beginnings:
    found = beginnings_of(GenerateRequest(id="r", prompt_token_ids=ids, **more))
    assert found is not None
    return found


def test_a_prompt_goes_where_most_of_it_was_computed() -> None:
    one, prompt = router(a=4, b=4), tokens(1, 1000)
    one.on_end(one.on_start("b", affinity=Affinity(beginnings=of(prompt))))
    one.on_end(one.on_start("a"))
    assert one.pick(("a", "b"), Affinity(beginnings=of(tokens(2, 1000)))) == "b", "its turn is longest ago"
    one.on_end(one.on_start("b"))
    longer = Affinity(beginnings=of([*prompt, *tokens(3, 800)]))
    assert one.pick(("a", "b"), longer) == "b"
    assert one.picks["prefix"] == 1
    one.on_report("b", Load(running=7))
    assert one.pick(("a", "b"), longer) == "a", "what it saves is not worth the wait"
    one.on_report("b", Load(running=5))
    assert one.pick(("a", "b"), longer) == "b"
    assert one.pick(("a",), longer) == "a"


def test_samples_of_one_prompt_on_an_idle_fleet_are_spread() -> None:
    one, affinity = Router(), Affinity(beginnings=of(tokens(1, 500)))
    for _ in range(9):
        chosen = one.pick(ABC, affinity)
        assert chosen is not None
        one.on_start(chosen, 500, affinity)
    assert [one.requests(key) for key in ABC] == [3, 3, 3]


def test_new_weights_empty_a_prefix_cache() -> None:
    one, affinity = router(a=1, b=0), Affinity(beginnings=of(tokens(1, 500)))
    one.on_report("a", Load(), "1")
    one.on_end(one.on_start("a", affinity=affinity))
    one.on_end(one.on_start("b"))
    one.on_report("a", Load(), "1")
    one.pick(("a", "b"), affinity)
    assert one.picks["prefix"] == 1
    one.on_report("a", Load(), "2")
    one.pick(("a", "b"), affinity)
    assert one.picks["prefix"] == 1
    one.on_end(one.on_start("a", affinity=affinity))
    one.pick(("a", "b"), affinity)
    assert one.picks["prefix"] == 2
    one.on_leave("a")
    one.on_report("a", Load(), "2")  # another process of this name
    one.pick(("a", "b"), affinity)
    assert one.picks["prefix"] == 2


def test_a_prompt_that_shares_no_cache_has_no_holder() -> None:
    table, prompt = PrefixTable(), tokens(1, 200)
    table.note(of(prompt), "a")
    assert table.holders(of(prompt)) == (192, ["a"])
    for more in ({"cache_salt": "x"}, {"adapter": "x"}):
        assert table.holders(of(prompt, **more)) == (0, [])
    assert table.holders(of([7, *prompt[1:]])) == (0, [])
    assert table.holders(of([*prompt[:100], *tokens(2, 50)])) == (96, ["a"])
    assert table.holders(of([*prompt[:100], *tokens(2, 300)])) == (0, []), "too little of it"


def test_text_has_beginnings_too() -> None:
    def chat(*texts: str) -> Beginnings | None:
        messages = [{"role": "user", "content": text} for text in texts]
        return beginnings_of(GenerateRequest(id="r", messages=messages))

    table, first = PrefixTable(), "é" * 300
    one = chat(first)
    assert one is not None
    table.note(one, "a")
    more = chat(first, "x" * 300)
    assert more is not None
    assert table.holders(more)[1] == ["a"]
    text = beginnings_of(GenerateRequest(id="r", prompt=first))
    assert text is not None
    assert table.holders(text) == (0, [])
    assert beginnings_of(GenerateRequest(id="r", prompt="short")) is None
    assert beginnings_of(GenerateRequest(id="r", prompt_token_ids=[5] * 63)) is None


def test_a_truncated_prompt_begins_where_it_is_cut() -> None:
    prompt = tokens(1, 300)
    cut = beginnings_of(GenerateRequest(id="r", prompt_token_ids=prompt, truncate_prompt_tokens=100))
    assert cut == beginnings(prompt[-100:], (None, None))


def test_lengths_grow_by_half_at_most() -> None:
    assert LENGTHS[0] == prefixes.FIRST_TOKENS
    assert LENGTHS[-1] == prefixes.MAX_TOKENS
    assert all(one < other <= one * 1.5 for one, other in itertools.pairwise(LENGTHS))


def test_the_table_is_bounded() -> None:
    table, first, second = PrefixTable(max_entries=6), of(tokens(1, 200)), of(tokens(2, 200))
    for number in range(2 * MAX_HOLDERS):
        table.note(first, f"w{number}")
    latest = [f"w{number}" for number in reversed(range(MAX_HOLDERS, 2 * MAX_HOLDERS))]
    assert table.holders(first) == (192, latest)
    table.note(second, "a")
    assert len(table) == 6
    assert table.holders(second) == (192, ["a"])
    assert table.holders(first)[1], "what was noted last of it"


# ---- what engines lack ----


def test_the_field_that_an_engine_lacks_is_named() -> None:
    lacks = {"min_tokens": "it counts anew", "logit_bias": "no"}
    assert refused_by(lacks, {"id", "logit_bias"}) == ("logit_bias", "no")
    assert refused_by(lacks, {"id", "seed"}) is None
    together = {"stop+routed_experts": "cut"}
    assert refused_by(together, {"stop", "routed_experts", "id"}) == ("stop", "cut")
    assert refused_by(together, {"stop", "id"}) is refused_by(together, {"routed_experts"}) is None


@pytest.mark.parametrize("demand", [{"min_version": 0}, {"max_lag": 0}, {"one_version": True}])
def test_an_engine_that_cant_witness_keeps_no_demand(demand: dict[str, Any]) -> None:
    request = GenerateRequest(id="r", prompt_token_ids=[5], seed=1)
    lacks, (field,) = lacks_of({"refused_fields": {"min_p": "no"}, "witnesses": False}), demand
    given = WorkerRequirements(request, demands=Demands(**demand, on_stale="cut", migrate=True)).given(lacks)
    assert refused_by(lacks, given) == (field, NO_WITNESS)
    assert refused_by(lacks, WorkerRequirements(request, demands=Demands(migrate=True)).given(lacks)) is None
    assert refused_by(lacks, {"min_p"}) == ("min_p", "no")
    for info in ({}, {"refused_fields": None}, {"witnesses": True}):
        assert refused_by(lacks_of(info), given) is None

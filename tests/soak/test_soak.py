"""A minute of the soak, and its checker by faults that are made up: it must find each."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.soak.chaos import DECK, NEEDED, Chaos, Step, schedule
from tests.soak.checker import Checker, Delivered, Fault, Reference, check_partial
from tests.soak.fleet import Counts
from tests.soak.load import DEMANDS, KINDS, OF_WORKERS, Clients, Floors, Told, draw
from tests.soak.report import DESCRIPTORS_GROWTH, leaks
from tests.soak.routes import ROUTES
from tests.support.paths import ROOT
from worker.testing.tiny_model import permutation

SOAK_S = 60
SOAK_BOUND_S = 600
"""The bound in seconds: starts, the end, deaths after the time, and other tests on the same cores are included."""

BASES = {f"base {seed}": permutation(f"witness {seed}", 64) for seed in range(3)}
ADAPTERS = {f"adapter {seed}": permutation(f"adapter {seed}", 64) for seed in range(2)}
COMMITTED = {
    (None, ("run", 0)): ("zero", "base 0"),
    (None, ("run", 1)): ("one", "base 1"),
    ("a", ("run", 2)): ("tone", "adapter 0"),
    (None, ("run", 3)): ("three", "base 2"),
}
PROMPT = [7, 9]


def span(sequence: int, start: int, end: int, adapter: bool = False) -> dict[str, Any]:
    label, digest = COMMITTED[None, ("run", sequence)]
    told = {"version": label, "sequence": sequence, "digest": digest, "run": "run", "start": start, "end": end}
    if not adapter:
        return told
    label, digest = COMMITTED["a", ("run", 2)]
    return {**told, "adapter": {"name": "a", "version": label, "sequence": 2, "digest": digest}}


def chain(*parts: tuple[str, int]) -> list[int]:
    """Returns the prompt and `count` tokens of each of these weights, one after another."""
    tokens = list(PROMPT)
    for digest, count in parts:
        following = (BASES | ADAPTERS)[digest]
        for _ in range(count):
            tokens.append(following[tokens[-1]])
    return tokens[len(PROMPT) :]


def checker() -> Checker:
    return Checker(Reference(BASES, ADAPTERS))


GOOD = Delivered(
    request="client0#1",
    worker="w",
    prompt=PROMPT,
    tokens=chain(("base 0", 4), ("base 1", 6)),
    spans=[span(0, 0, 4), span(1, 4, 10)],
    max_tokens=10,
    finish_reason="length",
    floor={None: 0},
    logprobs=10,
)
ADAPTED = replace(
    GOOD,
    tokens=chain(("adapter 0", 10)),
    spans=[span(1, 0, 5, adapter=True), span(3, 5, 10, adapter=True)],
    adapter="a",
    floor={None: 1, "a": 2},
)
CUT = replace(GOOD, tokens=GOOD.tokens[:7], spans=None, finish_reason=None, logprobs=None)


def all_of(*got: Delivered) -> list[Fault]:
    one = checker()
    return [*(fault for each in got for fault in one.take(each)), *one.settle(COMMITTED, final=True)]


@pytest.mark.parametrize(
    "good",
    [
        GOOD,
        ADAPTED,
        CUT,
        replace(CUT, tokens=ADAPTED.tokens[:3], adapter="a", floor={"a": 2}),
        replace(
            GOOD,
            tokens=GOOD.tokens[:5],
            spans=[span(0, 0, 4), span(1, 4, 5)],
            finish_reason="abort",
            logprobs=5,
            may_abort=True,
        ),
        replace(
            GOOD, tokens=[], spans=[], finish_reason="abort", logprobs=0, may_abort=True, max_lag=0, committed=9
        ),
        replace(GOOD, max_lag=1, committed=1),
        replace(ADAPTED, max_lag=1),
    ],
)
def test_a_right_completion_is_no_fault(good: Delivered) -> None:
    assert all_of(good) == []


WITHOUT_ONE = [*GOOD.tokens[:6], *GOOD.tokens[7:]]
TWICE = [*GOOD.tokens[:6], GOOD.tokens[5], *GOOD.tokens[6:9]]
SHORT: dict[str, Any] = {"spans": [span(0, 0, 4), span(1, 4, 9)], "logprobs": 9}


@pytest.mark.parametrize(
    ("kind", "bad"),
    [
        # tokens
        ("lost", replace(GOOD, tokens=WITHOUT_ONE, finish_reason="abort", **SHORT)),
        ("lost", replace(GOOD, tokens=GOOD.tokens[:9], **SHORT)),
        ("lost", replace(GOOD, tokens=GOOD.tokens[:9], finish_reason="abort", **SHORT)),
        ("lost", replace(GOOD, tokens=[], spans=[], finish_reason="abort", logprobs=0)),
        ("lost", replace(GOOD, logprobs=9)),
        ("duplicated", replace(GOOD, tokens=TWICE)),
        ("duplicated", replace(GOOD, max_tokens=9)),
        ("wrong", replace(GOOD, finish_reason="stop")),
        ("wrong", replace(GOOD, tokens=[*GOOD.tokens[:9], 0])),
        ("wrong", replace(CUT, tokens=WITHOUT_ONE)),
        ("wrong", replace(CUT, floor={None: 3})),
        ("wrong", replace(CUT, tokens=chain(("base 1", 3), ("base 0", 3)))),  # never goes back
        # labels
        ("mislabelled", replace(GOOD, spans=[span(0, 0, 5), span(1, 5, 10)])),
        ("mislabelled", replace(GOOD, spans=[span(0, 0, 4), span(3, 4, 10)])),
        ("mislabelled", replace(GOOD, spans=[span(0, 0, 4), span(1, 5, 10)])),
        ("mislabelled", replace(GOOD, spans=[span(0, 0, 4), {**span(1, 4, 10), "digest": "base 9"}])),
        ("mislabelled", replace(GOOD, spans=[span(0, 0, 4), {**span(1, 4, 10), "version": "won"}])),
        ("mislabelled", replace(GOOD, spans=[span(0, 0, 4), {**span(1, 4, 10), "sequence": 4}])),
        ("mislabelled", replace(GOOD, adapter="a")),
        ("mislabelled", replace(ADAPTED, adapter=None)),
        ("unlabelled", replace(GOOD, spans=[span(0, 0, 4), span(1, 4, 9)])),
        ("unlabelled", replace(GOOD, spans=None)),
        ("demand", replace(GOOD, one_version=True)),
        ("demand", replace(ADAPTED, one_version=True)),
        ("demand", replace(GOOD, max_lag=0)),
        ("demand", replace(GOOD, max_lag=1, committed=2)),
        ("demand", replace(ADAPTED, max_lag=0)),
        ("stale", replace(GOOD, floor={None: 1})),
        ("stale", replace(ADAPTED, floor={"a": 3})),
        (
            "stale",
            replace(GOOD, tokens=chain(("base 1", 5), ("base 0", 5)), spans=[span(1, 0, 5), span(0, 5, 10)]),
        ),
    ],
)
def test_each_fault_is_found_and_says_where(kind: str, bad: Delivered) -> None:
    first, *_ = all_of(GOOD, bad, GOOD)
    assert first.kind == kind, first
    assert (first.request, first.worker) == ("client0#1", "w")


def test_the_fault_names_the_span() -> None:
    (first,) = all_of(replace(GOOD, tokens=TWICE))
    assert first.span == "4–10 under one (1)"
    assert "token 6 is" in first.words
    assert str(first).startswith("duplicated: token 6 is")


def test_a_completion_that_the_history_does_not_explain_yet_waits() -> None:
    one, early = checker(), {key: value for key, value in COMMITTED.items() if key[1][1] < 1}
    assert one.take(GOOD) == one.take(CUT) == []
    assert one.settle(early) == []
    assert one.settle(COMMITTED) == []
    assert one.settle({}, final=True) == []
    assert one.take(GOOD) == one.take(CUT) == []
    assert one.settle({}) == []
    assert {fault.kind for fault in one.settle({}, final=True)} == {"mislabelled", "wrong"}


def test_an_error_has_exactly_the_tokens_that_came() -> None:
    assert check_partial(CUT, CUT.tokens) == []
    assert [fault.kind for fault in check_partial(CUT, GOOD.tokens)] == ["lost"]
    assert [fault.kind for fault in check_partial(CUT, CUT.tokens[:-1])] == ["duplicated"]


def test_growth_beyond_its_limit_is_a_fault() -> None:
    before = {"frontend-0": Counts(30, 20, 5)}
    assert leaks(before, {"frontend-0": Counts(30 + DESCRIPTORS_GROWTH, 20, 5)}) == []
    (fault,) = leaks(before, {"frontend-0": Counts(31 + DESCRIPTORS_GROWTH, 20, 5)})
    assert (fault.kind, fault.worker) == ("leak", "frontend-0")


def test_a_seed_is_one_schedule_with_everything_in_it() -> None:
    steps = schedule(1, SOAK_S, adapters=True)
    assert steps == schedule(1, SOAK_S, adapters=True) != schedule(2, SOAK_S, adapters=True)
    assert {step.kind for step in steps} == {kind for kind, _ in DECK}
    assert {step.kind for step in schedule(1, SOAK_S, adapters=False)} == {kind for kind, _ in DECK} - {
        "adapter",
        "unload",
    }
    asks = [draw("client0", number, 1, 2, ["a"]) for number in range(1200)]
    assert asks == [draw("client0", number, 1, 2, ["a"]) for number in range(1200)]
    assert {ask.demands for ask in asks} == set(range(len(DEMANDS)))
    assert {(ask.route, ask.kind) for ask in asks} == set(itertools.product(range(len(ROUTES)), KINDS))


@pytest.mark.parametrize("adapters", [True, False])
@pytest.mark.parametrize("seconds", [0.0, 1e9])
async def test_a_slow_machine_skips_no_death(adapters: bool, seconds: float) -> None:
    """It also skips no update that running choices cross. When the time is over, each of these steps is still taken
    once."""
    steps, made = [replace(step, at_s=0.0) for step in schedule(1, SOAK_S, adapters)], []

    class Noting(Chaos):
        async def take(self, step: Step) -> None:
            made.append(step.name)

    async def learn_committed() -> None:
        pass

    fleet: Any = SimpleNamespace(note=lambda text: None, learn_committed=learn_committed)
    weights: Any = None
    chaos = Noting(fleet, weights, Floors(), adapters)
    await chaos.run(steps, seconds)
    assert sorted(made) == sorted([step.name for step in steps] if seconds else NEEDED)
    assert {f"{name}: done" for name in NEEDED} <= chaos.outcomes.keys()


def test_only_a_step_that_ends_running_choices_excuses_an_abort() -> None:
    """Swapping an adapter ends no choice in any engine."""
    fleet: Any = SimpleNamespace(engines=["hf", "vllm", "sglang"])
    weights: Any = None
    excused = {}
    for kind, options in DECK:
        chaos, step = Chaos(fleet, weights, Floors(), adapters=True), Step(0.0, kind, options, 0.0)
        with chaos.noted(step):
            excused[step.name] = [name for name in (None, "a", "b") if chaos.aborts(name, time.monotonic())]
    assert {name: whose for name, whose in excused.items() if whose} == {
        "update abort": [None, "a", "b"],
        "unload b": ["b"],
    }


@pytest.mark.parametrize("code", sorted(OF_WORKERS))
@pytest.mark.parametrize("killed", [True, False])
async def test_an_error_that_a_death_explains_is_a_fault_without_a_death(code: str, killed: bool) -> None:
    clients = Clients(
        [lambda: ""],
        checker(),
        Floors(),
        {},
        lambda frontend, since: killed and frontend is None,
        lambda adapter, since: False,
        clients=0,
        seed=1,
    )
    ask = draw("client0", 0, 1, 1, [])
    clients.refused(ask, 0.0, Told({}, error={"code": code, "message": "it is said"}))
    await clients.stop()
    assert [fault.kind for fault in clients.faults] == ([] if killed else ["refused"])


@pytest.mark.parametrize("route", range(len(ROUTES)))
@pytest.mark.parametrize(
    ("on_stale", "cut", "kinds"),
    [
        ("refuse", None, ["demand"]),
        ("cut", None, ["demand"]),
        ("cut", "max_lag", []),
        ("cut", "one_version", ["demand"]),
    ],
)
async def test_the_choices_of_a_whole_reply_are_of_one_time(
    route: int, on_stale: str, cut: str | None, kinds: list[str]
) -> None:
    """One choice was generated before an update, and one after it."""
    (demands,) = (at for at, one in enumerate(DEMANDS) if one == {"max_lag": 0, "on_stale": on_stale})

    def choice(index: int, digest: str, sequence: int, cut: str | None) -> dict[str, Any]:
        tokens, more = chain((digest, 2)), {"cut": {"demand": cut}} if cut is not None else {}
        reason, spans = "length" if cut is None else "abort", [span(sequence, 0, 2)]
        told: dict[str, Any] = {"instance_id": "w", "weight_versions": spans, **more}
        if ROUTES[route].path == "/generate":
            told["output_token_logprobs"] = [[-1, token, None] for token in tokens]
            meta = {**told, "finish_reason": {"type": reason}}
            return {"output_ids": tokens, "meta_info": meta}
        logprobs = {"logprobs": {"token_logprobs": [-1] * len(tokens)}}
        return {"index": index, "token_ids": tokens, "finish_reason": reason, **logprobs, **told}

    def answer(request: httpx.Request) -> httpx.Response:
        choices = [choice(0, "base 0", 0, cut), choice(1, "base 1", 1, None)]
        return httpx.Response(200, json=choices if ROUTES[route].path == "/generate" else {"choices": choices})

    clients = Clients(
        [lambda: "http://frontend"],
        checker(),
        Floors(),
        {},
        lambda *_: False,
        lambda *_: False,
        clients=0,
        seed=1,
    )
    clients.http = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    drawn = draw("client0", 0, 1, 1, [])
    ask = replace(drawn, kind="many", n=2, route=route, demands=demands, prompt=tuple(PROMPT), max_tokens=2)
    await clients.one(ask)
    await clients.stop()
    assert [fault.kind for fault in clients.faults] == kinds


def test_a_stream_that_takes_back_what_it_said_is_wrong() -> None:
    (sglang,) = (route for route in ROUTES if route.path == "/generate")
    meta = {
        "finish_reason": None,
        "instance_id": "w",
        "weight_versions": [],
        "output_token_logprobs": [[-1, 5, None]],
    }
    event = {"index": 1, "output_ids": [5], "meta_info": meta}
    assert [choice["token_ids"] for choice in sglang.choices(event, {0: [7], 1: []})] == [[5]]
    for before in ([4], [5, 6]):
        with pytest.raises(ValueError, match="choice 1 had"):
            list(sglang.choices(event, {1: before}))


@pytest.mark.slow
@pytest.mark.timeout(SOAK_BOUND_S + 20)
def test_a_minute_of_load_and_kills_shows_no_fault() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.soak", "--seconds", str(SOAK_S)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=SOAK_BOUND_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-4000:]
    assert "no fault" in done.stdout
    for name in NEEDED:
        assert re.search(rf"\d+   {name}: ", done.stdout), done.stdout
    crossed = re.search(r"; (\d+) choices of several versions", done.stdout)
    assert crossed is not None
    assert int(crossed[1]), done.stdout

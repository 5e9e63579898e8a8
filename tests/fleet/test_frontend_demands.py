"""A request's demands on the weights of its tokens are met, or its caller learns why not."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from frontend.completions.call import Arrival, GenerationCall
from frontend.completions.reply_choice import Choice
from frontend.frontend_limits import FrontendLimits
from frontend.routing.demands import Demands
from frontend.routing.fleet_status import FleetStatus
from frontend.routing.progress import GenerationProgress
from frontend.routing.routing_lease import FrontendLease
from frontend.served_component import ServedComponent
from rl_plane.errors import BusUnreachable, DemandUnmet
from rl_plane.protocol.generation import AdapterSpan, GenerateDelta, GenerateRequest
from rl_plane.protocol.record import SERVING_LEASE_S, DecisionRecord
from rl_plane.protocol.subjects import HISTORY_PREFIX, RECORD, Subjects
from tests.support.committed_records import record, rolling, span, version
from tests.support.faulty_bus import BusFaults
from tests.support.frontend_process import (
    PROMPT,
    ask,
    error_of,
    events_of,
    frontend,
    tokens_under,
    until_running,
    update,
)
from tests.support.lease_calls import follow, running, scripted, tell
from tests.support.rollout_calls import LONG, PACE_S, delivered, progressing, rest, waiting
from tests.support.scripted_worker import Script, Stream, decide
from tests.support.staged_streams import always, staged
from tests.support.streaming_client import Streaming, http
from worker.engines.fake.adapter import make_fake_adapter

__all__ = ["delivered", "http", "progressing", "waiting"]

if TYPE_CHECKING:
    from tests.conftest import Plane


# ---- demands ----


def kept(go: asyncio.Event) -> Script:
    """The first request's tokens are made by 1 before `go`, and come after it; what comes later is made by 2."""
    first = [True]

    async def script(stream: Stream) -> None:
        if first.pop() if first else False:
            await go.wait()
            await stream.send([1], span(1, 0, 1), end=True)
        else:
            await stream.send([2], span(2, 0, 1), end=True)

    return script


@pytest.mark.parametrize("on_stale", ["wait", "refuse", "cut"])
async def test_tokens_that_became_too_old_before_they_arrived_are_generated_again(
    plane: Plane, on_stale: str
) -> None:
    go = asyncio.Event()
    async with staged(plane) as stage:
        worker = await stage.worker(kept(go), record(1))
        await stage.decide(record(1))
        asking = asyncio.create_task(stage.ask(max_lag=0, on_stale=on_stale))
        await plane.until(lambda: worker.requests)
        await stage.decide(record(2))
        await worker.hold(record(2))
        go.set()
        reply = await asking
        if on_stale == "refuse":
            assert reply.json()["error"]["code"] == "demand_unmet"
            assert "partial" not in reply.json()["error"]
        else:
            (choice,) = reply.json()["choices"]
            assert (choice["token_ids"], choice["weight_versions"][0]["sequence"]) == ([2], 2)


@pytest.mark.parametrize("demand", [{"min_version": 2}, {"min_version": "step_2"}, {"max_lag": 0}])
async def test_during_a_rolling_update_requests_that_demand_the_new_version_go_to_workers_that_hold_it(
    plane: Plane, demand: dict[str, Any]
) -> None:
    async with staged(plane) as stage:
        old = await stage.worker(always(1, base=1), record(1))
        await stage.worker(always(2, base=2), record(2))
        await stage.decide(rolling(record(2), record(1)))
        for _ in range(4):
            reply = await stage.ask(**demand)
            assert reply.json()["choices"][0]["token_ids"] == [2]
        assert not old.requests
        pinned = {**demand, "on_stale": "refuse", "nvext": {"instance_id": old.instance_id}}
        assert (await stage.ask(**pinned)).json()["error"]["code"] == "demand_unmet"


@pytest.mark.parametrize("demand", [{"min_version": 2}, {"min_version": "step_2"}, {"max_lag": 0}])
async def test_the_frontend_meets_a_demand_if_it_knows_a_worker_before_the_record(
    plane: Plane, demand: dict[str, Any]
) -> None:
    """The frontend reads the record, because the messages that announce it are lost. It confirms its lease too rarely
    to learn the record in that way."""
    faults = BusFaults()
    feed = Subjects(plane.namespace, plane.component).state.feed(RECORD)
    faults.loses = lambda message: message.subject == feed
    rarely = FrontendLimits(confirm_interval_s=SERVING_LEASE_S - 0.5)
    async with staged(plane, limits=rarely, connect_bus=faults.connect) as stage:
        await decide(stage.client.bus, stage.client.subjects(), rolling(record(2), record(1)))
        old = await stage.worker(always(1, base=1), record(1))
        error = error_of(await stage.ask(**demand, on_stale="refuse"), 503)
        assert (error["code"], error["field"]) == ("demand_unmet", next(iter(demand)))
        await stage.worker(always(2, base=2), record(2))
        assert (await stage.ask(**demand)).json()["choices"][0]["token_ids"] == [2]
        assert not old.requests


async def ask_in_process(one: ServedComponent, demands: Demands) -> list[int]:
    request = GenerateRequest(id="r", prompt="hi")
    events = one.engines.generate(request, demands=demands)
    return [token async for event in events if isinstance(event, GenerateDelta) for token in event.token_ids]


async def test_a_demand_waits_for_the_record(plane: Plane, waiting: set[asyncio.Task[Any] | None]) -> None:
    """No worker takes the request before that, whichever worker is open."""
    client = await plane.client()
    async with running(plane) as one, scripted(plane, record(1), 1) as worker:
        await plane.until(lambda: one.status.admitted())
        asking = asyncio.create_task(ask_in_process(one, Demands(min_version=1)))
        await plane.until(lambda: waiting)
        assert not worker.requests
        await tell(client, one.lease.frontend_id, follow(record(1), 1))
        assert await asking == [1]


async def test_a_request_that_waited_for_the_lease_uses_the_record_that_arrived_meanwhile(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait, waits, decided = FrontendLease.wait, asyncio.Event(), asyncio.Event()

    async def late(lease: FrontendLease, give_up: float) -> None:
        waits.set()
        await decided.wait()
        await wait(lease, give_up)

    monkeypatch.setattr(FrontendLease, "wait", late)
    client = await plane.client()
    async with running(plane) as one, scripted(plane, record(1), 1) as worker:
        await plane.until(lambda: one.status.admitted())
        asking = asyncio.create_task(ask_in_process(one, Demands(min_version=2, on_stale="refuse")))
        async with asyncio.timeout(10):
            await waits.wait()
        await tell(client, one.lease.frontend_id, follow(record(1), 1))
        decided.set()
        with pytest.raises(DemandUnmet) as caught:
            await asking
        assert caught.value.facts["field"] == "min_version"
        assert not worker.requests


def in_next_run(decided: DecisionRecord) -> DecisionRecord:
    return replace(decided, run_number=1)


@pytest.mark.parametrize(
    ("asked", "then"), [(1, in_next_run(record(1, "next"))), ("step_1", in_next_run(record(2, "next")))]
)
async def test_tokens_of_an_earlier_run_are_never_new_enough(
    plane: Plane, asked: int | str, then: DecisionRecord
) -> None:
    go = asyncio.Event()

    async def script(stream: Stream) -> None:
        await stream.send([1], span(1, 0, 1))
        await go.wait()
        await stream.send([2], span(1, 0, 2), end=True)

    async with staged(plane) as stage:
        await stage.worker(script, record(1))
        await stage.decide(record(1))
        async with Streaming(stage.http, min_version=asked, on_stale="cut") as stream:
            await stream.until(lambda stream: stream.tokens == [1])
            await stage.decide(then)
            go.set()
            await stream.end()
    assert (stream.error, stream.tokens, stream.last["finish_reason"]) == (None, [1], "abort")
    assert stream.last["cut"]["demand"] == "min_version"


@pytest.mark.parametrize("fails", [False, True])
async def test_a_choice_with_tokens_keeps_the_first_version_of_a_label_that_is_used_twice(
    plane: Plane, fails: bool
) -> None:
    """This also holds where another worker continues the choice. A later request means the later version of the
    label."""
    go, again = asyncio.Event(), replace(version(2), label="step_1")
    then = rolling(replace(record(2), version=again, made=again), record(1))

    async def script(stream: Stream) -> None:
        await stream.send([1], span(1, 0, 1))
        await go.wait()
        if fails:
            await stream.send([0], logprob=math.nan)
        else:
            await stream.send([2, 3], span(1, 0, 3), end=True)

    async with staged(plane) as stage:
        await stage.worker(script, record(1))
        await stage.decide(record(1))
        body = {"min_version": "step_1", "max_tokens": 3, "migrate": True, "on_stale": "cut"}
        async with Streaming(stage.http, **body) as stream:
            await stream.until(lambda stream: stream.tokens == [1])
            await stage.decide(then)
            later = await stage.ask(min_version="step_1", on_stale="refuse")
            assert "min_version is sequence 2" in error_of(later, 503)["message"]
            if fails:
                await stage.worker(rest(1), record(1))
            go.set()
            await stream.end()
    assert (stream.error, stream.last["finish_reason"], "cut" in stream.last) == (None, "length", False)
    assert [(made["sequence"], made["end"]) for made in stream.spans] == [(1, 3)]


async def test_a_choice_leaves_a_worker_that_missed_an_update(plane: Plane) -> None:
    told = asyncio.Event()

    async def behind(stream: Stream) -> None:
        await stream.send([1], span(1, 0, 1))
        told.set()
        while True:
            await stream.send([1])
            await asyncio.sleep(PACE_S)

    async with staged(plane, limits=FrontendLimits(stale_after_s=0.2)) as stage:
        await stage.worker(behind, record(1))
        await stage.decide(record(1))
        asking = asyncio.create_task(
            stage.ask(prompt=None, prompt_token_ids=PROMPT, migrate=True, max_tokens=LONG)
        )
        async with asyncio.timeout(10):
            await told.wait()
        other = await stage.worker(always(2, base=2), record(2))
        await stage.decide(record(2))
        (choice,) = (await asking).json()["choices"]
        made = choice["token_ids"]
        assert made == [1] * (len(made) - 1) + [2]
        assert other.requests[0]["request"]["prompt_token_ids"] == PROMPT + made[:-1]
        assert [span["sequence"] for span in choice["weight_versions"]] == [1, 2]
        assert [maker["end"] for maker in choice["instances"]] == [len(made) - 1, len(made)]


@pytest.mark.parametrize("migrate", [True, False])
@pytest.mark.parametrize("alone", [True, False])
async def test_a_choice_without_a_token_leaves_a_worker_that_missed_an_update(
    plane: Plane, migrate: bool, alone: bool
) -> None:
    """No token was delivered. Without another worker, the caller gets the reason."""
    go = asyncio.Event()

    async def behind(stream: Stream) -> None:
        await go.wait()
        await stream.send([1], span(1, 0, 1))

    async with staged(plane, 0.5 if alone else 5.0, FrontendLimits(stale_after_s=0.0)) as stage:
        worker = await stage.worker(behind, record(1))
        await stage.decide(record(1))
        asking = asyncio.create_task(stage.ask(prompt=None, prompt_token_ids=PROMPT, migrate=migrate))
        await plane.until(lambda: worker.requests)
        if not alone:
            await stage.worker(always(2, base=2), record(2))
        await stage.decide(record(2))

        async def knows() -> bool:
            reply = await stage.ask(min_version=2, on_stale="refuse")
            return reply.is_success or reply.json()["error"]["code"] == "not_admitted"

        await plane.until(knows)
        go.set()
        reply = await asking
        if alone:
            error = error_of(reply, 503)
            assert (error["code"], "partial" in error) == ("stale_weights", False)
        else:
            (choice,) = reply.json()["choices"]
            assert (choice["token_ids"], choice["weight_versions"][0]["sequence"]) == ([2], 2)


async def test_a_request_waits_for_the_version_that_it_demands(plane: Plane, http: httpx.AsyncClient) -> None:
    plane.spawn_many(2)
    await update(plane, 1)
    for met in ("step_1", 1, 0, "initial"):
        assert (await ask(http, min_version=met))["choices"]
    waiting = [
        asyncio.create_task(ask(http, max_tokens=1, **body))
        for body in ({"min_version": "step_2"}, {"nvext": {"min_version": 2, "on_stale": "cut"}})
    ]
    for asked in ("step_2", 2):
        body = {"prompt": "hi", "min_version": asked, "on_stale": "refuse"}
        error = error_of(await http.post("/v1/completions", json=body), 503)
        assert (error["code"], error["field"]) == ("demand_unmet", "min_version")
    assert not any(task.done() for task in waiting)
    version = await update(plane, 2)
    for reply in await asyncio.gather(*waiting):
        assert reply["nvext"]["weight_version"] == version


async def test_a_demand_waits_within_its_bound(plane: Plane, http: httpx.AsyncClient) -> None:
    plane.spawn()
    await ask(http)
    async with frontend(plane, admission_wait_s=0.1, limits=FrontendLimits(stale_wait_s=0.2)) as hasty:
        error = error_of(await hasty.post("/v1/completions", json={"prompt": "hi", "min_version": 9}), 503)
    assert error["code"] == "demand_unmet"
    assert "sequence 0 is served" in error["message"]


async def test_a_frontend_that_began_later_knows_the_labels_before_it(plane: Plane) -> None:
    plane.spawn()
    for seed in (1, 2, 3):
        await update(plane, seed)
    async with frontend(plane) as http:
        refusing = {"prompt": "hi", "on_stale": "refuse"}
        assert (await http.post("/v1/completions", json={**refusing, "min_version": "step_1"})).status_code == 200
        unknown = await http.post("/v1/completions", json={**refusing, "min_version": "step_4"})
        assert "no version 'step_4'" in error_of(unknown, 503)["message"]


async def test_a_history_that_could_not_be_read_is_read_again_while_a_request_waits(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing changes in the fleet. A request that does not wait gets an answer from what the frontend knows."""
    plane.spawn()
    for seed in (1, 2):
        await update(plane, seed)
    failed, go, faults = asyncio.Event(), asyncio.Event(), BusFaults()

    async def reading(key: str) -> None:
        if key.startswith(HISTORY_PREFIX) and not go.is_set():
            failed.set()
            raise BusUnreachable("the store does not answer")

    faults.before_get = reading
    async with frontend(plane, faults.connect) as http:
        await ask(http)
        monkeypatch.setattr(FleetStatus, "wake", lambda status: None)
        asking = asyncio.create_task(ask(http, min_version="step_1"))
        async with asyncio.timeout(10):
            await failed.wait()
        refusing = {"prompt": "hi", "min_version": "step_1", "on_stale": "refuse"}
        error = error_of(await http.post("/v1/completions", json=refusing), 503)
        assert (error["code"], error["field"]) == ("demand_unmet", "min_version")
        assert "could not be read" in error["message"]
        assert "none of the last" not in error["message"]
        go.set()
        assert (await asking)["choices"]


async def test_a_label_means_the_base_or_the_requests_own_adapter(plane: Plane) -> None:
    """This also holds where a frontend knows the label from the history."""
    plane.spawn()
    await update(plane, 1)
    fleet = await plane.fleet()
    for number, (name, label) in enumerate([("a", "step_1"), ("b", "step_1"), ("a", "step_2"), ("b", "step_3")]):
        path = make_fake_adapter(plane.tmp / "weights" / f"adapter{number}", number, plane.model())
        body = {"transport": {"backend": "filesystem", "path": str(path)}, "version": label}
        target = {"kind": "lora", "op": "load" if number < 2 else "swap", "name": name}
        await fleet.run("update_weights", {**body, "target": target})
    await fleet.run("unload_lora_adapter", {"lora_name": "b"})
    async with frontend(plane) as http:

        async def status(label: str, model: str | None = None) -> int:
            body = {"prompt": "hi", "model": model, "min_version": label, "on_stale": "refuse"}
            return (await http.post("/v1/completions", json=body)).status_code

        # Only the history knows it: from here on its other labels are there, too.
        assert [await status("step_3"), await status("step_3", "a")] == [503, 503]
        assert [await status("step_2"), await status("step_2", "a")] == [503, 200]
        assert [await status("step_1"), await status("step_1", "a")] == [200, 200]


async def test_adapters_of_one_label_are_not_taken_for_each_other(plane: Plane) -> None:
    both = record(1, a=11, b=12)
    adapters = {
        name: replace(one, version=replace(one.version, label="step_5")) for name, one in both.adapters.items()
    }
    both = replace(both, adapters=adapters, made=adapters["b"].version)

    async def script(stream: Stream) -> None:
        made = span(1, 0, 1)
        if name := stream.body["request"].get("adapter"):
            of = both.adapters[name].version
            made = made.model_copy(
                update={
                    "adapter": AdapterSpan(name=name, version=of.label, sequence=of.sequence, digest=of.digest)
                }
            )
        await stream.send([7], made, end=True)

    async with staged(plane) as stage:
        await stage.worker(script, both)
        await stage.decide(both)
        for model in ("a", "b"):
            reply = await stage.ask(model=model, min_version="step_5", on_stale="refuse")
            assert reply.status_code == 200, reply.text
        refused = await stage.ask(min_version="step_5", on_stale="refuse")
        message = refused.json()["error"]["message"]
        assert "no version 'step_5' of the base" in message
        assert "none of the last 256 updates" in message  # a frontend that began later knows no older ones


@pytest.mark.parametrize("demand", [{"one_version": True}, {"max_lag": 0}])
async def test_a_choice_that_breaks_its_demand_is_cut_or_ends_with_an_error(
    plane: Plane, http: httpx.AsyncClient, demand: dict[str, Any]
) -> None:
    worker = plane.spawn(token_delay_s=PACE_S)
    digest = (await ask(http))["nvext"]["weight_version"]["digest"]
    client = await plane.client()
    cut = {"prompt_token_ids": PROMPT, "max_tokens": LONG, "return_token_ids": True, "on_stale": "cut", **demand}
    whole = asyncio.create_task(http.post("/v1/completions", json=cut))
    refused = asyncio.create_task(http.post("/v1/completions", json={**cut, "on_stale": None}))
    native = {"token_ids": PROMPT, "sampling_params": {"max_tokens": LONG}, "on_stale": "cut", **demand}
    vllm = asyncio.create_task(http.post("/inference/v1/generate", json=native))
    async with Streaming(http, **cut) as stream:
        await until_running(plane, client, worker.instance_id, 4)
        await stream.until(lambda stream: len(stream.tokens) >= 3)
        await update(plane, 1)
        await stream.end()
    assert stream.error is None
    choices = [stream.last, (await whole).json()["choices"][0], (await vllm).json()["choices"][0]]
    for choice in choices:
        assert choice["finish_reason"] == "abort"
        assert choice["cut"]["demand"] == next(iter(demand))
        (span,) = choice["weight_versions"]
        made = stream.tokens if choice is stream.last else choice["token_ids"]
        assert (span["digest"], span["end"]) == (digest, len(made))
        assert made == tokens_under(digest, 0, len(made))
    error = error_of(await refused, 503)
    assert (error["code"], error["field"]) == ("demand_unmet", next(iter(demand)))
    partial = error["partial"]["token_ids"]
    assert partial == tokens_under(digest, 0, len(partial))
    assert partial
    await until_running(plane, client, worker.instance_id, 0)


NO_LONGER_KEPT = [
    ({"max_lag": 0}, record(2)),
    ({"min_version": 1}, in_next_run(record(2, "next"))),
    ({"min_version": "step_1"}, in_next_run(record(2, "next"))),
]
"""Demands that tokens of the first version meet, and the record that is decided while the tokens wait for a slow
reader."""


@pytest.mark.parametrize(("demand", "then"), NO_LONGER_KEPT)
@pytest.mark.parametrize("on_stale", ["wait", "refuse", "cut"])
async def test_a_choice_that_waited_for_the_other_choices_must_still_meet_its_demand(
    plane: Plane, delivered: list[Choice], on_stale: str, demand: dict[str, Any], then: DecisionRecord
) -> None:
    """One choice ends under the first version. The other waits and is generated by the second. Both are delivered
    together."""
    go = asyncio.Event()

    async def script(stream: Stream) -> None:
        if stream.body["id"].endswith("-0"):
            await stream.send([1], span(1, 0, 1), end=True)
        else:
            await go.wait()
            await stream.send([2], span(2, 0, 1, then.version.run), end=True)

    async with staged(plane) as stage:
        worker = await stage.worker(script, record(1))
        await stage.decide(record(1))
        asking = asyncio.create_task(stage.ask(n=2, on_stale=on_stale, **demand))
        await plane.until(lambda: any(choice.finish_reason is not None for choice in delivered))
        await plane.until(lambda: len(worker.requests) == 2)
        await stage.decide(then)
        await worker.hold(then)
        go.set()
        reply = (await asking).json()
    if on_stale == "cut":
        first, second = reply["choices"]
        assert (first["finish_reason"], first["cut"]["demand"]) == ("abort", next(iter(demand)))
        assert (second["finish_reason"], "cut" in second) == ("length", False)
    else:
        assert (reply["error"]["code"], reply["error"]["index"]) == ("demand_unmet", 0)
        first, second = reply["error"]["partials"]
    assert [one["weight_versions"][0]["sequence"] for one in (first, second)] == [1, 2]
    assert [one["token_ids"] for one in (first, second)] == [[1], [2]]


@pytest.mark.parametrize(("demand", "then"), NO_LONGER_KEPT)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_choice_that_is_cut_before_its_reader_had_its_tokens_has_its_prompt(
    plane: Plane,
    monkeypatch: pytest.MonkeyPatch,
    progressing: list[GenerationProgress],
    stream: bool,
    demand: dict[str, Any],
    then: DecisionRecord,
) -> None:
    """A slow reader: when it takes the first tokens, they are too old, and what follows was cut already."""
    calls: list[GenerationCall] = []
    decided, go = asyncio.Event(), asyncio.Event()
    run = GenerationCall._events

    async def slowly(call: GenerationCall) -> AsyncGenerator[tuple[int, Arrival], None]:
        calls.append(call)
        async with aclosing(run(call)) as events:
            async for event in events:
                yield event
                await go.wait()

    async def script(stream: Stream) -> None:
        await stream.send([1], span(1, 0, 1))
        await decided.wait()
        await stream.send([2])

    monkeypatch.setattr(GenerationCall, "_events", slowly)
    async with staged(plane) as stage:
        worker = await stage.worker(script, record(1))
        await stage.decide(record(1))
        body = {"prompt": None, "prompt_token_ids": PROMPT, "n": 2, "on_stale": "cut", **demand}
        asking = asyncio.create_task(stage.ask(**body, stream=stream, logprobs=1))
        await plane.until(lambda: [progress.token_ids for progress in progressing] == [[1], [1]])
        (call,) = calls
        generation = call._service
        await stage.decide(then)
        await plane.until(lambda: generation.committed.sequence == 2)
        decided.set()
        async with asyncio.timeout(10):
            for _ in progressing:
                await worker.aborted.get()  # it was cut where its tokens come in
        go.set()
        reply = await asking
        choices = (
            [chunk["choices"][0] for chunk in events_of(reply.text)[:-1]] if stream else reply.json()["choices"]
        )
        assert len(choices) == 2
        for choice in choices:
            assert (choice["finish_reason"], choice["cut"]["demand"]) == ("abort", next(iter(demand)))
            assert (choice["token_ids"], choice["weight_versions"]) == ([], [])
            assert choice["prompt_token_ids"] == PROMPT
        assert generation.engines.moves["cut"] == len(choices)


async def test_a_choice_that_still_meets_its_demand_continues_across_an_update(
    plane: Plane, http: httpx.AsyncClient
) -> None:
    plane.spawn(token_delay_s=PACE_S)
    async with Streaming(http, max_tokens=200, max_lag=1, min_version=0) as stream:
        await stream.until(lambda stream: len(stream.tokens) >= 3)
        await update(plane, 1)
        await stream.end()
    assert (len(stream.tokens), stream.last["finish_reason"], "cut" in stream.last) == (200, "length", False)
    assert [span["sequence"] for span in stream.spans] == [0, 1]

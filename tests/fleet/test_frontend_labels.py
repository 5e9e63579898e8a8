"""A frontend delivers no tokens of workers that lie or miss an update; workers between two states; adapters by
`model`."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from frontend.frontend_limits import FrontendLimits
from rl_plane.membership.view import MembershipView
from rl_plane.protocol.record import SERVING_LEASE_S, DecisionRecord
from rl_plane.protocol.subjects import RECORD, Subjects
from tests.support.committed_records import record, rolling, span
from tests.support.faulty_bus import BusFaults
from tests.support.rollout_calls import waiting
from tests.support.scripted_worker import Stream, decide
from tests.support.staged_streams import BOUND_S, Stage, always, staged

if TYPE_CHECKING:
    from tests.conftest import Plane

__all__ = ["waiting"]


def event_of(line: str) -> Any:
    return json.loads(line.removeprefix("data: "))


async def test_a_frontend_knows_a_decision_at_once_without_the_record_feed(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record feed and the periodic reads of the record are switched off."""

    async def silent(*args: Any) -> None:
        pass

    async def script(stream: Stream) -> None:
        await stream.send([7], span(stream.body["sequence"], 0, 1), end=True)

    for name in ("_record_feed", "read_record", "keep_record"):
        monkeypatch.setattr(MembershipView, name, silent)
    async with staged(plane) as stage:
        worker = await stage.worker(script, record(1))
        for sequence in (1, 2):
            await stage.decide(record(sequence))
            await worker.hold(record(sequence))
            reply = await stage.ask(min_version=sequence, on_stale="refuse")
            assert reply.status_code == 200, reply.text
        assert [body["sequence"] for body in worker.requests] == [1, 2]


# ---- labels as they come ----


async def test_tokens_without_a_label_never_leave(plane: Plane) -> None:
    async def script(stream: Stream) -> None:
        await stream.send([1])
        await asyncio.Event().wait()

    async with staged(plane) as stage:
        worker = await stage.worker(script, record(1))
        await stage.decide(record(1))
        for more in ({}, {"stream": True}):
            reply = await stage.ask(**more)
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "unlabelled")
            assert "partial" not in reply.json()["error"]
            async with asyncio.timeout(BOUND_S):
                await worker.aborted.get()


async def test_a_stream_ends_at_the_first_token_of_other_weights(plane: Plane) -> None:
    async def script(stream: Stream) -> None:
        await stream.send([1], span(1, 0, 1))
        await stream.send([2])
        await stream.send([3], span(1, 0, 2), span(9, 2, 3))
        await stream.send([4])

    async with staged(plane) as stage:
        await stage.worker(script, record(1))
        await stage.decide(record(1))
        async with stage.http.stream(
            "POST", "/v1/completions", json={"prompt": "hi", "stream": True, "return_token_ids": True}
        ) as reply:
            events = [event_of(line) async for line in reply.aiter_lines() if line]
        *chunks, last = events
        assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == [1, 2]
        assert last["error"]["code"] == "unlabelled"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("value", [math.nan, -math.inf])
async def test_logprobs_that_are_no_numbers_are_the_engines_error(
    plane: Plane, stream: bool, value: float
) -> None:
    """The new weights diverged. The tokens before them are delivered."""

    async def script(stream: Stream) -> None:
        await stream.send([1], span(1, 0, 1))
        await stream.send([2])
        await stream.send([3], logprob=value)
        await stream.send([4], end=True)

    async with staged(plane) as stage:
        await stage.worker(script, record(1))
        await stage.decide(record(1))
        reply = await stage.ask(stream=stream)
        assert reply.status_code == (200 if stream else 500)
        error = (event_of(reply.text.split("\n\n")[-2]) if stream else reply.json())["error"]
        assert (error["code"], error["message"]) == (
            "engine_failed",
            "the worker sent logprobs that are not finite numbers",
        )
        assert (error["partial"]["token_ids"], error["partial"]["logprobs"]) == ([1, 2], [-1.0, -1.0])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_choice_without_a_label_takes_no_others_tokens_with_it(plane: Plane, stream: bool) -> None:
    """The error carries the other choices with their labels, and names the choice without one."""
    others = asyncio.Semaphore(0)

    async def script(stream: Stream) -> None:
        index = int(stream.body["id"].rpartition("-")[2])
        await stream.send([10 + index], span(1, 0, 1), end=index == 2)
        if index == 1:
            for _ in range(2):
                await others.acquire()
            await stream.send([99], span(1, 0, 1), span(9, 1, 2))
        others.release()

    async with staged(plane) as stage:
        await stage.worker(script, record(1))
        await stage.decide(record(1))
        body = {"prompt_token_ids": [5, 6], "n": 3, "stream": stream, "return_token_ids": True}
        reply = await stage.http.post("/v1/completions", json=body)
        assert reply.status_code == (200 if stream else 503)
        told = event_of(reply.text.split("\n\n")[-2]) if stream else reply.json()
        error = told["error"]
        assert (error["code"], error["index"]) == ("unlabelled", 1)
        first, bad, last = error["partials"]
        assert error["partial"] == first
        for index, partial, reason in ((0, first, None), (2, last, "length")):
            assert (partial["index"], partial["finish_reason"]) == (index, reason)
            assert (partial["prompt_token_ids"], partial["token_ids"]) == ([5, 6], [10 + index])
            assert [(made["start"], made["end"]) for made in partial["weight_versions"]] == [(0, 1)]
            assert "unlabelled" not in partial
        assert (bad["index"], bad["unlabelled"]) == (1, True)
        assert (bad["token_ids"], bad["weight_versions"], bad["prompt_token_ids"]) == ([], [], None)


async def test_a_frontend_reads_the_record_if_a_label_is_new_to_it(plane: Plane) -> None:
    """The worker may have learnt the decision first. The frontend confirms its lease too rarely to learn the decision
    by it."""
    go, faults = asyncio.Event(), BusFaults()
    feed = Subjects(plane.namespace, plane.component).state.feed(RECORD)
    faults.loses = lambda message: message.subject == feed
    rarely = FrontendLimits(confirm_interval_s=SERVING_LEASE_S - 0.5)

    async def script(stream: Stream) -> None:
        await stream.send([1], span(1, 0, 1))
        await go.wait()
        await stream.send([2], span(1, 0, 1), span(2, 1, 2), end=True)

    async with staged(plane, limits=rarely, connect_bus=faults.connect) as stage:
        worker = await stage.worker(script, record(1))
        await stage.decide(record(1))
        asking = asyncio.create_task(stage.ask())
        await plane.until(lambda: worker.requests)
        await decide(stage.client.bus, stage.client.subjects(), record(2))
        await plane.until(lambda: _stored(stage, 2))
        go.set()
        (choice,) = (await asking).json()["choices"]
        assert [made["sequence"] for made in choice["weight_versions"]] == [1, 2]


async def _stored(stage: Stage, sequence: int) -> bool:
    entry = await stage.client.bus.get(stage.client.subjects().state, "record")
    return entry is not None and DecisionRecord.decode(entry.value or b"").sequence == sequence


async def test_a_worker_that_missed_an_update_is_cut_off(plane: Plane) -> None:
    go: asyncio.Queue[int] = asyncio.Queue()

    async def script(stream: Stream) -> None:
        await stream.send([1], span(1, 0, 1))
        while True:
            await stream.send([await go.get()])

    async with staged(plane, limits=FrontendLimits(stale_after_s=0.2)) as stage:
        worker = await stage.worker(script, record(1))
        await stage.decide(record(1))
        body = {"prompt": "hi", "stream": True, "return_token_ids": True, "max_tokens": 99}
        async with stage.http.stream("POST", "/v1/completions", json=body) as reply:
            lines = (line async for line in reply.aiter_lines() if line)
            assert event_of(await anext(lines))["choices"][0]["token_ids"] == [1]
            await decide(stage.client.bus, stage.client.subjects(), replace(record(2), open=False))
            go.put_nowait(2)  # decided, and not yet served anywhere
            assert event_of(await anext(lines))["choices"][0]["token_ids"] == [2]
            begun = asyncio.get_running_loop().time()  # before: the frontend may learn it before the store answers
            await decide(stage.client.bus, stage.client.subjects(), record(2))

            async def more() -> None:
                while True:
                    go.put_nowait(3)
                    await asyncio.sleep(0.02)

            feeding = asyncio.create_task(more())
            async with asyncio.timeout(BOUND_S):
                while "error" not in (event := event_of(await anext(lines))):
                    assert event["choices"][0]["token_ids"] == [3]
            assert asyncio.get_running_loop().time() - begun >= 0.2
            feeding.cancel()
            error = event["error"]
            assert (error["code"], error["sequence"]) == ("stale_weights", 1)
            partial = error["partial"]
            assert partial["token_ids"][:3] == [1, 2, 3]
            (made,) = partial["weight_versions"]
            assert (made["sequence"], made["end"]) == (1, len(partial["token_ids"]))
            assert [line async for line in lines] == []
            async with asyncio.timeout(BOUND_S):
                await worker.aborted.get()


# ---- adapters ----


async def test_an_adapter_is_chosen_by_model(plane: Plane) -> None:
    async with staged(plane, wait_s=1.0) as stage:
        state = record(1, a=2, b=3)

        async def script(stream: Stream) -> None:
            named = stream.body["request"].get("adapter")
            adapter = {named: state.adapters[named].version.sequence} if named else {}
            await stream.send([7], span(1, 0, 1, **adapter), end=True)

        worker = await stage.worker(script, state)
        await stage.decide(state)
        await stage.ask()  # it knows the worker
        models = (await stage.http.get("/v1/models")).json()["data"]
        assert [(model["id"], model["parent"]) for model in models] == [
            ("base", None),
            ("a", "base"),
            ("b", "base"),
        ]
        for name, sequence in (("a", 2), ("b", 3)):
            reply = (await stage.ask(model=name)).json()
            assert reply["model"] == name
            assert worker.requests[-1]["request"]["adapter"] == name
            assert worker.requests[-1]["sequence"] == 3
            (made,) = reply["choices"][0]["weight_versions"]
            assert (made["sequence"], made["adapter"]["name"], made["adapter"]["sequence"]) == (1, name, sequence)
            assert reply["nvext"]["adapter"] == made["adapter"]
        for base in (None, "base"):
            reply = (await stage.ask(model=base)).json()
            assert "adapter" not in worker.requests[-1]["request"]
            assert "adapter" not in reply["choices"][0]["weight_versions"][0]
        chat = {"messages": [{"role": "user", "content": "hi"}], "model": "a"}
        told = (await stage.http.post("/v1/chat/completions", json=chat)).json()
        assert told["choices"][0]["weight_versions"][0]["adapter"]["name"] == "a"
        refused = await stage.ask(model="c")
        assert refused.status_code == 404
        assert refused.json()["error"]["models"] == ["base", "a", "b"]


async def test_tokens_without_the_adapter_are_not_delivered_for_it(plane: Plane) -> None:
    async with staged(plane) as stage:
        await stage.worker(always(7, base=1), record(1, a=2))
        await stage.decide(record(1, a=2))
        assert (await stage.ask(model="a")).json()["error"]["code"] == "unlabelled"
        assert (await stage.ask()).status_code == 200


async def test_during_the_roll_out_of_an_adapter_only_workers_with_it_serve_it(plane: Plane) -> None:
    async with staged(plane, wait_s=0.5) as stage:
        before, after = record(1), record(1, a=2)
        without = await stage.worker(always(7, base=1), before)
        having = await stage.worker(always(8, base=1, a=2), after)
        await stage.decide(rolling(after, before))
        for _ in range(4):
            assert (await stage.ask(model="a")).json()["choices"][0]["token_ids"] == [8]
        assert not without.requests
        assert all(body["sequence"] is None for body in having.requests)
        refused = await stage.ask(model="a", nvext={"instance_id": without.instance_id})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_admitted")
        assert "not loaded a yet" in refused.json()["error"]["message"]


async def test_a_request_that_waits_for_an_adapter_ends_when_it_is_unloaded(
    plane: Plane, waiting: set[asyncio.Task[Any] | None]
) -> None:
    async with staged(plane, wait_s=BOUND_S) as stage:
        await stage.worker(always(7, base=1), record(1))
        await stage.decide(rolling(record(1, a=2), record(1)))
        asking = asyncio.create_task(stage.ask(model="a"))
        await plane.until(lambda: waiting)
        await stage.decide(replace(record(1), made=record(3).made))
        await stage.workers[0].tell()
        reply = await asking
        assert (reply.status_code, reply.json()["error"]["field"]) == (404, "model")


async def test_a_worker_that_refuses_an_outdated_frontend_is_asked_again(plane: Plane) -> None:
    """The decision was missed: what it refuses teaches us."""
    async with staged(plane) as stage:
        worker = await stage.worker(always(7, base=1), record(1))
        await stage.decide(record(1))
        assert (await stage.ask()).status_code == 200
        await worker.hold(record(1, a=2))
        asking = asyncio.create_task(stage.ask())
        await plane.until(lambda: len(worker.requests) > 1)
        await stage.decide(record(1, a=2))
        reply = await asking
        assert reply.status_code == 200
        assert [body["sequence"] for body in worker.requests][-1] == 2

"""A reader over HTTP that stands still, for longer than every buffer between it and the engine has room."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from frontend.completions.reply_choice import Choice
from frontend.frontend_limits import FrontendLimits
from frontend.routing.committed import History
from frontend.routing.fleet_status import FleetStatus, WorkerStatus
from frontend.routing.progress import GenerationProgress
from frontend.server import listeners
from rl_plane.bus.token_stream import IncomingStream, StreamSender
from rl_plane.protocol.record import DecisionRecord
from tests.support.committed_records import record, span
from tests.support.frontend_process import (
    PROMPT,
    ask,
    frontend,
    next_event,
    state_of,
    tokens_under,
    until_running,
    update,
)
from tests.support.rollout_calls import delivered, progressing
from tests.support.scripted_worker import Stream
from tests.support.staged_streams import staged
from worker.engines.fake.adapter import fake_token
from worker.generation_service import MAX_TOKENS

if TYPE_CHECKING:
    from tests.conftest import Plane

__all__ = ["delivered", "progressing"]

TOKENS = 4000
TOPS = 20
"""The likeliest tokens beside each token: about 750 bytes of JSON, so all tokens are ten times what all buffers
take."""
FEW, OF_A_MESSAGE = 16, 32
SHORT = f"""
import rl_plane.bus.token_stream as streams
import worker.generation_service as generation
streams.WINDOW = {FEW}
generation.MAX_TOP_ROWS = {TOPS * OF_A_MESSAGE}
"""
"""A worker that sends few messages of few tokens. On a slow machine each message would carry many, and be the whole
reply."""
SOCKET_BYTES = 1 << 15
"""The buffer of each end. Linux would buffer more than the whole reply."""
MANY = 40_000
NARROW = """
import rl_plane.bus.token_stream as streams
import worker.generation_service as generation
streams.WINDOW = 16
generation.StreamSender = lambda publish, most: streams.StreamSender(publish, most // 4)
"""
"""A worker that holds most of its tokens back for a slow reader: few messages are out, and each carries 11,000 at
most."""
VOCAB_SIZE = 1 << 20
MADE_S = 60.0
CHUNKS, OF_A_CHUNK = 16, 2000
"""The chunks of each choice. A chunk is 100 kB of JSON, and all buffers together have less than a megabyte."""
OTHERS = 300
"""Tokens of a request beside it: more than a window."""


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> httpx.AsyncHTTPTransport:
    """A client whose connections buffer little. The frontends' connections do so too from now on."""
    bind = listeners.bind

    def small(*args: Any) -> socket.socket:
        """Opens a listener whose accepted sockets have small buffers too."""
        listener = bind(*args)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
        return listener

    monkeypatch.setattr("frontend.main.bind", small)
    return httpx.AsyncHTTPTransport(socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BYTES)])


async def test_a_client_that_stops_reading_delays_no_other_client_and_loses_no_token(
    plane: Plane, few: httpx.AsyncHTTPTransport, delivered: list[Choice], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = plane.spawn(patch=SHORT)
    digest = (await update(plane, 1))["digest"]
    client = await plane.client()
    waiting, put = 0, IncomingStream.put

    def taken() -> int:
        """The tokens of the slow choice, which alone has alternatives."""
        return sum(len(choice.token_ids) for choice in delivered if choice.top_logprobs is not None)

    def measured(stream: IncomingStream, body: dict[str, Any]) -> bool:
        nonlocal waiting
        gap = put(stream, body)
        waiting = max(waiting, stream._queue.qsize())
        return gap

    monkeypatch.setattr("rl_plane.bus.token_stream.CREDIT_EVERY", FEW // 4)
    monkeypatch.setattr(IncomingStream, "put", measured)
    asked = {"prompt_token_ids": PROMPT, "max_tokens": TOKENS, "logprobs": TOPS, "return_token_ids": True}
    async with (
        frontend(plane) as http,
        httpx.AsyncClient(base_url=http.base_url, timeout=60, transport=few) as slow,
        slow.stream("POST", "/v1/completions", json={**asked, "stream": True}) as response,
    ):
        lines = response.aiter_lines()
        (first,) = (await next_event(lines))["choices"]
        # Its engine continues to the end meanwhile, and others are served by the same worker and frontend.
        await until_running(plane, client, worker.instance_id, 0)
        before = -1
        while taken() > before:
            before = taken()
            (choice,) = (await ask(http, max_tokens=OTHERS, return_token_ids=True))["choices"]
            assert choice["token_ids"] == tokens_under(digest, 0, OTHERS)
        # It is left with the worker: neither the frontend's objects nor its queue have it.
        assert 0 < taken() < TOKENS / 2
        assert 0 < waiting <= FEW

        choices = [first]
        async for line in lines:
            if line not in ("", "data: [DONE]"):
                choices += json.loads(line.removeprefix("data: "))["choices"]
    assert [token for choice in choices for token in choice["token_ids"]] == tokens_under(digest, 0, TOKENS)
    assert sum(len(choice["logprobs"]["top_logprobs"]) for choice in choices) == TOKENS
    (span,) = choices[-1]["weight_versions"]
    assert (choices[-1]["finish_reason"], span["digest"], span["end"]) == ("length", digest, TOKENS)


@pytest.mark.parametrize("on_stale", ["cut", "wait"])
async def test_tokens_that_waited_for_a_slow_reader_must_still_meet_max_lag(
    plane: Plane,
    few: httpx.AsyncHTTPTransport,
    delivered: list[Choice],
    progressing: list[GenerationProgress],
    on_stale: str,
) -> None:
    """The tokens met the demand when they left the worker. When the reader continues they do not."""

    def judged(index: int) -> int:
        """The tokens of a choice that have met the demand."""
        return max((len(one.token_ids) for one in progressing if one.request.id.endswith(f"-{index}")), default=0)

    async def script(stream: Stream) -> None:
        if stream.body["sequence"] == 2:
            await stream.send([3], span(2, 0, 1), end=True)
            return
        index = int(stream.body["id"][-1])
        for count in range(1, CHUNKS + 1):  # each by itself, as what comes together is sent together
            await stream.send([1] * OF_A_CHUNK, span(1, 0, count * OF_A_CHUNK))
            await plane.until(lambda count=count: judged(index) == count * OF_A_CHUNK)
        await asyncio.Event().wait()

    body = {"prompt": "hi", "n": 2, "stream": True, "return_token_ids": True, "max_lag": 0, "on_stale": on_stale}
    async with staged(plane) as stage:
        worker = await stage.worker(script, record(1))
        await stage.decide(record(1))
        async with (
            httpx.AsyncClient(base_url=stage.http.base_url, timeout=60, transport=few) as slow,
            slow.stream("POST", "/v1/completions", json=body) as response,
        ):
            lines = response.aiter_lines()
            events = [await next_event(lines)]
            await plane.until(lambda: judged(0) == judged(1) == CHUNKS * OF_A_CHUNK)
            sent = sum(len(choice.token_ids) for choice in delivered)
            assert 0 < sent < CHUNKS * OF_A_CHUNK  # the rest waits in the queue
            await stage.decide(record(2))
            await worker.hold(record(2))
            assert (await stage.ask(min_version=2)).status_code == 200  # this frontend has learnt it
            while (event := await next_event(lines)) not in ("[DONE]", None):
                events.append(event)
        for _ in range(2):
            assert (await worker.aborted.get())[-2:] in ("-0", "-1")
    choices = [choice for event in events for choice in event.get("choices", ())]
    assert sum(len(choice["token_ids"]) for choice in choices) == sent
    if on_stale == "cut":
        ends = {choice["index"]: choice for choice in choices if choice["finish_reason"]}
        assert sorted(ends) == [0, 1]
        assert {(end["finish_reason"], end["cut"]["demand"]) for end in ends.values()} == {("abort", "max_lag")}
    else:
        error = events[-1]["error"]
        assert (error["code"], error["field"]) == ("demand_unmet", "max_lag")


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("goes_on", [True, False])
async def test_an_update_takes_no_tokens_from_a_client_that_stops_reading(
    plane: Plane, few: httpx.AsyncHTTPTransport, monkeypatch: pytest.MonkeyPatch, goes_on: bool, kept: bool
) -> None:
    """Tokens that were made before the update are delivered however late they are read. But of a worker that does not
    tell that it has gone on (`goes_on`), only what came in time. `kept`: an earlier update has left its label on some
    tokens."""
    learnt: list[int] = []
    told: list[int | None] = []
    add, take = History.add, FleetStatus._take
    label = [span(1, 0, 1), span(2, 1, TOKENS)] if kept else [span(1, 0, TOKENS)]
    sender: StreamSender | None = None
    sent = 0

    def learn(history: History, one: DecisionRecord, now: float) -> None:
        add(history, one, now)
        learnt.append(one.sequence)

    def hear(status: FleetStatus, instance_id: str, one: WorkerStatus) -> None:
        take(status, instance_id, one)
        told.append(one.sequence)

    async def script(stream: Stream) -> None:
        nonlocal sender, sent
        sender = stream._sender
        await stream.send([0], span(1, 0, 1))
        if kept:
            await plane.until(lambda: learnt[-1:] == [2])
            await stream.send([1], span(1, 0, 1), span(2, 1, 2))
        for sent in range(1 + kept, TOKENS - 1):
            await stream.send([sent])
        await stream.send([TOKENS - 1], *label, end=True)

    monkeypatch.setattr(History, "add", learn)
    monkeypatch.setattr(FleetStatus, "_take", hear)
    async with staged(plane, limits=FrontendLimits(stale_after_s=0.0)) as stage:
        worker = await stage.worker(script, record(1))
        await stage.decide(record(1))
        body = {"prompt": "hi", "max_tokens": TOKENS, "stream": True, "return_token_ids": True}
        async with (
            httpx.AsyncClient(base_url=stage.http.base_url, timeout=60, transport=few) as slow,
            slow.stream("POST", "/v1/completions", json=body) as response,
        ):
            lines = response.aiter_lines()
            events = [await next_event(lines)]
            if kept:
                await stage.decide(record(2))
                await worker.hold(record(2))
            await plane.until(lambda: sender is not None and not sender._window.has_room())
            if goes_on:
                await worker.hold(record(3))
                await plane.until(lambda: told[-1:] == [3])
            await stage.decide(record(3))
            await plane.until(lambda: learnt[-1:] == [3])
            assert sent < TOKENS / 2, "the worker has the rest"
            events += [json.loads(line[6:]) async for line in lines if line not in ("", "data: [DONE]")]
    choices = [choice for event in events for choice in event.get("choices", ())]
    made = [token for choice in choices for token in choice["token_ids"]]
    if goes_on:
        assert made == list(range(TOKENS))
        assert choices[-1]["finish_reason"] == "length"
        assert choices[-1]["weight_versions"] == [one.model_dump(exclude_none=True) for one in label]
    else:
        assert events[-1]["error"]["code"] == "stale_weights"
        assert made == list(range(len(made)))
        assert 0 < len(made) < TOKENS


async def test_tokens_that_exceed_one_message_come_in_several(plane: Plane, few: httpx.AsyncHTTPTransport) -> None:
    """Tokens that waited in the worker for a reader, and a prompt that is as long."""
    worker = plane.spawn(max_model_len=2 * MANY, vocab_size=VOCAB_SIZE, patch=NARROW)
    digest = (await update(plane, 1))["digest"]
    client = await plane.client()
    asked = {"prompt_token_ids": PROMPT, "max_tokens": MANY, "stream": True, "return_token_ids": True}
    async with (
        frontend(plane) as http,
        httpx.AsyncClient(base_url=http.base_url, timeout=60, transport=few) as slow,
    ):
        async with slow.stream("POST", "/v1/completions", json=asked) as response:
            lines = response.aiter_lines()
            events = [await next_event(lines)]

            async def all_made() -> bool:
                state = await state_of(client, worker.instance_id)
                return int(state["running"]) + int(state["waiting"]) == 0

            await plane.until(all_made, MADE_S)
            events += [json.loads(line[6:]) async for line in lines if line not in ("", "data: [DONE]")]
        assert "error" not in events[-1], events[-1]["error"]["message"]
        choices = [choice for event in events for choice in event["choices"]]
        made = [fake_token(digest, PROMPT, position, VOCAB_SIZE) for position in range(MANY)]
        assert [token for choice in choices for token in choice["token_ids"]] == made
        assert "".join(choice["text"] for choice in choices) == "".join(f" t{token}" for token in made)
        assert max(len(choice["token_ids"]) for choice in choices) >= MAX_TOKENS, "so much had waited"

        prompt = [5 + number % 500 for number in range(MANY)]
        asked |= {"prompt_token_ids": prompt, "max_tokens": 2}
        async with http.stream("POST", "/v1/completions", json=asked) as response:
            lines = response.aiter_lines()
            first = await next_event(lines)
        assert first["prompt_token_ids"] == prompt
        assert first["choices"][0]["token_ids"]

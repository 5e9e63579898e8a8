"""Workers, callers, frontends and NATS end while a completion is under way: what its caller gets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from frontend.frontend_limits import FrontendLimits
from frontend.routing.attempts import IDLE_TIMEOUT_S
from frontend.routing.routing_lease import FrontendLease
from rl_plane import Rollout, gather_enough
from rl_plane.bus.server import NatsServer
from rl_plane.bus.token_stream import ABANDONED_AFTER_S, CREDIT_INTERVAL_S, IncomingStream
from rl_plane.protocol.record import SERVING_LEASE_S
from tests.support.frontend_process import (
    PROMPT,
    ask,
    error_of,
    events_of,
    frontend,
    http,
    next_event,
    tokens_under,
    until_running,
    update,
)
from tests.support.metrics_pages import metrics_url, values
from tests.support.plain_client import plain_client

__all__ = ["http"]

if TYPE_CHECKING:
    from tests.conftest import Plane, Spawned

pytestmark = [pytest.mark.slow, pytest.mark.parallel]


# ---- workers that die, callers that leave ----


async def test_a_worker_that_dies_before_its_first_token_costs_nothing(
    plane: Plane, http: httpx.AsyncClient
) -> None:
    plane.spawn(instance_id="f" * 16)
    await ask(http)
    victim = plane.spawn(token_delay_s=60, instance_id="0" * 16)
    client = await plane.client()
    await client.wait_for(2)

    # If workers have equal load, the victim is the worker that had no turn yet.
    tasks = [asyncio.create_task(ask(http, max_tokens=3, n=2)) for _ in range(2)]
    await until_running(plane, client, victim.instance_id, 2)
    victim.kill()
    for reply in await asyncio.gather(*tasks):
        assert {choice["instance_id"] for choice in reply["choices"]} == {"f" * 16}


async def test_the_only_worker_may_return_as_a_new_process(plane: Plane) -> None:
    victim = plane.spawn(token_delay_s=60)
    client = await plane.client()
    async with frontend(plane, admission_wait_s=20) as http:
        task = asyncio.create_task(ask(http, max_tokens=1))
        await until_running(plane, client, victim.instance_id, 1)
        victim.kill()
        plane.spawn(instance_id=victim.instance_id)
        assert (await task)["nvext"]["instance_id"] == victim.instance_id


async def test_a_pinned_request_ends_with_its_worker(plane: Plane, http: httpx.AsyncClient) -> None:
    plane.spawn()
    victim = plane.spawn(token_delay_s=60)
    client = await plane.client()
    body = {"prompt": "hi", "nvext": {"instance_id": victim.instance_id}}
    task = asyncio.create_task(http.post("/v1/completions", json=body))
    await until_running(plane, client, victim.instance_id, 1)
    victim.kill()
    error = error_of(await task, 503)
    assert (error["code"], error["instance_id"]) == ("worker_lost", victim.instance_id)


async def test_a_worker_that_dies_later_leaves_its_tokens(plane: Plane, http: httpx.AsyncClient) -> None:
    victim = plane.spawn(token_delay_s=0.05)
    digest = (await ask(http, max_tokens=1))["nvext"]["weight_version"]["digest"]
    body = {"prompt_token_ids": PROMPT, "max_tokens": 2000, "logprobs": 0, "return_token_ids": True}
    whole = asyncio.create_task(http.post("/v1/completions", json=body))
    client = await plane.client()
    await until_running(plane, client, victim.instance_id, 1)
    async with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        lines = response.aiter_lines()
        tokens: list[int] = []
        while len(tokens) < 12:  # six times as long as a worker gathers the tokens of a whole reply
            tokens += (await next_event(lines))["choices"][0]["token_ids"]
        victim.kill()
        while "choices" in (event := await next_event(lines)):
            tokens += event["choices"][0]["token_ids"]
        assert await next_event(lines) is None
    for error in (event["error"], error_of(await whole, 503)):
        assert error["code"] == "worker_lost"
        partial = error["partial"]
        assert partial["token_ids"] == tokens_under(digest, 0, len(partial["token_ids"]))
        assert len(partial["token_ids"]) == len(partial["logprobs"]) >= 3
        (made,) = partial["weight_versions"]
        assert (made["digest"], made["end"]) == (digest, len(partial["token_ids"]))
    assert event["error"]["partial"]["token_ids"] == tokens


DEAD = "the generation thread died"
DIES = f"""
import worker.engines.fake.adapter as fake
from rl_plane.errors import EngineDied
honest = fake.FakeEngine.generate
async def dying(self, request):
    async for delta in honest(self, request):
        yield delta
        if len(request.prompt_token_ids) == {len(PROMPT)}:
            raise EngineDied({DEAD!r})
fake.FakeEngine.generate = dying
"""
"""With the first token; not where tokens of another part are in the prompt."""


async def test_the_facade_reports_a_dead_engine_as_a_lost_worker(plane: Plane, http: httpx.AsyncClient) -> None:
    worker = plane.spawn(patch=DIES)
    body = {"prompt_token_ids": PROMPT, "max_tokens": 4, "return_token_ids": True}
    whole = await http.post("/v1/completions", json=body)
    assert whole.headers["retry-after"] == "1"
    *_, event = events_of((await http.post("/v1/completions", json={**body, "stream": True})).text)
    for error in (error_of(whole, 503), event["error"]):
        assert (error["code"], error["message"]) == ("worker_lost", DEAD)
        assert (error["instance_id"], error["retry_after_s"]) == (worker.instance_id, 1.0)
        assert error["fix"]
        assert len(error["partial"]["token_ids"]) == 1

    async def call(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        response = await http.post("/v1/completions", json=body)
        return response.status_code, response.json()

    async def stop() -> None:
        raise AssertionError("it ends by itself")

    got = await gather_enough([Rollout(PROMPT, 4)], call, stop, enough=1, timeout_s=30)
    assert ([len(one.token_ids) for one in got.finished], got.failed) == ([4], [])


async def test_a_stream_that_is_silent_for_an_hour_fails_with_its_tokens_so_far(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed_s, check_silence = [0.0], IncomingStream.check_silence

    def later(stream: IncomingStream, now: float) -> None:
        check_silence(stream, now + passed_s[0])

    monkeypatch.setattr(IncomingStream, "check_silence", later)
    worker = plane.spawn(token_delay_s=0.05)
    body = {"prompt_token_ids": PROMPT, "max_tokens": 2000, "return_token_ids": True}
    async with frontend(plane) as http:
        whole = asyncio.create_task(http.post("/v1/completions", json=body))
        await until_running(plane, await plane.client(), worker.instance_id, 1)
        async with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            lines = response.aiter_lines()
            tokens = (await next_event(lines))["choices"][0]["token_ids"]
            await (await plane.fleet()).run("pause", {"mode": "keep"})
            passed_s[0] = 2 * IDLE_TIMEOUT_S
            while "error" not in (event := await next_event(lines)):
                tokens += event["choices"][0]["token_ids"]
        assert (await whole).headers["retry-after"] == "1"
        for error in (event["error"], error_of(await whole, 503)):
            assert error["code"] == "stalled"
            assert error["partial"]["token_ids"]
        assert event["error"]["partial"]["token_ids"] == tokens


async def test_an_error_has_the_tokens_of_the_choice_that_it_is_of(plane: Plane, http: httpx.AsyncClient) -> None:
    workers = {worker.instance_id: worker for worker in plane.spawn_many(2, token_delay_s=0.05)}
    await (await plane.client()).run("ready", {"min_workers": 2, "wait_s": 30})
    made: dict[int, str] = {}
    body = {"prompt_token_ids": PROMPT, "max_tokens": 2000, "n": 2, "stream": True, "return_token_ids": True}
    async with http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.aiter_lines()
        while len(made) < 2:
            (choice,) = (await next_event(lines))["choices"]
            made[choice["index"]] = choice["instance_id"]
        workers[made[1]].kill()
        while "error" not in (event := await next_event(lines)):
            pass
    error = event["error"]
    assert (error["code"], error["index"], error["partial"]["index"]) == ("worker_lost", 1, 1)
    assert error["partial"] == error["partials"][1]
    assert made[0] != made[1]
    assert error["partials"][0]["token_ids"]


async def test_an_interrupted_text_carries_the_tokens_of_its_prompt(plane: Plane, http: httpx.AsyncClient) -> None:
    """On every route, streamed or not, the tokens sent back as a prefix are exactly the tokens that the engine saw."""
    victim = plane.spawn(token_delay_s=0.05)
    client = await plane.client()
    messages = [{"role": "user", "content": "hi"}]
    asked: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "hello", "max_tokens": 2000},
        "/v1/chat/completions": {"messages": messages, "max_tokens": 2000},
        "/inference/v1/generate": {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2000}},
        "/generate": {"text": "hello", "sampling_params": {"max_new_tokens": 2000}},
    }
    tokenize = {"/v1/chat/completions": {"messages": messages}}
    whole = {path: asyncio.create_task(http.post(path, json=body)) for path, body in asked.items()}
    await until_running(plane, client, victim.instance_id, len(asked))
    prompts = {"/inference/v1/generate": PROMPT}
    for path in asked.keys() - prompts.keys():
        told = await http.post("/tokenize", json=tokenize.get(path, {"prompt": "hello"}))
        prompts[path] = told.json()["tokens"]

    async with contextlib.AsyncExitStack() as stack:
        streams = {}
        for path, body in asked.items():
            response = await stack.enter_async_context(http.stream("POST", path, json={**body, "stream": True}))
            streams[path] = response.aiter_lines()
            for _ in range(3):
                await next_event(streams[path])
        victim.kill()
        for path, lines in streams.items():
            while "error" not in (event := await next_event(lines)):
                pass
            for error in (event["error"], error_of(await whole[path], 503)):
                assert error["code"] == "worker_lost", path
                assert error["partial"]["prompt_token_ids"] == prompts[path], path
                assert error["partial"]["token_ids"], path


async def test_a_caller_that_leaves_ends_its_request(plane: Plane, http: httpx.AsyncClient) -> None:
    worker = plane.spawn(token_delay_s=0.05)
    await ask(http, max_tokens=1)
    client = await plane.client()
    body = {"prompt_token_ids": PROMPT, "max_tokens": 2000, "n": 3}
    leaves = httpx.Timeout(30, read=0.3)
    async with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        lines = response.aiter_lines()  # an object without a reference is collected, and closes the response
        await next_event(lines)
        await until_running(plane, client, worker.instance_id, 3)
    await until_running(plane, client, worker.instance_id, 0)
    with pytest.raises(httpx.ReadTimeout):
        await http.post("/v1/completions", json=body, timeout=leaves)
    await until_running(plane, client, worker.instance_id, 0)
    # Before the first token too, where a stream has not begun its reply.
    fleet = await plane.fleet()
    await fleet.run("pause")
    with pytest.raises(httpx.ReadTimeout):
        await http.post("/v1/completions", json={**body, "stream": True}, timeout=leaves)
    await until_running(plane, client, worker.instance_id, 0)


async def test_an_abort_by_the_trainer_gives_the_tokens_so_far(plane: Plane, http: httpx.AsyncClient) -> None:
    plane.spawn(token_delay_s=0.02)
    body = {"prompt_token_ids": PROMPT, "max_tokens": 2000, "stream": True, "return_token_ids": True}
    fleet = await plane.fleet()
    async with http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.aiter_lines()
        first = await next_event(lines)
        await fleet.run("abort_requests", {"request_ids": [first["id"]]})
        while (event := await next_event(lines)) != "[DONE]":
            last = event
    assert last["choices"][0]["finish_reason"] == "abort"
    assert last["choices"][0]["weight_versions"][0]["end"] > 0


async def test_streams_survive_a_restart_of_nats(own_nats: tuple[NatsServer, Plane]) -> None:
    server, plane = own_nats
    plane.spawn(token_delay_s=0.02)
    async with frontend(plane, admission_wait_s=10) as http:
        digest = (await ask(http, max_tokens=1))["nvext"]["weight_version"]["digest"]
        body = {"prompt_token_ids": PROMPT, "max_tokens": 100, "stream": True, "return_token_ids": True}
        async with http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.aiter_lines()
            tokens = (await next_event(lines))["choices"][0]["token_ids"]
            server.kill()
            server.start()
            while (event := await next_event(lines)) != "[DONE]":
                tokens += event["choices"][0]["token_ids"]
        assert tokens == tokens_under(digest, 0, 100)
        await ask(http)


async def test_streams_survive_an_outage_of_nats_in_which_a_receiver_would_count_as_dead(
    own_nats: tuple[NatsServer, Plane],
) -> None:
    server, plane = own_nats
    delay_s, tokens_meanwhile = 0.06, 220
    assert delay_s * tokens_meanwhile > ABANDONED_AFTER_S + CREDIT_INTERVAL_S
    worker = plane.spawn(token_delay_s=delay_s, metrics={"metrics_port": 0})
    async with frontend(plane, admission_wait_s=10) as http:
        digest = (await ask(http, max_tokens=1))["nvext"]["weight_version"]["digest"]
        body = {"prompt_token_ids": PROMPT, "max_tokens": 260, "stream": True, "return_token_ids": True}
        async with http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.aiter_lines()
            tokens = (await next_event(lines))["choices"][0]["token_ids"]
            server.kill()
            made = await tokens_made(worker)
            await plane.until(lambda: made_more(worker, made + tokens_meanwhile))
            server.start()
            while (event := await next_event(lines)) != "[DONE]":
                tokens += event["choices"][0]["token_ids"]
        assert tokens == tokens_under(digest, 0, 260)


async def tokens_made(worker: Spawned) -> float:
    async with plain_client() as http:
        page = (await http.get(metrics_url(worker))).text
    return values(page)["rl_plane_worker_tokens_total"]


async def made_more(worker: Spawned, tokens: float) -> bool:
    return await tokens_made(worker) >= tokens


SERVE = """
import asyncio, json, sys
from frontend.server.options import FrontendOptions
from frontend.main import serve
options = FrontendOptions(sys.argv[1], sys.argv[2], rl_port=0, http_port=0, drain_s=float(sys.argv[3]))
asyncio.run(serve(options, lambda urls: print(json.dumps(urls), flush=True)))
"""
ENDS_S = 40.0


@asynccontextmanager
async def frontend_process(
    plane: Plane, drain_s: float
) -> AsyncIterator[tuple[asyncio.subprocess.Process, httpx.AsyncClient, str]]:
    """A frontend in a process of its own, with a client of its generation API, and the URL of its metrics."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-c", SERVE, plane.url, plane.namespace, str(drain_s)), stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(30):
            urls = json.loads(await process.stdout.readline())
        async with plain_client(base_url=urls["http_url"], timeout=ENDS_S) as http:
            yield process, http, f"{urls['rl_url']}/metrics"
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def until_leaving(http: httpx.AsyncClient) -> httpx.Response:
    """Sends requests until one is refused. Returns the refusal."""
    async with asyncio.timeout(ENDS_S):
        while (reply := await http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 1})).is_success:
            pass
    return reply


async def test_sigterm_lets_what_is_under_way_end(plane: Plane) -> None:
    plane.spawn(token_delay_s=0.05)
    body = {"prompt_token_ids": PROMPT, "max_tokens": 120, "stream": True, "return_token_ids": True}
    async with frontend_process(plane, drain_s=30) as (process, http, metrics):
        digest = (await ask(http, max_tokens=1))["nvext"]["weight_version"]["digest"]
        async with http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.aiter_lines()
            tokens = (await next_event(lines))["choices"][0]["token_ids"]
            process.send_signal(signal.SIGTERM)
            refused = await until_leaving(http)
            assert error_of(refused, 503)["message"] == "this frontend is shutting down"
            assert refused.headers["retry-after"] == "1"
            assert (await http.get("/health")).status_code == 503
            new = {"transport": {"backend": "filesystem", "path": str(plane.model(1))}}
            late = await http.post(metrics.replace("/metrics", "/v1/rl/update_weights"), json=new)
            assert (late.status_code, late.headers["retry-after"]) == (503, "1")
            while (event := await next_event(lines)) != "[DONE]":
                tokens += event["choices"][0]["token_ids"]
        assert tokens == tokens_under(digest, 0, 120)
        async with asyncio.timeout(ENDS_S):
            assert await process.wait() == 0


async def test_requests_that_outlast_the_drain_time_return_their_tokens_so_far(plane: Plane) -> None:
    plane.spawn(token_delay_s=0.05)
    body = {"prompt_token_ids": PROMPT, "max_tokens": 2000, "return_token_ids": True}
    async with frontend_process(plane, drain_s=0.5) as (process, http, metrics):
        digest = (await ask(http, max_tokens=1))["nvext"]["weight_version"]["digest"]
        whole = asyncio.create_task(http.post("/v1/completions", json={**body, "n": 2}))
        waiting = asyncio.create_task(http.post("/v1/completions", json={**body, "min_version": 9}))
        async with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            lines = response.aiter_lines()
            tokens = (await next_event(lines))["choices"][0]["token_ids"]
            async with asyncio.timeout(ENDS_S):
                while (
                    'rl_plane_generation_in_flight{component="engine"} 4.0' not in (await http.get(metrics)).text
                ):
                    pass
            process.send_signal(signal.SIGTERM)
            while "error" not in (event := await next_event(lines)):
                tokens += event["choices"][0]["token_ids"]
        assert event["error"]["code"] == "frontend_ending"
        assert event["error"]["partial"]["token_ids"] == tokens == tokens_under(digest, 0, len(tokens))
        error = error_of(await whole, 503)
        assert (await whole).headers["retry-after"] == "1"
        assert error["partial"]["token_ids"] == tokens_under(digest, 0, len(error["partial"]["token_ids"]))
        assert "partial" not in error_of(await waiting, 503)
        async with asyncio.timeout(ENDS_S):
            assert await process.wait() == 0


async def test_a_rollout_outlives_a_frontend_that_is_killed(plane: Plane) -> None:
    """Requests fail like broken connections until there is another frontend."""
    worker = plane.spawn()
    fleet = await plane.fleet()
    await fleet.run("pause", {"mode": "keep"})  # it is under way until then
    urls, refused = list[str](), asyncio.Event()

    async def call(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        try:
            async with plain_client(base_url=urls[-1], timeout=ENDS_S) as http:
                response = await http.post("/v1/completions", json=body)
        except httpx.ConnectError:
            refused.set()
            raise
        return response.status_code, response.json()

    async def stop() -> None:
        raise AssertionError("it ends by itself")

    async with frontend_process(plane, drain_s=30) as (process, http, _):
        urls.append(str(http.base_url))
        gathering = asyncio.create_task(
            gather_enough([Rollout(PROMPT, 20)], call, stop, enough=1, timeout_s=ENDS_S)
        )
        await until_running(plane, await plane.client(), worker.instance_id, 1)
        process.kill()
        async with asyncio.timeout(ENDS_S):
            await refused.wait()
    await fleet.run("resume")
    async with frontend_process(plane, drain_s=30) as (_, http, _):
        urls.append(str(http.base_url))
        got = await gathering
    assert ([len(one.token_ids) for one in got.finished], got.failed) == ([20], [])


async def test_a_second_sigterm_ends_the_frontend_without_waiting_for_requests(plane: Plane) -> None:
    plane.spawn(token_delay_s=0.05)
    body = {"prompt": "hi", "max_tokens": 2000, "stream": True}
    async with (
        frontend_process(plane, drain_s=600) as (process, http, _),
        http.stream("POST", "/v1/completions", json=body) as response,
    ):
        lines = response.aiter_lines()
        await next_event(lines)
        process.send_signal(signal.SIGTERM)
        await until_leaving(http)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(ENDS_S):
            assert await process.wait() == 0


async def test_a_hung_worker_before_its_first_token_costs_a_wait_only(
    plane: Plane,
) -> None:
    plane.spawn(instance_id="f" * 16)
    victim = plane.spawn(instance_id="0" * 16)
    await (await plane.client()).run("ready", {"min_workers": 2, "wait_s": 30})
    async with frontend(plane, limits=FrontendLimits(accept_timeout_s=1.0)) as http:
        await ask(http, nvext={"instance_id": "0" * 16})
        await ask(http, nvext={"instance_id": "f" * 16})  # so the next turn is the victim's
        victim.stop()
        try:
            assert (await ask(http))["nvext"]["instance_id"] == "f" * 16
        finally:
            victim.go_on()


# ---- frontends that stand still ----


async def test_a_frozen_frontend_is_waited_for_and_never_serves_what_was_replaced(plane: Plane) -> None:
    plane.spawn()
    code = """
import asyncio, sys
from frontend.routing.routing_lease import FrontendLease
from frontend.server.options import FrontendOptions
from frontend.main import serve
options = FrontendOptions(sys.argv[1], sys.argv[2], rl_port=None, http_port=0)
asyncio.run(serve(options, lambda urls: print(urls["http_url"], flush=True)))
"""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-c", code, plane.url, plane.namespace, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(30):
            url = (await process.stdout.readline()).decode().strip()
        async with plain_client(base_url=url, timeout=30) as http:
            old = (await ask(http))["nvext"]["weight_version"]
            process.send_signal(signal.SIGSTOP)
            await asyncio.to_thread(os.waitid, os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            waiting = asyncio.create_task(ask(http))
            begun = time.monotonic()
            new = await update(plane, 1)
            assert time.monotonic() - begun >= SERVING_LEASE_S
            process.send_signal(signal.SIGCONT)
            assert (await waiting)["nvext"]["weight_version"] == new != old
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def test_a_frontend_that_was_killed_delays_no_update(plane: Plane) -> None:
    plane.spawn()
    view = await (await plane.client("gone")).view()
    gone = FrontendLease(view, "0" * 16)
    await gone.start()
    await view.bus.close()
    begun = time.monotonic()
    await update(plane, 1)
    assert time.monotonic() - begun < SERVING_LEASE_S

"""Aborts of requests that wait in a frontend for a worker. No worker knows of these requests."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from frontend.completions.call import GenerationCall
from frontend.completions.completion_routes import OPENAI
from frontend.main import Frontend
from frontend.routing.aborts import Aborts
from frontend.server.options import FrontendOptions
from rl_plane.client import RlClient
from rl_plane.errors import FrontendEnding, Unavailable
from rl_plane.protocol.subjects import FRONTEND_PREFIX
from tests.support.call_parsers import parse_calls
from tests.support.dialect_facade import facade, fine
from tests.support.frontend_process import PROMPT, ask, frontend, next_event
from tests.support.openai_plans import chat

if TYPE_CHECKING:
    from tests.conftest import Plane

BOUND_S = 30.0
WAIT_S = 60.0
"""The seconds that a request may wait for a worker. No request of these tests reaches the bound."""
LONG = 2000
TOOLS = [{"type": "function", "function": {"name": "look"}}]


async def never() -> int:
    await asyncio.Event().wait()
    return 1


# ---- alone ----


async def test_a_waiting_request_is_aborted_by_any_of_its_names() -> None:
    aborts = Aborts()
    for names in (None, ["one"], ["x", "two"]):
        with aborts.of("one", "two", choices=3) as ending:
            waiting = asyncio.create_task(ending.unless_aborted(never()))
            await asyncio.sleep(0)
            assert aborts.abort(["x"]) == 0
            assert aborts.abort(names) == 3
            assert aborts.abort(names) == 0
            assert await waiting is None
            assert await ending.unless_aborted(never()) is None
    assert aborts.abort(None) == 0


async def test_an_abort_wins_over_a_result_that_arrives_at_the_same_time() -> None:
    aborts = Aborts()
    came = asyncio.Event()
    with aborts.of("one") as ending:
        waiting = asyncio.create_task(ending.unless_aborted(came.wait()))
        await asyncio.sleep(0)
        came.set()
        assert aborts.abort(None) == 1
        assert await waiting is None


async def test_an_aborted_choice_that_a_worker_has_waits_for_no_other_worker() -> None:
    aborts = Aborts()
    with aborts.of("one") as ending:
        assert await ending.unless_aborted(asyncio.sleep(0, 5)) == 5
        assert aborts.abort(["one"]) == 0
        assert await ending.unless_aborted(never()) is None


async def test_a_wait_that_fails_or_is_cancelled_is_no_abort() -> None:
    async def late() -> int:
        raise TimeoutError

    with Aborts().of("one") as ending:
        with pytest.raises(TimeoutError):
            await ending.unless_aborted(late())
        waiting = asyncio.create_task(ending.unless_aborted(never()))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting


# ---- with frontends ----


async def aborted(client: RlClient, count: int, **body: Any) -> None:
    """Aborts until `count` waiting choices have ended."""
    async with asyncio.timeout(BOUND_S):
        while count:
            count -= (await client.run("abort_requests", body))["waiting"]
            assert count >= 0
            await asyncio.sleep(0.02)


ASKED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt_token_ids": PROMPT, "return_token_ids": True, "n": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "logprobs": True},
    "/inference/v1/generate": {"token_ids": PROMPT, "sampling_params": {"prompt_logprobs": 0}},
    "/generate": {"input_ids": PROMPT, "return_logprob": True},
}


@pytest.mark.parametrize("disabled", [False, True])
async def test_an_abort_ends_waiting_requests_on_every_route_and_frontend(plane: Plane, disabled: bool) -> None:
    """The fleet has no worker, or no worker that takes requests."""
    client = await plane.client()
    if disabled:
        worker = plane.spawn()
        await client.run("disable", {"workers": [worker.instance_id]})
    async with frontend(plane, admission_wait_s=WAIT_S) as one, frontend(plane, admission_wait_s=WAIT_S) as other:
        tasks = {
            (path, stream, http): asyncio.create_task(http.post(path, json={**body, "stream": stream}))
            for path, body in ASKED.items()
            for stream in (False, True)
            for http in (one, other)
        }
        await aborted(client, 5 * 2 * 2)
        for (path, stream, _), task in tasks.items():
            reply = await task
            assert reply.status_code == 200, reply.text
            told = events(reply) if stream else [reply.json()]
            if path == "/generate":
                (row,) = told
                reason = row["meta_info"]["finish_reason"]["type"]
                assert (reason, row["output_ids"], row["meta_info"]["weight_version"]) == ("abort", [], None)
                continue
            choices = [choice for part in told for choice in part["choices"]]
            assert len(choices) == (2 if path == "/v1/completions" else 1)
            for choice in choices:
                assert (choice["finish_reason"], choice["weight_versions"]) == ("abort", [])
                assert choice.get("token_ids", []) == []
            if path == "/v1/completions":
                assert all(choice["prompt_token_ids"] == PROMPT for choice in choices)
        # None of them is left anywhere, and what comes later is served.
        if disabled:
            await client.run("enable", {"workers": [worker.instance_id]})
        else:
            plane.spawn()
        for http in (one, other):
            assert (await ask(http, max_tokens=1))["choices"][0]["finish_reason"] == "length"
        assert (await client.run("abort_requests"))["waiting"] == 0


def events(reply: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


async def test_one_request_that_waits_ends_by_its_callers_name(plane: Plane) -> None:
    worker, client = plane.spawn(), await plane.client()
    await client.run("disable", {"workers": [worker.instance_id]})
    async with facade(plane) as http:
        asked = {
            "mine": ("/inference/v1/generate", {"token_ids": PROMPT, "request_id": "mine", "sampling_params": {}}),
            "yours": ("/generate", {"input_ids": PROMPT, "rid": "yours"}),
            "other": ("/generate", {"input_ids": PROMPT, "rid": "yours, too"}),
        }
        tasks = {name: asyncio.create_task(http.post(path, json=body)) for name, (path, body) in asked.items()}
        async with asyncio.timeout(BOUND_S):
            ended = 0
            while not ended:
                ended = fine(await http.post("/abort_requests", json={"request_ids": ["mine"]}))["aborted"]
            assert (await tasks.pop("mine")).json()["choices"][0]["finish_reason"] == "abort"
            while not tasks["yours"].done():
                fine(await http.post("/abort_request", json={"rid": "yours"}))
            assert tasks.pop("yours").result().json()["meta_info"]["finish_reason"]["type"] == "abort"
        await client.run("enable", {"workers": [worker.instance_id]})
        assert (await tasks["other"]).json()["meta_info"]["finish_reason"]["type"] == "length"


async def test_an_abort_on_one_worker_knows_the_callers_names(plane: Plane) -> None:
    worker, client = plane.spawn(token_delay_s=0.05), await plane.client()
    here = {"workers": [worker.instance_id], "request_ids": ["mine"]}
    asked = {"token_ids": PROMPT, "request_id": "mine", "sampling_params": {"max_tokens": LONG}}
    async with facade(plane) as http:

        async def ended() -> bool:
            return bool((await client.run("abort_requests", here))["workers"][0]["aborted"])

        async def waiting() -> bool:
            return bool((await http.get("/v1/rl/requests")).json()["requests"])

        running = asyncio.create_task(http.post("/inference/v1/generate", json=asked))
        await plane.until(ended)
        assert (await running).json()["choices"][0]["finish_reason"] == "abort"
        await client.run("disable", {"workers": [worker.instance_id]})
        waits = asyncio.create_task(http.post("/inference/v1/generate", json=asked))
        await plane.until(waiting)
        assert (await client.run("abort_requests", here))["waiting"] == 0, "it is on no worker"
        assert not waits.done()
        assert (await client.run("abort_requests", {"request_ids": ["mine"]}))["waiting"] == 1
        assert (await waits).json()["choices"][0]["finish_reason"] == "abort"


@pytest.mark.parametrize(
    ("stage", "streams", "choices"),
    [
        ("reads", False, 1),
        ("reads", True, 1),
        ("calls_of", False, 2),
        ("calls_of", True, 1),
        ("calls_of", True, 2),
    ],
)
async def test_a_request_that_waits_for_a_reader_of_its_calls_ends(
    plane: Plane, monkeypatch: pytest.MonkeyPatch, stage: str, streams: bool, choices: int
) -> None:
    """`reads` waits before the first token, and `calls_of` after the last one of each choice."""
    plane.spawn()
    waits, waiters = asyncio.Event(), 0

    async def hangs(*_: Any) -> None:
        nonlocal waiters
        waiters += 1
        if waiters == choices:
            waits.set()
        await never()

    parse_calls(monkeypatch, hangs, **({"reads": hangs} if stage == "reads" else {}))
    options = FrontendOptions(plane.url, plane.namespace, plane.component, admission_wait_s=WAIT_S)
    async with asyncio.timeout(BOUND_S), Frontend.running(options) as running:
        (component,) = running.components
        await plane.until(component.status.admitted)

        async def replies() -> list[dict[str, Any]]:
            # Each token of the engine has the stop string.
            plan = chat(tools=TOOLS, stop=" t", include_stop_str_in_output=True, n=choices)
            call = GenerationCall(component.generation, plan, OPENAI)
            if not streams:
                return [json.loads(await call.whole())]
            return [json.loads(chunk) async for chunk in call.stream() if chunk != b"[DONE]"]

        async def waiting() -> asyncio.Task[list[dict[str, Any]]]:
            nonlocal waiters
            waiters = 0
            waits.clear()
            task = asyncio.create_task(replies())
            await waits.wait()
            return task

        task = await waiting()
        assert component.engines.aborts.abort(None) == choices
        text = "" if stage == "reads" else " t"
        ended = [choice for reply in await task for choice in reply["choices"]]
        assert len(ended) == choices
        for choice in ended:
            content = choice["delta" if streams else "message"]["content"]
            assert (content, choice["finish_reason"]) == (text, "abort")

        task = await waiting()
        component.engines.give_up(lambda: FrontendEnding("the frontend ends"))
        with pytest.raises(FrontendEnding) as caught:
            await task
        assert ("partial" in caught.value.facts) == (stage == "calls_of"), "the text is paid for"


async def test_a_choice_that_waits_for_its_next_worker_ends_with_its_tokens(plane: Plane) -> None:
    worker, client = plane.spawn(token_delay_s=0.05), await plane.client()
    body = {"prompt_token_ids": PROMPT, "max_tokens": LONG, "migrate": True, "return_token_ids": True}
    async with (
        frontend(plane, admission_wait_s=WAIT_S) as http,
        http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response,
    ):
        lines = response.aiter_lines()
        choices = [(await next_event(lines))["choices"][0] for _ in range(3)]
        worker.kill()
        # The frontend may know of the death by now, or not yet: no worker continues the choice in either case.
        await client.run("abort_requests")
        while (event := await next_event(lines)) is not None and event != "[DONE]":
            choices += event["choices"]
    assert choices[-1]["finish_reason"] == "abort"
    (span,) = choices[-1]["weight_versions"]
    made = [token for choice in choices for token in choice["token_ids"]]
    assert (span["start"], span["end"]) == (0, len(made))
    assert len(made) >= 3


async def test_a_frontend_that_does_not_answer_is_named(plane: Plane) -> None:
    """A frontend that has left is not named: no request waits there any more."""
    plane.spawn()
    client = await plane.client()
    subjects = client.subjects()
    for name in ("gone", "stopped"):
        await client.bus.put(subjects.state, FRONTEND_PREFIX + name, b"{}")

    async def hear(message: Any) -> None:
        pass

    await client.bus.subscribe(subjects.frontend("stopped"), hear)
    with pytest.raises(Unavailable) as caught:
        await client.run("abort_requests")
    assert caught.value.facts["frontends"] == ["stopped"]
    assert [row["status"] for row in caught.value.facts["workers"]] == ["ok"]
    # Who names workers means what they have.
    (row,) = caught.value.facts["workers"]
    reply = await client.run("abort_requests", {"workers": [row["instance_id"]]})
    assert reply["waiting"] == 0

"""`gather_enough` gathers enough rollouts, parks the others with their tokens, and continues them later."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Mapping
from http.client import IncompleteRead
from typing import Any

import httpx
import openai
import pytest

from rl_plane import (
    BusUnreachable,
    Conflict,
    DeadlineExceeded,
    EngineDied,
    EngineFailed,
    FrontendEnding,
    InvalidRequest,
    Locked,
    NotAdmitted,
    NoWorkers,
    Overloaded,
    PlaneError,
    Rollout,
    Unauthorized,
    Unlabelled,
    WorkerLost,
    gather_enough,
)
from rl_plane.rollouts.partial import OF_ONE_PART, OF_ONE_PROMPT, OF_WHAT_WAS_MADE, OWN, SEED_STEP, TRIES, Call

SPAN = {"version": "one", "sequence": 1, "digest": "blake3:1", "run": "r"}
LATER = {"version": "two", "sequence": 2, "digest": "blake3:2", "run": "r"}
WORKER = {"instance_id": "w1", "incarnation": "i1"}
SUCCESSOR = {"instance_id": "w1", "incarnation": "i2"}


def reply(
    body: Mapping[str, Any],
    tokens: list[int],
    reason: str = "length",
    spans: list[dict[str, Any]] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Returns a frontend's reply to this body. `spans` cover all tokens; by default there is one span."""
    choice = {
        "index": 0,
        "token_ids": tokens,
        "logprobs": {"token_logprobs": [-0.1] * len(tokens)},
        "weight_versions": [{**SPAN, "start": 0, "end": len(tokens)}] if spans is None else spans,
        "finish_reason": reason,
        **WORKER,
        **more,
    }
    return {"prompt_token_ids": body["prompt_token_ids"], "choices": [choice]}


def taken(rollout: Rollout, tokens: list[int], reason: str, **more: Any) -> Rollout:
    after, error = rollout.with_reply(200, reply(rollout.body(), tokens, reason, **more))
    assert error is None
    return after


def failed(error: PlaneError) -> tuple[int, dict[str, Any]]:
    return error.http_status, {"error": error.to_wire()}


# ---- one rollout ----


def test_the_next_part_continues_the_tokens_before() -> None:
    first = Rollout([5, 6], 10, {"temperature": 0.5, "seed": 7, "min_tokens": 4}, key="a")
    assert first.body() == {
        "prompt_token_ids": [5, 6],
        "max_tokens": 10,
        "return_token_ids": True,
        "temperature": 0.5,
        "seed": 7,
        "min_tokens": 4,
    }
    second = taken(first, [1, 2, 3], "abort")
    body = second.body()
    assert (body["prompt_token_ids"], body["max_tokens"]) == ([5, 6, 1, 2, 3], 7)
    assert (body["seed"], body["min_tokens"]) == (7 + 3 * SEED_STEP, 1)
    assert (second.finish_reason, second.left, second.key) == (None, 7, "a")
    third = taken(second, [4, 9], "stop", spans=[{**SPAN, "start": 0, "end": 1}, {**LATER, "start": 1, "end": 2}])
    assert (third.token_ids, third.finish_reason) == ([1, 2, 3, 4, 9], "stop")
    assert third.logprobs == [-0.1] * 5
    assert third.weight_versions == [{**SPAN, "start": 0, "end": 4}, {**LATER, "start": 4, "end": 5}]


def test_a_rollout_names_the_workers_that_made_it() -> None:
    rollout = taken(Rollout([5, 6], 12), [1, 2], "abort")
    rollout = taken(rollout, [3], "abort")
    rollout = taken(rollout, [], "abort", spans=[], instance_id="w2")
    later = [{**LATER, "start": 0, "end": 2}]
    rollout = taken(rollout, [4, 5], "abort", spans=later, **SUCCESSOR)
    both = [{**SUCCESSOR, "start": 0, "end": 1}, {**WORKER, "start": 1, "end": 3}]
    rollout = taken(rollout, [6, 7, 8], "stop", instances=both)
    assert [(one["instance_id"], one["incarnation"], one["start"], one["end"]) for one in rollout.instances] == [
        ("w1", "i1", 0, 3),
        ("w1", "i2", 3, 6),
        ("w1", "i1", 6, 8),
    ]
    assert [(one["version"], one["start"], one["end"]) for one in rollout.weight_versions] == [
        ("one", 0, 3),
        ("two", 3, 5),
        ("one", 5, 8),
    ]


def test_routed_experts_are_those_of_the_last_part() -> None:
    """The prompt of the last part contains the parts before."""
    rollout = Rollout([5, 6], 10, {"return_routed_experts": True})
    assert rollout.body()["return_routed_experts"]
    for tokens, told in (([1, 2], "a"), ([3], "b"), ([4], None)):
        answer = reply(rollout.body(), tokens, "abort")
        answer["choices"][0]["routed_experts"] = told
        rollout, _ = rollout.with_reply(200, answer)
        assert rollout.routed_experts == told


def test_an_error_brings_its_tokens() -> None:
    lost = WorkerLost("gone", partial={
        "token_ids": [1, 2], "logprobs": [-1.0, -2.0], "finish_reason": None,
        "weight_versions": [{**SPAN, "start": 0, "end": 2}], **WORKER,
    })  # fmt: skip
    after, error = Rollout([5], 4).with_reply(*failed(lost))
    assert isinstance(error, WorkerLost)
    assert (after.token_ids, after.logprobs, after.finish_reason) == ([1, 2], [-1.0, -2.0], None)
    assert after.instances == [{**WORKER, "start": 0, "end": 2}]
    same, error = after.with_reply(*failed(NotAdmitted("closed")))
    assert isinstance(error, NotAdmitted)
    assert same is after


def test_a_rollout_ends_with_its_last_token() -> None:
    assert taken(Rollout([5], 2), [1, 2], "abort").finish_reason == "length"
    assert taken(Rollout([5], 2), [], "abort").finish_reason is None


@pytest.mark.parametrize(
    "name",
    sorted({*OWN, *OF_ONE_PROMPT, *OF_ONE_PART, *OF_WHAT_WAS_MADE}),
)
def test_a_field_with_another_meaning_for_a_part_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Rollout([5], 2, {name: 1})
    assert caught.value.facts["field"] == name
    assert caught.value.facts["fix"]


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("response_format", {"type": "json_object"}),
        ("structured_outputs", {"choice": ["yes", "no"]}),
        ("json_schema", "{}"),
        ("regex", "[0-9]+"),
        ("ebnf", 'root ::= "a"'),
        ("structural_tag", "{}"),
    ],
)
def test_a_rollout_refuses_each_form_of_its_text(name: str, form: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Rollout([5], 2, {name: form})
    assert caught.value.facts["field"] == name
    assert "anew" in caught.value.facts["fix"]
    assert Rollout([5], 2, {name: None, "response_format": {"type": "text"}}).options


def test_penalties_and_stops_without_effect_are_accepted() -> None:
    options = {"stop": [], "frequency_penalty": 0.0, "presence_penalty": None, "repetition_penalty": 1.1}
    assert Rollout([5], 2, options).body().items() >= options.items()


def test_a_refused_field_is_refused_in_nvext_too() -> None:
    for name in ("one_version", "return_prompt_logprobs"):
        with pytest.raises(InvalidRequest) as caught:
            Rollout([5], 2, {"nvext": {name: True}})
        assert caught.value.facts["field"] == f"nvext.{name}"
    assert Rollout([5], 2, {"nvext": {"return_token_ids": True, "max_lag": 1}}).options


@pytest.mark.parametrize(("prompt", "budget", "field"), [([], 4, "prompt_token_ids"), ([5], 0, "max_tokens")])
def test_a_rollout_has_a_prompt_and_a_budget(prompt: list[int], budget: int, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Rollout(prompt, budget)
    assert caught.value.facts["field"] == field


def test_tokens_without_logprobs_or_labels_are_not_joined() -> None:
    rollout = Rollout([5], 4)
    told = reply(rollout.body(), [1, 2])
    for key, value in (("logprobs", {"token_logprobs": [-0.1]}), ("weight_versions", [])):
        with pytest.raises(Unlabelled):
            rollout.with_reply(200, {**told, "choices": [{**told["choices"][0], key: value}]})
    with pytest.raises(InvalidRequest, match="another prompt than the request"):
        rollout.with_reply(200, {**told, "prompt_token_ids": [5, 5]})


@pytest.mark.parametrize("value", [None, math.nan, "-0.1"])
def test_logprobs_that_are_no_numbers_are_not_joined(value: Any) -> None:
    rollout = Rollout([5], 4)
    told = reply(rollout.body(), [1, 2])
    choice = {**told["choices"][0], "logprobs": {"token_logprobs": [-0.1, value]}}
    with pytest.raises(EngineFailed, match="not finite numbers"):
        rollout.with_reply(200, {**told, "choices": [choice]})


# ---- enough of them ----


class Answers:
    """Answers a request at once if its prompt is in `at_once`. Other requests end when they are stopped, with one
    token."""

    def __init__(self, at_once: set[int]) -> None:
        self.at_once = at_once
        self.stopped = asyncio.Event()
        self.asked: list[int] = []
        self.all_asked = asyncio.Event()

    async def call(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        first = body["prompt_token_ids"][0]
        self.asked.append(first)
        if len(self.asked) == 4:
            self.all_asked.set()
        if first in self.at_once:
            return 200, reply(body, [1] * body["max_tokens"])
        await self.stopped.wait()
        return 200, reply(body, [1], "abort")

    async def stop(self) -> None:
        self.stopped.set()


def keys(rollouts: list[Rollout]) -> list[Any]:
    return [one.key for one in rollouts]


def four() -> list[Rollout]:
    return [Rollout([number], 3, key=number) for number in range(4)]


async def test_stopped_rollouts_are_parked_with_their_tokens_and_continue_later() -> None:
    answers = Answers({0, 2})
    got = await gather_enough(four(), answers.call, answers.stop, enough=2, timeout_s=10)
    assert (keys(got.finished), keys(got.parked), got.failed) == ([0, 2], [1, 3], [])
    assert [one.token_ids for one in got.parked] == [[1], [1]]
    answers = Answers({1, 3})
    got = await gather_enough(got.parked, answers.call, answers.stop, enough=2, timeout_s=10)
    assert not answers.stopped.is_set()
    assert [one.token_ids for one in got.finished] == [[1, 1, 1]] * 2
    assert [one.weight_versions for one in got.finished] == [[{**SPAN, "start": 0, "end": 3}]] * 2


async def test_fewer_rollouts_finish_if_the_time_runs_out() -> None:
    answers = Answers({0})
    got = await gather_enough(four(), answers.call, answers.stop, enough=4, timeout_s=0.5)
    assert (keys(got.finished), keys(got.parked)) == ([0], [1, 2, 3])


async def test_a_request_that_does_not_return_is_cancelled() -> None:
    answers = Answers({0})

    async def stop() -> None:
        """A stop request that no frontend receives."""

    got = await gather_enough(four(), answers.call, stop, enough=1, timeout_s=10, stopped_s=0.05)
    assert keys(got.parked) == [1, 2, 3]
    assert [list(one.token_ids) for one in got.parked] == [[]] * 3


async def test_a_retryable_error_is_asked_again() -> None:
    told: list[Callable[[dict[str, Any]], tuple[int, dict[str, Any]]]] = [
        lambda body: failed(NotAdmitted("an update", retry_after_s=0.0)),
        lambda body: (200, reply(body, [1], "abort")),
        lambda body: (200, reply(body, [1] * body["max_tokens"])),
    ]

    async def call(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        return told.pop(0)(body)

    got = await gather_enough([Rollout([5], 3)], call, Answers(set()).stop, enough=1, timeout_s=10)
    assert [one.token_ids for one in got.finished] == [[1, 1, 1]]


async def test_a_rollout_of_an_ending_frontend_continues_at_the_next() -> None:
    asked: list[list[int]] = []

    async def call(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        asked.append(list(body["prompt_token_ids"]))
        if len(asked) > 1:
            return 200, reply(body, [3])
        (choice,) = reply(body, [1, 2])["choices"]
        partial = {**choice, "logprobs": choice["logprobs"]["token_logprobs"], "finish_reason": None}
        return failed(FrontendEnding("told to end", retry_after_s=0.0, partial=partial))

    got = await gather_enough([Rollout([5], 3)], call, Answers(set()).stop, enough=1, timeout_s=10)
    assert ([one.token_ids for one in got.finished], got.failed) == ([[1, 2, 3]], [])
    assert asked == [[5], [5, 1, 2]]


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Returns the warnings of rl_plane. asyncio may warn of an earlier test at any time."""
    return [one.getMessage() for one in caplog.records if one.name.startswith("rl_plane")]


REQUEST: Any = httpx.Request("POST", "http://127.0.0.1:8000")


def said(status: int) -> httpx.HTTPStatusError:
    """Returns the error that `raise_for_status` raises."""
    return httpx.HTTPStatusError(str(status), request=REQUEST, response=httpx.Response(status))


def raising(error: Exception, cause: Exception | None = None) -> tuple[int, dict[str, Any]]:
    raise error from cause


async def test_a_request_that_no_worker_takes_is_always_asked_again() -> None:
    """The fleet is full or closed, or the frontend ends and is away until it has started again."""
    errors: list[Callable[[], tuple[int, dict[str, Any]]]] = [
        *[lambda: failed(Overloaded("full", retry_after_s=0.0))] * (TRIES + 1),
        *[lambda: failed(NotAdmitted("closed", retry_after_s=0.0))] * (TRIES + 1),
        lambda: failed(FrontendEnding("errors to end", retry_after_s=0.0)),
        *[lambda: raising(ConnectionRefusedError("refused"))] * (TRIES + 1),
        *[lambda: raising(openai.APIConnectionError(request=REQUEST), httpx.ConnectError("refused"))]
        * (TRIES + 1),
        *[lambda: raising(type("ClientConnectorError", (OSError,), {})("aiohttp's"))] * (TRIES + 1),
        lambda: raising(httpx.RemoteProtocolError("disconnected")),
        lambda: raising(json.JSONDecodeError("half a reply", "", 0)),
        lambda: raising(NoWorkers("none", retry_after_s=0.0)),
    ]

    async def call(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        return errors.pop(0)() if errors else (200, reply(body, [1, 2, 3]))

    got = await gather_enough([Rollout([5], 3)], call, Answers(set()).stop, enough=1, timeout_s=10, retry_s=0.0)
    assert ([one.token_ids for one in got.finished], got.failed, errors) == ([[1, 2, 3]], [], [])


async def test_a_request_that_no_worker_takes_in_time_is_parked(caplog: pytest.LogCaptureFixture) -> None:

    async def call(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        raise ConnectionRefusedError("no server listens")

    got = await gather_enough(four(), call, Answers(set()).stop, enough=4, timeout_s=0.2, retry_s=0.0)
    assert (keys(got.parked), got.finished, got.failed) == ([0, 1, 2, 3], [], [])
    (warning,) = warned(caplog)  # once, however many there were
    assert "ConnectionRefusedError: no server listens" in warning


async def test_another_reason_that_no_worker_takes_it_is_logged_too(caplog: pytest.LogCaptureFixture) -> None:
    errors: list[Exception] = [
        ConnectionRefusedError("it is away"),
        ConnectionRefusedError("it is away"),
        *[httpx.ConnectTimeout("it is far away")] * (TRIES + 1),
        httpx.UnsupportedProtocol("ftp"),
    ]

    async def call(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        return raising(errors.pop(0)) if errors else (200, reply(body, [1, 2, 3]))

    got = await gather_enough([Rollout([5], 3)], call, Answers(set()).stop, enough=1, timeout_s=10, retry_s=0.0)
    assert ([one.token_ids for one in got.finished], got.failed, errors) == ([[1, 2, 3]], [], [])
    assert [text.partition("again: ")[2] for text in warned(caplog)] == [
        "ConnectionRefusedError: it is away",
        "ConnectTimeout: it is far away",
        "UnsupportedProtocol: ftp",
    ]


@pytest.mark.parametrize(
    "error",
    [
        ConnectionRefusedError("no server listens"),
        httpx.ConnectError("no server listens"),
        BusUnreachable("NATS is away"),
        DeadlineExceeded("no server answered"),
        said(409),
        said(503),
        Conflict("pause was not done on 1 of 8 workers"),
        EngineFailed("it can't"),
        EngineDied("it is gone"),
    ],
)
async def test_finished_rollouts_are_returned_if_stop_never_succeeds(
    caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """The frontend, or NATS, is gone for good."""
    good = Answers({0, 1})

    async def call(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        return (
            await good.call(body) if body["prompt_token_ids"][0] < 2 else raising(ConnectionRefusedError("gone"))
        )

    async def stop() -> None:
        raise error

    got = await gather_enough(four(), call, stop, enough=3, timeout_s=0.5, retry_s=0.0)
    assert (keys(got.finished), keys(got.parked), got.failed) == ([0, 1], [2, 3], [])
    assert f"{type(error).__name__}: {error}" in warned(caplog)[-1]


@pytest.mark.parametrize("error", [TimeoutError("no answer"), Conflict("one of eight engines hangs")])
async def test_a_stop_whose_answer_was_lost_brings_the_tokens_back(error: Exception) -> None:
    answers = Answers({0})

    async def stop() -> None:
        await answers.stop()
        raise error

    got = await gather_enough(four(), answers.call, stop, enough=1, timeout_s=10)
    assert (keys(got.finished), keys(got.parked), got.failed) == ([0], [1, 2, 3], [])
    assert [one.token_ids for one in got.parked] == [[1]] * 3


async def test_a_stop_that_is_not_heard_at_once_is_sent_again() -> None:
    answers = Answers({0})
    errors: list[Exception] = [Locked("an adapter is loaded", retry_after_s=0.0), httpx.ConnectError("it is away")]

    async def stop() -> None:
        if errors:
            raise errors.pop(0)
        await answers.stop()

    got = await gather_enough(four(), answers.call, stop, enough=1, timeout_s=10, retry_s=0.0)
    assert (keys(got.finished), keys(got.parked), got.failed, errors) == ([0], [1, 2, 3], [], [])
    assert [one.token_ids for one in got.parked] == [[1]] * 3


async def test_a_stop_that_never_answers_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    answers = Answers({0})

    async def stop() -> None:
        await asyncio.Event().wait()

    async with asyncio.timeout(10):
        got = await gather_enough(four(), answers.call, stop, enough=1, timeout_s=10, stop_s=0.05, stopped_s=0.05)
    assert (keys(got.finished), keys(got.parked), got.failed) == ([0], [1, 2, 3], [])
    assert "TimeoutError" in warned(caplog)[-1]


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("no", field="mode", fix="x"),
        Unauthorized("a wrong key"),
        TypeError("unexpected argument"),
        said(400),
        said(401),
    ],
)
async def test_a_mistaken_stop_is_raised(error: Exception) -> None:
    answers = Answers({0})

    async def stop() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        await gather_enough(four(), answers.call, stop, enough=1, timeout_s=10)
    assert caught.value is error
    assert len(asyncio.all_tasks()) == 1


async def begun(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    (choice,) = reply(body, [1])["choices"]
    partial = {**choice, "logprobs": choice["logprobs"]["token_logprobs"], "finish_reason": None}
    return failed(FrontendEnding("told to end", retry_after_s=0.0, partial=partial))


async def lost(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    return failed(WorkerLost("it kills each", retry_after_s=0.0))


class ReadTimeoutError(Exception):
    """An error like urllib3's, which is no TimeoutError either."""


def broken(error: Exception) -> Call:
    """Returns a call that fails after the request was sent."""

    async def call(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        raise error

    return call


def answering(status: int, answer: dict[str, Any]) -> Call:
    """Returns a call that gets an answer of something before the frontend."""

    async def call(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        return status, answer

    return call


OF_A_GATEWAY = {"message": "no healthy upstream", "type": "service_unavailable", "code": 503}


async def aborted(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    return 200, reply(body, [], "abort")


async def refused(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    return failed(InvalidRequest("no", field="top_p", fix="x"))


async def refusing(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    raise InvalidRequest("no", field="top_p", fix="x")


async def mistaken(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    raise TypeError("unexpected keyword argument")


@pytest.mark.parametrize(
    ("bad", "why", "times"),
    [
        (begun, f"in {TRIES} tries", TRIES),
        (lost, f"in {TRIES} tries", TRIES),
        (broken(TimeoutError("too long")), f"in {TRIES} tries: TimeoutError: too long", TRIES),
        (broken(httpx.ReadTimeout("too long")), f"in {TRIES} tries: ReadTimeout: too long", TRIES),
        (broken(openai.APITimeoutError(REQUEST)), f"in {TRIES} tries: APITimeoutError", TRIES),
        (broken(ReadTimeoutError("too long")), f"in {TRIES} tries: ReadTimeoutError", TRIES),
        (broken(httpx.RemoteProtocolError("cut")), f"in {TRIES} tries: RemoteProtocolError", TRIES),
        (broken(ConnectionResetError("cut")), f"in {TRIES} tries: ConnectionResetError", TRIES),
        (broken(IncompleteRead(b"{")), f"in {TRIES} tries: IncompleteRead", TRIES),
        (broken(json.JSONDecodeError("a proxy's page", "<", 0)), f"in {TRIES} tries: JSONDecodeError", TRIES),
        (answering(502, {"message": "no upstream"}), f"in {TRIES} tries: status 502", TRIES),
        (answering(503, {"error": OF_A_GATEWAY}), f"in {TRIES} tries: status 503", TRIES),
        (answering(504, {"error": "timed out"}), f"in {TRIES} tries: status 504", TRIES),
        (answering(404, {"detail": "no route"}), "status 404", 1),
        (aborted, f"in {TRIES} tries", TRIES),
        (refused, "no", 1),
        (refusing, "no", 1),
        (mistaken, "unexpected keyword", 1),
    ],
)
async def test_a_failed_rollout_leaves_the_others_alone(bad: Call, why: str, times: int) -> None:
    good, asked = Answers({0, 1, 3}), []

    async def call(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if body["prompt_token_ids"][0] != 2:
            return await good.call(body)
        asked.append(body)
        return await bad(body)

    rollouts = [Rollout([number], 2 * TRIES, key=number) for number in range(4)]
    got = await gather_enough(rollouts, call, good.stop, enough=4, timeout_s=10, retry_s=0.0)
    assert sorted(keys(got.finished)) == [0, 1, 3]
    ((rollout, error),) = got.failed
    assert rollout.key == 2
    assert why in str(error)
    assert len(asked) == times


@pytest.mark.parametrize("enough", [0, 5])
async def test_enough_is_at_most_the_number_of_rollouts(enough: int) -> None:
    answers = Answers(set())
    with pytest.raises(InvalidRequest, match="of 4 rollouts"):
        await gather_enough(four(), answers.call, answers.stop, enough=enough, timeout_s=1)
    assert answers.asked == []


async def test_cancelling_gather_enough_cancels_the_requests() -> None:
    answers = Answers(set())
    gathering = asyncio.create_task(gather_enough(four(), answers.call, answers.stop, enough=1, timeout_s=60))
    await answers.all_asked.wait()
    gathering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gathering
    assert len(asyncio.all_tasks()) == 1

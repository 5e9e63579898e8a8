"""The frontend's pure parts: bodies, plans, routing, version history, coalescing, listeners."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, get_args

import pytest

from frontend.completions.caller_ids import CallerIds
from frontend.completions.native_bodies import plan_vllm
from frontend.completions.openai_bodies import ChatBody, CompletionBody
from frontend.completions.openai_replies import Chunks, openai_error, whole
from frontend.completions.plans import DEFAULT_CHAT_TOKENS, Plan, plan_chat, plan_completion
from frontend.completions.reply_choice import Choice
from frontend.completions.tokens import parse_tokenize
from frontend.completions.unserved_fields import UNSERVED
from frontend.facade.nats_service import call_body
from frontend.facade.op_runner import MAX_IN_FLIGHT, OpRunner
from frontend.routing.attempts import Accepted
from frontend.routing.fleet_status import CLOSED_REASONS
from frontend.server.bodies import list_fields, merge_query
from frontend.server.listeners import bind, url_of
from frontend.server.metrics import FrontendMetrics, Scrape
from frontend.server.replies import error_body, error_response, to_json
from rl_plane.errors import (
    EngineDied,
    InvalidRequest,
    NoWorkers,
    PlaneError,
    Unauthorized,
    Unavailable,
    Unsupported,
)
from rl_plane.protocol.envelope import Request
from rl_plane.protocol.fleet_ops import FLEET_OPS
from rl_plane.protocol.generation import (
    MAX_STOP_CHARS,
    MAX_STOPS,
    AdapterSpan,
    GenerateDelta,
    Rendering,
    VersionSpan,
)
from rl_plane.protocol.strict_json import parse_json_object
from rl_plane.protocol.versions import WeightVersion
from rl_plane.protocol.worker_ops import Tokenize
from worker.reconcile.worker_state import Reason

# ---- JSON ----


@pytest.mark.parametrize(
    "data",
    [
        b"{",
        b"[]",
        b'"a"',
        b"3",
        b"null",
        b"{'a': 1}",
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b'{"a": 1e999}',
        b'{"a": 1, "a": 2}',
        b'{"a": "\xff"}',
        b'{"a": "\\ud800"}',
        b'{"a": 99999999999999999999999}',
        b'{"a": ' + b"[" * 70 + b"]" * 70 + b"}",
        b'{"a": ' + b"[" * 100_000 + b"}",
        b'{"a": ' + b"9" * 5000 + b"}",
    ],
)
def test_a_body_that_could_not_be_passed_on_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_json_object(data)
    assert caught.value.facts["field"] == "body"
    assert caught.value.facts["fix"]


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"", {}),
        (b" \r\n", {}),
        (b"{}", {}),
        (b'{"a": "\\u00e9\\ud83d\\ude00"}', {"a": "é😀"}),
        (b'{"seed": 9223372036854775807}', {"seed": (1 << 63) - 1}),
        (b'{"a": ' + b"[" * 60 + b"]" * 60 + b"}", None),
    ],
)
def test_a_body_is_an_object_or_nothing(data: bytes, value: dict[str, Any] | None) -> None:
    found = parse_json_object(data)
    assert value is None or found == value


def test_a_reply_never_has_nan() -> None:
    value = {"a": float("nan"), "b": [float("-inf"), 1.5], 3: b"\x01", "t": (1, True, None)}
    assert to_json(value) == b'{"a":null,"b":[null,1.5],"3":"01","t":[1,true,null]}'


# ---- errors ----


def test_an_error_has_its_rows_where_a_reply_has_them() -> None:
    error = NoWorkers("none", field="workers", workers=[], epoch=3, fingerprint="f", elapsed_s=9.0)
    assert error_body(error, 0.5) == {
        "status": "error",
        "error": {"code": "no_workers", "message": "none", "field": "workers"},
        "workers": [],
        "epoch": 3,
        "fingerprint": "f",
        "elapsed_s": 0.5,
    }


@pytest.mark.parametrize(("wait_s", "header"), [(None, "1"), (0.2, "1"), (1.0, "1"), (2.1, "3")])
def test_a_503_says_when_to_come_back(wait_s: float | None, header: str) -> None:
    response = error_response(Unavailable("not now", retry_after_s=wait_s), 0.0)
    assert (response.status_code, response.headers["retry-after"]) == (503, header)
    assert response.headers["content-length"] == str(len(response.body))


def test_the_503_of_a_dead_engine_says_when_to_retry() -> None:
    response = error_response(EngineDied("its process ended"), 0.0)
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")


def test_a_401_says_how_to_authenticate() -> None:
    assert error_response(Unauthorized("no"), 0.0).headers["www-authenticate"] == "Bearer"


def test_openai_clients_find_their_keys() -> None:
    error = openai_error(InvalidRequest("wrong", field="n", fix="less"), 0.0)["error"]
    assert error == {
        "code": "invalid_request",
        "message": "wrong",
        "field": "n",
        "fix": "less",
        "type": "invalid_request_error",
        "param": "n",
    }
    assert openai_error(PlaneError("broke"), 0.0)["error"]["type"] == "server_error"


# ---- the facade's query ----


def test_lists_come_by_comma_or_repeated() -> None:
    lists = list_fields(FLEET_OPS["release_memory"].request)
    assert {"workers", "component", "tags"} <= lists
    query = [("tags", "weights,kv_cache"), ("workers", "a"), ("workers", "b"), ("epoch", "3")]
    assert merge_query(query, {}, lists) == {
        "tags": ["weights", "kv_cache"],
        "workers": ["a", "b"],
        "epoch": "3",
    }


def test_query_and_body_may_agree_but_not_differ() -> None:
    lists = frozenset({"workers"})
    body = {"mode": "keep", "clear_cache": True, "lease_s": 5, "workers": ["a"]}
    query = [("mode", "keep"), ("clear_cache", "true"), ("lease_s", "5"), ("workers", "a")]
    assert merge_query(query, body, lists) == body
    for key, text in (("mode", "abort"), ("clear_cache", "false"), ("lease_s", "6"), ("workers", "b")):
        with pytest.raises(InvalidRequest) as caught:
            merge_query([(key, text)], body, lists)
        assert caught.value.facts["field"] == key
    with pytest.raises(InvalidRequest):
        merge_query([("mode", "keep"), ("mode", "abort")], {}, lists)


# ---- the fleet subject's envelope ----


def test_the_envelopes_selection_goes_into_the_body() -> None:
    request = Request("pause", {"mode": "keep"}, targets=("a",), epoch=4, fingerprint="f")
    assert call_body(request) == {"mode": "keep", "workers": ["a"], "epoch": 4, "fingerprint": "f"}
    assert call_body(Request("state", {"workers": ["a"]}, targets=("a",))) == {"workers": ["a"]}


@pytest.mark.parametrize(
    "request_",
    [
        Request("state", {"workers": ["b"]}, targets=("a",)),
        Request("state", {"epoch": 1}, epoch=2),
        Request("pause", fence=3),
        Request("pause", incarnation="x"),
    ],
)
def test_an_envelope_that_contradicts_itself_is_refused(request_: Request) -> None:
    with pytest.raises(InvalidRequest) as caught:
        call_body(request_)
    assert caught.value.facts["field"]


# ---- versions ----


def _version(sequence: int, run: str = "r") -> WeightVersion:
    return WeightVersion(run, sequence, f"step_{sequence}", f"blake3:{sequence}")


def _span(sequence: int, start: int, end: int, **other: Any) -> VersionSpan:
    made = {"version": f"step_{sequence}", "sequence": sequence, "digest": f"blake3:{sequence}", "run": "r"}
    return VersionSpan(**{**made, **other}, start=start, end=end)


# ---- coalescing ----


class SlowFleet:
    """Counts its calls, and answers when told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any], str]] = []
        self.begun = asyncio.Event()
        self.go = asyncio.Event()
        self.error: PlaneError | None = None

    async def run(self, op: str, body: dict[str, Any] | None = None, request_id: str = "") -> dict[str, Any]:
        self.calls.append((op, body or {}, request_id))
        self.begun.set()
        await self.go.wait()
        if self.error is not None:
            raise self.error
        return {"call": len(self.calls)}


def _calls() -> tuple[SlowFleet, OpRunner]:
    fleet = SlowFleet()
    return fleet, OpRunner(fleet)  # type: ignore[arg-type]


async def _started(fleet: SlowFleet, count: int) -> None:
    async with asyncio.timeout(5):
        while len(fleet.calls) < count:
            fleet.begun.clear()
            await fleet.begun.wait()


async def test_equal_updates_share_one_answer() -> None:
    fleet, calls = _calls()
    one = asyncio.create_task(calls.run("update_weights", {"a": 1, "b": 2}))
    two = asyncio.create_task(calls.run("update_weights", {"b": 2, "a": 1}))
    other = asyncio.create_task(calls.run("update_weights", {"a": 2}))
    pauses = [asyncio.create_task(calls.run("pause", {})) for _ in range(2)]
    await _started(fleet, 4)
    fleet.go.set()
    assert await one is await two
    await asyncio.gather(other, *pauses)
    assert [op for op, _, _ in fleet.calls].count("update_weights") == 2
    fleet.go.clear()
    again = asyncio.create_task(calls.run("update_weights", {"a": 1, "b": 2}))
    await _started(fleet, 5)  # after its end, an equal body is a new call
    fleet.go.set()
    await again


async def test_calls_with_long_lists_are_told_apart_by_their_digests() -> None:
    fleet, calls = _calls()

    def feed(names: list[Any], digest: str, **more: Any) -> asyncio.Task[Any]:
        return asyncio.create_task(calls.run("receive_weights_part", {"names": names, **more}, digest=digest))

    one, two = feed(["a"], "d"), feed(["not looked at"], "d")
    others = [feed(["a"], "e"), feed(["a"], "d", update_id="u")]
    await _started(fleet, 3)
    fleet.go.set()
    assert await one is await two
    await asyncio.gather(*others)
    assert len(fleet.calls) == 3


async def test_a_request_id_means_one_update() -> None:
    fleet, calls = _calls()
    one = asyncio.create_task(calls.run("update_weights", {"a": 1}, "k"))
    await _started(fleet, 1)
    two = asyncio.create_task(calls.run("update_weights", {"a": 1}, "k"))
    with pytest.raises(InvalidRequest) as caught:
        await calls.run("update_weights", {"a": 2}, "k")
    assert caught.value.facts["field"] == "Idempotency-Key"
    fleet.go.set()
    assert await one is await two
    assert len(fleet.calls) == 1


async def test_a_caller_that_leaves_stops_nothing_and_errors_reach_the_rest() -> None:
    fleet, calls = _calls()
    one = asyncio.create_task(calls.run("update_weights", {}))
    await _started(fleet, 1)
    two = asyncio.create_task(calls.run("update_weights", {}))
    await asyncio.sleep(0)
    one.cancel()
    fleet.error = NoWorkers("gone")
    fleet.go.set()
    with pytest.raises(NoWorkers):
        await two
    assert len(fleet.calls) == 1


async def test_updates_in_flight_are_bounded_and_end_with_the_frontend() -> None:
    fleet, calls = _calls()
    tasks = [asyncio.create_task(calls.run("update_weights", {"a": n})) for n in range(MAX_IN_FLIGHT)]
    await _started(fleet, MAX_IN_FLIGHT)
    with pytest.raises(Unavailable):
        await calls.run("update_weights", {"a": "one more"})
    await calls.close(0.01)
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(one, asyncio.CancelledError) for one in ended)


# ---- plans ----


def completion(**body: Any) -> Plan:
    return plan_completion({"prompt": "hi", **body}, "cmpl-1")


def chat(**body: Any) -> Plan:
    return plan_chat({"messages": [{"role": "user", "content": "hi"}], **body}, "chatcmpl-1")


def test_a_plain_completion_has_openais_defaults() -> None:
    (request,) = completion().requests
    assert request.model_dump() == {
        "id": "cmpl-1",
        "prompt_token_ids": None,
        "prompt": "hi",
        "add_special_tokens": True,
        "adapter": None,
        "messages": None,
        "rendering": Rendering().model_dump(),
        "max_tokens": 16,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "seed": None,
        "stop_token_ids": [],
        "stop": [],
        "include_stop_str_in_output": False,
        "ignore_eos": False,
        "min_tokens": 0,
        "logit_bias": {},
        "allowed_token_ids": None,
        "bad_words_token_ids": [],
        "truncate_prompt_tokens": None,
        "cache_salt": None,
        "skip_special_tokens": True,
        "logprobs": False,
        "top_logprobs": 0,
        "prompt_logprobs": False,
        "routed_experts": False,
        "continued": 0,
    }


def test_every_field_reaches_the_engine() -> None:
    plan = completion(
        prompt="",
        prompt_token_ids=[1, 2],
        model="m",
        max_tokens=5,
        temperature=0,
        top_p=0.5,
        top_k=-1,
        min_p=0.25,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        repetition_penalty=1.5,
        seed=7,
        n=3,
        stop_token_ids=[9],
        stop=["x", "yz"],
        include_stop_str_in_output=True,
        ignore_eos=True,
        min_tokens=2,
        logit_bias={"4": -100, "5": 0.5},
        allowed_token_ids=[4, 5],
        bad_words_token_ids=[4, [5, 5]],
        truncate_prompt_tokens=1,
        cache_salt="pepper",
        skip_special_tokens=False,
        logprobs=1,
        prompt_logprobs=1,
        return_token_ids=True,
        stream=True,
        stream_options={"include_usage": True},
        user="u",
        nvext={"instance_id": "0" * 16},
    )
    assert (plan.model, plan.instance_id, plan.stream, plan.include_usage) == ("m", "0" * 16, True, True)
    assert plan.return_token_ids
    assert [request.seed for request in plan.requests] == [7, 8, 9]
    assert len({request.id for request in plan.requests}) == 3
    for request in plan.requests:
        assert (request.prompt_token_ids, request.prompt, request.max_tokens) == ([1, 2], None, 5)
        assert (request.temperature, request.top_p, request.top_k) == (0.0, 0.5, 0)
        assert (request.stop_token_ids, request.ignore_eos, request.logprobs) == ([9], True, True)
        assert (request.min_p, request.repetition_penalty) == (0.25, 1.5)
        assert (request.frequency_penalty, request.presence_penalty) == (0.5, -0.5)
        assert (request.stop, request.include_stop_str_in_output) == (["x", "yz"], True)
        assert (request.min_tokens, request.logit_bias) == (2, {"4": -100, "5": 0.5})
        assert (request.allowed_token_ids, request.bad_words_token_ids) == ([4, 5], [[4], [5, 5]])
        assert (request.truncate_prompt_tokens, request.cache_salt) == (1, "pepper")
        assert not request.skip_special_tokens
        assert request.prompt_logprobs


@pytest.mark.parametrize(
    ("body", "asked"),
    [
        ({}, False),
        ({"prompt_logprobs": 0}, True),
        ({"prompt_logprobs": 1}, True),
        ({"prompt_logprobs": True}, True),
        ({"prompt_logprobs": False}, False),
        ({"return_prompt_logprobs": True}, True),
        ({"return_prompt_logprobs": False}, False),
        ({"nvext": {"return_prompt_logprobs": True}}, True),
        ({"nvext": {"return_prompt_logprobs": False}}, False),
    ],
)
def test_ways_to_ask_for_prompt_logprobs(body: dict[str, Any], asked: bool) -> None:
    assert [request.prompt_logprobs for request in completion(n=2, **body).requests] == [asked, asked]
    # Of a chat those of the first choice are told.
    assert [request.prompt_logprobs for request in chat(n=2, **body).requests] == [asked, False]


@pytest.mark.parametrize(("value", "asked"), [(False, False), (True, True), (None, False), (0, True)])
def test_a_completion_asks_for_logprobs_as_a_chat_may(value: Any, asked: bool) -> None:
    assert completion(logprobs=value).requests[0].logprobs == asked
    assert completion(logprobs=value, return_token_ids=True).requests[0].logprobs


def test_tokens_come_in_either_field() -> None:
    assert completion(prompt=[3, 4]).requests[0].prompt_token_ids == [3, 4]
    assert completion(prompt=None, prompt_token_ids=[3]).requests[0].prompt_token_ids == [3]
    plan = chat(messages=[], prompt_token_ids=[3])
    assert (plan.requests[0].prompt_token_ids, plan.requests[0].messages) == ([3], None)
    for asked in ({"return_token_ids": True}, {"extra_fields": ["weight_version", "completion_token_ids"]}):
        for body in (asked, {"nvext": asked}):
            for plan in (completion(**body, logprobs=None), chat(**body, logprobs=False)):
                assert (plan.return_token_ids, plan.logprobs) == (True, True)
    assert not completion(extra_fields=["instance_id"]).return_token_ids
    assert not completion(nvext={"extra_fields": ["instance_id"], "return_routed_experts": False}).return_token_ids
    for told in ({"return_routed_experts": True}, {"nvext": {"return_routed_experts": True}}):
        assert (completion(**told).routed_experts, chat(**told).routed_experts) == (True, True)
    for plan in (completion(nvext={"token_data": [3]}), chat(nvext={"token_data": [3]})):
        (request,) = plan.requests
        assert (request.prompt_token_ids, request.prompt, request.messages) == ([3], None, None)


def test_a_chat_has_a_bounded_default_length() -> None:
    assert chat().requests[0].max_tokens == DEFAULT_CHAT_TOKENS
    assert chat(max_completion_tokens=7, max_tokens=7).requests[0].max_tokens == 7
    assert chat(logprobs=True, top_logprobs=0).logprobs
    assert chat(logprobs=True, top_logprobs=5).requests[0].top_logprobs == 5
    assert [completion(logprobs=count).requests[0].top_logprobs for count in (0, 1, 2, 20)] == [0, 0, 2, 20]


def test_messages_have_one_form_for_all_templates() -> None:
    called = {"name": "look", "arguments": '{"at": [1, "x"]}'}
    said = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "reasoning_content": "hm",
        "tool_calls": [{"id": "c1", "type": "function", "index": 0, "function": called}],
    }
    messages = [
        {"role": "user", "name": "me", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        said,
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
    ]
    (request,) = chat(messages=messages).requests
    function = {"name": "look", "arguments": {"at": [1, "x"]}}
    plain = [
        {"role": "user", "content": "a\nb", "name": "me"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
    ]
    assert request.messages == plain
    assert parse_tokenize({"messages": messages})[1]["messages"] == plain


TOOL = {"type": "function", "function": {"parameters": {}, "name": "look"}}


def test_what_the_template_is_given() -> None:
    assert chat().requests[0].rendering == Rendering()
    fields: dict[str, Any] = {"tools": [TOOL], "documents": [{"title": "t"}], "continue_final_message": True}
    expected = Rendering(
        tools=[TOOL],
        documents=[{"title": "t"}],
        add_generation_prompt=False,
        continue_final_message=True,
        more={"enable_thinking": False},
    )
    for name in ("chat_template_kwargs", "chat_template_args"):
        given = {**fields, name: {"enable_thinking": False}}
        assert chat(tool_choice="auto", **given).requests[0].rendering == expected
        assert chat(tool_choice="none", **given).requests[0].rendering == expected.model_copy(
            update={"tools": None}
        )
        _, op = parse_tokenize({"messages": [{"role": "user", "content": "hi"}], **given})
        assert Tokenize.model_validate(op).rendering == expected
    # Tokens in bypass it.
    plan = chat(messages=[], prompt_token_ids=[3], tools=[TOOL])
    assert (plan.requests[0].prompt_token_ids, plan.requests[0].rendering) == ([3], Rendering())


def test_a_batch_of_prompts() -> None:
    for prompt, kind in ((["a", "b"], "prompt"), ([[1], [2, 3]], "prompt_token_ids")):
        plan = completion(prompt=prompt, n=3, seed=7, prompt_logprobs=0)
        assert (plan.batch, plan.n, len({request.id for request in plan.requests})) == (2, 3, 6)
        assert [getattr(request, kind) for request in plan.requests] == [prompt[0]] * 3 + [prompt[1]] * 3
        assert [request.seed for request in plan.requests] == [7, 8, 9] * 2
        assert all(request.prompt_logprobs for request in plan.requests)
        assert plan.field_of("prompt_token_ids", 4) == "prompt.1"
    assert (completion(prompt=["a"]).batch, completion().batch) == (1, None)
    with pytest.raises(InvalidRequest, match="128") as caught:
        completion(prompt=["a"] * 9, n=128)
    assert caught.value.facts["field"] == "n"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, -1]}, "prompt.1"),
        ({"prompt": [1, True]}, "prompt.1"),
        ({"prompt": [1, 2.0]}, "prompt.1"),
        ({"prompt": [1, "a"]}, "prompt.1"),
        ({"prompt_token_ids": [1]}, "prompt_token_ids"),
        ({"prompt": "", "prompt_token_ids": []}, "prompt_token_ids"),
        ({"prompt": "", "prompt_token_ids": "1,2"}, "prompt_token_ids"),
        ({"prompt": "", "prompt_token_ids": [1 << 31]}, "prompt_token_ids.0"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"seed": -1}, "seed"),
        ({"seed": 1 << 63}, "seed"),
        ({"seed": (1 << 63) - 2, "n": 3}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"stop_token_ids": "5"}, "stop_token_ids"),
        ({"stop_token_ids": [-5]}, "stop_token_ids.0"),
        ({"stop_token_ids": ["5"]}, "stop_token_ids.0"),
        ({"min_p": 1.5}, "min_p"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"presence_penalty": "1"}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"stop": [""]}, "stop.0"),
        ({"stop": [5]}, "stop.0"),
        ({"stop": {"some": "thing"}}, "stop"),
        ({"stop": ["x"] * (MAX_STOPS + 1)}, "stop"),
        ({"stop": "x" * (MAX_STOP_CHARS + 1)}, "stop.0"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output"),
        ({"prompt": ["a", ""]}, "prompt.1"),
        ({"prompt": ["a", [1]]}, "prompt.1"),
        ({"prompt": [[1], []]}, "prompt.1"),
        ({"prompt": [[1], [2, -1]]}, "prompt.1.1"),
        ({"ignore_eos": "yes"}, "ignore_eos"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"logit_bias": {"5": "1"}}, "logit_bias.5"),
        ({"logit_bias": {"five": 1}}, "logit_bias.five.[key]"),
        ({"logit_bias": {"05": 1}}, "logit_bias.05.[key]"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [True]}, "allowed_token_ids.0"),
        ({"bad_words_token_ids": 5}, "bad_words_token_ids"),
        ({"bad_words_token_ids": [[5], []]}, "bad_words_token_ids.1"),
        ({"bad_words_token_ids": [-5]}, "bad_words_token_ids.0.0"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -1}, "truncate_prompt_tokens"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": -2}, "prompt_logprobs"),
        ({"prompt_logprobs": 1.0}, "prompt_logprobs"),
        ({"prompt_logprobs": "1"}, "prompt_logprobs"),
        ({"return_prompt_logprobs": 1}, "return_prompt_logprobs"),
        ({"nvext": {"return_prompt_logprobs": "yes"}}, "nvext.return_prompt_logprobs"),
        ({"return_token_ids": 1}, "return_token_ids"),
        ({"stream": "true"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"nvext": {"foo": 1}}, "nvext.foo"),
        ({"nvext": {"token_data": []}}, "nvext.token_data"),
        ({"nvext": {"token_data": [3]}, "prompt_token_ids": [3]}, "prompt_token_ids"),
        ({"nvext": {"extra_fields": "token_ids"}}, "nvext.extra_fields"),
        ({"extra_fields": "token_ids"}, "extra_fields"),
        ({"extra_fields": ["token_ids", "foo"]}, "extra_fields.1"),
        ({"extra_fields": ["token_ids"], "nvext": {"extra_fields": ["foo"]}}, "nvext.extra_fields.0"),
        ({"nvext": {"extra_fields": ["token_ids", "foo"]}}, "nvext.extra_fields.1"),
        ({"nvext": []}, "nvext"),
        ({"messages": []}, "messages"),
        ({"temperature": 2.01}, "temperature"),
        ({"unheard_of": None}, "unheard_of"),
        ({"prompt": [3, 4], "add_special_tokens": True}, "add_special_tokens"),
    ],
)
def test_a_wrong_completion_is_a_400_by_name(body: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        completion(**body)
    assert caught.value.facts["field"] == field
    assert caught.value.facts["fix"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages.0"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "tool", "content": None, "tool_calls": []}]}, "messages.0.content"),
        (
            {"messages": [{"role": "a", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}]},
            "messages.0.tool_calls.0.function.arguments",
        ),
        (
            {
                "messages": [
                    {"role": "a", "tool_calls": [{"type": "x", "function": {"name": "f", "arguments": ""}}]}
                ]
            },
            "messages.0.tool_calls.0.type",
        ),
        ({"tools": [{}]}, "tools.0.type"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [{"type": "function", "function": {"name": 5}}]}, "tools.0.function.name"),
        ({"tools": {"some": "thing"}}, "tools"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs.tokenize"),
        ({"chat_template_kwargs": {"a": 1}, "chat_template_args": {"a": 1}}, "chat_template_args"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({"messages": [{"role": "", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": "x", "y": 1}]}, "messages.0.y"),
        ({"prompt_token_ids": [1]}, "prompt_token_ids"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"prompt": "hi"}, "prompt"),
    ],
)
def test_a_wrong_chat_is_a_400_by_name(body: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(**body)
    assert caught.value.facts["field"] == field


@pytest.mark.parametrize("plan", [completion, chat])
@pytest.mark.parametrize("field", sorted(UNSERVED))
def test_a_known_field_that_is_not_served_is_never_ignored(plan: Callable[..., Plan], field: str) -> None:
    for neutral in (None, *UNSERVED[field]):
        plan(**{field: neutral})
    if field in (ChatBody if plan is chat else CompletionBody).model_fields:
        return  # the other route's
    with pytest.raises(Unsupported) as caught:
        plan(**{field: {"some": "thing"}})
    assert caught.value.facts["field"] == field


@pytest.mark.parametrize(
    ("plan", "body", "field"),
    [
        (completion, {"prompt_logprobs": 2}, "prompt_logprobs"),
        (chat, {"prompt_logprobs": -1}, "prompt_logprobs"),
        (chat, {"nvext": {"extra_fields": ["routed_experts"]}}, "nvext.extra_fields.0"),
        (completion, {"extra_fields": ["timing"]}, "extra_fields.0"),
        (chat, {"nvext": {"backend_instance_id": 0}}, "nvext.backend_instance_id"),
        (completion, {"echo": 0}, "echo"),
        (completion, {"best_of": True}, "best_of"),
        (completion, {"tools": [TOOL]}, "tools"),
        (chat, {"tool_choice": "required"}, "tool_choice"),
        (chat, {"tool_choice": {"type": "function", "function": {"name": "look"}}}, "tool_choice"),
        (chat, {"messages": [{"role": "a", "content": "", "refusal": "no"}]}, "messages.0.refusal"),
        (completion, {"top_logprobs": 5}, "top_logprobs"),
        (
            chat,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content",
        ),
    ],
)
def test_what_is_known_and_not_served_is_a_501(
    plan: Callable[..., Plan], body: dict[str, Any], field: str
) -> None:
    with pytest.raises(Unsupported) as caught:
        plan(**body)
    assert caught.value.facts["field"] == field
    assert caught.value.facts["fix"]


STREAMED: dict[str, Callable[[dict[str, Any]], Plan]] = {
    "completion": lambda options: completion(stream=True, stream_options=options),
    "chat": lambda options: chat(stream=True, stream_options=options),
    "vllm": lambda options: plan_vllm(
        {"token_ids": [5], "sampling_params": {}, "stream": True, "stream_options": options}, "id"
    ),
}


@pytest.mark.parametrize("route", STREAMED)
def test_stream_options_that_are_not_served_are_refused_by_name_unless_they_say_nothing(route: str) -> None:
    plan = STREAMED[route]
    for field in ("continuous_usage_stats", "include_obfuscation"):
        for neutral in (None, False):
            assert plan({"include_usage": True, field: neutral}).include_usage
        with pytest.raises(Unsupported) as caught:
            plan({"include_usage": True, field: True})
        assert caught.value.facts["field"] == f"stream_options.{field}"
    assert not plan({"include_usage": None}).include_usage


# ---- replies ----


def _choice() -> Choice:
    choice = Choice(0)
    choice.take(Accepted("a" * 16, "lost", _version(1)))
    choice.take(GenerateDelta(token_ids=[], prompt_token_ids=[7, 8], spans=[_span(0, 0, 1)]))
    choice.take(Accepted("b" * 16, "i", _version(1)))
    first = [_span(1, 0, 1)]
    choice.take(GenerateDelta(token_ids=[1], logprobs=[-0.5], text="x", prompt_token_ids=[7, 8, 9], spans=first))
    last = GenerateDelta(
        token_ids=[2, 3], logprobs=[-1.0, -2.0], text="yz", finish_reason="stop", spans=[_span(1, 0, 3)]
    )
    choice.take(last)
    return choice


def test_a_whole_completion() -> None:
    reply = whole(completion(logprobs=0, return_token_ids=True), [_choice()], "m", 5)
    (choice,) = reply["choices"]
    assert choice["text"] == "xyz"
    assert choice["token_ids"] == [1, 2, 3]
    assert choice["logprobs"] == {
        "tokens": ["token_id:1", "token_id:2", "token_id:3"],
        "token_logprobs": [-0.5, -1.0, -2.0],
        "top_logprobs": [{"token_id:1": -0.5}, {"token_id:2": -1.0}, {"token_id:3": -2.0}],
        "text_offset": [0, 1, 1],
    }
    assert choice["weight_versions"] == [_span(1, 0, 3).model_dump(exclude_none=True)]
    assert choice["instance_id"] == "b" * 16
    assert reply["prompt_token_ids"] == [7, 8, 9]
    assert reply["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    version = {"run": "r", "sequence": 1, "label": "step_1", "digest": "blake3:1"}
    tokens = {"completion_token_ids": [1, 2, 3], "token_ids": [7, 8, 9]}
    assert reply["nvext"] == {"instance_id": "b" * 16, "incarnation": "i", "weight_version": version, **tokens}
    (one, other), plan = (_choice(), _choice()), completion(n=2, return_token_ids=True)
    other.token_ids = [4]
    other.logprobs, other.offsets = [-1.0], [0]
    assert whole(plan, [one, other], "m", 5)["nvext"]["completion_token_ids"] == [[1, 2, 3], [4]]


def test_a_whole_chat_without_extras() -> None:
    reply = whole(chat(), [_choice()], "m", 5)
    (choice,) = reply["choices"]
    assert choice["message"] == {"role": "assistant", "content": "xyz"}
    assert choice["logprobs"] is None
    assert "token_ids" not in choice
    assert "prompt_token_ids" not in reply
    (row, *_) = whole(chat(logprobs=True), [_choice()], "m", 5)["choices"][0]["logprobs"]["content"]
    assert row == {"token": "token_id:1", "logprob": -0.5, "bytes": None, "top_logprobs": []}


def test_several_versions_are_never_told_as_one() -> None:
    choice = _choice()
    choice.spans = [_span(1, 0, 1), _span(2, 1, 3)]
    assert whole(completion(), [choice], "m", 5)["nvext"]["weight_version"] is None


def test_an_adapter_is_told_beside_the_base() -> None:
    adapter = AdapterSpan(name="a", version="lora_2", sequence=2, digest="blake3:a")
    choice = _choice()
    choice.spans = [_span(1, 0, 3, adapter=adapter)]
    reply = whole(completion(), [choice], "a", 5)
    (told,) = reply["choices"][0]["weight_versions"]
    assert told == {**_span(1, 0, 3).model_dump(exclude_none=True), "adapter": adapter.model_dump()}
    assert reply["nvext"]["weight_version"]["sequence"] == 1
    assert reply["nvext"]["adapter"] == adapter.model_dump()
    other = adapter.model_copy(update={"sequence": 3})
    choice.spans = [_span(1, 0, 1, adapter=adapter), _span(1, 1, 3, adapter=other)]
    nvext = whole(completion(), [choice], "a", 5)["nvext"]
    assert (nvext["weight_version"], "adapter" in nvext) == (None, False)
    plan = completion(n=2).with_adapter("a")
    assert [request.adapter for request in plan.requests] == ["a", "a"]


def test_the_partial_tokens_of_a_choice_have_their_labels() -> None:
    choice = Choice(0)
    assert choice.partial()["weight_versions"] == []
    choice.take(GenerateDelta(token_ids=[1], spans=[_span(1, 0, 1)]))
    choice.take(GenerateDelta(token_ids=[2, 3]))
    assert choice.partial()["weight_versions"] == [_span(1, 0, 3).model_dump(exclude_none=True)]
    choice.take(GenerateDelta(token_ids=[4], spans=[_span(1, 0, 3), _span(2, 3, 4)]))
    choice.take(GenerateDelta(token_ids=[5]))
    assert choice.labelled() == [_span(1, 0, 3), _span(2, 3, 5)]


def test_chat_chunks_begin_with_the_role_and_end_with_the_versions() -> None:
    plan = chat(stream=True, return_token_ids=True)
    choice = _choice()
    chunks = Chunks(plan, [choice], "m", 5)
    first = chunks.of(choice, GenerateDelta(token_ids=[1], logprobs=[-0.5], text="x"), 0)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": "x"}
    assert first["prompt_token_ids"] == [7, 8, 9]
    assert "weight_versions" not in first["choices"][0]
    ended = GenerateDelta(token_ids=[2], logprobs=[-1.0], finish_reason="stop", spans=choice.spans)
    last = chunks.of(choice, ended, 1)
    assert last["nvext"]["completion_token_ids"] == [1, 2, 3]
    assert last["choices"][0]["logprobs"]["content"][0]["logprob"] == -1.0
    assert last["choices"][0]["delta"] == {"content": ""}
    assert last["choices"][0]["weight_versions"] == [_span(1, 0, 3).model_dump(exclude_none=True)]
    assert "prompt_token_ids" not in last


def _snapshot(**more: Any) -> Scrape:
    counts: dict[str, Any] = {"outcomes": {}, "picks": {"load": 3}, "moves": {}, "closed": {}}
    facts = {"workers": 2, "admitted": 1, "epoch": 3, "sequence": None, "in_flight": 0, "lease": None}
    return Scrape(**{**facts, **counts, **more})


def _lines(metrics: FrontendMetrics) -> list[str]:
    return metrics.text().decode().splitlines()


@pytest.mark.parametrize(("lease", "told"), [(True, "1.0"), (False, "0.0"), (None, None)])
def test_the_metrics_show_the_lease(lease: bool | None, told: str | None) -> None:
    lines = _lines(FrontendMetrics(lambda: _snapshot(lease=lease)))
    assert not any("rl_plane_committed_sequence" in line for line in lines)
    assert 'rl_plane_generation_picks_total{by="load"} 3.0' in lines
    found = [line for line in lines if line.startswith("rl_plane_serving_lease ")]
    assert found == ([f"rl_plane_serving_lease {told}"] if told else [])


def test_the_metrics_keep_every_digit() -> None:
    epoch, count = 1_795_477_252_162, 1_234_567
    lines = _lines(FrontendMetrics(lambda: _snapshot(epoch=epoch, outcomes={"ok": count})))
    values = {line.split(" ")[0]: float(line.split(" ")[1]) for line in lines if not line.startswith("#")}
    assert values["rl_plane_membership_epoch"] == epoch
    assert values['rl_plane_generation_requests_total{outcome="ok"}'] == count
    assert "# TYPE rl_plane_generation_requests_total counter" in lines
    assert "# HELP rl_plane_workers Workers in the fleet." in lines


def test_the_metrics_show_the_canary() -> None:
    metrics = FrontendMetrics(lambda: _snapshot(closed={"numerics": 1}))

    def told() -> list[str]:
        words = ("rl_plane_canary", "rl_plane_workers_closed")
        return [line for line in _lines(metrics) if line.startswith(words) and not line.endswith(" 0.0")]

    assert told() == ['rl_plane_workers_closed{reason="numerics"} 1.0']
    metrics.on_canary({"difference": 0.5, "mismatch_kl": 1.25e-8, "reasons": {"trainer": 2, "x": 7}})
    metrics.on_canary({"difference": 0.25, "mismatch_kl": 1e-8, "reasons": {"trainer": 1, "tie": 2}})
    assert told() == [
        'rl_plane_workers_closed{reason="numerics"} 1.0',
        'rl_plane_canary_failures_total{reason="tie"} 2.0',
        'rl_plane_canary_failures_total{reason="trainer"} 3.0',
        "rl_plane_canary_difference 0.25",
        "rl_plane_canary_mismatch_kl 1e-08",
    ]
    metrics.on_canary({"scored": 1, "failed": 0})
    assert not any("difference" in line or "mismatch" in line for line in told())


def test_the_metrics_have_histograms_of_phases_and_first_tokens() -> None:
    metrics = FrontendMetrics(_snapshot)
    metrics.on_committed({"receive_s": 0.2, "gate_s": 0.002})
    metrics.on_committed({"receive_s": 20.0})
    metrics.on_first_token(0.05)
    lines = _lines(metrics)
    assert 'rl_plane_update_phase_seconds_bucket{le="0.3",phase="receive"} 1.0' in lines
    assert 'rl_plane_update_phase_seconds_count{phase="receive"} 2.0' in lines
    assert 'rl_plane_update_phase_seconds_sum{phase="gate"} 0.002' in lines
    assert "rl_plane_generation_first_token_seconds_count 1.0" in lines


def test_the_metrics_know_every_reason_that_closes_a_worker() -> None:
    assert set(CLOSED_REASONS) == set(get_args(Reason))


# ---- listeners ----


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_loopback_needs_no_key(host: str) -> None:
    if host == "::1" and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    with bind("rl_port", host, 0, None, False) as listener:
        assert url_of(listener).startswith("http://")


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_beyond_loopback_needs_a_key_or_insecure(host: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        bind("rl_port", host, 0, None, False)
    assert caught.value.facts["field"] == "host"
    assert "admin_key" in caught.value.facts["fix"]
    for key, insecure in (("k", False), (None, True)):
        with bind("http_port", "0.0.0.0", 0, key, insecure) as listener:
            assert url_of(listener).startswith("http://127.0.0.1:")


@pytest.mark.parametrize("field", ["rl_port", "http_port"])
def test_a_taken_port_is_named(field: str) -> None:
    with bind(field, "127.0.0.1", 0, None, False) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidRequest) as caught:
            bind(field, "127.0.0.1", port, None, False)
    assert caught.value.facts["field"] == field
    assert str(port) in caught.value.message


@pytest.mark.parametrize(
    ("host", "port", "key", "field"),
    [
        ("127.0.0.1", 70_000, None, "rl_port"),
        ("127.0.0.1", -1, None, "rl_port"),
        ("no such host.", 0, None, "host"),
        ("203.0.113.1", 0, "k", "rl_port"),
        ("127.0.0.1", 0, " k", "admin_key"),
    ],
)
def test_what_can_not_be_bound_is_named(host: str, port: int, key: str | None, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        bind("rl_port", host, port, key, False)
    assert caught.value.facts["field"] == field
    assert caught.value.facts["fix"]


def test_requests_by_the_names_that_their_callers_gave_them() -> None:
    ids = CallerIds()
    with ids.under(["mine", "made-1"], "made-1"), ids.under(["mine", "other"], "made-2"):
        assert ids.made_of(["mine"]) == ["made-1", "made-2"]
        assert ids.made_of(["other", "mine", "made-1"]) == ["made-2", "made-1"]
        assert ids.made_of(["mine-0", "made-1-3", "nobody", "nobody-1"]) == [
            "made-1-0",
            "made-2-0",
            "made-1-3",
            "nobody",
            "nobody-1",
        ]
    assert ids.made_of(["mine"]) == ["mine"], "they have ended"

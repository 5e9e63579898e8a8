"""A body of an OpenAI route becomes the requests for the engines, or an error that names the field."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from frontend.completions.native_bodies import (
    VLLM_UNSERVED,
    check_temperature,
    plan_sglang,
    plan_vllm,
    say_that_logprobs_are_raw,
)
from frontend.completions.openai_bodies import ChatBody, CompletionBody
from frontend.completions.plans import DEFAULT_CHAT_TOKENS, Plan
from frontend.completions.tokens import parse_tokenize
from frontend.completions.unserved_fields import UNSERVED
from rl_plane.errors import (
    InvalidRequest,
    PlaneError,
    Unsupported,
)
from rl_plane.protocol.generation import (
    MAX_PROMPT_TOP_LOGPROBS,
    MAX_PROMPT_TOPS,
    MAX_STOP_CHARS,
    MAX_STOPS,
    Rendering,
)
from rl_plane.protocol.worker_ops import Tokenize
from tests.support.openai_plans import chat, completion
from tests.support.sglang_calls import ROUTED_BODY


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
        "structured_output": None,
        "pooling": None,
        "truncate_prompt_tokens": None,
        "cache_salt": None,
        "skip_special_tokens": True,
        "logprobs": False,
        "top_logprobs": 0,
        "token_texts": False,
        "prompt_logprobs": False,
        "prompt_top_logprobs": 0,
        "prompt_token_texts": False,
        "prompt_text": False,
        "routed_experts": False,
        "continued": 0,
        "gather_s": 0.0,
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
def test_prompt_logprobs_can_be_asked_for_in_several_ways(body: dict[str, Any], asked: bool) -> None:
    assert [request.prompt_logprobs for request in completion(n=2, **body).requests] == [asked, asked]
    # A chat reports the prompt logprobs of its first choice.
    assert [request.prompt_logprobs for request in chat(n=2, **body).requests] == [asked, False]


@pytest.mark.parametrize(
    ("body", "count", "has_texts"),
    [
        ({"prompt_logprobs": 0}, 0, True),
        ({"prompt_logprobs": True}, 1, True),
        ({"prompt_logprobs": 100}, 100, True),
        ({"prompt_logprobs": 3, "return_tokens_as_token_ids": True}, 3, False),
        ({"return_prompt_logprobs": True}, 0, False),
    ],
)
def test_prompt_logprobs_says_how_many_likeliest_tokens_come_with_them(
    body: dict[str, Any], count: int, has_texts: bool
) -> None:
    for make, scored in ((completion, 2), (chat, 1)):
        requests = make(n=2, **body).requests
        assert [one.prompt_top_logprobs for one in requests] == [count] * scored + [0] * (2 - scored)
        assert [one.prompt_token_texts for one in requests] == [has_texts] * scored + [False] * (2 - scored)


@pytest.mark.parametrize(
    ("body", "scored", "has_text", "scores_only"),
    [
        ({"max_tokens": 0}, None, True, True),
        ({"max_tokens": 3, "logprobs": 2}, 2, True, False),
        ({"max_tokens": 0, "logprobs": 0}, 0, True, True),
        ({"max_tokens": 0, "logprobs": 2, "prompt_logprobs": 5}, 5, True, True),
        ({"return_token_ids": True, "logprobs": 1}, 1, False, False),
    ],
)
def test_an_echo_asks_for_the_scores_that_the_reply_has(
    body: dict[str, Any], scored: int | None, has_text: bool, scores_only: bool
) -> None:
    plan = completion(echo=True, **body)
    (request,) = plan.requests
    assert (request.prompt_logprobs, request.prompt_top_logprobs) == (scored is not None, scored or 0)
    assert (request.prompt_text, plan.scores_only, plan.echo) == (has_text, scores_only, True)
    assert request.max_tokens == max(1, body.get("max_tokens", 16))


def test_a_prompt_that_is_not_echoed_needs_a_token() -> None:
    with pytest.raises(InvalidRequest) as caught:
        completion(max_tokens=0, logprobs=1)
    assert caught.value.facts["field"] == "max_tokens"


def test_likeliest_tokens_of_all_prompts_are_bounded() -> None:
    prompts = [[7] * 1024] * 8
    completion(prompt=prompts, prompt_logprobs=128)
    with pytest.raises(InvalidRequest) as caught:
        completion(prompt=[*prompts, [7]], prompt_logprobs=128)
    assert caught.value.facts["field"] == "prompt_logprobs"
    assert str(MAX_PROMPT_TOPS) in caught.value.message
    with pytest.raises(InvalidRequest) as caught:
        completion(prompt=prompts, n=65, logprobs=2, echo=True)
    assert caught.value.facts["field"] == "logprobs"


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


def test_a_chat_passes_its_fields_to_the_template() -> None:
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
        for choice in ("auto", "none"):  # TRL says none, and reads the calls itself
            assert chat(tool_choice=choice, **given).requests[0].rendering == expected
        _, op = parse_tokenize({"messages": [{"role": "user", "content": "hi"}], **given})
        assert Tokenize.model_validate(op).rendering == expected
    # Tokens in bypass it.
    plan = chat(messages=[], prompt_token_ids=[3], tools=[TOOL])
    assert (plan.requests[0].prompt_token_ids, plan.requests[0].rendering) == ([3], Rendering())


def test_each_prompt_of_a_batch_has_requests_of_its_own() -> None:
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
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": MAX_PROMPT_TOP_LOGPROBS + 1}, "prompt_logprobs"),
        ({"prompt_logprobs": 2, "stream": True}, "prompt_logprobs"),
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
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tool_choice": {"type": "function", "function": {"name": "look"}}}, "tool_choice"),
        (
            {"tool_choice": "required", "tools": [{**TOOL, "function": {"name": "f", "parameters": [1]}}]},
            "tools.0.function.parameters",
        ),
        ({"tool_choice": "required", "tools": [TOOL], "response_format": {"type": "json_object"}}, "tools"),
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
        (chat, {"nvext": {"extra_fields": ["routed_experts"]}}, "nvext.extra_fields.0"),
        (completion, {"extra_fields": ["timing"]}, "extra_fields.0"),
        (chat, {"nvext": {"backend_instance_id": 0}}, "nvext.backend_instance_id"),
        (chat, {"echo": True}, "echo"),
        (completion, {"best_of": True}, "best_of"),
        (completion, {"tools": [TOOL]}, "tools"),
        (chat, {"messages": [{"role": "a", "content": "", "refusal": "no"}]}, "messages.0.refusal"),
        (completion, {"top_logprobs": 5}, "top_logprobs"),
        (
            chat,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content",
        ),
    ],
)
def test_a_known_field_that_is_not_served_is_a_501(
    plan: Callable[..., Plan], body: dict[str, Any], field: str
) -> None:
    with pytest.raises(Unsupported) as caught:
        plan(**body)
    assert caught.value.facts["field"] == field
    assert caught.value.facts["fix"]


@pytest.mark.parametrize("plan", [completion, chat])
def test_the_fields_of_extra_body_are_the_bodys_own(plan: Callable[..., Plan]) -> None:
    """verifiers' EvalClient sends prime-rl's as it is."""
    (request,) = plan(temperature=0.5, extra_body={"cache_salt": "0", "top_k": 5, "temperature": 1}).requests
    assert (request.cache_salt, request.top_k, request.temperature) == ("0", 5, 0.5)
    assert plan(extra_body=None) == plan()
    for wrong, field in (({"unheard_of": 1}, "unheard_of"), ({"extra_body": {}}, "extra_body"), (5, "extra_body")):
        with pytest.raises(InvalidRequest) as caught:
            plan(extra_body=wrong)
        assert caught.value.facts["field"] == field


def rollout(**sampling: Any) -> dict[str, Any]:
    """The body of verifiers' TrainClient for prime-rl, whose `extra_body` it unpacks into `sampling_params`."""
    theirs = {
        "top_k": -1,
        "min_p": 0.0,
        "return_token_ids": True,
        "cache_salt": "3",
        "temperature": 1.0,
        "top_p": 1.0,
    }
    made = {"logprobs": 1, "stop_token_ids": [9], "skip_special_tokens": False}
    return {"model": "m", "token_ids": [5, 6], "sampling_params": {**theirs, **sampling, **made}}


def test_a_rollout_of_prime_rl_has_its_salt_and_loses_what_is_no_sampling_parameter() -> None:
    more = {"reasoning_effort": "low", "lora_path": "a", "guided_json": {}, "return_hidden_states": True}
    plan = plan_vllm(rollout(**more), "id")
    (request,) = plan.requests
    assert (plan.model, request.prompt_token_ids, request.cache_salt) == ("m", [5, 6], "3")
    assert (request.stop_token_ids, request.logprobs, request.skip_special_tokens) == ([9], True, False)
    assert not plan.return_token_ids
    assert plan_vllm({**rollout(), "cache_salt": "body"}, "id").requests[0].cache_salt == "body"
    with pytest.raises(InvalidRequest) as caught:
        plan_vllm(rollout(cache_salt=3), "id")
    assert caught.value.facts["field"] == "sampling_params.cache_salt"


@pytest.mark.parametrize("field", sorted(VLLM_UNSERVED))
def test_a_sampling_parameter_of_vllms_that_is_not_served_is_refused_by_name(field: str) -> None:
    with pytest.raises(PlaneError) as caught:
        plan_vllm(rollout(**{field: {"some": "thing"}}), "id")
    assert caught.value.facts["field"] == f"sampling_params.{field}"


def test_a_body_that_sglangs_router_has_rewritten_means_the_base_unless_it_names_a_model() -> None:
    plan = plan_sglang(ROUTED_BODY, "id")
    assert (plan.model, plan.requests[0].prompt_token_ids, plan.logprobs) == (None, [5, 6], True)
    assert plan_sglang({**ROUTED_BODY, "model": "m"}, "id").model == "m"
    assert plan_sglang({**ROUTED_BODY, "model": "m", "lora_path": "a"}, "id").model == "a"


def test_logprobs_of_a_trainers_temperature_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    def sampled(temperature: float, more: dict[str, Any]) -> dict[str, Any]:
        return {**more, "sampling_params": {"temperature": temperature}}

    say_that_logprobs_are_raw.cache_clear()
    raw = {"raw_logprobs", None}
    for temperature in (0, 1):
        check_temperature(plan_vllm(rollout(temperature=temperature), "id"), raw)
        check_temperature(plan_sglang(sampled(temperature, ROUTED_BODY), "id"), raw)
    check_temperature(plan_sglang(sampled(0.7, {"input_ids": [5]}), "id"), raw)
    plans = plan_vllm(rollout(temperature=0.7), "id"), plan_sglang(sampled(0.7, ROUTED_BODY), "id")
    for plan in plans:
        check_temperature(plan, {"processed_logprobs"})
        check_temperature(plan, ())
    assert caplog.messages == []
    for plan in plans:
        say_that_logprobs_are_raw.cache_clear()
        for _ in range(2):
            check_temperature(plan, raw)
        (message,) = caplog.messages
        assert "--logprobs-mode processed_logprobs" in message
        caplog.clear()


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


@pytest.mark.parametrize(
    ("more", "asked"),
    [
        ({}, True),
        ({"return_tokens_as_token_ids": None}, True),
        ({"return_tokens_as_token_ids": False}, True),
        ({"return_tokens_as_token_ids": True}, False),
    ],
)
def test_tokens_beside_logprobs_are_texts_unless_ids_are_asked_for(more: dict[str, Any], asked: bool) -> None:
    assert completion(logprobs=1, **more).requests[0].token_texts == asked
    assert chat(logprobs=True, **more).requests[0].token_texts == asked
    assert not completion(return_token_ids=True, **more).requests[0].token_texts

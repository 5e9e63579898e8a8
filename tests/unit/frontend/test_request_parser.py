"""Whatever comes in at a generation route, it is a plan that a worker can read, or an error that names the field."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from pydantic import BaseModel

from frontend.completions.native_bodies import (
    VLLM_UNSERVED,
    SglangGenerateBody,
    SglangSampling,
    VllmGenerateBody,
    VllmSampling,
    plan_sglang,
    plan_vllm,
)
from frontend.completions.openai_bodies import (
    MAX_CHOICES,
    ChatBody,
    CompletionBody,
    NvExt,
    StreamOptions,
)
from frontend.completions.plans import Plan, plan_chat, plan_completion
from frontend.completions.unserved_fields import IGNORED, UNSERVED
from rl_plane.errors import InvalidRequest, PlaneError, Unsupported
from rl_plane.protocol.generation import GenerateRequest

TRIES = 5000
"""For each route: half a second, and each field with each kind of value."""
MESSAGES = [{"role": "user", "content": "hi"}]
VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    2,
    -1,
    1 << 31,
    1 << 63,
    -(1 << 80),
    0.0,
    0.5,
    -0.1,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "5",
    "é\x00",
    "x" * 3000,
    [],
    [5],
    [5, 6],
    [[5], [6, 7]],
    [[]],
    [None],
    ["a"],
    [5.0],
    [-1],
    {},
    {"5": 1.5},
    {"5": 200},
    {"-5": 1},
    {"role": "user"},
    {"type": "text"},
    MESSAGES,
    [{"role": "user", "content": [{"type": "image_url"}]}],
    [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
    [{"role": "a", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]}],
    [{"role": "a", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "["}}]}],
    [{"type": "function", "function": {"name": "f"}}],
    ["a", "b"],
    ["a", [5]],
    "auto",
    "required",
    {"tokenize": True},
    {"include_usage": True},
]


def names(model: type[BaseModel]) -> list[str]:
    """Every served field, and each fourth unserved one: bodies without errors must stay frequent."""
    return [*model.model_fields, *list(UNSERVED)[::4], "unheard_of"]


Route = tuple[Callable[[dict[str, Any]], Plan], list[str], dict[str, list[str]], dict[str, Any]]
ROUTES: dict[str, Route] = {
    "completions": (
        lambda body: plan_completion(body, "id"),
        names(CompletionBody),
        {"nvext": names(NvExt), "stream_options": names(StreamOptions)},
        {"prompt_token_ids": [5, 6], "stream": True},
    ),
    "chat": (
        lambda body: plan_chat(body, "id"),
        names(ChatBody),
        {"nvext": names(NvExt), "stream_options": names(StreamOptions)},
        {"messages": MESSAGES, "stream": True},
    ),
    "vllm": (
        lambda body: plan_vllm(body, "id"),
        names(VllmGenerateBody),
        {
            "sampling_params": names(VllmSampling),
            "stream_options": names(StreamOptions),
        },
        {"token_ids": [5, 6], "sampling_params": {}, "stream": True},
    ),
    "sglang": (
        lambda body: plan_sglang(body, "id"),
        names(SglangGenerateBody),
        {"sampling_params": names(SglangSampling)},
        {"input_ids": [5, 6]},
    ),
}


_SIMPLE = """
import json, msgspec
from dataclasses import fields
def told(defaults):
    return {name: one if isinstance(one, (bool, int, float, str, list)) else None for name, one in defaults.items()}
def of_model(model):
    return told({name: one.default for name, one in model.model_fields.items()})
def of_inner(model, field):
    inner, _ = model.model_fields[field].annotation.__args__
    return of_model(inner)
def of_struct(struct):
    fields = msgspec.structs.fields(struct)
    return told({one.name: one.default for one in fields if not one.name.startswith("_")})
"""
THEIRS = {
    "vllm": """
from vllm import SamplingParams
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
print(json.dumps({
    "completions": of_model(CompletionRequest), "chat": of_model(ChatCompletionRequest),
    "vllm": of_model(GenerateRequest), "vllm sampling_params": of_struct(SamplingParams),
    **{f"{name} stream_options": of_inner(model, "stream_options") for name, model in (
        ("completions", CompletionRequest), ("chat", ChatCompletionRequest), ("vllm", GenerateRequest))}}))
""",
    "sglang": """
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams
print(json.dumps({
    "completions": of_model(CompletionRequest), "chat": of_model(ChatCompletionRequest),
    "sglang": told({one.name: one.default for one in fields(GenerateReqInput)}),
    "sglang sampling_params": of_struct(SamplingParams),
    **{f"{name} stream_options": of_inner(model, "stream_options") for name, model in (
        ("completions", CompletionRequest), ("chat", ChatCompletionRequest))}}))
""",
}
"""Prints the fields that an engine's own server takes, by our routes, each with its default where that is simple."""
SERVED: dict[str, type[BaseModel]] = {
    "completions": CompletionBody,
    "chat": ChatBody,
    "vllm": VllmGenerateBody,
    "vllm sampling_params": VllmSampling,
    "sglang": SglangGenerateBody,
    "sglang sampling_params": SglangSampling,
    **{f"{route} stream_options": StreamOptions for route in ("completions", "chat", "vllm")},
}
OF_STATE = frozenset(
    {
        *("skip_clone", "output_text_buffer_length"),
        *("stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len", "is_normalized"),
        "ebnf_full_assistant",
    }
)
"""These sampling parameters are what the engine makes of a request, not what a caller sends."""


@pytest.mark.timeout(200)
@pytest.mark.parametrize("engine", [pytest.param(name, marks=pytest.mark.engines(name)) for name in THEIRS])
def test_each_field_of_an_engines_own_server_is_served_or_refused_by_name(engine: str) -> None:
    """The default of a field that is not served changes nothing."""
    run = [sys.executable, "-c", _SIMPLE + THEIRS[engine]]
    told = subprocess.run(run, capture_output=True, text=True, timeout=180, check=True)
    wrong = []
    for where, theirs in json.loads(told.stdout.splitlines()[-1]).items():
        route, _, inner = where.partition(" ")
        parse, _, _, least = ROUTES[route]
        for field in sorted(theirs.keys() - SERVED[where].model_fields - OF_STATE):
            # A field that is ignored is refused for its type alone.
            wrong_kind = (
                Unsupported if field not in IGNORED else Plan if IGNORED[field] is dict else InvalidRequest
            )
            for value, due in ((None, Plan), (theirs[field], Plan), ({"no": "such"}, wrong_kind)):
                said = {inner: {field: value}} if inner else {field: value}
                found = outcome(parse, {**least, **said})
                if not isinstance(found, due):
                    wrong.append(f"{where}: {field} {value!r}: {found}")
        if where == "vllm sampling_params":
            assert theirs.keys() >= VLLM_UNSERVED
    assert not wrong


def filled(source: random.Random, fields: list[str]) -> dict[str, Any]:
    return {source.choice(fields): source.choice(VALUES) for _ in range(source.choice((0, 1, 1, 1, 2, 6)))}


def outcome(parse: Callable[[dict[str, Any]], Plan], body: dict[str, Any]) -> Plan | PlaneError:
    try:
        return parse(body)
    except PlaneError as error:
        return error


@pytest.mark.parametrize("route", ROUTES)
def test_every_body_becomes_a_plan_or_an_error_that_names_its_field(route: str) -> None:
    parse, fields, nested, least = ROUTES[route]
    source, plans, errors = random.Random(route), 0, set()
    for _ in range(TRIES):
        body = {**(least if source.random() < 0.9 else {}), **filled(source, fields)}
        for name, inner in nested.items():
            if source.random() < 0.5:
                body[name] = filled(source, inner)
        kept = repr(body)
        found = outcome(parse, body)
        if isinstance(found, PlaneError):
            assert isinstance(found, (InvalidRequest, Unsupported)), (body, found)
            assert found.facts["field"], body
            assert found.facts["fix"], body
            assert json.dumps(found.to_wire(), allow_nan=False), body
            errors.add(str(found.facts["field"]).split(".")[0])
        else:
            plans += 1
            assert len({request.id for request in found.requests}) == len(found.requests) >= 1
            for request in found.requests:
                sent = msgpack.unpackb(msgpack.packb(request.model_dump(exclude_defaults=True)))
                assert GenerateRequest.model_validate(sent) == request, body
                given = (request.prompt_token_ids, request.prompt, request.messages)
                assert sum(one is not None for one in given) == 1, body
            assert len(found.requests) == found.n * (found.batch or 1) <= MAX_CHOICES
        assert repr(body) == kept
    assert plans > TRIES / 20
    assert errors > {*least}
    assert len(errors) > len(fields) / 2

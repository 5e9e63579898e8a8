"""The form of a text by the names of OpenAI, vLLM and SGLang becomes one form, or an error that names the field."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from frontend.completions.native_bodies import plan_sglang, plan_vllm
from frontend.completions.plans import Plan
from frontend.completions.rollout_record import body_of
from frontend.completions.structured_fields import MAX_TEXT_CHOICES
from rl_plane.errors import InvalidRequest, Unsupported
from rl_plane.protocol.structured_output import ANY_OBJECT, MAX_FORM_CHARS
from tests.support.openai_plans import chat, completion

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"enum": ["ä"]}}}
WRITTEN = '{"type": "object", "properties": {"b": {"type": "integer"}, "a": {"enum": ["ä"]}}}'
TAG = {"format": {"type": "const_string", "value": "x"}}
OLD_TAG = {"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a>"]}


def vllm(**sampling: Any) -> Plan:
    return plan_vllm({"token_ids": [5], "sampling_params": sampling}, "id")


def sglang(**sampling: Any) -> Plan:
    return plan_sglang({"input_ids": [5], "sampling_params": sampling}, "id")


OF_OPENAI: list[tuple[dict[str, Any], tuple[str, str], str]] = [
    ({"response_format": {"type": "json_object"}}, ("json_schema", ANY_OBJECT), "response_format"),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
            }
        },
        ("json_schema", WRITTEN),
        "response_format.json_schema.schema",
    ),
    (
        {"response_format": {"type": "structural_tag", **TAG}},
        ("structural_tag", json.dumps({"type": "structural_tag", **TAG})),
        "response_format",
    ),
    (
        {"response_format": {"type": "structural_tag", **OLD_TAG}},
        ("structural_tag", json.dumps({"type": "structural_tag", **OLD_TAG})),
        "response_format",
    ),
    ({"structured_outputs": {"json": SCHEMA}}, ("json_schema", WRITTEN), "structured_outputs.json"),
    ({"json_schema": WRITTEN}, ("json_schema", WRITTEN), "json_schema"),
    ({"regex": "a+"}, ("regex", "a+"), "regex"),
    ({"ebnf": "root ::= [a]"}, ("grammar", "root ::= [a]"), "ebnf"),
]
OF_VLLM: list[tuple[dict[str, Any], tuple[str, str], str]] = [
    ({"json": WRITTEN, "disable_any_whitespace": False}, ("json_schema", WRITTEN), "json"),
    ({"json_object": True}, ("json_schema", ANY_OBJECT), "json_object"),
    ({"regex": "a+"}, ("regex", "a+"), "regex"),
    ({"choice": ["ä", 'b"\\']}, ("grammar", 'root ::= "ä" | "b\\"\\\\"'), "choice"),
    ({"grammar": "root ::= [a]"}, ("grammar", "root ::= [a]"), "grammar"),
    ({"structural_tag": json.dumps(TAG)}, ("structural_tag", json.dumps(TAG)), "structural_tag"),
]
OF_SGLANG = ("json_schema", "regex", "ebnf", "structural_tag")


def check(plan: Plan, form: tuple[str, str], field: str) -> None:
    (request,) = plan.requests
    assert request.structured_output is not None
    assert (request.structured_output.kind, request.structured_output.text) == form
    assert plan.field_of("structured_output", 0) == field


@pytest.mark.parametrize(("body", "form", "field"), OF_OPENAI, ids=[field for *_, field in OF_OPENAI])
def test_openais_fields_become_the_form_of_the_request(
    body: dict[str, Any], form: tuple[str, str], field: str
) -> None:
    for route in (completion, chat):
        check(route(**body), form, field)


@pytest.mark.parametrize(("given", "form", "field"), OF_VLLM, ids=[field for *_, field in OF_VLLM])
def test_vllms_fields_become_the_form_of_the_request(
    given: dict[str, Any], form: tuple[str, str], field: str
) -> None:
    check(vllm(structured_outputs=given), form, f"sampling_params.structured_outputs.{field}")
    check(completion(structured_outputs=given), form, f"structured_outputs.{field}")


def test_sglangs_fields_become_the_form_of_the_request() -> None:
    texts = {"json_schema": WRITTEN, "regex": "a", "ebnf": "root ::= [a]", "structural_tag": json.dumps(TAG)}
    for name, text in texts.items():
        kind = {"ebnf": "grammar"}.get(name, name)
        check(sglang(**{name: text}), (kind, text), f"sampling_params.{name}")


def test_a_record_asks_for_the_same_form_again() -> None:
    for body, form, _ in OF_OPENAI:
        (request,) = completion(**body).requests
        again = completion(
            **{key: value for key, value in body_of(request, 1).items() if key == "structured_outputs"}
        )
        (repeated,) = again.requests
        assert repeated.structured_output is not None
        assert (repeated.structured_output.kind, repeated.structured_output.text) == form


@pytest.mark.parametrize(
    ("route", "body"),
    [
        (completion, {"response_format": {"type": "text"}, "structured_outputs": None, "regex": ""}),
        (chat, {"response_format": None}),
        (vllm, {"structured_outputs": None}),
        (sglang, dict.fromkeys(OF_SGLANG, "")),
        (sglang, dict.fromkeys(OF_SGLANG)),
    ],
)
def test_no_form_is_none(route: Callable[..., Plan], body: dict[str, Any]) -> None:
    (request,) = route(**body).requests
    assert request.structured_output is None


def deep(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"a": value}
    return value


BAD: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
        "response_format.json_schema.schema",
    ),
    ({"response_format": {"type": "json_object", "json_schema": {"schema": {}}}}, "response_format.json_schema"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.format"),
    ({"response_format": {"type": "text", **TAG}}, "response_format.format"),
    ({"response_format": {"type": "json_object", "more": 1}}, "response_format.more"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice.0"),
    ({"structured_outputs": {"choice": ["a"] * (MAX_TEXT_CHOICES + 1)}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a" * MAX_FORM_CHARS]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"json": "[1]"}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": {"pattern": "\0"}}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": {"properties": {"\0": {}}}}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": '{"pattern": "\\u0000"}'}}, "structured_outputs.json"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
    ({"structured_outputs": {"json": deep(100)}}, "structured_outputs.json"),
    ({"regex": "a", "ebnf": "root ::= [a]"}, "ebnf"),
    ({"regex": "a", "response_format": {"type": "json_object"}}, "regex"),
    ({"regex": "a\0"}, "regex"),
    ({"regex": "a" * (MAX_FORM_CHARS + 1)}, "regex"),
    ({"structural_tag": "no JSON"}, "structural_tag"),
]


@pytest.mark.parametrize(("body", "field"), BAD)
def test_a_bad_form_is_named(body: dict[str, Any], field: str) -> None:
    for route in (completion, chat):
        with pytest.raises(InvalidRequest) as caught:
            route(**body)
        assert (caught.value.facts["field"], bool(caught.value.facts["fix"])) == (field, True)


def test_options_of_how_a_form_is_written_are_refused_by_name() -> None:
    for option in ("disable_any_whitespace", "disable_additional_properties"):
        with pytest.raises(Unsupported) as caught:
            vllm(structured_outputs={"json": SCHEMA, option: True})
        assert caught.value.facts["field"] == f"sampling_params.structured_outputs.{option}"

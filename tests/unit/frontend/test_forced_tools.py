"""A forced tool call: the form of its text, and the calls that a reply has."""

from __future__ import annotations

import json
from typing import Any

import pytest

from frontend.completions.forced_tools import REQUIRED, ChosenFunction, ChosenTool, Forced, calls_of
from frontend.completions.openai_replies import Chunks, whole
from frontend.completions.plans import Plan
from frontend.completions.reply_choice import Choice
from rl_plane.errors import InvalidRequest
from rl_plane.protocol.generation import FinishReason, GenerateDelta
from tests.support.openai_plans import chat

PLACE = {
    "type": "object",
    "properties": {"place": {"$ref": "#/$defs/Place"}},
    "$defs": {"Place": {"type": "string"}},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "look", "parameters": PLACE}},
    {"type": "function", "function": {"name": "wait"}},
]
LOOK = ChosenTool(function=ChosenFunction(name="look"))
NAMED = {"type": "function", "function": {"name": "look"}}


def schema_of(plan: Plan) -> Any:
    (request,) = plan.requests
    assert request.structured_output is not None
    assert request.structured_output.kind == "json_schema"
    return json.loads(request.structured_output.text)


def test_a_named_function_gives_its_parameters_as_the_form() -> None:
    plan = chat(tools=TOOLS, tool_choice=NAMED)
    assert (schema_of(plan), plan.forced) == (PLACE, LOOK)
    assert plan.requests[0].rendering.tools == TOOLS


def test_required_calls_are_a_list_of_any_of_the_functions() -> None:
    plan = chat(tools=TOOLS, tool_choice=REQUIRED)
    schema = schema_of(plan)
    assert (schema["type"], schema["minItems"], plan.forced) == ("array", 1, REQUIRED)
    look, wait = schema["items"]["anyOf"]
    assert look["properties"]["name"] == {"enum": ["look"]}
    assert look["properties"]["parameters"] == {key: PLACE[key] for key in ("type", "properties")}
    assert schema["$defs"] == PLACE["$defs"], "references begin at the top"
    assert wait["properties"] == {"name": {"enum": ["wait"]}, "parameters": {"type": "object"}}


def test_definitions_that_differ_are_refused() -> None:
    other = {**PLACE, "$defs": {"Place": {"type": "integer"}}}
    tools = [*TOOLS, {"type": "function", "function": {"name": "go", "parameters": other}}]
    with pytest.raises(InvalidRequest, match="Place") as caught:
        chat(tools=tools, tool_choice=REQUIRED)
    assert caught.value.facts["field"] == "tools"
    assert chat(tools=tools, tool_choice=NAMED).forced == LOOK


def test_calls_that_are_not_forced_give_no_form() -> None:
    for choice in ("auto", "none", None):
        plan = chat(tools=TOOLS, tool_choice=choice)
        assert (plan.requests[0].structured_output, plan.forced) == (None, None)


@pytest.mark.parametrize(
    ("text", "forced", "calls"),
    [
        ('{"place": "ä"}', LOOK, [("look", '{"place": "ä"}')]),
        ("[1]", ChosenTool(function=ChosenFunction(name=REQUIRED)), [(REQUIRED, "[1]")]),
        (
            '[{"name": "wait", "parameters": {}}, {"name": "look", "parameters": {"place": "x"}}]',
            REQUIRED,
            [("wait", "{}"), ("look", '{"place": "x"}')],
        ),
        ('{"place": "', LOOK, None),
        ('[{"name": "wait", "parameters"', REQUIRED, None),
        ('{"name": "wait"}', REQUIRED, None),
        ("[1]", REQUIRED, None),
        ('[{"name": "wait"}]', REQUIRED, None),
        ("5", REQUIRED, None),
        ('{"a":' * 100_000, LOOK, None),
    ],
)
def test_calls_are_read_from_a_whole_text(text: str, forced: Forced, calls: list[tuple[str, str]] | None) -> None:
    found = calls_of(text, forced, "id")
    if found is None:
        assert calls is None
        return
    assert [(one["function"]["name"], one["function"]["arguments"]) for one in found] == calls
    assert [one["id"] for one in found] == [f"call-id-{number}" for number in range(len(found))]


def taken(plan: Plan, texts: list[str], end: FinishReason) -> tuple[Choice, list[dict[str, Any]]]:
    """The choice after these texts, and the chunks of a stream."""
    choice = Choice(0)
    chunks = Chunks(plan, [choice], "m", 1)
    made = []
    for number, text in enumerate(texts, 1):
        delta = GenerateDelta(token_ids=[5], text=text, finish_reason=end if number == len(texts) else None)
        choice.take(delta)
        made.append(chunks.of(choice, delta, 0)["choices"][0])
    return choice, made


@pytest.mark.parametrize(
    ("tool_choice", "texts", "reason"),
    [
        (NAMED, ['{"place"', ': "x"}'], "stop"),
        (REQUIRED, ['[{"name": "wait",', ' "parameters": {}}]'], "tool_calls"),
    ],
)
def test_a_reply_has_the_calls_in_place_of_the_text(tool_choice: Any, texts: list[str], reason: str) -> None:
    plan = chat(tools=TOOLS, tool_choice=tool_choice)
    choice, (first, last) = taken(plan, texts, "stop")
    (row,) = whole(plan, [choice], "m", 1)["choices"]
    calls = row["message"]["tool_calls"]
    assert (row["message"]["content"], row["finish_reason"], len(calls)) == ("", reason, 1)
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert last["delta"] == {"tool_calls": [{"index": 0, **calls[0]}]}
    assert (first["finish_reason"], last["finish_reason"]) == (None, reason)


def test_a_text_that_ends_within_a_call_stays_a_text() -> None:
    plan = chat(tools=TOOLS, tool_choice=NAMED)
    choice, (_, last) = taken(plan, ['{"place"', ': "'], "length")
    (row,) = whole(plan, [choice], "m", 1)["choices"]
    assert (row["message"], row["finish_reason"]) == ({"role": "assistant", "content": '{"place": "'}, "length")
    assert (last["delta"], last["finish_reason"]) == ({"content": '{"place": "'}, "length")

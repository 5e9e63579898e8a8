"""A `tool_choice` that forces calls. The text gets the form of such calls, and the reply has them as `tool_calls`.

| `tool_choice` | the text |
|---|---|
| a named function | the arguments, as JSON that fits the function's parameters |
| `required` | a list of one or more `{"name", "parameters"}`, as in vLLM |
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, TypeAdapter, ValidationError

from frontend.completions.messages import STRICT
from frontend.completions.structured_fields import Found
from rl_plane.errors import InvalidRequest
from rl_plane.protocol.validation import invalid_from_pydantic

REQUIRED: Literal["required"] = "required"
ANY_PARAMETERS: dict[str, Any] = {"type": "object"}
_WORDS: TypeAdapter[str | None] = TypeAdapter(Literal["auto", "none", "required"] | None)
DEFINITIONS = "$defs"
"""The part of a JSON schema to which references within it point."""


class ChosenFunction(BaseModel):
    model_config = STRICT

    name: str


class ChosenTool(BaseModel):
    """A function that the model must call."""

    model_config = STRICT

    type: Literal["function"] = "function"
    function: ChosenFunction


Forced = Literal["required"] | ChosenTool
"""A `tool_choice` that forces calls."""


def check_choice(value: Any) -> None:
    """Raises InvalidRequest for a `tool_choice` of a body that is none. It is apart from the body, because pydantic
    names the parts of a union in the field of its error."""
    try:
        if isinstance(value, dict):
            ChosenTool.model_validate(value)
        else:
            _WORDS.validate_python(value)
    except ValidationError as error:
        raise invalid_from_pydantic(error, "tool_choice") from error


def forced_form(forced: Forced, tools: Sequence[Mapping[str, Any]]) -> Found:
    """The form of a text that makes the forced calls. Raises InvalidRequest if there is no such tool."""
    parameters = {tool["function"]["name"]: _parameters(number, tool) for number, tool in enumerate(tools)}
    name = None if forced == REQUIRED else forced.function.name
    if not parameters or (name is not None and name not in parameters):
        wanted = "a function" if name is None else f"the function {name[:64]!r}"
        raise InvalidRequest(
            f"tool_choice forces a call of {wanted}, and tools has none",
            field="tool_choice",
            fix="add the function to tools, or send auto",
        )
    schema = _any_of(parameters) if name is None else parameters[name]
    return "tools", "json_schema", json.dumps(schema, ensure_ascii=False)


def _parameters(number: int, tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a function's arguments."""
    schema = tool["function"].get("parameters") or ANY_PARAMETERS
    if not isinstance(schema, dict) or not isinstance(schema.get(DEFINITIONS, {}), dict):
        raise InvalidRequest(
            f"the parameters of tools.{number} are no JSON schema",
            field=f"tools.{number}.function.parameters",
            fix="send an object",
        )
    return schema


def _any_of(parameters: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The schema of a list of calls. References begin at the top of a schema, so the definitions move there."""
    definitions: dict[str, Any] = {}
    calls = []
    for name, schema in parameters.items():
        for key, one in schema.get(DEFINITIONS, {}).items():
            if definitions.setdefault(key, one) != one:
                raise InvalidRequest(
                    f"two functions define {key[:64]!r} in their {DEFINITIONS}, each in another way",
                    field="tools",
                    fix="give the two definitions different names",
                )
        inner = {key: one for key, one in schema.items() if key != DEFINITIONS}
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"enum": [name]}, "parameters": inner},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    found: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    return {**found, DEFINITIONS: definitions} if definitions else found


def calls_of(text: str, forced: Forced, reply_id: str) -> list[dict[str, Any]] | None:
    """The calls of a whole text. None: the text has ended before they were complete.

    Args:
        text: the text of a choice.
        forced: what the caller's `tool_choice` was.
        reply_id: an id of the choice, for the ids of its calls.
    """
    try:
        value = json.loads(text)
        if forced == REQUIRED:
            made = [(one["name"], one["parameters"]) for one in value]
        else:
            made = [(forced.function.name, value)]
        written = [(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in made]
    except (ValueError, TypeError, KeyError, RecursionError):  # RecursionError: a thousand levels
        return None
    return [
        {
            "id": f"call-{reply_id}-{number}",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        for number, (name, arguments) in enumerate(written)
    ]

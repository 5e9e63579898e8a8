"""The fields of request bodies that give the form of a choice's text, and how they become a `StructuredOutput`.

| name | whose |
|---|---|
| `response_format` | OpenAI's |
| `structured_outputs` | vLLM's |
| `json_schema`, `regex`, `ebnf`, `structural_tag` | SGLang's |
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError

from frontend.completions.messages import STRICT
from rl_plane.errors import InvalidRequest
from rl_plane.protocol.structured_output import (
    ANY_OBJECT,
    MAX_FORM_CHARS,
    FormKind,
    StructuredOutput,
    grammar_of_choices,
)

MAX_TEXT_CHOICES = 1024
"""The number of texts of `structured_outputs.choice`."""

FormText = Annotated[str, Field(max_length=MAX_FORM_CHARS)]
Found = tuple[str, FormKind, str]
"""The caller's name of a field, and the form that it gives: its kind and its text."""


class NamedSchema(BaseModel):
    """The `json_schema` of a `response_format`."""

    model_config = STRICT

    of_text: dict[str, Any] = Field(alias="schema")
    """The JSON schema. Properties come in the order in which it names them."""
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    """Without effect: the text always fits the schema."""


class ResponseFormat(BaseModel):
    """OpenAI's `response_format`, and the structural tags that vLLM and SGLang take in its place."""

    model_config = STRICT

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: NamedSchema | None = None
    format: dict[str, Any] | None = None
    """A structural tag has it."""
    structures: list[dict[str, Any]] | None = None
    """A structural tag in its older form has it, and `triggers`."""
    triggers: list[str] | None = None

    def form(self, field: str) -> Iterator[Found]:
        """`field`: the caller's name for this object."""
        tag = self.model_dump(include={"format", "structures", "triggers"}, exclude_none=True)
        given = {**tag, **({} if self.json_schema is None else {"json_schema": ...})}
        wanted = {"json_schema": {"json_schema"}, "structural_tag": set(tag) or {"format"}}.get(self.type, set())
        for name in sorted(wanted ^ set(given)):
            raise InvalidRequest(
                f"{field}.type is {self.type}, and {name} is {'missing' if name in wanted else 'no part of that'}",
                field=f"{field}.{name}",
                fix=f"{'add it' if name in wanted else 'leave it out'}, or send another type",
            )
        if self.type == "json_object":
            yield field, "json_schema", ANY_OBJECT
        elif self.json_schema is not None:
            yield f"{field}.json_schema.schema", "json_schema", _written(self.json_schema.of_text)
        elif tag:
            yield field, "structural_tag", _written({"type": self.type, **tag})


class StructuredOutputs(BaseModel):
    """vLLM's `structured_outputs`. Exactly one field is set."""

    model_config = STRICT

    of_json: dict[str, Any] | FormText | None = Field(None, alias="json")
    """A JSON schema, or its JSON."""
    regex: FormText | None = None
    choice: list[Annotated[str, Field(min_length=1)]] | None = Field(
        None, min_length=1, max_length=MAX_TEXT_CHOICES
    )
    """The texts that the choice may be."""
    grammar: FormText | None = None
    """In xgrammar's EBNF."""
    json_object: bool | None = None
    """true: any JSON object."""
    structural_tag: FormText | None = None

    def form(self, field: str) -> Iterator[Found]:
        """`field`: the caller's name for this object. InvalidRequest: it gives no form."""
        found = list(self._forms(field))
        if not found:
            raise InvalidRequest(
                f"{field} gives no form", field=field, fix="set one of json, regex, choice, grammar, json_object"
            )
        yield from found

    def _forms(self, field: str) -> Iterator[Found]:
        if self.of_json is not None:
            schema = self.of_json if isinstance(self.of_json, str) else _written(self.of_json)
            yield f"{field}.json", "json_schema", schema
        if self.regex is not None:
            yield f"{field}.regex", "regex", self.regex
        if self.choice is not None:
            yield f"{field}.choice", "grammar", grammar_of_choices(self.choice)
        if self.grammar is not None:
            yield f"{field}.grammar", "grammar", self.grammar
        if self.json_object:
            yield f"{field}.json_object", "json_schema", ANY_OBJECT
        if self.structural_tag is not None:
            yield f"{field}.structural_tag", "structural_tag", self.structural_tag


_SGLANG_KINDS: dict[str, FormKind] = {
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf": "grammar",
    "structural_tag": "structural_tag",
}


class SglangForms(BaseModel):
    """SGLang's names. An empty text means none, as in SGLang."""

    model_config = STRICT

    json_schema: FormText | None = None
    """The JSON of a JSON schema."""
    regex: FormText | None = None
    ebnf: FormText | None = None
    """A grammar in xgrammar's EBNF."""
    structural_tag: FormText | None = None
    """The JSON of xgrammar's structural tags."""

    def forms(self, prefix: str = "") -> Iterator[Found]:
        """`prefix`: the caller's names of the objects around these fields, each with a dot."""
        for name, kind in _SGLANG_KINDS.items():
            if text := getattr(self, name):
                yield prefix + name, kind, text


def in_structured_outputs(form: StructuredOutput) -> dict[str, str]:
    """The `structured_outputs` of a body that gives this form."""
    return {"json" if form.kind == "json_schema" else form.kind: form.text}


def only_form(found: Iterable[Found]) -> tuple[StructuredOutput | None, str]:
    """The form that a request gives, and the caller's name for it. InvalidRequest: there are several, or it is none
    that an engine could take."""
    forms = list(found)
    if not forms:
        return None, "structured_output"
    if len(forms) > 1:
        raise InvalidRequest(
            f"{forms[0][0]} and {forms[1][0]} both give the form of the text",
            field=forms[1][0],
            fix="send one of the two",
        )
    field, kind, text = forms[0]
    try:
        return StructuredOutput(kind=kind, text=text), field
    except ValidationError as error:
        why = error.errors(include_url=False, include_input=False)[0]["msg"].removeprefix("Value error, ")
        raise InvalidRequest(f"{field} is no {kind}: {why}", field=field, fix="correct it") from error


def _written(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False)

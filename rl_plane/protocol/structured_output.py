"""The form that the text of a choice must have: a JSON schema, a regular expression or a grammar.

An engine compiles the form. At each place it allows only tokens that continue a text of this form, and an end token
only where the text is complete.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rl_plane.protocol.strict_json import load_json_object

FormKind = Literal["json_schema", "regex", "grammar", "structural_tag"]
"""`json_schema`: JSON that fits a JSON schema. `regex`: a regular expression that matches the whole text. `grammar`: a
context-free grammar in xgrammar's EBNF, whose first rule is `root`. `structural_tag`: xgrammar's structural tags, which
give a form to marked parts of a text."""

MAX_FORM_CHARS = 1 << 16
"""An engine compiles the form before the first token. Schemas of tools have a few thousand characters."""
ANY_OBJECT = '{"type": "object"}'
"""The schema of any JSON object."""


class StructuredOutput(BaseModel):
    """The form of one choice's text."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: FormKind
    text: str = Field(min_length=1, max_length=MAX_FORM_CHARS)
    """The form itself. For `json_schema` and `structural_tag` it is a JSON object."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        # xgrammar's parsers end the process at a NUL.
        if "\0" in self.text:
            raise ValueError("the form has a NUL character")
        if self.kind in ("json_schema", "structural_tag") and _has_nul(load_json_object(self.text.encode())):
            raise ValueError("a string in the form has a NUL character")
        return self


def grammar_of_choices(choices: Iterable[str]) -> str:
    """The grammar of exactly these texts."""
    return "root ::= " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


def _has_nul(value: Any) -> bool:
    """Whether a string in a JSON value, keys included, has a NUL."""
    if isinstance(value, str):
        return "\0" in value
    if isinstance(value, dict):
        return any(_has_nul(one) for pair in value.items() for one in pair)
    return isinstance(value, list) and any(map(_has_nul, value))

"""What a query and a body say together."""

from __future__ import annotations

import json
import typing
from typing import Any

from pydantic import BaseModel

from rl_plane.errors import InvalidRequest


def list_fields(model: type[BaseModel]) -> frozenset[str]:
    """Fields that a query may give as `a,b`."""
    found = set()
    for name, field in model.model_fields.items():
        options = (field.annotation, *typing.get_args(field.annotation))
        if any(typing.get_origin(option) is list for option in options):
            found.add(name)
    return frozenset(found)


def merge_query(query: list[tuple[str, str]], body: dict[str, Any], lists: frozenset[str]) -> dict[str, Any]:
    """Query and body in one; a key that both give must mean the same."""
    given: dict[str, Any] = {}
    for key, text in query:
        if key in lists:
            given.setdefault(key, []).extend(part for part in text.split(",") if part)
        elif given.setdefault(key, text) != text:
            raise InvalidRequest(f"the query gives {key} twice", field=key, fix="give it once")
    for key, value in given.items():
        if key in body and not _same(body[key], value):
            raise InvalidRequest(
                f"the query and the body differ in {key}", field=key, fix="give it in one of the two"
            )
    return {**given, **body}


def _same(in_body: Any, in_query: str | list[str]) -> bool:
    if isinstance(in_query, list):
        return bool(in_body == in_query or in_body == ",".join(in_query))
    return bool(in_body == in_query or json.dumps(in_body) == in_query)

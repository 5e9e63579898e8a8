"""The documents behind /docs: our handlers parse bodies themselves, for speed, so they are described here."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

MAX_QUERY_ITEMS = 100
"""A list that may be longer goes in a body: a request's head ends at 64 KiB."""

_REFS = "#/components/schemas/{model}"


def base_schema(app: FastAPI, with_key: bool) -> dict[str, Any]:
    """FastAPI's own, and the key."""
    schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schema.setdefault("components", {}).setdefault("schemas", {})
    if with_key:
        schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        schema["security"] = [{"key": []}]
    return schema


def add_model(schema: dict[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    """Puts the model and what it refers to among the components; returns its own schema. ValueError: one of these
    names stands for something else already, whose routes would be described by the wrong body."""
    own = model.model_json_schema(ref_template=_REFS)
    schemas = schema["components"]["schemas"]
    for name, one in {**own.pop("$defs", {}), model.__name__: own}.items():
        if _without_nulls(schemas.setdefault(name, one)) != _without_nulls(one):
            raise ValueError(f"two models are called {name}: give one of them another name")
    return own


def _without_nulls(schema: Any) -> Any:
    """FastAPI leaves out a default of null."""
    if isinstance(schema, dict):
        return {key: _without_nulls(one) for key, one in schema.items() if not (key == "default" and one is None)}
    return [_without_nulls(one) for one in schema] if isinstance(schema, list) else schema


def add_body(operation: dict[str, Any], model: type[BaseModel], required: bool) -> None:
    reference = {"$ref": _REFS.format(model=model.__name__)}
    operation["requestBody"] = {"content": {"application/json": {"schema": reference}}, "required": required}


class ErrorFacts(BaseModel):
    """Facts of the error stand beside these."""

    code: str
    message: str
    field: str | None = None
    fix: str | None = None


class ErrorReply(BaseModel):
    status: Literal["error"]
    error: ErrorFacts
    workers: list[dict[str, Any]] | None = None
    epoch: int | None = None
    fingerprint: str | None = None
    elapsed_s: float


ERRORS = {
    400: "The request is wrong; `field` and `fix` say where. Nobody was touched.",
    401: "No key, or a wrong one.",
    404: "No such worker or component.",
    409: "The fleet is not the one named, or the work was undone; each worker's row says more.",
    413: "The body is over its limit.",
    501: "This engine lacks it.",
    503: "No worker, or locked by another update; see Retry-After.",
    504: "A bound ran out before the work began.",
}


def error_responses(schema: dict[str, Any]) -> dict[str, Any]:
    """Status → response, for routes whose own definition says nothing of errors."""
    add_model(schema, ErrorReply)
    content = {"application/json": {"schema": {"$ref": _REFS.format(model=ErrorReply.__name__)}}}
    return {str(status): {"description": text, "content": content} for status, text in ERRORS.items()}


def parameter(name: str, where: str, schema: dict[str, Any], required: bool = False) -> dict[str, Any]:
    return {"name": name, "in": where, "required": required, "schema": schema}


def fits_query(schema: dict[str, Any]) -> bool:
    """Can a query carry it?"""
    text = json.dumps(schema)
    longest = max((int(one) for one in re.findall(r'"maxItems": (\d+)', text)), default=0)
    return longest <= MAX_QUERY_ITEMS and not any(word in text for word in ("$ref", '"object"'))

"""The documents behind /docs: our handlers parse bodies themselves, for speed, so they are described here."""

from __future__ import annotations

import json
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

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
    """Puts the model and what it refers to among the components; returns its own schema."""
    own = model.model_json_schema(ref_template=_REFS)
    schemas = schema["components"]["schemas"]
    schemas.update(own.pop("$defs", {}))
    schemas[model.__name__] = own
    return own


def add_body(operation: dict[str, Any], model: type[BaseModel], required: bool) -> None:
    reference = {"$ref": _REFS.format(model=model.__name__)}
    operation["requestBody"] = {"content": {"application/json": {"schema": reference}}, "required": required}


def parameter(name: str, where: str, schema: dict[str, Any], required: bool = False) -> dict[str, Any]:
    return {"name": name, "in": where, "required": required, "schema": schema}


def fits_query(schema: dict[str, Any]) -> bool:
    """Can a query carry it?"""
    return not any(word in json.dumps(schema) for word in ("$ref", '"object"'))

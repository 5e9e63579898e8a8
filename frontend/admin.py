"""The facade `/v1/rl/*`: one route per op of the fleet, derived from its table."""

from __future__ import annotations

import json
import typing
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from pydantic import BaseModel
from starlette.responses import Response

from frontend.calls import FleetCalls
from frontend.events import FleetEvents
from frontend.http import json_response, make_app, read_json
from frontend.openapi import add_body, add_model, base_schema, fits_query, parameter
from frontend.streaming import EventStream
from rl_plane.errors import InvalidRequest
from rl_plane.fleet_ops import FLEET_OPS, FleetOp, FleetReply
from rl_plane.wire import MAX_ID_CHARS

PREFIX = "/v1/rl/"
HEALTH = PREFIX + "health"
EVENTS = PREFIX + "events"


class ErrorFacts(BaseModel):
    """Facts of the error stand beside these."""

    code: str
    message: str
    field: str | None = None
    fix: str | None = None


class ErrorReply(BaseModel):
    status: typing.Literal["error"]
    error: ErrorFacts
    workers: list[dict[str, Any]] | None = None
    epoch: int | None = None
    fingerprint: str | None = None
    elapsed_s: float


_ERRORS = {
    400: "The request is wrong; `field` and `fix` say where. Nobody was touched.",
    401: "No key, or a wrong one.",
    404: "No such worker or component.",
    409: "The fleet is not the one named, or the work was undone; each worker's row says more.",
    413: "The body is over its limit.",
    501: "This engine lacks it.",
    503: "No worker, or locked by another update; see Retry-After.",
    504: "A bound ran out before the work began.",
}


EVENTS_DOC = """Server-sent events with `id` (rising), `event` and `data` (JSON), of the frontend's own component:

- `member`: `{change: joined | left | reconnected | restarted, instance_id, incarnation, epoch}`
- `update`: `{change: began | prepared | committed | finished | aborted, update_id, label, version, who, error?,
  excluded?, state?}`; `committed` once it is decided, `finished` once each worker's outcome is known. `version` is what
  the update made, of the base or of an adapter; `committed` also has `state`: `{version, adapters}`, what is served now
- `admission`: `{instance_id, incarnation, open, reasons, paused, version, sequence, adapters}`, when one of them has
  changed
- `end`: `{reason: slow | stopping}`, the last one: connect again

Nothing is told again: read `state` once the first bytes have come, then follow. A comment comes every 15 s.
"""


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


def idempotency_key(request: Request) -> str:
    key = request.headers.get("idempotency-key", "")
    if len(key) > MAX_ID_CHARS or not key.isprintable():
        raise InvalidRequest(
            f"Idempotency-Key must be at most {MAX_ID_CHARS} printable characters",
            field="Idempotency-Key",
            fix="send a shorter one, such as a UUID",
        )
    return key


def _handler(op: FleetOp, calls: FleetCalls) -> Callable[[Request], Awaitable[Response]]:
    lists = list_fields(op.request)

    async def handle(request: Request) -> Response:
        body = merge_query(request.query_params.multi_items(), await read_json(request), lists)
        instance_id = request.path_params.get("id")
        if instance_id and body.setdefault("workers", [instance_id]) not in (instance_id, [instance_id]):
            raise InvalidRequest(
                "the path and the body name different workers", field="workers", fix="leave it out of the body"
            )
        return json_response(await calls.run(op.name, body, idempotency_key(request)))

    return handle


async def _health(request: Request) -> Response:
    return json_response({"status": "ok"})


def make_admin_app(calls: FleetCalls, key: str | None, metrics: Callable[[], str], events: FleetEvents) -> FastAPI:
    app = make_app("rl_plane: the fleet", key, frozenset({HEALTH}))
    app.add_api_route(HEALTH, _health, methods=["GET"], summary="The frontend runs.", response_model=None)
    for op in FLEET_OPS.values():
        app.add_api_route(
            PREFIX + op.path,
            _handler(op, calls),
            methods=[op.method],
            name=op.name,
            summary=op.doc,
            operation_id=op.name,
            response_model=None,
            responses={
                200: {"model": FleetReply},
                **{status: {"model": ErrorReply, "description": text} for status, text in _ERRORS.items()},
            },
        )

    async def follow(request: Request) -> Response:
        for name in request.query_params:
            raise InvalidRequest(f"unknown field {name!r}", field=name, fix="leave it out")
        return EventStream(events.listen(), framed=True)

    app.add_api_route(
        EVENTS,
        follow,
        methods=["GET"],
        name="events",
        summary="What happens to the fleet, as it happens.",
        description=EVENTS_DOC,
        operation_id="events",
        response_model=None,
        responses={
            200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}},
            **{status: {"model": ErrorReply, "description": _ERRORS[status]} for status in (401, 503)},
        },
    )

    async def show_metrics(request: Request) -> Response:
        return Response(metrics(), media_type="text/plain; version=0.0.4")

    app.add_api_route("/metrics", show_metrics, methods=["GET"], summary="For Prometheus.", response_model=None)
    app.openapi = lambda: _openapi(app, key is not None)  # type: ignore[method-assign]
    return app


def _openapi(app: FastAPI, with_key: bool) -> dict[str, Any]:
    if app.openapi_schema is None:
        schema = base_schema(app, with_key)
        schema["paths"][HEALTH]["get"]["security"] = []
        for op in FLEET_OPS.values():
            _describe(schema, op)
        app.openapi_schema = schema
    return app.openapi_schema


def _describe(schema: dict[str, Any], op: FleetOp) -> None:
    model = add_model(schema, op.request)
    operation = schema["paths"][PREFIX + op.path][op.method.lower()]
    parameters = [
        parameter(name, "query", inner) for name, inner in model["properties"].items() if fits_query(inner)
    ]
    if "{id}" in op.path:
        parameters.append(parameter("id", "path", {"type": "string"}, required=True))
    if op.method == "POST":
        parameters.append(parameter("Idempotency-Key", "header", {"type": "string", "maxLength": MAX_ID_CHARS}))
        # What an op requires may come by the query too, so a body never is required.
        add_body(operation, op.request, required=False)
    operation["parameters"] = parameters

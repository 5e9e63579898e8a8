"""The facade `/v1/rl/*`: one route per op of the fleet, derived from its table."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from frontend.completions.completion_routes import HEALTH as ROOT_HEALTH
from frontend.completions.completion_routes import add_generation_routes, describe_generation
from frontend.completions.tokens import Tokens
from frontend.dialects import DialectPlane, mount_dialects
from frontend.dialects.dialect_routes import AllFields, Ask, Handler, add_route, describe_routes, has_route
from frontend.dialects.dynamo import with_discovery
from frontend.facade.calls import FleetCalls
from frontend.facade.events import FleetEvents
from frontend.server.event_stream import EventStream
from frontend.server.http import error_body, idempotency_key, json_response, make_app, read_json
from frontend.server.openapi import (
    ERRORS,
    ErrorReply,
    add_body,
    add_model,
    base_schema,
    error_responses,
    fits_query,
    parameter,
)
from frontend.server.query import list_fields, merge_query
from rl_plane.errors import InvalidRequest
from rl_plane.protocol.envelope import MAX_ID_CHARS
from rl_plane.protocol.fleet_ops import FLEET_OPS, FleetOp, FleetReply

PREFIX = "/v1/rl/"
HEALTH = PREFIX + "health"
EVENTS = PREFIX + "events"


@dataclass(frozen=True)
class Spoken:
    """What the facade's listener has for trainers' own clients."""

    dialects: tuple[str, ...]
    plane: DialectPlane
    tokens: Tokens


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


def _handler(
    op: FleetOp, calls: FleetCalls, discovery: DialectPlane | None = None
) -> Callable[[Request], Awaitable[Response]]:
    """`discovery`: tell what Dynamo's clients look for too."""
    lists = list_fields(op.request)

    async def handle(request: Request) -> Response:
        body = merge_query(request.query_params.multi_items(), await read_json(request), lists)
        instance_id = request.path_params.get("id")
        if instance_id and body.setdefault("workers", [instance_id]) not in (instance_id, [instance_id]):
            raise InvalidRequest(
                "the path and the body name different workers", field="workers", fix="leave it out of the body"
            )
        reply = await calls.run(op.name, body, idempotency_key(request))
        if discovery is not None and "components" not in reply:
            reply = with_discovery(reply, discovery, str(request.base_url).rstrip("/"))
        return json_response(reply)

    return handle


def _unclaimed(op: FleetOp, calls: FleetCalls) -> Handler:
    """The op, where no dialect has claimed the request."""
    lists = list_fields(op.request)

    async def handle(ask: Ask) -> Any:
        return await calls.run(op.name, merge_query(ask.query, ask.body, lists), ask.request_id)

    return handle


async def _health(request: Request) -> Response:
    return json_response({"status": "ok"})


def make_admin_app(
    calls: FleetCalls,
    key: str | None,
    metrics: Callable[[], str],
    events: FleetEvents,
    spoken: Spoken | None = None,
) -> FastAPI:
    """`spoken`: the dialects. Their clients take this listener for a whole engine, so it generates too."""
    app = make_app("rl_plane: the fleet", key, frozenset({HEALTH, ROOT_HEALTH} if spoken else {HEALTH}))
    app.add_api_route(HEALTH, _health, methods=["GET"], summary="The frontend runs.", response_model=None)
    if spoken is not None:
        add_generation_routes(app, spoken.plane.generation, spoken.tokens, as_engine=True)
        mount_dialects(app, spoken.dialects, spoken.plane)
    for op in FLEET_OPS.values():
        if has_route(app, op.method, PREFIX + op.path):
            handle = _unclaimed(op, calls)
            add_route(app, [op.method], PREFIX + op.path, handle, summary=op.doc, fields=AllFields)
            app.state.shapes[PREFIX + op.path] = error_body
            continue
        app.add_api_route(
            PREFIX + op.path,
            _handler(op, calls, spoken.plane if spoken is not None and op.name == "workers" else None),
            methods=[op.method],
            name=op.name,
            summary=op.doc,
            operation_id=op.name,
            response_model=None,
            responses={
                200: {"model": FleetReply},
                **{status: {"model": ErrorReply, "description": text} for status, text in ERRORS.items()},
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
            **{status: {"model": ErrorReply, "description": ERRORS[status]} for status in (401, 503)},
        },
    )

    async def show_metrics(request: Request) -> Response:
        return Response(metrics(), media_type="text/plain; version=0.0.4")

    app.add_api_route("/metrics", show_metrics, methods=["GET"], summary="For Prometheus.", response_model=None)
    app.openapi = lambda: _openapi(app, key is not None, spoken is not None)  # type: ignore[method-assign]
    return app


def _openapi(app: FastAPI, with_key: bool, speaks: bool) -> dict[str, Any]:
    if app.openapi_schema is None:
        schema = base_schema(app, with_key)
        schema["paths"][HEALTH]["get"]["security"] = []
        if speaks:
            describe_generation(schema)
            describe_routes(app, schema, error_responses(schema))
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
        of_dialects = operation.get("requestBody")
        add_body(operation, op.request, required=False)
        if of_dialects is not None:
            content = operation["requestBody"]["content"]["application/json"]
            content["schema"] = {
                "anyOf": [content["schema"], of_dialects["content"]["application/json"]["schema"]]
            }
    operation["parameters"] = parameters

"""The routes of one listener, and the OpenAPI document that follows from them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any, Literal

from pydantic import BaseModel, TypeAdapter
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from frontend.server.guard import CALLER, Guard, refuse_browser
from frontend.server.listener_keys import ANYBODY, Keys
from frontend.server.replies import ErrorShape, MethodNotAllowed, error_body, to_json
from rl_plane._util import tracing
from rl_plane.errors import InvalidRequest, NotFound, PermissionDenied, PlaneError
from rl_plane.fleet.calling_process import CLIENT_HEADER, caller_over_http
from rl_plane.fleet.fleet_call import ASKED_BY, CALLED_FROM
from rl_plane.protocol.envelope import MAX_ID_CHARS
from rl_plane.protocol.http_keys import Caller, Role

DOCS = "/docs"
OPENAPI = "/openapi.json"
DOCS_POLICY = "; ".join(
    (
        "default-src 'none'",
        "style-src 'unsafe-inline'",
        "script-src 'unsafe-inline'",
        "connect-src 'self'",
        "frame-ancestors 'none'",
    )
)
"""The page loads nothing from elsewhere, and no other page may show it in a frame."""
MAX_QUERY_ITEMS = 100
"""A longer list goes into a body: a request's head ends at 64 KiB."""
ANY_KEY: tuple[Role, ...] = ("read", "generate")
"""The roles for what every client needs to know before it begins, such as the model's name."""
_REFS = "#/components/schemas/{model}"

Method = Literal["GET", "POST"]
Endpoint = Callable[[Request], Awaitable[Response]]


class ErrorFacts(BaseModel):
    """The error; its other facts stand beside these fields."""

    code: str
    message: str
    field: str | None = None
    fix: str | None = None


class ErrorReply(BaseModel):
    """The reply to a call that failed."""

    status: Literal["error"]
    error: ErrorFacts
    workers: list[dict[str, Any]] | None = None
    epoch: int | None = None
    fingerprint: str | None = None
    elapsed_s: float


ERRORS = {
    400: "The request is wrong; `field` and `fix` say where. Nothing was changed.",
    401: "The key is missing or wrong.",
    403: "The key has another role.",
    404: "There is no such worker, model or component.",
    409: "The fleet is not the one named, or the work was undone; each worker's row says more.",
    413: "The body is over its limit.",
    501: "The engine cannot do this.",
    503: "There is no worker, or another update holds the lock; see Retry-After.",
    504: "A bound ran out before the work began.",
}
ALL_ERRORS = tuple(ERRORS)


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One route, and what the document says about it."""

    method: Method
    path: str
    endpoint: Endpoint
    name: str
    """The `operationId`."""
    summary: str
    tags: tuple[str, ...]
    description: str = ""
    bodies: tuple[type[BaseModel], ...] = ()
    """The models of the body: the route reads any one of them."""
    in_query: bool = False
    """The query may give the fields of the body too."""
    idempotent: bool = False
    """The route reads `Idempotency-Key`."""
    replies: tuple[type[object], ...] = ()
    """The types of the reply, a model or a TypedDict: any one of them. Empty: JSON that no type describes."""
    media_type: str = "application/json"
    errors: tuple[int, ...] = ALL_ERRORS
    needs_key: bool = True
    roles: tuple[Role, ...] = ()
    """The keys that may call the route: one of these roles suffices. Empty: `read` for GET, else `steer`."""
    shape: ErrorShape | None = None
    """The shape of the route's errors. None: the listener's."""

    @property
    def allowed(self) -> tuple[Role, ...]:
        return self.roles or (("read",) if self.method == "GET" else ("steer",))


@dataclass
class Api:
    """The routes of one listener. `app` serves them; routes may be added until the first request."""

    title: str
    keys: Keys = field(default_factory=Keys)
    hosts: tuple[str, ...] = ()
    """Names by which clients without a key may call this machine."""
    shape: ErrorShape = error_body
    _operations: list[Operation] = field(default_factory=list)
    _shapes: dict[str, ErrorShape] = field(default_factory=dict)
    _open_paths: set[str] = field(default_factory=lambda: {DOCS, OPENAPI})
    _document: bytes | None = None

    def __post_init__(self) -> None:
        self._routes = [
            Route(DOCS, self._show_docs, methods=["GET"]),
            Route(OPENAPI, self._show_document, methods=["GET"]),
        ]

    def add(self, operation: Operation) -> None:
        self._operations.append(operation)
        self._routes.append(Route(operation.path, _guarded(operation), methods=[operation.method]))
        if operation.shape is not None:
            self._shapes[operation.path] = operation.shape
        if not operation.needs_key:
            self._open_paths.add(operation.path)

    def add_file(self, path: str, content: bytes, media_type: str, headers: Mapping[str, str]) -> None:
        """Serves a file of the product to everybody. It is no part of the OpenAPI document."""

        async def show(request: Request) -> Response:
            return Response(content, headers=headers, media_type=media_type)

        self._routes.append(Route(path, show, methods=["GET"]))
        self._open_paths.add(path)

    def app(self) -> Starlette:
        guard = Middleware(
            Guard,
            keys=self.keys,
            hosts=frozenset(name.lower() for name in self.hosts),
            open_paths=frozenset(self._open_paths),
            shape=self.shape,
            shapes=self._shapes,
        )
        app = Starlette(
            routes=self._routes, middleware=[guard], exception_handlers={HTTPException: self._answer_http_error}
        )
        app.router.redirect_slashes = False  # its own would name any host that the caller names
        return app

    def document(self) -> dict[str, Any]:
        """The OpenAPI document."""
        schemas: dict[str, Any] = {}
        paths: dict[str, Any] = {}
        for operation in self._operations:
            described = _described(operation, schemas)
            if self.keys and operation.needs_key:
                described["security"] = [{"key": [role]} for role in operation.allowed]
            paths.setdefault(operation.path, {})[operation.method.lower()] = described
        components: dict[str, Any] = {"schemas": schemas}
        document: dict[str, Any] = {
            "openapi": "3.1.0",
            "info": {"title": self.title, "version": "1"},
            "paths": paths,
            "components": components,
        }
        if self.keys:
            components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            document["security"] = [{"key": []}]
        return document

    def _answer_http_error(self, request: Request, error: Exception) -> Response:
        """Leads a known path with one slash too many to the path itself, as the engines' own servers do. Raises the
        other errors."""
        assert isinstance(error, HTTPException)
        path: str = request.scope["path"]
        known = path.removesuffix("/")
        if error.status_code == 404 and known != path and any(known == route.path for route in self._routes):
            query = request.url.query
            return Response(status_code=307, headers={"Location": f"{known}?{query}" if query else known})
        raise _http_error(path, error)

    async def _show_document(self, request: Request) -> Response:
        if self._document is None:
            self._document = await asyncio.to_thread(lambda: to_json(self.document()))  # takes part of a second
        return Response(self._document, media_type="application/json")

    async def _show_docs(self, request: Request) -> Response:
        """A page that reads the document. It loads nothing from the network."""
        page = resources.files("frontend.server").joinpath("docs.html").read_text()
        return Response(page, headers={"Content-Security-Policy": DOCS_POLICY}, media_type="text/html")


def _guarded(operation: Operation) -> Endpoint:
    """The endpoint, behind a check of what the caller may do."""
    if not operation.needs_key:
        return operation.endpoint

    async def answer(request: Request) -> Response:
        caller: Caller = request.scope[CALLER]
        if not any(caller.may(role) for role in operation.allowed):
            raise PermissionDenied(
                f"the key {caller.id!r} has the role {caller.role}",
                field="Authorization",
                fix=f"use a key with the role {' or '.join(operation.allowed)}",
            )
        if caller is ANYBODY and operation.method == "GET" and "steer" in operation.allowed:
            refuse_browser(request.headers)
        ASKED_BY.set(caller.id)  # each request is a task with a context of its own
        address = request.client.host if request.client is not None else "a local socket"
        CALLED_FROM.set(caller_over_http(request.headers.get(CLIENT_HEADER), address))
        if tracing.is_on():
            tracing.hear(request.headers.get(tracing.TRACEPARENT))
        return await operation.endpoint(request)

    return answer


def _http_error(path: str, error: HTTPException) -> PlaneError:
    if error.status_code == 404:
        return NotFound(f"there is no route {path[:200]}", field="path", fix="GET /docs lists the routes")
    if error.status_code == 405:
        allow = (error.headers or {}).get("Allow", "")
        return MethodNotAllowed(f"{path[:200]} takes {allow}", field="method", fix=f"use {allow}", allow=allow)
    return InvalidRequest(str(error.detail))


# ---- the document ----


def _described(operation: Operation, schemas: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "tags": list(operation.tags),
        "parameters": _parameters(operation, schemas),
        "responses": _responses(operation, schemas),
    }
    if operation.description:
        found["description"] = operation.description
    if not operation.needs_key:
        found["security"] = []
    if operation.bodies and operation.method == "POST":
        found["requestBody"] = {
            "content": {"application/json": {"schema": _any_of(operation.bodies, schemas)}},
            "required": not operation.in_query,
        }
    return found


def _parameters(operation: Operation, schemas: dict[str, Any]) -> list[dict[str, Any]]:
    found = {
        name: {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", operation.path)
    }
    for model in operation.bodies if operation.in_query else ():
        for name, inner in schema_of(model, schemas)["properties"].items():
            if _fits_query(inner):
                found.setdefault(name, {"name": name, "in": "query", "required": False, "schema": inner})
    if operation.idempotent:
        header = {"type": "string", "maxLength": MAX_ID_CHARS}
        found["Idempotency-Key"] = {
            "name": "Idempotency-Key",
            "in": "header",
            "required": False,
            "schema": header,
        }
    return list(found.values())


def _responses(operation: Operation, schemas: dict[str, Any]) -> dict[str, Any]:
    schema: dict[str, Any] = {} if operation.media_type == "application/json" else {"type": "string"}
    if operation.replies:
        schema = _any_of(operation.replies, schemas)
    found = {"200": {"description": "Done.", "content": {operation.media_type: {"schema": schema}}}}
    for status in operation.errors:
        content = {"application/json": {"schema": _any_of((ErrorReply,), schemas)}}
        found[str(status)] = {"description": ERRORS[status], "content": content}
    return found


def _any_of(models: tuple[type[object], ...], schemas: dict[str, Any]) -> dict[str, Any]:
    for model in models:
        schema_of(model, schemas)
    references = [{"$ref": _REFS.format(model=model.__name__)} for model in models]
    return references[0] if len(references) == 1 else {"anyOf": references}


def schema_of(model: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    """The schema of a model or of a TypedDict. Adds it, and what it refers to, to `schemas`. ValueError: one of these
    names stands for another schema already, and a reference to it would describe the wrong body."""
    own = _own_schema(model)
    inner = own.get("$defs", {})
    own = {name: one for name, one in own.items() if name != "$defs"}
    for name, one in {**inner, model.__name__: own}.items():
        if schemas.setdefault(name, one) != one:
            raise ValueError(f"two models are called {name}: give one of them another name")
    return own


@cache
def _own_schema(model: Any) -> dict[str, Any]:
    """Cached, because every route refers to the same few models, and each schema takes milliseconds."""
    return TypeAdapter(model).json_schema(ref_template=_REFS)


def _fits_query(schema: dict[str, Any]) -> bool:
    """Whether a query can carry a field: no objects, and no long lists."""
    text = to_json(schema).decode()
    longest = max((int(one) for one in re.findall(r'"maxItems":(\d+)', text)), default=0)
    return longest <= MAX_QUERY_ITEMS and not any(word in text for word in ("$ref", '"object"'))

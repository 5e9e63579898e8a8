"""Routes that several handlers share: trainers' dialects use the same paths with different bodies.

A handler gets a `ParsedRequest` and returns a JSON value, or raises a PlaneError. The first handler of a path whose
`claims` accepts the request answers it; a handler without `claims` takes the requests that no other handler claims.

A client that lost its answer sends the same bytes again. Equal calls under way share one answer (`once`). A part of an
update that is already done gets its first answer again while its update continues (`standing`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import typing
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeGuard, TypeVar

from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import Response

from frontend.server.api import Api, Endpoint, Method, Operation
from frontend.server.bodies import (
    MAX_BODY_BYTES,
    MAX_LARGE,
    LargeBodyPlace,
    idempotency_key,
    list_fields,
    merge_query,
    read_hashed,
)
from frontend.server.in_flight import InFlight
from frontend.server.replies import ErrorShape, error_body, json_response
from rl_plane.errors import InvalidRequest, PlaneError
from rl_plane.protocol.http_keys import Role
from rl_plane.protocol.validation import parse_body

log = logging.getLogger("frontend.server.shared_routes")

MAX_REPORTED = 1000
"""Unknown fields that the log names, each once. A client with made-up names cannot fill the log."""
MAX_IN_FLIGHT = 64
"""Different calls that do something once; more come from a trainer that has gone wrong."""
MAX_PARTS = 1024
"""Parts of an update whose answers are remembered. A client repeats only its latest parts: it sends a part when it has
the answer to the one before, on each of its connections."""

F = TypeVar("F", bound=BaseModel)


class Fields(BaseModel):
    """The fields that a route reads. Unknown fields are dropped, as the engines' own servers do, and the log names
    each once. The facade's own bodies refuse them instead."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


class NoFields(Fields):
    """The route reads no field."""


@dataclass(frozen=True)
class DialectRequest:
    """One request of a trainer's client."""

    path: str
    query: list[tuple[str, str]]
    body: dict[str, Any]
    request_id: str
    """The `Idempotency-Key`, or ""."""
    base_url: str
    """The listener's address as the caller reaches it."""
    digest: str
    """A hash of the body's bytes: comparing or writing out a large body would take too long."""

    def has(self, name: str) -> bool:
        return name in self.body or any(key == name for key, _ in self.query)


@dataclass(frozen=True)
class ParsedRequest(DialectRequest, Generic[F]):
    """A request with the typed fields of its query and body."""

    fields: F


Handler = Callable[[ParsedRequest[F]], Awaitable[Any]]
Claims = Callable[[DialectRequest], bool]
Standing = Callable[[], Awaitable[object]]
"""Names the update to which a part belongs now. None: nothing distinguishes this update from the next one."""


def _parsed(request: DialectRequest, model: type[F]) -> ParsedRequest[F]:
    """Parses the fields of query and body. InvalidRequest names the first wrong field."""
    fields = parse_body(model, merge_query(request.query, request.body, list_fields(model)))
    return ParsedRequest(**vars(request), fields=fields)


def unknown_in(model: type[BaseModel], given: Mapping[str, Any], where: str = "") -> Iterator[str]:
    """The names in a body, and in the objects of its lists, that no field has and that the model drops."""
    if model.model_config.get("extra", "ignore") != "ignore":
        return
    known = {each.alias or name: each for name, each in model.model_fields.items()}
    for name, value in given.items():
        if name not in known:
            yield where + name
        elif isinstance(value, list):
            inner = [one for one in typing.get_args(known[name].annotation) if _is_model(one)]
            for one, element in itertools.product(inner, value):
                if isinstance(element, dict):
                    yield from unknown_in(one, element, f"{where}{name}.")


def _is_model(annotation: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


class FieldReports:
    """Logs each field without effect once, and at most `most` fields."""

    def __init__(self, most: int = MAX_REPORTED) -> None:
        self._most = most
        self._reported: set[tuple[str, str]] = set()

    def clear(self) -> None:
        """Forgets what was logged: a new frontend logs each field again."""
        self._reported.clear()

    def report(self, path: str, name: str, why: str) -> None:
        if (path, name) not in self._reported and len(self._reported) < self._most:
            self._reported.add((path, name))
            log.warning("%s: the field %.100r has no effect: %s", path, name, why)


_reports = FieldReports()


def report(path: str, name: str, why: str = "it is not known here, and is dropped") -> None:
    """Logs once that a field changes nothing."""
    _reports.report(path, name, why)


def report_given(path: str, fields: BaseModel, **reasons: str) -> None:
    """Reports the fields among `reasons` that ask for something: field → why it changes nothing."""
    for name, why in reasons.items():
        if getattr(fields, name):
            report(path, name, why)


@dataclass(frozen=True)
class _PathHandler:
    """One handler of a path."""

    handler: Handler[Any]
    tag: str
    summary: str
    fields: type[BaseModel]
    reply: type[object] | None
    claims: Claims | None
    once: bool
    standing: Standing | None
    max_body_bytes: int
    roles: tuple[Role, ...]


@dataclass(frozen=True)
class _DonePart:
    """The answer to a part of an update that is done."""

    standing: object
    request_id: str
    answer: Any


class SharedRoutes:
    """The routes of one listener. `add` collects them, and `mount` hands them to the listener."""

    def __init__(self, shape: ErrorShape = error_body) -> None:
        """`shape`: the shape of errors."""
        _reports.clear()
        self.tag = ""
        """The dialect whose handlers `add` adds now."""
        self._shape = shape
        self._shapes: dict[str, ErrorShape] = {}
        self._entries: dict[tuple[Method, str], list[_PathHandler]] = {}
        self._in_flight: InFlight[Any] = InFlight(MAX_IN_FLIGHT, log)
        self._large_bodies = asyncio.Semaphore(MAX_LARGE)
        self._parts: dict[str, _DonePart] = {}
        """The answers to parts, also of updates that have ended since: each names its update."""

    def add(
        self,
        methods: Sequence[Method],
        path: str,
        handler: Handler[F],
        *,
        summary: str,
        fields: type[F],
        reply: type[object] | None = None,
        claims: Claims | None = None,
        once: bool = False,
        standing: Standing | None = None,
        max_body_bytes: int = MAX_BODY_BYTES,
        shape: ErrorShape | None = None,
        roles: tuple[Role, ...] = (),
    ) -> None:
        """Adds a handler.

        `fields`: what the handler reads. /docs shows it, and the log names the fields that it drops.
        `reply`: the model or the TypedDict of its reply, for /docs.
        `once`: equal calls under way share one answer, and continue when their callers disconnect.
        `standing`, for parts of an update: a part that is sent again after it is done gets its first answer, as long
        as `standing` returns what it returned then.
        `shape`: the shape of the path's errors. `roles`: those of `Operation`, for both methods of the path."""
        entry = _PathHandler(
            handler, self.tag, summary, fields, reply, claims, once, standing, max_body_bytes, roles
        )
        for method in methods:
            self._entries.setdefault((method, path), []).append(entry)
        if shape is not None:
            self._shapes[path] = shape

    def post(self, path: str, fields: type[F], summary: str, **how: Any) -> Callable[[Handler[F]], Handler[F]]:
        """Decorates a handler of POST. `how`: the other arguments of `add`."""
        return self._decorator(["POST"], path, fields, summary, how)

    def get(self, path: str, fields: type[F], summary: str, **how: Any) -> Callable[[Handler[F]], Handler[F]]:
        """Decorates a handler of GET."""
        return self._decorator(["GET"], path, fields, summary, how)

    def any(self, path: str, fields: type[F], summary: str, **how: Any) -> Callable[[Handler[F]], Handler[F]]:
        """Decorates a handler of GET and POST."""
        return self._decorator(["GET", "POST"], path, fields, summary, how)

    def _decorator(
        self, methods: Sequence[Method], path: str, fields: type[F], summary: str, how: Mapping[str, Any]
    ) -> Callable[[Handler[F]], Handler[F]]:
        def decorate(handler: Handler[F]) -> Handler[F]:
            self.add(methods, path, handler, summary=summary, fields=fields, **how)
            return handler

        return decorate

    def has(self, method: Method, path: str) -> bool:
        return (method, path) in self._entries

    def mount(self, api: Api) -> None:
        for (method, path), entries in self._entries.items():
            first, *others = sorted(entries, key=lambda each: each.claims is not None)
            handlers = [f"`{entry.tag}`: {entry.summary}" for entry in (first, *others)]
            replies = dict.fromkeys(entry.reply for entry in entries if entry.reply is not None)
            api.add(
                Operation(
                    method=method,
                    path=path,
                    endpoint=self._endpoint(method, path),
                    name=f"{method.lower()}{path.replace('/', '_')}",
                    summary=first.summary,
                    tags=tuple(dict.fromkeys(entry.tag for entry in (first, *others))),
                    description="The body decides which handler answers:\n" + "\n".join(handlers)
                    if others
                    else "",
                    bodies=tuple(dict.fromkeys(entry.fields for entry in entries)),
                    in_query=True,
                    idempotent=method == "POST",
                    replies=tuple(replies),
                    shape=self._shapes.get(path, self._shape),
                    roles=first.roles,
                )
            )

    async def close(self) -> None:
        """Cancels the calls under way."""
        await self._in_flight.close(0.0)

    # ---- one request ----

    def _endpoint(self, method: Method, path: str) -> Endpoint:
        most = max(entry.max_body_bytes for entry in self._entries[method, path])

        async def answer(request: Request) -> Response:
            with LargeBodyPlace(self._large_bodies) as place:
                return await handle(request, *await read_hashed(request, most, place))

        async def handle(request: Request, body: dict[str, Any], digest: str) -> Response:
            query, base_url = request.query_params.multi_items(), str(request.base_url).rstrip("/")
            made = DialectRequest(path, query, body, idempotency_key(request), base_url, digest)
            entry = self._entry(method, made)
            for name in unknown_in(entry.fields, {**dict(made.query), **made.body}):
                report(path, name)
            parsed = _parsed(made, entry.fields)
            return json_response(await (self._once(parsed, entry) if entry.once else entry.handler(parsed)))

        return answer

    def _entry(self, method: Method, request: DialectRequest) -> _PathHandler:
        entries = self._entries[method, request.path]
        for entry in sorted(entries, key=lambda each: each.claims is None):
            if entry.claims is None or entry.claims(request):
                return entry
        raise InvalidRequest(
            f"no dialect here reads such a body at {request.path}",
            field="body",
            fix="GET /docs shows what is read",
        )

    async def _once(self, request: ParsedRequest[Any], entry: _PathHandler) -> Any:
        op, content = request.path, json.dumps([request.query, request.digest])
        part = json.dumps([op, content, request.request_id])
        if not self._in_flight.has(op, request.request_id, content):
            done = await self._done(part, request, entry)
            if done is not None:
                return done.answer
        return await self._in_flight.share(
            op, request.request_id, content, lambda: self._run(part, request, entry)
        )

    async def _done(self, key: str, request: DialectRequest, entry: _PathHandler) -> _DonePart | None:
        """Returns the answer to this part, if the part is done and its update continues."""
        if entry.standing is None:
            return None
        same_id = [part for part in self._parts.values() if part.request_id == request.request_id != ""]
        known = self._parts.get(key)
        if known is None and not same_id:
            return None
        standing = await entry.standing()
        if known is not None and known.standing == standing:
            return known
        if any(part.standing == standing for part in same_id):
            raise InvalidRequest(
                f"the request id {request.request_id!r} belongs to another part of this update",
                field="Idempotency-Key",
                fix="use a new id for each different request",
            )
        return None

    async def _run(self, key: str, request: ParsedRequest[Any], entry: _PathHandler) -> Any:
        answer = await entry.handler(request)
        if entry.standing is not None:
            with contextlib.suppress(PlaneError):  # the part is done even if its update cannot be read
                standing = await entry.standing()
                if standing is not None:
                    self._parts[key] = _DonePart(standing, request.request_id, answer)
            while len(self._parts) > MAX_PARTS:
                del self._parts[next(iter(self._parts))]
        return answer

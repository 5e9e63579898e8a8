"""The dialects' routes: one table per listener, since several dialects use the same path.

A handler gets an `Ask` and gives a JSON value, or raises a PlaneError. Of several handlers of one path the first whose
`claims` says yes answers; one without `claims` takes what nobody has claimed.

Clients whose answer was lost ask again, by the same bytes. Equal calls under way share one answer (`once`); a part of
an update that is done already is answered as the first time, while its update goes on (`standing`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import typing
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeGuard, TypeVar

from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict
from starlette.responses import Response

from frontend.server.http import (
    MAX_BODY_BYTES,
    ErrorShape,
    error_body,
    idempotency_key,
    json_response,
    read_hashed,
)
from frontend.server.openapi import add_model, fits_query, parameter
from frontend.server.query import list_fields, merge_query
from rl_plane.errors import InvalidRequest, PlaneError, Unavailable
from rl_plane.protocol.validation import parse_body

log = logging.getLogger("frontend.dialects")

Method = Literal["GET", "POST"]

SHOWN = 8
"""Workers that a joined message names; their rows stand beside it."""
MAX_REPORTED = 1000
"""Unknown fields that are told of, each once: a client with made-up names can't fill the log."""
MAX_UNDER_WAY = 64
"""Different calls that do something once: more is a trainer gone wild."""
MAX_PARTS = 1024
"""Of an update that are known by their answers. Only the last ones may be asked for again: a client sends a part when
it has the answer to the one before, on each of its connections."""

F = TypeVar("F", bound="Fields")


class Fields(BaseModel):
    """What a route reads. Unlike the facade's own, a dialect drops what it does not know, as the engines do; the log
    tells of it once."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


class NoFields(Fields):
    """Nothing is read."""


class AllFields(Fields):
    """All is read, and what is not known refused, by the handler."""

    model_config = ConfigDict(extra="allow")


@dataclass(frozen=True)
class Ask:
    """One request of a trainer's client."""

    path: str
    query: list[tuple[str, str]]
    body: dict[str, Any]
    request_id: str
    """`Idempotency-Key`; "" without one."""
    base_url: str
    """As the caller reaches this listener."""
    digest: str
    """Of the body's bytes: a body may be too large to be compared or written out."""

    def has(self, name: str) -> bool:
        return name in self.body or any(key == name for key, _ in self.query)


Handler = Callable[[Ask], Awaitable[Any]]
Claims = Callable[[Ask], bool]
Standing = Callable[[], Awaitable[object]]
"""Which update a part would now be of; None: of none that its body alone could tell from the next one."""


_reported: set[tuple[str, str]] = set()


def take(model: type[F], ask: Ask) -> F:
    """The request's fields from query and body; the first wrong one is an InvalidRequest that names it."""
    parsed = parse_body(model, merge_query(ask.query, ask.body, list_fields(model)))
    assert isinstance(parsed, model)
    return parsed


def unknown_in(model: type[BaseModel], given: Mapping[str, Any], where: str = "") -> Iterator[str]:
    """The names in a body, and in the objects of its lists, that no field has."""
    if model.model_config.get("extra") == "allow":
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


def report(path: str, name: str, why: str = "it is not known here, and is dropped") -> None:
    """Tells of a field that changes nothing, once."""
    if (path, name) not in _reported and len(_reported) < MAX_REPORTED:
        _reported.add((path, name))
        log.warning("%s: the field %.100r has no effect: %s", path, name, why)


def dialect_error(error: PlaneError, elapsed_s: float) -> dict[str, Any]:
    """The facade's shape, with the keys that SGLang's clients look for."""
    return {**error_body(error, elapsed_s), "success": False, "message": failure(error)}


def failure(error: PlaneError) -> str:
    """The error's message, and each worker's own."""
    rows = [row for row in error.facts.get("workers") or () if isinstance(row.get("error"), dict)]
    told = [(row["instance_id"], str(row["error"].get("message", ""))) for row in rows]
    return " | ".join([error.message, *([by_worker(told)] if told else [])])


def by_worker(told: list[tuple[str, str]]) -> str:
    """One message of all workers."""
    parts = [f"{instance_id}: {text}" for instance_id, text in told[:SHOWN]]
    return " | ".join([*parts, *([f"and {len(told) - SHOWN} more"] if len(told) > SHOWN else [])])


@dataclass(frozen=True)
class _Entry:
    handler: Handler
    summary: str
    fields: type[Fields]
    claims: Claims | None
    once: bool
    standing: Standing | None
    max_body_bytes: int


@dataclass(frozen=True)
class _Part:
    """One that is done."""

    standing: object
    request_id: str
    answer: Any


@dataclass
class _Table:
    """Of one app; `add_route` makes it."""

    entries: dict[tuple[str, str], list[_Entry]] = field(default_factory=dict)
    under_way: dict[str, asyncio.Task[Any]] = field(default_factory=dict)
    parts: dict[str, _Part] = field(default_factory=dict)
    """Of updates that may have ended since: each says of which it was."""

    async def answer(self, method: str, path: str, request: Request) -> Response:
        most = max(entry.max_body_bytes for entry in self.entries[method, path])
        body, digest = await read_hashed(request, most)
        query, base_url = request.query_params.multi_items(), str(request.base_url).rstrip("/")
        ask = Ask(path, query, body, idempotency_key(request), base_url, digest)
        entry = self._entry(method, ask)
        for name in unknown_in(entry.fields, {**dict(ask.query), **ask.body}):
            report(path, name)
        value = await (self._once(method, ask, entry) if entry.once else entry.handler(ask))
        return json_response(value)

    def _entry(self, method: str, ask: Ask) -> _Entry:
        entries = self.entries[method, ask.path]
        for entry in sorted(entries, key=lambda each: each.claims is None):
            if entry.claims is None or entry.claims(ask):
                return entry
        raise InvalidRequest(
            f"no dialect here reads such a body at {ask.path}", field="body", fix="GET /docs shows what is read"
        )

    async def _once(self, method: str, ask: Ask, entry: _Entry) -> Any:
        """Equal calls share one answer: a client that has waited too long asks again."""
        key = json.dumps([method, ask.path, ask.query, ask.digest, ask.request_id])
        task = self.under_way.get(key)
        if task is None and (done := await self._done(key, ask, entry)) is not None:
            return done.answer
        task = task or self.under_way.get(key)  # another one may have come meanwhile
        if task is None:
            if len(self.under_way) >= MAX_UNDER_WAY:
                raise Unavailable(f"{MAX_UNDER_WAY} such calls are under way here", retry_after_s=1.0)
            work = self._run(key, ask, entry)
            task = self.under_way[key] = asyncio.create_task(work, name=f"{method} {ask.path}")
            task.add_done_callback(lambda done: self._ended(key, done))
        return await asyncio.shield(task)

    async def _done(self, key: str, ask: Ask, entry: _Entry) -> _Part | None:
        """This very part, if it is done and its update goes on."""
        if entry.standing is None:
            return None
        same_id = [part for part in self.parts.values() if part.request_id == ask.request_id != ""]
        known = self.parts.get(key)
        if known is None and not same_id:
            return None
        standing = await entry.standing()
        if known is not None and known.standing == standing:
            return known
        if any(part.standing == standing for part in same_id):
            raise InvalidRequest(
                f"the request id {ask.request_id!r} belongs to another part of this update",
                field="Idempotency-Key",
                fix="use a new id for each different request",
            )
        return None

    async def _run(self, key: str, ask: Ask, entry: _Entry) -> Any:
        answer = await entry.handler(ask)
        if entry.standing is not None:
            with contextlib.suppress(PlaneError):  # it is done all the same
                standing = await entry.standing()
                if standing is not None:
                    self.parts[key] = _Part(standing, ask.request_id, answer)
            while len(self.parts) > MAX_PARTS:
                del self.parts[next(iter(self.parts))]
        return answer

    def _ended(self, key: str, task: asyncio.Task[Any]) -> None:
        del self.under_way[key]
        # Looking at the error here also serves the case that nobody waits for it any more.
        if not task.cancelled() and (error := task.exception()) is not None:
            log.log(logging.INFO if isinstance(error, PlaneError) else logging.ERROR, "%s: %s", key[:200], error)


def add_route(
    app: FastAPI,
    methods: Sequence[Method],
    path: str,
    handler: Handler,
    *,
    summary: str,
    fields: type[Fields] = NoFields,
    claims: Claims | None = None,
    once: bool = False,
    standing: Standing | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
) -> None:
    """`fields` describes the route in /docs, and says what is known; the handler reads them by `take`. `once`: equal
    calls that are under way share an answer, and no caller's end cancels what they do. `standing`, of parts of an
    update: one that comes again when it is done gets the first one's answer too, and nothing is done, as long as this
    gives what it gave then."""
    table = _table(app)
    for method in methods:
        entries = table.entries.setdefault((method, path), [])
        entries.append(_Entry(handler, summary, fields, claims, once, standing, max_body_bytes))
        if len(entries) == 1:
            _register(app, table, method, path)


def has_route(app: FastAPI, method: str, path: str) -> bool:
    return (method, path) in _table(app).entries


def _register(app: FastAPI, table: _Table, method: Method, path: str) -> None:
    async def answer(request: Request) -> Response:
        return await table.answer(method, path, request)

    name = f"{method.lower()}{path.replace('/', '_')}"
    app.add_api_route(path, answer, methods=[method], name=name, operation_id=name, response_model=None)
    shapes: dict[str, ErrorShape] = app.state.shapes
    shapes.setdefault(path, dialect_error)


def _table(app: FastAPI) -> _Table:
    if not hasattr(app.state, "dialects"):
        app.state.dialects = _Table()
    table: _Table = app.state.dialects
    return table


async def close_routes(app: FastAPI) -> None:
    """Cuts off what nobody waits for any more."""
    tasks = list(_table(app).under_way.values())
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def describe_routes(app: FastAPI, schema: dict[str, Any], errors: dict[str, Any]) -> None:
    """Every route of the dialects in the OpenAPI document. `errors`: status → response."""
    for (method, path), entries in _table(app).entries.items():
        operation = schema["paths"][path][method.lower()]
        summaries = [entry.summary for entry in sorted(entries, key=lambda each: each.claims is not None)]
        operation["summary"], *others = dict.fromkeys(summaries)
        if others:
            operation["description"] = "By its body also: " + " ".join(others)
        operation["responses"] = {**errors, **operation["responses"]}
        models = [add_model(schema, model) for model in dict.fromkeys(entry.fields for entry in entries)]
        parameters = {
            name: inner for model in models for name, inner in model["properties"].items() if fits_query(inner)
        }
        operation["parameters"] = [parameter(name, "query", inner) for name, inner in parameters.items()]
        if method == "POST":
            references = [{"$ref": f"#/components/schemas/{model['title']}"} for model in models]
            body = references[0] if len(references) == 1 else {"anyOf": references}
            operation["requestBody"] = {"content": {"application/json": {"schema": body}}, "required": False}

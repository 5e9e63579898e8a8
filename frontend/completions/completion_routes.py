"""The generation listener: OpenAI's routes, and the engines' own, over the fleet's admitted workers."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from fastapi import FastAPI, Request
from pydantic import BaseModel
from starlette.responses import Response

from frontend.completions.caller_ids import CallerIds
from frontend.completions.native_bodies import SglangBody, VllmBody, plan_sglang, plan_vllm
from frontend.completions.native_replies import SglangChunks, VllmChunks, sglang_whole, vllm_whole
from frontend.completions.openai_bodies import ChatBody, CompletionBody
from frontend.completions.openai_replies import Choice, Chunks, openai_error, whole
from frontend.completions.plans import Plan, plan_chat, plan_completion
from frontend.completions.tokens import DetokenizeBody, TokenizeBody, Tokens
from frontend.routing.committed import Committed
from frontend.routing.continuation import SoFar
from frontend.routing.demands import at_delivery, point_of
from frontend.routing.engine_client import Cut, EngineClient, Event
from frontend.server.event_stream import EventStream, unless_gone
from frontend.server.http import json_response, make_app, read_json, to_json
from frontend.server.openapi import add_body, add_model, base_schema, error_responses
from rl_plane.errors import (
    FrontendEnding,
    InvalidRequest,
    NotFound,
    NoWorkers,
    Overloaded,
    PlaneError,
    Unavailable,
    Unlabelled,
)
from rl_plane.membership.core import Member, Snapshot
from rl_plane.membership.view import MembershipView
from rl_plane.protocol.generation import GenerateDelta, VersionSpan
from rl_plane.protocol.record import DecisionRecord

log = logging.getLogger("frontend.completions.completion_routes")

HEALTH = "/health"
MAX_IN_FLIGHT = 4096
"""Choices under way in one frontend; a worker takes no more streams than that either."""
EVENTS_QUEUE = 64
"""Deltas of all choices that a slow reader may be behind; then the workers are held back."""
DONE = b"[DONE]"
CALLER_ID = "x-request-id"
"""The header by which a caller names its request, to end it by that name."""
SESSION_HEADERS = ("X-Session-ID", "X-SMG-Routing-Key")
"""The first that is there counts."""
MAX_SESSION_CHARS = 256


class ChunkMaker(Protocol):
    """Makes what a stream sends."""

    def of(self, choice: Choice, delta: GenerateDelta, offset: int) -> dict[str, Any]:
        """`delta` is what `choice` has just taken; `offset`: where its text begins."""

    def usage(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a route answers; called with the plan, its choices, the model and the time."""

    whole: Callable[[Plan, list[Choice], str, int], Any]
    chunks: Callable[[Plan, list[Choice], str, int], ChunkMaker]


OPENAI = Dialect(whole, Chunks)
VLLM = Dialect(vllm_whole, VllmChunks)
SGLANG = Dialect(sglang_whole, SglangChunks)


@dataclass(frozen=True, slots=True)
class Models:
    """What a request's `model` may name."""

    names: tuple[str, ...]
    """The base models that every member serves."""
    adapters: tuple[str, ...]
    """The committed ones; a base model's name counts first."""
    max_model_len: int | None
    """What every member has room for."""
    root: str | None
    """Where the workers have the base model, if all have it in one place."""

    @property
    def base(self) -> str:
        return self.names[0] if self.names else ""

    @classmethod
    def of(cls, members: Collection[Member], record: DecisionRecord | None) -> Models:
        sets = [_names(member.info.get("model")) for member in members]
        names = set.intersection(*sets) if sets else set()
        told = [member.info.get("max_model_len") for member in members]
        shortest = min((length for length in told if isinstance(length, int)), default=None)
        adapters = set(record.adapters) - names if record is not None else set()
        paths = {str(path) for member in members if (path := member.info.get("model_path"))}
        root = paths.pop() if len(paths) == 1 else None
        return cls(tuple(sorted(names)), tuple(sorted(adapters)), shortest, root)


def _names(told: Any) -> set[str]:
    return set(told) if isinstance(told, (list, tuple)) else {str(told)} if told else set()


class Generation:
    """What the routes do. One per frontend."""

    def __init__(self, engines: EngineClient, view: MembershipView, committed: Committed, wait_s: float) -> None:
        self.outcomes: Counter[str] = Counter()
        """Finished calls by `ok`, `disconnected` or the error's code."""
        self.in_flight = 0
        """Choices under way."""
        self.caller_ids = CallerIds()
        self._leaving = False
        """Takes no new requests."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._engines = engines
        self._view = view
        self._committed = committed
        self._wait_s = wait_s
        self._created = int(time.time())
        self._known: tuple[Snapshot, DecisionRecord | None, Models] | None = None
        """The models as of these members and this record."""

    # ---- models ----

    def list_models(self) -> dict[str, Any]:
        models = self.models
        parents = {**dict.fromkeys(models.names), **dict.fromkeys(models.adapters, models.base)}
        rows = [
            {
                "id": name,
                "object": "model",
                "created": self._created,
                "owned_by": "rl_plane",
                "parent": parent,
                "root": models.root if parent is None and models.root else name,
                "max_model_len": models.max_model_len,
            }
            for name, parent in parents.items()
        ]
        return {"object": "list", "data": rows}

    @property
    def models(self) -> Models:
        """Made once for each fleet: with many members that is more work than the rest of a request."""
        members, record = self._view.snapshot(), self._view.record
        if self._known is None or self._known[0] is not members or self._known[1] is not record:
            self._known = members, record, Models.of(members.members, record)
        return self._known[2]

    async def check_model(self, asked: str | None) -> None:
        """NotFound, or NoWorkers."""
        with self._places(1):
            self._check_model(await self._models(asked), asked)

    async def _models(self, asked: str | None) -> Models:
        await self._view.wait_until(lambda now: len(now) > 0, self._wait_s)
        self.check_served()
        models = self.models
        if asked is None or asked in models.names or asked in models.adapters:
            return models
        await self._committed.try_read()  # an adapter that was loaded just now
        return self.models

    @staticmethod
    def _check_model(models: Models, asked: str | None) -> str:
        """The reply's `model`."""
        if asked is None:
            return models.base
        known = models.names + models.adapters
        if asked not in known:
            raise NotFound(
                f"there is no model {asked[:200]!r}; there is {', '.join(known) or 'none'}",
                field="model",
                models=list(known),
                fix="name one of `models`, or leave it out",
            )
        return asked

    # ---- the routes ----

    async def completions(self, request: Request) -> Response:
        plan = plan_completion(await read_json(request), f"cmpl-{uuid.uuid4().hex}")
        return await self._answer(request, plan, OPENAI)

    async def chat_completions(self, request: Request) -> Response:
        plan = plan_chat(await read_json(request), f"chatcmpl-{uuid.uuid4().hex}")
        return await self._answer(request, plan, OPENAI)

    async def vllm_generate(self, request: Request) -> Response:
        plan = plan_vllm(await read_json(request), uuid.uuid4().hex)
        return await self._answer(request, plan, VLLM)

    async def sglang_generate(self, request: Request) -> Response:
        plan = plan_sglang(await read_json(request), uuid.uuid4().hex)
        return await self._answer(request, plan, SGLANG)

    async def _answer(self, request: Request, plan: Plan, dialect: Dialect) -> Response:
        session, caller_id = session_of(request.headers), request.headers.get(CALLER_ID, "")
        if session or caller_id:
            plan = replace(plan, session=session, caller_id=caller_id)
        if plan.stream:
            return EventStream(self._stream(plan, dialect))
        return json_response(await unless_gone(request.receive, self._whole(plan, dialect)))

    async def _aimed(self, plan: Plan) -> tuple[str, AsyncGenerator[tuple[int, Event], None]]:
        """What is served, as the reply calls it, and its events. It may wait for a first worker."""
        with self._engines.aborts.of(plan.made_id, choices=len(plan.requests)) as ending:
            models = await ending.unless_aborted(self._models(plan.model))
        if models is None:
            return plan.model or "", _ended(plan)
        model = self._check_model(models, plan.model)
        return model, self._run(plan.with_adapter(model) if model in models.adapters else plan)

    async def _whole(self, plan: Plan, dialect: Dialect) -> Any:
        choices, created = [Choice(index) for index in range(len(plan.requests))], int(time.time())
        async with self._counted(plan):
            model, run = await self._aimed(plan)
            try:
                async with aclosing(run) as events:
                    async for index, event in events:
                        self._take(choices[index], event)
                self._check_again(plan, choices)
            except PlaneError as error:
                _add_partial(error, choices)
                raise
        return dialect.whole(plan, choices, model, created)

    def _take(self, choice: Choice, event: Event) -> None:
        choice.take(event)
        if isinstance(event, Cut):
            self._engines.moves["cut"] += 1

    def _check_again(self, plan: Plan, choices: list[Choice]) -> None:
        """At delivery: a choice that ended first has waited for the others, and updates may have passed meanwhile."""
        for choice in choices:
            if choice.cut is None and (cut := self._cut_by_now(plan, choice.index, choice.labelled())):
                self._take(choice, cut)
                choice.take(GenerateDelta(token_ids=[], finish_reason="abort"))

    def _cut_by_now(self, plan: Plan, index: int, spans: list[VersionSpan]) -> Cut | None:
        """Why a choice with tokens of these weights ends, if they are too old by now; or an error."""
        record, demands = self._committed.record, plan.demands
        if record is None or not demands.of_versions or not spans:
            return None
        if isinstance(demands.min_version, str):
            demands = replace(demands, min_version=0)  # its sequence was kept: only the run may be another by now
        adapter = spans[0].adapter.name if spans[0].adapter is not None else None
        unmet = at_delivery(demands, spans, point_of(record.held, adapter))
        if unmet is None:
            return None
        if plan.demands.on_stale != "cut":
            error = unmet.error()
            _of_choice(error, plan, index)
            raise error
        return Cut(unmet.demand, unmet.message)

    async def _stream(self, plan: Plan, dialect: Dialect) -> AsyncGenerator[bytes, None]:
        start, begun = time.monotonic(), False
        choices = [Choice(index) for index in range(len(plan.requests))]
        try:
            async with self._counted(plan):
                model, run = await self._aimed(plan)
                chunks = dialect.chunks(plan, choices, model, int(time.time()))
                async with aclosing(run) as events:
                    async for index, event in events:
                        offset = len(choices[index].text)
                        self._take(choices[index], event)
                        if isinstance(event, GenerateDelta) and not event.is_ahead:
                            yield to_json(chunks.of(choices[index], event, offset))
                            begun = True
            if plan.include_usage:
                yield to_json(chunks.usage())
            yield DONE
        except Exception as error:
            if not begun:
                raise
            if not isinstance(error, PlaneError):
                log.exception("a stream broke")
                error = PlaneError("an unexpected error; see the log")
            _add_partial(error, choices)
            # No [DONE] after it: nobody may take this for a whole reply.
            yield to_json(openai_error(error, time.monotonic() - start))

    async def drain(self, timeout_s: float) -> None:
        """Takes nothing new, lets what is under way end, and ends the rest with an error that has the tokens so far."""
        self._leaving = True
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
                return
        # No worker has failed it: it is not tried again at another one.
        self._engines.give_up(
            lambda: FrontendEnding(
                f"this frontend was told to end, and {timeout_s:g} s later this was still under way",
                fix="go on at another frontend; error.partial has the tokens so far",
                retry_after_s=1.0,
            )
        )

    def check_served(self) -> None:
        if not len(self._view.snapshot()):
            raise NoWorkers("no worker is there", fix="start one: `rl-plane worker`", retry_after_s=1.0)

    def check_stays(self) -> None:
        if self._leaving:
            raise Unavailable("this frontend was told to end", fix="ask another one", retry_after_s=1.0)

    @contextmanager
    def _places(self, count: int) -> Iterator[None]:
        self.check_stays()
        if self.in_flight + count > MAX_IN_FLIGHT:
            raise Overloaded(f"{self.in_flight} choices are under way in this frontend", retry_after_s=1.0)
        self.in_flight += count
        self._idle.clear()
        try:
            yield
        finally:
            self.in_flight -= count
            if not self.in_flight:
                self._idle.set()

    @asynccontextmanager
    async def _counted(self, plan: Plan) -> AsyncIterator[None]:
        outcome = "disconnected"
        named = [name for name in (plan.id, plan.caller_id) if name]
        try:
            with self._places(len(plan.requests)), self.caller_ids.under(named, plan.made_id):
                yield
            outcome = "ok"
        except PlaneError as error:
            outcome = error.code
            raise
        except Exception:
            outcome = "internal"
            raise
        finally:
            self.outcomes[outcome] += 1

    async def _run(self, plan: Plan) -> AsyncGenerator[tuple[int, Event], None]:
        """The events of all choices as they come. Closing it, or the first error, aborts the rest."""
        if len(plan.requests) == 1:
            async with aclosing(self._choice(plan, 0)) as events:
                try:
                    async for event in events:
                        yield 0, event
                except PlaneError as error:
                    _of_choice(error, plan, 0)
                    raise
        else:
            async with aclosing(self._choices(plan)) as together:
                async for index, event in together:
                    yield index, event

    def _choice(self, plan: Plan, index: int) -> AsyncGenerator[Event, None]:
        return self._engines.generate(
            plan.requests[index], plan.instance_id, plan.demands, plan.session, plan.any_length
        )

    async def _choices(self, plan: Plan) -> AsyncGenerator[tuple[int, Event], None]:
        """Each in a task of its own: one alone needs none, nor the queue between. What has waited there for a slow
        reader is held to its demands again."""
        queue: asyncio.Queue[tuple[int, Event | Exception | None]] = asyncio.Queue(EVENTS_QUEUE)

        async def one(index: int) -> None:
            last: Exception | None = None
            try:
                async with aclosing(self._choice(plan, index)) as events:
                    async for event in events:
                        await queue.put((index, event))
            except Exception as error:
                last = error
            await queue.put((index, last))

        tasks = [asyncio.create_task(one(index)) for index in range(len(plan.requests))]
        left, spans = set(range(len(tasks))), dict[int, list[VersionSpan]]()
        try:
            while left:
                index, event = await queue.get()
                if index not in left:
                    continue  # of one that was cut here
                if isinstance(event, Exception):
                    if isinstance(event, PlaneError):
                        _of_choice(event, plan, index)
                    raise event
                if event is None:
                    left.remove(index)
                    continue
                if plan.demands.of_versions and isinstance(event, GenerateDelta) and event.token_ids:
                    spans[index] = event.spans or spans.get(index, [])
                    if cut := self._cut_by_now(plan, index, spans[index]):
                        left.remove(index)
                        tasks[index].cancel()
                        yield index, cut
                        # Too old are its tokens, not its prompt, which came with the first of them.
                        prompt = event.prompt_token_ids
                        yield index, GenerateDelta(token_ids=[], finish_reason="abort", prompt_token_ids=prompt)
                        continue
                yield index, event
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _ended(plan: Plan) -> AsyncGenerator[tuple[int, Event], None]:
    """Of a request that was aborted before any worker was there."""
    for index, request in enumerate(plan.requests):
        yield index, SoFar(request).end("abort")


def session_of(headers: Mapping[str, str]) -> str | None:
    """Requests of one session go to one worker, as long as that is there and not much busier than others."""
    for name in SESSION_HEADERS:
        if value := headers.get(name):
            if len(value) > MAX_SESSION_CHARS:
                raise InvalidRequest(
                    f"{name} has {len(value)} characters",
                    field=name,
                    fix=f"at most {MAX_SESSION_CHARS}",
                )
            return value
    return None


def _of_choice(error: PlaneError, plan: Plan, index: int) -> None:
    """Says which one failed, and names the field as the caller does."""
    if len(plan.requests) > 1:
        error.facts["index"] = index
    if (told := error.facts.get("field")) is not None:
        error.facts["field"] = plan.field_of(told, index)


def _add_partial(error: PlaneError, choices: list[Choice]) -> None:
    """An error after the first token carries the tokens so far, of the choice that it is of where that has some; of a
    choice with tokens of no version, none."""
    if isinstance(error, Unlabelled):
        choices[error.facts.get("index", 0)].unlabelled = True
    told = [choice for choice in choices if choice.token_ids and not choice.unlabelled]
    if not told:
        return
    failed = error.facts.get("index")
    cut = min(told, key=lambda choice: (choice.index != failed, choice.finish_reason is not None))
    error.facts["partial"] = cut.partial()
    if len(choices) > 1:
        error.facts["partials"] = [choice.partial() for choice in choices]


def make_generation_app(generation: Generation, tokens: Tokens, key: str | None) -> FastAPI:
    app = make_app("rl_plane: generation", key, frozenset({HEALTH}), openai_error)
    add_generation_routes(app, generation, tokens)
    app.openapi = lambda: _openapi(app, key is not None)  # type: ignore[method-assign]
    return app


def add_generation_routes(
    app: FastAPI, generation: Generation, tokens: Tokens, *, as_engine: bool = False
) -> None:
    """`as_engine`: the listener is taken for one. An engine's server is there when its engine is: trainers wait for its
    `/health`, then ask at once for the model."""

    async def health(request: Request) -> Response:
        generation.check_stays()
        if as_engine:
            generation.check_served()
        return json_response({"status": "ok"})

    async def models(request: Request) -> Response:
        return json_response(generation.list_models())

    words = "A worker is there, or 503." if as_engine else "The frontend runs."
    app.add_api_route(HEALTH, health, methods=["GET"], summary=words, response_model=None)
    app.add_api_route("/v1/models", models, methods=["GET"], summary="What is served.", response_model=None)
    for path, handler in (
        ("/v1/completions", generation.completions),
        ("/v1/chat/completions", generation.chat_completions),
        ("/inference/v1/generate", generation.vllm_generate),
        ("/generate", generation.sglang_generate),
    ):
        app.add_api_route(
            path,
            handler,
            methods=["POST"],
            summary="Tokens or text in, tokens and text out; `stream` for server-sent events.",
            response_model=None,
        )
    for path, handler, summary in (
        ("/tokenize", tokens.tokenize, "Text or messages to tokens, by a worker's tokenizer."),
        ("/detokenize", tokens.detokenize, "Tokens to text."),
    ):
        app.add_api_route(path, handler, methods=["POST"], summary=summary, response_model=None)
    app.state.shapes.update(dict.fromkeys(("/v1/models", *BODIES), openai_error))


BODIES: dict[str, type[BaseModel]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/inference/v1/generate": VllmBody,
    "/generate": SglangBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}


def describe_generation(schema: dict[str, Any]) -> None:
    schema["paths"][HEALTH]["get"]["security"] = []
    errors = error_responses(schema)
    for path, body in BODIES.items():
        add_model(schema, body)
        operation = schema["paths"][path]["post"]
        add_body(operation, body, required=True)
        operation["responses"] = {**errors, **operation["responses"]}


def _openapi(app: FastAPI, with_key: bool) -> dict[str, Any]:
    if app.openapi_schema is None:
        schema = base_schema(app, with_key)
        describe_generation(schema)
        app.openapi_schema = schema
    return app.openapi_schema

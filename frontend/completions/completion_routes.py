"""The generation routes: OpenAI's, vLLM's and SGLang's own, over the fleet's admitted workers."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from frontend.completions.call import GenerationCall, ReplyFormat
from frontend.completions.component_chooser import ChooseComponent, ComponentChooser
from frontend.completions.native_bodies import (
    SglangGenerateBody,
    VllmGenerateBody,
    check_temperature,
    plan_sglang,
    plan_vllm,
)
from frontend.completions.native_replies import SglangChunks, VllmChunks, sglang_whole, vllm_whole
from frontend.completions.openai_bodies import ChatBody, CompletionBody
from frontend.completions.openai_replies import Chunks, openai_error, whole
from frontend.completions.plans import Plan, plan_chat, plan_completion
from frontend.completions.reply_models import ChatReply, CompletionReply, ModelList
from frontend.completions.tokens import DetokenizeBody, TokenizeBody, Tokens
from frontend.server.api import ANY_KEY, Api, Endpoint, Method, Operation
from frontend.server.bodies import read_prompts_body
from frontend.server.event_stream import EventStream, unless_gone
from frontend.server.replies import json_response
from rl_plane.errors import InvalidRequest, NotFound, Unsupported
from rl_plane.protocol.validation import Body

HEALTH = "/health"
CALLER_ID = "x-request-id"
"""The header that gives a request a name, by which its caller can abort it."""
SESSION_HEADERS = ("X-Session-ID", "X-SMG-Routing-Key")
"""The first of these headers names the request's session."""
MAX_SESSION_CHARS = 256
TAG = "generate"
RESPONSES = "/v1/responses"

OPENAI = ReplyFormat(whole, Chunks)
VLLM = ReplyFormat(vllm_whole, VllmChunks)
SGLANG = ReplyFormat(sglang_whole, SglangChunks)

PlanMaker = Callable[[dict[str, Any], str], Plan]

ROUTES: tuple[tuple[str, type[BaseModel], PlanMaker, str, ReplyFormat, type[BaseModel] | None], ...] = (
    ("/v1/completions", CompletionBody, plan_completion, "cmpl-", OPENAI, CompletionReply),
    ("/v1/chat/completions", ChatBody, plan_chat, "chatcmpl-", OPENAI, ChatReply),
    ("/inference/v1/generate", VllmGenerateBody, plan_vllm, "", VLLM, None),
    ("/generate", SglangGenerateBody, plan_sglang, "", SGLANG, None),
)
"""Path, body, the function that makes the plan, the prefix of the request's id, format and model of the reply."""


def session_of(headers: Mapping[str, str]) -> str | None:
    """The session's name. Requests of one session go to one worker, unless it is gone or much busier than others."""
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


def _generation_endpoint(
    choose: ChooseComponent, make_plan: PlanMaker, prefix: str, reply: ReplyFormat
) -> Endpoint:
    async def answer(request: Request) -> Response:
        plan = make_plan(await read_prompts_body(request), prefix + uuid.uuid4().hex)
        session, caller_id = session_of(request.headers), request.headers.get(CALLER_ID, "")
        if session or caller_id:
            plan = replace(plan, session=session, caller_id=caller_id)
        generation = await choose(plan.model)
        if reply is not OPENAI:
            check_temperature(plan, generation.engines.logprobs_modes)
        call = GenerationCall(generation, plan, reply)
        if plan.stream:
            return EventStream(call.stream(), limits=generation.limits)
        return Response(await unless_gone(request.receive, call.whole()), media_type="application/json")

    return answer


def add_generation(
    api: Api,
    method: Method,
    path: str,
    endpoint: Endpoint,
    summary: str,
    reply: type[BaseModel] | None,
    **more: Any,
) -> None:
    """Adds a route that clients of the generation API call, with their shape of an error."""
    shown = {"shape": openai_error, "roles": ("generate",), "replies": () if reply is None else (reply,), **more}
    name = path.strip("/").replace("/", "_")
    api.add(
        Operation(method=method, path=path, endpoint=endpoint, name=name, summary=summary, tags=(TAG,), **shown)
    )


class HealthQuery(Body):
    """`GET /health`"""

    component: str | None = None
    """A component that the frontend serves: a worker of it is there, or 503."""


def add_generation_routes(api: Api, components: ComponentChooser, *, as_engine: bool = False) -> None:
    """`as_engine`: clients take the listener for one engine. Trainers wait for its `/health`, then ask for the model
    at once, so `/health` answers 503 until a worker is there."""
    tokens = Tokens(components.choose)

    async def health(request: Request) -> Response:
        name = request.query_params.get("component")
        if name is not None and name not in components.names:  # callers without a key learn no names
            raise NotFound("it is not served here", field="component", fix="GET /v1/models lists the components")
        generation = components.named(name)
        generation.check_stays()
        if as_engine or name is not None:
            generation.check_served()
        return json_response({"status": "ok"})

    async def models(request: Request) -> Response:
        return json_response(components.list_models())

    add = partial(add_generation, api)
    words = (
        "A worker is there, or 503."
        if as_engine
        else "The frontend runs. `?component=NAME`: a worker of it is there, or 503."
    )
    add("GET", HEALTH, health, words, None, needs_key=False, shape=None, bodies=(HealthQuery,), in_query=True)
    add("GET", "/v1/models", models, "The models and adapters that are served.", ModelList, roles=ANY_KEY)
    for path, body, make_plan, prefix, reply_format, reply in ROUTES:
        add(
            "POST",
            path,
            _generation_endpoint(components.choose, make_plan, prefix, reply_format),
            "Generate from text or tokens; `stream: true` for server-sent events.",
            reply,
            bodies=(body,),
        )
    for path, body, endpoint, summary in (
        ("/tokenize", TokenizeBody, tokens.tokenize, "Text or messages to tokens, by a worker's tokenizer."),
        ("/detokenize", DetokenizeBody, tokens.detokenize, "Tokens to text."),
    ):
        add("POST", path, endpoint, summary, None, bodies=(body,))
    add("POST", RESPONSES, _refuse_responses, "Refused: responses are not kept here.", None)


async def _refuse_responses(request: Request) -> Response:
    raise Unsupported(
        "the Responses API keeps conversations in the server, and a fleet keeps none",
        field="path",
        fix="POST /v1/chat/completions with all messages",
    )

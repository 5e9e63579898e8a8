"""The routes of pooling models: embeddings, classes, scores and rewards, over the fleet's admitted workers."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from frontend.completions.completion_routes import CALLER_ID, add_generation, session_of
from frontend.completions.component_chooser import ChooseComponent
from frontend.completions.served_models import ServedModels
from frontend.pooling.pooled_call import PooledCall
from frontend.pooling.pooling_bodies import ClassifyBody, EmbeddingsBody, PooledReply, ScoreBody, SglangPoolBody
from frontend.pooling.pooling_plans import PooledPlan, plan_classify, plan_embeddings, plan_encode, plan_score
from frontend.server.api import Api, Endpoint
from frontend.server.bodies import read_prompts_body
from frontend.server.event_stream import unless_gone

PlanMaker = Callable[[dict[str, Any], str, ServedModels], PooledPlan]

EMBEDDINGS = "Embeddings of texts or tokens."
CLASSES = "Scores of labels: rewards."
SCORES = "Scores of pairs of texts."

ROUTES: tuple[tuple[str, tuple[type[BaseModel], ...], PlanMaker, str, str, bool], ...] = (
    ("/v1/embeddings", (EmbeddingsBody,), plan_embeddings, "embd-", EMBEDDINGS, True),
    ("/classify", (ClassifyBody, SglangPoolBody), plan_classify, "classify-", CLASSES, False),
    ("/v1/classify", (ClassifyBody,), plan_classify, "classify-", CLASSES, True),
    ("/score", (ScoreBody,), plan_score, "score-", SCORES, True),
    ("/v1/score", (ScoreBody,), plan_score, "score-", SCORES, True),
    ("/encode", (SglangPoolBody,), plan_encode, "", EMBEDDINGS, False),
)
"""Path, bodies, the function that makes the plan, the prefix of the request's id, summary, whether the reply has
`PooledReply`'s form in any case."""


def add_pooling_routes(api: Api, choose: ChooseComponent) -> None:
    for path, bodies, make_plan, prefix, summary, is_listed in ROUTES:
        endpoint, reply = _endpoint(choose, make_plan, prefix), PooledReply if is_listed else None
        add_generation(api, "POST", path, endpoint, summary, reply, bodies=bodies)


def _endpoint(choose: ChooseComponent, make_plan: PlanMaker, prefix: str) -> Endpoint:
    async def answer(request: Request) -> Response:
        body = await read_prompts_body(request)
        model = body.get("model")
        service = await choose(model if isinstance(model, str) else None)
        service.check_stays()
        pooled = make_plan(body, prefix + uuid.uuid4().hex, await service.models_for(None))
        session, caller_id = session_of(request.headers), request.headers.get(CALLER_ID, "")
        pooled = replace(pooled, plan=replace(pooled.plan, session=session, caller_id=caller_id))
        return Response(
            await unless_gone(request.receive, PooledCall(service, pooled).whole()), media_type="application/json"
        )

    return answer

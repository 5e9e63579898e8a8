"""`/tokenize` and `/detokenize` in vLLM's shapes. The tokenizer of any worker answers."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Any

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from frontend.completions.messages import (
    STRICT,
    ChatMessage,
    TemplateBody,
    refuse_in_messages,
    without_nulls_in_messages,
)
from frontend.completions.unserved_fields import without_unserved
from frontend.server.bodies import read_json
from frontend.server.replies import json_response
from rl_plane.client import RlClient
from rl_plane.errors import (
    DeadlineExceeded,
    EngineFailed,
    NotFound,
    NoWorkers,
    PlaneError,
    Unavailable,
    WorkerLost,
    WrongIncarnation,
)
from rl_plane.membership.view import MembershipView
from rl_plane.protocol.generation import MAX_PROMPT_TOKENS, TokenId
from rl_plane.protocol.validation import parse_body
from rl_plane.protocol.worker_ops import Tokenize

MAX_ASKED = 3
"""The number of workers that are asked, one after another, while each dies or leaves before it answers."""


class TokenizeBody(TemplateBody):
    """POST /tokenize: `prompt` or `messages`"""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1)
    add_special_tokens: bool | None = None
    """Add the special tokens that the tokenizer puts around a prompt. Default true, as in `/v1/completions`."""


class DetokenizeBody(BaseModel):
    """POST /detokenize"""

    model_config = STRICT

    model: str | None = None
    tokens: list[TokenId] = Field(max_length=MAX_PROMPT_TOKENS)


def parse_tokenize(body: dict[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """The model, and the body of the workers' op."""
    body = without_nulls_in_messages(without_unserved(body, TokenizeBody))
    refuse_in_messages(body)
    parsed = parse_body(TokenizeBody, body)
    assert isinstance(parsed, TokenizeBody)
    op = {
        "prompt": parsed.prompt,
        "messages": parsed.plain_messages() if parsed.messages is not None else None,
        "tools": parsed.tools or None,
        "documents": parsed.documents or None,
        "chat_template_kwargs": parsed.template_kwargs,
        "add_special_tokens": parsed.add_special_tokens,
        "add_generation_prompt": parsed.add_generation_prompt,
        "continue_final_message": parsed.continue_final_message,
    }
    op = {name: value for name, value in op.items() if value is not None}
    parse_body(Tokenize, op)
    return parsed.model, op


class Tokens:
    """The two routes. `check_model` raises NotFound for a model that is not served."""

    def __init__(
        self, client: RlClient, view: MembershipView, check_model: Callable[[str | None], Awaitable[None]]
    ) -> None:
        self._client = client
        self._view = view
        self._check_model = check_model

    async def tokenize(self, request: Request) -> Response:
        model, op = parse_tokenize(await read_json(request))
        await self._check_model(model)
        reply = await self._ask("tokenize", op)
        tokens = reply["tokens"]
        return json_response(
            {
                "count": len(tokens),
                "max_model_len": reply["max_model_len"],
                "tokens": tokens,
                "token_strs": None,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        parsed = parse_body(DetokenizeBody, await read_json(request))
        assert isinstance(parsed, DetokenizeBody)
        await self._check_model(parsed.model)
        return json_response({"prompt": (await self._ask("detokenize", {"tokens": parsed.tokens}))["prompt"]})

    async def _ask(self, op: str, body: dict[str, Any]) -> dict[str, Any]:
        members = list(self._view.snapshot().members)
        last: PlaneError = NoWorkers("no worker is there", fix="start one: `rl-plane worker`", retry_after_s=1.0)
        for member in random.sample(members, min(MAX_ASKED, len(members))):
            try:
                row = await self._client.call(member.instance_id, op, body)
            except (Unavailable, DeadlineExceeded, EngineFailed) as error:
                last = error
            except (NotFound, WrongIncarnation):
                last = WorkerLost("the worker left just now", instance_id=member.instance_id, retry_after_s=1.0)
            else:
                return dict(row.body)
        raise last

"""`/tokenize` and `/detokenize` in vLLM's shapes. The tokenizer of any worker answers."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from frontend.completions.component_chooser import ChooseComponent
from frontend.completions.messages import STRICT, ChatMessage, TemplateBody, parse_chat
from frontend.completions.unserved_fields import without_unserved
from frontend.server.bodies import read_json
from frontend.server.replies import json_response
from rl_plane.protocol.generation import MAX_PROMPT_TOKENS, TokenId
from rl_plane.protocol.validation import parse_body
from rl_plane.protocol.worker_ops import Tokenize


class TokenizeBody(TemplateBody):
    """The body of `POST /tokenize`: `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1)
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its special tokens. Default true, as in `/v1/completions`."""


class DetokenizeBody(BaseModel):
    """The body of `POST /detokenize`."""

    model_config = STRICT

    model: str | None = None
    tokens: list[TokenId] = Field(max_length=MAX_PROMPT_TOKENS)


def parse_tokenize(body: dict[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """The model, and the body of the workers' op."""
    parsed = parse_chat(TokenizeBody, without_unserved(body, TokenizeBody))
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
    """The two routes. The request's `model` chooses the component whose workers are asked."""

    def __init__(self, choose: ChooseComponent) -> None:
        self._choose = choose

    async def tokenize(self, request: Request) -> Response:
        model, op = parse_tokenize(await read_json(request))
        reply = await self._ask(model, "tokenize", op)
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
        reply = await self._ask(parsed.model, "detokenize", {"tokens": parsed.tokens})
        return json_response({"prompt": reply["prompt"]})

    async def _ask(self, model: str | None, op: str, body: dict[str, Any]) -> dict[str, Any]:
        """Asks a worker that serves the model. Raises NotFound or NoWorkers."""
        generation = await self._choose(model)
        return await generation.ask_any_worker(model, op, body)

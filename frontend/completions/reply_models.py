"""The replies of OpenAI's routes as /docs describes them. The routes build their replies without these models, because
validating every token would cost more than the rest of a call."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from rl_plane.protocol.generation import VersionSpan
from rl_plane.protocol.versions import VersionReply


class ReplyModel(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)


class ModelRow(ReplyModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    parent: str | None
    """The base model of an adapter."""
    root: str
    max_model_len: int | None
    component: str
    """The component that serves it."""
    weight_version: VersionReply | None
    """The committed version of the model or adapter."""


class ModelList(ReplyModel):
    object: Literal["list"]
    data: list[ModelRow]


class Usage(ReplyModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ReplyExtension(ReplyModel):
    instance_id: str
    incarnation: str
    weight_version: VersionReply | None
    """The version that made every token; null if several did, or if it is not known."""
    adapter: dict[str, Any] | None = None
    completion_token_ids: list[Any] | None = None
    token_ids: list[Any] | None = None
    """The prompt's tokens."""


class ReplyChoice(ReplyModel):
    index: int
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "abort", "tool_calls"] | None
    stop_reason: str | int | None
    weight_versions: list[VersionSpan]
    """The version of each range of tokens."""
    instance_id: str
    incarnation: str
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    cut: dict[str, str] | None = None
    """The demand that ended the choice."""


class CompletionChoice(ReplyChoice):
    text: str


class ReplyMessage(ReplyModel):
    role: Literal["assistant"]
    content: str
    tool_calls: list[dict[str, Any]] | None = None
    """The calls that the text has. `tool_choice` has forced them, or the model has made them by itself."""


class ChatChoice(ReplyChoice):
    message: ReplyMessage


class OpenaiReply(ReplyModel):
    id: str
    created: int
    model: str
    usage: Usage
    nvext: ReplyExtension


class CompletionReply(OpenaiReply):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class ChatReply(OpenaiReply):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
